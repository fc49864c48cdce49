"""Embedding lookup: out[i] = table[tokens[i]], or table[tokens[row_slots[i]]] in decode.

table [V, H] is replicated on every rank (V = 152064; H = 3584 or 8192), so no exchange is needed.
Bytes: 4 H a row (read + write); one decode row of 72B is 32 KB: launch-bound, about 1 us.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.sync import gdc_launch_dependents, gdc_wait


@triton.jit
def embedding_kernel(
    tokens, row_slots, table, out, V, H, table_stride, out_stride,
    HAS_SLOTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()  # the token may be what the kernel before has just chosen
    row = tl.program_id(0)
    index = row
    if HAS_SLOTS:
        index = tl.maximum(tl.load(row_slots + row), 0)
    token = tl.minimum(tl.maximum(tl.load(tokens + index), 0), V - 1).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < H
    value = tl.load(table + token * table_stride + column, mask=inside, other=0.0)
    tl.store(out + row.to(tl.int64) * out_stride + column, value, mask=inside)


def embedding(
    tokens: torch.Tensor,
    table: torch.Tensor,
    out: torch.Tensor,
    *,
    row_slots: torch.Tensor | None = None,
    pdl: bool = False,
) -> None:
    """tokens int32 [T], or [S] slot-indexed with row_slots int32 [R]; table [V, H]; out [T or R,
    H].

    A padding row (row_slots -1) reads slot 0; ids outside the table are clamped, so nothing faults.
    """
    rows, hidden = out.shape
    block = min(1024, triton.next_power_of_2(hidden))
    embedding_kernel[(rows, triton.cdiv(hidden, block))](
        tokens, tokens if row_slots is None else row_slots, table, out,
        table.shape[0], hidden, table.stride(0), out.stride(0),
        HAS_SLOTS=row_slots is not None, BLOCK=block, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip


def embedding_ref(
    tokens: torch.Tensor, table: torch.Tensor, row_slots: torch.Tensor | None = None
) -> torch.Tensor:
    """tokens int [T] (or slot-indexed [S] with row_slots [R]), table [V, H] -> [T or R, H].

    Padding rows (row_slots -1) read slot 0; token ids are clamped to the table.
    """
    ids = tokens if row_slots is None else tokens[row_slots.clamp(min=0).long()]
    return table[ids.long().clamp(0, table.shape[0] - 1)]
