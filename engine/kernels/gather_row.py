"""Last real row of a padded prefill chunk: out[0] = x[length - 1], length read on the device.

So that lm_head runs on one row, whatever the bucket. Bytes: 4 H (32 KB for 72B): launch-bound.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.sync import gdc_launch_dependents, gdc_wait


@triton.jit
def gather_row_kernel(x, request, out, T, H, x_stride, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.minimum(tl.maximum(tl.load(request + 2) - 1, 0), T - 1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < H
    tl.store(
        out + column, tl.load(x + row * x_stride + column, mask=inside, other=0.0), mask=inside
    )


def gather_row(
    x: torch.Tensor, request: torch.Tensor, out: torch.Tensor, *, pdl: bool = False
) -> None:
    """x [T, H]; request int32 [3] = (slot, start, length) on the device; out [1, H]."""
    rows, hidden = x.shape
    block = min(1024, triton.next_power_of_2(hidden))
    gather_row_kernel[(triton.cdiv(hidden, block),)](
        x, request, out, rows, hidden, x.stride(0), BLOCK=block, PDL=pdl,
        num_warps=4, launch_pdl=pdl,
    )  # fmt: skip


def gather_row_ref(x: torch.Tensor, length: int | torch.Tensor) -> torch.Tensor:
    """x [T, H], length (1..T; clamped) -> [1, H]."""
    row = min(max(int(length) - 1, 0), x.shape[0] - 1)
    return x[row : row + 1].clone()
