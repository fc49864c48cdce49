"""One row of a two-shot all-reduce, as both of its forms handle it (two_shot.py, two_shot_fused.py).

    h = round16(sum over ranks in order of fp32(x_r) + fp32(residual)),  y = rmsnorm(h), as FP8 if asked

The order of sums, the roundings and the block of the norm are here alone, so the forms give the same bits: those of
`all_reduce_ref`, `rmsnorm` and `rmsnorm_quantize`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.quantize_rows import to_e4m3
from engine.kernels.sync import gdc_launch_dependents, gdc_wait

MOST_REGISTERS = 128  # a thread: two programs of 256 threads a multiprocessor


@triton.jit
def opening(
    peers, WORLD: tl.constexpr, BLOCK: tl.constexpr, THREADS: tl.constexpr, PDL: tl.constexpr
):
    """Wait for the kernel in front. (program, programs, thread, the peer whose flags it handles, that one's buffer,
    columns of a row)"""
    if PDL:
        gdc_launch_dependents()
    program, programs = tl.program_id(0), tl.num_programs(0)
    thread = tl.arange(0, THREADS)
    peer = thread % WORLD
    column = tl.arange(0, BLOCK)
    target = tl.load(peers + peer)
    if PDL:
        gdc_wait()
    return program, programs, thread, peer, target, column


@triton.jit
def reduced_row(
    theirs, mine, stride, residual_row, h_row, gain, peers, last_offset, is_last, rank, H, eps,
    column, inside,
    WORLD: tl.constexpr, RESIDUAL: tl.constexpr, NORM: tl.constexpr, QUANTIZE: tl.constexpr,
    LAST: tl.constexpr,
):  # fmt: skip
    """(what travels back, its FP8 scale) of one row that this rank owns; h is kept at `h_row`, and goes to every rank
    if the row is the request's last.

    theirs: byte address of the row in rank 0's message, rank r's is r * stride bytes further; mine: of this rank's
    own partial sum.
    """
    dtype: tl.constexpr = h_row.dtype.element_ty
    total = tl.zeros(column.shape, tl.float32)
    for r in tl.static_range(WORLD):
        at = tl.where(r == rank, mine, theirs + r * stride).to(tl.pointer_type(dtype))
        part = tl.load(tl.multiple_of(at, 16) + column, mask=inside, other=0.0)
        total += part.to(tl.float32)
    if RESIDUAL:
        total += tl.load(residual_row + column, mask=inside, other=0.0).to(tl.float32)
    # -0.0 becomes +0.0, as one-shot has it
    total = tl.where(total.to(dtype) == 0.0, 0.0, total)
    value = total.to(dtype)
    tl.store(h_row + column, value, mask=inside)
    if LAST:  # noqa: SIM102 (known when compiling; the other when running)
        if is_last:
            for i in tl.static_range(WORLD):
                base = tl.load(peers + (rank + 1 + i) % WORLD)
                last_at = (base + last_offset).to(tl.pointer_type(dtype))
                tl.store(tl.multiple_of(last_at, 16) + column, value, mask=inside)
    y, scale = value, eps
    if NORM:
        # Under way while the sum is taken.
        weight = tl.load(gain + column, mask=inside, other=0.0).to(tl.float32)
        wide = value.to(tl.float32)
        rstd = tl.rsqrt(tl.sum(wide * wide, axis=0) / H + eps)
        y = (wide * rstd * weight).to(dtype)
    if QUANTIZE:
        wide = y.to(tl.float32)
        y, scale = to_e4m3(wide, tl.max(tl.abs(wide), axis=0))
    return y, scale


@triton.jit
def send_row(
    peers, y, scale, row, y_offset, scales_offset, rank, H, column, inside, live,
    WORLD: tl.constexpr, QUANTIZE: tl.constexpr,
):  # fmt: skip
    """y and its scale to every rank's buffer; nothing unless `live`."""
    for i in tl.static_range(WORLD):
        base = tl.load(peers + (rank + 1 + i) % WORLD)
        y_at = (base + y_offset).to(tl.pointer_type(y.dtype))
        tl.store(tl.multiple_of(y_at, 16) + row * H + column, y, mask=inside)
        if QUANTIZE:
            scales = (base + scales_offset).to(tl.pointer_type(tl.float32))
            tl.store(scales + row, scale, mask=live)
