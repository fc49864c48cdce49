"""GQA flash-decoding: one query token a row over the KV of its slot, split over the context."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention


def decode_attention_ref(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    positions: torch.Tensor,
    row_slots: torch.Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    scale: float,
) -> torch.Tensor:
    """Reference of `decode_attention`: returns out [R, num_heads * head_dim] in q's dtype.

    Computes in fp64 if q is fp64, else in fp32.
    """
    compute = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = torch.zeros_like(q)
    position_list = positions.tolist()
    for row, slot in enumerate(row_slots.tolist()):
        if slot < 0:
            continue
        length = position_list[slot] + 1
        # A KV head's group of query heads takes the place of the query axis: K and V are not repeated.
        grouped = q[row].view(1, num_kv_heads, num_heads // num_kv_heads, head_dim)
        keys = k_cache[slot : slot + 1, :, :length].to(compute)
        values = v_cache[slot : slot + 1, :, :length].to(compute)
        attended = scaled_dot_product_attention(grouped.to(compute), keys, values, scale=scale)
        out[row] = attended.flatten().to(q.dtype)
    return out
