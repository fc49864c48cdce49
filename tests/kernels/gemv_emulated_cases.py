"""Child process of test_gemv_ring.py: compiles ring GEMVs for sm_90, runs their PTX in the emulator.

Prints one JSON object: case name -> the largest |error| over its tolerance (must be <= 1), and "bits": whether
every row is bit-identical alone and among others.
"""

from __future__ import annotations

import json
import sys

import torch

from engine.kernels.all_reduce import all_reduce_ref
from engine.kernels.epilogue import Push, Residual, RopeAppend, SiluMul, Store
from engine.kernels.gemv import GemvConfig, gemv_ref, plan_gemv
from engine.kernels.gemv_config import simple_config
from engine.kernels.gemv_poll import Poll
from tests.kernels import ptx_emulator
from tests.kernels.compile_sm90 import compile_launch, describe_launch

FP8 = torch.float8_e4m3fn


def emulate(x, w, epilogue, config, extra=(), **operands) -> None:
    """What `gemv(...)` does, on the CPU through the PTX."""
    kernel, grid, arguments = plan_gemv(x, w, epilogue, config=config, pdl=True, **operands)
    report = compile_launch(kernel, arguments, keep_text=True)
    signature, *_ = describe_launch(kernel, arguments)
    values = [arguments[name] for name in kernel.arg_names if name in signature]
    ptx_emulator.launch(report.ptx, grid[0], report.shared_bytes, values, extra)


def ring(block_n, block_k, stages, num_warps, warps_k, programs, programs_per_sm=1) -> GemvConfig:
    return GemvConfig(
        "ring", block_n, block_k, num_warps, stages, programs, warps_k, programs_per_sm
    )


class Operands:
    """Random operands; W about unit variance, x bf16 (or the weight's 16-bit type)."""

    def __init__(self, rows, n, k, weight, *, norm=False, bias=False, x_dtype=None):
        self.dtype = x_dtype or (torch.bfloat16 if weight == FP8 else weight)
        self.x = torch.randn(rows, k).to(self.dtype)
        self.w = torch.randn(n, k).to(weight)
        self.extras = dict(
            scale=torch.rand(n) + 0.5 if weight == FP8 else None,
            bias=torch.randn(n).to(self.dtype) if bias else None,
            norm_weight=(torch.rand(k) + 0.5).to(self.dtype) if norm else None,
            eps=1e-5,
        )
        self.rows, self.n, self.k, self.norm = rows, n, k, norm

    def tolerance(self) -> float:
        """One rounding of x * rstd * g to 16 bits (2^-9 relative for bf16, 2^-11 fp16), random signs: times
        sqrt(K); 6 sigma of |w| <= 1.5 scaled; plus the output's own rounding, checked relative."""
        step = 2.0**-9 if self.norm and self.w.dtype == torch.bfloat16 else 2.0**-11
        return 6 * 1.5 * 1.5 * step * self.k**0.5

    def error(self, actual, expected) -> float:
        actual, expected = actual.float(), expected.float()
        if not torch.isfinite(actual).all():
            return float("inf")
        limit = self.tolerance() + expected.abs() * 2.0**-7
        return ((actual - expected).abs() / limit).max().item()


def poison(*shape, dtype=torch.bfloat16):
    return torch.full(shape, float("nan"), dtype=dtype)


def store(rows, n, k, weight, config, **kind) -> float:
    o = Operands(rows, n, k, weight, **kind)
    e = Store(poison(rows, n, dtype=torch.float32))
    emulate(o.x, o.w, e, config, **o.extras)
    return o.error(e.out, gemv_ref(o.x, o.w, e, **o.extras))


def residual(rows, n, k, weight, config) -> float:
    o = Operands(rows, n, k, weight)
    h = torch.randn(rows, n).to(o.dtype) * 30
    expected = gemv_ref(o.x, o.w, Residual(h, h), **o.extras)
    emulate(o.x, o.w, Residual(h, h), config, **o.extras)
    return o.error(h, expected)


