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
not matter: polls wait for other kernels, never for programs of their own grid. PDL keeps this: a
poll spins only after `gdc_wait`, when all kernels before it have ended. `all_reduce` lacks this
property (its push sits behind its own spin for a second rank of the device), so virtual ranks must
not use it; within it each program pushes all its chunks before its first poll, and the grid fits
on the device at once. A rank that never pushes is a fault, not a deadlock: the spin expires
(sync.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from engine.errors import EngineError
from engine.kernels.packed import sum_messages
from engine.kernels.slots import LamportWorkspace, lamport_slots, peer_table
from engine.kernels.sync import (
    DEFAULT_LIMIT_US,
    SENTINEL_16,
    canonical_words,
    gdc_launch_dependents,
    gdc_wait,
    load16,
    push16,
    wait_messages,
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

SOURCES = ("all_reduce.py", "packed.py", "sync.py")  # what a tuned entry depends on (engine/tune)
ALGORITHMS = ("lamport", "flag", "two_shot", "nccl")


@dataclass(frozen=True)
class AllReduceConfig:
    """algorithm: one of ALGORITHMS. block: 16-byte chunks a program handles at a time, a multiple
    of 32 x num_warps (lanes must not be replicated). programs: most programs of a launch."""

    algorithm: str = "lamport"
    block: int = 128
    num_warps: int = 4
    programs: int = 64

    def __post_init__(self) -> None:
        if self.algorithm not in ALGORITHMS:
            raise EngineError(f"all-reduce algorithm {self.algorithm!r}: choose from {ALGORITHMS}")
        if self.block % (32 * self.num_warps) or self.block & (self.block - 1):
            raise EngineError(
                f"all-reduce block {self.block} must be a power of two and a multiple of 32 x "
                f"num_warps = {32 * self.num_warps}"
            )

    def grid(self, chunks: int) -> tuple[int]:
        return (max(1, min(self.programs, triton.cdiv(chunks, self.block))),)


# Bytes of one message from which two-shot beats one-shot: where (W - 1) - 2 (W - 1) / W messages
# of link time (478 GB/s) outweigh a second exchange (about 2 us). Never at 2 ranks: both send one
# message. Predicted; the measured ones are in the tuned cache.
TWO_SHOT_BYTES = {2: None, 4: 640 << 10, 8: 180 << 10}


def heuristic(world: int, nbytes: int) -> AllReduceConfig:
    """Algorithm and shape for a message of `nbytes` (rows x hidden x 2) on `world` ranks."""
    limit = TWO_SHOT_BYTES.get(world, 256 << 10)
    algorithm = "two_shot" if limit is not None and nbytes >= limit else "lamport"
    # Measured at 16 KB: 4 to 32 programs are equal, one program costs 2 us. Large messages want
    # every multiprocessor.
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
    if PDL:
        gdc_launch_dependents()
    lanes = tl.arange(0, BLOCK)
    blocks = tl.cdiv(chunks, BLOCK)
    message = chunks.to(tl.int64) * 16
    targets = ()
    if PUSH:
        # Own copy last; each rank starts at another peer, so that no link has all senders at once.
        for i in tl.static_range(WORLD):
            targets += (tl.load(peers + (rank + 1 + i) % WORLD),)  # type: ignore[assignment]
    if PDL:
        gdc_wait()
    if PUSH:
        for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
            chunk = block * BLOCK + lanes
            live = chunk < chunks
            at = chunk.to(tl.int64) * 16
            w0, w1, w2, w3 = load16(x.to(tl.int64) + at, live)
            w0, w1 = canonical_words(w0), canonical_words(w1)
            w2, w3 = canonical_words(w2), canonical_words(w3)
            for i in tl.static_range(WORLD):
                push16(targets[i] + slot + rank * message + at, w0, w1, w2, w3, live)
    if POLL:
        armed = tl.full((BLOCK,), SENTINEL_16, tl.int32)
        for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
            chunk = block * BLOCK + lanes
            live = chunk < chunks
            # Lanes past the end poll the last chunk again, and store nothing.
            at = tl.minimum(chunk, chunks - 1).to(tl.int64) * 16
            held = ()
            if RESIDUAL:
                held = load16(residual.to(tl.int64) + at, live)
            if not CLEAR_OWN:
                for r in tl.static_range(WORLD):
                    push16(own + clear + r * message + at, armed, armed, armed, armed, live)
            words = wait_messages(
                own + slot + at, message, 0, status, limit_us, rank, call_site, slot, WORLD, 4
            )
            if CLEAR_OWN:
                tl.debug_barrier()  # every lane has read before any lane re-arms
                for r in tl.static_range(WORLD):
                    push16(own + slot + r * message + at, armed, armed, armed, armed, live)
            y = sum_messages(words, held, WORLD, RESIDUAL, out.dtype.element_ty)
            push16(out.to(tl.int64) + at, y[0], y[1], y[2], y[3], live)


def address_of(buffer: torch.Tensor | int) -> int:
    """Base address of a buffer given as a tensor or as an address."""
    return buffer if isinstance(buffer, int) else buffer.data_ptr()


def message_chunks(tensor: torch.Tensor, world: int) -> int:
    """16-byte chunks of a message; EngineError for what the kernels cannot carry."""
    nbytes = tensor.numel() * tensor.element_size()
    if tensor.element_size() != 2 or not tensor.is_contiguous():
        raise EngineError(
            f"all-reduce needs contiguous 16-bit values, not {tensor.dtype} with "
            f"strides {tensor.stride()}"
        )
    if nbytes % 16 or tensor.data_ptr() % 16 or not nbytes:
        raise EngineError(
            f"all-reduce message of {nbytes} bytes at {tensor.data_ptr():#x}: size and address must "
            "be multiples of 16; choose a hidden size that is a multiple of 8"
        )
    if not 2 <= world <= 8:
        raise EngineError(f"all-reduce over {world} ranks: from 2 to 8 are supported (--tp)")
    return nbytes // 16


def push(
    x: torch.Tensor,
    peers: torch.Tensor,
    slot_offset_bytes: int,
    *,
    rank: int,
    world: int,
    config: AllReduceConfig | None = None,
    pdl: bool = False,
) -> None:
    """Store x [rows, H] (16-bit partial sum) into slot message `rank` of every rank's buffer."""
    chunks = message_chunks(x, world)
    config = config or heuristic(world, chunks * 16)
    one_shot_kernel[config.grid(chunks)](
        x,
        peers,
        0,
        x,
        x,
        0,
        slot_offset_bytes,
        0,
        0,
        rank,
        DEFAULT_LIMIT_US,
        chunks,
        WORLD=world,
        BLOCK=config.block,
        PUSH=True,
        POLL=False,
        RESIDUAL=False,
        CLEAR_OWN=False,
        PDL=pdl,
        num_warps=config.num_warps,
        num_stages=1,
        launch_pdl=pdl,
    )


def poll_residual(
    buffer: torch.Tensor | int,
    slot_offset_bytes: int,
    clear_offset_bytes: int,
    residual: torch.Tensor | None,
    out: torch.Tensor,
    status: torch.Tensor,
    *,
    rank: int,
    world: int,
    call_site: int,
    config: AllReduceConfig | None = None,
    pdl: bool = False,
    limit_us: int = DEFAULT_LIMIT_US,
) -> None:
    """Wait for the slot's messages of all ranks; out [rows, H] = their sum + residual (may alias
    out).

    buffer: this rank's receive buffer. status: int32 [8] pinned (sync.py). Re-arms the slot at
    clear_offset_bytes (`LamportWorkspace.clear_offset`). Bits equal on all ranks.
    """
    chunks = message_chunks(out, world)
    config = config or heuristic(world, chunks * 16)
    one_shot_kernel[config.grid(chunks)](
        out,
        out,
        address_of(buffer),
        out if residual is None else residual,
        out,
        status.data_ptr(),
        slot_offset_bytes,
        clear_offset_bytes,
        call_site,
        rank,
        limit_us,
        chunks,
        WORLD=world,
        BLOCK=config.block,
        PUSH=False,
        POLL=True,
        RESIDUAL=residual is not None,
        CLEAR_OWN=clear_offset_bytes == slot_offset_bytes,
        PDL=pdl,
        num_warps=config.num_warps,
        num_stages=1,
        launch_pdl=pdl,
    )


def all_reduce(
    x: torch.Tensor,
    buffer: torch.Tensor | int,
    peers: torch.Tensor,
    slot_offset_bytes: int,
    clear_offset_bytes: int,
    residual: torch.Tensor | None,
    out: torch.Tensor,
    status: torch.Tensor,
    *,
    rank: int,
    world: int,
    call_site: int,
    config: AllReduceConfig | None = None,
    pdl: bool = False,
    limit_us: int = DEFAULT_LIMIT_US,
) -> None:
    """`push` and `poll_residual` in one launch. Never for two ranks of one device (see the top)."""
    chunks = message_chunks(x, world)
    config = config or heuristic(world, chunks * 16)
    one_shot_kernel[config.grid(chunks)](
        x,
        peers,
        address_of(buffer),
        out if residual is None else residual,
        out,
        status.data_ptr(),
        slot_offset_bytes,
        clear_offset_bytes,
        call_site,
        rank,
        limit_us,
        chunks,
        WORLD=world,
        BLOCK=config.block,
        PUSH=True,
        POLL=True,
        RESIDUAL=residual is not None,
        CLEAR_OWN=clear_offset_bytes == slot_offset_bytes,
        PDL=pdl,
        num_warps=config.num_warps,
        num_stages=1,
        launch_pdl=pdl,
    )


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
