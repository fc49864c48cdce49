"""One-shot all-reduce without a barrier: push to every peer, poll locally, sum in rank order.

    out[rows, H] = round16(sum over r = 0..W-1 of fp32(x_r) + fp32(residual)); -0.0 becomes +0.0

All ranks hold the same bits: the same order, one rounding. The message protocol (data is its own
flag) is in `sync.py`, the slot rule in `slots.py`.

Decode, 1 row: H = 3584 (7B) is 7 KB a message, H = 8192 (72B) 16 KB; a rank stores (W-1) messages
over its links and reads W from its own L2. 16 KB at W = 2 / 4 / 8: 34 / 103 / 240 ns of a 478 GB/s
link: the time is latency (one remote store seen by a poller, 0.8 us) plus a launch. Measured: 2.3
us a call in a graph.

Forms
* `push` + `poll_residual`: two launches. The decode graph pushes from the GEMV's epilogue instead
  (same layout) and keeps only the poll.
* `all_reduce`: both in one launch. Only where no two ranks share a device.

Why nothing hangs, whatever the number of ranks a device. A push never waits. A poll of call i
waits only for pushes of call i. All ranks of a device share ONE stream, and their launches are in
lockstep: all pushes of call i before any poll of call i. By induction: when the polls of call i-1
have ended everywhere, each device's stream reaches its pushes of call i, which end; then its polls
of call i find all messages. No kernel spins in front of one that it waits for, and residency does
not matter: polls wait for other kernels, never for programs of their own grid. `all_reduce` lacks this
property (its push sits behind its own spin for a second rank of the device), so virtual ranks must
not use it; within it each program pushes all its chunks before its first poll, and the grid fits
on the device at once. A rank that never pushes is a fault, not a deadlock: the spin expires
(sync.py).

PDL, and what a poll overlaps. A message may be here before the push that sent it has ended (a launch ends when all its
stores are acknowledged, also those across a link), so `poll_residual` spins AHEAD of its `gdc_wait`: 1 % of a step of
72B FP8 with one rank's shapes of TP=8. What makes that right:
* The launch that pushes, this file's or a GEMV's, lets its dependents start only behind its own wait (all others do so
  first of all). So when a poll starts, every program of the last push is running, and all kernels before that push have
  ended: those that wrote the residual and re-armed the slot, and the pushes of other ranks of the device. It spins
  behind running pushes, which wait for nothing.
* The residual is read from L2 (`load16`), where ended kernels left it.
* What it writes, the push in front does not touch: the hidden state lies apart from that push's inputs (graph/plan.py),
  and no push reads a receive buffer.
* It waits at its end: who waits for it has waited for all.
A GEMV that polls in its prologue waits first: there an early spin won nothing (7B FP8 TP=2 724 and 727 tok/s, with
and without), as its programs must first find room beside those of the push.
tests/unit/protocol_model.py has the overlap, and finds what a push that lets its poll start too early breaks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from engine.errors import EngineError
from engine.kernels.integers import cdiv
from engine.kernels.messages import (
    address_of,
    arm,
    load_partial,
    message_chunks,
    peer_bases,
    poll_sum,
)
from engine.kernels.slots import LamportWorkspace, lamport_slots, peer_table
from engine.kernels.sync import (
    DEFAULT_LIMIT_US,
    gdc_launch_dependents,
    gdc_wait,
    load16,
    push16,
)

__all__ = [
    "AllReduceConfig",
    "LamportWorkspace",
    "all_reduce",
    "all_reduce_ref",
    "heuristic",
    "lamport_slots",
    "peer_table",
    "poll_residual",
    "push",
]

# What a tuned entry depends on, and the field along which a near one serves (engine/tune).
SOURCES = (
    "all_reduce.py", "flag_all_reduce.py", "messages.py", "packed.py", "sync.py", "two_shot.py",
    "two_shot_row.py",
)  # fmt: skip
NEAREST_FIELD = "nbytes"
ALGORITHMS = ("lamport", "flag", "two_shot", "nccl")


@dataclass(frozen=True)
class AllReduceConfig:
    """algorithm: one of ALGORITHMS. block: 16-byte chunks a program handles at a time, a multiple
    of 32 x num_warps (lanes must not be replicated). programs: most programs of a launch. (Two-shot handles a row
    at a time, in the form of the norm: `programs` alone is its own, and `portions` of its one launch.)"""

    algorithm: str = "lamport"
    block: int = 128
    num_warps: int = 4
    programs: int = 64
    portions: int = 2

    def __post_init__(self) -> None:
        if self.algorithm not in ALGORITHMS:
            raise EngineError(f"all-reduce algorithm {self.algorithm!r}: choose from {ALGORITHMS}")
        if self.block % (32 * self.num_warps) or self.block & (self.block - 1):
            raise EngineError(
                f"all-reduce block {self.block} must be a power of two and a multiple of 32 x "
                f"num_warps = {32 * self.num_warps}"
            )

    def grid(self, chunks: int) -> tuple[int]:
        return (max(1, min(self.programs, cdiv(chunks, self.block))),)


# Bytes of one message from which two-shot beats one-shot in prefill: it waits twice for flags, sends half of a
# message (72B at 2 ranks) behind the GEMM and re-arms nothing. The measured ones are in the tuned cache.
TWO_SHOT_BYTES = {2: 2 << 20, 4: 1 << 20, 8: 512 << 10}


def heuristic(world: int, nbytes: int) -> AllReduceConfig:
    """Algorithm and shape for a message of `nbytes` (rows x hidden x 2) on `world` ranks."""
    two_shot = nbytes >= TWO_SHOT_BYTES.get(world, 1 << 20)
    return shape_for("two_shot" if two_shot else "lamport", nbytes)


def shape_for(algorithm: str, nbytes: int) -> AllReduceConfig:
    """The shape where nothing was tuned, or something else was. Measured at 16 KB: 4 to 32 programs are equal, one
    costs 2 us; large messages want every multiprocessor."""
    if algorithm == "two_shot":
        return AllReduceConfig(algorithm, programs=264)
    if nbytes <= 256 << 10:
        return AllReduceConfig(algorithm, block=128, num_warps=4, programs=128)
    return AllReduceConfig(algorithm, block=256, num_warps=8, programs=132)


@triton.jit(
    do_not_specialize=["slot", "clear", "call_site", "rank", "limit_us", "chunks", "status", "own"]
)
def one_shot_kernel(
    x,  # [rows, H] 16-bit partial sum (PUSH)
    peers,  # int64 [WORLD], base addresses of all receive buffers (PUSH)
    own,  # int64, base address of this rank's receive buffer (POLL)
    residual,  # [rows, H] 16-bit (RESIDUAL); may be `out`
    out,  # [rows, H] 16-bit (POLL)
    status,  # int64, address of the status words
    slot,  # byte offset of this call's slot
    clear,  # byte offset of the slot to re-arm
    call_site,
    rank,
    limit_us,
    chunks,  # 16-byte chunks of a message
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
    PUSH: tl.constexpr,
    POLL: tl.constexpr,
    RESIDUAL: tl.constexpr,
    CLEAR_OWN: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL and POLL:
        gdc_launch_dependents()
    lanes = tl.arange(0, BLOCK)
    blocks = tl.cdiv(chunks, BLOCK)
    message = chunks.to(tl.int64) * 16
    targets = ()
    if PUSH:
        targets = peer_bases(peers, rank, WORLD)
    if PDL and PUSH:
        gdc_wait()
        if not POLL:
            gdc_launch_dependents()
    if PUSH:
        for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
            chunk = block * BLOCK + lanes
            live = chunk < chunks
            at = chunk.to(tl.int64) * 16
            w0, w1, w2, w3 = load_partial(x.to(tl.int64) + at, live)
            for i in tl.static_range(WORLD):
                push16(targets[i] + slot + rank * message + at, w0, w1, w2, w3, live)
    if POLL:
        for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
            chunk = block * BLOCK + lanes
            live = chunk < chunks
            # Lanes past the end poll the last chunk again, and store nothing.
            at = tl.minimum(chunk, chunks - 1).to(tl.int64) * 16
            held = ()
            if RESIDUAL:
                held = load16(residual.to(tl.int64) + at, live)
            if not CLEAR_OWN:
                arm(own + clear + at, message, live, WORLD, BLOCK)
            y = poll_sum(
                own + slot + at, message, held, live, status, limit_us, rank, call_site, slot,
                WORLD, BLOCK, RESIDUAL, CLEAR_OWN, out.dtype.element_ty,
            )  # fmt: skip
            push16(out.to(tl.int64) + at, y[0], y[1], y[2], y[3], live)
    if PDL and not PUSH:
        gdc_wait()  # so that who waits for this kernel waits for all before it


def _launch(
    x: torch.Tensor, peers: torch.Tensor | None, buffer: torch.Tensor | int, offsets: tuple[int, int],
    residual: torch.Tensor | None, out: torch.Tensor, status: torch.Tensor | None, *, rank: int,
    world: int, call_site: int, limit_us: int, config: AllReduceConfig | None, pdl: bool, push: bool,
    poll: bool,
) -> None:  # fmt: skip
    """offsets: bytes of the call's slot and of the slot to re-arm. What a form does not use may be None, or any
    tensor for x and out."""
    chunks = message_chunks(x, world)
    message_chunks(out, world)  # the same demands
    config = config or heuristic(world, chunks * 16)
    one_shot_kernel[config.grid(chunks)](
        x, out if peers is None else peers, address_of(buffer), out if residual is None else residual,
        out, 0 if status is None else status.data_ptr(), *offsets, call_site, rank, limit_us, chunks,
        WORLD=world, BLOCK=config.block, PUSH=push, POLL=poll, RESIDUAL=residual is not None,
        CLEAR_OWN=offsets[0] == offsets[1], PDL=pdl, num_warps=config.num_warps, num_stages=1,
        launch_pdl=pdl,
    )  # fmt: skip


def push(
    x: torch.Tensor, peers: torch.Tensor, slot_offset_bytes: int, *, rank: int, world: int,
    config: AllReduceConfig | None = None, pdl: bool = False,
) -> None:  # fmt: skip
    """Store x [rows, H] (16-bit partial sum) into slot message `rank` of every rank's buffer."""
    offsets = slot_offset_bytes, slot_offset_bytes
    _launch(
        x, peers, 0, offsets, None, x, None, rank=rank, world=world, call_site=0,
        limit_us=DEFAULT_LIMIT_US, config=config, pdl=pdl, push=True, poll=False,
    )  # fmt: skip


