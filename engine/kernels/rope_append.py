"""RoPE on adjacent pairs of q and k, and the KV append: for a prefill chunk, and for decode where q and k are
normalised first (QK-norm; without it the GEMV's epilogue does this in decode).

    (x[2i], x[2i+1]) -> (x[2i] cos - x[2i+1] sin, x[2i+1] cos + x[2i] sin), angle = position * theta^(-2i/D)

(RoFormer, arXiv:2104.09864, eq. 34; the compiler has permuted the q and k weight rows so that pairs are
adjacent.) q goes to q_out, k and v into the slot's cache at positions start .. start + length - 1, or row r of a
decode step at positions[row_slots[r]]. QK-norm (Qwen3): x = x * rsqrt(mean(x^2) + eps) * weight over each head of q
and k, whose row of D elements is in one program anyway.

FP8 KV: each head vector of k, after its rotation, and of v is quantised here (kv_fp8.py), so a decode step that
would rotate and append in the GEMV's epilogue, whose tile is no whole head, takes this launch a layer more.

Bytes: qkv read and written once, 4 T (NQ + 2 NKV) D, and 4 T D of the table; at T = 2048, D = 128 and the
measured copy bandwidth of 4.29 TB/s:

    | model, TP | NQ / NKV | MB   | roof    |
    |-----------|----------|------|---------|
    | 7B 1      | 28 / 4   | 38.8 | 9.0 us  |
    | 7B 2      | 14 / 2   | 19.9 | 4.6 us  |
    | 7B 4      | 7 / 1    | 10.5 | 2.4 us  |
    | 72B 1     | 64 / 8   | 84.9 | 19.8 us |
    | 72B 2     | 32 / 4   | 43.0 | 10.0 us |
    | 72B 4     | 16 / 2   | 22.0 | 5.1 us  |
    | 72B 8     | 8 / 1    | 11.5 | 2.7 us  |
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from engine.kernels.integers import cdiv, next_power_of_2
from engine.kernels.kv_fp8 import KVScales, write_kv
from engine.kernels.norm import rmsnorm_ref
from engine.kernels.quantize_rows import to_e4m3
from engine.kernels.sync import gdc_launch_dependents, gdc_wait

BLOCK_T = 16  # tokens a prefill program: 4 KB of one head, 32 bytes a thread; decode: 1


class DecodeRows(NamedTuple):
    """Where the rows of a decode step sit: row r at positions[row_slots[r]], slot -1 is padding."""

    positions: torch.Tensor  # int32 [S]
    row_slots: torch.Tensor  # int32 [T]


class QKNorm(NamedTuple):
    """Gains of q and k, 16-bit [D] each in the rows' (permuted) order, and the eps of the norm."""

    q: torch.Tensor
    k: torch.Tensor
    eps: float


@triton.jit
def _append(
    cache_ptr, scale_ptr, line, position, values, in_slot, ready, valid, HEAD_DIM: tl.constexpr
):
    """Store head vectors [T, D] at `position` [T] of the KV head that begins at `line` of [S, NKV, L]; with a
    scale_ptr as e4m3 and one scale each. ready [T], valid [T, D]: which exist; others are zeros."""
    if scale_ptr is not None:
        wide = values.to(tl.float32)
        values, scale = to_e4m3(wide, tl.max(tl.abs(wide), axis=1)[:, None])
        tl.store(scale_ptr + line + position, tl.reshape(scale, position.shape), mask=ready)
    tl.store(cache_ptr + line * HEAD_DIM + in_slot, values, mask=valid)


