"""The plain prefill GEMM (formula, shapes and roof: gemm.py), which is also the interpreter's.

One program computes one output tile over all of K, or over 1/SPLIT of it. SWAP makes the weight rows
the M operand of the tensor-core instruction (wgmma has M = 64 at least, N from 8): a tile of 16 tokens
then wastes nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.gemm_config import FP8, GemmConfig, Operands
from engine.kernels.gemm_tail import blocks_of_tile, finish_part, range_of_program
from engine.kernels.gemm_tile import (
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

TL_DTYPE = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _products(
    x, w, tile_t, tile_n, first, last, T, N, K, x_stride, w_stride,
    BT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SWAP: tl.constexpr, TMA: tl.constexpr,
    FP8: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Blocks first..last-1 of K of one tile, fp32 [BN, BT] if SWAP, else [BT, BN]."""
    if SWAP:
        acc = tl.full([BN, BT], 0.0, tl.float32)
    else:
        acc = tl.full([BT, BN], 0.0, tl.float32)
    for block in range(first, last):
        weights = load_tile(w, tile_n * BN, block * BK, N, K, w_stride, BN, BK, TMA)
        tokens = load_tile(x, tile_t * BT, block * BK, T, K, x_stride, BT, BK, TMA)
        if FP8:
            weights = upcast_fp8(weights, DTYPE)
        if SWAP:
            acc = dot(weights, tokens.T, acc)
        else:
            acc = dot(tokens, weights.T, acc)
    return acc


@triton.jit
def gemm_kernel(
    x, w, out, residual, scale, bias, partials, tickets,
    T, N, K, x_stride, w_stride, out_stride, res_stride,
    BT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    SWAP: tl.constexpr, SPLIT: tl.constexpr, TMA: tl.constexpr, EPILOGUE: tl.constexpr,
    HAS_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr, FP8: tl.constexpr, DTYPE: tl.constexpr,
    PDL: tl.constexpr, TAIL: tl.constexpr, WAVE: tl.constexpr,
):  # fmt: skip
    """Grid: tiles of T x tiles of N x SPLIT, one dimension; TAIL > 1: gemm_tail.py's."""
    if PDL:
        gdc_launch_dependents()
    if TAIL == 1:
        tile, part, tile_t, tile_n = tile_of_program(T, N, BT, BN, GROUP)
        first, last = k_blocks(part, K, BK, SPLIT)
        if PDL:
            gdc_wait()
        acc = _products(
            x, w, tile_t, tile_n, first, last, T, N, K, x_stride, w_stride, BT, BN, BK, SWAP, TMA,
            FP8, DTYPE,
        )  # fmt: skip
        if SPLIT == 1:
            finish_tile(
                acc, out, residual, scale, bias, tile_t, tile_n, T, N, out_stride, res_stride,
                BT, BN, SWAP, EPILOGUE, HAS_SCALE, HAS_BIAS,
            )  # fmt: skip
        else:
            mine = part_address(partials, tile, BT, BN, SPLIT, SWAP)
            if leave_part(mine, acc, part, tickets, tile, BT * BN) == SPLIT - 1:
                total = add_parts(mine, tickets, tile, BT * BN, SPLIT)
                finish_tile(
                    total, out, residual, scale, bias, tile_t, tile_n, T, N, out_stride, res_stride,
                    BT, BN, SWAP, EPILOGUE, HAS_SCALE, HAS_BIAS,
                )  # fmt: skip
    else:
        blocks = tl.cdiv(K, BK)
        begin, end = range_of_program(T, N, blocks, BT, BN, TAIL, WAVE)
        if PDL:
            gdc_wait()
        for tile in range(begin // blocks, tl.cdiv(end, blocks)):
            tile_t, tile_n = place_of_tile(tile, T, N, BT, BN, GROUP)
            first, last = blocks_of_tile(tile, begin, end, blocks)
            acc = _products(
                x, w, tile_t, tile_n, first, last, T, N, K, x_stride, w_stride, BT, BN, BK, SWAP,
                TMA, FP8, DTYPE,
            )  # fmt: skip
            if last - first == blocks:
                finish_tile(
                    acc, out, residual, scale, bias, tile_t, tile_n, T, N, out_stride, res_stride,
                    BT, BN, SWAP, EPILOGUE, HAS_SCALE, HAS_BIAS,
                )  # fmt: skip
            else:
                finish_part(
                    acc, partials, tickets, tile, blocks,
                    out, residual, out, scale, bias, tile_t, tile_n, T, N, out_stride, res_stride,
                    BT, BN, SWAP, EPILOGUE, False, HAS_SCALE, HAS_BIAS, TAIL, WAVE,
                )  # fmt: skip


def launch(call: Operands, config: GemmConfig, pdl: bool) -> None:
    """x 16-bit, w the same or e4m3. config: as `gemm` has settled it for this call."""
    gemm_kernel[call.grid(config)](
        *call.operands(config), *call.pointers("scale", "bias", "partials", "tickets"),
        *call.sizes, *call.strides(), **call.constants(config, pdl), SWAP=config.swap,
        TMA=config.tma, TAIL=config.tail, WAVE=config.wave, HAS_SCALE=call.scale is not None, FP8=call.w.dtype == FP8,
        DTYPE=TL_DTYPE[call.x.dtype], num_stages=config.stages,
    )  # fmt: skip