def silu(rows, n, k, weight, config) -> float:
    o = Operands(rows, n, k, weight, norm=True)
    o.w = (o.w.float() / 16).to(weight)
    e = SiluMul(poison(rows, n // 2, dtype=o.dtype))
    emulate(o.x, o.w, e, config, **o.extras)
    return o.error(e.out, gemv_ref(o.x, o.w, e, **o.extras))


def rope(rows, k, weight, config, prefetch) -> float:
    heads, kv_heads, dim, slots, length = 3, 2, 16, 9, 12
    o = Operands(rows, (heads + 2 * kv_heads) * dim, k, weight, norm=True, bias=True)
    angle = torch.rand(length, dim // 2) * 6.28
    cos_sin = torch.stack((angle.cos(), angle.sin()), -1).flatten(1).contiguous()
    cache = [torch.full((slots, kv_heads, length, dim), 7.0, dtype=o.dtype) for _ in range(4)]
    positions = torch.randperm(length)[:slots].int()
    row_slots = torch.randperm(slots)[:rows].int()
    if rows > 1:
        row_slots[1] = -1
    q = poison(rows, heads * dim, dtype=o.dtype)
    common = (cos_sin, positions, row_slots, heads, kv_heads, dim)
    expected = gemv_ref(o.x, o.w, RopeAppend(q, cache[0], cache[1], *common), **o.extras)
    written = RopeAppend(q, cache[2], cache[3], *common)
    emulate(o.x, o.w, written, config, prefetch=prefetch, **o.extras)
    live = row_slots >= 0
    return max(
        o.error(q[live], expected[live]),
        o.error(q, q),  # padding rows: finite
        o.error(cache[2], cache[0]),
        o.error(cache[3], cache[1]),
    )


def push(rows, n, k, weight, config, rank=1, world=2) -> float:
    o = Operands(rows, n, k, weight)
    o.w[3] = 0.0
    size, first = rows * n, 32
    buffers = [
        torch.full((first + world * size + 16,), -32768, dtype=torch.int16) for _ in range(world)
    ]
    table = torch.tensor([b.data_ptr() for b in buffers])
    e = Push(table, first * 2, rank, world)
    emulate(o.x, o.w, e, config, extra=buffers, **o.extras)
    expected = gemv_ref(o.x, o.w, e, **o.extras)
    worst = 0.0
    for buffer in buffers:
        begin = first + rank * size
        got = buffer[begin : begin + size]
        rest = torch.cat((buffer[:begin], buffer[begin + size :]))
        if (got == -32768).any() or (rest != -32768).any():
            return float("inf")
        worst = max(worst, o.error(got.view(o.dtype).view(rows, n), expected))
    return worst


def polled(rows, n, k, weight, config, world=2) -> bool:
    """A poll in the prologue: the bits of h and of y are those of the sum and the same GEMV on it; another slot
    is re-armed whole, and nothing else. y is fp32 and h from 1 to 2^8, so that another order of the squares' sum
    shows in about every other row."""
    o = Operands(rows, n, k, weight, norm=True)
    o.x *= 2.0 ** torch.randint(9, (rows, k))
    partials = [torch.randn(rows, k).to(o.dtype) for _ in range(world)]
    size = world * rows * k
    buffer = torch.full((3 * size,), 0x1234, dtype=torch.int16)
    buffer[size : 2 * size] = torch.stack(partials).view(torch.int16).flatten()
    before = buffer.clone()
    before[2 * size :] = -32768
    hidden = poison(rows, k, dtype=o.dtype)
    y, want = (poison(rows, n, dtype=torch.float32) for _ in range(2))
    status = torch.zeros(8, dtype=torch.int32)
    poll = Poll(buffer, size * 2, size * 4, hidden, status, world - 1, world, 5)
    emulate(o.x, o.w, Store(y), config, (buffer, status), poll=poll, **o.extras)
    h = all_reduce_ref(partials, o.x)
    emulate(h, o.w, Store(want), config, **o.extras)
    same = [(hidden, h), (y, want), (buffer, before)]
    return bool(torch.isfinite(want).all()) and all(
        torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in same
    )


def large_activations(config) -> float:
    """bf16 x beyond fp16's range and far below it, FP8 weights: relative to the row's largest output."""
    o = Operands(3, 32, 512, FP8)
    o.x[0, 7] = 3.0e5
    o.x[1] *= 1e-30
    o.x[2] = 0.0
    e = Store(poison(3, 32, dtype=torch.float32))
    emulate(o.x, o.w, e, config, **o.extras)
    expected = gemv_ref(o.x, o.w, e, **o.extras)
    error = (e.out - expected).abs().amax(1) / expected.abs().amax(1).clamp(min=1e-37)
    # Exact powers of two; elements below 2^-29 of the row's largest lose bits (2^-25 of it each).
    return (error.max() / (512 * 2.0**-22)).item()


def same_bits(rows, n, k, weight, config, **kind) -> bool:
    """Row r alone, among 2, and among all gives the same bits."""
    o = Operands(rows, n, k, weight, **kind)
    full = Store(poison(rows, n, dtype=torch.float32))
    emulate(o.x, o.w, full, config, **o.extras)
    same = bool(torch.isfinite(full.out).all())
    for first, count in ((0, 1), (rows - 1, 1), (1, 2)):
        part = Store(poison(count, n, dtype=torch.float32))
        emulate(o.x[first : first + count].clone(), o.w, part, config, **o.extras)
        same &= torch.equal(part.out, full.out[first : first + count])
    return same


BF16, FP16 = torch.bfloat16, torch.float16
CASES = {
    "store fp8 norm": lambda: store(
        1, 40, 1024, FP8, ring(32, 512, 3, 4, 2, 2), norm=True, bias=True
    ),
    "store fp8 8 rows": lambda: store(8, 40, 1024, FP8, ring(32, 512, 3, 4, 2, 2), norm=True),
    "store fp8 fp16 x": lambda: store(3, 22, 528, FP8, ring(16, 512, 4, 4, 4, 3), x_dtype=FP16),
    "store bf16 norm": lambda: store(1, 70, 1000, BF16, ring(32, 256, 4, 8, 4, 1), norm=True),
    "store bf16": lambda: store(5, 70, 1000, BF16, ring(16, 256, 4, 4, 4, 2), bias=True),
    "store fp16": lambda: store(2, 33, 776, FP16, ring(32, 128, 6, 4, 2, 2)),
    "residual fp8 shard": lambda: residual(1, 20, 3696, FP8, ring(16, 1024, 4, 8, 8, 2)),
    "residual bf16": lambda: residual(4, 48, 512, BF16, ring(16, 512, 3, 4, 4, 2)),
    "silu fp8": lambda: silu(1, 44, 1024, FP8, ring(16, 1024, 3, 8, 8, 4)),
    "silu bf16 7 rows": lambda: silu(7, 36, 520, BF16, ring(32, 256, 3, 8, 4, 2)),
    "rope fp8": lambda: rope(1, 512, FP8, ring(16, 512, 3, 4, 4, 7), prefetch=False),
    "rope fp8 6 rows": lambda: rope(6, 512, FP8, ring(32, 512, 3, 4, 2, 3), prefetch=True),
    "push fp8": lambda: push(1, 34, 512, FP8, ring(16, 512, 4, 4, 4, 2)),
    "push bf16 3 rows": lambda: push(3, 34, 512, BF16, ring(16, 512, 4, 4, 4, 2), rank=2, world=3),
    "x from L2": lambda: store(8, 16, 12304, FP8, ring(16, 1024, 6, 8, 8, 1), norm=True),
    "x from L2, scaled": lambda: store(8, 16, 12304, FP8, ring(16, 1024, 6, 8, 8, 1)),
    "x from L2, bf16": lambda: store(8, 16, 12304, BF16, ring(16, 512, 4, 8, 8, 1)),
    "large activations": lambda: large_activations(ring(16, 512, 3, 4, 4, 2)),
}
BITS = {
    "fp8 norm": lambda: same_bits(
        4, 16, 1040, FP8, ring(16, 512, 3, 4, 4, 1), norm=True, bias=True
    ),
    "fp8 scaled": lambda: same_bits(8, 16, 1040, FP8, ring(16, 1024, 3, 8, 8, 1)),
    "bf16 norm": lambda: same_bits(8, 16, 1032, BF16, ring(16, 512, 3, 4, 4, 1), norm=True),
    "poll fp8": lambda: polled(1, 24, 1536, FP8, ring(16, 512, 3, 4, 4, 3)),
    "poll bf16 2 rows": lambda: polled(2, 12, 2056, BF16, ring(16, 512, 3, 8, 8, 1)),
    "poll fp16 3 rows of 4": lambda: polled(3, 12, 520, FP16, ring(16, 256, 3, 4, 4, 2), world=4),
    "poll scattered groups": lambda: polled(1, 16, 4200, BF16, ring(16, 256, 3, 4, 4, 2), world=3),
    "poll plain bf16": lambda: polled(4, 8, 448, BF16, simple_config(160, 448, BF16)),
    "poll plain fp8": lambda: polled(4, 8, 1040, FP8, simple_config(160, 1040, FP8)),
    "poll plain 2 a thread": lambda: polled(4, 8, 256, BF16, simple_config(160, 256, BF16)),
    "poll plain one warp": lambda: polled(8, 8, 128, FP16, simple_config(160, 128, FP16), world=4),
    "x staged or not": lambda: same_bits(8, 16, 9232, FP8, ring(16, 1024, 8, 8, 8, 1), norm=True),
}


def main(names: list[str]) -> None:
    results: dict[str, float | bool] = {}
    for table in (CASES, BITS):
        for name, case in table.items():
            if not names or name in names:
                torch.manual_seed(7)
                results[name] = case()
                print(name, results[name], file=sys.stderr, flush=True)
    print(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1:])
