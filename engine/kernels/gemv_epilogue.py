# ruff: noqa: RUF005 - Triton has no starred tuples.
# mypy: disable-error-code="assignment, var-annotated"
"""Device side of `epilogue.py`: from fp32 y in registers to memory. Shared by the plain and the ring GEMV.

Each function takes y with index tensors of the same (or a broadcastable) shape and no layout of its own, so
the Triton kernel calls it with one row of 1-D tensors and the Gluon kernel with [rows, outputs] tensors.
The pairwise epilogues write two neighbouring 16-bit values as one 32-bit word: rows 2p and 2p+1 of W are a
gate/up pair, a RoPE pair, or one Lamport word (a poller compares whole words, so a half must never land alone).
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.argmax_kernel import LOWEST_KEY, add_noise, order_key
from engine.kernels.packed import pack_halves


@triton.jit
def store_outputs(y, residual, n, row, live, out_ptr, N: tl.constexpr):
    """Store and Residual. y: fp32; residual: 16-bit values or None; n: output index; row: decode row;
    live: which elements exist."""
    if residual is not None:
        y += residual.to(tl.float32)
    tl.store(out_ptr + row * N + n, y.to(out_ptr.dtype.element_ty), mask=live)


@triton.jit
def maxima_keys(y, noise, n, live, id_offset, VOCAB_SIZE: tl.constexpr):
    """Maxima. Order keys of the outputs y; ids beyond the vocabulary, and outputs that are not live, lose to all.

    noise: `row_noise` of y's rows, three dependent loads: to be issued before the sum over K."""
    temperature, seed, position = noise
    token = id_offset + n
    key = order_key(add_noise(y, temperature, seed, position, token), token)
    return tl.where(live & (token < VOCAB_SIZE), key, LOWEST_KEY)


@triton.jit
def store_silu(gate, up, p, row, live, out_ptr, N: tl.constexpr):
    """SiluMul. Pair p of row `row` -> out[row, p]; out is [R, N/2]."""
    y = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + row * (N // 2) + p, y.to(out_ptr.dtype.element_ty), mask=live)


@triton.jit
def push_targets(table_ptr, offset, WORLD: tl.constexpr):
    """Addresses of this rank's message in every rank's buffer, int64 each: constants, to be loaded before the wait.

    offset: bytes from a rank's base address to this message, int64.
    """
    targets = ()
    for peer in tl.static_range(WORLD):
        targets = targets + (tl.load(table_ptr + peer) + offset,)
    return targets


@triton.jit
def store_push(low, high, p, row, live, x_ptr, targets, N: tl.constexpr, WORLD: tl.constexpr):
    """Push. Word p of row `row` of this rank's message into every rank's buffer."""
    words = pack_halves(low, high, x_ptr.dtype.element_ty)
    index = row * (N // 2) + p
    for peer in tl.static_range(WORLD):
        tl.store(targets[peer].to(tl.pointer_type(tl.int32)) + index, words, mask=live)


@triton.jit
def rope_rows(row, positions_ptr, row_slots_ptr, R: tl.constexpr):
    """(slot, position) of row `row`, two dependent loads. Padding rows (slot -1) take slot 0's position, which is a
    valid one."""
    slot = tl.load(row_slots_ptr + row, mask=row < R, other=-1)
    return slot, tl.load(positions_ptr + tl.maximum(slot, 0))


@triton.jit
def rope_operands(
    p,
    live,
    rows,
    cos_sin_ptr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """(cos, sin, slot, position) of pair p; cos = 1, sin = 0 for v heads. To be issued before the sum over K. rows:
    of `rope_rows`."""
    slot, position = rows
    table = cos_sin_ptr + position * HEAD_DIM + 2 * p % HEAD_DIM
    rotates = live & (2 * p // HEAD_DIM < NUM_HEADS + NUM_KV_HEADS)
    cos = tl.load(table, mask=rotates, other=1.0)
    sin = tl.load(table + 1, mask=rotates, other=0.0)
    return cos, sin, slot, position


@triton.jit
def store_rope(
    a,
    b,
    operands,
    p,
    row,
    live,
    q_ptr,
    k_ptr,
    v_ptr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    MAX_LEN: tl.constexpr,
):
    """RopeAppend. (a, b) = y[2p], y[2p+1] of row `row`; heads are q, then k, then v."""
    cos, sin, slot, position = operands
    words = pack_halves(a * cos - b * sin, b * cos + a * sin, q_ptr.dtype.element_ty)
    head = 2 * p // HEAD_DIM
    word_ptr = tl.pointer_type(tl.int32)
    index = row * (NUM_HEADS * HEAD_DIM // 2) + p
    tl.store(q_ptr.to(word_ptr, bitcast=True) + index, words, mask=live & (head < NUM_HEADS))
    # Cache element [slot, kv head, position, dim]; more than 2^31 of them at long contexts.
    is_v = head >= NUM_HEADS + NUM_KV_HEADS
    kv_head = tl.where(is_v, head - NUM_HEADS - NUM_KV_HEADS, head - NUM_HEADS)
    line = (slot * NUM_KV_HEADS + kv_head).to(tl.int64) * MAX_LEN + position
    index = line * (HEAD_DIM // 2) + 2 * p % HEAD_DIM // 2
    owned = live & (slot >= 0) & (head >= NUM_HEADS)
    tl.store(k_ptr.to(word_ptr, bitcast=True) + index, words, mask=owned & ~is_v)
    tl.store(v_ptr.to(word_ptr, bitcast=True) + index, words, mask=owned & is_v)
