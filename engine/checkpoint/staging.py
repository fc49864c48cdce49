"""File -> devices through two small pinned buffers a thread: the read of one chunk overlaps the
transfer of the chunk before it, and each byte of the file is read once for all ranks. `preadv` goes
straight into pinned memory, without the page faults of a mapping and without the GIL, so that
threads add up."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from engine.checkpoint.safetensors_header import TensorInfo
from engine.errors import CheckpointError

# Of pinned memory, twice a thread. 75 GB load alike in chunks of 8 to 64 MB (docs/performance.md).
CHUNK_BYTES = 16 << 20


@dataclass
class _Buffer:
    """raw: uint8. sent: by device, an event behind the last transfer out of it."""

    raw: torch.Tensor
    sent: dict[torch.device, torch.cuda.Event] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.memory: memoryview = self.raw.numpy().data

    def wait(self) -> None:
        for event in self.sent.values():
            if not event.query():
                event.synchronize()

    def mark(self, device: torch.device) -> None:
        if device not in self.sent:
            self.sent[device] = torch.cuda.Event()
        self.sent[device].record(torch.cuda.current_stream(device))


class Staging:
    """Reads slices of tensors onto devices. Safe to call from several threads. A CPU device takes
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
        ranges: Mapping[int, tuple[int, int]],
        devices: Mapping[int, torch.device],
        into: Mapping[int, torch.Tensor] | None = None,
    ) -> dict[int, torch.Tensor]:
        """rank -> [start, stop) = ranges[rank] along `axis` (0, 1 or None: all) of a 1-D or 2-D
        tensor: new and contiguous on devices[rank], or into[rank] (any strides), in the order of that
        device's current stream.

        A column slice is cut on its device, to which whole rows travel. Raises CheckpointError if
        the file ends early or cannot be read."""
        out, rows_of = {}, {}
        for rank, (start, stop) in ranges.items():
            shape = list(info.shape)
            if axis is not None:
                shape[axis] = stop - start
            if into is None:
                out[rank] = torch.empty(shape, dtype=dtype, device=devices[rank])
            else:
                out[rank] = into[rank]
                assert list(out[rank].shape) == shape and out[rank].dtype == dtype
            if out[rank].numel():
                rows_of[rank] = (start, stop) if axis == 0 else (0, shape[0])
        if not rows_of:
            return out
        whole_row = info.nbytes // info.shape[0]  # bytes of a row of the file
        step = max(1, self._chunk_bytes // whole_row)
        first, last = min(a for a, _ in rows_of.values()), max(b for _, b in rows_of.values())
        pinned = any(devices[rank].type == "cuda" for rank in rows_of)
        file = self._descriptor(info.file)
        for row in range(first, last, step):
            end = min(row + step, last)
            takers = {r: (max(row, a), min(end, b)) for r, (a, b) in rows_of.items()}
            takers = {r: (a, b) for r, (a, b) in takers.items() if a < b}
            if not takers:
                continue
            buffer = self._buffer(max(whole_row, self._chunk_bytes), pinned)
            nbytes = (end - row) * whole_row
            _read_exactly(file, buffer.memory[:nbytes], info.offset + row * whole_row, info)
            chunk = buffer.raw[:nbytes].view(dtype).view(end - row, *info.shape[1:])
            landed: dict[torch.device, torch.Tensor] = {}
            for rank, (a, b) in takers.items():
                piece = chunk[a - row : b - row]
                device, target = devices[rank], out[rank]
                if axis == 1 and target.shape[1] < info.shape[1]:
                    if device not in landed:
                        landed[device] = piece.to(device, non_blocking=True)
                    piece = landed[device][:, slice(*ranges[rank])]
                at = a - rows_of[rank][0]
                target[at : at + b - a].copy_(piece, non_blocking=True)
            for device in {devices[rank] for rank in takers}:
                if device.type == "cuda":
                    buffer.mark(device)
        return out

    def _buffer(self, nbytes: int, pinned: bool) -> _Buffer:
        """The less recently used of this thread's two buffers, at least `nbytes` long, free to be
        overwritten."""
        key = f"pinned-{pinned}"
        held: list[_Buffer] = getattr(self._local, key, [])
        if not held or held[0].raw.numel() < nbytes:
            for buffer in held:
                buffer.wait()
            held = [
                _Buffer(torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)) for _ in range(2)
            ]
            setattr(self._local, key, held)
        held.reverse()
        held[0].wait()
        return held[0]

    def _descriptor(self, file: Path) -> int:
        with self._lock:
            if file not in self._files:
                try:
                    self._files[file] = os.open(file, os.O_RDONLY)
                except OSError as e:
                    raise CheckpointError(
                        f"{file}: {e.strerror}: it changed while loading"
                    ) from None
            return self._files[file]

    def __del__(self) -> None:
        for descriptor in getattr(self, "_files", {}).values():
            os.close(descriptor)


def _read_exactly(file: int, view: memoryview, offset: int, info: TensorInfo) -> None:
    """Read exactly len(view) bytes at `offset`."""
    while view:
        try:
            done = os.preadv(file, [view], offset)
        except OSError as e:
            raise CheckpointError(f"{info.file}: reading {info.name}: {e.strerror}") from None
        if not done:
            raise CheckpointError(f"{info.file} ends inside {info.name}: it changed while loading")
        view, offset = view[done:], offset + done
