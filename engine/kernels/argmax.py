"""Greedy argmax or Gumbel-max sampling over a vocabulary that is split over the ranks.

    id = argmax over v of  logit[v] + T * g(seed, position, v),   g = -log(E),  E = -log(1 - u)

T = 0 is greedy. Gumbel-max (Gumbel 1954; Maddison et al., arXiv:1411.0030) draws exactly from
softmax(logit / T): argmax is unchanged by the factor T. u is a 32-bit counter hash of (seed,
position, GLOBAL vocabulary id), so a token does not depend on the TP degree, the batch row or the
grid. `position` is that of the token whose logits these are (positions[slot] in decode, start +
length - 1 in prefill).

Order: NaN above all (value NaN: the step is flagged), then the larger value, then the LOWER id.
Value and id are one int64 key, so every reduction over lanes, programs and ranks is an integer
maximum and gives the same answer in any order. -0.0 and +0.0 tie.

Per rank: logits fp32 [R, V], V = 152064 / 1, 2, 4, 8 (7B and 72B): 608 / 304 / 152 / 76 KB a row,
0.14 / 0.07 / 0.04 / 0.02 us of HBM at 4.3 TB/s (they lie in L2): the time is launches. Exchange: 8
bytes a row and rank.

argmax_partial -> [R, P] maxima; then argmax_finish (one rank) or argmax_push + argmax_poll. The
exchange is one Lamport exchange (slots.py): one slot, re-armed by the poll that read it, which
needs an all-reduce between two uses, as every decode step has. The host reads ids from the pinned
ring.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.errors import EngineError
from engine.kernels.all_reduce import address_of
from engine.kernels.gumbel import gumbel, gumbel_ref
from engine.kernels.sample_ref import RING_NAN, sample_ref
from engine.kernels.sync import (
    DEFAULT_LIMIT_US,
    SENTINEL_32,
    gdc_launch_dependents,
    gdc_wait,
    push8,
    wait_messages,
)

__all__ = [
    "RING_NAN", "RING_PADDING", "argmax_finish", "argmax_partial", "argmax_poll", "argmax_programs",
    "argmax_push", "gumbel", "gumbel_ref", "key_id", "key_value", "order_key", "sample_ref",
]  # fmt: skip

RING_PADDING = -3  # row_slots[r] = -1
COLUMNS = 1024  # logits a program handles at a time

_NO_ID = tl.constexpr(0x7FFFFFFF)
_NAN_KEY = tl.constexpr(0x7FFFFFFF)
# (-inf, no id): below every real pair, yet a number.
_LOWEST_KEY = tl.constexpr(-2139095041 << 32)


@triton.jit
def order_key(values, ids):
    """int64 that orders (value, id): NaN first, then larger value, then lower id."""
    values = tl.where(values == 0.0, 0.0, values)
    bits = values.to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    key = tl.where(values != values, _NAN_KEY, key)
    return (key.to(tl.int64) << 32) | (ids ^ 0x7FFFFFFF).to(tl.int64)


@triton.jit
def key_value(key):
    """fp32 value of an order key; the canonical NaN for a NaN."""
    high = (key >> 32).to(tl.int32)
    bits = tl.where(high < 0, high ^ 0x7FFFFFFF, high)
    return tl.where(high == _NAN_KEY, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def key_id(key):
    """int32 id of an order key."""
    return (key & 0x7FFFFFFF).to(tl.int32) ^ 0x7FFFFFFF


@triton.jit(do_not_specialize=["limit", "id_offset"])
def argmax_partial_kernel(
    logits,  # fp32 [R, V]
    temperature,  # fp32 [S]
    seeds,  # int32 [S]
    positions,  # int32 [S]
    row_slots,  # int32 [R] (no REQUEST)
    request,  # int32 [3] = slot, start, length (REQUEST)
    values,  # fp32 [R, P]
    ids,  # int32 [R, P]
    columns,  # V
    limit,  # columns below it are real: vocab_size - id_offset
    id_offset,
    BLOCK: tl.constexpr,
    REQUEST: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    part = tl.program_id(1)
    parts = tl.num_programs(1)
    if REQUEST:
        slot = tl.load(request)
        position = tl.load(request + 1) + tl.load(request + 2) - 1
    else:
        slot = tl.maximum(tl.load(row_slots + row), 0)
        position = tl.load(positions + slot)
    scale = tl.load(temperature + slot)
    seed = tl.load(seeds + slot)
    best = tl.full((BLOCK,), _LOWEST_KEY, tl.int64)
    for start in range(part * BLOCK, columns, parts * BLOCK):
        column = start + tl.arange(0, BLOCK)
        real = column < tl.minimum(columns, limit)
        # The mask has the granularity of `columns`, so that 16 bytes load at once; `limit` has none.
        inside = column < columns
        value = tl.load(logits + row.to(tl.int64) * columns + column, mask=inside, other=0.0)
        token = id_offset + column
        if scale > 0:
            value += scale * gumbel(seed, position, token)
        key = order_key(value, token)
        key = tl.where(real, key, _LOWEST_KEY)
        best = tl.maximum(best, key)
    top = tl.max(best, 0)
    tl.store(values + row * parts + part, key_value(top))
    tl.store(ids + row * parts + part, key_id(top))


@triton.jit
def _row_keys(values, ids, parts, rows, ROWS: tl.constexpr, PARTS: tl.constexpr):
    """int64 [ROWS]: best key of each row of [rows, parts]."""
    r = tl.arange(0, ROWS)[:, None]
    p = tl.arange(0, PARTS)[None, :]
    real = (r < rows) & (p < parts)
    at = r * parts + p
    value = tl.load(values + at, mask=real, other=float("-inf"))
    token = tl.load(ids + at, mask=real, other=_NO_ID)
    return tl.max(order_key(value, token), 1)


@triton.jit
def _finish(
    key,  # int64 [ROWS], one winner a row
    tokens,
    positions,
    row_slots,
    request,
    ring,
    ring_size,
    ring_stride,
    step,
    rows,
    ROWS: tl.constexpr,
    WRITE_RING: tl.constexpr,
    REQUEST: tl.constexpr,
):
    """tokens[slot] = id; positions[slot] += 1 (REQUEST: = start + length); ring row; step += 1."""
    row = tl.arange(0, ROWS)
    if REQUEST:
        slot = tl.load(request) + row
        live = row < 1
        position = tl.load(request + 1) + tl.load(request + 2) + row
    else:
        slot = tl.load(row_slots + row, mask=row < rows, other=-1)
        live = slot >= 0
        position = tl.load(positions + slot, mask=live, other=0) + 1
    token = key_id(key)
    value = key_value(key)
    now = tl.load(step)
    tl.debug_barrier()  # all lanes have read positions and step before any lane writes them
    # A NaN step's token must still be a row of the embedding table; no real id at all: likewise.
    tl.store(tokens + slot, tl.where(token == _NO_ID, 0, token), mask=live)
    tl.store(positions + slot, position, mask=live)
    if WRITE_RING:
        shown = tl.where(value != value, -2, tl.where(live, token, -3))
        shown = tl.where(live, shown, -3)
        tl.store(ring + (now % ring_size) * ring_stride + row, shown, mask=row < rows)
    tl.store(step, (now + 1) & 0x7FFFFFFF)


@triton.jit(do_not_specialize=["ring_size", "ring_stride", "rows", "parts"])
def argmax_finish_kernel(
    values,
    ids,
    tokens,
    positions,
    row_slots,
    request,
    ring,
    ring_size,
    ring_stride,
    step,
    rows,
    parts,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    REQUEST: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    key = _row_keys(values, ids, parts, rows, ROWS, PARTS)
    _finish(
        key,
        tokens,
        positions,
        row_slots,
        request,
        ring,
        ring_size,
        ring_stride,
        step,
        rows,
        ROWS,
        True,
        REQUEST,
    )


@triton.jit(do_not_specialize=["slot", "rank", "rows", "parts"])
def argmax_push_kernel(
    values,
    ids,
    peers,  # int64 [WORLD]
    slot,
    rank,
    rows,
    parts,
    WORLD: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a row, one warp: lane t stores to rank t, so no lane is replicated (sync.py)."""
    if PDL:
        gdc_launch_dependents()
    lane = tl.arange(0, 32)
    target = tl.load(peers + lane % WORLD)
    if PDL:
        gdc_wait()
    row = tl.program_id(0)
    key = tl.max(_row_keys(values + row * parts, ids + row * parts, parts, 1, 1, PARTS), 0)
    word = key_value(key).to(tl.int32, bitcast=True)
    address = target + slot + (rank * rows + row) * 8
    zero = tl.zeros((32,), tl.int32)
    push8(address, word + zero, key_id(key) + zero, lane < WORLD)


