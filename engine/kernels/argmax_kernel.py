"""Kernels of argmax.py, and what sampling under controls (sample_kernel.py) has in common with them: the order
of candidates, a row's slot, per-program maxima, the token's way to the state and the host ring."""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.gumbel import gumbel
from engine.kernels.sync import (
    SENTINEL_32,
    gdc_launch_dependents,
    gdc_wait,
    push8,
    wait_messages,
)

NO_ID = tl.constexpr(0x7FFFFFFF)
_NAN_KEY = tl.constexpr(0x7FFFFFFF)
# (-inf, no id): below every real pair, yet a number.
LOWEST_KEY = tl.constexpr(-2139095041 << 32)


@triton.jit
def value_key(values):
    """int32 that orders fp32 values: NaN first, then larger; the two zeros are equal."""
    values = tl.where(values == 0.0, 0.0, values)
    bits = values.to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(values != values, _NAN_KEY, key)


@triton.jit
def order_key(values, ids):
    """int64 that orders (value, id): NaN first, then larger value, then lower id."""
    return (value_key(values).to(tl.int64) << 32) | (ids ^ 0x7FFFFFFF).to(tl.int64)


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


@triton.jit
def row_slot(row_slots, request, row, live, REQUEST: tl.constexpr):
    """Slot of `row` (-1: padding, and where `live` is false); that of the request in prefill."""
    if REQUEST:
        slot = tl.load(request)
    else:
        slot = tl.load(row_slots + row, mask=live, other=-1)
    return slot


@triton.jit
def all_row_slots(row_slots, request, rows, ROWS: tl.constexpr, REQUEST: tl.constexpr):
    """int32 [ROWS]: slot of every row, -1 for padding and beyond `rows`; prefill has one row."""
    row = tl.arange(0, ROWS)
    if REQUEST:
        slot = tl.where(row < 1, tl.load(request), -1)
    else:
        slot = tl.load(row_slots + row, mask=row < rows, other=-1)
    return slot


@triton.jit
def row_noise(temperature, seeds, positions, row_slots, request, row, live, REQUEST: tl.constexpr):
    """(temperature, seed, position) of `row`; those of slot 0 for a padding row, whose result nobody reads."""
    slot = tl.maximum(row_slot(row_slots, request, row, live, REQUEST), 0)
    if REQUEST:
        position = tl.load(request + 1) + tl.load(request + 2) - 1
    else:
        position = tl.load(positions + slot)
    return tl.load(temperature + slot), tl.load(seeds + slot), position


@triton.jit
def add_noise(value, temperature, seed, position, ids):
    """value + temperature * Gumbel noise. One rounding, so that every kernel gets the same bits: a sum could
    fuse with the product that `value` comes from instead."""
    return tl.fma(temperature, gumbel(seed, position, ids), value)


@triton.jit
def store_key(key, values, ids, at, live):
    """An order key as (value, id) at values[at], ids[at]."""
    tl.store(values + at, key_value(key), mask=live)
    tl.store(ids + at, key_id(key), mask=live)


@triton.jit
def row_keys(values, ids, parts, rows, ROWS: tl.constexpr, PARTS: tl.constexpr):
    """int64 [ROWS]: best key of each row of [rows, parts], PARTS at a time."""
    r = tl.arange(0, ROWS)[:, None]
    best = tl.full((ROWS, PARTS), LOWEST_KEY, tl.int64)
    for start in range(0, parts, PARTS):
        p = start + tl.arange(0, PARTS)[None, :]
        real = (r < rows) & (p < parts)
        at = r * parts + p
        value = tl.load(values + at, mask=real, other=float("-inf"))
        token = tl.load(ids + at, mask=real, other=NO_ID)
        best = tl.maximum(best, order_key(value, token))
    return tl.max(best, 1)


@triton.jit
def key_token(key):
    """Id of an order key that is always a row of the embedding table, also where no id was real."""
    token = key_id(key)
    return tl.where(token == NO_ID, 0, token)


