"""Kernels beside the all-reduces of bench/all_reduce_group.py: delays and inputs before, the comparison behind, and a
copy to hold them against."""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.sync import gdc_launch_dependents, gdc_wait, globaltimer


# Integers are never specialised: a value of 1 or a multiple of 16 would be another module, loaded
# while a rank may already spin.
@triton.jit(do_not_specialize=["call", "n", "stride"])
def prepare_kernel(
    x, residual, x_pool, residual_pool, delays, step, call, n, stride,
    POOL: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Wait delays[.] ns, then copy pool row (call + step) % POOL to x and residual: n elements of each of the
    device's ranks (second grid axis), whose tensors are `stride` elements apart."""
    member = tl.program_id(1).to(tl.int64)
    x, residual, delays = x + member * stride, residual + member * stride, delays + member * 1024
    x_pool += member * POOL * stride
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    now = tl.load(step)
    row = (call + now) % POOL
    begin = globaltimer()
    wanted = tl.load(delays + (call * 31 + now * 17) % 1024)
    while globaltimer() - begin < wanted:
        pass
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + at, tl.load(x_pool + row.to(tl.int64) * stride + at, mask=at < n), mask=at < n)
    held = tl.load(residual_pool + row.to(tl.int64) * stride + at, mask=at < n)
    tl.store(residual + at, held, mask=at < n)


@triton.jit(do_not_specialize=["call", "n", "stride", "out_stride"])
def compare_kernel(
    out, expected, found, step, call, n, stride, out_stride, POOL: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr
):  # fmt: skip
    """found[0] += elements that differ from the reference (any NaN equals any NaN); found[1] += a
    hash of all bits, so that equal sums of hashes mean equal bits on all ranks. Poisons `out`. Ranks: as in
    `prepare_kernel`."""
    member = tl.program_id(1).to(tl.int64)
    out, found = out + member * out_stride, found + 2 * member
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    now = tl.load(step)
    row = ((call + now) % POOL).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    bits = tl.load(out + at, mask=at < n, other=0).to(tl.int32) & 0xFFFF
    wanted = tl.load(expected + row * stride + at, mask=at < n, other=0).to(tl.int32) & 0xFFFF
    nan = ((bits & 0x7FFF) > 0x7F80) & ((wanted & 0x7FFF) > 0x7F80)
    tl.atomic_add(found, tl.sum(((bits != wanted) & ~nan).to(tl.int64), 0))
    mixed = (bits + 1).to(tl.int64) * ((at + 1) * 40503 + call * 7919 + now * 104729)
    tl.atomic_add(found + 1, tl.sum(mixed ^ (mixed >> 7), 0))
    tl.store(out + at, tl.full((BLOCK,), 0x7FC1, tl.int16), mask=at < n)


@triton.jit
def advance_kernel(step, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    tl.store(step, tl.load(step) + 1)


@triton.jit(do_not_specialize=["n"])
def copy_kernel(x, out, n, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """The launch floor: a copy of one message."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n), mask=at < n)
