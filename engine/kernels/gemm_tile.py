"""Device code that the GEMM kernels share: the order of tiles, tile loads, the conversion of FP8 weights,
the meeting of split-K parts, the epilogue.

Letters: BT rows of x, BN weight rows, BK of the shared dimension in a tile. SWAP: the accumulator is
[BN, BT] instead of [BT, BN].
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from engine.kernels.sync import INTERPRET

STORE = tl.constexpr(0)
RESIDUAL = tl.constexpr(1)
SILU_MUL = tl.constexpr(2)
SCATTER = tl.constexpr(3)

# Four e4m3 -> four bf16. S EEEE MMM is sign-extended to 16 bits, shifted to the place of bf16's
# sign, low exponent and high mantissa bits, and scaled by 2^120, the difference of the two exponent
# biases; subnormals come out right because bf16 has them too. Four instructions for two values; the
# compiler's own way (through fp16) needs F2F, which runs at a quarter of the rate. e4m3's NaN
# (0x7f, 0xff) would read as 480: weights hold none.
E4M3_TO_BF16 = tl.constexpr("""
{
.reg .b32 lo, hi, two120;
mov.b32 two120, 0x7b807b80;
prmt.b32 lo, $2, 0, 0x9180;
prmt.b32 hi, $2, 0, 0xb3a2;
shl.b32 lo, lo, 4;
shl.b32 hi, hi, 4;
and.b32 lo, lo, 0x87f087f0;
and.b32 hi, hi, 0x87f087f0;
mul.rn.bf16x2 $0, lo, two120;
mul.rn.bf16x2 $1, hi, two120;
}
""")


class Output(NamedTuple):
    """Where y [T, N] goes and what its epilogue takes, as in a kernel's arguments."""

    out: tl.tensor
    residual: tl.tensor  # SCATTER: `epilogue.Scatter.far`
    x_scale: tl.tensor | None  # of W8A8 alone
    scale: tl.tensor
    bias: tl.tensor
    T: tl.tensor
    N: tl.tensor
    out_stride: tl.tensor
    res_stride: tl.tensor  # SCATTER: the rows of a shard


@triton.jit
def upcast_fp8(w, dtype: tl.constexpr):
    """e4m3 -> dtype, exact for every finite value (fp32 in the interpreter, whose dot wants it)."""
    if INTERPRET:
        return w.to(tl.float32)
    elif dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            E4M3_TO_BF16,
            "=r,=r,r",
            [w],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=4,
        )
    else:
        return w.to(dtype)


@triton.jit
def load_tile(
    source, row, k, rows, K, stride, BR: tl.constexpr, BK: tl.constexpr, TMA: tl.constexpr
):
    """[BR, BK] of a [rows, K] matrix; zeros outside. `source` is a TMA descriptor or a pointer."""
    if TMA:
        return source.load([row, k])
    else:
        r = row + tl.arange(0, BR)[:, None]
        c = k + tl.arange(0, BK)[None, :]
        inside = (r < rows) & (c < K)
        return tl.load(source + r.to(tl.int64) * stride + c, mask=inside, other=0.0)


@triton.jit
def dot(a, b, acc, PROMOTE: tl.constexpr):
    """acc + a @ b, fp32; of FP8 operands short of it (gemm_kernel.py), unless PROMOTE or in the interpreter."""
    if INTERPRET:  # it would multiply the bit patterns of bf16
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    elif PROMOTE:  # max_num_imprecise_acc would add before the wait for the wgmma
        return acc + tl.dot(a, b)
    else:
        return tl.dot(a, b, acc)


@triton.jit
def _across(v, SWAP: tl.constexpr):
    """A vector over weight rows, shaped to broadcast over the accumulator."""
    if SWAP:
        return v[:, None]
    else:
        return v[None, :]


@triton.jit
def _along(v, SWAP: tl.constexpr):
    """A vector over tokens, likewise."""
    if SWAP:
        return v[None, :]
    else:
        return v[:, None]


@triton.jit
def _offsets(t, n, stride, SWAP: tl.constexpr):
    if SWAP:
        return t[None, :].to(tl.int64) * stride + n[:, None]
    else:
        return t[:, None].to(tl.int64) * stride + n[None, :]


@triton.jit
def _inside(t, n, T, N, SWAP: tl.constexpr):
    if SWAP:
        return (t[None, :] < T) & (n[:, None] < N)
    else:
        return (t[:, None] < T) & (n[None, :] < N)


@triton.jit
def owners(t, T, far, S):
    """Rows t -> (row in its owner's shard of S rows, 16-bit elements from the own memory to the owner's)."""
    owner = t // S
    away = tl.load(far + owner, mask=t < T, other=0) // 2
    return t - owner * S, tl.multiple_of(away, 8)


