"""Last real row of a padded prefill chunk: out[0] = x[length - 1]."""

from __future__ import annotations

import torch


def gather_row_ref(x: torch.Tensor, length: int | torch.Tensor) -> torch.Tensor:
    """x [T, H], length (1..T; clamped) -> [1, H]."""
    row = min(max(int(length) - 1, 0), x.shape[0] - 1)
    return x[row : row + 1].clone()