@triton.jit
def publish(
    key, slot, tokens, ring, ring_size, ring_stride, step, rows, ROWS: tl.constexpr,
    WRITE_RING: tl.constexpr,
):  # fmt: skip
    """key int64 [ROWS], one winner a row, to tokens[slot] (slot -1: nowhere) and the ring; step += 1.

    All loads of all lanes before it are done before any lane stores.
    """
    row = tl.arange(0, ROWS)
    live = slot >= 0
    token = key_token(key)
    value = key_value(key)
    now = tl.load(step)
    tl.debug_barrier()
    tl.store(tokens + slot, token, mask=live)
    if WRITE_RING:
        shown = tl.where(value != value, -2, token)
        shown = tl.where(live, shown, -3)
        tl.store(ring + (now % ring_size) * ring_stride + row, shown, mask=row < rows)
    tl.store(step, (now + 1) & 0x7FFFFFFF)


@triton.jit
def _finish(
    key, tokens, row_slots, request, ring, ring_size, ring_stride, step, positions, rows,
    ROWS: tl.constexpr, WRITE_RING: tl.constexpr, REQUEST: tl.constexpr,
):  # fmt: skip
    """`publish`, and positions[slot] += 1 (REQUEST: = start + length)."""
    slot = all_row_slots(row_slots, request, rows, ROWS, REQUEST)
    if REQUEST:
        position = tl.load(request + 1) + tl.load(request + 2)
    else:
        position = tl.load(positions + slot, mask=slot >= 0, other=0) + 1
    publish(key, slot, tokens, ring, ring_size, ring_stride, step, rows, ROWS, WRITE_RING)
    tl.store(positions + slot, position, mask=slot >= 0)


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
    BLOCK: tl.constexpr, REQUEST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    scale, seed, position = row_noise(
        temperature, seeds, positions, row_slots, request, row, True, REQUEST
    )
    best = tl.full((BLOCK,), LOWEST_KEY, tl.int64)
    for start in range(part * BLOCK, columns, parts * BLOCK):
        column = start + tl.arange(0, BLOCK)
        real = column < tl.minimum(columns, limit)
        # The mask has the granularity of `columns`, so that 16 bytes load at once; `limit` has none.
        inside = column < columns
        value = tl.load(logits + row.to(tl.int64) * columns + column, mask=inside, other=0.0)
        token = id_offset + column
        if scale > 0:
            value = add_noise(value, scale, seed, position, token)
        best = tl.maximum(best, tl.where(real, order_key(value, token), LOWEST_KEY))
    store_key(tl.max(best, 0), values, ids, row * parts + part, True)


@triton.jit(do_not_specialize=["ring_size", "ring_stride", "rows", "parts"])
def argmax_finish_kernel(
    values, ids, tokens, row_slots, request, ring, ring_size, ring_stride, step, positions, rows, parts,
    ROWS: tl.constexpr, PARTS: tl.constexpr, REQUEST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    key = row_keys(values, ids, parts, rows, ROWS, PARTS)
    _finish(
        key, tokens, row_slots, request, ring, ring_size, ring_stride, step, positions, rows, ROWS,
        True, REQUEST,
    )  # fmt: skip


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
    THREADS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a row. Thread t stores to rank t; a lane a thread, so that none is replicated (sync.py)."""
    if PDL:
        gdc_launch_dependents()
    lane = tl.arange(0, THREADS)
    target = tl.load(peers + lane % WORLD)
    if PDL:
        gdc_wait()
    row = tl.program_id(0)
    key = tl.max(row_keys(values + row * parts, ids + row * parts, parts, 1, 1, PARTS), 0)
    word = key_value(key).to(tl.int32, bitcast=True)
    address = target + slot + (rank * rows + row) * 8
    zero = tl.zeros((THREADS,), tl.int32)
    push8(address, word + zero, key_id(key) + zero, lane < WORLD)


@triton.jit(
    do_not_specialize=["own", "slot", "clear", "ring_size", "ring_stride", "status", "call_site", "rank",
                       "limit_us", "rows"]
)  # fmt: skip
def argmax_poll_kernel(
    own, slot, clear, tokens, row_slots, request, ring, ring_size, ring_stride, step, positions, status,
    call_site, rank, limit_us, rows, WORLD: tl.constexpr, WORLDS: tl.constexpr, ROWS: tl.constexpr,
    WRITE_RING: tl.constexpr, REQUEST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
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
        best, tokens, row_slots, request, ring, ring_size, ring_stride, step, positions, rows, ROWS,
        WRITE_RING, REQUEST,
    )  # fmt: skip