def poll_residual(
    buffer: torch.Tensor | int, slot_offset_bytes: int, clear_offset_bytes: int,
    residual: torch.Tensor | None, out: torch.Tensor, status: torch.Tensor, *, rank: int, world: int,
    call_site: int, config: AllReduceConfig | None = None, pdl: bool = False,
    limit_us: int = DEFAULT_LIMIT_US,
) -> None:  # fmt: skip
    """Wait for the slot's messages of all ranks; out [rows, H] = their sum + residual (may alias
    out).

    buffer: this rank's receive buffer. status: int32 [8] pinned (sync.py). Re-arms the slot at
    clear_offset_bytes (`LamportWorkspace.clear_offset`). Bits equal on all ranks.
    """
    offsets = slot_offset_bytes, clear_offset_bytes
    _launch(
        out, None, buffer, offsets, residual, out, status, rank=rank, world=world,
        call_site=call_site, limit_us=limit_us, config=config, pdl=pdl, push=False, poll=True,
    )  # fmt: skip


def all_reduce(
    x: torch.Tensor, buffer: torch.Tensor | int, peers: torch.Tensor, slot_offset_bytes: int,
    clear_offset_bytes: int, residual: torch.Tensor | None, out: torch.Tensor, status: torch.Tensor,
    *, rank: int, world: int, call_site: int, config: AllReduceConfig | None = None,
    pdl: bool = False, limit_us: int = DEFAULT_LIMIT_US,
) -> None:  # fmt: skip
    """`push` and `poll_residual` in one launch. Never for two ranks of one device (see the top)."""
    offsets = slot_offset_bytes, clear_offset_bytes
    _launch(
        x, peers, buffer, offsets, residual, out, status, rank=rank, world=world,
        call_site=call_site, limit_us=limit_us, config=config, pdl=pdl, push=True, poll=True,
    )  # fmt: skip


def all_reduce_ref(
    partials: list[torch.Tensor], residual: torch.Tensor | None = None
) -> torch.Tensor:
    """Sum in rank order in fp32 (fp64 if the input is), + residual, one rounding to the input's
    dtype.

    A zero result is +0.0, as in the kernels. partials: one tensor a rank, all of one shape and
    dtype.
    """
    wide = torch.float64 if partials[0].dtype == torch.float64 else torch.float32
    total = partials[0].to(wide)
    for partial in partials[1:]:
        total = total + partial.to(total.device, wide)
    if residual is not None:
        total = total + residual.to(wide)
    rounded = total.to(partials[0].dtype)
    return torch.where(rounded == 0, torch.zeros_like(rounded), rounded)
