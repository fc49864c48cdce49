"""Launchers of sampling under controls; the method is in sample_kernel.py, the definition in sample_ref.py.

Order of a step's tail: adjust, gather (world > 1), search x PASSES, pick, settle.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from engine.kernels import sample_kernel as kernel
from engine.kernels.argmax import outcome
from engine.kernels.messages import address_of
from engine.kernels.sample_kernel import PASSES, PEAK_NONE, SUMS
from engine.kernels.slots import LamportWorkspace
from engine.kernels.sync import DEFAULT_LIMIT_US

__all__ = ["PASSES", "SampleBuffers", "adjust", "gather", "pick", "sample_buffers", "sample_workspace",
           "search", "settle"]  # fmt: skip

ADJUST_COLUMNS = 512
GATHER_PAIRS = 256
SEARCH_COLUMNS = 512
PICK_COLUMNS = 1024


@dataclass
class SampleBuffers:
    """One rank's scratch: scores fp32 [R, W * V], peaks int32 [R], sums int64 [R, 256]. settle clears it."""

    scores: torch.Tensor
    peaks: torch.Tensor
    sums: torch.Tensor

    def reset(self) -> None:
        """As before the first step; also after an aborted one."""
        self.peaks.fill_(PEAK_NONE)
        self.sums.zero_()


def sample_buffers(rows: int, total: int, device: torch.device | str) -> SampleBuffers:
    """Scratch for up to `rows` rows over `total` = world * shard columns."""
    buffers = SampleBuffers(
        torch.zeros((rows, total), dtype=torch.float32, device=device),
        torch.empty(rows, dtype=torch.int32, device=device),
        torch.empty((rows, SUMS), dtype=torch.int64, device=device),
    )
    buffers.reset()
    return buffers


def sample_workspace(world: int, rows: int, columns: int) -> LamportWorkspace:
    """Exchange buffer of `gather`: one slot of every rank's [rows, columns] fp32 scores."""
    return LamportWorkspace(world, rows, columns, slots=1, value_bytes=4)


def adjust(
    logits: torch.Tensor,
    controls: torch.Tensor,
    counts: torch.Tensor,
    bias: torch.Tensor,
    row_slots: torch.Tensor,
    buffers: SampleBuffers,
    peers: torch.Tensor | None,
    *,
    vocab_size: int,
    rank: int,
    world: int,
    request: torch.Tensor | None = None,
    pdl: bool = False,
) -> None:
    """Penalties and bias on logits fp32 [R, V]; world 1: to buffers.scores, else pushed to every rank.

    controls fp32 [S, 8], counts int32 [S, V], bias fp32 [S, V] (sample_ref.py); row_slots int32 [R],
    -1 = padding. With `request` (int32 [3] = slot, start, length) the only row's slot comes from it.
    Message layout in a peer's buffer: (rank * R + row) * V + column, fp32.
    """
    rows, columns = logits.shape
    kernel.adjust_kernel[(rows, triton.cdiv(columns, ADJUST_COLUMNS))](
        logits, controls, counts, bias, row_slots, row_slots if request is None else request,
        buffers.scores, buffers.peaks, buffers.peaks if peers is None else peers, rank, rows, columns,
        vocab_size - rank * columns, world * columns, WORLD=world, BLOCK=ADJUST_COLUMNS,
        REQUEST=request is not None, PDL=pdl, num_warps=4, num_stages=1, launch_pdl=pdl,
    )  # fmt: skip


def gather(
    buffer: torch.Tensor | int,
    columns: int,
    rows: int,
    buffers: SampleBuffers,
    status: torch.Tensor,
    *,
    rank: int,
    world: int,
    call_site: int,
    pdl: bool = False,
    limit_us: int = DEFAULT_LIMIT_US,
) -> None:
    """Wait for all ranks' scores [rows, columns] into buffers.scores; re-arms the buffer."""
    total = world * columns
    kernel.gather_kernel[(rows, triton.cdiv(total // 2, GATHER_PAIRS))](
        address_of(buffer), buffers.scores, buffers.peaks, status.data_ptr(), call_site, rank, limit_us,
        rows, columns, total, PAIRS=GATHER_PAIRS, PDL=pdl, num_warps=4, num_stages=1, launch_pdl=pdl,
    )  # fmt: skip


def search(
    number: int,
    rows: int,
    total: int,
    temperature: torch.Tensor,
    controls: torch.Tensor,
    row_slots: torch.Tensor,
    buffers: SampleBuffers,
    *,
    vocab_size: int,
    request: torch.Tensor | None = None,
    pdl: bool = False,
) -> None:
    """Launch `number` (0 .. PASSES - 1) of the search for the top-k and top-p thresholds."""
    kernel.search_kernel[(rows, triton.cdiv(vocab_size, SEARCH_COLUMNS))](
        buffers.scores, temperature, controls, row_slots, row_slots if request is None else request,
        buffers.peaks, buffers.sums, vocab_size, total, number, BLOCK=SEARCH_COLUMNS,
        REQUEST=request is not None, PDL=pdl, num_warps=8, num_stages=1, launch_pdl=pdl,
    )  # fmt: skip


def pick(
    total: int,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    controls: torch.Tensor,
    row_slots: torch.Tensor,
    buffers: SampleBuffers,
    values: torch.Tensor,
    ids: torch.Tensor,
    *,
    vocab_size: int,
    request: torch.Tensor | None = None,
    pdl: bool = False,
) -> None:
    """Per-program winners among the kept ids into values fp32 [R, P] and ids int32 [R, P].

    The noise is that of position positions[slot] - 1: the step's own sampling has advanced it.
    """
    kernel.pick_kernel[tuple(values.shape)](
        buffers.scores, temperature, seeds, positions, controls, row_slots,
        row_slots if request is None else request, buffers.peaks, buffers.sums, values, ids, vocab_size,
        total, BLOCK=PICK_COLUMNS, REQUEST=request is not None, PDL=pdl, num_warps=4, num_stages=1,
        launch_pdl=pdl,
    )  # fmt: skip


def settle(
    values: torch.Tensor,
    ids: torch.Tensor,
    tokens: torch.Tensor,
    controls: torch.Tensor,
    counts: torch.Tensor,
    row_slots: torch.Tensor,
    ring: torch.Tensor,
    step: torch.Tensor,
    buffers: SampleBuffers,
    *,
    rank: int,
    request: torch.Tensor | None = None,
    pdl: bool = False,
) -> None:
    """The winner of each live row: tokens[slot], counts[slot, id] += 2 (if counted and of this shard),
    ring[step % RING, row] on rank 0 (marks as argmax_poll's), step += 1. Positions stay.
    """
    rows, parts = values.shape
    columns = counts.shape[1]
    kernel.settle_kernel[(1,)](
        values, ids, *outcome(tokens, row_slots, request, ring, step), controls, counts, buffers.peaks,
        buffers.sums, rows, parts, rank * columns, columns, ROWS=triton.next_power_of_2(rows),
        PARTS=triton.next_power_of_2(parts), WRITE_RING=rank == 0, REQUEST=request is not None, PDL=pdl,
        num_warps=1, num_stages=1, launch_pdl=pdl,
    )  # fmt: skip
