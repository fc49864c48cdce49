"""What a deployment's all-reduces need of memory: pure arithmetic on (algorithm, message) pairs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from engine.graph.facts import ALGORITHM, GEMV_MAX_ROWS, all_reduce_algorithm
from engine.graph.ir import WAITS, Graph
from engine.graph.plan import ALIGN, value_bytes
from engine.kernels.flag_all_reduce import FlagWorkspace
from engine.kernels.gemv_poll import polled_slots
from engine.kernels.two_shot import two_shot_workspace

EXCHANGE_SLOTS = (
    2  # see runtime/rank.py: sites alternate, a slot is re-armed by the poll that read it
)


@dataclass(frozen=True)
class ExchangeSizes:
    """One rank's all-reduce buffers. slot_bytes: of a Lamport slot, one-shot or two-shot; polled_*: of the
    slots that GEMVs poll (kernels/gemv_poll.py); flag: the flag barrier's buffer, if it is used; nccl: no
    peer access, so a rank's tables name itself only."""

    slot_bytes: int = 0
    polled_slots: int = 0
    polled_slot_bytes: int = 0
    flag: FlagWorkspace | None = None
    nccl: bool = False

    @property
    def lamport_bytes(self) -> int:
        """Bytes of a rank's slots: the alternating ones, then those that GEMVs poll."""
        return EXCHANGE_SLOTS * self.slot_bytes + self.polled_slots * self.polled_slot_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of a rank."""
        return self.lamport_bytes + (self.flag.nbytes if self.flag else 0)


def exchange_sizes(
    world: int, messages: Iterable[tuple[str, int]], polled_slots: int = 0
) -> ExchangeSizes:
    """Buffers that serve every (algorithm, bytes of a message): graphs share them. "polled": one-shot, polled
    by a GEMV, in `polled_slots` slots."""
    slot = polled = flagged = 0
    messages = set(messages)
    for algorithm, nbytes in messages:
        if algorithm == "polled":
            polled = max(polled, world * nbytes)
        elif algorithm == "flag":
            flagged = max(flagged, nbytes)
        elif algorithm == "two_shot":
            slot = max(slot, two_shot_workspace(world, 1, nbytes // 2, 1).slot_bytes)
        else:
            slot = max(slot, world * nbytes)
    return ExchangeSizes(
        -(-slot // ALIGN) * ALIGN,
        polled_slots if polled else 0,
        -(-polled // ALIGN) * ALIGN,
        FlagWorkspace(world, 1, flagged // 2) if flagged else None,
        any(algorithm == "nccl" for algorithm, _ in messages),
    )


def graph_exchange(graphs: Iterable[Graph], act_bytes: int = 2) -> ExchangeSizes:
    """Buffers for the all-reduces of these finished graphs."""
    world, messages, polled_slots = 1, [], 0
    for graph in graphs:
        world = graph.tp
        for op in graph.ops:
            if op.polls:
                polled_slots = op.attrs["slots"]
                messages.append(("polled", value_bytes(op.input("message"), act_bytes)))
            elif op.kind in ALGORITHM and op.kind in WAITS:
                nccl = "nccl" in graph.algorithms
                algorithm = "nccl" if nccl else ALGORITHM[op.kind]
                messages.append((algorithm, value_bytes(op.out, act_bytes)))
    return exchange_sizes(world, messages, polled_slots)


def planned_exchange(
    world: int, hidden: int, layers: int, rows: Iterable[int], algorithms: Sequence[str], act_bytes: int = 2
) -> ExchangeSizes:  # fmt: skip
    """The same before any graph is built, for graphs of these numbers of rows (the memory table)."""
    if world == 1:
        return ExchangeSizes()
    messages, polled = [], 0
    for n in rows:
        nbytes = n * hidden * act_bytes
        algorithm = all_reduce_algorithm(world, nbytes, algorithms)
        slots = polled_slots(world, n, hidden, 2 * layers) if n <= GEMV_MAX_ROWS else 0
        if algorithm == "lamport" and slots:
            algorithm, polled = "polled", slots
        messages.append((algorithm, nbytes))
        if n > GEMV_MAX_ROWS:  # a prefill: its last layer sums one row (passes/hoist_last_row.py)
            row = hidden * act_bytes
            messages.append((all_reduce_algorithm(world, row, algorithms), row))
    return exchange_sizes(world, messages, polled)