@triton.jit(
    do_not_specialize=[
        "own",
        "slot",
        "clear",
        "ring_size",
        "ring_stride",
        "status",
        "call_site",
        "rank",
        "limit_us",
        "rows",
    ]
)
def argmax_poll_kernel(
    own,
    slot,
    clear,
    tokens,
    positions,
    row_slots,
    request,
    ring,
    ring_size,
    ring_stride,
    step,
    status,
    call_site,
    rank,
    limit_us,
    rows,
    WORLD: tl.constexpr,
    WORLDS: tl.constexpr,
    ROWS: tl.constexpr,
    WRITE_RING: tl.constexpr,
    REQUEST: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program. Lane = message x row; the re-arm comes behind a barrier, so it may be the own
    slot.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    LANES: tl.constexpr = WORLDS * ROWS
    lane = tl.arange(0, LANES)
    row = lane % ROWS
    peer = tl.minimum(lane // ROWS, WORLD - 1)
    # Lanes beyond the messages poll the last rank or row again, which changes no maximum.
    at = ((peer * rows + tl.minimum(row, rows - 1)) * 8).to(tl.int64)
    words = wait_messages(own + slot + at, 0, peer, status, limit_us, rank, call_site, slot, 1, 2)
    tl.debug_barrier()
    armed = tl.full((LANES,), SENTINEL_32, tl.int32)
    push8(own + clear + at, armed, armed, row < rows)
    key = order_key(words[0].to(tl.float32, bitcast=True), words[1])
    best = tl.max(tl.reshape(key, (WORLDS, ROWS)), 0)
    _finish(
        best,
        tokens,
        positions,
        row_slots,
        request,
        ring,
        ring_size,
        ring_stride,
        step,
        rows,
        ROWS,
        WRITE_RING,
        REQUEST,
    )


def argmax_programs(columns: int) -> int:
    """Programs a row for `columns` logits: P of the [R, P] buffers."""
    return max(1, min(64, triton.cdiv(columns, 2 * COLUMNS)))


def argmax_partial(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    row_slots: torch.Tensor,
    values: torch.Tensor,
    ids: torch.Tensor,
    *,
    vocab_size: int,
    id_offset: int,
    request: torch.Tensor | None = None,
    pdl: bool = False,
) -> None:
    """Maxima of logits fp32 [R, V] per program into values fp32 [R, P] and ids int32 [R, P].

    temperature fp32 [S], seeds int32 [S], positions int32 [S]; row_slots int32 [R], -1 = padding
    (its result is ignored later). Column c is id id_offset + c; ids >= vocab_size never win. With
    `request` (int32 [3] = slot, start, length; R = 1, prefill) slot and position come from it.
    """
    rows, columns = logits.shape
    if logits.dtype != torch.float32 or not logits.is_contiguous():
        raise EngineError(f"argmax needs contiguous fp32 logits, not {logits.dtype}")
    argmax_partial_kernel[(rows, values.shape[1])](
        logits,
        temperature,
        seeds,
        positions,
        row_slots,
        row_slots if request is None else request,
        values,
        ids,
        columns,
        vocab_size - id_offset,
        id_offset,
        BLOCK=COLUMNS,
        REQUEST=request is not None,
        PDL=pdl,
        num_warps=4,
        num_stages=1,
        launch_pdl=pdl,
    )


def argmax_push(
    values: torch.Tensor,
    ids: torch.Tensor,
    peers: torch.Tensor,
    slot_offset_bytes: int,
    *,
    rank: int,
    world: int,
    pdl: bool = False,
) -> None:
    """Reduce [R, P] to one (value, id) a row and store the 8 bytes into message `rank` of every
    rank.

    Layout: base + slot + (rank * R + row) * 8, value fp32 then id int32 (`argmax_workspace`).
    """
    rows, parts = values.shape
    argmax_push_kernel[(rows,)](
        values,
        ids,
        peers,
        slot_offset_bytes,
        rank,
        rows,
        parts,
        WORLD=world,
        PARTS=triton.next_power_of_2(parts),
        PDL=pdl,
        num_warps=1,
        num_stages=1,
        launch_pdl=pdl,
    )


def argmax_poll(
    buffer: torch.Tensor | int,
    slot_offset_bytes: int,
    clear_offset_bytes: int,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    row_slots: torch.Tensor,
    ring: torch.Tensor,
    step: torch.Tensor,
    status: torch.Tensor,
    *,
    rank: int,
    world: int,
    call_site: int,
    request: torch.Tensor | None = None,
    pdl: bool = False,
    limit_us: int = DEFAULT_LIMIT_US,
) -> None:
    """Wait for all ranks' winners, choose, and update the state of each live row's slot.

    tokens[slot] = id, positions[slot] += 1 (with `request`: = start + length). Rank 0 writes
    ring[step % RING, r] = id, -2 (NaN) or -3 (padding row); ring int32 [RING, R] pinned, step
    int32 [1]. Re-arms clear_offset_bytes, which may be the slot itself (slots.py).
    """
    rows = ring.shape[1]
    worlds = triton.next_power_of_2(world)
    argmax_poll_kernel[(1,)](
        address_of(buffer),
        slot_offset_bytes,
        clear_offset_bytes,
        tokens,
        positions,
        row_slots,
        row_slots if request is None else request,
        ring,
        ring.shape[0],
        ring.stride(0),
        step,
        status.data_ptr(),
        call_site,
        rank,
        limit_us,
        rows,
        WORLD=world,
        WORLDS=worlds,
        ROWS=max(triton.next_power_of_2(rows), 32 // worlds),
        WRITE_RING=rank == 0,
        REQUEST=request is not None,
        PDL=pdl,
        num_warps=1,
        num_stages=1,
        launch_pdl=pdl,
    )


def argmax_finish(
    values: torch.Tensor,
    ids: torch.Tensor,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    row_slots: torch.Tensor,
    ring: torch.Tensor,
    step: torch.Tensor,
    *,
    request: torch.Tensor | None = None,
    pdl: bool = False,
) -> None:
    """The form without an exchange (one rank): choose among [R, P] and update the state as
    argmax_poll.
    """
    rows, parts = values.shape
    argmax_finish_kernel[(1,)](
        values,
        ids,
        tokens,
        positions,
        row_slots,
        row_slots if request is None else request,
        ring,
        ring.shape[0],
        ring.stride(0),
        step,
        rows,
        parts,
        ROWS=triton.next_power_of_2(rows),
        PARTS=triton.next_power_of_2(parts),
        REQUEST=request is not None,
        PDL=pdl,
        num_warps=1,
        num_stages=1,
        launch_pdl=pdl,
    )
