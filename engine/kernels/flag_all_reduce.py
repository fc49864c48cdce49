"""One-shot all-reduce by pull behind a flag barrier: the second algorithm, which needs no sentinel.

    out[rows, H] = round16(sum over ranks in order of fp32(x_r) + fp32(residual))

Program p of rank r copies its chunks of x into r's own buffer, releases epoch e to program p of
every rank, waits for theirs, then reads its chunks from every rank's buffer. 16 KB at 2 ranks: 3.8
us in a graph against 2.3 us of the Lamport push (the release, the flag's flight and a remote read
instead of one remote store). Kept as a cross-check, and for payloads that must keep -0.0.

Protocol (memory orders: sync.py)
* Flag word [p, r] of rank q's buffer is written only by rank r, only upwards by one a call.
* The epoch lives in the device and is advanced by the kernel itself: a graph replay needs no host.
* It counts modulo 2^32 and is compared by signed difference. A plain `flag < epoch` breaks at the
  wrap; the test starts just below it.
* Two data buffers by the parity of the epoch replace a closing barrier: rank r overwrites the data
  of call e in call e + 2, after its call e + 1 saw epoch e + 1 from every program of every peer,
  which each peer released after its kernel e (all its reads) had ended.
* The grid is the workspace's `programs`, always: epochs are per program. All programs are resident
  at once (<= one a multiprocessor), since a program waits for the same program elsewhere.
* Flags, epochs and both halves lie at fixed places, so graphs with messages of any size up to the
  workspace's may take turns on it.

Ranks that share a device call `phase="publish"` for all of them, then `phase="reduce"`: publishing
never waits, as pushing never does (all_reduce.py). `phase="both"` is one launch for one rank a
device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from engine.errors import EngineError
from engine.kernels.all_reduce import AllReduceConfig
from engine.kernels.messages import message_chunks
from engine.kernels.packed import sum_messages
from engine.kernels.sync import (
    DEFAULT_LIMIT_US,
    gdc_launch_dependents,
    gdc_wait,
    load16,
    push16,
    release_flag,
    wait_flags,
)


@dataclass(frozen=True)
class FlagWorkspace:
    """One rank's buffer: flags [programs, world], epochs [programs], two halves of the largest
    message (rows x hidden)."""

    world: int
    rows: int
    hidden: int
    programs: int = 32

    @property
    def message_bytes(self) -> int:
        """Of the largest message, and hence of a half."""
        return self.rows * self.hidden * 2

    @property
    def flag_bytes(self) -> int:
        """Flags and epochs."""
        return 4 * self.programs * (self.world + 1)

    @property
    def data_offset(self) -> int:
        return -(-self.flag_bytes // 256) * 256

    @property
    def nbytes(self) -> int:
        return self.data_offset + 2 * self.message_bytes

    def allocate(self, device: torch.device | str, epoch: int = 0) -> torch.Tensor:
        """uint8 [nbytes]. All ranks' buffers must exist, with one epoch, before any publishes."""
        buffer = torch.zeros(self.nbytes, dtype=torch.uint8, device=device)
        self.reset(buffer, epoch)
        return buffer

    def reset(self, buffer: torch.Tensor, epoch: int = 0) -> None:
        """Flags and epochs back to one value (int32), on all ranks, all idle: after an aborted
        call.
        """
        buffer[: self.flag_bytes].view(torch.int32).fill_(epoch)


