"""The two-shot all-reduce in one launch, for a partial sum that no GEMM's epilogue has scattered (two_shot.py).

The same sums, norm and places (`TwoShotWorkspace`), the same bits; what differs is the order of work. P programs;
program p handles rows p, p + P, ... of EVERY owner's share:
1. scatter: its rows of x go to their owners, in `portions` (each a run of its rows), a flag behind each portion.
2. reduce: for each of its own rows wait for the peers' flags of that portion, sum, norm, send y to every rank.
3. a flag to every rank, and wait for theirs: when the kernel ends, all of y is here. Nothing is launched behind it.

T = 512, H = 8192, W = 2 (8 MB): 4.2 MB to the owner and 4.2 MB of y back, 22 us at 382 GB/s, 23.3 us at the 360 GB/s
that stores reach. Around it a launch, the first load and the last flag's flight, about 3 us, if the link is never idle
between scatter and reduce.

What keeps the link busy. A release waits until all stores of its program have arrived; behind it the program's share
of the link is idle for as long as a flag flies and a row is loaded and summed (2 to 3 us), and all programs get
there at the same time. So the last portion's release stands behind the sum and norm of the first row, which needs the
first portion only: its stores travel meanwhile, and y of the first row follows at once. Only one warp waits in a
release (`release_flag`); the next row of x is in registers by then, and the others store it. One program a
multiprocessor with two rows or more of each owner gives such a pipeline (P = 132 at 8 MB); with a row each
there is one portion and no overlap within a program.

Order: "data behind a flag" (sync.py). A program counts its calls in an epoch word of its own, read at its start and
written at its end: replays need no host and no publish. Every rank launches the same calls (rows, P, portions) in the
same order, so the epochs of program p agree, whatever the P of the calls between.
* Partial sums. Rank r stores into s's partials of call e + 1 in a kernel behind its call e, which ended after the
  second flags of ALL of s's programs of e. Each stands behind the reads of its program: s has read its partials of e.
* y. Rank s stores y of e + 1 (its scale, the last row) into r's memory in a program that has seen a first flag of e + 1
  from every rank; r's launch stands behind every reader of its y of e in r's stream.
* A first flag that nobody waits for (a portion in which the receiver has no row) may arrive late, but before its
  sender's next call: flags only go up, and a wait is for `at least`.
* The four launches may take turns with it on one workspace. They use flags and an epoch of their own, and both
  arguments above only need that a rank's exchange e ends behind all programs of all ranks (their gather), and that what
  lets s store y was released behind r's readers (their publish).
Sizes, P and portions may differ from call to call: the arguments name no place.

It cannot hang. A program waits for the programs of its own index p only, on the other ranks: for their first portions,
which they send before any wait, for their last one, sent behind a wait for first portions only, and then for their
second flags. So programs of an index end together, whatever others do, once they run on every rank. They do: the
kernels before this one end (they wait for nothing behind them), and multiprocessors take programs in the order of
their index, so the least index that has not ended is running everywhere. A grid that is resident at once, as 264
programs of 8 warps are on 132 multiprocessors (MOST_REGISTERS), needs not even this order. A spin that does
not end is a lost peer, and bounded in time.
Ranks that share a device must not use it: one would spin in front of the launch that it waits for.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.errors import EngineError
from engine.kernels.all_reduce import AllReduceConfig
from engine.kernels.epilogue import shard_rows
from engine.kernels.norm import norm_launch
from engine.kernels.sync import DEFAULT_LIMIT_US, release_flag, wait_flags
from engine.kernels.two_shot import MOST_PORTIONS, TwoShotRank, checked, programs_of
from engine.kernels.two_shot_row import MOST_REGISTERS, opening, reduced_row, send_row


@triton.jit
def _outgoing(x, peers, item, partials, rank, T, H, S, column, WORLD: tl.constexpr):
    """(row of x, address of its place at the owner, columns to store) of this program's item: an owner's row."""
    owner = (rank + 1 + item % (WORLD - 1)) % WORLD
    local = tl.program_id(0) + item // (WORLD - 1) * tl.num_programs(0)
    inside = (column < H) & (local < tl.minimum(S, T - owner * S))
    row = (owner * S + local).to(tl.int64)
    value = tl.load(x + row * H + column, mask=inside, other=0.0)
    base = tl.load(peers + owner)
    return value, base + partials + (rank * S + local).to(tl.int64) * H * 2, inside


@triton.jit(
    do_not_specialize=[
        "own", "scattered", "reduced", "epochs", "partials", "y_offset", "scales_offset",
        "last_offset", "status", "limit_us", "rank", "call_site", "S", "T",
    ]
)  # fmt: skip
def two_shot_kernel(
    x,  # [T, H] 16-bit, this rank's partial sum
    peers,  # int64 [WORLD]
    own,  # int64, base address of this rank's buffer
    residual,  # [T, H] 16-bit, of which the own rows are read (RESIDUAL)
    h,  # [T, H] 16-bit, of which the own rows are written; may be `residual`
    gain,  # [H] norm weight (NORM)
    request,  # int32 [3]: slot, start, length (LAST)
    status, scattered, reduced, epochs, partials, y_offset, scales_offset, last_offset, limit_us,
    rank, call_site, T, H, S, eps,
    WORLD: tl.constexpr, BLOCK: tl.constexpr, THREADS: tl.constexpr, PORTIONS: tl.constexpr,
    STRIDE: tl.constexpr,  # flags of a program's portions that the workspace has
    RESIDUAL: tl.constexpr, NORM: tl.constexpr, QUANTIZE: tl.constexpr, LAST: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    program, programs, thread, peer, target, column = opening(peers, WORLD, BLOCK, THREADS, PDL)
    steps = tl.cdiv(S, programs)  # rows of an owner that a program handles, at most
    run = tl.cdiv(steps, PORTIONS)  # of them in a portion
    last = tl.cdiv(steps, run) - 1  # portion
    last_row = tl.load(request + 2) - 1 if LAST else -1
    epoch_at = (own + epochs + program * 4).to(tl.pointer_type(tl.int32))
    epoch = tl.load(epoch_at, volatile=True) + 1
    first = scattered + program * (STRIDE * WORLD * 4)  # of the flags of this program's portions
    # Scatter; the next item's row is loaded ahead of this one's stores and release.
    items = steps * (WORLD - 1)
    value, place, inside = _outgoing(x, peers, 0, partials, rank, T, H, S, column, WORLD)
    for item in range(items):
        ahead, next_place, next_inside = _outgoing(
            x, peers, item + 1, partials, rank, T, H, S, column, WORLD
        )
        place_at = tl.multiple_of(place.to(tl.pointer_type(x.dtype.element_ty)), 16)
        tl.store(place_at + column, value, mask=inside)
        value, place, inside = ahead, next_place, next_inside
        if ((item + 1) % (run * (WORLD - 1)) == 0) & (item + 1 < items):
            tl.debug_barrier()  # a release covers every thread's stores
            flag = first + (item // (run * (WORLD - 1)) * WORLD + rank) * 4
            release_flag(target + flag, epoch, thread < WORLD)
    if last == 0:
        tl.debug_barrier()
        release_flag(target + first + rank * 4, epoch, thread < WORLD)
    # Reduce. Also without a row of its own a program releases its last portion.
    row_bytes = H.to(tl.int64) * 2
    stride = S * row_bytes
    mine = tl.minimum(S, T - rank * S)  # may be <= 0: nothing to own
    for i in range(0, tl.maximum(tl.cdiv(mine - program, programs), 1)):
        local = program + i * programs
        live = local < mine
        inside = (column < H) & live
        if i % run == 0:
            flags = own + first + (i // run * WORLD + peer) * 4
            wait_flags(flags, epoch, peer, status, limit_us, rank, call_site, 0)
            tl.debug_barrier()  # the acquire above covers every thread's loads
        row = rank * S.to(tl.int64) + local
        y, scale = reduced_row(
            own + partials + local * row_bytes, x.to(tl.int64) + row * row_bytes, stride,
            residual + row * H, h + row * H, gain, peers, last_offset, row == last_row, rank, H,
            eps, column, inside, WORLD, RESIDUAL, NORM, QUANTIZE, LAST,
        )  # fmt: skip
        if (i == 0) & (last > 0):
            tl.debug_barrier()
            flag = first + (last * WORLD + rank) * 4
            release_flag(target + flag, epoch, thread < WORLD)
        send_row(
            peers, y, scale, row, y_offset, scales_offset, rank, H, column, inside, live, WORLD, QUANTIZE,
        )  # fmt: skip
    tl.debug_barrier()
    flags = reduced + program * (WORLD * 4)
    release_flag(target + flags + rank * 4, epoch, thread < WORLD)
    wait_flags(own + flags + peer * 4, epoch, peer, status, limit_us, rank, call_site, 1)
    tl.store(epoch_at, epoch)


def two_shot_all_reduce(
    x: torch.Tensor, end: TwoShotRank, residual: torch.Tensor | None, h: torch.Tensor,
    weight: torch.Tensor | None, status: torch.Tensor, *, eps: float = 0.0, fp8: bool = False,
    request: torch.Tensor | None = None, call_site: int, config: AllReduceConfig, pdl: bool = False,
    limit_us: int = DEFAULT_LIMIT_US,
) -> None:  # fmt: skip
    """x [T, H] 16-bit contiguous, this rank's partial sum. Own rows of h [T, H] = sum over ranks + own rows of
    residual [T, H] (may be h); y [T, H] of all ranks is in `end.y(T, fp8)` behind this launch.

    weight, fp8, request as of `two_shot_reduce`. config: programs and portions, the same on all ranks. status slot 0:
    expired in front of a sum, 1: in front of the end. Never for two ranks of one device. EngineError for what the
    buffers cannot carry.
    """
    rows, hidden = checked(x, end)
    if checked(h, end) != (rows, hidden):
        raise EngineError(
            f"two-shot all-reduce: x is {tuple(x.shape)}, h {tuple(h.shape)}; they must be alike"
        )
    if x.data_ptr() % 16:
        raise EngineError("two-shot all-reduce: x does not begin at a multiple of 16 bytes")
    if not 1 <= config.portions <= MOST_PORTIONS:
        raise EngineError(
            f"two-shot all-reduce in {config.portions} portions: choose 1 to {MOST_PORTIONS}"
        )
    space = end.space
    block = norm_launch(hidden)  # as rmsnorm has it: the same order of sums, the same bits
    two_shot_kernel[(programs_of(rows, space.world, config),)](
        x, end.peers, end.buffer.data_ptr(), h if residual is None else residual, h,
        h if weight is None else weight, end.peers if request is None else request,
        status.data_ptr(), space.scattered_offset, space.reduced_offset, space.epochs_offset,
        space.partials_offset, space.y_offset, space.scales_offset, space.last_offset, limit_us,
        end.rank, call_site, rows, hidden, shard_rows(rows, space.world), eps,
        WORLD=space.world, **block, THREADS=32 * block["num_warps"], PORTIONS=config.portions,
        STRIDE=MOST_PORTIONS, RESIDUAL=residual is not None, NORM=weight is not None, QUANTIZE=fp8,
        LAST=request is not None, PDL=pdl, maxnreg=MOST_REGISTERS, launch_pdl=pdl,
    )  # fmt: skip
