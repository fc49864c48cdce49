"""Where weights come from: one rank's slice of one HF tensor at a time.

`CheckpointSource` reads files; dummy.py makes random weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch

from engine.checkpoint.index import CheckpointIndex, TensorInfo, open_checkpoint
from engine.checkpoint.read_ahead import ReadAhead, Wanted
from engine.checkpoint.scheme import Scheme, scale_of
from engine.checkpoint.staging import Staging
from engine.errors import CheckpointError, first_few
from engine.weights import Part, WeightSpec

TORCH_DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
}


class WeightSource(Protocol):
    """Reads one rank's slice of one part, layout applied. Safe to call from several threads."""

    def read(self, part: Part, rank: int, device: torch.device | str) -> torch.Tensor:
        """[local shape of the part] on `device`, in the source's own dtype. Indices past the end of
        the HF tensor are zeros."""
        ...


def local_range(part: Part, rank: int) -> tuple[int, int]:
    """(start, stop) along part.axis that exists in the HF tensor; start = stop if none does."""
    if part.axis is None:
        return 0, part.shape[0]
    size = part.shape[part.axis]
    start, stop = part.ranges[rank]
    return min(start, size), min(stop, size)


def padding(part: Part, rank: int) -> int:
    """Indices of this rank's range that lie past the end of the HF tensor."""
    if part.axis is None:
        return 0
    start, stop = part.ranges[rank]
    have_start, have_stop = local_range(part, rank)
    return (stop - start) - (have_stop - have_start)


