"""Two-shot all-reduce for prefill, by rows: reduce-scatter, the next RMSNorm on the way, all-gather.

    h[T, H] = round16(sum over ranks in order of fp32(x_r) + fp32(residual)),  y = rmsnorm(h) (as FP8 if asked)

Rank s owns rows s * S .. (s + 1) * S - 1, S = ceil(T / W), and is the only one to hold their h: the residual
stream stays split by rows from one exchange to the next, and what travels back is what the next GEMM reads.
1. scatter: every row of the own partial sum goes to its owner's memory. The GEMM's epilogue does it
   (`epilogue.Scatter`), so it overlaps with the products; `two_shot_scatter` is the same as a launch.
2. publish: a flag to every rank, behind the GEMM.
3. reduce: wait for the ranks' flags; sum, + residual, round, keep h; norm (and quantise) the row, store it in
   every rank's memory; a flag of each program to every rank.
4. gather: wait for the flags of all ranks' programs. Nothing is copied: readers read where peers wrote.

Each row is summed by one rank only, so all ranks hold the same bits, those of the one-shot followed by `rmsnorm` or
`rmsnorm_quantize`.

Bytes a rank sends at 16 / 8 bits of y: 2 (W - 1) / W or 1.5 (W - 1) / W messages against W - 1 of the one-shot, and
half of one message of them while the GEMM runs. T = 2048, H = 8192, W = 2: 16.8 or 8.4 MB behind the GEMM, 47 or
24 us at the 360 GB/s that stores reach, where one-shot has 93. Local traffic: no sentinels are re-armed.

Order. All of it is "data behind a flag" (sync.py); flags hold an epoch that the publish advances on the device, so
replays need no host, and compares are by signed difference. One area of each kind suffices:
* Rank r's partials of exchange e + 1 are written by peers' GEMMs behind their gather e, which waited for r's
  programs of reduce e: r has read its partials of e.
* r's y of exchange e + 1 is written behind r's publish e + 1, which r launches behind every reader of its y of e.
Ranks that share a device run launch by launch, all ranks before the next launch: publish and scatter never wait,
reduce waits for publishes only and gather for reduces only, so nothing spins in front of what it waits for. No
program waits for another of its grid, so grids need not be resident.
All of it in one launch, for ranks with a device each and partial sums that no GEMM scatters: two_shot_fused.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from engine.errors import EngineError
from engine.kernels.all_reduce import AllReduceConfig
from engine.kernels.epilogue import shard_rows
from engine.kernels.integers import next_power_of_2
from engine.kernels.norm import norm_launch
from engine.kernels.quantize_rows import FP8
from engine.kernels.sync import (
    DEFAULT_LIMIT_US,
    gdc_launch_dependents,
    gdc_wait,
    release_flag,
    wait_flags,
)
from engine.kernels.two_shot_row import MOST_REGISTERS, opening, reduced_row, send_row

MOST_PROGRAMS = 528  # of a reduce: the gather polls as many flags of each rank
MOST_PORTIONS = 4  # of a program's scatter in the one launch (two_shot_fused.py)
GATHER_WARPS = 16
ALIGN = 256


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


@dataclass(frozen=True)
class TwoShotWorkspace:
    """Layout of one rank's buffer for exchanges of at most rows x hidden 16-bit values.

    int32 flags: [world] publishes, [MOST_PROGRAMS, world] reduces, the epoch; those of the one launch:
    [MOST_PROGRAMS, MOST_PORTIONS, world] scatters, [MOST_PROGRAMS, world] reduces, [MOST_PROGRAMS] epochs. Then the
    partial sums of the own rows [world, S, hidden], y [rows, hidden], its FP8 scales [rows] fp32, and one row of h.
    """

    world: int
    rows: int
    hidden: int

    @property
    def epoch_offset(self) -> int:
        return 4 * self.world * (1 + MOST_PROGRAMS)

    @property
    def scattered_offset(self) -> int:
        return self.epoch_offset + 4

    @property
    def reduced_offset(self) -> int:
        return self.scattered_offset + 4 * MOST_PROGRAMS * MOST_PORTIONS * self.world

    @property
    def epochs_offset(self) -> int:
        return self.reduced_offset + 4 * MOST_PROGRAMS * self.world

    @property
    def flag_bytes(self) -> int:
        """Flags and epochs."""
        return self.epochs_offset + 4 * MOST_PROGRAMS

    @property
    def partials_offset(self) -> int:
        return _aligned(self.flag_bytes)

    @property
    def y_offset(self) -> int:
        shard = shard_rows(self.rows, self.world)
        return _aligned(self.partials_offset + self.world * shard * self.hidden * 2)

    @property
    def scales_offset(self) -> int:
        return _aligned(self.y_offset + self.rows * self.hidden * 2)

    @property
    def last_offset(self) -> int:
        return _aligned(self.scales_offset + 4 * self.rows)

    @property
    def nbytes(self) -> int:
        return _aligned(self.last_offset + 2 * self.hidden)

    def allocate(self, device: torch.device | str, epoch: int = 0) -> torch.Tensor:
        """uint8 [nbytes]. All ranks' buffers must exist, with one epoch, before any rank publishes."""
        buffer = torch.zeros(self.nbytes, dtype=torch.uint8, device=device)
        self.reset(buffer, epoch)
        return buffer

    def reset(self, buffer: torch.Tensor, epoch: int = 0) -> None:
        """All flags at one epoch: at the start, and on all ranks, all idle, after an aborted call."""
        buffer[: self.flag_bytes].view(torch.int32).fill_(epoch)


