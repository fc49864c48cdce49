"""Greedy argmax or Gumbel-max sampling over a vocabulary that is split over the ranks.

    id = argmax over v of  logit[v] + T * g(seed, position, v),   g = -log(E),  E = -log(1 - u)

T = 0 is greedy. Gumbel-max (Gumbel 1954; Maddison et al., arXiv:1411.0030) draws exactly from
softmax(logit / T): argmax is unchanged by the factor T. u is a 32-bit counter hash of (seed,
position, GLOBAL vocabulary id), so a token does not depend on the TP degree, the batch row or the
grid. `position` is that of the token whose logits these are (positions[slot] in decode, start +
length - 1 in prefill).

Order: NaN above all (value NaN: the step is flagged), then the larger value, then the LOWER id.
Value and id are one int64 key, so every reduction over lanes, programs and ranks is an integer
maximum and gives the same answer in any order. -0.0 and +0.0 tie.

Per rank: logits fp32 [R, V], V = 152064 / 1, 2, 4, 8 (7B and 72B): 608 / 304 / 152 / 76 KB a row,
0.14 / 0.07 / 0.04 / 0.02 us of HBM at 4.3 TB/s (they lie in L2): the time is launches. Exchange: 8
bytes a row and rank.

The lm_head GEMV's epilogue (`epilogue.Maxima`) leaves [R, P] maxima, one a program; behind a GEMM
(more than 8 rows) argmax_partial does. Then argmax_finish (one rank) or argmax_push + argmax_poll,
which loop over any number of parts (a ring has 132 or 264, the plain kernel N / block_n). The exchange is one Lamport exchange (slots.py): one slot, re-armed by the poll that read it, which
needs an all-reduce between two uses, as every decode step has. The host reads ids from the pinned
ring. The kernels are in argmax_kernel.py.
"""

from __future__ import annotations

import torch
import triton

from engine.errors import EngineError
from engine.kernels.argmax_kernel import (
    argmax_finish_kernel,
    argmax_partial_kernel,
    argmax_poll_kernel,
    argmax_push_kernel,
)
from engine.kernels.gumbel import gumbel, gumbel_ref
from engine.kernels.messages import address_of
from engine.kernels.sample_ref import RING_NAN, sample_ref
from engine.kernels.sync import DEFAULT_LIMIT_US

__all__ = [
    "RING_NAN", "RING_PADDING", "argmax_finish", "argmax_partial", "argmax_poll", "argmax_programs",
    "argmax_push", "gumbel", "gumbel_ref", "outcome", "sample_ref",
]  # fmt: skip

RING_PADDING = -3  # row_slots[r] = -1
COLUMNS = 1024  # logits a program handles at a time
PARTS = (
    512  # maxima of a row that finish and push reduce at a time: more than a ring GEMV has programs
)


def argmax_programs(columns: int) -> int:
    """Programs a row for `columns` logits: P of the [R, P] buffers."""
    return max(1, min(64, triton.cdiv(columns, 2 * COLUMNS)))


def outcome(
    tokens: torch.Tensor,
    row_slots: torch.Tensor,
    request: torch.Tensor | None,
    ring: torch.Tensor,
    step: torch.Tensor,
) -> tuple:
    """Kernel arguments tokens .. step: where winners go, and which slots they belong to."""
    where = row_slots if request is None else request
    return tokens, row_slots, where, ring, ring.shape[0], ring.stride(0), step


