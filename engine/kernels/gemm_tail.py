"""The last, part-filled wave of a prefill GEMM, split over K ("tail split").

WAVE programs run at once. Tiles up to the last multiple of WAVE are computed whole, one a program, as
without a tail; only the `rest` behind them, too few to fill a wave, are split. Their blocks of K lie
end to end on a line, rest * blocks long, which min(rest * TAIL, WAVE) further programs cut into equal
ranges (the data-parallel and stream-K hybrid of Osama et al., arXiv:2301.03598): all fit one wave,
and a range, never longer than a tile, touches two tiles at most.

The products of one program and one tile are a part. A part that is not all of its tile goes to the
workspace as fp32, slot (program + tile), both counted from the first of the tail: along the line each
step adds one to either, so every part has its own slot and those of one tile follow each other in
order of K. The last to arrive at a tile sums them in that order, columns by columns, so that it holds
a fraction of a tile in registers, and the bits do not depend on who was last.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.gemm_tile import finish_tile, leave_ticket

# Within 255 registers a thread beside the addresses: a quarter of a tile's columns at a time, four parts
# of them under way.
SLICES = tl.constexpr(4)
BATCH = tl.constexpr(4)


@triton.jit
def _tail(T, N, BT: tl.constexpr, BN: tl.constexpr, TAIL: tl.constexpr, WAVE: tl.constexpr):
    """(whole tiles, tiles behind them, programs of those); gemm_config.py's `tail_of`."""
    tiles = tl.cdiv(T, BT) * tl.cdiv(N, BN)
    rest = tiles % WAVE
    return tiles - rest, rest, min(rest * TAIL, WAVE)


@triton.jit
def range_of_program(
    T, N, blocks, BT: tl.constexpr, BN: tl.constexpr, TAIL: tl.constexpr, WAVE: tl.constexpr
):
    """(first, behind the last) block of this program, where tile i has blocks i * blocks and on."""
    whole, rest, programs = _tail(T, N, BT, BN, TAIL, WAVE)
    program = tl.program_id(0)
    begin = program * blocks
    end = begin + blocks
    if program >= whole:
        begin = whole * blocks + (program - whole) * (rest * blocks) // programs
        end = whole * blocks + (program - whole + 1) * (rest * blocks) // programs
    return begin, end


@triton.jit
def blocks_of_tile(tile, begin, end, blocks):
    """(first, behind the last) block of K of one tile in a program's range; never none."""
    first = max(begin - tile * blocks, 0)
    last = min(end - tile * blocks, blocks)
    tl.assume(last > first)  # as in gemm_tile.py's k_blocks
    return first, last


@triton.jit
def _slots(
    partials, slot, column, BT: tl.constexpr, BN: tl.constexpr, WIDTH: tl.constexpr,
    SWAP: tl.constexpr,
):  # fmt: skip
    """Addresses of columns (of y) column .. column + WIDTH - 1 of a slot."""
    n = column + tl.arange(0, WIDTH)
    t = tl.arange(0, BT)
    if SWAP:
        place = n[:, None] * BT + t[None, :]
    else:
        place = t[:, None] * BN + n[None, :]
    return partials + slot.to(tl.int64) * (BT * BN) + place


@triton.jit
def finish_part(
    acc, partials, tickets, tile, blocks, y, tile_t, tile_n,
    BT: tl.constexpr, BN: tl.constexpr, SWAP: tl.constexpr, EPILOGUE: tl.constexpr,
    HAS_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr, TAIL: tl.constexpr, WAVE: tl.constexpr,
):  # fmt: skip
    """Leave this program's part of a tail tile; for the last to arrive: sum the parts, epilogue, re-arm the
    ticket."""
    whole, rest, programs = _tail(y.T, y.N, BT, BN, TAIL, WAVE)
    index = tile - whole
    first = (index * blocks * programs + programs - 1) // (rest * blocks)
    last = ((index + 1) * programs - 1) // rest
    parts = last - first + 1
    own = tl.program_id(0) - whole + index
    tl.store(_slots(partials, own, 0, BT, BN, BN, SWAP), acc)
    if leave_ticket(tickets, index) == parts - 1:
        tl.store(tickets + index, 0)
        if y.x_scale is not None:
            t = tile_t * BT + tl.arange(0, BT)
            row_scale = tl.load(y.x_scale + t, mask=t < y.T, other=0.0)
        WIDTH: tl.constexpr = BN // SLICES
        for place in range(SLICES):
            source = _slots(partials, first + index, place * WIDTH, BT, BN, WIDTH, SWAP)
            total = tl.load(source, cache_modifier=".cg")
            # A range that starts inside a tile may make one part more than TAIL.
            for batch in range(tl.cdiv(TAIL, BATCH)):
                for i in tl.static_range(BATCH):
                    other = batch * BATCH + i + 1
                    total += tl.load(
                        source + other * (BT * BN), mask=other < parts, other=0.0,
                        cache_modifier=".cg",
                    )  # fmt: skip
            if y.x_scale is not None:
                total = total * row_scale[:, None]
            finish_tile(
                total, y, tile_t, tile_n * SLICES + place, BT, WIDTH, SWAP, EPILOGUE, HAS_SCALE,
                HAS_BIAS,
            )  # fmt: skip