@triton.jit
def rope_append_kernel(
    qkv_ptr,
    q_out_ptr,
    k_cache_ptr,
    v_cache_ptr,
    k_scale_ptr,
    v_scale_ptr,
    cos_sin_ptr,
    where_ptr,
    positions_ptr,
    q_norm_ptr,
    k_norm_ptr,
    eps,
    tokens,
    max_len,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DECODE: tl.constexpr,
    NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    head = tl.program_id(1)
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    dim = tl.arange(0, BLOCK_D)
    in_dim = (dim < HEAD_DIM)[None, :]
    if NORM:
        gain_ptr = q_norm_ptr
        if head >= NUM_HEADS:
            gain_ptr = k_norm_ptr
        gain = tl.load(gain_ptr + dim, mask=dim < HEAD_DIM, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    if DECODE:  # one row a program; slot -1 is padding
        row = tl.program_id(0)
        slot = tl.load(where_ptr + row)
        length = tl.where(slot >= 0, row + 1, 0)
        slot = tl.maximum(slot, 0)
        start = tl.load(positions_ptr + slot) - row
    else:
        slot = tl.load(where_ptr)
        start = tl.load(where_ptr + 1)
        length = tl.load(where_ptr + 2)
    ready = token < length
    valid = ready[:, None] & in_dim
    qkv_row: tl.constexpr = (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM
    x = tl.load(
        qkv_ptr + token[:, None] * qkv_row + head * HEAD_DIM + dim[None, :], mask=valid, other=0.0
    )
    # [slots, KV heads, max_len, D]: 8 slots of 128k tokens need 64-bit offsets.
    position = start + token
    in_slot = position[:, None] * HEAD_DIM + dim[None, :]
    slot_head = slot.to(tl.int64) * NUM_KV_HEADS - NUM_HEADS
    if head < NUM_HEADS + NUM_KV_HEADS:
        table_at = cos_sin_ptr + position[:, None] * HEAD_DIM + dim[None, :]
        table = tl.load(table_at, mask=valid, other=0.0)
        cos, sin = tl.split(tl.reshape(table, [BLOCK_T, BLOCK_D // 2, 2]))
        wide = x.to(tl.float32)
        if NORM:
            mean_square = tl.sum(wide * wide, axis=1) / HEAD_DIM
            wide = wide * tl.rsqrt(mean_square + eps)[:, None] * gain[None, :]
        even, odd = tl.split(tl.reshape(wide, [BLOCK_T, BLOCK_D // 2, 2]))
        pairs = tl.join(even * cos - odd * sin, odd * cos + even * sin)
        rotated = tl.reshape(pairs, [BLOCK_T, BLOCK_D]).to(q_out_ptr.dtype.element_ty)
        if head < NUM_HEADS:
            q_at = token[:, None] * (NUM_HEADS * HEAD_DIM) + head * HEAD_DIM + dim[None, :]
            tl.store(q_out_ptr + q_at, rotated, mask=(token < tokens)[:, None] & in_dim)
        else:
            line = (slot_head + head) * max_len
            _append(
                k_cache_ptr, k_scale_ptr, line, position, rotated, in_slot, ready, valid, HEAD_DIM
            )
    else:
        line = (slot_head + head - NUM_KV_HEADS) * max_len
        _append(v_cache_ptr, v_scale_ptr, line, position, x, in_slot, ready, valid, HEAD_DIM)


def rope_append(
    qkv: torch.Tensor,
    q_out: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    cos_sin: torch.Tensor,
    request: torch.Tensor | None = None,
    *,
    rows: DecodeRows | None = None,
    norm: QKNorm | None = None,
    scales: KVScales | None = None,
    pdl: bool = False,
) -> None:
    """Normalise (if asked) and rotate q and k, append k and v to the slots' caches.

    qkv [T, (NQ + 2 NKV) * D] and q_out [T, NQ * D] 16-bit; k_cache, v_cache [S, NKV, L, D] 16-bit, or e4m3 with
    scales (kv_fp8.py), made from the 16-bit values; cos_sin [L, D] fp32, cos_i at 2i and sin_i at 2i+1.
    Prefill: request int32 [3] = (slot, start, length) on the device; row i < length sits at position start + i,
    rows >= length write zeros to q_out and nothing else. Decode: `rows` instead; row r sits at
    positions[row_slots[r]], a row of slot -1 writes zeros to q_out and nothing else.
    """
    tokens, (num_heads, num_kv_heads, head_dim) = qkv.shape[0], _heads(qkv, k_cache)
    decode = rows is not None
    where, positions = (rows.row_slots, rows.positions) if rows is not None else (request, None)
    q_norm, k_norm, eps = norm or (None, None, 0.0)
    block_t, block_d = 1 if decode else BLOCK_T, next_power_of_2(head_dim)
    rope_append_kernel[(cdiv(tokens, block_t), num_heads + 2 * num_kv_heads)](
        qkv,
        q_out,
        k_cache,
        v_cache,
        *(scales or (None, None)),
        cos_sin,
        where,
        positions,
        q_norm,
        k_norm,
        eps,
        tokens,
        k_cache.shape[2],
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_T=block_t,
        BLOCK_D=block_d,
        DECODE=decode,
        NORM=norm is not None,
        PDL=pdl,
        num_warps=rope_warps(block_t, block_d),
        launch_pdl=pdl,
    )


def _heads(qkv: torch.Tensor, k_cache: torch.Tensor) -> tuple[int, int, int]:
    """(NQ, NKV, D) of qkv [T, (NQ + 2 NKV) * D] and a cache [S, NKV, L, D]."""
    num_kv_heads, head_dim = k_cache.shape[1], k_cache.shape[3]
    return qkv.shape[1] // head_dim - 2 * num_kv_heads, num_kv_heads, head_dim


def rope_warps(block_t: int, block_d: int) -> int:
    """Warps of a program: 4 for a tile of 2048 elements, 1 for a single head."""
    return max(1, min(4, block_t * block_d // 256))


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
    slot: int = 0,
    start: int = 0,
    length: int = 0,
    *,
    rows: DecodeRows | None = None,
    norm: QKNorm | None = None,
    scales: KVScales | None = None,
) -> torch.Tensor:
    """Reference of `rope_append`: returns q_out [T, NQ * D], fills the caches in place.

    Prefill rows >= length and decode rows of slot -1 come back as zeros and touch neither cache.
    """
    num_heads, num_kv_heads, head_dim = _heads(qkv, k_cache)
    if rows is None:
        taken = torch.arange(int(length), device=qkv.device)
        slots, where = torch.full_like(taken, int(slot)), taken + int(start)
    else:
        taken = (rows.row_slots >= 0).nonzero()[:, 0]
        slots = rows.row_slots[taken].long()
        where = rows.positions[slots].long()
    heads = qkv[taken].unflatten(1, (num_heads + 2 * num_kv_heads, head_dim))
    q, k, v = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    if norm is not None:
        compute = torch.float64 if qkv.dtype == torch.float64 else torch.float32
        q = rmsnorm_ref(q.to(compute), norm.q, norm.eps)
        k = rmsnorm_ref(k.to(compute), norm.k, norm.eps)
    rotated = rotate_pairs(torch.cat((q, k), dim=1), cos_sin[where]).to(qkv.dtype)
    # The caches are [slots, KV heads, positions, D]: heads come between slots and positions.
    write_kv(k_cache, v_cache, scales, (slots, slice(None), where), rotated[:, num_heads:], v)
    q_out = qkv.new_zeros(qkv.shape[0], num_heads * head_dim)
    q_out[taken] = rotated[:, :num_heads].flatten(1)
    return q_out
