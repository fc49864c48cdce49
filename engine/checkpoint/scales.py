"""The scales of a checkpoint's FP8 weights: read together, once, and sent to each device as one tensor. They are small (4
bytes a row, 27 MB of 72B); read and sent one by one, beside their weights, they were a quarter of all chunks of a load."""

from __future__ import annotations

import math
import threading
from dataclasses import replace

import torch

from engine.checkpoint.index import CheckpointIndex
from engine.checkpoint.read_ahead import Wanted
from engine.checkpoint.scheme import scale_of
from engine.checkpoint.staging import Staging
from engine.errors import CheckpointError, first_few
from engine.weights import Part


class Scales:
    """Those of every FP8 tensor of an index. Safe to use from several threads."""

    def __init__(self, index: CheckpointIndex):
        self._index = index
        self._lock = threading.Lock()
        self._on: dict[torch.device, torch.Tensor] = {}
        self._spans: dict[str, tuple[int, int]] = {}  # weight -> its elements of the one tensor

    def check(self) -> None:
        """Read them, if that was not done. CheckpointError for one that is not finite or not positive."""
        self._all_on(torch.device("cpu"))

    def of_rows(self, part: Part, rows: tuple[int, int], device: torch.device) -> torch.Tensor:
        """fp32 [stop - start] of [start, stop) = rows of a part without blocks. Raises CheckpointError as `check` does."""
        scales = self._of(part, device)
        start, stop = rows
        return scales.expand(stop - start) if len(scales) == 1 else scales[start:stop]

    def of_blocks(self, part: Part, device: torch.device) -> torch.Tensor:
        """fp32 [rows of blocks, columns of blocks] of all of a part. Raises CheckpointError as `check` does."""
        assert self._index.scheme is not None
        return self._of(part, device).view(-1, -(-part.shape[1] // self._index.scheme.block))

    def _of(self, part: Part, device: torch.device) -> torch.Tensor:
        every = self._all_on(device)
        if part.name not in self._spans:
            raise CheckpointError(f"{self._index.directory}: {part.name} has no scale")
        return every[slice(*self._spans[part.name])]

    def _all_on(self, device: torch.device) -> torch.Tensor:
        with self._lock:
            cpu = torch.device("cpu")
            if cpu not in self._on:
                self._on[cpu] = self._read()
            if device not in self._on:
                self._on[device] = self._on[cpu].to(device)
            return self._on[device]

    def _read(self) -> torch.Tensor:
        tensors = self._index.tensors
        # As vectors; a scalar is one of length 1.
        found = {
            name: replace(scale, shape=(math.prod(scale.shape),))
            for name, info in tensors.items()
            if self._index.is_fp8(name) and (scale := scale_of(info, tensors)) is not None
        }
        wanted = [Wanted(scale, None, {0: (0, 0)}) for scale in found.values()]
        staging, cpu = Staging(), {0: torch.device("cpu")}
        with staging.read_ahead(wanted, pinned=False):
            values = [staging.read(each, cpu)[0].float() for each in wanted]
        first = 0
        for name, each in zip(found, values):
            self._spans[name] = first, first + len(each)
            first += len(each)
        every = torch.cat(values) if values else torch.empty(0)
        # Together: looking at some hundred of them one by one takes as long as their reads.
        if not _are_scales(every):
            bad = [found[name].name for name, each in zip(found, values) if not _are_scales(each)]
            raise CheckpointError(
                f"{self._index.directory}: FP8 scales that are zero, negative or not finite: "
                + first_few(bad)
            )
        return every


def _are_scales(values: torch.Tensor) -> bool:
    return bool((values.isfinite() & (values > 0)).all())
