"""Hand-offs between two streams: `Channel`, over stream waits or in-kernel ones.

The words, the one comparison and the ordering contract are those of `engine/kernels/put_signal.py`;
the stream operations and their probe are `stream_ops.py`'s. A stream wait has no limit in time: a
host thread bounds it (`signal_watchdog.py`). A stream write's value is a constant of its graph, so
a copy-engine put is unnumbered.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

from engine.errors import DeviceError, EngineError
from engine.kernels import put_signal
from engine.kernels.put_signal import ABORT, ABORT_SEQUENCE, ARMED, SLOTS, UNNUMBERED, Route, Slot
from engine.kernels.sync import ABORT_EXPIRED, DEFAULT_LIMIT_US, STATUS_WORDS
from engine.runtime.stream_ops import (
    MemoryOp,
    probe_stream_waits,
    stream_batch,
    stream_copy,
    stream_wait,
    stream_write,
)


def capture(
    stream: torch.cuda.Stream, body: Callable[[], None], *channels: Channel
) -> torch.cuda.CUDAGraph:
    """body() captured on `stream`; the channels' slots start at 0 in the graph and after it. All
    kernels must have been loaded before (`Channel.warm`)."""
    graph = torch.cuda.CUDAGraph()
    # thread_local: a watchdog's queries of other streams are no part of this capture.
    capturing = torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local")
    with _from_slot_0(channels), torch.cuda.device(stream.device), capturing:
        body()
    return graph


@contextlib.contextmanager
def _from_slot_0(channels: tuple[Channel, ...]) -> Iterator[None]:
    for channel in channels:
        channel.rewind()
    yield
    for channel in channels:
        channel.rewind()


class Channel:
    """One-way hand-offs of up to `nbytes` from a producer's stream to a consumer's.

    Everything is enqueued on the current stream of the end's device, or captured from it:

        producer: put(x)        consumer: y = wait(); kernels that read y; consumed()

    A consumer of several in turn says `y = next()` for each, which ends the one before, and `consumed()` at the end.

    The slot of a call is its number modulo `slots` on each end, counted on the host and hence a
    constant of a graph: both ends must make their calls in the same pattern. A graph starts at slot
    0 (`capture`), so a number of calls that `slots` divides keeps all slots busy across replays,
    and any other number is still right. The ends may share a device (two streams) and even a
    stream, if every put comes at most `slots` hand-offs before its `consumed`.

    waits: how the consumer waits: "stream" (no multiprocessor), "kernel" (one warp, bounded by
    limit_us) or None: stream where the probe allows it. The producer always checks its credit in
    the put kernel, bounded; credit "stream" puts a stream wait in front, for a producer that is
    often held up. returns: how a hand-off ends, "kernel" (one warp, which checks that it was the put expected) or
    "stream": two stream writes, which check nothing, and with stream waits `next` is one node of a graph: no kernel
    of the consumer's but those that read. Stream waits are bounded by a `Watchdog` only, and streams of one device must have been
    tried together (`stream_ops.independent_streams`): where none are found, waits must be kernels.
    """

    def __init__(
        self,
        nbytes: int,
        producer: torch.device | str,
        consumer: torch.device | str,
        *,
        slots: int = SLOTS,
        waits: str | None = None,
        credit: str = "kernel",
        returns: str = "kernel",
        route: Route = put_signal.ROUTE,
        limit_us: int = DEFAULT_LIMIT_US,
    ) -> None:
        self.producer, self.consumer = _device(producer), _device(consumer)
        self.route, self.limit_us = route, limit_us
        cuda = self.producer.type == "cuda"
        if cuda and self.producer != self.consumer:
            _open_peers(self.producer, self.consumer)
        ends = (self.producer, self.consumer)
        able = cuda and all(probe_stream_waits(device.index).memops for device in ends)
        self.waits, self.credit = waits or ("stream" if able else "kernel"), credit
        self.returns = returns
        chosen = {self.waits, credit, returns}
        if not chosen <= {"stream", "kernel"}:
            raise EngineError(
                f"waits {waits!r}, credit {credit!r}, returns {returns!r}: choose stream or kernel"
            )
        if "stream" in chosen and not able:
            raise EngineError(
                f"{self.producer} -> {self.consumer} cannot wait on a stream (`engine info`): "
                "choose waits='kernel', credit='kernel', returns='kernel'"
            )
        self.box = put_signal.Mailbox(nbytes, self.producer, self.consumer, slots)
        status = torch.zeros(STATUS_WORDS, dtype=torch.int32)
        self.status = status.pin_memory() if cuda else status  # as in sync.py, of this channel
        self._puts = self._waits = self._consumed = 0
        self.synchronize()

    def put(self, source: torch.Tensor, *, engine: str = "kernel", pdl: bool = False) -> None:
        """Enqueue one put of `source` (on the producer, contiguous, a multiple of 16 bytes).

        engine: "kernel", or "copy": the copy engine and stream writes, which spends no
        multiprocessor and is for large payloads; it needs stream waits.
        """
        slot = self.box.slot(self._puts)
        if engine not in ("kernel", "copy"):
            raise EngineError(f"put engine {engine!r}: choose kernel or copy")
        nbytes = put_signal.check_source(source, slot)
        with on_device(self.producer):
            if engine == "kernel":
                if self.credit == "stream":
                    stream_wait(self._stream(self.producer), slot.credit)
                put_signal.put(
                    source, slot, self.status, self.route, pdl=pdl, limit_us=self.limit_us
                )
            else:
                stream = self._stream(self.producer)
                taken = MemoryOp("write", slot.credit, ARMED)
                stream_batch(stream, MemoryOp("wait", slot.credit), taken)
                stream_copy(stream, slot.payload, source.data_ptr(), nbytes)
                stream_write(stream, slot.header, UNNUMBERED)
        self._puts += 1

    def wait(self, *, pdl: bool = False) -> torch.Tensor:
        """Enqueue the wait for the next hand-off; returns its payload, uint8 [nbytes] in place,
        which belongs to the consumer until `consumed`."""
        slot = self.box.slot(self._waits)
        with on_device(self.consumer):
            if self.waits == "stream":
                stream_wait(self._stream(self.consumer), slot.header)
            else:
                put_signal.poll(slot, self.status, self.route, pdl=pdl, limit_us=self.limit_us)
        self._waits += 1
        return self.box.payload[slot.index]

    def consumed(self, *, pdl: bool = False) -> None:
        """Enqueue the end of the oldest hand-off not yet ended: re-arm its header, give its credit
        back."""
        slot = self.box.slot(self._consumed)
        with on_device(self.consumer):
            if self.returns == "stream":
                stream_batch(self._stream(self.consumer), *_returned(slot))
            else:
                put_signal.consume(slot, self.status, self.route, pdl=pdl)
        self._consumed += 1

    def next(self, *, pdl: bool = False) -> torch.Tensor:
        """`consumed` if a hand-off is open, then `wait`: one operation where the stream does both."""
        if self._waits == self._consumed:
            return self.wait(pdl=pdl)
        if {self.waits, self.returns} != {"stream"}:
            self.consumed(pdl=pdl)
            return self.wait(pdl=pdl)
        ended, slot = self.box.slot(self._consumed), self.box.slot(self._waits)
        with on_device(self.consumer):
            wait = MemoryOp("wait", slot.header)
            stream_batch(self._stream(self.consumer), *_returned(ended), wait)
        self._consumed += 1
        self._waits += 1
        return self.box.payload[slot.index]

    def rewind(self) -> None:
        """The next calls of both ends use slot 0. Both ends must have made the same calls."""
        self._puts = self._waits = self._consumed = 0

    def arm(self) -> None:
        """As at the start: after an abort. Both ends must be idle (or aborted)."""
        self.synchronize()
        self.box.arm()
        self.status.zero_()
        self.rewind()
        self.synchronize()

    def warm(self, source: torch.Tensor, *, pdl: bool = False) -> None:
        """Load every kernel of both ends, before anything may wait: loading a module waits for its
        device. `source` and `pdl` as for the calls to come. Leaves the channel armed."""
        slot = self.box.slot(0)
        with on_device(self.producer):
            put_signal.put(source, slot, self.status, self.route, pdl=pdl)
        self.synchronize()
        with on_device(self.consumer):
            put_signal.poll(slot, self.status, self.route, pdl=pdl)
            put_signal.consume(slot, self.status, self.route, pdl=pdl)
        self.arm()

    def check(self) -> None:
        """DeviceError if a wait expired or a header was wrong; the channel is then armed anew.
        Synchronises only in that case."""
        words = self.status.tolist()
        if not words[0]:
            return
        self.arm()
        where = f"channel {words[2]}, slot {words[3]}"
        if words[3] < 0:  # the watchdog's report
            where = f"channel {words[2]}, {words[6]} puts sent"
            if self.returns == "kernel":  # who else returns does not count
                where += f", {words[7]} consumed"
        if words[0] == ABORT_EXPIRED:
            text = f"end {words[1]} waited in vain for end {words[4]} ({where})"
        elif words[0] == ABORT_SEQUENCE:
            found = "none" if words[7] == ARMED else f"put {words[7]}"
            text = f"end {words[1]} expected put {words[6]} and found {found} ({where})"
        else:
            text = f"hand-offs were interrupted ({where})"
        raise DeviceError(f"{text}; the channel has been re-armed and can be used again")

    def synchronize(self) -> None:
        """Wait for both ends' devices."""
        for device in {self.producer, self.consumer}:
            if device.type == "cuda":
                torch.cuda.synchronize(device)

    def words(self) -> list[torch.Tensor]:
        """Headers and credits: int32 [slots + 1, 32] on the consumer and on the producer."""
        return [self.box.headers, self.box.credits]

    def release(self, streams: dict[torch.device, torch.cuda.Stream], code: int) -> None:
        """Write the abort word over every header and credit, from streams that nothing holds."""
        for words in self.words():
            for index in range(self.box.slots):
                address = words.data_ptr() + 4 * put_signal.LINE * index
                stream_write(streams[words.device], address, ABORT + code)

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        stream = torch.cuda.current_stream(device)
        if not stream.cuda_stream:
            raise EngineError(
                "a stream wait on the default stream would hold up every other stream: call within "
                "torch.cuda.stream(...)"
            )
        return stream


def _returned(slot: Slot) -> tuple[MemoryOp, MemoryOp]:
    """The header is armed before the credit goes back: the barrier of the second write stands between."""
    return MemoryOp("write", slot.header, ARMED), MemoryOp("write", slot.credit, UNNUMBERED)


def _device(device: torch.device | str) -> torch.device:
    """With its index."""
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def on_device(device: torch.device) -> contextlib.AbstractContextManager:
    """The device as current; nothing for CPU ends (the tests')."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _open_peers(producer: torch.device, consumer: torch.device) -> None:
    """Peer access both ways (credits go back); EngineError where there is none."""
    for a, b in ((producer, consumer), (consumer, producer)):
        if not torch.cuda.can_device_access_peer(a, b):
            raise EngineError(
                f"{a} cannot reach {b}'s memory: choose GPUs with peer access (`engine info`)"
            )
        torch.zeros(8, device=a).to(b)  # makes torch enable it
