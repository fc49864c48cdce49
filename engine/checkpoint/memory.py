"""Does it fit? Weights, KV cache, workspace and graphs per rank, added up before anything is
allocated."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod

import torch

from engine.checkpoint.fp8 import FP8_DTYPE
from engine.checkpoint.load import find_aliases, is_quantized
from engine.config import ModelConfig
from engine.errors import EngineError
from engine.weights import WeightSpec

GIB = 1 << 30
_CONTEXT_STEP = 256  # a context that is suggested is a multiple of this, and at least this


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes of the fullest rank."""

    weights: int
    kv_per_token: int  # all layers, K and V, of one token of one slot
    context: int  # tokens a slot
    slots: int
    workspace: int
    graphs: int
    exchange: int = 0  # messages between ranks

    @property
    def kv(self) -> int:
        """Bytes of the whole KV cache."""
        return self.kv_per_token * self.context * self.slots

    @property
    def total(self) -> int:
        """Bytes of everything."""
        return self.weights + self.kv + self.workspace + self.exchange + self.graphs


@dataclass(frozen=True)
class MemoryTable:
    """What a deployment needs on each rank and what there is. `str()` is the table for the log."""

    need: MemoryNeed
    device_bytes: int  # total memory of the smallest device
    utilization: float

    @property
    def budget(self) -> int:
        """Bytes that may be used."""
        return int(self.device_bytes * self.utilization)

    @property
    def fits(self) -> bool:
        """Whether everything fits the budget."""
        return self.need.total <= self.budget

    @property
    def largest_context(self) -> int:
        """Tokens a slot that the budget holds beside the rest, 0 if none."""
        n = self.need
        left = self.budget - (n.total - n.kv)
        return max(0, left // (n.kv_per_token * n.slots))

    def __str__(self) -> str:
        n = self.need
        kv = f"KV cache ({n.kv_per_token / 1024:.0f} KiB x {n.context} tokens x {n.slots} slots)"
        rows = [
            ("weights", n.weights),
            (kv, n.kv),
            ("workspace", n.workspace),
            *([("exchange between ranks", n.exchange)] if n.exchange else []),
            ("CUDA graphs", n.graphs),
            ("total per GPU", n.total),
            (f"budget ({_gib(self.device_bytes)} at {self.utilization:.2f})", self.budget),
        ]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {size / GIB:8.2f} GiB" for name, size in rows)


def weight_bytes(
    specs: Iterable[WeightSpec], rank: int, dtype: torch.dtype, quantization: str | None = None
) -> int:
    """Bytes of one rank's weights and scales, exactly as `load_rank` allocates them (tied views:
    0)."""
    specs = list(specs)
    aliases = find_aliases(specs, rank, quantization)
    total = 0
    for spec in specs:
        if spec.name in aliases:
            continue
        shape = spec.local_shape(rank)
        if is_quantized(spec, quantization):
            total += prod(shape) + 4 * shape[0]  # e4m3, one fp32 scale a row
        else:
            total += prod(shape) * dtype.itemsize
    return total


def kv_bytes_per_token(config: ModelConfig, tp: int, dtype: torch.dtype) -> int:
    """K and V of all layers for one token on one rank; dtype: of the cache, e4m3 with one fp32 scale a head
    vector."""
    heads = config.shard(tp).num_kv_heads
    scale = 4 if dtype == FP8_DTYPE else 0
    return 2 * config.num_layers * heads * (config.head_dim * dtype.itemsize + scale)


def check_fit(
    config: ModelConfig,
    specs_at: Callable[[int], Iterable[WeightSpec]],
    *,
    tp: int,
    dtype: torch.dtype,
    quantization: str | None,
    max_model_len: int | None,
    num_slots: int,
    device_bytes: Sequence[int],
    utilization: float = 0.90,
    workspace_bytes: int = 0,
    exchange_bytes: int = 0,
    graph_bytes: int = 0,
    fp8_kv: bool = False,
) -> MemoryTable:
    """The memory table of a deployment. `specs_at(tp)` gives the weight specs at a TP degree;
    `device_bytes` the total memory of each visible device; workspace and graphs are of one rank.
    max_model_len None: the model's own limit, or what memory holds (`table.need.context`).

    Raises EngineError if it does not fit, naming the flags that mend it: other TP degrees on the
    devices at hand, FP8 weights, FP8 KV, a shorter context, fewer slots; only what has been computed to fit."""
    smallest = min(device_bytes)

    def table(
        tp: int, quantization: str | None, context: int, fp8_kv: bool = fp8_kv
    ) -> MemoryTable:
        specs = list(specs_at(tp))
        # The last rank may pad its vocabulary and then cannot share a tied lm_head with the
        # embedding.
        weights = max(weight_bytes(specs, rank, dtype, quantization) for rank in {0, tp - 1})
        kv = kv_bytes_per_token(config, tp, FP8_DTYPE if fp8_kv else dtype)
        need = MemoryNeed(
            weights, kv, context, num_slots, workspace_bytes, graph_bytes, exchange_bytes
        )
        return MemoryTable(need, smallest, utilization)

    asked = table(tp, quantization, max_model_len or _CONTEXT_STEP)
    if asked.fits and max_model_len is None:
        context = min(config.max_position_embeddings, _round_down(asked.largest_context))
        return table(tp, quantization, context)
    if asked.fits:
        return asked
    wider = [n for n in config.valid_tp() if tp < n <= len(device_bytes)]
    remedies = _remedies(table, asked, wider, tp, quantization)
    if not remedies:
        enough = (n for n in config.valid_tp() if n > len(device_bytes))
        count = next((n for n in enough if table(n, "fp8", _CONTEXT_STEP).fits), None)
        advice = (
            f"nothing fits the {len(device_bytes)} GPU(s) present; {count} of them would do with fp8"
            if count
            else "no setting of this engine fits such GPUs; take a smaller model"
        )
    else:
        advice = f"use {' or '.join(remedies)}"
    need = asked.need
    raise EngineError(
        f"{config.name} at --tp {tp} needs {_gib(need.total)} per GPU (weights {_gib(need.weights)}, "
        f"KV cache {_gib(need.kv)}); {_gib(smallest)} at {utilization:.2f} is {_gib(asked.budget)}; "
        f"{advice}"
    )


def _remedies(
    table: Callable[..., MemoryTable],
    asked: MemoryTable,
    wider: list[int],
    tp: int,
    quantization: str | None,
) -> list[str]:
    """Flags that make it fit: single ones if there are any, else the first pair that does."""
    context, slots = asked.need.context, asked.need.slots
    found = [f"--tp {n}" for n in wider if table(n, quantization, context).fits][:1]
    if quantization is None and table(tp, "fp8", context).fits:
        found.append("--quantization fp8")
    smaller = table(tp, quantization, context, fp8_kv=True)
    if smaller.need.kv < asked.need.kv and smaller.fits:
        found.append("--kv-cache-dtype fp8")
    shorter = _round_down(asked.largest_context)
    if shorter:
        found.append(f"--max-model-len {shorter}")
    fewer = asked.largest_context * slots // context  # slots of the asked context
    if fewer:
        found.append(f"--max-num-seqs {fewer}")
    if found:
        return found
    fp8: list[tuple[int, str | None, str]] = []  # (TP degree, quantisation, the flags that say so)
    if quantization is None:
        fp8 = [(n, "fp8", f"--tp {n} --quantization fp8") for n in wider]
    for n, q, flags in fp8:
        if table(n, q, context).fits:
            return [flags]
    if quantization is None:
        fp8.insert(0, (tp, "fp8", "--quantization fp8"))
    for n, q, flags in [(n, quantization, f"--tp {n}") for n in wider] + fp8:
        shorter = _round_down(table(n, q, context).largest_context)
        if shorter:
            return [f"{flags} --max-model-len {shorter}"]
    return []


def _round_down(context: int) -> int:
    return context // _CONTEXT_STEP * _CONTEXT_STEP


def _gib(nbytes: float) -> str:
    return f"{nbytes / GIB:.1f} GiB"
