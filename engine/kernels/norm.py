"""RMSNorm: out = x * rsqrt(mean(x^2) + eps) * weight."""

from __future__ import annotations

import torch


def rmsnorm_ref(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., H], weight [H] -> [..., H] in x's dtype; computed in fp32 (fp64 for fp64 x)."""
    wide = torch.promote_types(x.dtype, torch.float32)
    xw = x.to(wide)
    rstd = torch.rsqrt(xw.square().mean(dim=-1, keepdim=True) + eps)
    return (xw * rstd * weight.to(wide)).to(x.dtype)
