"""Causal GQA flash attention of a prefill chunk over the KV of its slot, earlier chunks included."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention


def prefill_attention_ref(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot: int,
    start: int,
    length: int,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    scale: float,
) -> torch.Tensor:
    """Reference of `prefill_attention`: returns out [T, num_heads * head_dim] in q's dtype.

    Computes in fp64 if q is fp64, else in fp32. Rows >= length come back as zeros.
    """
    slot, start, length = int(slot), int(start), int(length)
    compute = torch.float64 if q.dtype == torch.float64 else torch.float32
    stop = start + length
    queries = q[:length].view(1, length, num_heads, head_dim).transpose(1, 2).to(compute)
    keys = k_cache[slot : slot + 1, :, :stop].to(compute)
    values = v_cache[slot : slot + 1, :, :stop].to(compute)
    mask = None
    if start > 0:  # is_causal would align the diagonal with key 0, not with key `start`.
        mask = torch.ones(length, stop, dtype=torch.bool, device=q.device).tril(start)
    attended = scaled_dot_product_attention(
        queries,
        keys,
        values,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=num_heads != num_kv_heads,
    )
    out = torch.zeros_like(q)
    out[:length] = attended[0].transpose(0, 1).flatten(1).to(q.dtype)
    return out
