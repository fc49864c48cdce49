"""A lowered graph as one CUDA graph per device, or as a few of them with NCCL calls between.

Ranks that share a device share its stream and are launched in lockstep, op by op: every rank's send of
an exchange is enqueued before any rank's wait for it, so no kernel can spin in front of the one it waits
for. With one rank a device the same code gives each rank its own stream.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from engine.graph.lower import Launch
from engine.kernels.sync import ABORT_INTERRUPTED
from engine.runtime import nccl
from engine.runtime.jit import hash_compiler

Line = tuple[torch.cuda.Stream, torch.cuda.CUDAGraph]
Captured = list[Line]  # one a device


def _site(launch: Launch) -> object:
    """What pairs a send with its wait: the all-reduce's number, "sampling", or None for other launches."""
    if launch.op.is_send or launch.op.is_wait:
        return launch.op.attrs.get("site", "sampling")
    return None


def _uses_blas(launch: Launch) -> bool:
    return getattr(launch.config, "kernel", None) == "cublas"


def _enter_thread(stream: torch.cuda.Stream, blas: bool = False) -> None:
    """A thread has no CUDA context until it makes a runtime call; TMA descriptors need one. blas: its handle and
    workspace too, which a capture must not make."""
    with torch.cuda.device(stream.device), torch.cuda.stream(stream):
        square = torch.zeros((16, 16), dtype=torch.bfloat16, device=stream.device)
        if blas:
            torch.mm(square, square)


class Program:
    """The launches of every rank of one graph; run eagerly or as captured graphs."""

    def __init__(self, launches: Sequence[list[Launch]], streams: Sequence[torch.cuda.Stream]):
        """launches[rank], streams[rank]; ranks of one device have the same stream object."""
        self.launches = launches
        self.streams = streams
        self._pieces: list[Captured | int] = []  # an int: the column that NCCL carries
        self._local: dict[torch.cuda.Stream, list[int]] = {}
        for rank, stream in enumerate(streams):
            self._local.setdefault(stream, []).append(rank)

    @property
    def captured(self) -> bool:
        return bool(self._pieces)

    def run_eager(self) -> None:
        """Launch op by op, all ranks in lockstep. Does not wait."""
        for index in range(len(self.launches[0])):
            if self._is_joint(index):
                self._carry(index)
                continue
            for stream, ranks in self._local.items():
                with torch.cuda.stream(stream):
                    for rank in ranks:
                        self.launches[rank][index].run()

    def capture(self) -> None:
        """Capture each device's line of launches. Everything must have been warmed before."""
        first = 0
        for last in range(len(self.launches[0]) + 1):
            ended = last == len(self.launches[0])
            if not ended and not self._is_joint(last):
                continue
            if first < last:
                self._pieces.append(self._capture_columns(range(first, last)))
            if not ended:
                self._pieces.append(last)
            first = last + 1

    def _capture_columns(self, columns: range) -> Captured:
        """Devices side by side, in threads: what a launch and the end of a capture do in the driver, they do
        without the interpreter's lock."""
        if len(self._local) == 1:
            return [self._capture_line(columns, *line) for line in self._local.items()]

        def capture(line: tuple[torch.cuda.Stream, list[int]]) -> Line:
            _enter_thread(line[0], any(_uses_blas(launch) for launch in self.launches[line[1][0]]))
            return self._capture_line(columns, *line)

        with ThreadPoolExecutor(len(self._local), thread_name_prefix="capture") as pool:
            return list(pool.map(capture, self._local.items()))

    def _capture_line(self, columns: range, stream: torch.cuda.Stream, ranks: list[int]) -> Line:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(stream.device), torch.cuda.stream(stream):
            stream.synchronize()
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                for index in columns:
                    for rank in ranks:
                        self.launches[rank][index].run()
            finally:
                graph.capture_end()
        return stream, graph

    def _is_joint(self, index: int) -> bool:
        return self.launches[0][index].messages is not None

    def _carry(self, index: int) -> None:
        carry([line[index] for line in self.launches], self.streams)

    def free(self) -> None:
        """Drop the captured graphs."""
        self._pieces.clear()

    def replay(self) -> None:
        """One step: one graph launch per device (or eager launches if not captured). Does not wait."""
        if not self._pieces:
            self.run_eager()
            return
        for piece in self._pieces:
            if isinstance(piece, int):
                self._carry(piece)
                continue
            for stream, graph in piece:
                with torch.cuda.stream(stream):
                    graph.replay()


