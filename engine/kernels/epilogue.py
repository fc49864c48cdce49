"""Epilogues of a linear layer: what becomes of y = scale * (x @ W^T) + bias while it is still in registers.

Plain data, shared by the decode GEMV (all but Scatter) and the prefill GEMM (Store, Residual, SiluMul, Scatter).
R rows, N outputs per rank. "16-bit" is bf16 or fp16, the dtype of the activations.
Scale and bias come first, then the epilogue; y stays fp32 until the epilogue's single rounding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Store:
    """out[R, N] = y, 16-bit or fp32 (lm_head logits)."""

    out: torch.Tensor


@dataclass(frozen=True)
class Residual:
    """out[R, N] = residual[R, N] + y, added in fp32 and rounded once. `out` may be `residual`."""

    residual: torch.Tensor
    out: torch.Tensor


@dataclass(frozen=True)
class SiluMul:
    """out[R, N/2]: out[:, i] = silu(y[:, 2i]) * y[:, 2i+1] (gate and up rows interleaved)."""

    out: torch.Tensor


@dataclass(frozen=True)
class RopeAppend:
    """y rows are q heads, k heads, v heads: q rotated into q_out, k rotated and v plain into the cache.

    q_out [R, num_heads * head_dim] 16-bit; k_cache, v_cache [S, num_kv_heads, L, head_dim] 16-bit,
    contiguous; cos_sin [L, head_dim] fp32 with cos_i at 2i and sin_i at 2i+1; positions [S] int32;
    row_slots [R] int32. Row r sits at position positions[row_slots[r]]. A row of slot -1 is padding: it
    writes finite values to q_out and nothing to the cache.
    Pairs (2i, 2i+1) rotate: (a cos - b sin, b cos + a sin) (RoFormer, arXiv:2104.09864, eq. 34).
    """

    q_out: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    cos_sin: torch.Tensor
    positions: torch.Tensor
    row_slots: torch.Tensor
    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class Push:
    """y rounded to 16 bits goes straight into every rank's Lamport buffer (see kernels/sync.py).

    peer_table: int64 [world] on the device, base address of each rank's buffer.
    Element (row, n) lands at base[peer] + slot_offset_bytes + rank * R*N*2 + (row * N + n) * 2.
    -0.0 is the "not written yet" mark, so it is canonicalised to +0.0.
    """

    peer_table: torch.Tensor
    slot_offset_bytes: int
    rank: int
    world: int


def shard_rows(rows: int, world: int) -> int:
    """Rows that a rank owns of a prefill's hidden states; the last ranks may own fewer."""
    return -(-rows // world)


@dataclass(frozen=True)
class Scatter:
    """y rounded to 16 bits: each row goes straight into its owner's memory (kernels/two_shot.py).

    out [S, N]: where this rank's partial sum of its own rows lies. Element (t, n) belongs to rank t // S and lands
    far[t // S] bytes from out[t % S, n]; far int64 [world] on the device, multiples of 16.
    """

    out: torch.Tensor
    far: torch.Tensor


@dataclass(frozen=True)
class Maxima:
    """out[R, N] = y fp32 (lm_head logits), and of each program's outputs the best (value, id) of a row.

    Candidates, noise and order are those of kernels/argmax.py: value = y + T * Gumbel(seed, position, id), id =
    id_offset + n; ids >= vocab_size never win. values fp32 and ids int32 [R, P], P programs
    (`gemv.gemv_programs`). temperature fp32, seeds and positions int32 [S]; row_slots int32 [R], -1 =
    padding (what it gets means nothing). With `request` (int32 [3] = slot, start, length; R = 1, prefill) slot
    and position = start + length - 1 come from it.
    """

    out: torch.Tensor
    values: torch.Tensor
    ids: torch.Tensor
    temperature: torch.Tensor
    seeds: torch.Tensor
    positions: torch.Tensor
    row_slots: torch.Tensor
    vocab_size: int
    id_offset: int
    request: torch.Tensor | None = None


GemvEpilogue = Store | Residual | SiluMul | RopeAppend | Push | Maxima
GemmEpilogue = Store | Residual | SiluMul | Scatter
Epilogue = GemvEpilogue | GemmEpilogue
