"""Bounds stream waits in time: a host thread that sees that nothing moves, and ends the wait.

A stream wait spins in the device's front end, reads no clock and cannot give up. So, per watched
batch of work (`watch`), the thread looks at the ends' events; while one is pending it reads the
channels' words (headers, credits, counters) through a stream of its own (another one writes: no
copy that is held up can hold up the end of a wait). If no word and no event has changed for
`limit_s`, the missing end is taken for dead:

1. status[1..7], then status[0], say who waited for whom: in-kernel waits end by it (sync.py).
2. The abort word goes over EVERY header and credit: it satisfies each wait, and no kernel takes it
   for a payload or a credit, nor replaces it (put_signal.py), so what is queued behind ends too.
3. Again each millisecond until the watched work is over: a kernel that had already looked may
   re-arm one word after the first sweep, and stream writes of a copy put re-arm without looking.
   Only when the last sweep is over: calls into a full queue block, and all other calls with them.

Results of that work are void; `Channel.check` re-arms the channel and raises DeviceError. A late
producer can do no harm: its put finds the abort word in its credit. The limit is one on standstill,
so it must exceed the longest computation between two hand-offs.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from types import TracebackType

import torch

from engine.errors import DeviceError, EngineError
from engine.kernels.put_signal import ARMED
from engine.kernels.sync import ABORT_EXPIRED, ABORT_INTERRUPTED
from engine.runtime.stream_ops import finishes, independent, stream_copy
from engine.runtime.stream_signal import Channel, on_device

log = logging.getLogger("engine.signal")

EVENT_S = 2e-3  # between looks at the events
READ_S = 0.1  # for a copy of the words
DRAIN_S = 10.0  # after an abort: what is not over by then does not depend on these channels


class Stall:
    """Whether what is observed has stood still for `limit_s`."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._seen: object = self  # equals no observation
        self._since = 0.0

    def expired(self, now: float, seen: object) -> bool:
        """Note an observation made at `now` (seconds)."""
        if seen != self._seen:
            self._seen, self._since = seen, now
        return now - self._since >= self.limit_s


def missing_end(headers: Sequence[int], credits: Sequence[int]) -> str:
    """Whom a channel that stands still waits for, "producer" or "consumer".

    All slots sent and none consumed: the producer is held up, by the consumer. Else the consumer
    has taken all that was sent and waits for more.
    """
    full = all(word == ARMED for word in credits) and ARMED not in headers
    return "consumer" if full else "producer"


def _host_copy(words: torch.Tensor) -> torch.Tensor:
    copy = torch.empty_like(words, device="cpu")
    return copy.pin_memory() if words.device.type == "cuda" else copy


