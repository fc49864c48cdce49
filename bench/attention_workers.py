"""Compile and check attention configs in worker processes, so that a wrong or hanging one dies alone.

A worker runs each config against the fp32 reference on odd contexts with poisoned tails, many times over: all runs
must agree bit by bit and leave the tickets at zero. Compiled kernels land in Triton's disk cache, where the main
process finds them.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import triton
import triton.language as tl

from bench.workers import task_file
from engine.kernels import decode_attention as decode
from engine.kernels import prefill_attention as prefill
from engine.kernels.kv_fp8 import KVScales
from engine.kernels.quantize_rows import FP8, quantize_rows_ref
from engine.kernels.sync import gdc_launch_dependents, gdc_wait

# Relative RMS error of a row: bf16 rounding of the result gives 2^-8 / sqrt(12) * 1.4 = 1.6e-3, that of the
# softmax weights as much again at most, independent of it; single rows of 64 values scatter by a quarter.
# Prefill over FP8 KV rounds K and V to bf16 too: half as much again.
TOLERANCE = 4e-3
REPEATS = 30
DEVICE = "cuda"


@dataclass(frozen=True)
class Shape:
    """Heads of one rank, over a bf16 or an e4m3 cache."""

    model: str
    tp: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    fp8_kv: bool = False

    @property
    def kv_dtype(self) -> torch.dtype:
        return FP8 if self.fp8_kv else torch.bfloat16

    @property
    def token_bytes(self) -> int:
        """K and V of one token, scales included."""
        head = self.head_dim * self.kv_dtype.itemsize + (4 if self.fp8_kv else 0)
        return 2 * self.num_kv_heads * head

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def heads(self) -> dict[str, int]:
        return dict(
            num_heads=self.num_heads, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim
        )

    @property
    def kwargs(self) -> dict:
        return {**self.heads, "scale": self.head_dim**-0.5}


@dataclass(frozen=True)
class Variant:
    """One compiled kernel."""

    shape: Shape
    config: decode.DecodeAttentionConfig | prefill.PrefillAttentionConfig

    @property
    def op(self) -> str:
        is_decode = isinstance(self.config, decode.DecodeAttentionConfig)
        return "decode_attention" if is_decode else "prefill_attention"


@triton.jit
def late_write_kernel(out_ptr, source_ptr, SIZE: tl.constexpr, WAIT: tl.constexpr):
    """Stands for the QKV GEMV: lets its dependent start, takes its time, then copies source, bytes, to out."""
    gdc_launch_dependents()
    gdc_wait()
    offs = tl.program_id(0) * 128 + tl.arange(0, 128)
    inside = offs < SIZE
    value = tl.load(source_ptr + offs, mask=inside, other=0).to(tl.float32)
    for _ in range(WAIT):
        value = tl.exp2(tl.log2(tl.abs(value) + 1.0)) - 1.0
    late = tl.load(source_ptr + offs, mask=inside, other=0)
    tl.store(out_ptr + offs, late, mask=inside & (value > -1.0))


def late_write(out: torch.Tensor, source: torch.Tensor) -> None:
    """out[...] = source[...], contiguous and of one type, some microseconds late."""
    out, source = (x.reshape(-1).view(torch.uint8) for x in (out, source))
    late_write_kernel[(triton.cdiv(out.numel(), 128),)](
        out, source, SIZE=out.numel(), WAIT=3000, num_warps=4, launch_pdl=True
    )


def random_kv(shape: Shape, slots: int, length: int) -> tuple[list[torch.Tensor], KVScales | None]:
    """K and V [slots, NKV, length, D] of size 1; e4m3 with scales that differ by up to 2 between tokens."""
    caches = [
        torch.randn(slots, shape.num_kv_heads, length, shape.head_dim, device=DEVICE) for _ in "kv"
    ]
    if not shape.fp8_kv:
        return [x.bfloat16() for x in caches], None
    codes, scales = zip(*(quantize_rows_ref(x) for x in caches))
    return list(codes), (scales[0], scales[1])


def poison(caches: list[torch.Tensor], scales: KVScales | None, index: tuple) -> None:
    """NaN at `index` of [slots, NKV, length]: codes and scales."""
    for x in caches:
        if scales is None:
            x[index] = float("nan")
        else:
            x.view(torch.uint8)[index] = 0x7F
    for scale in scales or ():
        scale[index] = float("nan")


def rms(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest over rows of the relative RMS error; rows of zeros must be zeros."""
    error = (got.float() - want.float()).norm(dim=1)
    size = want.float().norm(dim=1)
    ratio = torch.where(size > 0, error / size, torch.where(error > 0, float("inf"), 0.0))
    return ratio.max().item()


