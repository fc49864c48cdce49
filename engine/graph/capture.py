"""A lowered graph as one CUDA graph per device.

Ranks that share a device share its stream and are launched in lockstep, op by op: every rank's send of
an exchange is enqueued before any rank's wait for it, so no kernel can spin in front of the one it waits
for. With one rank a device the same code gives each rank its own stream.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from engine.graph.lower import Launch

_SENDS = {"push", "argmax_push", "sample_push"}
_WAITS = {"poll_residual", "argmax_poll", "sample_gather"}


def is_send(launch: Launch) -> bool:
    """Whether the launch writes into the peers' memory."""
    return launch.op.kind in _SENDS or launch.op.attrs.get("epilogue") == "push"


def _site(launch: Launch) -> object:
    """What pairs a send with its wait: the all-reduce's number, "sampling", or None for other launches."""
    if is_send(launch) or launch.op.kind in _WAITS:
        return launch.op.attrs.get("site", "sampling")
    return None


class Program:
    """The launches of every rank of one graph; run eagerly or as captured graphs."""

    def __init__(self, launches: Sequence[list[Launch]], streams: Sequence[torch.cuda.Stream]):
        """launches[rank], streams[rank]; ranks of one device have the same stream object."""
        self.launches = launches
        self.streams = streams
        self._graphs: list[tuple[torch.cuda.Stream, torch.cuda.CUDAGraph]] = []
        self._local: dict[torch.cuda.Stream, list[int]] = {}
        for rank, stream in enumerate(streams):
            self._local.setdefault(stream, []).append(rank)

    @property
    def captured(self) -> bool:
        return bool(self._graphs)

    def run_eager(self) -> None:
        """Launch op by op, all ranks in lockstep. Does not wait."""
        for index in range(len(self.launches[0])):
            for stream, ranks in self._local.items():
                with torch.cuda.stream(stream):
                    for rank in ranks:
                        self.launches[rank][index].run()

    def capture(self) -> None:
        """Capture each device's line of launches. Everything must have been warmed before."""
        for stream, ranks in self._local.items():
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.device(stream.device), torch.cuda.graph(graph, stream=stream):
                for index in range(len(self.launches[0])):
                    for rank in ranks:
                        self.launches[rank][index].run()
            self._graphs.append((stream, graph))

    def free(self) -> None:
        """Drop the captured graphs."""
        self._graphs.clear()

    def replay(self) -> None:
        """One step: one graph launch per device (or eager launches if not captured). Does not wait."""
        if not self._graphs:
            self.run_eager()
            return
        for stream, graph in self._graphs:
            with torch.cuda.stream(stream):
                graph.replay()


def warm(
    programs: Iterable[Program], streams: Sequence[torch.cuda.Stream], threads: int = 8
) -> int:
    """Compile and load every kernel that the programs use, on every device; returns how many keys.

    All but the waits are compiled first, in parallel threads. Those that send or wait then run in order
    with a synchronisation after each, because loading a module waits for the device and must not find a
    spinning kernel there. State and exchange buffers are left dirty: reset them afterwards.
    """
    devices = sorted({stream.device.index for stream in streams})
    first: dict[str, tuple[Launch, torch.cuda.Stream]] = {}
    programs = list(programs)
    for program in programs:
        for launch in program.launches[0]:
            if launch.op.kind not in _WAITS:
                first.setdefault(launch.key, (launch, program.streams[0]))

    def run(item: tuple[Launch, torch.cuda.Stream]) -> None:
        launch, stream = item
        with torch.cuda.device(stream.device), torch.cuda.stream(stream):
            launch.run()

    def compile_one(item: tuple[Launch, torch.cuda.Stream]) -> None:
        # A thread has no CUDA context until it makes a runtime call; TMA descriptors need one.
        torch.zeros(1, device=item[1].device)
        run(item)

    with ThreadPoolExecutor(threads, thread_name_prefix="compile") as pool:
        list(pool.map(compile_one, first.values()))

    seen: set[tuple[str, int]] = set()
    for program in programs:
        columns = list(zip(*program.launches))

        def new(column: tuple[Launch, ...], program: Program = program) -> bool:
            return any(
                (item.key, stream.device.index) not in seen
                for item, stream in zip(column, program.streams)
            )

        # A send and its wait run together or not at all: a wait alone would spin until it expires.
        sites = {
            _site(column[0]) for column in columns if _site(column[0]) is not None and new(column)
        }
        for column in columns:
            site = _site(column[0])
            if not (site in sites if site is not None else new(column)):
                continue
            for item, stream in zip(column, program.streams):
                run((item, stream))
                seen.add((item.key, stream.device.index))
            if site is not None:
                for device in devices:
                    torch.cuda.synchronize(device)
    for device in devices:
        torch.cuda.synchronize(device)
    return len({key for key, _ in seen})