class Watchdog:
    """Guards the channels' hand-offs on `streams` (those that wait or put; idle at this moment).

        with Watchdog([channel], [producer, consumer]) as dog:
            ...queue work or replay graphs...
            dog.watch()
            dog.wait()  # until it is over; DeviceError after an abort

    Leaving the block by an exception (Ctrl-C) interrupts whatever still waits. EngineError where no
    stream can be found that a held stream does not block.
    """

    def __init__(
        self,
        channels: Sequence[Channel],
        streams: Sequence[torch.cuda.Stream],
        limit_s: float = 2.0,
    ) -> None:
        self.channels, self.streams = list(channels), list(streams)
        self._stall = Stall(limit_s)
        self._next_read = 0.0
        devices = {words.device for channel in channels for words in channel.words()}
        self._writers: dict[torch.device, torch.cuda.Stream] = {}
        self._writers = {device: self._own_stream(device) for device in devices}
        self._readers = {device: self._own_stream(device) for device in devices}
        self._copies = [[_host_copy(words) for words in c.words()] for c in channels]
        self._pending: list[torch.cuda.Event] = []
        self._watched = self._done = 0  # with the words: an observation that never comes twice
        self._code = 0
        self._failure: Exception | None = None
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="signal-watchdog", daemon=True)
        self._thread.start()

    def _own_stream(self, device: torch.device) -> torch.cuda.Stream:
        waiting = [stream for stream in self.streams if stream.device == device]
        for priority in (-1, -1, 0, 0):
            own = torch.cuda.Stream(device, priority=priority)
            taken = (*self.streams, *self._writers.values())
            if own not in taken and independent(waiting, own):
                return own
        raise EngineError(
            f"{device}: every stream tried is blocked while {len(waiting)} are held: set "
            "CUDA_DEVICE_MAX_CONNECTIONS=32 before the start, or choose waits='kernel'"
        )

    def watch(self) -> None:
        """Guard all that the streams hold up to now. Not while one of them is being captured."""
        events = []
        for stream in self.streams:
            event = torch.cuda.Event()
            event.record(stream)
            events.append(event)
        with self._changed:
            self._pending += events
            self._watched += 1
            self._changed.notify_all()

    def wait(self) -> None:
        """Until the watched work is over. DeviceError if it was aborted (or `Channel.check`)."""
        with self._changed:
            while self._pending:
                self._changed.wait(0.2)
            if self._failure is not None:
                raise DeviceError(f"hand-offs cannot be ended: {self._failure}")
        for channel in self.channels:
            channel.check()

    def abort(self, code: int = ABORT_INTERRUPTED) -> None:
        """End every wait of the channels now; returns at once."""
        with self._changed:
            if self._pending:
                self._code = code
                self._changed.notify_all()

    def close(self) -> None:
        """Wait for the watched work, then end the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def __enter__(self) -> Watchdog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            self.abort()
        self.close()

    def _run(self) -> None:
        for own in self._readers.values():
            with on_device(own.device):
                own.query()  # a runtime call: the driver's need this thread's context
        while True:
            with self._changed:
                if not self._pending:
                    self._code = 0
                    self._changed.notify_all()
                    if self._closed:
                        return
                    self._changed.wait(1.0)
                elif not self._code:
                    self._changed.wait(EVENT_S)
            try:
                self._look()
            except (DeviceError, RuntimeError) as error:  # a device that failed: nothing will end
                log.error("watchdog: %s", error)
                with self._changed:
                    self._failure = error
                    self._pending.clear()

    def _look(self) -> None:
        with self._changed:
            before = len(self._pending)
            self._pending = [event for event in self._pending if not event.query()]
            self._done += before - len(self._pending)
            progress, code = (self._watched, self._done), self._code
        if not self._pending:
            return
        now = time.monotonic()
        if now >= self._next_read:
            self._read()
            self._next_read = now + self._stall.limit_s / 8
        if not code and self._stall.expired(now, (progress, self._words())):
            code = ABORT_EXPIRED
        if code:
            self._end_waits(code)

    def _read(self) -> None:
        """Copy all words of all channels, as the devices hold them now (or keep the last that came)."""
        idle = {device for device, own in self._readers.items() if own.query()}
        for channel, copies in zip(self.channels, self._copies):
            for words, copy in zip(channel.words(), copies):
                if words.device in idle:
                    own = self._readers[words.device]
                    stream_copy(own, copy.data_ptr(), words.data_ptr(), 4 * words.numel())
        for own in self._readers.values():
            finishes(own, READ_S)

    def _words(self) -> list[list[list[int]]]:
        """Per channel: the headers and the consumed count, the credits and the sent count."""
        return [[copy[:, 0].tolist() for copy in copies] for copies in self._copies]

    def _end_waits(self, code: int) -> None:
        self._read()
        for channel, words in zip(self.channels, self._words()):
            status, route = channel.status, channel.route
            if not status[0]:
                waiter, peer = route.consumer, route.producer
                if missing_end(words[0][:-1], words[1][:-1]) == "consumer":
                    waiter, peer = peer, waiter
                # Which slot is waited for is not known here: -1, and how many were sent and taken.
                detail = [waiter, route.channel, -1, peer, 0, words[1][-1], words[0][-1]]
                status[1:] = torch.tensor(detail, dtype=torch.int32)
                status[0] = code
        deadline = time.monotonic() + DRAIN_S
        while not all(event.query() for event in self._pending):
            if time.monotonic() > deadline:
                raise DeviceError(f"the watched work did not end {DRAIN_S:.0f} s after an abort")
            if all(own.query() for own in self._writers.values()):
                for channel in self.channels:
                    channel.release(self._writers, code)
            time.sleep(1e-3)
