"""File -> devices through small pinned buffers, each byte of the files read once for all ranks."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch

from engine.checkpoint.read_ahead import Buffer, Chunk, ReadAhead, Wanted

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
CHUNK_BYTES = 16 << 20  # of a buffer (read_ahead.py)


class Staging:
    """Reads slices of tensors onto devices. A CPU device takes the same path with ordinary buffers."""

    def __init__(self, chunk_bytes: int = CHUNK_BYTES):
        self._chunk_bytes = chunk_bytes
        self._ahead: ReadAhead | None = None
        self._local = threading.local()

    @contextlib.contextmanager
    def read_ahead(self, wanted: Iterable[Wanted], pinned: bool) -> Iterator[Callable[[], None]]:
        """Inside, what the calls of `read` to come ask for is read ahead of them: these, in this order, from one thread. A
        `read` of something else reads for itself. Gives `ReadAhead.stop`."""
        assert self._ahead is None, "one load of a source at a time"
        chunks = [chunk for each in wanted for chunk in each.chunks(self._chunk_bytes)]
        self._ahead = ReadAhead(chunks, pinned)
        try:
            yield self._ahead.stop
        finally:
            self._ahead.close()
            self._ahead = None

    def read(
        self,
        wanted: Wanted,
        dtype: torch.dtype,
        devices: Mapping[int, torch.device],
        into: Mapping[int, torch.Tensor] | None = None,
    ) -> dict[int, torch.Tensor]:
        """rank -> its slice: new and contiguous on devices[rank], or into[rank] (any strides), in the order of that
        device's current stream.

        A column slice is cut on its device, to which whole rows travel. Safe to call from several threads outside
        `read_ahead`. Raises CheckpointError if the file ends early or cannot be read."""
        out = {}
        for rank in wanted.ranges:
            shape = wanted.shape(rank)
            if into is None:
                out[rank] = torch.empty(shape, dtype=dtype, device=devices[rank])
            else:
                out[rank] = into[rank]
                assert list(out[rank].shape) == shape and out[rank].dtype == dtype
        rows, width = wanted.rows(), wanted.info.shape[-1]
        if not rows:
            return out
        cut = {
            r: [column * dtype.itemsize for column in wanted.ranges[r]]
            for r in rows
            if wanted.axis == 1 and out[r].shape[1] < width
        }
        # As the widest integers that all rows and slices begin and end at: copies between strides go by element.
        unit = math.gcd(8, wanted.info.row_bytes, *(at for span in cut.values() for at in span))
        places = {
            r: (out[r][:, None] if out[r].ndim == 1 else out[r]).view(_INTEGERS[unit]) for r in rows
        }
        streams = {
            devices[rank]: torch.cuda.current_stream(devices[rank])
            for rank in rows
            if devices[rank].type == "cuda"
        }
        for chunk in wanted.chunks(self._chunk_bytes):
            ahead = self._ahead if self._ahead and self._ahead.is_next(chunk) else None
            buffer = ahead.take() if ahead else self._read_now(chunk, pinned=bool(streams))
            held = buffer.memory[: chunk.nbytes].view(_INTEGERS[unit])
            held = held.view(chunk.end - chunk.row, -1)
            landed: dict[torch.device, torch.Tensor] = {}
            for rank, (start, stop) in rows.items():
                first, last = max(chunk.row, start), min(chunk.end, stop)
                if first >= last:
                    continue
                device, piece = devices[rank], held[first - chunk.row : last - chunk.row]
                if rank in cut:
                    if device not in landed:
                        landed[device] = piece.to(device, non_blocking=True)
                    piece = landed[device][:, slice(*(at // unit for at in cut[rank]))]
                places[rank][first - start : last - start].copy_(piece, non_blocking=True)
            for stream in streams.values():
                buffer.mark(stream)
            if ahead:
                ahead.give(buffer)
        return out

    def _read_now(self, chunk: Chunk, pinned: bool) -> Buffer:
        """In this thread's own buffer, which the next call overwrites."""
        key = f"pinned-{pinned}"
        buffer: Buffer | None = getattr(self._local, key, None)
        if buffer is None or buffer.memory.numel() < chunk.nbytes:
            buffer = Buffer(max(chunk.nbytes, self._chunk_bytes), pinned)
            setattr(self._local, key, buffer)
        buffer.start(chunk)
        buffer.finish()
        return buffer
