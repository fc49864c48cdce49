"""What the profiler needs of a device, and that on the card: programs of one graph, replayed from a fixed state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from engine.graph.ir import SENDS, Graph, Op, Value, make_op
from engine.graph.plan import BufferPlan, value_bytes

if TYPE_CHECKING:
    import torch

    from engine.graph.lower import Launch
    from engine.runtime.gpu import GpuExecutor

StandIns = dict[tuple[str, int], "Launch"]

REPLAYS = 24  # per timing; the KV of a slot must have room for so many steps beyond the context
PREFILL_REPLAYS = 5  # a prefill step takes milliseconds
BATCHES = 4


class Event(Protocol):
    """A time stamp taken where it was recorded: in the captured graph, on its device."""

    def record(self) -> None: ...

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds from this to `end`, both of the same device."""


class Runnable(Protocol):
    """A program: `engine.graph.capture.Program` or a test's stand-in. launches[rank]."""

    launches: Sequence[list[Launch]]

    def free(self) -> None: ...


class Device(Protocol):
    """Runs variants of one lowered graph."""

    def program(self, lines: Sequence[list[Launch]]) -> Any:
        """A Runnable of these launches (per rank), captured before its first timing."""

    def step_s(self, program: Any) -> list[float]:
        """Seconds per step of each rank, median of batches of replays."""

    def replay(self, program: Any, times: int) -> None:
        """Replay from the fixed state and wait for the end."""

    def event(self) -> Event:
        """A new event to record while a program is captured."""

    def stand_ins(self) -> list[StandIns]:
        """Per rank, what takes the place of an op that sends or awaits an all-reduce (`stand_in`)."""


class GpuDevice:
    """Device of one graph of an executor: `rows` decode rows with `context` tokens each, or a prompt of
    `context` tokens."""

    def __init__(self, executor: GpuExecutor, graph: Graph, rows: int, context: int):
        self.executor, self.graph, self.rows, self.context = executor, graph, rows, context
        self.replays = REPLAYS if graph.phase == "decode" else PREFILL_REPLAYS

    def lower(self) -> Any:
        """The graph as the engine runs it; neither warmed nor captured."""
        return self.executor.lower(self.graph)

    def program(self, lines: Sequence[list[Launch]]) -> Any:
        from engine.graph.capture import Program

        return Program(lines, self.executor.streams)

    def event(self) -> Event:
        import torch

        return torch.cuda.Event(enable_timing=True, external=True)

    def step_s(self, program: Any) -> list[float]:
        import torch

        if not program.captured:
            program.capture()
        streams = list(dict.fromkeys(program.streams))
        batches = []
        for _ in range(BATCHES):
            self.rewind()
            pairs = []
            for stream in streams:
                with torch.cuda.stream(stream):
                    pairs.append([torch.cuda.Event(enable_timing=True) for _ in range(2)])
                    pairs[-1][0].record(stream)
            for _ in range(self.replays):
                program.replay()
            for stream, pair in zip(streams, pairs):
                pair[1].record(stream)
            self.synchronize()
            seconds = [a.elapsed_time(b) * 1e-3 / self.replays for a, b in pairs]
            batches.append([seconds[streams.index(stream)] for stream in program.streams])
        return sorted(batches, key=max)[1]

    def replay(self, program: Any, times: int) -> None:
        if not program.captured:
            program.capture()
        self.rewind()
        for _ in range(times):
            program.replay()
        self.synchronize()

    def stand_ins(self) -> list[StandIns]:
        from engine.graph.capture import warm
        from engine.graph.lower import lower

        if not any(stand_in(op) for op in self.graph.ops):
            return [{} for _ in self.executor.ranks]
        graph, buffers = bare_exchanges(self.graph, self.executor.ranks[0].dtype.itemsize)
        ranks = self.executor.ranks
        pdl = len({rank.device for rank in ranks}) == len(ranks)  # as the engine decides
        lines = [lower(graph, buffers, rank, pdl) for rank in ranks]
        # Loaded before anything may spin.
        warm([self.program(lines)], self.executor.streams, ranks[0].status)
        return [
            {(launch.op.kind, launch.op.attrs["site"]): launch for launch in line} for line in lines
        ]

    def rewind(self) -> None:
        """Protocol state re-armed, every slot back at the context's length, the prompt in place."""
        import torch

        self.executor.recover()
        for rank in self.executor.ranks:
            slots = torch.arange(rank.row_slots.numel(), dtype=torch.int32, device=rank.device)
            rank.row_slots.copy_(slots.clamp(max=self.rows - 1))
            rank.state.positions.fill_(self.context)
            rank.request.copy_(torch.tensor([0, 0, self.context], dtype=torch.int32))
            ids = torch.arange(rank.prompt.numel(), dtype=torch.int32) * 37 + 5
            rank.prompt.copy_(ids % self.executor.config.vocab_size)
            rank.state.tokens.copy_(torch.arange(rank.state.tokens.numel()) + 11)
        self.synchronize()

    def synchronize(self) -> None:
        for stream in self.executor.streams:
            stream.synchronize()


def stand_in(op: Op) -> tuple[str, int] | None:
    """(kind, site) of the bare launch that stays when `op` is left out: what its peers wait for, or the poll that
    keeps the slots going round."""
    epilogue = op.attrs.get("epilogue")
    kind = "poll_residual" if op.polls else epilogue if epilogue in SENDS else None
    return None if kind is None else (kind, op.attrs["site"])


def bare_exchanges(graph: Graph, act_bytes: int) -> tuple[Graph, BufferPlan]:
    """A graph of stand-alone pushes and polls, one for each fused one of `graph`: same site, message and stage.

    They read and write the arena's start: what is sent does not matter here, only how much.
    """
    ops, offsets, size = [], {}, 0
    for op in graph.ops:
        key = stand_in(op)
        if key is None:
            continue
        message = op.input("message") if op.polls else op.out
        local = Value(f"{message.name}_{key[0]}", message.shape)
        offsets[local] = 0
        size = max(size, value_bytes(local, act_bytes))
        attrs: dict[str, Any] = {
            name: value for name, value in op.attrs.items() if name in ("site", "slots")
        }
        if op.polls:
            inputs = {"message": message, "residual": op.input("x")}
            offsets[op.input("x")] = 0
            ops.append(make_op(key[0], local, op.stage, op.layer, attrs, **inputs))
        else:
            ops.append(make_op(key[0], message, op.stage, op.layer, attrs, x=local))
    whole = Graph(graph.phase, graph.rows, graph.tp, graph.model, tuple(ops), {}, None)
    return whole, BufferPlan(offsets, size)


def allocations(devices: Sequence[torch.device]) -> int:
    """Device allocations that torch has made so far in this process."""
    import torch

    return sum(
        int(torch.cuda.memory_stats(device).get("allocation.all.allocated", 0))
        for device in devices
    )
