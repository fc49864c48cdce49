# ruff: noqa: RUF005 - Triton has no starred tuples.
# mypy: disable-error-code="assignment, var-annotated"
"""A GEMV whose input is an all-reduce that it waits for itself: h = x + sum over ranks of their messages.

    h[R, K] = round16(sum over r = 0..W-1 of fp32(message_r) + fp32(x)),  y = W @ norm(h), h to memory

The same bits as `all_reduce.poll_residual` followed by the GEMV on h: the same order, one rounding. x is the
residual stream, W the number of ranks. It saves the poll's launch, the round trip of h through memory and
the wait for that kernel's end; weights are on their way already while a message is awaited.

Every program needs all of h, so every program polls all messages: programs x W x R x K x 2 bytes from L2 beside
programs x R x K x 2 of x (72B, W = 2, R = 1, 132 programs: 4.3 MB, 0.8 us at 5.5 TB/s; as much again for 264).
`polls_in_prologue` draws the line. Program i of the grid also writes a share of h (+0.0 for -0.0, as the other
form does) and re-arms a share of another slot: never the one that is polled, which other programs still read
(slots.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra import cuda

from engine.errors import EngineError
from engine.kernels.packed import high_half, low_half, spread_words, sum_messages, sum_word
from engine.kernels.slots import lamport_slots
from engine.kernels.sync import (
    DEFAULT_LIMIT_US,
    INTERPRET,
    SENTINEL_16,
    load16,
    push16,
    wait_messages,
)
from engine.kernels.sync_parts import wait_parts

# Most bytes of all ranks' messages that each program of a GEMV polls. On an H200, messages sent to itself (bench.poll):
# 14 KB (7B, 2 ranks) add 0.95 us where a launch that polls adds 1.31; 32 KB (72B, 2 ranks) 1.53 and 1.58; 64 KB 2.8 and
# 1.8. On two of them (bench.stages): 32 KB win 0.3 us an exchange, 0.35 % of the step.
MOST_BYTES = 32 << 10
MOST_LOADS = tl.constexpr(8)  # 16-byte loads of a thread in flight together: 32 registers


def polls_in_prologue(world: int, rows: int, hidden: int) -> bool:
    """Whether the consumer of an all-reduce of [rows, hidden] 16-bit values polls it. Bits are equal either way."""
    return world > 1 and hidden % 8 == 0 and world * rows * hidden * 2 <= MOST_BYTES


def polled_slots(world: int, rows: int, hidden: int, calls: int) -> int:
    """Slots of a step's `calls` all-reduces if their consumers poll (slots.py); 0: they do not. Every call of a
    step is polled by its consumer or none, and two calls have no third slot to re-arm."""
    if calls <= 2 or not polls_in_prologue(world, rows, hidden):
        return 0
    return lamport_slots(calls)


@dataclass(frozen=True)
class Poll:
    """The all-reduce in front of a GEMV: where the messages arrive, and what becomes of h.

    buffer: this rank's receive buffer; slot_offset_bytes: its slot, `world` messages of R x K 16-bit values,
    R*K*2 bytes apart. clear_offset_bytes: the slot to re-arm, another one. hidden [R, K] 16-bit, no alias of x.
    status, rank, call_site, limit_us: see `sync.py`.
    """

    buffer: torch.Tensor | int
    slot_offset_bytes: int
    clear_offset_bytes: int
    hidden: torch.Tensor
    status: torch.Tensor
    rank: int
    world: int
    call_site: int
    limit_us: int = DEFAULT_LIMIT_US


POLL_SCALARS = ["messages", "rearm", "status", "limit_us", "poll_rank", "poll_site", "poll_slot"]


def poll_arguments(poll: Poll | None, x: torch.Tensor) -> dict[str, Any]:
    """Kernel arguments of a poll, by name. Raises EngineError for what the kernels cannot carry."""
    if poll is None:
        return {**dict.fromkeys(["hidden_ptr", *POLL_SCALARS]), "POLL": 0}
    if poll.clear_offset_bytes == poll.slot_offset_bytes:
        raise EngineError("a GEMV that polls cannot re-arm the slot that its other programs read")
    if x.shape[1] % 8 or x.element_size() != 2:
        raise EngineError(f"a GEMV polls rows of 16-byte words, not {x.shape[1]} x {x.dtype}")
    if poll.hidden.shape != x.shape or poll.hidden.data_ptr() == x.data_ptr() != 0:
        raise EngineError(
            f"hidden {list(poll.hidden.shape)} must be another tensor of shape {list(x.shape)}"
        )
    base = poll.buffer if isinstance(poll.buffer, int) else poll.buffer.data_ptr()
    return {
        "hidden_ptr": poll.hidden, "messages": base + poll.slot_offset_bytes,
        "rearm": base + poll.clear_offset_bytes, "status": poll.status.data_ptr(),
        "limit_us": poll.limit_us, "poll_rank": poll.rank, "poll_site": poll.call_site,
        "poll_slot": poll.slot_offset_bytes, "POLL": poll.world,
    }  # fmt: skip


@triton.jit
def arm(address, live):
    """Sentinels into 16 bytes a lane."""
    armed = (address * 0 + SENTINEL_16).to(tl.int32)
    push16(address, armed, armed, armed, armed, live)


@triton.jit
def poll_tile(
    x_ptr,
    poll,
    row,
    start,
    R: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WORLD: tl.constexpr,
):
    """h[row, start : start + BLOCK_K], 16-bit, zero beyond K; with this program's shares of the rest.

    poll: the kernel's hidden_ptr and POLL_SCALARS.
    """
    hidden_ptr, messages, rearm, status, limit_us, rank, site, slot = poll
    chunk = start // 8 + tl.arange(0, BLOCK_K // 8)
    live = chunk < K // 8
    at = row * K * 2 + tl.minimum(chunk, K // 8 - 1).to(tl.int64) * 16
    share = row * tl.cdiv(K, BLOCK_K) + start // BLOCK_K
    mine = tl.program_id(0) == share % tl.num_programs(0)
    if mine:
        for r in tl.static_range(WORLD):
            arm(rearm + r * R * K * 2 + at, live)
    held = load16(x_ptr.to(tl.int64) + at, live)
    words = wait_messages(messages + at, R * K * 2, 0, status, limit_us, rank, site, slot, WORLD, 4)
    y = sum_messages(words, held, WORLD, True, x_ptr.dtype.element_ty)
    if mine:
        push16(hidden_ptr.to(tl.int64) + at, y[0], y[1], y[2], y[3], live)
    low, high = (), ()
    for i in tl.static_range(4):
        low = low + (tl.where(live, low_half(y[i], x_ptr.dtype.element_ty), 0.0),)
        high = high + (tl.where(live, high_half(y[i], x_ptr.dtype.element_ty), 0.0),)
    return tl.reshape(spread_words(low, high), (BLOCK_K,)).to(x_ptr.dtype.element_ty)


@triton.jit
def by_thread(v):
    """v [BLOCK_K] of `poll_tile` in the order in which `tl.sum` adds values that a kernel loads.

    A thread sums up to 8 neighbours of those, as its load of 16-bit values brings them; values of a poll are dealt
    out one by one. What is summed must have gone through arithmetic: Triton takes a tensor that was only reshaped
    in any order (`allow_reorder`).
    """
    if INTERPRET:
        return v
    THREADS: tl.constexpr = cuda.num_threads()
    LENGTH: tl.constexpr = v.shape[0]
    EACH: tl.constexpr = min(8, LENGTH // THREADS)
    if EACH < 2:
        return v
    else:
        groups = tl.reshape(v, (LENGTH // (THREADS * EACH), THREADS, EACH))
        return tl.reshape(tl.permute(groups, (0, 2, 1)), (LENGTH,))


@gluon.jit
def poll_parts(
    x_ptr, poll, row, lane, FIRST: gl.constexpr, PARTS: gl.constexpr, R: gl.constexpr, K: gl.constexpr,
    WORLD: gl.constexpr, PROGRAMS: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Chunks FIRST .. FIRST + PARTS - 1 of `poll_chunks`. row [RP, 1], lane [1, chunk / 8]: the 8 values of a lane."""
    hidden_ptr, messages, _, status, limit_us, rank, site, slot = poll
    LANES: gl.constexpr = lane.shape[1]
    DTYPE: gl.constexpr = x_ptr.dtype.element_ty
    # Rows of padding poll the last row once more.
    at = (gl.minimum(row, R - 1) * (K * 2) + (lane + FIRST * LANES) * 16).to(gl.int64)
    held = ()
    inside = ()
    for part in gl.static_range(PARTS):
        inside = inside + ((row < R) & (lane + (FIRST + part) * LANES < K // 8),)
        held = held + (load16(x_ptr.to(gl.int64) + at + part * LANES * 16, inside[part]),)
    exists = (row >= 0) & (lane + (FIRST + PARTS - 1) * LANES < K // 8)
    words = wait_parts(
        messages + at, exists.to(gl.int32), status, limit_us, rank, site, slot, PARTS, WORLD, LANES * 16,
        R * K * 2,
    )  # fmt: skip
    chunks = ()
    for part in gl.static_range(PARTS):
        mine = ()
        for r in gl.static_range(WORLD):
            for i in gl.static_range(4):
                mine = mine + (words[(r * PARTS + part) * 4 + i],)
        if gl.program_id(0) == (FIRST + part) % PROGRAMS:
            y = sum_messages(mine, held[part], WORLD, True, DTYPE)
            target = hidden_ptr.to(gl.int64) + at + part * LANES * 16
            push16(target, y[0], y[1], y[2], y[3], inside[part])
        low = ()
        high = ()
        for i in gl.static_range(4):
            a, b = sum_word(mine, i, held[part], WORLD, True, DTYPE)
            if row.shape[0] > R or (FIRST + part + 1) * LANES * 8 > K:
                a = gl.where(inside[part], a, 0.0)
                b = gl.where(inside[part], b, 0.0)
            low = low + (a,)
            high = high + (b,)
        v = gl.reshape(spread_words(low, high), [row.shape[0], LANES * 8]).to(DTYPE)
        chunks = chunks + (gl.convert_layout(v, LAYOUT, assert_trivial=True),)
    return chunks


@gluon.jit
def poll_chunks(
    x_ptr, poll, R: gl.constexpr, K: gl.constexpr, RP: gl.constexpr, CHUNK: gl.constexpr,
    WORLD: gl.constexpr, PROGRAMS: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """All of h in registers: a tuple of [RP, CHUNK] 16-bit tensors of layout LAYOUT (8 neighbouring values a
    thread), zero beyond R and K; with this program's shares of the rest: a chunk of h, and one of a message to
    re-arm, while the messages are on their way. poll: as for `poll_tile`."""
    CHUNKS: gl.constexpr = (K + CHUNK - 1) // CHUNK
    TOGETHER: gl.constexpr = MOST_LOADS // (WORLD * RP) if MOST_LOADS > WORLD * RP else 1
    LANES: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [1, gl.num_warps()], [1, 0])
    row = gl.arange(0, RP, gl.SliceLayout(1, LANES))[:, None]
    lane = gl.arange(0, CHUNK // 8, gl.SliceLayout(0, LANES))[None, :]
    for share in range(PROGRAMS - 1 - gl.program_id(0), CHUNKS * WORLD, PROGRAMS):
        begin = share % CHUNKS * (CHUNK // 8)
        at = (share // CHUNKS * R + row) * (K * 2) + (lane + begin) * 16
        arm(poll[2] + at.to(gl.int64), (row < R) & (lane + begin < K // 8))
    chunks = ()
    for first in gl.static_range(0, CHUNKS - CHUNKS % TOGETHER, TOGETHER):
        chunks = chunks + poll_parts(
            x_ptr, poll, row, lane, first, TOGETHER, R, K, WORLD, PROGRAMS, LAYOUT
        )
    if CHUNKS % TOGETHER:
        REST: gl.constexpr = CHUNKS % TOGETHER
        chunks = chunks + poll_parts(
            x_ptr, poll, row, lane, CHUNKS - REST, REST, R, K, WORLD, PROGRAMS, LAYOUT
        )
    return chunks
