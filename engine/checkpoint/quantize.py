"""A BF16/FP16/FP32 checkpoint -> an FP8 one, as compressed-tensors: the work of `python -m engine.quantize`."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from engine.checkpoint.fp8 import FP8_DTYPE, FP8_MAX
from engine.checkpoint.index import INDEX, CheckpointIndex, open_checkpoint
from engine.checkpoint.load import LoadProgress
from engine.checkpoint.source import CheckpointSource
from engine.config import from_dir
from engine.errors import CheckpointError, EngineError
from engine.graph import weight_specs
from engine.weights import Part

LINEAR = re.compile(r"^model\.layers\.(\d+)\..*\b([qkvo]|gate|up|down)_proj\.weight$")
SHARD_BYTES = 5_000_000_000
_COPIED = ("*.json", "*.jinja", "tokenizer*", "merges.txt", "vocab.*", "LICENSE*", "README*")

QUANTIZATION_CONFIG = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "type": "float", "num_bits": 8, "strategy": "channel",
                "symmetric": True, "dynamic": False,
            },
            "input_activations": {
                "type": "float", "num_bits": 8, "strategy": "token",
                "symmetric": True, "dynamic": True,
            },
        }
    },
    "ignore": ["lm_head"],
    "kv_cache_scheme": None,
}  # fmt: skip


@dataclass(frozen=True)
class LayerError:
    """Error of one quantised tensor: RMS of (w - q s) over RMS of w, and the largest |w - q s| over
    the largest |w| of its row."""

    name: str
    rms: float
    largest: float


def quantize_rows_bf16_scale(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[N, K] -> (float8_e4m3fn [N, K], bf16 scale [N, 1]): the least bf16 scale >= max|row| / 448;
    1 for a row of zeros."""
    w = weight.float()
    amax = torch.maximum(w.amax(1, keepdim=True), -w.amin(1, keepdim=True))
    exact = torch.where(amax < FP8_MAX * torch.finfo(torch.float32).tiny, 1.0, amax / FP8_MAX)
    scale = exact.bfloat16()
    # The next bf16 up where rounding to nearest went down: positive floats are ordered as integers.
    up = (scale.view(torch.int16) + 1).view(torch.bfloat16)
    scale = torch.where(scale.float() < exact, up, scale)
    return (w / scale.float()).clamp_(-FP8_MAX, FP8_MAX).to(FP8_DTYPE), scale


def quantize_checkpoint(
    source: Path, destination: Path, shard_bytes: int = SHARD_BYTES
) -> list[LayerError]:
    """Write the FP8 checkpoint; the errors of every quantised tensor, in file order.

    Memory: one output shard and one tensor. `destination` appears whole or not at all.
    Raises EngineError / CheckpointError, before any work, for a source that is damaged, quantised already or of an
    unknown architecture, a destination that exists or cannot be written; later for values that are
    not finite."""
    config = from_dir(source)  # refuses architectures whose linear layers have other names
    index = open_checkpoint(source)
    if index.scheme:
        raise CheckpointError(f"{source} is quantised already ({index.scheme.name})")
    # What loading the result would refuse: a tensor that is missing, or of another shape than the config has.
    index.check(list(index.adapt(weight_specs(config, tp=1)).values()))
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise EngineError(f"{destination} exists and is not an empty directory")
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{destination.name}-", dir=destination.parent))
    except OSError as e:
        raise EngineError(f"cannot write {destination}: {e.strerror}") from None
    try:
        work.chmod(0o755)
        _copy_other_files(source, work)
        errors = _write_shards(index, work, shard_bytes)
        if destination.exists():
            destination.rmdir()  # empty: checked above
        os.rename(work, destination)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return errors


def _write_shards(index: CheckpointIndex, work: Path, shard_bytes: int) -> list[LayerError]:
    errors: list[LayerError] = []
    shards = _plan_shards(index, shard_bytes)
    weight_map: dict[str, str] = {}
    total = 0
    source = CheckpointSource(index)
    with LoadProgress(index.nbytes, "quantize") as progress:
        for number, names in enumerate(shards, start=1):
            file = f"model-{number:05}-of-{len(shards):05}.safetensors"
            tensors: dict[str, torch.Tensor] = {}
            for name in names:
                info = index.tensors[name]
                value = source.read(Part(name, info.shape, None, ()), 0, "cpu")
                for key, tensor, error in _convert(name, value):
                    tensors[key] = tensor
                    if error is not None:
                        errors.append(error)
                progress(info.nbytes)
            save_file(tensors, work / file, metadata={"format": "pt"})
            (work / file).chmod(0o644)
            weight_map |= dict.fromkeys(tensors, file)
            total += sum(t.nbytes for t in tensors.values())
    header = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (work / INDEX).write_text(json.dumps(header, indent=2) + "\n", encoding="utf-8")
    return errors


def _convert(
    name: str, value: torch.Tensor
) -> Iterator[tuple[str, torch.Tensor, LayerError | None]]:
    """The tensors that one source tensor becomes. Raises CheckpointError for NaN or inf."""
    if not value.sum(dtype=torch.float32).isfinite():
        raise CheckpointError(f"NaN or infinite values in {name}")
    if not LINEAR.match(name):
        yield name, value, None
        return
    quantized, scale = quantize_rows_bf16_scale(value)
    w = value.float()
    error = quantized.float().mul_(scale.float()).sub_(w)
    rms = (error.norm() / w.norm().clamp_min(torch.finfo(torch.float32).tiny)).item()
    row = w.abs().amax(1).clamp_min(torch.finfo(torch.float32).tiny)
    largest = (error.abs().amax(1) / row).max().item()
    yield name, quantized, LayerError(name, rms, largest)
    yield name + "_scale", scale, None


def _plan_shards(index: CheckpointIndex, shard_bytes: int) -> list[list[str]]:
    """Source names of each output shard, in file order: at most `shard_bytes` unless one tensor
    is."""
    shards: list[list[str]] = []
    room = 0
    for name in sorted(
        index.tensors, key=lambda n: (index.tensors[n].file, index.tensors[n].offset)
    ):
        info = index.tensors[name]
        size = info.nbytes
        if LINEAR.match(name):
            rows, cols = info.shape
            size = rows * cols + 2 * rows
        if not shards or size > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(name)
        room -= size
    return shards


def _copy_other_files(source: Path, work: Path) -> None:
    for pattern in _COPIED:
        for file in source.glob(pattern):
            if file.is_file() and file.name not in (INDEX, "config.json"):
                shutil.copyfile(file, work / file.name)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = QUANTIZATION_CONFIG
    (work / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def report(errors: list[LayerError]) -> str:
    """One line a layer: the worst of its tensors by RMS; then the worst of all."""
    layers: dict[int, list[LayerError]] = {}
    for e in errors:
        layers.setdefault(_layer(e.name), []).append(e)
    lines = ["layer  worst RMS error  largest error of a row  tensor"]
    for layer, found in sorted(layers.items()):
        worst = max(found, key=lambda e: e.rms)
        lines.append(
            f"{layer:5}  {worst.rms:15.2%}  {max(e.largest for e in found):22.2%}  "
            + worst.name.removeprefix(f"model.layers.{layer}.").removesuffix(".weight")
        )
    worst = max(errors, key=lambda e: e.rms)
    lines.append(f"{len(errors)} tensors; worst {worst.name}: {worst.rms:.2%} RMS")
    return "\n".join(lines)


def _layer(name: str) -> int:
    match = LINEAR.match(name)
    assert match is not None
    return int(match[1])