def apply_layout(tensor: torch.Tensor, part: Part) -> torch.Tensor:
    """`rope_pairs`: rows (0, d/2, 1, d/2+1, ...) of each head of d rows; weight [heads*d, K] or
    bias."""
    if part.layout == "natural":
        return tensor
    rows, d = tensor.shape[0], part.head_dim
    heads = tensor.reshape(rows // d, 2, d // 2, *tensor.shape[1:])
    return heads.transpose(1, 2).reshape(tensor.shape)


def pad(tensor: torch.Tensor, part: Part, rank: int) -> torch.Tensor:
    """With zeros for the indices past the end of the HF tensor."""
    count = padding(part, rank)
    if not count:
        return tensor
    assert part.axis is not None
    shape = list(tensor.shape)
    shape[part.axis] = count
    return torch.cat([tensor, tensor.new_zeros(shape)], dim=part.axis)


def _pad_scale(scale: torch.Tensor, part: Part, rank: int) -> torch.Tensor:
    """Rows past the end are zeros of any scale."""
    missing = padding(part, rank) if part.axis == 0 else 0
    return torch.nn.functional.pad(scale, (0, missing), value=1.0) if missing else scale


def _local_ranges(part: Part, ranks: Iterable[int]) -> dict[int, tuple[int, int]]:
    return {rank: local_range(part, rank) for rank in ranks}


Pieces = dict[int, tuple[torch.Tensor, torch.Tensor | None]]  # rank -> values, scale


def read_pieces(
    source: WeightSource,
    part: Part,
    devices: Mapping[int, torch.device],
    *,
    fp8: bool,
    into: Mapping[int, torch.Tensor],
) -> Pieces:
    """`CheckpointSource.read_ranks`, or `read` for each rank of another source."""
    if isinstance(source, CheckpointSource):
        return source.read_ranks(part, devices, fp8=fp8, into=into)
    return {rank: (source.read(part, rank, device), None) for rank, device in devices.items()}


class CheckpointSource:
    """A Hugging Face directory. Only a slice's bytes (a column slice's rows) are read, through buffers: a mapped file
    that shrinks would end the process (SIGBUS)."""

    def __init__(self, checkpoint: str | Path | CheckpointIndex, chunk_bytes: int | None = None):
        """chunk_bytes: see `Staging`. Raises CheckpointError for whatever
        `open_checkpoint` finds."""
        if not isinstance(checkpoint, CheckpointIndex):
            checkpoint = open_checkpoint(checkpoint)
        self.index = checkpoint
        self._staging = Staging(chunk_bytes)

    def read(self, part: Part, rank: int, device: torch.device | str) -> torch.Tensor:
        """See WeightSource; a weight stored in FP8 is given as fp32 values.

        Raises CheckpointError if the tensor is absent or of another shape."""
        return self.read_ranks(part, {rank: torch.device(device)})[rank][0]

    def read_ranks(
        self,
        part: Part,
        devices: Mapping[int, torch.device],
        *,
        fp8: bool = False,
        into: Mapping[int, torch.Tensor] | None = None,
    ) -> Pieces:
        """rank -> (what `read` gives, None), each byte of the files read once for all ranks.

        fp8: a part stored in FP8 with one scale a row or a tensor is (float8_e4m3fn [N, K], fp32
        scale [N]), bits unchanged, NaN among them (scales of blocks cannot be kept by kernels that
        scale a whole row). into: where the values should go; those that need no conversion are
        read straight into it, and it is what is given."""
        info = self._info(part)
        is_fp8 = self.index.is_fp8(part.name)
        keep = fp8 and self.keeps_fp8(part)
        straight = (
            into is not None
            and part.layout == "natural"
            and is_fp8 == keep
            and all(not padding(part, rank) for rank in devices)
            and all(into[rank].dtype == TORCH_DTYPES[info.dtype] for rank in devices)
        )
        wanted = self._wanted(part, devices)
        stored = self._staging.read(
            wanted, TORCH_DTYPES[info.dtype], devices, into if straight else None
        )
        scales = self._scales(part, devices) if is_fp8 else {}
        pieces: Pieces = {}
        for rank in devices:
            piece, scale = stored.pop(rank), None
            if keep:
                scale = _pad_scale(
                    apply_layout(scales[rank].expand(piece.shape[0]), part), part, rank
                )
                piece = piece.view(torch.uint8)  # for torch.cat
            elif is_fp8 and self._scheme.block:
                rows, columns = self._blocks(part, rank, piece.device)
                piece = piece.float().mul_(scales[rank][rows][:, columns])
            elif is_fp8:
                piece = piece.float().mul_(scales[rank][:, None])
            piece = pad(apply_layout(piece, part), part, rank)
            pieces[rank] = (piece.view(torch.float8_e4m3fn) if keep else piece), scale
        return pieces

    def keeps_fp8(self, part: Part) -> bool:
        """Whether `read_ranks` can give the part as stored: in FP8 with a scale a row."""
        return self.index.is_fp8(part.name) and not self._scheme.block

    def read_ahead(
        self, parts: Iterable[tuple[Part, Mapping[int, torch.device]]]
    ) -> AbstractContextManager[ReadAhead]:
        """Inside, what the calls of `read_ranks` to come ask for is read ahead of them: these parts, for these devices, in
        this order, from one thread."""
        wanted, kinds = [], set()
        for part, devices in parts:
            wanted.append(self._wanted(part, devices))
            if self.index.is_fp8(part.name):
                wanted.append(self._wanted_scales(part, devices))
            kinds |= {device.type for device in devices.values()}
        return self._staging.read_ahead(wanted, pinned="cuda" in kinds)

    def check_scales(self) -> None:
        """Read every scale of an FP8 checkpoint: CheckpointError for one that is not finite or not
        positive. Small (4 bytes a row), so that it comes before any weight."""
        tensors = self.index.tensors
        of_fp8 = (
            scale_of(info, tensors) for name, info in tensors.items() if self.index.is_fp8(name)
        )
        scales = [_flat(scale) for scale in of_fp8 if scale is not None]
        wanted = [_rows(scale, 0, scale.shape[0]) for scale in scales]
        with self._staging.read_ahead(wanted, pinned=False):
            values = [self._on_cpu(each).float() for each in wanted]
        # Together: looking at some hundred of them one by one takes as long as their reads.
        if not values or _are_scales(torch.cat(values)):
            return
        bad = [scale.name for scale, each in zip(scales, values) if not _are_scales(each)]
        raise CheckpointError(
            f"{self.index.directory}: FP8 scales that are zero, negative or not finite: "
            + first_few(bad)
        )

    @property
    def _scheme(self) -> Scheme:
        assert self.index.scheme is not None  # index.check refuses FP8 tensors without one
        return self.index.scheme

    def _info(self, part: Part) -> TensorInfo:
        info = self.index.tensors.get(part.name)
        if info is None or info.shape != part.shape:
            found = "no such tensor" if info is None else f"shape {list(info.shape)}"
            raise CheckpointError(
                f"{self.index.directory}: {part.name}: {found}, wanted {list(part.shape)}"
            )
        return info

    def _wanted(self, part: Part, ranks: Iterable[int]) -> Wanted:
        return Wanted(self._info(part), part.axis, _local_ranges(part, ranks))

    def _scale_info(self, part: Part) -> TensorInfo:
        info = scale_of(self.index.tensors[part.name], self.index.tensors)
        if info is None:
            raise CheckpointError(f"{self.index.directory}: {part.name} has no scale")
        return info

    def _scales(self, part: Part, devices: Mapping[int, torch.device]) -> dict[int, torch.Tensor]:
        """fp32 [rows] of each rank's slice, [1] of a tensor with one scale, or all blocks' of the tensor."""
        wanted = self._wanted_scales(part, devices)
        read = self._staging.read(wanted, TORCH_DTYPES[wanted.info.dtype], devices)
        return {rank: scale.float() for rank, scale in read.items()}

    def _wanted_scales(self, part: Part, ranks: Iterable[int]) -> Wanted:
        info, ranges = self._scale_info(part), _local_ranges(part, ranks)
        if self._scheme.block:
            return Wanted(info, None, ranges)
        flat = _flat(info)
        return Wanted(flat, 0 if part.axis == 0 and flat.shape[0] > 1 else None, ranges)

    def _blocks(
        self, part: Part, rank: int, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The scale's row of each local row, and its column of each local column. Blocks are those of the whole tensor: a
        shard may begin inside one."""
        rows, cols = (torch.arange(n, device=device) for n in part.shape)
        span = slice(*local_range(part, rank))
        if part.axis == 0:
            rows = rows[span]
        elif part.axis == 1:
            cols = cols[span]
        return rows // self._scheme.block, cols // self._scheme.block

    def check_tied(self, specs: Iterable[WeightSpec]) -> None:
        """A checkpoint of tied embeddings may carry an lm_head.weight that no spec asks for; if it
        is not the embedding (64 rows compared), tying would change the model: CheckpointError."""
        names = {part.name for spec in specs for part in spec.parts}
        head = self.index.tensors.get("lm_head.weight")
        table = self.index.tensors.get("model.embed_tokens.weight")
        if head is None or table is None or head.name in names:
            return
        same = head.shape == table.shape and head.dtype == table.dtype
        if same:
            rows = range(0, head.shape[0], max(1, head.shape[0] // 64))
            same = all(
                torch.equal(*(self._on_cpu(_rows(info, i, i + 1)) for info in (head, table)))
                for i in rows
            )
        if not same:
            raise CheckpointError(
                f"{self.index.directory}: config.json ties the embeddings, but lm_head.weight is not "
                'model.embed_tokens.weight; set "tie_word_embeddings": false to use it'
            )

    def _on_cpu(self, wanted: Wanted) -> torch.Tensor:
        """What rank 0 wants."""
        dtype = TORCH_DTYPES[wanted.info.dtype]
        return self._staging.read(wanted, dtype, {0: torch.device("cpu")})[0]


def _rows(info: TensorInfo, start: int, stop: int) -> Wanted:
    """Some rows of a tensor, for rank 0."""
    return Wanted(info, 0, {0: (start, stop)})


def _are_scales(values: torch.Tensor) -> bool:
    return bool((values.isfinite() & (values > 0)).all())


def _flat(info: TensorInfo) -> TensorInfo:
    """As a vector: a scalar is one of length 1."""
    return replace(info, shape=(math.prod(info.shape),))
