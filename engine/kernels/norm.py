"""RMSNorm: out = x * rsqrt(mean(x^2) + eps) * weight (arXiv:1910.07467, eq. 4).

Prefill only: in decode the GEMV takes the norm into its prologue. x [T, H] per rank at every TP
degree (hidden states are replicated): H = 3584 (7B) or 8192 (72B). Bytes: 4 T H; 72B at T = 512:
16.8 MB, 3.9 us at 4.29 TB/s (from L2 in practice). One program a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.integers import next_power_of_2
from engine.kernels.sync import gdc_launch_dependents, gdc_wait


@triton.jit
def normed_row(x, weight, H, eps, x_stride, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """(row of this program, columns, which of them exist, x * rstd * weight in fp32: 0 elsewhere)."""
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < H
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(value * value, axis=0) / H + eps)
    return row, column, inside, value * rstd * gain


@triton.jit
def rmsnorm_kernel(
    x, weight, out, H, eps, x_stride, out_stride, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    row, column, inside, result = normed_row(x, weight, H, eps, x_stride, BLOCK, PDL)
    tl.store(out + row * out_stride + column, result.to(out.dtype.element_ty), mask=inside)


def norm_launch(hidden: int) -> dict[str, int]:
    """BLOCK and num_warps of a kernel that norms a row in one program."""
    block = next_power_of_2(hidden)
    return dict(BLOCK=block, num_warps=min(8, max(1, block // 512)))


def rmsnorm(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, *, eps: float, pdl: bool = False
) -> None:
    """x [T, H] 16-bit, weight [H], out [T, H] 16-bit; rows may be strided, `out` may be `x`."""
    rows, hidden = x.shape
    rmsnorm_kernel[(rows,)](
        x, weight, out, hidden, eps, x.stride(0), out.stride(0), **norm_launch(hidden), PDL=pdl,
        launch_pdl=pdl,
    )  # fmt: skip


def rmsnorm_ref(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., H], weight [H] -> [..., H] in x's dtype; computed in fp32 (fp64 for fp64 x)."""
    wide = torch.promote_types(x.dtype, torch.float32)
    xw = x.to(wide)
    rstd = torch.rsqrt(xw.square().mean(dim=-1, keepdim=True) + eps)
    return (xw * rstd * weight.to(wide)).to(x.dtype)
