"""Prefill GEMM: y[T, N] = x[T, K] @ w[N, K]^T (* scale[N]) (+ bias[N])."""

from __future__ import annotations

import torch


def linear_ref(
    x: torch.Tensor,
    w: torch.Tensor,
    scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [..., K], w [N, K] (float or float8_e4m3fn), scale fp32 [N], bias [N] -> [..., N] in x's dtype.

    16-bit x accumulates in fp32 and is rounded once at the end; fp32 and fp64 x stay in their
    dtype (plain torch linear, so that the CPU back end runs at BLAS speed).
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    if scale is None:
        y = torch.nn.functional.linear(
            x.to(wide), w.to(wide), None if bias is None else bias.to(wide)
        )
        return y.to(x.dtype)
    y = torch.nn.functional.linear(x.to(wide), w.to(wide)) * scale.to(wide)
    if bias is not None:
        y = y + bias.to(wide)
    return y.to(x.dtype)
