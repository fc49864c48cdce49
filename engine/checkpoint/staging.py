"""File -> devices through small pinned buffers, each byte of the files read once for all ranks."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch

from engine.checkpoint import read_ahead
from engine.checkpoint.read_ahead import Buffer, Chunk, ReadAhead, Wanted

TORCH_DTYPES = {  # that are read
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
}
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Staging:
    """Reads slices of tensors onto devices. A CPU device takes the same path with ordinary buffers."""

    def __init__(self, chunk_bytes: int | None = None):
        """chunk_bytes: of a buffer; default: read_ahead.CHUNK_BYTES."""
        self._chunk_bytes = chunk_bytes or read_ahead.CHUNK_BYTES
        self._ahead: ReadAhead | None = None
        self._local = threading.local()

    @contextlib.contextmanager
    def read_ahead(self, wanted: Iterable[Wanted], pinned: bool) -> Iterator[Callable[[], None]]:
        """Inside, what the calls of `read` to come ask for is read ahead of them: these, in this order, from one thread. A
        `read` of something else reads for itself. Gives `ReadAhead.stop`."""
        assert self._ahead is None, "one load of a source at a time"
        chunks = [chunk for each in wanted for chunk in each.chunks(self._chunk_bytes)]
        self._ahead = ReadAhead(chunks, self._chunk_bytes, pinned)
        try:
            yield self._ahead.stop
        finally:
            self._ahead.close()
            self._ahead = None

    def read(
        self,
        wanted: Wanted,
        devices: Mapping[int, torch.device],
        into: Mapping[int, torch.Tensor] | None = None,
    ) -> dict[int, torch.Tensor]:
        """rank -> its slice: new and contiguous on devices[rank], or into[rank] (any strides), in the order of that
        device's current stream.

        A column slice is cut on its device, to which whole rows travel. Safe to call from several threads outside
        `read_ahead`. Raises CheckpointError if the file ends early or cannot be read."""
        out, dtype = {}, TORCH_DTYPES[wanted.info.dtype]
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
        row_bytes = wanted.info.row_bytes
        unit = math.gcd(8, row_bytes, *(at for span in cut.values() for at in span))
        integers, width = _INTEGERS[unit], row_bytes // unit
        places = []
        for rank, (start, stop) in rows.items():
            place = (out[rank][:, None] if out[rank].ndim == 1 else out[rank]).view(integers)
            left, right = (at // unit for at in cut.get(rank, (0, row_bytes)))
            places.append((start, stop, devices[rank], place, rank in cut, left, right))
        streams = {
            devices[rank]: torch.cuda.current_stream(devices[rank])
            for rank in rows
            if devices[rank].type == "cuda"
        }
        # From here on each microsecond counts: a chunk's turn is its bytes over 50 GB/s, 0.3 ms.
        for chunk in wanted.chunks(self._chunk_bytes):
            ahead = self._ahead if self._ahead and self._ahead.is_next(chunk) else None
            buffer = ahead.take() if ahead else self._read_now(chunk, pinned=bool(streams))
            sent, landed = set(), {}
            row, end = chunk.row, chunk.end
            for start, stop, device, place, is_cut, left, right in places:
                first, last = start if start > row else row, stop if stop < end else end
                if first >= last:
                    continue
                if not is_cut:
                    piece = buffer.rows(integers, (first - row) * width, last - first, width)
                else:
                    if device not in landed:
                        whole = buffer.rows(integers, 0, end - row, width)
                        landed[device] = whole.to(device, non_blocking=True)
                    piece = landed[device][:, left:right]
                sent.add(device)
                place[first - start : last - start].copy_(piece, non_blocking=True)
            for device, stream in streams.items():
                if device in sent:
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
        buffer.start([(0, chunk)])
        buffer.finish()
        return buffer
