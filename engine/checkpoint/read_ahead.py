"""Reads chunks of files ahead of their use, in the order of their use.

One thread submits the reads (aio.py) and uses what was read. Python threads that read would do as well if they never met
it: but each hand-over of the GIL takes 0.05 ms and more on a machine with H200s, and beside 8 of them a chunk cost the
thread that places it 0.17 ms, as long as the read of a megabyte (docs/performance.md).
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.checkpoint.aio import Reads
from engine.checkpoint.safetensors_header import TensorInfo
from engine.errors import CheckpointError

# A chunk is read in pieces, many of them at once, and placed as a whole: that is what the one thread's time goes to.
PIECE_BYTES = 4 << 20
BUFFERS = 8  # of a chunk: about half of them are being read, the rest is on its way to the devices


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
        row_bytes = self.info.row_bytes
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
        self._chunk: Chunk | None = None
        self._path: Path | None = None
        self._files: list[int] = []  # a descriptor of that file for each piece: see aio.py
        self._reads = Reads()
        self._sent: dict[torch.device, torch.cuda.Event] = {}

    def start(self, chunk: Chunk) -> None:
        """Begin to read a chunk; waits for transfers out of the old content. Raises CheckpointError."""
        for event in self._sent.values():
            event.synchronize()
        self._drain()
        self._chunk = chunk
        if self._path != chunk.info.file:
            self.close()
            self._path = chunk.info.file
        pieces, begin = range(0, chunk.nbytes, PIECE_BYTES), self.memory.data_ptr()
        try:
            while len(self._files) < len(pieces):
                self._files.append(_open(self._path))
            self._reads.start(
                [
                    (file, begin + at, min(PIECE_BYTES, chunk.nbytes - at), chunk.offset + at)
                    for file, at in zip(self._files, pieces)
                ]
            )
        except OSError as e:
            raise _not_read(chunk.info, e) from None

    def finish(self) -> None:
        """The chunk that was started last is in memory. Raises CheckpointError if it is not."""
        assert self._chunk is not None
        info = self._chunk.info
        try:
            for i, count in enumerate(self._reads.wait()):
                done = i * PIECE_BYTES + count
                end = min((i + 1) * PIECE_BYTES, self._chunk.nbytes)
                # At the file's end, behind what stopped the read (this one tells), or where aio reads nothing.
                while done < end:
                    rest = self.memory.numpy().data[done:end]
                    more = os.preadv(self._files[i], [rest], self._chunk.offset + done)
                    if not more:
                        raise CheckpointError(
                            f"{info.file} ends inside {info.name}: it changed while loading"
                        )
                    done += more
        except OSError as e:
            raise _not_read(info, e) from None

    @property
    def busy(self) -> bool:
        """Whether `start` would wait for a transfer."""
        return not all(event.query() for event in self._sent.values())

    def mark(self, stream: torch.cuda.Stream) -> None:
        """Transfers out of it may have been queued on a stream."""
        if stream.device not in self._sent:
            self._sent[stream.device] = torch.cuda.Event()
        self._sent[stream.device].record(stream)

    def _drain(self) -> None:
        """Nothing is read into the memory any more."""
        if self._reads.running:
            with contextlib.suppress(OSError):
                self._reads.wait()

    def close(self) -> None:
        """Nothing is read into the memory any more, and its file is closed; `start` opens one again."""
        self._drain()
        while self._files:
            os.close(self._files.pop())

    def __del__(self) -> None:
        if hasattr(self, "_sent"):
            self.close()


def _open(file: Path) -> int:
    """A file whose header was read."""
    try:
        return os.open(file, os.O_RDONLY)
    except OSError as e:
        why = "raise `ulimit -n`" if e.errno == errno.EMFILE else "it changed while loading"
        raise CheckpointError(f"{file}: {e.strerror}: {why}") from None


def _not_read(info: TensorInfo, error: OSError) -> CheckpointError:
    return CheckpointError(f"{info.file}: reading {info.name}: {error.strerror}")


class ReadAhead:
    """`chunks` in their order, each in one of BUFFERS buffers, which is free again after `give`."""

    def __init__(self, chunks: Sequence[Chunk], pinned: bool):
        """Raises nothing that reading raises: `take` does."""
        self._chunks, self._pinned = chunks, pinned
        self._size = max((chunk.nbytes for chunk in chunks), default=0)
        self._taken = self._started = 0
        self._buffers: list[Buffer] = []
        self._free: deque[Buffer] = deque()
        self._reading: deque[Buffer] = deque()
        self._error: CheckpointError | None = None
        self._stopped = False

    def is_next(self, chunk: Chunk) -> bool:
        """Whether `take` would give this one."""
        return self._taken < len(self._chunks) and self._chunks[self._taken] == chunk

    def take(self) -> Buffer:
        """The next chunk. Raises CheckpointError if it cannot be read, and from then on, and behind `stop`."""
        self._start()
        if self._stopped:
            raise CheckpointError("loading was stopped")
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

    def stop(self) -> None:
        """From any thread: the one that takes ends at its next chunk, not at the end of a weight of 240 MB."""
        self._stopped = True

    def close(self) -> None:
        """End what is being read, and close the files: an exception may keep this alive for long."""
        for buffer in self._buffers:
            buffer.close()

    def _start(self) -> None:
        """Begin what can be begun without a wait; one chunk at least if none is on its way. Pinning memory takes as
        long as reading as much, so one buffer a call is made, under the reads of those before it."""
        if len(self._buffers) < BUFFERS and not self._error and self._started < len(self._chunks):
            self._buffers.append(Buffer(self._size, self._pinned))
            self._free.appendleft(self._buffers[-1])
        while self._free and not self._error and self._started < len(self._chunks):
            if self._reading and self._free[0].busy:
                return
            buffer = self._free.popleft()
            try:
                buffer.start(self._chunks[self._started])
            except CheckpointError as e:  # `take` raises it when its turn comes
                self._error = e
                return
            self._started += 1
            self._reading.append(buffer)
