"""Sampling under controls: top-k, top-p, min-p, penalties, logit bias, exact over all shards.
Launchers: sample.py.

`sample_ref.py` defines what is computed. The tail of a step, launched after the step's own greedy or
plain sampling and replacing its token:

    adjust   scores = penalties and bias applied to the rank's logits; pushed to every rank
    gather   (ranks > 1) polls all ranks' scores: each rank then holds the row over the vocabulary
    search   16 launches. Top-k and top-p are both "the largest t for which the sum over ids with
             z >= t of a weight reaches a target" (weight 1 and k; exp((z - max) / T) and top_p of
             the total). t is found in the 32-bit order key of fp32, one hex digit a launch, most
             significant first: launch j sums the weight above each of 16 candidates.
    pick     per-program maxima of z + T * Gumbel over the ids at or above both thresholds
    settle   the winner to tokens, counts and the host ring; clears the sums for the next step

Sums are int64 atomics of whole weight units: exact, hence the same bits on all ranks, at every TP
degree and in every order; so all ranks choose the same token with no further exchange.

Why whole rows and not candidates: 152064 fp32 are 608 KB a row. A rank receives (W - 1) / W of it,
304 KB at TP=2: about 1 us of NVLink at 450 GB/s, no more than the fixed cost of an exchange, and
nothing is truncated: every k, every p. Sharded sums instead would cost an exchange a digit (16).
The exchange is a Lamport exchange as that of the argmax (slots.py): one slot, re-armed by the program
that alone reads it; an all-reduce lies between two uses.

Rows without top-k (or top-p) leave the launches of its search at once. Bytes: a search launch reads
the row from L2, 608 KB: 0.1 us; the time is 19 or 20 launches.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.argmax_kernel import (
    LOWEST_KEY,
    add_noise,
    all_row_slots,
    key_token,
    order_key,
    publish,
    row_keys,
    row_slot,
    store_key,
    value_key,
)
from engine.kernels.sample_ref import BIASED as _BIASED_COLUMN
from engine.kernels.sample_ref import (
    CONTROLS,
    COUNTED,
    FREQUENCY,
    MIN_P,
    PRESENCE,
    REPETITION,
    TOP_K,
    TOP_P,
)
from engine.kernels.sync import (
    SENTINEL_32,
    gdc_launch_dependents,
    gdc_wait,
    push8,
    wait_messages,
)

PASSES = 16  # launches of the search: 8 hex digits of top-k, then 8 of top-p
SUMS = PASSES * 16  # int64 a row
PEAK_NONE = -(2**31)  # below the key of every fp32

_TOP_K = tl.constexpr(TOP_K)
_TOP_P = tl.constexpr(TOP_P)
_MIN_P = tl.constexpr(MIN_P)
_REPETITION = tl.constexpr(REPETITION)
_FREQUENCY = tl.constexpr(FREQUENCY)
_PRESENCE = tl.constexpr(PRESENCE)
_COUNTED = tl.constexpr(COUNTED)
_BIASED = tl.constexpr(_BIASED_COLUMN)
_CONTROLS = tl.constexpr(CONTROLS)
_SUMS = tl.constexpr(SUMS)
_PEAK_NONE = tl.constexpr(PEAK_NONE)


@triton.jit
def _high(values):
    """The key as int64 in [0, 2^32)."""
    return value_key(values).to(tl.int64) + 2147483648


@triton.jit
def _weights(values, peak, scale):
    """exp((z - max) / T), exactly 1 at the maximum. peak: int32 key of the row's maximum."""
    top = tl.where(peak < 0, peak ^ 0x7FFFFFFF, peak).to(tl.float32, bitcast=True)
    return tl.where(values >= top, 1.0, tl.exp((values - top) / scale))


@triton.jit
def _found(sums, target, digits):
    """int64: the first `digits` hex digits of the threshold, from the sums of their launches."""
    j = tl.arange(0, 8)
    i = tl.arange(0, 16)
    above = tl.load(sums + j[:, None] * 16 + i[None, :], mask=j[:, None] < digits, other=0)
    digit = tl.maximum(tl.sum((above >= target).to(tl.int32), 1) - 1, 0)
    parts = tl.where(j < digits, digit.to(tl.int64) << (28 - 4 * j).to(tl.int64), 0)
    return tl.sum(parts, 0)


@triton.jit
def _share(sums, p):
    """int64 weight units that top-p must reach, from the total that its first launch left."""
    total = tl.load(sums + 128)
    return tl.maximum((p.to(tl.float64) * total.to(tl.float64)).to(tl.int64), 1)


