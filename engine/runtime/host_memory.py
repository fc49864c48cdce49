"""Does a model fit the host's memory? For the CPU back end, before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch

from engine.checkpoint.memory import GIB, kv_bytes_per_token, weight_bytes
from engine.config import ModelConfig
from engine.errors import EngineError
from engine.weights import WeightSpec


def available_bytes(root: Path = Path("/")) -> int | None:
    """Memory that can be had without swapping (Linux: proc(5), MemAvailable; cgroup v2, memory.max less what is
    held and cannot be dropped); None where the system does not say."""
    found = []
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        found += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
        group = root / "sys/fs/cgroup"
        limit = (group / "memory.max").read_text().strip()
        held = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        if limit != "max":
            found.append(max(0, int(limit) - int(held["anon"])))
    except (OSError, KeyError, ValueError):  # not Linux, or no cgroup v2
        pass
    return min(found, default=None)


def check_host_fit(
    config: ModelConfig, specs: Iterable[WeightSpec], *, tp: int, dtype: torch.dtype,
    quantization: str | None, max_model_len: int, fp8_kv: bool, available: int | None,
) -> None:  # fmt: skip
    """Raises EngineError if the weights of all ranks and one slot's KV cache need more than `available` bytes
    (None: unknown, nothing is checked). Slots take their memory as they fill, so one is the least. FP8 weights are
    expanded to `dtype` one by one (create.py), so they need what others do."""
    if available is None:
        return
    specs = list(specs)

    def weights_in(dtype: torch.dtype) -> int:
        """lm_head gets an fp32 copy."""
        total = sum(weight_bytes(specs, rank, dtype) for rank in range(tp))
        fp32 = 4 * config.vocab_size * config.hidden_size
        return total + (0 if dtype is torch.float32 else fp32)

    weights = weights_in(dtype)
    kv_per_token = tp * kv_bytes_per_token(config, tp, torch.float8_e4m3fn if fp8_kv else dtype)
    kv = kv_per_token * max_model_len
    if weights + kv <= available:
        return
    shorter = (available - weights) // kv_per_token
    if shorter > 0:
        advice = f"use --max-model-len {shorter} or less"
    elif dtype is torch.float32 and weights_in(torch.bfloat16) + kv <= available:
        advice = "use --dtype bfloat16 (slower on this CPU)"
    else:
        advice = "use a smaller model, or GPUs"
    held = (
        f" in {str(dtype).removeprefix('torch.')}, also with --quantization fp8"
        if quantization
        else ""
    )
    raise EngineError(
        f"{config.name} on the CPU needs {(weights + kv) / GIB:.1f} GiB of memory (weights "
        f"{weights / GIB:.1f} GiB{held}, KV cache of one slot {kv / GIB:.1f} GiB) and "
        f"{available / GIB:.1f} GiB are available; {advice}"
    )