def check_decode(shape: Shape, config: decode.DecodeAttentionConfig) -> float:
    """Relative RMS error over contexts around tile and merge edges; inf if any two runs differ."""
    contexts = [1, 64, 65, 700, 4097, 8190]
    slots = [5, 0, -1, 1, 2, 3, 4, 5]
    nkv, d, max_len = shape.num_kv_heads, shape.head_dim, 8192
    (k, v), scales = random_kv(shape, 6, max_len)
    for slot, n in enumerate(contexts):
        poison([k, v], scales, (slot, slice(None), slice(n, None)))
    positions = torch.tensor(contexts, dtype=torch.int32, device=DEVICE) - 1
    row_slots = torch.tensor(slots, dtype=torch.int32, device=DEVICE)
    q = torch.randn(8, shape.num_heads * d, device=DEVICE).bfloat16()
    want = decode.decode_attention_ref(
        q.float(), k, v, positions, row_slots, scales=scales, **shape.kwargs
    )
    space = decode.workspace(8, shape.num_heads, nkv, d, config.num_splits, DEVICE)
    outs = []
    for i in range(REPEATS):
        out = torch.full_like(q, float("nan"))
        fast = bool(i % 2)
        decode.decode_attention(
            q, k, v, positions, row_slots, out, space, **shape.kwargs, scales=scales, config=config,
            pdl=fast, prefetch=fast,
        )  # fmt: skip
        outs.append(out)
    alone = torch.full_like(q[:1], float("nan"))
    decode.decode_attention(
        q[:1], k, v, positions, row_slots[:1], alone, space, **shape.kwargs, scales=scales,
        config=config,
    )  # fmt: skip
    torch.cuda.synchronize()
    if space.tickets.any() or not all(torch.equal(out, outs[0]) for out in outs):
        return float("inf")
    return rms(outs[0], want) if torch.equal(alone[0], outs[0][0]) else float("inf")


def check_late_writer(shape: Shape, config: decode.DecodeAttentionConfig) -> float:
    """PDL with prefetch behind kernels that write q and the newest K and V late: is the new row seen?"""
    nkv, d, max_len = shape.num_kv_heads, shape.head_dim, 1024
    assert nkv == 1
    worst = 0.0
    for context in (1, 64, 65, 128, 700, 1024):
        (k, v), scales = random_kv(shape, 1, max_len)
        source = torch.randn(1, shape.num_heads * d, device=DEVICE).bfloat16()
        new = (0, 0, slice(context - 1, context))
        late = [x[new].clone() for x in (k, v, *(scales or ()))]
        positions = torch.tensor([context - 1], dtype=torch.int32, device=DEVICE)
        row_slots = torch.zeros(1, dtype=torch.int32, device=DEVICE)
        args = (positions, row_slots)
        want = decode.decode_attention_ref(
            source.float(), k, v, *args, scales=scales, **shape.kwargs
        )
        poison([k, v], scales, (0, 0, slice(context - 1, None)))
        q = torch.full_like(source, float("nan"))
        out = torch.full_like(q, float("nan"))
        space = decode.workspace(1, shape.num_heads, 1, d, config.num_splits, DEVICE)
        torch.cuda.synchronize()
        for x, value in zip((k, v, *(scales or ())), late):
            late_write(x[new], value)
        late_write(q, source)
        decode.decode_attention(
            q, k, v, *args, out, space, **shape.kwargs, scales=scales, config=config, pdl=True,
            prefetch=True,
        )  # fmt: skip
        torch.cuda.synchronize()
        error = rms(out, want)
        worst = max(worst, error if error == error else float("inf"))
    return worst


