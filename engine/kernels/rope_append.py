"""RoPE on adjacent pairs of q and k, and the KV append, for a prefill chunk."""

from __future__ import annotations

import torch


def rotate_pairs(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Rotate adjacent pairs: (x[2i], x[2i+1]) -> (x[2i] c - x[2i+1] s, x[2i+1] c + x[2i] s).

    x: [T, heads, D]; cos_sin: [T, D], cos in the even and sin in the odd columns. fp64 if x is,
    else fp32; the result keeps that dtype.
    """
    compute = torch.float64 if x.dtype == torch.float64 else torch.float32
    even, odd = x.to(compute).unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos_sin.to(compute).unflatten(-1, (-1, 2)).unsqueeze(1).unbind(-1)
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)


def rope_append_ref(
    qkv: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    cos_sin: torch.Tensor,
    slot: int,
    start: int,
    length: int,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
) -> torch.Tensor:
    """Reference of `rope_append`: returns q_out [T, num_heads * head_dim], fills the caches in place.

    Rows >= length come back as zeros and touch neither cache.
    """
    slot, start, length = int(slot), int(start), int(length)
    heads = qkv[:length].unflatten(1, (num_heads + 2 * num_kv_heads, head_dim))
    q_and_k, v = heads.split((num_heads + num_kv_heads, num_kv_heads), dim=1)
    stop = start + length
    rotated = rotate_pairs(q_and_k, cos_sin[start:stop])
    # The caches are [slots, KV heads, positions, D]: heads come before positions.
    k_cache[slot, :, start:stop] = rotated[:, num_heads:].transpose(0, 1).to(k_cache.dtype)
    v_cache[slot, :, start:stop] = v.transpose(0, 1).to(v_cache.dtype)
    q_out = qkv.new_zeros(qkv.shape[0], num_heads * head_dim)
    q_out[:length] = rotated[:, :num_heads].flatten(1).to(qkv.dtype)
    return q_out
