"""SiLU gate over interleaved pairs: out[..., i] = silu(pairs[..., 2i]) * pairs[..., 2i + 1]."""

from __future__ import annotations

import torch


def silu_mul_ref(pairs: torch.Tensor) -> torch.Tensor:
    """pairs [..., N] (gate 0, up 0, gate 1, up 1, ...) -> [..., N/2] in the same dtype.

    Computed in fp32 (fp64 for fp64 input).
    """
    wide = torch.promote_types(pairs.dtype, torch.float32)
    gate = pairs[..., 0::2].to(wide)
    up = pairs[..., 1::2].to(wide)
    return (torch.nn.functional.silu(gate) * up).to(pairs.dtype)
