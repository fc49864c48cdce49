"""Where weights come from: one rank's slice of one HF tensor at a time.

`CheckpointSource` reads files; dummy.py makes random weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

import torch

from engine.checkpoint.index import CheckpointIndex, TensorInfo, open_checkpoint
from engine.checkpoint.read_ahead import Wanted
from engine.checkpoint.scales import Scales
from engine.checkpoint.scheme import Scheme
from engine.checkpoint.staging import TORCH_DTYPES, Staging
from engine.errors import CheckpointError
from engine.weights import Part, WeightSpec


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


def local_rows(part: Part, rank: int) -> tuple[int, int]:
    """(start, stop) of the rows of the HF tensor that hold the rank's slice."""
    return local_range(part, rank) if part.axis == 0 else (0, part.shape[0])


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
        self._scales = Scales(checkpoint)

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
        stored = self._staging.read(wanted, devices, into if straight else None)
        pieces: Pieces = {}
        for rank, device in devices.items():
            piece, scale = stored.pop(rank), None
            if is_fp8 and self._scheme.block:
                rows, columns = self._blocks(part, rank, device)
                piece = piece.float().mul_(self._scales.of_blocks(part, device)[rows][:, columns])
            elif is_fp8:
                of_rows = self._scales.of_rows(part, local_rows(part, rank), device)
                if keep:
                    scale = _pad_scale(apply_layout(of_rows, part), part, rank)
                else:
                    piece = piece.float().mul_(of_rows[:, None])
            if not straight:
                piece = piece.view(torch.uint8) if keep else piece  # for torch.cat
                piece = pad(apply_layout(piece, part), part, rank)
                piece = piece.view(torch.float8_e4m3fn) if keep else piece
            pieces[rank] = piece, scale
        return pieces

    def keeps_fp8(self, part: Part) -> bool:
        """Whether `read_ranks` can give the part as stored: in FP8 with a scale a row."""
        return self.index.is_fp8(part.name) and not self._scheme.block

    def read_ahead(
        self, parts: Iterable[tuple[Part, Mapping[int, torch.device]]]
    ) -> AbstractContextManager[Callable[[], None]]:
        """Inside, what the calls of `read_ranks` to come ask for is read ahead of them: these parts, for these devices, in
        this order, from one thread. Gives what stops it, from any thread."""
        wanted, kinds = [], set()
        for part, devices in parts:
            wanted.append(self._wanted(part, devices))
            kinds |= {device.type for device in devices.values()}
        return self._staging.read_ahead(wanted, pinned="cuda" in kinds)

    def check_scales(self) -> None:
        """Read every scale of an FP8 checkpoint, ahead of any weight: CheckpointError for one that is not finite or not
        positive."""
        self._scales.check()

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
        return self._staging.read(wanted, {0: torch.device("cpu")})[0]


def _rows(info: TensorInfo, start: int, stop: int) -> Wanted:
    """Some rows of a tensor, for rank 0."""
    return Wanted(info, 0, {0: (start, stop)})
