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

        Slices whose rows do not lie behind each other (columns, interleaved rows) are taken on their device from whole
        rows, for which it needs room meanwhile. Safe to call from several threads outside
        `read_ahead`. Raises CheckpointError if the file ends early or cannot be read."""
        out, dtype = {}, TORCH_DTYPES[wanted.info.dtype]
        for rank in wanted.ranges:
            shape = wanted.shape(rank)
            if into is None:
                out[rank] = torch.empty(shape, dtype=dtype, device=devices[rank])
            else:
                out[rank] = into[rank]
                assert list(out[rank].shape) == shape and out[rank].dtype == dtype
        rows, row_bytes = wanted.rows(), wanted.info.row_bytes
        # Chunks are copied as runs of bytes, one call each: a call of the driver is what the loader's speed is made of.
        # Where a slice's rows do not lie behind each other, whole rows land on its device first.
        targets, landed = [], {}
        for rank, (start, stop) in rows.items():
            device = devices[rank]
            if out[rank].is_contiguous() and out[rank].nbytes == (stop - start) * row_bytes:
                targets.append((start, stop, device, out[rank].view(-1).view(torch.uint8)))
            elif (device, start, stop) not in landed:
                land = torch.empty((stop - start) * row_bytes, dtype=torch.uint8, device=device)
                landed[device, start, stop] = land
                targets.append((start, stop, device, land))
        streams = {
            device: torch.cuda.current_stream(device)
            for _, _, device, _ in targets
            if device.type == "cuda"
        }
        for chunk in wanted.chunks(self._chunk_bytes):
            ahead = self._ahead if self._ahead and self._ahead.is_next(chunk) else None
            buffer = ahead.take() if ahead else self._read_now(chunk, pinned=bool(streams))
            row, end, sent = chunk.row, chunk.end, set()
            for start, stop, device, target in targets:
                first, last = start if start > row else row, stop if stop < end else end
                if first >= last:
                    continue
                piece = buffer.bytes((first - row) * row_bytes, (last - row) * row_bytes)
                place = target[(first - start) * row_bytes : (last - start) * row_bytes]
                place.copy_(piece, non_blocking=True)
                sent.add(device)
            for device, stream in streams.items():
                if device in sent:
                    buffer.mark(stream)
            if ahead:
                ahead.give(buffer)
        for rank, (start, stop) in rows.items():
            if (where := (devices[rank], start, stop)) in landed:
                span = wanted.ranges[rank] if wanted.axis == 1 else (0, row_bytes // dtype.itemsize)
                _take_columns(out[rank], landed[where], *(at * dtype.itemsize for at in span))
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


def _take_columns(into: torch.Tensor, rows: torch.Tensor, left: int, right: int) -> None:
    """Bytes [left, right) of each row into the rows of `into`; rows: uint8, as many rows behind each other. As the widest
    integers that rows and slices begin and end at: copies between strides go by element."""
    into = into[:, None] if into.ndim == 1 else into
    row_bytes = rows.numel() // into.shape[0]
    integers = _INTEGERS[math.gcd(8, row_bytes, left, right)]
    whole = rows.view(into.shape[0], row_bytes).view(integers)
    into.view(integers).copy_(whole[:, left // integers.itemsize : right // integers.itemsize])
