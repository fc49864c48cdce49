"""File -> device through two small pinned buffers a thread: the read of one chunk overlaps the
transfer of the chunk before it. `preadv` goes straight into pinned memory, without the page faults
of a mapping and without the GIL, so that threads add up."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import torch

from engine.checkpoint.safetensors_header import TensorInfo
from engine.errors import CheckpointError

CHUNK_BYTES = 32 << 20


class Staging:
    """Reads slices of tensors onto a device. Safe to call from several threads. A CPU device takes
    the same path with ordinary buffers (tests)."""

    def __init__(self, chunk_bytes: int = CHUNK_BYTES):
        self._chunk_bytes = chunk_bytes
        self._local = threading.local()
        self._files: dict[Path, int] = {}
        self._lock = threading.Lock()

    def read(
        self,
        info: TensorInfo,
        dtype: torch.dtype,
        axis: int | None,
        start: int,
        stop: int,
        device: torch.device,
    ) -> torch.Tensor:
        """[start, stop) along `axis` (0, 1 or None: all) of a 1-D or 2-D tensor, contiguous on
        `device`.

        Raises CheckpointError if the file ends early or cannot be read."""
        shape = list(info.shape)
        if axis is not None:
            shape[axis] = stop - start
        out = torch.empty(shape, dtype=dtype, device=device)
        if not out.numel():
            return out
        columns = slice(start, stop) if axis == 1 else None
        whole_row = info.nbytes // info.shape[0]  # bytes of a row of the file
        first_row = start if axis == 0 else 0
        rows = max(1, self._chunk_bytes // whole_row)
        buffers = self._buffers(max(whole_row, self._chunk_bytes), device.type == "cuda")
        events = [torch.cuda.Event() for _ in buffers] if device.type == "cuda" else []
        file = self._descriptor(info.file)
        for turn, row in enumerate(range(0, shape[0], rows)):
            count, slot = min(rows, shape[0] - row), turn % 2
            if events:
                events[slot].synchronize()  # the transfer out of this buffer (none yet: at once)
            raw = buffers[slot][: count * whole_row]
            _fill(file, raw, info.offset + (first_row + row) * whole_row, info)
            chunk = raw.view(dtype).view(count, *info.shape[1:])
            if columns is not None:
                chunk = self._pack(chunk[:, columns], slot, device.type == "cuda")
            out[row : row + count].copy_(chunk, non_blocking=True)
            if events:
                events[slot].record(torch.cuda.current_stream(device))
        for event in events:
            event.synchronize()
        return out

    def _pack(self, piece: torch.Tensor, slot: int, pinned: bool) -> torch.Tensor:
        """A column slice, made contiguous in a second pinned buffer: one straight transfer."""
        buffers = self._buffers(piece.numel() * piece.element_size(), pinned, "packed")
        packed = buffers[slot][: piece.numel() * piece.element_size()]
        return packed.view(piece.dtype).view(piece.shape).copy_(piece)

    def _buffers(self, nbytes: int, pinned: bool, name: str = "raw") -> list[torch.Tensor]:
        """Two uint8 buffers of this thread, at least `nbytes` long."""
        key = f"{name}-{pinned}"
        held = getattr(self._local, key, None)
        if held is None or held[0].numel() < nbytes:
            held = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
            setattr(self._local, key, held)
        return held

    def _descriptor(self, file: Path) -> int:
        with self._lock:
            if file not in self._files:
                self._files[file] = os.open(file, os.O_RDONLY)
            return self._files[file]

    def __del__(self) -> None:
        for descriptor in getattr(self, "_files", {}).values():
            os.close(descriptor)


def _fill(file: int, buffer: torch.Tensor, offset: int, info: TensorInfo) -> None:
    """Read exactly len(buffer) bytes at `offset`."""
    view = buffer.numpy().data
    while view:
        try:
            done = os.preadv(file, [view], offset)
        except OSError as e:
            raise CheckpointError(f"{info.file}: reading {info.name}: {e.strerror}") from None
        if not done:
            raise CheckpointError(f"{info.file} ends inside {info.name}: it changed while loading")
        view, offset = view[done:], offset + done
