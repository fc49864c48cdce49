"""Rows to FP8: scale[t] = max |x[t]| / 448, x8[t, k] = e4m3(x[t, k] / scale[t]).

e4m3 is 1 sign, 4 exponent and 3 mantissa bits, largest value 448 (arXiv:2209.05433); rounding to
nearest even, saturating. One scale a token, made from the token alone: what other rows hold never
changes a row's bits. Prefill only, in front of the W8A8 GEMM (gemm_kernel.py); `rmsnorm_quantize`
does the norm before it in the same pass.

x [T, K] per rank: K = 3584, 18944 (7B), 8192, 29568 (72B) at TP 1. Bytes: 3 T K; 72B TP=1, T = 512:
12.6 MB (norm output, 2.9 us at 4.29 TB/s) and 45 MB (MLP, 10.6 us). One program a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.integers import next_power_of_2
from engine.kernels.norm import norm_launch, normed_row, rmsnorm_ref
from engine.kernels.sync import gdc_launch_dependents, gdc_wait

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0  # largest finite e4m3 value
SMALLEST = 1e-30  # floor of max |x|: keeps 448 / max |x| finite; below it values become 0


@triton.jit
def to_e4m3(value, amax):
    """fp32 values whose largest |value| is amax, broadcastable to them -> (e4m3, scale). A NaN stays NaN,
    infinity becomes one."""
    amax = tl.maximum(amax, 1e-30)
    y = value * tl.math.div_rn(448.0, amax)
    y = tl.clamp(y, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    return y.to(tl.float8e4nv), tl.math.div_rn(amax, 448.0)


@triton.jit
def _store_row(value, x8, scale, row, column, inside, x8_stride):
    """value fp32 (0 where not inside) -> x8[row], scale[row]."""
    y, row_scale = to_e4m3(value, tl.max(tl.abs(value), axis=0))
    tl.store(x8 + row * x8_stride + column, y, mask=inside)
    tl.store(scale + row, row_scale)


@triton.jit
def quantize_rows_kernel(
    x, x8, scale, K, x_stride, x8_stride, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < K
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    _store_row(value, x8, scale, row, column, inside, x8_stride)


@triton.jit
def rmsnorm_quantize_kernel(
    x, weight, x8, scale, H, eps, x_stride, x8_stride, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    row, column, inside, normed = normed_row(x, weight, H, eps, x_stride, BLOCK, PDL)
    # Rounded as rmsnorm would store it, so that the two kernels and this one give the same bits.
    normed = normed.to(x.dtype.element_ty).to(tl.float32)
    _store_row(normed, x8, scale, row, column, inside, x8_stride)


def _warps(block: int) -> int:
    """At most 64 values a thread, at least 16 bytes of 16-bit input a thread."""
    return min(16, max(1, block // 1024))


def quantize_rows(
    x: torch.Tensor, x8: torch.Tensor, scale: torch.Tensor, *, pdl: bool = False
) -> None:
    """x [T, K] 16-bit -> x8 [T, K] float8_e4m3fn, scale fp32 [T]; unit stride along K."""
    rows, k = x.shape
    block = next_power_of_2(k)
    quantize_rows_kernel[(rows,)](
        x, x8, scale, k, x.stride(0), x8.stride(0), BLOCK=block, PDL=pdl,
        num_warps=_warps(block), launch_pdl=pdl,
    )  # fmt: skip


def rmsnorm_quantize(
    x: torch.Tensor,
    weight: torch.Tensor,
    x8: torch.Tensor,
    scale: torch.Tensor,
    *,
    eps: float,
    pdl: bool = False,
) -> None:
    """`quantize_rows` of `rmsnorm(x, weight)`, bit for bit, without the round trip through memory.

    x [T, H] 16-bit, weight [H] -> x8 [T, H] float8_e4m3fn, scale fp32 [T]."""
    rows, hidden = x.shape
    rmsnorm_quantize_kernel[(rows,)](
        x, weight, x8, scale, hidden, eps, x.stride(0), x8.stride(0), **norm_launch(hidden),
        PDL=pdl, launch_pdl=pdl,
    )  # fmt: skip


def quantize_rows_ref(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, K] (any float type) -> x8 [T, K] float8_e4m3fn, scale fp32 [T]; in fp32."""
    value = x.float()
    amax = value.abs().amax(dim=-1).clamp(min=SMALLEST)
    # Tensor by tensor: torch divides by or into a Python number with a reciprocal, off by one bit.
    most = torch.full_like(amax, FP8_MAX)
    y = (value * (most / amax)[..., None]).clamp(-FP8_MAX, FP8_MAX)
    return y.to(FP8), amax / most


def rmsnorm_quantize_ref(
    x: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `quantize_rows_ref(rmsnorm_ref(x, weight, eps))`."""
    return quantize_rows_ref(rmsnorm_ref(x, weight, eps))