@triton.jit(do_not_specialize=["rank", "rows", "limit"])
def adjust_kernel(
    logits,  # fp32 [R, V]
    controls,  # fp32 [S, CONTROLS]
    counts,  # int32 [S, V]
    bias,  # fp32 [S, V]
    row_slots,
    request,
    scores,  # fp32 [R, total] (WORLD = 1)
    peaks,  # int32 [R] (WORLD = 1)
    peers,  # int64 [WORLD]
    rank,
    rows,
    columns,  # V
    limit,  # columns below it are real
    total,  # WORLD * V
    WORLD: tl.constexpr, BLOCK: tl.constexpr, REQUEST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    slot = tl.maximum(row_slot(row_slots, request, row, True, REQUEST), 0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    z = tl.load(logits + row.to(tl.int64) * columns + column, mask=inside, other=0.0)
    control = controls + slot * _CONTROLS
    at = slot.to(tl.int64) * columns + column
    if tl.load(control + _COUNTED) > 0:
        n = tl.load(counts + at, mask=inside, other=0)
        repetition = tl.load(control + _REPETITION)
        z = tl.where(n > 0, tl.where(z > 0, tl.div_rn(z, repetition), z * repetition), z)
        occurrences = n >> 1
        z -= tl.load(control + _FREQUENCY) * occurrences.to(tl.float32)
        z -= tl.load(control + _PRESENCE) * (occurrences > 0).to(tl.float32)
    if tl.load(control + _BIASED) > 0:
        z += tl.load(bias + at, mask=inside, other=0.0)
    z = tl.where(column < limit, z, float("-inf"))
    if WORLD == 1:
        tl.store(scores + row.to(tl.int64) * total + column, z, mask=inside)
        key = tl.where(inside, value_key(z), _PEAK_NONE)
        tl.atomic_max(peaks + row, tl.max(key, 0), sem="relaxed")
    else:
        bits = z.to(tl.int32, bitcast=True)
        bits = tl.where(bits == SENTINEL_32, 0, bits)  # -0.0 would read as "not arrived"
        first, second = tl.split(tl.reshape(bits, (BLOCK // 2, 2)))
        pair = tl.program_id(1) * BLOCK + 2 * tl.arange(0, BLOCK // 2)
        offset = ((rank * rows + row).to(tl.int64) * columns + pair) * 4
        for peer in tl.static_range(WORLD):
            push8(tl.load(peers + peer) + offset, first, second, pair < columns)


@triton.jit(
    do_not_specialize=["own", "status", "call_site", "rank", "limit_us", "rows", "columns", "total"]
)
def gather_kernel(
    own,  # address of this rank's exchange buffer
    scores,
    peaks,
    status,
    call_site,
    rank,
    limit_us,
    rows,
    columns,
    total,
    PAIRS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Programs (row, part); each alone polls, and re-arms, its 8-byte words."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    column = 2 * (tl.program_id(1) * PAIRS + tl.arange(0, PAIRS))
    real = column < total
    column = tl.minimum(column, total - 2)  # lanes beyond poll the last pair again
    peer = column // columns
    at = (((peer * rows + row).to(tl.int64) * columns) + (column - peer * columns)) * 4
    words = wait_messages(own + at, 0, peer, status, limit_us, rank, call_site, 0, 1, 2)
    tl.debug_barrier()
    armed = tl.full((PAIRS,), SENTINEL_32, tl.int32)
    push8(own + at, armed, armed, real)
    first = words[0].to(tl.float32, bitcast=True)
    second = words[1].to(tl.float32, bitcast=True)
    target = scores + row.to(tl.int64) * total + column
    tl.store(target, first, mask=real)
    tl.store(target + 1, second, mask=real)
    tl.atomic_max(
        peaks + row, tl.max(tl.maximum(value_key(first), value_key(second)), 0), sem="relaxed"
    )


@triton.jit(do_not_specialize=["vocab", "number"])
def search_kernel(
    scores,
    temperature,
    controls,
    row_slots,
    request,
    peaks,
    sums,  # int64 [R, PASSES, 16]
    vocab,
    total,
    number,  # of the launch, 0..15
    BLOCK: tl.constexpr, REQUEST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    slot = row_slot(row_slots, request, row, True, REQUEST)
    safe = tl.maximum(slot, 0)
    scale = tl.load(temperature + safe)
    k = tl.load(controls + safe * _CONTROLS + _TOP_K).to(tl.int64)
    p = tl.load(controls + safe * _CONTROLS + _TOP_P)
    by_weight = number >= 8
    digit = number % 8
    bounded = (k > 0) & (k < vocab)
    wanted = (by_weight & (p < 1.0)) | ((by_weight == 0) & bounded)
    if (slot >= 0) & (scale > 0) & wanted:
        mine = sums + row * _SUMS
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = column < vocab
        z = tl.load(scores + row.to(tl.int64) * total + column, mask=column < total, other=0.0)
        high = _high(z)
        if by_weight:
            floor = tl.where(bounded, _found(mine, k, 8), 0)
            prefix = _found(mine + 128, _share(mine, p), digit)
            weight = (_weights(z, tl.load(peaks + row), scale) * 1099511627776.0).to(tl.int64)
            weight = tl.where(inside & (high >= floor), weight, 0)
        else:
            prefix = _found(mine, k, digit)
            weight = inside.to(tl.int64)
        # Candidates prefix + i << shift: how many of them lie at or below each key.
        steps = (high - prefix) >> (28 - 4 * digit).to(tl.int64)
        reached = tl.minimum(tl.maximum(steps, -1), 15).to(tl.int32)
        i = tl.arange(0, 16)
        above = tl.where(reached[:, None] >= i[None, :], weight[:, None], 0)
        tl.atomic_add(mine + number * 16 + i, tl.sum(above, 0), sem="relaxed")


@triton.jit(do_not_specialize=["vocab"])
def pick_kernel(
    scores, temperature, seeds, positions, controls, row_slots, request, peaks, sums,
    values,  # fp32 [R, P]
    ids,  # int32 [R, P]
    vocab, total, BLOCK: tl.constexpr, REQUEST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    slot = tl.maximum(row_slot(row_slots, request, row, True, REQUEST), 0)
    scale = tl.load(temperature + slot)
    seed = tl.load(seeds + slot)
    position = tl.load(positions + slot) - 1  # the step has advanced it already
    control = controls + slot * _CONTROLS
    k = tl.load(control + _TOP_K).to(tl.int64)
    p = tl.load(control + _TOP_P)
    least = tl.load(control + _MIN_P)
    peak = tl.load(peaks + row)
    mine = sums + row * _SUMS
    floor = tl.zeros((), tl.int64)
    if scale > 0:
        if (k > 0) & (k < vocab):
            floor = _found(mine, k, 8)
        if p < 1.0:
            floor = tl.maximum(floor, _found(mine + 128, _share(mine, p), 8))
    best = tl.full((BLOCK,), LOWEST_KEY, tl.int64)
    for start in range(part * BLOCK, vocab, parts * BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < vocab
        z = tl.load(scores + row.to(tl.int64) * total + column, mask=column < total, other=0.0)
        keep = inside & (_high(z) >= floor)
        if scale > 0:
            if least > 0:
                keep = keep & ((_weights(z, peak, scale) >= least) | (z != z))
            z = add_noise(z, scale, seed, position, column)
        best = tl.maximum(best, tl.where(keep, order_key(z, column), LOWEST_KEY))
    store_key(tl.max(best, 0), values, ids, row * parts + part, True)


@triton.jit(do_not_specialize=["ring_size", "ring_stride", "rows", "parts", "offset", "columns"])
def settle_kernel(
    values, ids, tokens, row_slots, request, ring, ring_size, ring_stride, step, controls, counts, peaks,
    sums, rows, parts,
    offset,  # first id of this rank's shard
    columns,  # ids of the shard
    ROWS: tl.constexpr, PARTS: tl.constexpr, WRITE_RING: tl.constexpr, REQUEST: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program. tokens[slot] = id; counts[slot, id] += 2; ring row; step += 1; sums cleared."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    key = row_keys(values, ids, parts, rows, ROWS, PARTS)
    slot = all_row_slots(row_slots, request, rows, ROWS, REQUEST)
    local = key_token(key) - offset
    counted = (slot >= 0) & (local >= 0) & (local < columns)
    counted &= tl.load(controls + slot * _CONTROLS + _COUNTED, mask=slot >= 0, other=0.0) > 0
    count = counts + slot.to(tl.int64) * columns + local
    seen = tl.load(count, mask=counted, other=0)
    publish(key, slot, tokens, ring, ring_size, ring_stride, step, rows, ROWS, WRITE_RING)
    tl.store(count, seen + 2, mask=counted)
    row = tl.arange(0, ROWS)
    tl.store(peaks + row, tl.full((ROWS,), _PEAK_NONE, tl.int32), mask=row < rows)
    cell = tl.arange(0, _SUMS)
    for r in range(rows):
        tl.store(sums + r * _SUMS + cell, tl.zeros((_SUMS,), tl.int64))
