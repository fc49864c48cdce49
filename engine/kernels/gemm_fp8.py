"""Prefill GEMM with FP8 on both sides: y[T, N] = (x8[T, K] @ w8[N, K]^T) * x_scale[T] * scale[N]
(+ bias[N]), then Store, Residual or SiluMul.

x8 is e4m3 with one fp32 scale a token (quantize_rows.py), w8 e4m3 with one a row; wgmma
m64nNk32 e4m3 x e4m3, twice the 16-bit rate. Shapes: gemm.py. Roof of an H200: 1979 TFLOP/s; 72B
TP=1 gate+up (59136 x 8192) at T = 512: 251 us against 502 us at 16 bits; bytes (484 MB of weights,
4 MB of x, 30 MB out) take 121 us, so the products are the bound from T of about 250 up.

Accumulation. The tensor cores of sm_90 align the 32 products of one FP8 instruction and the running
sum to their largest exponent and keep about 14 bits (DeepSeek-V3, arXiv:2412.19437, 3.5.2): each
of the K / 32 additions errs by up to 2^-13 of the running sum. Errors of random sign add as a
random walk: K = 8192: sqrt(256) * 2^-13 / sqrt(3) * 0.7 = 0.08 % RMS of y (the walk's mean height
is 0.7 of its end); truncation, always towards zero, at most 256 * 2^-14 * 0.5 = 0.8 %. Rounding x
and w to e4m3 costs 3.7 % RMS (2.6 % each), so plain sums ship; `promote` adds the partial sums of
each block of K (128) in fp32 registers (0.02 %), which needs a second accumulator and a wait for
every block, and so at most 128 x 128 tiles.

Rows past the request are computed like the others and never change a real row's bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from engine.kernels.gemm_kernel import SILU_MUL, _epilogue, _load_tile
from engine.kernels.sync import INTERPRET, gdc_launch_dependents, gdc_wait


@triton.jit
def _dot_fp8(a, b, acc, PROMOTE: tl.constexpr):
    """acc + a @ b; products exact, sums as the docstring above says (fp32 in the interpreter)."""
    if INTERPRET:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    elif PROMOTE:  # max_num_imprecise_acc would add before the wait for the wgmma (Triton 3.6)
        return acc + tl.dot(a, b)
    else:
        return tl.dot(a, b, acc)


@triton.jit
def _finish(
    acc, out, residual, x_scale, scale, bias, tile_t, tile_n, T, N, out_stride, res_stride,
    BT: tl.constexpr, BN: tl.constexpr, EPILOGUE: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Row scale, then gemm_kernel's epilogue: in halves of the columns, where a tile beside its
    residual would not fit the registers."""
    t = tile_t * BT + tl.arange(0, BT)
    acc = acc * tl.load(x_scale + t, mask=t < T, other=0.0)[:, None]
    if EPILOGUE == SILU_MUL:
        _epilogue(
            acc, out, residual, scale, bias, tile_t, tile_n, T, N, out_stride, res_stride,
            BT, BN, False, EPILOGUE, True, HAS_BIAS,
        )  # fmt: skip
    else:
        left, right = tl.split(tl.permute(tl.reshape(acc, [BT, 2, BN // 2]), (0, 2, 1)))
        _epilogue(
            left, out, residual, scale, bias, tile_t, 2 * tile_n, T, N, out_stride, res_stride,
            BT, BN // 2, False, EPILOGUE, True, HAS_BIAS,
        )  # fmt: skip
        _epilogue(
            right, out, residual, scale, bias, tile_t, 2 * tile_n + 1, T, N, out_stride, res_stride,
            BT, BN // 2, False, EPILOGUE, True, HAS_BIAS,
        )  # fmt: skip


@triton.jit
def gemm_fp8_kernel(
    x, w, out, residual, x_scale, scale, bias, partials, tickets,
    T, N, K, x_stride, w_stride, out_stride, res_stride,
    BT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    SPLIT: tl.constexpr, TMA: tl.constexpr, EPILOGUE: tl.constexpr, HAS_BIAS: tl.constexpr,
    PROMOTE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: tiles of T x tiles of N x SPLIT, one dimension, in the order of gemm_kernel."""
    if PDL:
        gdc_launch_dependents()
    tiles_t = tl.cdiv(T, BT)
    tiles_n = tl.cdiv(N, BN)
    tiles = tiles_t * tiles_n
    tile = tl.program_id(0) % tiles
    part = tl.program_id(0) // tiles
    group = tile // (GROUP * tiles_n)
    group_rows = min(tiles_t - group * GROUP, GROUP)
    tile_t = group * GROUP + tile % (GROUP * tiles_n) % group_rows
    tile_n = tile % (GROUP * tiles_n) // group_rows

    blocks = tl.cdiv(K, BK)
    first = 0
    last = blocks
    if SPLIT > 1:
        first = part * blocks // SPLIT
        last = (part + 1) * blocks // SPLIT
    acc = tl.full([BT, BN], 0.0, tl.float32)
    tl.assume(last > first)  # a loop that may not run at all makes ptxas serialise its wgmma
    if PDL:
        gdc_wait()
    for block in range(first, last):
        weights = _load_tile(w, tile_n * BN, block * BK, N, K, w_stride, BN, BK, TMA)
        tokens = _load_tile(x, tile_t * BT, block * BK, T, K, x_stride, BT, BK, TMA)
        acc = _dot_fp8(tokens, weights.T, acc, PROMOTE)

    if SPLIT == 1:
        _finish(
            acc, out, residual, x_scale, scale, bias, tile_t, tile_n, T, N, out_stride, res_stride,
            BT, BN, EPILOGUE, HAS_BIAS,
        )  # fmt: skip
    else:  # as in gemm_kernel: partial tiles, a ticket, the last to arrive adds in order of K
        place = tl.arange(0, BT)[:, None] * BN + tl.arange(0, BN)[None, :]
        mine = partials + tile.to(tl.int64) * (SPLIT * BT * BN) + place
        tl.store(mine + part * (BT * BN), acc)
        tl.debug_barrier()
        arrived = tl.atomic_add(tickets + tile, 1, sem="acq_rel", scope="gpu")
        if arrived == SPLIT - 1:
            total = tl.load(mine, cache_modifier=".cg")
            for other in range(1, SPLIT):
                total += tl.load(mine + other * (BT * BN), cache_modifier=".cg")
            tl.store(tickets + tile, 0)
            _finish(
                total, out, residual, x_scale, scale, bias, tile_t, tile_n, T, N, out_stride,
                res_stride, BT, BN, EPILOGUE, HAS_BIAS,
            )  # fmt: skip


def launch(
    x: torch.Tensor,
    w: torch.Tensor,
    out: torch.Tensor,
    residual: torch.Tensor,
    x_scale: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    partials: torch.Tensor,
    tickets: torch.Tensor,
    *,
    blocks: tuple[int, int, int],
    warps: int,
    stages: int,
    group: int,
    split: int,
    promote: bool,
    tma: bool,
    epilogue: int,
    pdl: bool,
) -> None:
    """x [T, K], w [N, K] e4m3; x_scale [T], scale [N] fp32; blocks = (BT, BN, BK); tma: rows of
    both are 16-byte aligned. Arguments as `gemm` checks them."""
    (t, k), n = x.shape, w.shape[0]
    bt, bn, bk = blocks
    gemm_fp8_kernel[(triton.cdiv(t, bt) * triton.cdiv(n, bn) * split,)](
        TensorDescriptor.from_tensor(x, [bt, bk]) if tma else x,
        TensorDescriptor.from_tensor(w, [bn, bk]) if tma else w,
        out, residual, x_scale, scale, scale if bias is None else bias, partials, tickets,
        t, n, k, x.stride(0), w.stride(0), out.stride(0), residual.stride(0),
        BT=bt, BN=bn, BK=bk, GROUP=group, SPLIT=split, TMA=tma, EPILOGUE=epilogue,
        HAS_BIAS=bias is not None, PROMOTE=promote, PDL=pdl,
        num_warps=warps, num_stages=stages, launch_pdl=pdl,
    )  # fmt: skip
