"""Streams, events and memory words on the CPU: what engine/runtime/stream_signal.py asks of a device.

A stream is a queue of operations; whoever looks at it (`query`) executes what can run. A wait holds
its stream until the int32 in memory satisfies it. A graph is a list of operations, replayed.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable

import torch

from engine.kernels import put_signal
from engine.runtime import signal_watchdog, stream_ops, stream_signal
from engine.runtime.stream_signal import Channel

LOCK = threading.RLock()


def int32_at(address: int) -> ctypes.c_int32:
    return ctypes.c_int32.from_address(address)


class Stream:
    """Operations return whether they ran; one that did not is tried again."""

    def __init__(self, *_: object, **__: object) -> None:
        self.device = torch.device("cpu")
        self.cuda_stream = id(self)
        self.queue: list[Callable[[], bool]] = []
        self.capturing: list[Callable[[], bool]] | None = None

    def add(self, operation: Callable[[], bool]) -> None:
        with LOCK:
            (self.queue if self.capturing is None else self.capturing).append(operation)

    def query(self) -> bool:
        with LOCK:
            while self.queue and self.queue[0]():
                self.queue.pop(0)
            return not self.queue

    def capture(self, body: Callable[[], None], *channels: Channel) -> list[Callable[[], bool]]:
        for channel in channels:
            channel.rewind()
        self.capturing = []
        body()
        graph, self.capturing = self.capturing, None
        for channel in channels:
            channel.rewind()
        return graph

    def replay(self, graph: list[Callable[[], bool]]) -> None:
        with LOCK:
            self.queue += graph


class FreeStream(Stream):
    """Nobody has to look: the watchdog's own."""

    def add(self, operation: Callable[[], bool]) -> None:
        super().add(operation)
        self.query()


class SharedQueues:
    """Streams over `count` hardware queues, first in first out: a stream with nothing in flight goes
    to the emptiest queue. What it waits for there holds up all that comes behind."""

    def __init__(self, count: int) -> None:
        self.queues: list[list[tuple[Stream, Callable[[], bool]]]] = [[] for _ in range(count)]

    def stream(self) -> Stream:
        return QueuedStream(self)

    def run(self) -> None:
        for queue in self.queues:
            while queue and queue[0][1]():
                queue.pop(0)


class QueuedStream(Stream):
    def __init__(self, hardware: SharedQueues) -> None:
        super().__init__()
        self.hardware = hardware

    def _mine(self) -> list[list[tuple[Stream, Callable[[], bool]]]]:
        return [q for q in self.hardware.queues if any(owner is self for owner, _ in q)]

    def add(self, operation: Callable[[], bool]) -> None:
        self.hardware.run()
        queue = (self._mine() or [min(self.hardware.queues, key=len)])[0]
        queue.append((self, operation))

    def query(self) -> bool:
        self.hardware.run()
        return not self._mine()


class Event:
    def record(self, stream: Stream) -> None:
        self.stream, self.done = stream, False

        def mark() -> bool:
            self.done = True
            return True

        stream.add(mark)

    def query(self) -> bool:
        self.stream.query()
        return self.done


def wait(stream: Stream, address: int, value: int = 0, flags: int = 0) -> None:
    """CU_STREAM_WAIT_VALUE_GEQ: cyclic."""
    assert flags == stream_ops.GEQ

    def ready() -> bool:
        return ctypes.c_int32(int32_at(address).value - value).value >= 0

    stream.add(ready)


def write(stream: Stream, address: int, value: int) -> None:
    def store() -> bool:
        int32_at(address).value = value
        return True

    stream.add(store)


def copy(stream: Stream, target: int, source: int, nbytes: int) -> None:
    def move() -> bool:
        ctypes.memmove(target, source, nbytes)
        return True

    stream.add(move)


def batch(stream: Stream, *operations: stream_ops.MemoryOp) -> None:
    for kind, address, value in operations:
        {"wait": wait, "write": write}[kind](stream, address, value)


class Ends:
    """A channel in stream mode between two simulated streams."""

    def __init__(self, monkeypatch, nbytes: int, **options) -> None:
        for function in (wait, write, copy, batch):
            monkeypatch.setattr(stream_signal, f"stream_{function.__name__}", function)
        self.current = self.source = Stream()
        self.sink = Stream()
        monkeypatch.setattr(Channel, "_stream", lambda _channel, _device: self.current)
        for name in ("put", "consume"):
            monkeypatch.setattr(put_signal, name, self.queued(getattr(put_signal, name)))
        monkeypatch.setattr(torch.cuda, "Stream", FreeStream)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(signal_watchdog, "independent", lambda *_: True)
        monkeypatch.setattr(signal_watchdog, "stream_copy", copy)
        self.channel = Channel(nbytes, "cpu", "cpu", **options)
        # A simulated kernel runs alone: a put that waited for its credit inside would wait in vain.
        self.channel.waits = self.channel.credit = "stream"

    def queued(self, launcher: Callable) -> Callable:
        """Launches join the current stream's queue."""

        def launch(*args, **kwargs) -> None:
            def run() -> bool:
                launcher(*args, **kwargs)
                return True

            self.current.add(run)

        return launch

    def drain(self) -> None:
        """Run both streams to their ends."""
        for _ in range(100):
            if self.source.query() & self.sink.query():
                return
        raise AssertionError("a stream waits for ever")

    def on(self, stream: Stream) -> Channel:
        """The channel, with `stream` current."""
        self.current = stream
        return self.channel