def check_prefill(shape: Shape, config: prefill.PrefillAttentionConfig) -> float:
    """Relative RMS error of a padded chunk behind a prefix off every tile edge."""
    tokens, start, length, d = 400, 333, 391, shape.head_dim
    (k, v), scales = random_kv(shape, 2, 1024)
    poison([k, v], scales, (1, slice(None), slice(start + length, None)))
    q = torch.randn(tokens, shape.num_heads * d, device=DEVICE).bfloat16()
    q[length:] = float("nan")
    request = torch.tensor([1, start, length], dtype=torch.int32, device=DEVICE)
    out = torch.full_like(q, float("nan"))
    prefill.prefill_attention(q, k, v, request, out, **shape.kwargs, scales=scales, config=config)
    want = prefill.prefill_attention_ref(
        q.float(), k, v, 1, start, length, scales=scales, **shape.kwargs
    )
    torch.cuda.synchronize()
    return rms(out, want) if not out[length:].any() else float("inf")


def check(variant: Variant) -> float:
    if isinstance(variant.config, prefill.PrefillAttentionConfig):
        return check_prefill(variant.shape, variant.config)
    error = check_decode(variant.shape, variant.config)
    if variant.shape.num_kv_heads == 1:
        error = max(error, check_late_writer(variant.shape, variant.config))
    return error


def check_all(variants: list[Variant], processes: int, limit_s: float) -> set[Variant]:
    """The variants that are right; one printed line for each that is not."""
    deadline = time.perf_counter() + limit_s
    with ThreadPoolExecutor(processes) as threads:
        # Neighbours share compiled kernels (num_splits is none of their constants): keep them together.
        size = -(-len(variants) // processes)
        parts = [variants[i : i + size] for i in range(0, len(variants), size)]
        found = threads.map(lambda part: _drive(part, deadline), parts)
        return {variant for part in found for variant in part}


def _drive(queue: list[Variant], deadline: float) -> list[Variant]:
    """Run workers until the queue is empty: after a death the next one starts behind the culprit."""
    good: list[Variant] = []
    while queue:
        left = deadline - time.perf_counter()
        if left <= 0:
            print(f"  dropped {len(queue)} configs: out of time, first {queue[0].config}")
            break
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "queue.json"
            path.write_text(json.dumps([{**asdict(v), "op": v.op} for v in queue]))
            log = (Path(folder) / "log").open("w+")
            command = [sys.executable, "-m", "bench.attention_workers", str(path)]
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
            try:
                process.wait(min(left, 20.0 + 6.0 * len(queue)))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            log.seek(0)
            lines = log.read().splitlines()
        errors = [json.loads(line)["error"] for line in lines if line.startswith('{"error"')]
        for error, variant in zip(errors, queue):
            if isinstance(error, float) and error < TOLERANCE * (
                1.5 if variant.shape.fp8_kv else 1
            ):
                good.append(variant)
            else:
                print(
                    f"  dropped {variant.shape.model}/{variant.shape.tp} {variant.config}: {error}"
                )
        queue = queue[len(errors) :]
        if queue:
            print(f"  dropped {queue[0].config}: worker died: {(lines or [''])[-1][:160]}")
            queue = queue[1:]
    return good


def main(path: str) -> None:
    classes = {
        "decode_attention": decode.DecodeAttentionConfig,
        "prefill_attention": prefill.PrefillAttentionConfig,
    }
    for item in json.loads(Path(path).read_text()):
        variant = Variant(Shape(**item["shape"]), classes[item["op"]](**item["config"]))
        try:
            error: float | str = check(variant)
        except Exception as e:
            error = f"{type(e).__name__}: {(str(e).strip().splitlines() or [''])[0][:160]}"
        print(json.dumps({"error": error}), flush=True)
        if isinstance(error, str) and "CUDA" in error:
            return  # the context is lost: a fresh process goes on


if __name__ == "__main__":
    main(task_file("bench.attention"))
