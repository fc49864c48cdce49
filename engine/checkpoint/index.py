"""A Hugging Face model directory opened by its headers alone: name -> (file, dtype, shape).

Everything that can be wrong with a checkpoint is found here, before a tensor is read or a GPU
touched. Problems of one kind are listed together in one CheckpointError, each with its file or
tensor.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from engine.checkpoint.safetensors_header import BadFile, TensorInfo, read_header
from engine.checkpoint.scheme import (
    SCALE_DTYPES,
    SKIPPED,
    Scheme,
    refuse_unknown_quantized,
    scale_of,
    scale_shapes,
    scheme_of,
)
from engine.errors import CheckpointError
from engine.metadata import read_object
from engine.weights import WeightSpec

READABLE_DTYPES = ("BF16", "F16", "F32")
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

# Buffers that old exporters wrote and that we compute ourselves.
_IGNORABLE = re.compile(r"(^|\.)(rotary_emb\.inv_freq|attn\.(masked_)?bias)$")
_LISTED = 8  # names shown of a long list


@dataclass(frozen=True)
class CheckpointIndex:
    """The tensors of one directory. `tensors[name].file` is the file that holds it."""

    directory: Path
    tensors: Mapping[str, TensorInfo]
    scheme: Scheme | None = None  # of an FP8 checkpoint

    @property
    def files(self) -> list[Path]:
        """The files, in name order."""
        return sorted({t.file for t in self.tensors.values()})

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.nbytes for t in self.tensors.values())

    @property
    def quantization(self) -> str | None:
        """ "fp8" for an FP8 checkpoint: the value of --quantization that keeps it as it is
        stored."""
        return "fp8" if self.scheme else None

    def is_fp8(self, name: str) -> bool:
        """Whether this tensor is stored in FP8."""
        info = self.tensors.get(name)
        return info is not None and info.dtype == "F8_E4M3"

    def adapt(self, specs: Mapping[str, WeightSpec]) -> dict[str, WeightSpec]:
        """The specs as an FP8 checkpoint stores them: a weight of which any part is stored in 16
        bits (its `ignore` list) is not quantised either. Of any other checkpoint: the same
        specs."""
        if self.scheme is None:
            return dict(specs)
        return {
            name: replace(
                spec, quantizable=spec.quantizable and all(self.is_fp8(p.name) for p in spec.parts)
            )
            for name, spec in specs.items()
        }

    def check(self, specs: Iterable[WeightSpec]) -> None:
        """Compare with what the model asks for: names (missing, unknown), shapes, dtypes, scales.

        Raises CheckpointError. Ignored: rotary inv_freq buffers, an lm_head.weight that no spec
        asks for (tied embeddings; `CheckpointSource` compares it with the embedding), and the
        scales of activations and KV cache of an FP8 checkpoint."""
        specs = list(specs)
        expected = expected_shapes(specs)
        self._check_names(expected)
        wrong = [
            f"{n} is {list(self.tensors[n].shape)}, config.json asks for {list(shape)}"
            for n, shape in expected.items()
            if self.tensors[n].shape != shape
        ]
        if wrong:
            raise CheckpointError(f"{self.directory}: wrong shape: {_names(wrong, '; ')}")
        matrices = {p.name for s in specs if len(s.local_shape()) == 2 for p in s.parts}
        bad = [
            f"{n} is {self.tensors[n].dtype}"
            for n in expected
            if self.tensors[n].dtype not in READABLE_DTYPES
            and not (self.scheme and n in matrices and self.is_fp8(n))
        ]
        if bad:
            raise CheckpointError(
                f"{self.directory}: unsupported dtype: {_names(bad)}; supported: "
                + ", ".join(READABLE_DTYPES)
            )
        self._check_scales(expected)

    def _check_names(self, expected: Mapping[str, tuple[int, ...]]) -> None:
        known = {*expected, "lm_head.weight"}
        if self.scheme:
            known |= {n + suffix for n in expected for suffix in ("_scale", "_scale_inv")}
        missing = [n for n in expected if n not in self.tensors]
        unknown = [
            n
            for n in self.tensors
            if n not in known
            and not _IGNORABLE.search(n)
            and not (self.scheme and SKIPPED.search(n))
        ]
        if not missing and not unknown:
            return
        parts = []
        if missing:
            parts.append(f"{_count(missing, 'tensor')} missing: {_names(missing)}")
            if missing == ["lm_head.weight"]:
                parts[-1] += ' (set "tie_word_embeddings": true if it shares the embedding)'
        if unknown:
            parts.append(f"{_count(unknown, 'tensor')} unknown to this model: {_names(unknown)}")
        raise CheckpointError(f"{self.directory}: {'; '.join(parts)}")

    def _check_scales(self, expected: Iterable[str]) -> None:
        """Every FP8 weight has one scale of a right shape; no other weight has any."""
        problems = []
        for name in expected:
            weight = self.tensors[name]
            scale = scale_of(weight, self.tensors)
            if not self.is_fp8(name):
                if scale is not None:
                    problems.append(f"{scale.name} belongs to a weight stored as {weight.dtype}")
                continue
            assert self.scheme is not None
            shapes = scale_shapes(weight, self.scheme)
            if scale is None:
                problems.append(f"{name} has no {name.rpartition('.')[2]}_scale")
            elif scale.shape not in shapes or scale.dtype not in SCALE_DTYPES:
                problems.append(
                    f"{scale.name} is {scale.dtype} {list(scale.shape)}, wanted {list(shapes[0])}"
                )
        if problems:
            raise CheckpointError(f"{self.directory}: FP8 scales: {_names(problems, '; ')}")


def open_checkpoint(directory: str | Path) -> CheckpointIndex:
    """Read the index (if any) and every header of a model directory; no tensor data.

    Raises CheckpointError: no safetensors, missing or truncated files, an index that disagrees with
    the files, a tensor in two files, a quantisation scheme that is not read."""
    directory = Path(directory)
    scheme = scheme_of(directory)
    weight_map = _weight_map(directory)
    if weight_map is None:
        files = [_only_file(directory)]
    else:
        files = [directory / f for f in sorted(set(weight_map.values()))]
        absent = [f.name for f in files if not f.is_file()]
        if absent:
            raise CheckpointError(
                f"{directory}: {_count(absent, 'file')} named by {INDEX} missing: {_names(absent)}"
            )
    tensors = _read_headers(directory, files)
    if weight_map is not None:
        _compare_with_index(directory, weight_map, tensors)
    refuse_unknown_quantized(directory, tensors, scheme)
    return CheckpointIndex(directory, tensors, scheme)


def expected_shapes(specs: Iterable[WeightSpec]) -> dict[str, tuple[int, ...]]:
    """HF name -> whole shape of every tensor that the specs are made of."""
    shapes: dict[str, tuple[int, ...]] = {}
    for spec in specs:
        for part in spec.parts:
            known = shapes.setdefault(part.name, part.shape)
            assert known == part.shape, part.name
    return shapes


def _weight_map(directory: Path) -> dict[str, str] | None:
    """The index's name -> file, or None without an index."""
    file = directory / INDEX
    index = read_object(file)
    if index is None:
        return None
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{file} is not a safetensors index: weight_map is {weight_map!r}")
    for tensor, name in weight_map.items():
        if not isinstance(name, str):
            raise CheckpointError(
                f"{file} is not a safetensors index: weight_map[{tensor!r}] is {name!r}, no file name"
            )
    names = set(weight_map.values())
    outside = sorted(f for f in names if Path(f).name != f)
    if outside or not names:
        raise CheckpointError(f"{file} names no file of this directory: {outside or 'empty'}")
    if (directory / SINGLE).is_file() and SINGLE not in names:
        raise CheckpointError(
            f"{directory}: both {SINGLE} and {INDEX} (which does not name it); remove one of them"
        )
    return weight_map


