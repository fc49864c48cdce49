"""The Triton prefill GEMM (formula, shapes and roof: gemm.py), which is also the interpreter's.

One program computes one output tile over all of K, or over 1/SPLIT of it. SWAP makes the weight rows
the M operand of the tensor-core instruction (wgmma has M = 64 at least, N from 8): a tile of 16 tokens
then wastes nothing. FP8 weights are converted tile by tile to a 16-bit x's dtype.

FP8 on both sides (W8A8): y = (x8[T, K] @ w8[N, K]^T) * x_scale[T] * scale[N] (+ bias[N]). x8 is e4m3
with one fp32 scale a token (quantize_rows.py), w8 e4m3 with one a row; wgmma m64nNk32 e4m3 x e4m3,
twice the 16-bit rate. Roof of an H200: 1979 TFLOP/s; 72B TP=1 gate+up (59136 x 8192) at T = 512: 251 us
against 502 us at 16 bits; bytes (484 MB of weights, 4 MB of x, 30 MB out) take 121 us, so the products
are the bound from T of about 250 up.

Its accumulation. The tensor cores of sm_90 align the 32 products of one FP8 instruction and the running
sum to their largest exponent and keep about 14 bits (DeepSeek-V3, arXiv:2412.19437, 3.5.2): each
of the K / 32 additions errs by up to 2^-13 of the running sum. Errors of random sign add as a
random walk: K = 8192: sqrt(256) * 2^-13 / sqrt(3) * 0.7 = 0.08 % RMS of y (the walk's mean height
is 0.7 of its end); truncation, always towards zero, at most 256 * 2^-14 * 0.5 = 0.8 %. Rounding x
and w to e4m3 costs 3.7 % RMS (2.6 % each), so plain sums ship; `promote` adds the partial sums of
each block of K (128) in fp32 registers (0.02 %), which needs a second accumulator and a wait for
every block, and so at most 128 x 128 tiles.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.gemm_config import GemmConfig, Operands
from engine.kernels.gemm_tail import blocks_of_tile, finish_part, range_of_program
from engine.kernels.gemm_tile import (
    SILU_MUL,
    Output,
    add_parts,
    dot,
    finish_tile,
    k_blocks,
    leave_part,
    load_tile,
    part_address,
    place_of_tile,
    tile_of_program,
    upcast_fp8,
)
from engine.kernels.sync import gdc_launch_dependents, gdc_wait


@triton.jit
def _products(
    operands, tile_t, tile_n, first, last,
    BT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SWAP: tl.constexpr, TMA: tl.constexpr,
    PROMOTE: tl.constexpr,
):  # fmt: skip
    """Blocks first..last-1 of K of one tile, fp32 [BN, BT] if SWAP, else [BT, BN], without the scales."""
    x, w, T, N, K, x_stride, w_stride = operands
    if SWAP:
        acc = tl.full([BN, BT], 0.0, tl.float32)
    else:
        acc = tl.full([BT, BN], 0.0, tl.float32)
    for block in range(first, last):
        weights = load_tile(w, tile_n * BN, block * BK, N, K, w_stride, BN, BK, TMA)
        tokens = load_tile(x, tile_t * BT, block * BK, T, K, x_stride, BT, BK, TMA)
        if weights.dtype != tokens.dtype:
            weights = upcast_fp8(weights, tokens.dtype)
        if SWAP:
            acc = dot(weights, tokens.T, acc, PROMOTE)
        else:
            acc = dot(tokens, weights.T, acc, PROMOTE)
    return acc


@triton.jit
def _finish(
    acc, y, tile_t, tile_n, BT: tl.constexpr, BN: tl.constexpr, SWAP: tl.constexpr,
    EPILOGUE: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """The shared epilogue, of W8A8 behind the row scale and in halves of the columns, where a tile beside
    its residual would not fit the registers."""
    if y.x_scale is not None:
        t = tile_t * BT + tl.arange(0, BT)
        acc = acc * tl.load(y.x_scale + t, mask=t < y.T, other=0.0)[:, None]
    if y.x_scale is None or EPILOGUE == SILU_MUL:
        finish_tile(acc, y, tile_t, tile_n, BT, BN, SWAP, EPILOGUE, HAS_SCALE, HAS_BIAS)
    else:
        half: tl.constexpr = BN // 2
        left, right = tl.split(tl.permute(tl.reshape(acc, [BT, 2, half]), (0, 2, 1)))
        finish_tile(left, y, tile_t, 2 * tile_n, BT, half, SWAP, EPILOGUE, HAS_SCALE, HAS_BIAS)
        finish_tile(right, y, tile_t, 2 * tile_n + 1, BT, half, SWAP, EPILOGUE, HAS_SCALE, HAS_BIAS)


@triton.jit
def gemm_kernel(
    x, w, out, residual,
    x_scale,  # of W8A8, which never has SWAP; else None
    scale, bias, partials, tickets, T, N, K, x_stride, w_stride, out_stride, res_stride,
    BT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    SWAP: tl.constexpr, SPLIT: tl.constexpr, TMA: tl.constexpr, EPILOGUE: tl.constexpr,
    HAS_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr, PROMOTE: tl.constexpr,
    PDL: tl.constexpr, TAIL: tl.constexpr, WAVE: tl.constexpr,
):  # fmt: skip
    """Grid: tiles of T x tiles of N x SPLIT, one dimension; TAIL > 1: gemm_tail.py's."""
    operands = (x, w, T, N, K, x_stride, w_stride)
    y = Output(out, residual, x_scale, scale, bias, T, N, out_stride, res_stride)
    if PDL:
        gdc_launch_dependents()
    if TAIL == 1:
        tile, part, tile_t, tile_n = tile_of_program(T, N, BT, BN, GROUP)
        first, last = k_blocks(part, K, BK, SPLIT)
        if PDL:
            gdc_wait()
        acc = _products(operands, tile_t, tile_n, first, last, BT, BN, BK, SWAP, TMA, PROMOTE)
        if SPLIT == 1:
            _finish(acc, y, tile_t, tile_n, BT, BN, SWAP, EPILOGUE, HAS_SCALE, HAS_BIAS)
        else:
            mine = part_address(partials, tile, BT, BN, SPLIT, SWAP)
            if leave_part(mine, acc, part, tickets, tile, BT * BN) == SPLIT - 1:
                acc = add_parts(mine, tickets, tile, BT * BN, SPLIT)
                _finish(acc, y, tile_t, tile_n, BT, BN, SWAP, EPILOGUE, HAS_SCALE, HAS_BIAS)
    else:
        blocks = tl.cdiv(K, BK)
        begin, end = range_of_program(T, N, blocks, BT, BN, TAIL, WAVE)
        if PDL:
            gdc_wait()
        for tile in range(begin // blocks, tl.cdiv(end, blocks)):
            tile_t, tile_n = place_of_tile(tile, T, N, BT, BN, GROUP)
            first, last = blocks_of_tile(tile, begin, end, blocks)
            acc = _products(operands, tile_t, tile_n, first, last, BT, BN, BK, SWAP, TMA, PROMOTE)
            if last - first == blocks:
                _finish(acc, y, tile_t, tile_n, BT, BN, SWAP, EPILOGUE, HAS_SCALE, HAS_BIAS)
            else:
                finish_part(
                    acc, partials, tickets, tile, blocks, y, tile_t, tile_n, BT, BN, SWAP, EPILOGUE,
                    HAS_SCALE, HAS_BIAS, TAIL, WAVE,
                )  # fmt: skip


def launch(call: Operands, config: GemmConfig, pdl: bool) -> None:
    """x and w 16-bit, x 16-bit and w e4m3, or both e4m3 with x_scale and scale. config: as `gemm` has
    settled it for this call."""
    out, residual, *others = call.pointers()
    gemm_kernel[call.grid(config)](
        *call.operands(config), out, residual, call.x_scale, *others, *call.sizes, *call.strides(),
        **call.constants(config, pdl), SWAP=config.swap and call.x_scale is None, TMA=config.tma,
        HAS_SCALE=call.scale is not None, PROMOTE=config.promote, TAIL=config.tail,
        WAVE=config.wave, num_stages=config.stages,
    )  # fmt: skip