@triton.jit
def finish_tile(
    acc, y, tile_t, tile_n, BT: tl.constexpr, BN: tl.constexpr, SWAP: tl.constexpr,
    EPILOGUE: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """acc fp32 ([BN, BT] if SWAP, else [BT, BN]) -> scale, bias, epilogue, one rounding, store."""
    T, N, out = y.T, y.N, y.out
    t = tile_t * BT + tl.arange(0, BT)
    n = tile_n * BN + tl.arange(0, BN)
    if HAS_SCALE:
        acc = acc * _across(tl.load(y.scale + n, mask=n < N, other=0.0), SWAP)
    if HAS_BIAS:
        acc = acc + _across(tl.load(y.bias + n, mask=n < N, other=0.0).to(tl.float32), SWAP)
    if EPILOGUE == SILU_MUL:
        if SWAP:
            pairs = tl.permute(tl.reshape(acc, [BN // 2, 2, BT]), (0, 2, 1))
        else:
            pairs = tl.reshape(acc, [BT, BN // 2, 2])
        gate, up = tl.split(pairs)
        acc = gate / (1.0 + tl.exp(-gate)) * up
        n = tile_n * (BN // 2) + tl.arange(0, BN // 2)
        N = N // 2
    inside = _inside(t, n, T, N, SWAP)
    if EPILOGUE == RESIDUAL:
        old = tl.load(y.residual + _offsets(t, n, y.res_stride, SWAP), mask=inside, other=0.0)
        acc = old.to(tl.float32) + acc
    if EPILOGUE == SCATTER:
        t, away = owners(t, T, y.residual, y.res_stride)
        out += _along(away, SWAP)
    tl.store(out + _offsets(t, n, y.out_stride, SWAP), acc.to(out.dtype.element_ty), mask=inside)


@triton.jit
def tile_of_program(T, N, BT: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr):
    """(tile, its split-K part, tile_t, tile_n) of this program; grid: tiles of T x tiles of N x SPLIT."""
    tiles = tl.cdiv(T, BT) * tl.cdiv(N, BN)
    tile = tl.program_id(0) % tiles
    part = tl.program_id(0) // tiles
    tile_t, tile_n = place_of_tile(tile, T, N, BT, BN, GROUP)
    return tile, part, tile_t, tile_n


@triton.jit
def place_of_tile(tile, T, N, BT: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr):
    """(tile_t, tile_n) of the tile-th tile.

    Neighbouring programs share a weight tile: up to GROUP token tiles of one weight tile, then the
    next. Weights then come from HBM once for every GROUP * BT tokens, and x stays in L2.
    """
    tiles_t = tl.cdiv(T, BT)
    tiles_n = tl.cdiv(N, BN)
    group = tile // (GROUP * tiles_n)
    group_rows = min(tiles_t - group * GROUP, GROUP)
    tile_t = group * GROUP + tile % (GROUP * tiles_n) % group_rows
    tile_n = tile % (GROUP * tiles_n) // group_rows
    return tile_t, tile_n


@triton.jit
def k_blocks(part, K, BK: tl.constexpr, SPLIT: tl.constexpr):
    """(first, behind the last) block of K of a part; never none."""
    blocks = tl.cdiv(K, BK)
    first = 0
    last = blocks
    if SPLIT > 1:
        first = part * blocks // SPLIT
        last = (part + 1) * blocks // SPLIT
    tl.assume(last > first)  # a loop that may not run at all makes ptxas serialise its wgmma
    return first, last


@triton.jit
def part_address(
    partials, tile, BT: tl.constexpr, BN: tl.constexpr, SPLIT: tl.constexpr, SWAP: tl.constexpr
):
    """Where part 0 of a tile lies in the workspace, element by element."""
    if SWAP:
        place = tl.arange(0, BN)[:, None] * BT + tl.arange(0, BT)[None, :]
    else:
        place = tl.arange(0, BT)[:, None] * BN + tl.arange(0, BN)[None, :]
    return partials + tile.to(tl.int64) * (SPLIT * BT * BN) + place


@triton.jit
def leave_part(mine, acc, part, tickets, tile, SIZE: tl.constexpr):
    """Store this part's fp32 tile; how many parts came before it."""
    tl.store(mine + part * SIZE, acc)
    return leave_ticket(tickets, tile)


@triton.jit
def leave_ticket(tickets, tile):
    """How many parts of a tile came before this one, which has just been stored."""
    tl.debug_barrier()  # every thread's part is written before one thread takes the ticket
    return tl.atomic_add(tickets + tile, 1, sem="acq_rel", scope="gpu")


@triton.jit
def add_parts(mine, tickets, tile, SIZE: tl.constexpr, SPLIT: tl.constexpr):
    """For the last to arrive: the sum of all parts in order of K, so the bits do not depend on who was
    last; re-arms the ticket."""
    total = tl.load(mine, cache_modifier=".cg")
    for other in range(1, SPLIT):
        total += tl.load(mine + other * SIZE, cache_modifier=".cg")
    tl.store(tickets + tile, 0)
    return total