def argmax_partial(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    row_slots: torch.Tensor,
    values: torch.Tensor,
    ids: torch.Tensor,
    *,
    vocab_size: int,
    id_offset: int,
    request: torch.Tensor | None = None,
    pdl: bool = False,
) -> None:
    """Maxima of logits fp32 [R, V] per program into values fp32 [R, P] and ids int32 [R, P].

    temperature fp32 [S], seeds int32 [S], positions int32 [S]; row_slots int32 [R], -1 = padding
    (its result is ignored later). Column c is id id_offset + c; ids >= vocab_size never win. With
    `request` (int32 [3] = slot, start, length; R = 1, prefill) slot and position come from it.
    """
    rows, columns = logits.shape
    if logits.dtype != torch.float32 or not logits.is_contiguous():
        raise EngineError(f"argmax needs contiguous fp32 logits, not {logits.dtype}")
    argmax_partial_kernel[(rows, values.shape[1])](
        logits, temperature, seeds, positions, row_slots, row_slots if request is None else request,
        values, ids, columns, vocab_size - id_offset, id_offset, BLOCK=COLUMNS,
        REQUEST=request is not None, PDL=pdl, num_warps=4, num_stages=1, launch_pdl=pdl,
    )  # fmt: skip


def argmax_push(
    values: torch.Tensor,
    ids: torch.Tensor,
    peers: torch.Tensor,
    slot_offset_bytes: int,
    *,
    rank: int,
    world: int,
    pdl: bool = False,
) -> None:
    """Reduce [R, P] to one (value, id) a row and store the 8 bytes into message `rank` of every
    rank.

    Layout: base + slot + (rank * R + row) * 8, value fp32 then id int32 (`argmax_workspace`).
    """
    rows, parts = values.shape
    argmax_push_kernel[(rows,)](
        values, ids, peers, slot_offset_bytes, rank, rows, parts, WORLD=world, PARTS=PARTS, THREADS=128,
        PDL=pdl, num_warps=4, num_stages=1, launch_pdl=pdl,
    )  # fmt: skip


def argmax_poll(
    buffer: torch.Tensor | int,
    slot_offset_bytes: int,
    clear_offset_bytes: int,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    row_slots: torch.Tensor,
    ring: torch.Tensor,
    step: torch.Tensor,
    status: torch.Tensor,
    *,
    rank: int,
    world: int,
    call_site: int,
    request: torch.Tensor | None = None,
    pdl: bool = False,
    limit_us: int = DEFAULT_LIMIT_US,
) -> None:
    """Wait for all ranks' winners, choose, and update the state of each live row's slot.

    tokens[slot] = id, positions[slot] += 1 (with `request`: = start + length). Rank 0 writes
    ring[step % RING, r] = id, -2 (NaN) or -3 (padding row); ring int32 [RING, R] pinned, step
    int32 [1]. Re-arms clear_offset_bytes, which may be the slot itself (slots.py).
    """
    rows = ring.shape[1]
    worlds = triton.next_power_of_2(world)
    argmax_poll_kernel[(1,)](
        address_of(buffer), slot_offset_bytes, clear_offset_bytes,
        *outcome(tokens, row_slots, request, ring, step), positions, status.data_ptr(), call_site, rank,
        limit_us, rows, WORLD=world, WORLDS=worlds,
        ROWS=max(triton.next_power_of_2(rows), 32 // worlds), WRITE_RING=rank == 0,
        REQUEST=request is not None, PDL=pdl, num_warps=1, num_stages=1, launch_pdl=pdl,
    )  # fmt: skip


def argmax_finish(
    values: torch.Tensor,
    ids: torch.Tensor,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    row_slots: torch.Tensor,
    ring: torch.Tensor,
    step: torch.Tensor,
    *,
    request: torch.Tensor | None = None,
    pdl: bool = False,
) -> None:
    """The form without an exchange (one rank): choose among [R, P] and update the state as
    argmax_poll.
    """
    rows, parts = values.shape
    argmax_finish_kernel[(1,)](
        values, ids, *outcome(tokens, row_slots, request, ring, step), positions, rows, parts,
        ROWS=triton.next_power_of_2(rows), PARTS=PARTS, REQUEST=request is not None, PDL=pdl,
        num_warps=4 if rows == 1 else 8, num_stages=1, launch_pdl=pdl,
    )  # fmt: skip