def _only_file(directory: Path) -> Path:
    if (directory / SINGLE).is_file():
        return directory / SINGLE
    found = sorted(directory.glob("*.safetensors")) if directory.is_dir() else []
    if len(found) == 1:
        return found[0]
    if found:
        names = _names([f.name for f in found])
        raise CheckpointError(
            f"{directory}: {len(found)} safetensors files but no {INDEX}: {names}"
        )
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: no such directory")
    other = sorted(f.name for p in ("*.bin", "*.gguf", "*.pt", "*.pth") for f in directory.glob(p))
    hint = f" (found {_names(other)}: only safetensors is read)" if other else ""
    raise CheckpointError(f"{directory}: no {SINGLE} and no {INDEX}{hint}")


def _read_headers(directory: Path, files: list[Path]) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    bad, twice = [], []
    for file in files:
        try:
            header = read_header(file)
        except BadFile as e:
            bad.append(f"{file.name} {e}")
            continue
        twice += [f"{n} ({tensors[n].file.name}, {file.name})" for n in header if n in tensors]
        tensors |= header
    if bad:
        raise CheckpointError(f"{directory}: {_names(bad, '; ')}")
    if twice:
        raise CheckpointError(
            f"{directory}: {_count(twice, 'tensor')} in two files: {_names(twice)}"
        )
    return tensors


def _compare_with_index(
    directory: Path, weight_map: dict[str, str], tensors: dict[str, TensorInfo]
) -> None:
    absent = [f"{n} (not in {f})" for n, f in weight_map.items() if n not in tensors]
    moved = [
        f"{n} ({weight_map[n]} in the index, {t.file.name} in fact)"
        for n, t in tensors.items()
        if n in weight_map and weight_map[n] != t.file.name
    ]
    unlisted = [
        f"{n} (in {t.file.name}, not in the index)"
        for n, t in tensors.items()
        if n not in weight_map and not _IGNORABLE.search(n)
    ]
    problems = absent + moved + unlisted
    if problems:
        raise CheckpointError(
            f"{directory}: {INDEX} disagrees with the files on {_count(problems, 'tensor')}: "
            f"{_names(problems)}"
        )


def _count(items: list, noun: str) -> str:
    return f"{len(items)} {noun}{'' if len(items) == 1 else 's'}"


def _names(items: list[str], separator: str = ", ") -> str:
    more = len(items) - _LISTED
    shown = separator.join(items[:_LISTED])
    return f"{shown}{separator}and {more} more" if more > 0 else shown
