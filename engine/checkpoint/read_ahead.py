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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count, cycle, islice
from pathlib import Path
from typing import NamedTuple

import torch

from engine.checkpoint import aio
from engine.checkpoint.safetensors_header import TensorInfo, identity
from engine.errors import CheckpointError

# A chunk is read in pieces, many of them at once, and placed as a whole: that is what the one thread's time goes to.
# A load onto one and two H200s: 43 and 51 GB/s with 5 buffers, 44 and 50 with 6, 45 and 54 with 8. With 8 of 8 MB 43 and
# 48, and with 256 MB of them the CPU's caches no longer help: reads and transfers without any placing 28, with 64 MB 53.
CHUNK_BYTES = 16 << 20
PIECE_BYTES = 2 << 20
BUFFERS = 8  # about half of them are being read, the rest is on its way to the devices
_ALIGNMENT = 256  # of a chunk in its buffer
_Read = tuple[int, int, int, int]  # see `Reads.start`


class Chunk(NamedTuple):
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
        """Whole rows of `nbytes` together, or one row, all that any rank needs. Rows of several ranks come in turn: one
        rank's link alone takes about what can be read, and would be waited for."""
        rows = self.rows().values()
        if not rows:
            return
        row_bytes = self.info.row_bytes
        step = max(1, nbytes // row_bytes)
        begin, last = min(start for start, _ in rows), max(stop for _, stop in rows)
        firsts = range(begin, last, step)
        turns = -(-len(firsts) // len(set(rows)))
        for row in chain.from_iterable(firsts[i::turns] for i in range(turns)):
            end = min(row + step, last)
            if any(start < end and row < stop for start, stop in rows):
                offset = self.info.offset + row * row_bytes
                yield Chunk(self.info, row, end, offset, (end - row) * row_bytes)


class Buffer:
    """Memory for some chunks at a time, pinned if it feeds CUDA devices. `start`, then for each of them: `finish`, use
    `bytes`, `mark`."""

    def __init__(self, nbytes: int, pinned: bool):
        self.memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)
        self.at = 0  # in memory, of the chunk that was finished last
        self._begin = self.memory.data_ptr()
        # Chunks that are not finished, and their reads.
        self._chunks: deque[tuple[int, Chunk, list[_Read]]] = deque()
        self._path: Path | None = None
        # Of that file, each for one read at a time (see aio.py): no more are of use than there are threads.
        self._files: list[int] = []
        self._reads = aio.Reads()
        self._events: dict[torch.device, torch.cuda.Event] = {}
        self._sent: dict[torch.device, torch.cuda.Event] = {}  # those recorded since `start`

    def start(self, chunks: Sequence[tuple[int, Chunk]]) -> None:
        """Begin to read chunks of one file, each to its place in memory; waits for transfers out of the old content.
        Raises CheckpointError."""
        for event in self._sent.values():
            event.synchronize()
        self._sent.clear()
        self._drain()
        info = chunks[0][1].info
        if self._path != info.file:
            self.close()
            self._path = info.file
        pieces = sum(-(-chunk.nbytes // PIECE_BYTES) for _, chunk in chunks)
        try:
            while len(self._files) < min(pieces, aio.THREADS):
                self._files.append(_open(info))
            files = cycle(self._files)
            for at, chunk in chunks:
                n = -(-chunk.nbytes // PIECE_BYTES)
                sizes = [PIECE_BYTES] * (n - 1) + [chunk.nbytes - (n - 1) * PIECE_BYTES]
                to = count(self._begin + at, PIECE_BYTES)
                reads = [*zip(islice(files, n), to, sizes, count(chunk.offset, PIECE_BYTES))]
                self._chunks.append((at, chunk, reads))
            self._reads.start([*chain.from_iterable(reads for _, _, reads in self._chunks)])
        except OSError as e:
            raise _not_read(info, e) from None

    def finish(self) -> None:
        """The next of the chunks is in memory, from `at` on. Raises CheckpointError if it is not."""
        self.at, chunk, reads = self._chunks[0]
        info = chunk.info
        try:
            for (file, to, nbytes, offset), done in zip(reads, self._reads.wait(len(reads))):
                # At the file's end, behind what stopped the read (this one tells), or where aio reads nothing.
                while done < nbytes:
                    rest = self.memory.numpy().data[to - self._begin :][done:nbytes]
                    more = os.preadv(file, [rest], offset + done)
                    if not more:
                        raise CheckpointError(
                            f"{info.file} ends inside {info.name}: it changed while loading"
                        )
                    done += more
        except OSError as e:
            raise _not_read(info, e) from None
        self._chunks.popleft()

    def bytes(self, first: int, last: int) -> torch.Tensor:
        """Bytes [first, last) of the chunk that was finished last."""
        return self.memory[self.at + first : self.at + last]

    @property
    def unfinished(self) -> bool:
        """Whether chunks are left to `finish`."""
        return bool(self._chunks)

    @property
    def busy(self) -> bool:
        """Whether `start` would wait for a transfer."""
        for device in [device for device, event in self._sent.items() if event.query()]:
            del self._sent[device]
        return bool(self._sent)

    def mark(self, stream: torch.cuda.Stream) -> None:
        """Transfers out of it may have been queued on a stream."""
        device = stream.device
        if device not in self._events:
            self._events[device] = torch.cuda.Event()
        self._sent[device] = self._events[device]
        self._sent[device].record(stream)

    def _drain(self) -> None:
        """Nothing is read into the memory any more."""
        self._chunks.clear()
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


def _open(info: TensorInfo) -> int:
    """The tensor's file, if it is the one whose header was read: another of the same size would be read without an error."""
    file = info.file
    try:
        descriptor = os.open(file, os.O_RDONLY)
    except OSError as e:
        why = "raise `ulimit -n`" if e.errno == errno.EMFILE else "it changed while loading"
        raise CheckpointError(f"{file}: {e.strerror}: {why}") from None
    if identity(os.fstat(descriptor)) != info.identity:
        os.close(descriptor)
        raise CheckpointError(f"{file} changed while loading: start again")
    return descriptor


def _not_read(info: TensorInfo, error: OSError) -> CheckpointError:
    return CheckpointError(f"{info.file}: reading {info.name}: {error.strerror}")


def _fills(chunks: Iterable[Chunk], nbytes: int) -> Iterator[list[tuple[int, Chunk]]]:
    """Chunks with their places in a buffer: those that follow each other in one file and fit share one. A scale or a norm
    would else keep a buffer from reading 16 MB."""
    fill: list[tuple[int, Chunk]] = []
    end = 0
    for chunk in chunks:
        at = -(-end // _ALIGNMENT) * _ALIGNMENT
        if fill and (at + chunk.nbytes > nbytes or chunk.info.file != fill[0][1].info.file):
            yield fill
            fill, at = [], 0
        fill.append((at, chunk))
        end = at + chunk.nbytes
    if fill:
        yield fill


class ReadAhead:
    """`chunks` in their order, in BUFFERS buffers of `nbytes` (of a chunk, if one is larger), each of which is free again
    after `give` of the last chunk in it."""

    def __init__(self, chunks: Sequence[Chunk], nbytes: int, pinned: bool):
        """Raises nothing that reading raises: `take` does."""
        self._chunks, self._pinned = chunks, pinned
        self._fills = list(_fills(chunks, nbytes))
        ends = (at + chunk.nbytes for fill in self._fills for at, chunk in fill)
        self._size = max(ends, default=0)
        self._taken = self._started = 0  # chunks, fills
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
        buffer = self._reading[0]
        try:
            buffer.finish()
        except CheckpointError as e:
            self._error = e
            self._reading.clear()
            raise
        self._taken += 1
        if not buffer.unfinished:
            self._reading.popleft()
        return buffer

    def give(self, buffer: Buffer) -> None:
        """It was taken, and its transfers are marked."""
        if not buffer.unfinished:
            self._free.append(buffer)
            self._start()

    def stop(self) -> None:
        """From any thread: the one that takes ends at its next chunk, not at the end of a weight of 240 MB."""
        self._stopped = True

    def close(self) -> None:
        """End what is being read, and close the files: an exception may keep this alive for long. Not for longer: its
        traceback has this and the weights, which a cycle would keep until garbage is collected."""
        self._error = None
        for buffer in self._buffers:
            buffer.close()

    def _start(self) -> None:
        """Begin what can be begun without a wait; one chunk at least if none is on its way. Pinning memory takes as
        long as reading as much, so one buffer a call is made, under the reads of those before it."""
        if self._error or self._started == len(self._fills):
            return
        if len(self._buffers) < BUFFERS:
            self._buffers.append(Buffer(self._size, self._pinned))
            self._free.appendleft(self._buffers[-1])
        while self._free and self._started < len(self._fills):
            if self._reading and self._free[0].busy:
                return
            buffer = self._free.popleft()
            try:
                buffer.start(self._fills[self._started])
            except CheckpointError as e:  # `take` raises it when its turn comes
                self._error = e
                return
            self._started += 1
            self._reading.append(buffer)
