"""Reads chunks of files ahead of their use, in the order of their use.

One thread submits the reads (aio.py) and uses what was read. Python threads that read would do as well if they never met
it: but each hand-over of the GIL takes 0.05 ms and more on a machine with H200s, and with 8 of them a chunk cost the
thread that places it 0.17 ms, as long as the read of a megabyte (16 to 25 GB/s, where the reads alone give 45).
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.checkpoint.aio import Read
from engine.checkpoint.safetensors_header import TensorInfo
from engine.errors import CheckpointError

SPARE = 6  # buffers beyond those that are being read: to be taken, or on their way


@dataclass(frozen=True)
class Chunk:
    """Rows [row, end) of a tensor: a run of bytes of its file."""

    info: TensorInfo
    row: int
    end: int
    offset: int  # of its first byte in the file
    nbytes: int


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
        row_bytes = self.info.nbytes // self.info.shape[0]
        step = max(1, nbytes // row_bytes)
        last = max(stop for _, stop in rows)
        for row in range(min(start for start, _ in rows), last, step):
            end = min(row + step, last)
            if any(start < end and row < stop for start, stop in rows):
                offset = self.info.offset + row * row_bytes
                yield Chunk(self.info, row, end, offset, (end - row) * row_bytes)


class Buffer:
    """Memory for one chunk at a time, pinned if it feeds CUDA devices. `start`, `finish`, use `memory`, `mark`."""

    def __init__(self, nbytes: int, pinned: bool):
        self.memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)
        self._read = Read()
        self._chunk: Chunk | None = None
        self._file: tuple[Path, int] | None = None  # its own descriptor: see aio.py
        self._sent: dict[torch.device, torch.cuda.Event] = {}

    def start(self, chunk: Chunk) -> None:
        """Begin to read a chunk; waits for transfers out of the old content. Raises CheckpointError."""
        for event in self._sent.values():
            event.synchronize()
        file = chunk.info.file
        try:
            if self._file is None or self._file[0] != file:
                self._close()
                self._file = file, os.open(file, os.O_RDONLY)
            self._read.start(self._file[1], self.memory.data_ptr(), chunk.nbytes, chunk.offset)
        except OSError as e:
            raise CheckpointError(f"{file}: {e.strerror}: it changed while loading") from None
        self._chunk = chunk

    def finish(self) -> None:
        """The chunk that was started last is in memory. Raises CheckpointError if it is not."""
        assert self._chunk is not None and self._file is not None
        info, nbytes = self._chunk.info, self._chunk.nbytes
        try:
            done = self._read.wait()
            while done < nbytes:  # the file's end, or what stopped the read: the next one tells
                rest = self.memory.numpy().data[done:nbytes]
                more = os.preadv(self._file[1], [rest], self._chunk.offset + done)
                if not more:
                    raise CheckpointError(
                        f"{info.file} ends inside {info.name}: it changed while loading"
                    )
                done += more
        except OSError as e:
            raise CheckpointError(f"{info.file}: reading {info.name}: {e.strerror}") from None

    @property
    def busy(self) -> bool:
        """Whether `start` would wait."""
        return not all(event.query() for event in self._sent.values())

    def mark(self, stream: torch.cuda.Stream) -> None:
        """Transfers out of it may have been queued on a stream."""
        if stream.device not in self._sent:
            self._sent[stream.device] = torch.cuda.Event()
        self._sent[stream.device].record(stream)

    def _close(self) -> None:
        if self._file is not None:
            os.close(self._file[1])
            self._file = None

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            if self._read.running:  # into memory that goes now
                with contextlib.suppress(OSError):
                    self._read.wait()
            self._close()


class ReadAhead:
    """`chunks` in their order, each in a buffer that is free again after `give`; up to `reads` of them are being read,
    and SPARE more wait to be taken or are on their way."""

    def __init__(self, chunks: Sequence[Chunk], reads: int, pinned: bool):
        """Raises nothing that reading raises: `take` does."""
        self._chunks, self._reads, self._pinned = chunks, reads, pinned
        self._size = max((chunk.nbytes for chunk in chunks), default=0)
        self._taken = self._started = self._made = 0
        self._free: deque[Buffer] = deque()
        self._reading: deque[Buffer] = deque()
        self._error: CheckpointError | None = None

    def is_next(self, chunk: Chunk) -> bool:
        """Whether `take` would give this one."""
        return self._taken < len(self._chunks) and self._chunks[self._taken] == chunk

    def take(self) -> Buffer:
        """The next chunk. Raises CheckpointError if it cannot be read, and from then on."""
        self._start()
        if self._error and not self._reading:
            raise self._error
        buffer = self._reading.popleft()
        try:
            buffer.finish()
        except CheckpointError as e:
            self._error = e
            self._reading.clear()
            raise
        self._taken += 1
        return buffer

    def give(self, buffer: Buffer) -> None:
        """It was taken, and its transfers are marked."""
        self._free.append(buffer)
        self._start()

    def _start(self) -> None:
        """Begin what can be begun without a wait; one read at least if none is on its way."""
        while self._started < len(self._chunks) and len(self._reading) < self._reads:
            if self._made < self._reads + SPARE and (not self._free or self._free[0].busy):
                self._free.appendleft(Buffer(self._size, self._pinned))
                self._made += 1
            if self._error or not self._free or (self._reading and self._free[0].busy):
                return
            buffer = self._free.popleft()
            try:
                buffer.start(self._chunks[self._started])
            except CheckpointError as e:  # `take` raises it when its turn comes
                self._error = e
                return
            self._started += 1
            self._reading.append(buffer)
