"""The header of one safetensors file: names, dtypes, shapes and byte offsets, read without any
data.

Format (https://huggingface.co/docs/safetensors): 8 bytes little-endian header length n, n bytes of
JSON `{name: {"dtype", "shape", "data_offsets": [begin, end]}}`, then the data. The file must end
where the last tensor ends, so a truncated download is found here, before any tensor is read.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path

# Bytes per element of every dtype the format names; the engine can read those of
# `staging.TORCH_DTYPES`.
ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4,
    "I64": 8, "U64": 8, "F64": 8,
}  # fmt: skip
MAX_HEADER_BYTES = 100_000_000  # the limit of the reference implementation


class BadFile(ValueError):
    """Why one file cannot be used, without its name: the caller lists all bad files together."""


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies: `nbytes` bytes from `offset` (absolute) in `file`."""

    name: str
    file: Path
    dtype: str  # as safetensors spells it: "BF16", "F16", "F32", "F8_E4M3", ...
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    identity: tuple[int, ...]  # of the file whose header said so, see `identity`

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of a tensor that has rows."""
        return self.nbytes // self.shape[0]


def identity(stat: os.stat_result) -> tuple[int, ...]:
    """Tells a file from one that took its place, and from itself after a write. (Not its inode's number: some network
    file systems have another at each look.)"""
    return stat.st_size, stat.st_mtime_ns


def read_header(file: Path) -> dict[str, TensorInfo]:
    """Tensors of one file by name. Raises BadFile: absent, Git LFS pointer, truncated or
    damaged."""
    try:
        with file.open("rb") as f:
            stat = os.fstat(f.fileno())
            size = stat.st_size
            start = f.read(8)
            if start == b"version ":
                raise BadFile("is a Git LFS pointer, not the weights: run `git lfs pull`")
            length = int.from_bytes(start, "little")
            if len(start) < 8 or 8 + length > size:
                raise BadFile(f"is truncated: {size} bytes do not hold its header")
            if length > MAX_HEADER_BYTES:
                raise BadFile(f"is damaged: a header of {length} bytes")
            raw = f.read(length)
    except OSError as e:
        raise BadFile(f"cannot be read: {e.strerror}") from None
    try:
        header = json.loads(raw)
        header.pop("__metadata__", None)
        told = file, 8 + length, identity(stat)
        tensors = {k: _tensor(k, v, *told) for k, v in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        if isinstance(e, BadFile):
            raise
        raise BadFile("is damaged: its header is not safetensors JSON") from None
    _check_layout(tensors, start=8 + length, size=size)
    return tensors


def _tensor(
    name: str, entry: dict, file: Path, data_start: int, identity: tuple[int, ...]
) -> TensorInfo:
    begin, end = entry["data_offsets"]
    shape = tuple(int(n) for n in entry["shape"])
    dtype = entry["dtype"]
    item = ITEM_BYTES.get(dtype)
    # A dtype that is not in the table (sub-byte formats) is reported by the dtype check, not here.
    if item is not None and end - begin != math.prod(shape) * item:
        raise BadFile(f"is damaged: {name} {dtype}{list(shape)} has {end - begin} bytes of data")
    return TensorInfo(name, file, dtype, shape, data_start + begin, end - begin, identity)


def _check_layout(tensors: dict[str, TensorInfo], start: int, size: int) -> None:
    """Tensors must follow one another without gaps, and the last one must end the file."""
    at = start
    for info in sorted(tensors.values(), key=lambda t: (t.offset, t.nbytes)):
        if info.offset != at:
            raise BadFile(f"is damaged: {info.name} starts at byte {info.offset}, not {at}")
        at += info.nbytes
    if at > size:
        raise BadFile(f"is truncated: {size} bytes of {at}")
    if at < size:
        raise BadFile(f"is damaged: {size} bytes where its header ends at {at}")
