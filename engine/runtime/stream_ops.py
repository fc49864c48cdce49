"""The driver's stream waits and writes, probed: what `engine/runtime/stream_signal.py` stands on.

A stream wait (`cuStreamWaitValue32`) holds a stream until a word in memory satisfies a comparison;
it is captured into a graph as a node and takes no multiprocessor. What a device can do is found
out: `probe_stream_waits` asks the attributes AND tries each operation on a word that already
satisfies it (an H200 refuses CU_STREAM_WAIT_VALUE_FLUSH).

CUDA cannot see an order that is made by memory words. There are few hardware queues (at most
CUDA_DEVICE_MAX_CONNECTIONS, 8 by default), and a held stream holds up whatever shares its queue,
even the work that would end the wait. Which streams share one is the driver's affair, and depends
on how many are held: `independent` tries a whole set at once, with a word that the host can set and
with all kinds of work, before anything depends on it.

A process has CUDA_DEVICE_MAX_CONNECTIONS hardware queues, 8 by default. On an H200 (driver 580) 7 streams could be
held and nothing else of the process ran with 8; with 32 queues 16 could. A kernel that was never launched before does
not start while any stream is held (its module is loaded then, which waits), and about 1000 operations behind a wait
fill the queue: the call that adds one more blocks.

No kernel here, and no Triton: `engine info` prints the probe on any machine.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from engine.errors import DeviceError, EngineError

GEQ, NOR = 0, 3  # CU_STREAM_WAIT_VALUE_*
FLUSH = 1 << 30
TRIAL_S = 1.0
SETS = 8  # of streams that are tried
_NOT_YET = -(2**31)  # fails GEQ 0


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


class MemoryOp(NamedTuple):
    """One of `stream_batch`: a wait (GEQ) or a write, of the int32 at `address`."""

    kind: str  # "wait" or "write"
    address: int
    value: int = 0


def stream_batch(stream: torch.cuda.Stream, *operations: MemoryOp) -> None:
    """`stream_wait` and `stream_write` of each, in this order, as one operation of the stream and one node of a graph:
    3.3 us for two writes and a wait on an H200, where the three nodes took 6.4."""
    cuda = driver()
    kinds = cuda.CUstreamBatchMemOpType
    parameters = []
    for operation in operations:
        each = cuda.CUstreamBatchMemOpParams()
        waits = operation.kind == "wait"
        part = each.waitValue if waits else each.writeValue
        part.operation = (
            kinds.CU_STREAM_MEM_OP_WAIT_VALUE_32 if waits else kinds.CU_STREAM_MEM_OP_WRITE_VALUE_32
        )
        part.address, part.value = operation.address, operation.value & 0xFFFFFFFF
        part.flags = GEQ if waits else 0
        if waits:
            each.waitValue = part
        else:
            each.writeValue = part
        each.operation = part.operation
        parameters.append(each)
    with torch.cuda.device(stream.device):
        call = cuda.cuStreamBatchMemOp(stream.cuda_stream, len(parameters), parameters, 0)
    _check("cuStreamBatchMemOp", call)


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
            try:
                ready = MemoryOp("wait", word.data_ptr())
                stream_batch(stream, ready, MemoryOp("write", word.data_ptr(), 9))
                memops = finishes(stream, TRIAL_S) and int(word[0]) == 9
            except DeviceError:
                memops = False
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


def independent(waiting: Sequence[torch.cuda.Stream], working: torch.cuda.Stream) -> bool:
    """Whether `working` runs while ALL of `waiting` are held by stream waits with work behind them:
    a kernel, copies, a stream write. All idle before and after, and nothing else held meanwhile.

    False: some share a hardware queue; take other streams, fewer at a time, or in-kernel waits.
    """
    held = list(dict.fromkeys(waiting))
    if working in held:
        return False
    for stream in (*held, working):  # what is not loaded would be now, and wait for the gate
        some_work(stream)
        if not finishes(stream, TRIAL_S):
            return False
    gate = _host_words()[:1]
    gate.fill_(_NOT_YET)
    try:
        for stream in held:
            stream_wait(stream, gate.data_ptr())
            some_work(stream)
        some_work(working)
        ran = finishes(working, TRIAL_S)
        return ran and not any(stream.query() for stream in held)
    finally:
        gate.zero_()
        for stream in (*held, working):
            finishes(stream, TRIAL_S)


def some_work(stream: torch.cuda.Stream) -> None:
    """One of each kind on `stream`, into words that nobody reads."""
    words, host = _device_words(stream.device), _host_words()[1:]
    with torch.cuda.device(stream.device), torch.cuda.stream(stream):
        words[:2].add_(1)
    stream_copy(stream, words.data_ptr() + 4, words.data_ptr(), 4)
    stream_copy(stream, host.data_ptr(), words.data_ptr(), 4)
    stream_write(stream, words.data_ptr() + 8, 1)


# Kept for ever: a trial that fails may leave work behind, which uses them later.
@functools.cache
def _device_words(device: torch.device) -> torch.Tensor:
    words = torch.zeros(4, dtype=torch.int32, device=device)
    torch.cuda.synchronize(device)
    return words


@functools.cache
def _host_words() -> torch.Tensor:
    return torch.zeros(2, dtype=torch.int32).pin_memory()


def independent_streams(*devices: torch.device | str) -> tuple[torch.cuda.Stream, ...]:
    """A stream of each device (the same one twice: two streams), any of which runs while all the
    others are held. DeviceError if none are found."""
    for _ in range(SETS):
        found = tuple(torch.cuda.Stream(device) for device in devices)
        others = [[s for s in found if s != one] for one in found]
        if all(independent(waiting, one) for waiting, one in zip(others, found)):
            return found
    raise DeviceError(
        f"{len(devices)} streams that run while the others are held were not found in {SETS} "
        "trials: set CUDA_DEVICE_MAX_CONNECTIONS=32 before the start, or choose waits='kernel'"
    )
