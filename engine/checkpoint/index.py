"""A Hugging Face model directory opened by its headers alone: name -> (file, dtype, shape).

Everything that can be wrong with a checkpoint is found here, before a tensor is read or a GPU touched.
Problems of one kind are listed together in one CheckpointError, each with its file or tensor.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from engine.checkpoint.safetensors_header import BadFile, TensorInfo, read_header
from engine.errors import CheckpointError
from engine.weights import WeightSpec

log = logging.getLogger(__name__)

READABLE_DTYPES = ("BF16", "F16", "F32")
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

# Buffers that old exporters wrote and that we compute ourselves.
_IGNORABLE = re.compile(r"(^|\.)(rotary_emb\.inv_freq|attn\.(masked_)?bias)$")
_LISTED = 8  # names shown of a long list

# Names that give a quantised checkpoint away even when config.json does not say so.
_QUANTIZED_NAMES = (
    ("qweight", "GPTQ or AWQ"),
    ("qzeros", "GPTQ or AWQ"),
    ("weight_packed", "compressed-tensors pack-quantized"),
    ("weight_scale_inv", "block FP8"),
    ("weight_scale", "FP8 with weight_scale"),
    ("weight_scale_2", "ModelOpt NVFP4"),
    ("SCB", "bitsandbytes INT8"),
    ("absmax", "bitsandbytes NF4"),
)


@dataclass(frozen=True)
class CheckpointIndex:
    """The tensors of one directory. `tensors[name].file` is the file that holds it."""

    directory: Path
    tensors: Mapping[str, TensorInfo]

    @property
    def files(self) -> list[Path]:
        """The files, in name order."""
        return sorted({t.file for t in self.tensors.values()})

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.nbytes for t in self.tensors.values())

    def check(self, specs: Iterable[WeightSpec]) -> None:
        """Compare with what the model asks for: names (missing, unknown), shapes, dtypes.

        Raises CheckpointError. Ignored: rotary inv_freq buffers, and an lm_head.weight that no spec
        asks for (tied embeddings; `CheckpointSource` compares it with the embedding)."""
        expected = expected_shapes(specs)
        have = {n: t for n, t in self.tensors.items() if not _IGNORABLE.search(n)}
        where = str(self.directory)
        missing = [n for n in expected if n not in have]
        unknown = [n for n in have if n not in expected and n != "lm_head.weight"]
        if missing or unknown:
            parts = []
            if missing:
                parts.append(f"{_count(missing, 'tensor')} missing: {_names(missing)}")
                if missing == ["lm_head.weight"]:
                    parts[-1] += ' (set "tie_word_embeddings": true if it shares the embedding)'
            if unknown:
                parts.append(
                    f"{_count(unknown, 'tensor')} unknown to this model: {_names(unknown)}"
                )
            raise CheckpointError(f"{where}: {'; '.join(parts)}")
        wrong = [
            f"{n} is {list(have[n].shape)}, config.json asks for {list(shape)}"
            for n, shape in expected.items()
            if have[n].shape != shape
        ]
        if wrong:
            raise CheckpointError(f"{where}: wrong shape: {_names(wrong, '; ')}")
        bad = [f"{n} is {have[n].dtype}" for n in expected if have[n].dtype not in READABLE_DTYPES]
        if bad:
            raise CheckpointError(
                f"{where}: unsupported dtype: {_names(bad)}; supported: {', '.join(READABLE_DTYPES)}"
            )


def open_checkpoint(directory: str | Path) -> CheckpointIndex:
    """Read the index (if any) and every header of a model directory; no tensor data.

    Raises CheckpointError: no safetensors, missing or truncated files, an index that disagrees with
    the files, a tensor in two files, a quantisation scheme that is not read."""
    directory = Path(directory)
    _refuse_quantized_config(directory)
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
    _refuse_quantized_names(directory, tensors)
    return CheckpointIndex(directory, tensors)


def expected_shapes(specs: Iterable[WeightSpec]) -> dict[str, tuple[int, ...]]:
    """HF name -> whole shape of every tensor that the specs are made of."""
    shapes: dict[str, tuple[int, ...]] = {}
    for spec in specs:
        for part in spec.parts:
            assert shapes.setdefault(part.name, part.shape) == part.shape, part.name
    return shapes


def _weight_map(directory: Path) -> dict[str, str] | None:
    """The index's name -> file, or None without an index."""
    file = directory / INDEX
    if not file.is_file():
        return None
    try:
        weight_map = json.loads(file.read_text(encoding="utf-8"))["weight_map"]
        names = set(weight_map.values())
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise CheckpointError(f"{file} is not a safetensors index: {e!r}") from None
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


def _refuse_quantized_config(directory: Path) -> None:
    scheme = None
    for name in ("config.json", "hf_quant_config.json"):
        try:
            config = json.loads((directory / name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue  # config.py reports a missing or damaged config.json
        quantization = config.get("quantization_config") or config.get("quantization")
        if isinstance(quantization, dict):
            scheme = quantization.get("quant_method") or quantization.get("quant_algo") or "unnamed"
            if quantization.get("format"):
                scheme = f"{scheme} ({quantization['format']})"
            break
    if scheme:
        raise _quantized(directory, scheme)


def _refuse_quantized_names(directory: Path, tensors: Iterable[str]) -> None:
    for name in tensors:
        for suffix, scheme in _QUANTIZED_NAMES:
            if name.endswith("." + suffix):
                raise _quantized(directory, f"{scheme}, as {name} shows")


def _quantized(directory: Path, scheme: str) -> CheckpointError:
    return CheckpointError(
        f"{directory}: quantised checkpoint ({scheme}) is not supported; give the BF16/FP16 original, "
        "with --quantization fp8 to store it in 8 bits"
    )


def _count(items: list, noun: str) -> str:
    return f"{len(items)} {noun}{'' if len(items) == 1 else 's'}"


def _names(items: list[str], separator: str = ", ") -> str:
    more = len(items) - _LISTED
    shown = separator.join(items[:_LISTED])
    return f"{shown}{separator}and {more} more" if more > 0 else shown
