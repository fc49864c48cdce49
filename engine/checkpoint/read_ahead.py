"""Reads chunks of files ahead of their use, in the order of their use, on threads that do nothing else.

Threads that read AND enqueue transfers wait for each other: a hand-over of the GIL took 0.2 ms a chunk on a machine with
H200s, as long as the read of 1 MB (5.6 GB/s in chunks of 1 MB, 32 in chunks of 16 MB, where the reads alone gave 45). A
`preadv` into pinned memory needs no GIL, so these threads add up, and chunks can be small enough to stay in the CPU's
caches until they are on their way.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from threading import Thread

import torch

from engine.checkpoint.safetensors_header import TensorInfo
from engine.errors import CheckpointError

BUFFERS = 3  # a thread: one is read, one is awaited, one is on its way


@dataclass(frozen=True)
class Chunk:
    """Rows [row, end) of a tensor: a run of bytes of its file."""

    info: TensorInfo
    row: int
    end: int

    @property
    def offset(self) -> int:
        """Of its first byte in the file."""
        return self.info.offset + self.row * self._row_bytes

    @property
    def nbytes(self) -> int:
        """Of all of it."""
        return (self.end - self.row) * self._row_bytes

    @property
    def _row_bytes(self) -> int:
        return self.info.nbytes // self.info.shape[0]


@dataclass(frozen=True)
class Wanted:
    """What each rank needs of a 1-D or 2-D tensor: [start, stop) = ranges[rank] along `axis` (0, 1, or None: all of
    it, whatever `ranges` says)."""

    info: TensorInfo
    axis: int | None
    ranges: Mapping[int, tuple[int, int]]

    def shape(self, rank: int) -> list[int]:
        """Of the rank's slice."""
        shape = list(self.info.shape)
        if self.axis is not None:
            shape[self.axis] = self.ranges[rank][1] - self.ranges[rank][0]
        return shape

    def rows(self) -> dict[int, tuple[int, int]]:
        """rank -> rows of the tensor that hold its slice; ranks without a value are left out."""
        return {
            rank: span if self.axis == 0 else (0, self.info.shape[0])
            for rank, span in self.ranges.items()
            if 0 not in self.shape(rank)
        }

    def chunks(self, nbytes: int) -> Iterator[Chunk]:
        """Whole rows of `nbytes` together, or one row, from the first that any rank needs to the last."""
        rows = self.rows().values()
        if not rows:
            return
        step = max(1, nbytes * self.info.shape[0] // self.info.nbytes)
        last = max(stop for _, stop in rows)
        for row in range(min(start for start, _ in rows), last, step):
            end = min(row + step, last)
            if any(start < end and row < stop for start, stop in rows):
                yield Chunk(self.info, row, end)


@dataclass
class Buffer:
    """memory: uint8, pinned if it feeds CUDA devices. sent: by device, an event behind the last transfer out of it.
    owner: the thread that fills it."""

    memory: torch.Tensor
    owner: int = 0
    sent: dict[torch.device, torch.cuda.Event] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._view: memoryview = self.memory.numpy().data

    def fill(self, file: int, chunk: Chunk) -> None:
        """Read the chunk as soon as no transfer needs the old content. Raises CheckpointError."""
        for event in self.sent.values():
            if not event.query():
                event.synchronize()
        view, offset = self._view[: chunk.nbytes], chunk.offset
        while view:
            try:
                done = os.preadv(file, [view], offset)
            except OSError as e:
                raise CheckpointError(
                    f"{chunk.info.file}: reading {chunk.info.name}: {e.strerror}"
                ) from None
            if not done:
                raise CheckpointError(
                    f"{chunk.info.file} ends inside {chunk.info.name}: it changed while loading"
                )
            view, offset = view[done:], offset + done

    def mark(self, device: torch.device) -> None:
        """Transfers out of it were queued on the current stream of a CUDA device."""
        if device not in self.sent:
            self.sent[device] = torch.cuda.Event()
        self.sent[device].record(torch.cuda.current_stream(device))


class ReadAhead:
    """`chunks` in their order, each in a buffer that is free again after `give`. One thread takes them."""

    def __init__(
        self, chunks: Sequence[Chunk], threads: int, descriptor: Callable[[Path], int], pinned: bool
    ):
        """descriptor: of an open file. Raises nothing: `take` raises what reading a chunk did."""
        self._chunks, self._descriptor, self._pinned = chunks, descriptor, pinned
        self._size = max((chunk.nbytes for chunk in chunks), default=0)
        self._owners = _shares(chunks, threads)
        self._position, self._closed = 0, False
        self._error: BaseException | None = None
        self._ready: list[SimpleQueue[Buffer | BaseException]] = [
            SimpleQueue() for _ in range(threads)
        ]
        self._free: list[SimpleQueue[Buffer | None]] = [SimpleQueue() for _ in range(threads)]
        self._threads = [
            Thread(target=self._read, args=(i,), name=f"read-ahead-{i}", daemon=True)
            for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def is_next(self, chunk: Chunk) -> bool:
        """Whether `take` would give this one."""
        return self._position < len(self._chunks) and self._chunks[self._position] == chunk

    def take(self) -> Buffer:
        """The next chunk. Raises CheckpointError if it could not be read, and from then on: its thread has ended."""
        if self._error is None:
            got = self._ready[self._owners[self._position]].get()
            if isinstance(got, Buffer):
                self._position += 1
                return got
            self._error = got
        raise self._error

    def give(self, buffer: Buffer) -> None:
        """It was taken, and its transfers are marked."""
        self._free[buffer.owner].put(buffer)

    def close(self) -> None:
        """End the threads, whatever they are at."""
        self._closed = True
        for free in self._free:
            free.put(None)
        for thread in self._threads:
            thread.join()

    def _read(self, owner: int) -> None:
        made = 0
        try:
            for chunk, whose in zip(self._chunks, self._owners):
                if whose != owner:
                    continue
                if made < BUFFERS:
                    made += 1
                    memory = torch.empty(self._size, dtype=torch.uint8, pin_memory=self._pinned)
                    buffer: Buffer | None = Buffer(memory, owner)
                else:
                    buffer = self._free[owner].get()
                if buffer is None or self._closed:
                    return
                buffer.fill(self._descriptor(chunk.info.file), chunk)
                self._ready[owner].put(buffer)
        except BaseException as e:  # `take` raises it, where the caller is
            self._ready[owner].put(e)


def _shares(chunks: Sequence[Chunk], threads: int) -> list[int]:
    """The thread of each chunk: the one with the fewest bytes so far."""
    bytes_of, owners = [0] * threads, []
    for chunk in chunks:
        owner = bytes_of.index(min(bytes_of))
        bytes_of[owner] += chunk.nbytes
        owners.append(owner)
    return owners
