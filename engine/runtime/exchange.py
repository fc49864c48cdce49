"""What a deployment's all-reduces need of memory: pure arithmetic on (algorithm, rows, hidden size)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from engine.graph.facts import ALGORITHM, GEMV_MAX_ROWS, all_reduce_algorithm
from engine.graph.ir import WAITS, Graph
from engine.graph.plan import ALIGN
from engine.kernels.flag_all_reduce import FlagWorkspace
from engine.kernels.gemv_poll import polled_slots
from engine.kernels.two_shot import TwoShotWorkspace

EXCHANGE_SLOTS = (
    2  # see runtime/rank.py: sites alternate, a slot is re-armed by the poll that read it
)


@dataclass(frozen=True)
class ExchangeSizes:
    """One rank's all-reduce buffers. slot_bytes: of a Lamport slot; polled_*: of the
    slots that GEMVs poll (kernels/gemv_poll.py); flag, two_shot: these algorithms' buffers, if they are used;
    nccl: no peer access, so a rank's tables name itself only."""

    slot_bytes: int = 0
    polled_slots: int = 0
    polled_slot_bytes: int = 0
    flag: FlagWorkspace | None = None
    two_shot: TwoShotWorkspace | None = None
    nccl: bool = False

    @property
    def lamport_bytes(self) -> int:
        """Bytes of a rank's slots: the alternating ones, then those that GEMVs poll."""
        return EXCHANGE_SLOTS * self.slot_bytes + self.polled_slots * self.polled_slot_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of a rank."""
        spaces = (space for space in (self.flag, self.two_shot) if space)
        return self.lamport_bytes + sum(space.nbytes for space in spaces)


Message = tuple[str, int, int]  # algorithm, rows, hidden size


def exchange_sizes(
    world: int, messages: Iterable[Message], polled_slots: int = 0, act_bytes: int = 2
) -> ExchangeSizes:
    """Buffers that serve every message: graphs share them. "polled": one-shot, polled by a GEMV, in
    `polled_slots` slots."""
    most: dict[str, int] = {}
    width = 0
    for algorithm, rows, hidden in set(messages):
        most[algorithm] = max(most.get(algorithm, 0), rows)
        width = hidden

    def slot(*names: str) -> int:
        rows = max((most.get(name, 0) for name in names), default=0)
        return -(-world * rows * width * act_bytes // ALIGN) * ALIGN

    return ExchangeSizes(
        slot("lamport", "nccl"),
        polled_slots if "polled" in most else 0,
        slot("polled"),
        FlagWorkspace(world, most["flag"], width) if "flag" in most else None,
        TwoShotWorkspace(world, most["two_shot"], width) if "two_shot" in most else None,
        "nccl" in most,
    )


def graph_exchange(graphs: Iterable[Graph], act_bytes: int = 2) -> ExchangeSizes:
    """Buffers for the all-reduces of these finished graphs."""
    world, polled_slots = 1, 0
    messages: list[Message] = []
    for graph in graphs:
        world = graph.tp
        for op in graph.ops:
            if op.polls:
                polled_slots = op.attrs["slots"]
                rows, hidden = op.input("message").shape
                messages.append(("polled", rows, hidden))
            elif op.kind in ALGORITHM and op.kind in WAITS:
                nccl = "nccl" in graph.algorithms
                algorithm = "nccl" if nccl else ALGORITHM[op.kind]
                rows, hidden = op.out.shape
                messages.append((algorithm, rows, hidden))
    return exchange_sizes(world, messages, polled_slots, act_bytes)


def planned_exchange(
    world: int, hidden: int, layers: int, rows: Iterable[int], algorithms: Sequence[str], act_bytes: int = 2
) -> ExchangeSizes:  # fmt: skip
    """The same before any graph is built, for graphs of these numbers of rows (the memory table)."""
    if world == 1:
        return ExchangeSizes()
    messages, polled = [], 0
    for n in rows:
        algorithm = all_reduce_algorithm(world, n, hidden, algorithms)
        slots = polled_slots(world, n, hidden, 2 * layers) if n <= GEMV_MAX_ROWS else 0
        if algorithm == "lamport" and slots:
            algorithm, polled = "polled", slots
        messages.append((algorithm, n, hidden))
        if n > GEMV_MAX_ROWS:  # a prefill: its last layer sums one row (passes/hoist_last_row.py)
            messages.append((all_reduce_algorithm(world, 1, hidden, algorithms), 1, hidden))
    return exchange_sizes(world, messages, polled, act_bytes)