@dataclass(frozen=True)
class TwoShotRank:
    """One rank's end. buffer: own, of `space`; peers int64 [world]: base addresses of all ranks' buffers;
    far int64 [world]: the same less the own one's."""

    space: TwoShotWorkspace
    buffer: torch.Tensor
    peers: torch.Tensor
    far: torch.Tensor
    rank: int
    dtype: torch.dtype  # 16-bit, of activations

    def _view(self, offset: int, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
        flat = self.buffer[offset : offset + rows * columns * dtype.itemsize]
        return flat.view(dtype).view(rows, columns)

    def message(self, rows: int) -> torch.Tensor:
        """[S, hidden]: where the own partial sum of own rows lies; the other owners' lie `far` from it."""
        shard, hidden = shard_rows(rows, self.space.world), self.space.hidden
        offset = self.space.partials_offset + self.rank * shard * hidden * 2
        return self._view(offset, shard, hidden, self.dtype)

    def y(self, rows: int, fp8: bool = False) -> torch.Tensor:
        """[rows, hidden], 16-bit or e4m3."""
        dtype = FP8 if fp8 else self.dtype
        return self._view(self.space.y_offset, rows, self.space.hidden, dtype)

    def scales(self, rows: int) -> torch.Tensor:
        """fp32 [rows] of an FP8 y."""
        return self._view(self.space.scales_offset, rows, 1, torch.float32).view(rows)

    def last(self) -> torch.Tensor:
        """[1, hidden]: h of the request's last row."""
        return self._view(self.space.last_offset, 1, self.space.hidden, self.dtype)


def two_shot_ranks(
    space: TwoShotWorkspace, buffers: list[torch.Tensor], dtype: torch.dtype
) -> list[TwoShotRank]:
    """The ends of all ranks over their buffers, which their devices reach by address."""
    ends = []
    for rank, buffer in enumerate(buffers):
        peers = torch.tensor([b.data_ptr() for b in buffers], dtype=torch.int64)
        far = peers - buffer.data_ptr()
        ends.append(
            TwoShotRank(space, buffer, peers.to(buffer.device), far.to(buffer.device), rank, dtype)
        )
    return ends


@triton.jit(do_not_specialize=["S"])
def scatter_kernel(x, message, far, T, H, S, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """x [T, H] -> the owners' memory; grid T."""
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0)
    owner = row // S
    column = tl.arange(0, BLOCK)
    inside = column < H
    shift = tl.load(far + owner) // 2
    if PDL:
        gdc_wait()
    value = tl.load(x + row.to(tl.int64) * H + column, mask=inside)
    place = (row - owner * S).to(tl.int64) * H + tl.multiple_of(shift, 8) + column
    tl.store(message + place, value, mask=inside)


@triton.jit(do_not_specialize=["own", "rank", "epoch_offset"])
def publish_kernel(peers, own, epoch_offset, rank, WORLD: tl.constexpr, PDL: tl.constexpr):
    """One warp: the next epoch, to this rank's flag in every rank's buffer."""
    if PDL:
        gdc_launch_dependents()
    lane = tl.arange(0, 32)
    target = tl.load(peers + lane % WORLD)
    if PDL:
        gdc_wait()
    epoch_at = (own + epoch_offset).to(tl.pointer_type(tl.int32))
    epoch = tl.load(epoch_at, volatile=True) + 1
    tl.debug_barrier()  # every lane has read it
    tl.store(epoch_at, epoch)
    release_flag(target + rank * 4, epoch, lane < WORLD)


@triton.jit(
    do_not_specialize=[
        "own", "epoch_offset", "partials", "y_offset", "scales_offset", "last_offset", "status",
        "limit_us", "rank", "call_site", "S",
    ]
)  # fmt: skip
def reduce_kernel(
    peers,  # int64 [WORLD]
    own,  # int64, base address of this rank's buffer
    residual,  # [T, H] 16-bit, of which the own rows are read (RESIDUAL)
    h,  # [T, H] 16-bit, of which the own rows are written; may be `residual`
    gain,  # [H] norm weight (NORM)
    request,  # int32 [3]: slot, start, length (LAST)
    status, epoch_offset, partials, y_offset, scales_offset, last_offset, limit_us, rank, call_site,
    T, H, S, eps,
    WORLD: tl.constexpr, BLOCK: tl.constexpr, THREADS: tl.constexpr, RESIDUAL: tl.constexpr,
    NORM: tl.constexpr, QUANTIZE: tl.constexpr, LAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    program, programs, thread, peer, target, column = opening(peers, WORLD, BLOCK, THREADS, PDL)
    inside = column < H
    last_row = tl.load(request + 2) - 1 if LAST else -1
    epoch = tl.load((own + epoch_offset).to(tl.pointer_type(tl.int32)), volatile=True)
    wait_flags(own + peer * 4, epoch, peer, status, limit_us, rank, call_site, 0)
    tl.debug_barrier()  # the acquire above covers every thread's loads
    row_bytes = H.to(tl.int64) * 2
    first, stride = rank * S.to(tl.int64), S * row_bytes
    mine = tl.minimum(S, T - rank * S)  # may be <= 0: nothing to own
    for local in range(program, mine, programs):
        row = first + local
        message = own + partials + local * row_bytes
        y, scale = reduced_row(
            message, message + rank * stride, stride, residual + row * H, h + row * H, gain, peers,
            last_offset, row == last_row, rank, H, eps, column, inside,
            WORLD, RESIDUAL, NORM, QUANTIZE, LAST,
        )  # fmt: skip
        send_row(
            peers, y, scale, row, y_offset, scales_offset, rank, H, column, inside, local < mine,
            WORLD, QUANTIZE,
        )  # fmt: skip
    tl.debug_barrier()  # the release below covers every thread's stores
    flag = (WORLD + program * WORLD + rank) * 4
    release_flag(target + flag, epoch, thread < WORLD)


@triton.jit(do_not_specialize=["own", "epoch_offset", "status", "limit_us", "rank", "call_site"])
def gather_kernel(
    own, epoch_offset, flags, status, limit_us, rank, call_site,
    WORLD: tl.constexpr, LANES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: `flags` words behind the publishes' are at the epoch."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    epoch = tl.load((own + epoch_offset).to(tl.pointer_type(tl.int32)), volatile=True)
    lane = tl.arange(0, LANES)
    at = WORLD + tl.where(lane < flags, lane, 0)
    wait_flags(own + at * 4, epoch, at % WORLD, status, limit_us, rank, call_site, 1)


def programs_of(rows: int, world: int, config: AllReduceConfig) -> int:
    """Of a reduce, or of the one launch: the same on all ranks."""
    return max(1, min(config.programs, MOST_PROGRAMS, shard_rows(rows, world)))


def two_shot_scatter(x: torch.Tensor, end: TwoShotRank, *, pdl: bool = False) -> None:
    """x [T, H] 16-bit contiguous: each row to its owner, which no `epilogue.Scatter` has done."""
    rows, hidden = checked(x, end)
    scatter_kernel[(rows,)](
        x, end.message(rows), end.far, rows, hidden, shard_rows(rows, end.space.world),
        **norm_launch(hidden), PDL=pdl, launch_pdl=pdl,
    )  # fmt: skip


def two_shot_publish(end: TwoShotRank, *, pdl: bool = False) -> None:
    """Flag to every rank: all that this rank's stream has scattered is there."""
    space = end.space
    publish_kernel[(1,)](
        end.peers, end.buffer.data_ptr(), space.epoch_offset, end.rank, WORLD=space.world, PDL=pdl,
        num_warps=1, launch_pdl=pdl,
    )  # fmt: skip


def two_shot_reduce(
    end: TwoShotRank, residual: torch.Tensor | None, h: torch.Tensor, weight: torch.Tensor | None,
    status: torch.Tensor, *, eps: float = 0.0, fp8: bool = False, request: torch.Tensor | None = None,
    call_site: int, config: AllReduceConfig, pdl: bool = False, limit_us: int = DEFAULT_LIMIT_US,
) -> None:  # fmt: skip
    """Own rows of h [T, H] = sum over ranks + own rows of residual [T, H] (may be h); y to every rank.

    weight [H]: y = rmsnorm(h, weight, eps), without it y = h. fp8: y as e4m3 and a scale a row. request int32 [3]
    (slot, start, length): h of row length - 1 goes to every rank too (`TwoShotRank.last`).
    """
    rows, hidden = checked(h, end)
    space = end.space
    block = norm_launch(hidden)  # as rmsnorm has it: the same order of sums, the same bits
    reduce_kernel[(programs_of(rows, space.world, config),)](
        end.peers, end.buffer.data_ptr(), h if residual is None else residual, h,
        h if weight is None else weight, end.peers if request is None else request,
        status.data_ptr(), space.epoch_offset, space.partials_offset, space.y_offset,
        space.scales_offset, space.last_offset, limit_us, end.rank, call_site,
        rows, hidden, shard_rows(rows, space.world), eps,
        WORLD=space.world, **block, THREADS=32 * block["num_warps"], RESIDUAL=residual is not None,
        NORM=weight is not None, QUANTIZE=fp8, LAST=request is not None, PDL=pdl,
        maxnreg=MOST_REGISTERS, launch_pdl=pdl,
    )  # fmt: skip


def two_shot_gather(
    end: TwoShotRank, rows: int, status: torch.Tensor, *, call_site: int, config: AllReduceConfig,
    pdl: bool = False, limit_us: int = DEFAULT_LIMIT_US,
) -> None:  # fmt: skip
    """Wait until y [rows, H] of all ranks is in this rank's memory. config: the reduce's."""
    space = end.space
    flags = space.world * programs_of(rows, space.world, config)
    gather_kernel[(1,)](
        end.buffer.data_ptr(), space.epoch_offset, flags, status.data_ptr(), limit_us, end.rank,
        call_site, WORLD=space.world, LANES=max(32 * GATHER_WARPS, next_power_of_2(flags)),
        PDL=pdl, num_warps=GATHER_WARPS, launch_pdl=pdl,
    )  # fmt: skip


def checked(x: torch.Tensor, end: TwoShotRank) -> tuple[int, int]:
    """(rows, hidden); EngineError for what the buffers or the kernels cannot carry."""
    rows, hidden = x.shape
    space = end.space
    if x.dtype != end.dtype or not x.is_contiguous() or hidden % 8:
        raise EngineError(
            f"two-shot all-reduce needs contiguous rows of {end.dtype}, a multiple of 8 wide, not "
            f"{x.dtype} {tuple(x.shape)} with strides {x.stride()}"
        )
    if hidden != space.hidden or rows > space.rows:
        raise EngineError(
            f"two-shot all-reduce of {rows} x {hidden} in a workspace for {space.rows} x "
            f"{space.hidden}: lower the prefill bucket or size the workspace for it"
        )
    return rows, hidden
