"""Hand-offs between two streams: `Channel`, and the driver's stream waits and writes beneath it.

A stream wait (`cuStreamWaitValue32`) holds a stream until a word in memory satisfies a comparison;
it is captured into a graph as a node and takes no multiprocessor. The words, the comparison and the
ordering contract are those of `engine/kernels/put_signal.py`. What a device can do is probed:
`probe_stream_waits` asks the attributes AND tries each operation on a word that already satisfies
it (an H200 refuses CU_STREAM_WAIT_VALUE_FLUSH, which the contract does not need).

Three things CUDA does not check:
* It cannot see an order made by memory words. Two streams may share a hardware queue, and then a
  blocked wait holds back the work that would end it: `independent` tries a pair of streams, with
  a word that the host can set, before anything depends on it.
* A wait has no limit in time. A host thread bounds it: `engine/runtime/signal_watchdog.py`.
* A stream write's value is a constant of its graph, so a copy-engine put is unnumbered.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from engine.errors import DeviceError, EngineError
from engine.kernels import put_signal
from engine.kernels.put_signal import ABORT, ABORT_SEQUENCE, ARMED, SLOTS, UNNUMBERED, Route
from engine.kernels.sync import ABORT_EXPIRED, DEFAULT_LIMIT_US, STATUS_WORDS

GEQ, NOR = 0, 3  # CU_STREAM_WAIT_VALUE_*
FLUSH = 1 << 30
TRIAL_S = 1.0


def driver() -> Any:
    """The module cuda.bindings.driver; EngineError with the remedy where it is missing."""
    try:
        from cuda.bindings import driver as module
    except ImportError:
        raise EngineError(
            "stream waits need the cuda-bindings package: pip install 'engine[cuda]', or choose "
            "waits='kernel'"
        ) from None
    return module


def _check(what: str, result: Any) -> None:
    if int(result[0]):
        raise DeviceError(f"{what} failed: {result[0].name}")


def stream_wait(stream: torch.cuda.Stream, address: int, value: int = 0, flags: int = GEQ) -> None:
    """Hold `stream` until the int32 at `address` satisfies the comparison with `value`: GEQ
    (int32)(word - value) >= 0, cyclic; NOR ~(word | value) != 0. Enqueued or captured."""
    with torch.cuda.device(stream.device):
        call = driver().cuStreamWaitValue32(stream.cuda_stream, address, value & 0xFFFFFFFF, flags)
    _check("cuStreamWaitValue32", call)


def stream_write(stream: torch.cuda.Stream, address: int, value: int) -> None:
    """Store an int32 when `stream` gets there, behind the memory barrier that is the default: all
    that the stream did before is visible, system-wide, before the word."""
    with torch.cuda.device(stream.device):
        call = driver().cuStreamWriteValue32(stream.cuda_stream, address, value & 0xFFFFFFFF, 0)
    _check("cuStreamWriteValue32", call)


def stream_copy(stream: torch.cuda.Stream, target: int, source: int, nbytes: int) -> None:
    """Copy between addresses by the copy engine, on this stream alone. (torch's copy between
    devices also waits for the target's stream, which here waits for us.)"""
    with torch.cuda.device(stream.device):
        call = driver().cuMemcpyAsync(target, source, nbytes, stream.cuda_stream)
    _check("cuMemcpyAsync", call)


@dataclass(frozen=True)
class StreamWaits:
    """What one device's streams can wait for. None: cuda-bindings is missing, nobody asked."""

    memops: bool | None = None  # 32-bit waits and writes (the v2 interface)
    wide: bool | None = None  # 64-bit
    nor: bool | None = None  # CU_STREAM_WAIT_VALUE_NOR
    flush: bool | None = None  # CU_STREAM_WAIT_VALUE_FLUSH

    def __str__(self) -> str:
        if self.memops is None:
            return "unknown (pip install 'engine[cuda]')"
        names = {"memops v2": "memops", "64-bit": "wide", "NOR": "nor", "flush": "flush"}
        return ", ".join(f"{n} {'yes' if getattr(self, f) else 'no'}" for n, f in names.items())


@functools.cache
def probe_stream_waits(device: int) -> StreamWaits:
    """Attributes, then a trial of each operation on a satisfied word in host memory. Not while
    something on the device may spin. A trial ends after TRIAL_S in any case."""
    try:
        cuda = driver()
    except EngineError:
        return StreamWaits()

    def attribute(name: str) -> bool:
        kind = getattr(cuda.CUdevice_attribute, "CU_DEVICE_ATTRIBUTE_" + name, None)
        if kind is None:
            return False
        _, handle = cuda.cuDeviceGet(device)
        error, value = cuda.cuDeviceGetAttribute(kind, handle)
        return not int(error) and bool(value)

    with torch.cuda.device(device):
        stream = torch.cuda.Stream(device)
        word = torch.zeros(1, dtype=torch.int64).pin_memory()

        def trial(wait: Any, start: int, value: int, flags: int) -> bool:
            word.fill_(start)
            if int(wait(stream.cuda_stream, word.data_ptr(), value, flags)[0]):
                return False
            return finishes(stream, TRIAL_S)

        memops = trial(cuda.cuStreamWaitValue32, 5, 0, GEQ)
        if memops:
            call = cuda.cuStreamWriteValue32(stream.cuda_stream, word.data_ptr(), 9, 0)
            memops = not int(call[0]) and finishes(stream, TRIAL_S) and int(word[0]) == 9
        return StreamWaits(
            memops=memops,
            wide=attribute("CAN_USE_64_BIT_STREAM_MEM_OPS")
            and trial(cuda.cuStreamWaitValue64, 5, 0, GEQ),
            nor=attribute("CAN_USE_STREAM_WAIT_VALUE_NOR")
            and trial(cuda.cuStreamWaitValue32, 5, 0x7FFFFFFF, NOR),
            flush=attribute("CAN_FLUSH_REMOTE_WRITES")
            and trial(cuda.cuStreamWaitValue32, 5, 0, GEQ | FLUSH),
        )


def finishes(stream: torch.cuda.Stream, limit_s: float) -> bool:
    """Whether the stream is done within the limit."""
    deadline = time.monotonic() + limit_s
    while not stream.query():
        if time.monotonic() > deadline:
            return False
        time.sleep(1e-4)
    return True


def independent(waiting: torch.cuda.Stream, working: torch.cuda.Stream) -> bool:
    """Whether `working` runs while `waiting` is held by a stream wait. Both idle before and after.

    False: they share a hardware queue; take other streams or in-kernel waits.
    """
    gate = torch.full((1,), ARMED, dtype=torch.int32).pin_memory()
    with torch.cuda.device(working.device):
        scratch = torch.zeros(1, dtype=torch.int32, device=working.device)
        torch.cuda.current_stream().synchronize()
    stream_wait(waiting, gate.data_ptr())
    try:
        stream_write(working, scratch.data_ptr(), 1)
        ran = finishes(working, TRIAL_S)
        return ran and not waiting.query()
    finally:
        gate.zero_()
        finishes(waiting, TRIAL_S)
        finishes(working, TRIAL_S)


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

    The slot of a call is its number modulo `slots` on each end, counted on the host and hence a
    constant of a graph: both ends must make their calls in the same pattern. A graph starts at slot
    0 (`capture`), so a number of calls that `slots` divides keeps all slots busy across replays,
    and any other number is still right. The ends may share a device (two streams) and even a
    stream, if every put comes at most `slots` hand-offs before its `consumed`.

    waits: how the consumer waits: "stream" (no multiprocessor), "kernel" (one warp, bounded by
    limit_us) or None: stream where the probe allows it. The producer always checks its credit in
    the put kernel, bounded; credit "stream" puts a stream wait in front, for a producer that is
    often held up. Stream waits are bounded by a `Watchdog` only.
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
        if not {self.waits, credit} <= {"stream", "kernel"}:
            raise EngineError(f"waits {waits!r}, credit {credit!r}: choose stream or kernel")
        if "stream" in (self.waits, credit) and not able:
            raise EngineError(
                f"{self.producer} -> {self.consumer} cannot wait on a stream (`engine info`): "
                "choose waits='kernel', credit='kernel'"
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
        with _on(self.producer):
            if engine == "copy" or self.credit == "stream":
                stream_wait(self._stream(self.producer), slot.credit)
            if engine == "kernel":
                put_signal.put(
                    source, slot, self.status, self.route, pdl=pdl, limit_us=self.limit_us
                )
            else:
                stream = self._stream(self.producer)
                stream_write(stream, slot.credit, ARMED)
                stream_copy(stream, slot.payload, source.data_ptr(), nbytes)
                stream_write(stream, slot.header, UNNUMBERED)
        self._puts += 1

    def wait(self, *, pdl: bool = False) -> torch.Tensor:
        """Enqueue the wait for the next hand-off; returns its payload, uint8 [nbytes] in place,
        which belongs to the consumer until `consumed`."""
        slot = self.box.slot(self._waits)
        with _on(self.consumer):
            if self.waits == "stream":
                stream_wait(self._stream(self.consumer), slot.header)
            else:
                put_signal.poll(slot, self.status, self.route, pdl=pdl, limit_us=self.limit_us)
        self._waits += 1
        return self.box.payload[slot.index]

    def consumed(self, *, pdl: bool = False) -> None:
        """Enqueue the end of the oldest hand-off not yet ended: re-arm its header, give its credit
        back."""
        with _on(self.consumer):
            put_signal.consume(self.box.slot(self._consumed), self.status, self.route, pdl=pdl)
        self._consumed += 1

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

    def warm(self, source: torch.Tensor) -> None:
        """Load every kernel of both ends, before anything may wait: loading a module waits for its
        device. `source` as for the puts to come. Leaves the channel armed."""
        self.put(source)
        self.synchronize()
        with _on(self.consumer):
            put_signal.poll(self.box.slot(0), self.status, self.route)
        self._waits += 1
        self.consumed()
        self.arm()

    def check(self) -> None:
        """DeviceError if a wait expired or a header was wrong; the channel is then armed anew.
        Synchronises only in that case."""
        words = self.status.tolist()
        if not words[0]:
            return
        self.arm()
        where = f"channel {words[2]}, slot {words[3]}"
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


def _device(device: torch.device | str) -> torch.device:
    """With its index."""
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _on(device: torch.device) -> contextlib.AbstractContextManager:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _open_peers(producer: torch.device, consumer: torch.device) -> None:
    """Peer access both ways (credits go back); EngineError where there is none."""
    for a, b in ((producer, consumer), (consumer, producer)):
        if not torch.cuda.can_device_access_peer(a, b):
            raise EngineError(
                f"{a} cannot reach {b}'s memory: choose GPUs with peer access (`engine info`)"
            )
        torch.zeros(8, device=a).to(b)  # makes torch enable it
