"""Which Lamport slot a call uses, and which slot its poll may re-arm. Pure arithmetic, no kernels.

An *exchange* is a push of every rank to every rank and the poll that needs all of them: an
all-reduce, or the argmax exchange at the end of a step. Number a stream's exchanges 0, 1, 2, ...
over all replays. On each rank the order is push 0, poll 0, push 1, poll 1, ...; each kernel's
accesses come after the complete end of the kernels before it (stream order, or `gdc_wait` under
PDL; a poll may overlap the push of its own call, which touches nothing here but what the poll waits
for), but a kernel has many programs in any order.

Let a buffer location be used by exchange a and next by exchange b. When may rank r re-arm it?

* Not before r has read it. The programs of poll a run in any order, so another program may clear it
  only in a later poll: i >= a + 1. The program that alone reads the location may clear it itself
  after a barrier of its threads: i = a.
* Not after a peer q may have written it again. q pushes b after its own poll b-1 ended, which
  needed r's push b-1, which r made after r's poll b-2 ended with all its clears. Nothing orders
  r's poll b-1 before q's push b. So i <= b - 2.

A clear by another program hence needs a + 1 <= i <= b - 2, that is b - a >= 3: **three slots,
never two**. With S slots rotated by call, b = a + S: poll i may clear the slot of call i + d, 2 <=
d <= S - 1. We take d = 2, which exists for every S >= 3. For S = 2 the formula (i + 2) mod 2 names
the call's own slot, which is the same-program rule (i = a <= b - 2): the kernels then clear what
they just read, behind a barrier. S = 1 (the argmax, once a replay) is the own-slot rule too, and
needs another exchange between two uses.

Slot numbers are constants of a captured graph, so S must divide the calls of one replay: else the
last calls of a replay and the first of the next do not rotate.

Graphs with different message sizes may share a buffer, if each has a multiple of S calls and all
their slots start at the same offsets: the poll of call i re-arms, in its own graph's layout, what
the same replay uses in call i + 2; the first two slots of a replay are re-armed by its own last
two polls. (The model checks it.) The engine's buffers use S = 2, which any even number of calls
divides; it pays for the re-arm after the poll instead of in the time of flight. A poll there leaves its
slot as it found it, so messages may differ in size within a graph too (a prefill's last layer has one row).

**Polls in a consumer's prologue** (gemv_poll.py): every program of poll a reads the whole message, so
no program may re-arm its own slot, and the other of two slots is one that a peer may be writing: S >= 3,
each program re-arms a share of the slot of call i + 2. Such calls have slots of their own, S a divisor
of their number in a step (`polled_slots`), and a step has all its all-reduces polled so or none: then
they alone rotate without a gap over replays, whatever the number of rows. What lies between two of
them, prefill chunks, steps with separate polls, the sampling exchange, are exchanges in other slots
that all ranks make in the same order: counted in, they make no distance above smaller, since a < i < b
and i + 1 < b hold in the numbers of the polled calls alone. Sharing the two slots of the separate
polls, or a rotation with a graph of another number of calls, is what the model catches.

Ranks that share a device run op by op on one stream: all pushes of a call before any rank's poll of
it, fused or not (a GEMV that polls sends nothing: graph/verify.py). So a poll spins only behind
complete pushes of its own device, and the argument of all_reduce.py holds as it stands.

One collective in flight per workspace, one stream per rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.errors import EngineError

MINIMUM_SLOTS = 3


def lamport_slots(calls_per_replay: int) -> int:
    """Smallest slot count >= 3 that divides the calls of a replay; 2 for two calls (own-slot rule).

    EngineError for fewer than two calls: a lone all-reduce has no second exchange to order its
    reuse.
    """
    if calls_per_replay == 2:
        return 2
    for slots in range(MINIMUM_SLOTS, calls_per_replay + 1):
        if calls_per_replay % slots == 0:
            return slots
    raise EngineError(
        f"{calls_per_replay} all-reduce per replay: the slot rotation needs at least 2 "
        "(capture two calls)"
    )


def clear_slot(call: int, slots: int) -> int:
    """The slot that the poll of `call` re-arms: the one of call + 2. Its own where slots <= 2."""
    return (call + 2) % slots


@dataclass(frozen=True)
class LamportWorkspace:
    """Layout of one rank's receive buffer: slots x world messages of rows x hidden values.

    `value_bytes` 2: 16-bit floats, sentinel 0x8000 a value. 4: 32-bit values, sentinel 0x80000000.
    """

    world: int
    rows: int
    hidden: int
    slots: int
    value_bytes: int = 2

    def __post_init__(self) -> None:
        alignment = 16 if self.value_bytes == 2 else 8
        if self.message_bytes % alignment:
            raise EngineError(
                f"message of {self.rows} x {self.hidden} values: {self.message_bytes} bytes is not a "
                f"multiple of {alignment}; choose a hidden size that is a multiple of 8"
            )
        if self.nbytes > 2**31 - 1:
            raise EngineError(
                f"all-reduce workspace of {self.nbytes} bytes exceeds the limit of 2147483647: "
                f"lower the prefill bucket (rows {self.rows})"
            )

    @property
    def message_bytes(self) -> int:
        return self.rows * self.hidden * self.value_bytes

    @property
    def slot_bytes(self) -> int:
        return self.world * self.message_bytes

    @property
    def nbytes(self) -> int:
        return self.slots * self.slot_bytes

    def slot_offset(self, call: int) -> int:
        """Byte offset of the slot of a call site (its number within the replay)."""
        return (call % self.slots) * self.slot_bytes

    def clear_offset(self, call: int) -> int:
        """Byte offset of the slot that the poll of this call re-arms."""
        return clear_slot(call, self.slots) * self.slot_bytes

    def allocate(self, device: torch.device | str) -> torch.Tensor:
        """uint8 [nbytes], armed. All ranks' buffers must be armed before any rank pushes."""
        buffer = torch.empty(self.nbytes, dtype=torch.uint8, device=device)
        self.reset(buffer)
        return buffer

    def reset(self, buffer: torch.Tensor) -> None:
        """Arm every word: at the start, and on all ranks, all idle, after an aborted call."""
        if self.value_bytes == 2:
            buffer.view(torch.int16).fill_(-(2**15))
        else:
            buffer.view(torch.int32).fill_(-(2**31))


def argmax_workspace(world: int, rows: int, slots: int = 1) -> LamportWorkspace:
    """(value fp32, id int32) a row and rank. One slot: an all-reduce lies between two uses."""
    return LamportWorkspace(world, rows, 2, slots, value_bytes=4)


def peer_table(buffers: list[torch.Tensor], device: torch.device | str) -> torch.Tensor:
    """int64 [world] on `device`: base addresses of all ranks' buffers, in rank order."""
    addresses = [buffer.data_ptr() for buffer in buffers]
    return torch.tensor(addresses, dtype=torch.int64).to(device)
