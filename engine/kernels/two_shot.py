"""Two-shot all-reduce for prefill: reduce-scatter, then all-gather, both by Lamport pushes.

    out[rows, H] = round16(sum over ranks in order of fp32(x_r) + fp32(residual))

Rank s owns shard s of the flat message (ceil(chunks / W) chunks of 16 bytes).
1. scatter: push shard s of the own partial to rank s.
2. reduce: poll the own shard from all ranks, sum in rank order, + residual, round once, push the
   result to every rank.
3. gather: poll all shards, copy them to `out`, re-arm. Each value is summed by one rank only, so
   all ranks hold the same bits, and they equal the one-shot's.

Bytes a rank sends: 2 (W - 1) / W messages against (W - 1) of the one-shot: 0.5 x at 4 ranks, 0.25
x at 8, equal at 2. T = 512, H = 8192, 8 ranks: 8.4 MB a message, 14.7 MB sent, 31 us of a 478 GB/s
link.

Slots: a call is a full exchange (the gather needs every owner, each owner needed every rank), so
the rule of slots.py holds with calls as exchanges, for both areas of a slot.

Launch forms: `phase` scatter, reduce and gather are three launches; the ranks of one device run
each phase for all of them before the next phase, so that no kernel spins in front of what it waits
for (the argument of all_reduce.py, phase by phase). `phase="all"` is one launch, for one rank a
device; its grid must be resident at once, and each program scatters all its chunks before its
first poll.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.errors import EngineError
from engine.kernels.all_reduce import AllReduceConfig, heuristic
from engine.kernels.messages import arm, launch, load_partial, message_chunks, peer_bases, poll_sum
from engine.kernels.slots import LamportWorkspace
from engine.kernels.sync import (
    DEFAULT_LIMIT_US,
    gdc_launch_dependents,
    gdc_wait,
    load16,
    push16,
    wait_messages,
)

PHASES = ("scatter", "reduce", "gather", "all")


def two_shot_workspace(world: int, rows: int, hidden: int, slots: int) -> LamportWorkspace:
    """A slot: a scatter area of `world` shards, then a gather area of as many."""
    shard_chunks = -(-rows * hidden * 2 // (16 * world))
    return LamportWorkspace(2 * world, 1, shard_chunks * 8, slots)


@triton.jit(
    do_not_specialize=["slot", "clear", "call_site", "rank", "limit_us", "chunks", "status", "own"]
)
def two_shot_kernel(
    x,  # [rows, H] 16-bit partial sum (SCATTER)
    peers,  # int64 [WORLD], base addresses of all receive buffers
    own,  # int64, base address of this rank's
    residual,  # [rows, H] 16-bit (RESIDUAL); may be `out`
    out,  # [rows, H] 16-bit (GATHER)
    status,
    slot,
    clear,
    call_site,
    rank,
    limit_us,
    chunks,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
    SCATTER: tl.constexpr,
    REDUCE: tl.constexpr,
    GATHER: tl.constexpr,
    RESIDUAL: tl.constexpr,
    CLEAR_OWN: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    shard = tl.cdiv(chunks, WORLD)
    shard_bytes = shard.to(tl.int64) * 16
    gathered = WORLD * shard_bytes  # offset of the gather area in a slot
    targets = peer_bases(peers, rank, WORLD)
    program, programs = tl.program_id(0), tl.num_programs(0)
    lanes = tl.arange(0, BLOCK)
    if PDL:
        gdc_wait()
    if SCATTER:
        for block in range(program, tl.cdiv(shard, BLOCK), programs):
            local = block * BLOCK + lanes
            place = slot + rank * shard_bytes + local.to(tl.int64) * 16
            for i in tl.static_range(WORLD):
                chunk = (rank + 1 + i) % WORLD * shard + local
                live = (local < shard) & (chunk < chunks)
                w0, w1, w2, w3 = load_partial(x.to(tl.int64) + chunk.to(tl.int64) * 16, live)
                push16(targets[i] + place, w0, w1, w2, w3, live)
    if REDUCE:
        mine = tl.minimum(shard, chunks - rank * shard)  # may be <= 0: nothing to own
        for block in range(program, tl.cdiv(tl.maximum(mine, 0), BLOCK), programs):
            local = block * BLOCK + lanes
            live = local < mine
            at = tl.minimum(local, mine - 1).to(tl.int64) * 16
            held = ()
            if RESIDUAL:
                held = load16(residual.to(tl.int64) + rank * shard_bytes + at, live)
            y = poll_sum(
                own + slot + at, shard_bytes, held, live, status, limit_us, rank, call_site, slot,
                WORLD, BLOCK, RESIDUAL, CLEAR_OWN, out.dtype.element_ty,
            )  # fmt: skip
            place = slot + gathered + rank * shard_bytes + at
            for i in tl.static_range(WORLD):
                push16(targets[i] + place, y[0], y[1], y[2], y[3], live)
    if GATHER:
        for block in range(program, tl.cdiv(WORLD * shard, BLOCK), programs):
            chunk = block * BLOCK + lanes
            live = chunk < chunks
            last = tl.minimum(chunk, chunks - 1)
            at = last.to(tl.int64) * 16
            if not CLEAR_OWN:
                inside = chunk < WORLD * shard
                arm(own + clear + chunk.to(tl.int64) * 16, gathered, inside, 2, BLOCK)
            place = own + slot + gathered + at
            owner = last // shard
            y = wait_messages(place, 0, owner, status, limit_us, rank, call_site, slot, 1, 4)
            if CLEAR_OWN:
                tl.debug_barrier()
                arm(place, 0, live, 1, BLOCK)
            push16(out.to(tl.int64) + at, y[0], y[1], y[2], y[3], live)


def two_shot(
    x: torch.Tensor, buffer: torch.Tensor | int, peers: torch.Tensor, slot_offset_bytes: int,
    clear_offset_bytes: int, residual: torch.Tensor | None, out: torch.Tensor, status: torch.Tensor,
    *, rank: int, world: int, call_site: int, phase: str = "all",
    config: AllReduceConfig | None = None, pdl: bool = False, limit_us: int = DEFAULT_LIMIT_US,
) -> None:  # fmt: skip
    """out [rows, H] = sum of all ranks' x + residual (16-bit, contiguous). One phase, or all in
    one launch.

    buffer, peers: of `two_shot_workspace`, offsets from its slot_offset / clear_offset. The residual
    is read in the reduce phase and `out` written in the gather phase: they may alias in separate
    launches (phase "all" forbids it: EngineError).
    """
    chunks = message_chunks(x, world)
    if phase not in PHASES:
        raise EngineError(f"two-shot phase {phase!r}: choose one of {', '.join(PHASES)}")
    if phase == "all" and residual is not None and residual.data_ptr() == out.data_ptr():
        raise EngineError(
            "two-shot in one launch: out must not be the residual (other programs read it)"
        )
    config = config or heuristic(world, chunks * 16)
    launch(
        two_shot_kernel, config.grid(chunks if phase == "gather" else triton.cdiv(chunks, world)),
        x, peers, buffer, (slot_offset_bytes, clear_offset_bytes),
        residual if phase in ("reduce", "all") else None, out, status,
        rank=rank, world=world, call_site=call_site, limit_us=limit_us,
        block=config.block, num_warps=config.num_warps, pdl=pdl,
        **{name.upper(): phase in (name, "all") for name in PHASES[:3]},
    )  # fmt: skip
