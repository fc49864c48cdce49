"""SiLU gate over interleaved pairs: out[..., i] = silu(pairs[..., 2i]) * pairs[..., 2i + 1].

A kernel of its own only after a library GEMM; gemv.py and gemm.py do it in their epilogues. pairs
[T, N], N = 2 x intermediate size per rank (72B TP=2: 29568). Bytes: 3 T N; T = 512: 45 MB, 10.6 us
at 4.29 TB/s.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.sync import gdc_launch_dependents, gdc_wait


@triton.jit
def silu_mul_kernel(
    pairs, out, columns, pairs_stride, out_stride, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    both = 2 * first + tl.arange(0, 2 * BLOCK)
    value = tl.load(pairs + row * pairs_stride + both, mask=both < 2 * columns, other=0.0)
    gate, up = tl.split(tl.reshape(value.to(tl.float32), [BLOCK, 2]))
    result = gate / (1.0 + tl.exp(-gate)) * up
    column = first + tl.arange(0, BLOCK)
    tl.store(
        out + row * out_stride + column, result.to(out.dtype.element_ty), mask=column < columns
    )


def silu_mul(pairs: torch.Tensor, out: torch.Tensor, *, pdl: bool = False) -> None:
    """pairs [T, N] (gate 0, up 0, gate 1, up 1, ...), out [T, N/2]; 16-bit, unit column stride."""
    rows, columns = out.shape
    block = 1024
    silu_mul_kernel[(rows, triton.cdiv(columns, block))](
        pairs, out, columns, pairs.stride(0), out.stride(0), BLOCK=block, PDL=pdl,
        num_warps=4, launch_pdl=pdl,
    )  # fmt: skip


def silu_mul_ref(pairs: torch.Tensor) -> torch.Tensor:
    """pairs [..., N] (gate 0, up 0, gate 1, up 1, ...) -> [..., N/2] in the same dtype.

    Computed in fp32 (fp64 for fp64 input).
    """
    wide = torch.promote_types(pairs.dtype, torch.float32)
    gate = pairs[..., 0::2].to(wide)
    up = pairs[..., 1::2].to(wide)
    return (torch.nn.functional.silu(gate) * up).to(pairs.dtype)