@triton.jit(
    do_not_specialize=["data", "half_bytes", "call_site", "rank", "limit_us", "chunks", "status"]
)
def flag_all_reduce_kernel(
    x,  # [rows, H] 16-bit partial sum (PUBLISH)
    peers,  # int64 [WORLD], base addresses of all buffers
    residual,  # [rows, H] 16-bit (RESIDUAL); may be `out`
    out,  # [rows, H] 16-bit (REDUCE)
    status,
    data,  # byte offset of the two halves in a buffer
    half_bytes,
    call_site,
    rank,
    limit_us,
    chunks,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
    THREADS: tl.constexpr,
    PUBLISH: tl.constexpr,
    REDUCE: tl.constexpr,
    RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    program, programs = tl.program_id(0), tl.num_programs(0)
    lanes, thread = tl.arange(0, BLOCK), tl.arange(0, THREADS)
    blocks = tl.cdiv(chunks, BLOCK)
    peer = thread % WORLD
    own = tl.load(peers + rank)
    targets = ()
    for r in tl.static_range(WORLD):
        targets += (tl.load(peers + r),)  # type: ignore[assignment]
    bases = tl.load(peers + peer)
    if PDL:
        gdc_wait()
    # In flight together: the first block of x, that of the residual, the epoch.
    chunk = program * BLOCK + lanes
    at = chunk.to(tl.int64) * 16
    if PUBLISH:
        w0, w1, w2, w3 = load16(x.to(tl.int64) + at, chunk < chunks)
    held = ()
    if REDUCE and RESIDUAL:
        held = load16(residual.to(tl.int64) + at, chunk < chunks)
    epoch_at = (own + (programs * WORLD + program) * 4).to(tl.pointer_type(tl.int32))
    epoch = tl.load(epoch_at, volatile=True) + 1
    half = data + (epoch & 1).to(tl.int64) * half_bytes
    if PUBLISH:
        for _ in range(program, blocks, programs):
            push16(own + half + at, w0, w1, w2, w3, chunk < chunks)
            chunk += programs * BLOCK
            at = chunk.to(tl.int64) * 16
            w0, w1, w2, w3 = load16(x.to(tl.int64) + at, chunk < chunks)
        tl.debug_barrier()  # the release below covers every thread's stores
        release_flag(bases + (program * WORLD + rank) * 4, epoch, thread < WORLD)
    if REDUCE:
        mine = own + (program * WORLD + peer) * 4
        wait_flags(mine, epoch, peer, status, limit_us, rank, call_site, epoch & 1)
        tl.debug_barrier()  # the acquire above covers every thread's loads
        for block in range(program, blocks, programs):
            chunk = block * BLOCK + lanes
            live = chunk < chunks
            at = chunk.to(tl.int64) * 16
            words = ()
            for r in tl.static_range(WORLD):
                words += load16(targets[r] + half + at, live)
            y = sum_messages(words, held, WORLD, RESIDUAL, out.dtype.element_ty)
            push16(out.to(tl.int64) + at, y[0], y[1], y[2], y[3], live)
            if RESIDUAL:
                chunk += programs * BLOCK
                held = load16(residual.to(tl.int64) + chunk.to(tl.int64) * 16, chunk < chunks)
        tl.store(epoch_at, epoch)


def flag_all_reduce(
    x: torch.Tensor, peers: torch.Tensor, residual: torch.Tensor | None, out: torch.Tensor,
    status: torch.Tensor, workspace: FlagWorkspace, *, rank: int, world: int, call_site: int,
    phase: str = "both", config: AllReduceConfig | None = None, pdl: bool = False,
    limit_us: int = DEFAULT_LIMIT_US,
) -> None:  # fmt: skip
    """out [rows, H] = sum of all ranks' x + residual. x, out 16-bit; out may alias residual, not x.

    peers: int64 [world] addresses of the ranks' FlagWorkspace buffers (own included). phase: both,
    publish (needs x) or reduce (needs out); see the top. Bits equal on all ranks.
    """
    chunks = message_chunks(x, world)
    if chunks * 16 > workspace.message_bytes or world != workspace.world:
        raise EngineError(
            f"flag all-reduce of {chunks * 16} bytes over {world} ranks: its workspace was made for "
            f"up to {workspace.message_bytes} bytes over {workspace.world}"
        )
    if phase not in ("both", "publish", "reduce"):
        raise EngineError(f"flag all-reduce phase {phase!r}: choose both, publish or reduce")
    config = config or AllReduceConfig("flag")
    flag_all_reduce_kernel[(workspace.programs,)](
        x, peers, out if residual is None else residual, out, status.data_ptr(),
        workspace.data_offset, workspace.message_bytes, call_site, rank, limit_us, chunks,
        WORLD=world, BLOCK=config.block, THREADS=32 * config.num_warps, PUBLISH=phase != "reduce",
        REDUCE=phase != "publish", RESIDUAL=residual is not None and phase != "publish", PDL=pdl,
        num_warps=config.num_warps, num_stages=1, launch_pdl=pdl,
    )  # fmt: skip