def carry(column: Sequence[Launch], streams: Sequence[torch.cuda.Stream]) -> None:
    """Run a launch of all ranks at once (`Launch.messages`)."""
    buffers = [launch.messages for launch in column]
    nccl.all_gather_in_place([buffer for buffer in buffers if buffer is not None], streams)


def warm(
    programs: Iterable[Program],
    streams: Sequence[torch.cuda.Stream],
    status: torch.Tensor,
    threads: int = 8,
) -> int:
    """Compile and load every kernel that the programs use, on every device; returns how many keys.

    All but the kernels that only wait are compiled first, in parallel threads; meanwhile `status`, the ranks'
    words of kernels/sync.py, ends the spin of a GEMV that polls at once. Those that send or wait then run in
    order with a synchronisation after each, because loading a module waits for the device and must not find
    a spinning kernel there. State and exchange buffers are left dirty: reset them afterwards.
    """
    devices = sorted({stream.device.index for stream in streams})
    first: dict[str, tuple[Launch, torch.cuda.Stream]] = {}
    programs = list(programs)
    for program in programs:
        for launch in program.launches[0]:
            only_waits = launch.op.is_wait and not launch.op.polls
            if not only_waits and launch.messages is None:
                first.setdefault(launch.key, (launch, program.streams[0]))

    def run(item: tuple[Launch, torch.cuda.Stream]) -> None:
        launch, stream = item
        with torch.cuda.device(stream.device), torch.cuda.stream(stream):
            launch.run()

    def compile_one(item: tuple[Launch, torch.cuda.Stream]) -> None:
        _enter_thread(item[1])
        run(item)

    hash_compiler()
    status[0] = ABORT_INTERRUPTED
    with ThreadPoolExecutor(threads, thread_name_prefix="compile") as pool:
        list(pool.map(compile_one, first.values()))
    for device in devices:
        torch.cuda.synchronize(device)
    status.zero_()

    seen: set[tuple[str, int]] = set()
    for program in programs:
        columns = list(zip(*program.launches))
        for index in new_columns(columns, [s.device.index for s in program.streams], seen):
            column = columns[index]
            if column[0].messages is not None:
                carry(column, program.streams)
            for item, stream in zip(column, program.streams):
                if item.messages is None:
                    run((item, stream))
            if _site(column[0]) is not None:
                for device in devices:
                    torch.cuda.synchronize(device)
    for device in devices:
        torch.cuda.synchronize(device)
    return len({key for key, _ in seen})


def new_columns(
    columns: Sequence[Sequence[Launch]], devices: Sequence[int], seen: set[tuple[str, int]]
) -> list[int]:
    """Indices of the launches to run so that every (key, device) of `columns` has run; adds those to `seen`.

    A send and its wait run together or not at all: a wait alone would spin until it expires. Layers exchange
    alike, so of their all-reduces only the first of each kind runs.
    """
    groups: dict[object, list[int]] = {}
    for index, column in enumerate(columns):
        site = _site(column[0])
        groups.setdefault(("alone", index) if site is None else site, []).append(index)
    chosen: list[int] = []
    for group in groups.values():
        keys = {(item.key, at) for index in group for item, at in zip(columns[index], devices)}
        if not keys <= seen:
            seen |= keys
            chosen += group
    return sorted(chosen)
