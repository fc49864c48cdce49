"""FP8 checkpoints as they are on the hub: which schemes are read, and what their scales look like.

A stored weight is float8_e4m3fn [N, K]; its value is weight * scale. All of these multiply,
whatever the name: `weight_scale` (compressed-tensors, AutoFP8, ModelOpt) and `weight_scale_inv`
(block FP8).

| scheme (quant_method, format) | scale tensor | shape |
|---|---|---|
| compressed-tensors, float-quantized, per channel | weight_scale | [N, 1] or [N] |
| compressed-tensors per tensor; fp8 (AutoFP8); modelopt FP8 | weight_scale | [] or [1] |
| fp8 with weight_block_size [b, b]; compressed-tensors block | weight_scale_inv / weight_scale | [ceil(N/b), ceil(K/b)] |

Activations stay 16-bit here, so scales of activations and of the KV cache are read past.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.checkpoint.safetensors_header import TensorInfo
from engine.errors import CheckpointError
from engine.metadata import read_object

SCALE_DTYPES = ("F32", "BF16", "F16")
# Scales of what we keep in 16 bits: activations, KV cache.
SKIPPED = re.compile(r"\.(input_scale|output_scale|[qkv]_scale|input_zero_point|kv_scale)$")

# Names that give a quantised checkpoint away even when config.json does not say so.
_QUANTIZED_NAMES = {
    "qweight": "GPTQ or AWQ",
    "qzeros": "GPTQ or AWQ",
    "weight_packed": "compressed-tensors pack-quantized",
    "weight_scale_inv": "FP8 blocks without a quantization_config",
    "weight_scale": "weight_scale without a quantization_config",
    "weight_scale_2": "ModelOpt NVFP4",
    "SCB": "bitsandbytes INT8",
    "absmax": "bitsandbytes NF4",
}
_FP8_ONLY = {"weight_scale", "weight_scale_inv"}


@dataclass(frozen=True)
class Scheme:
    """A quantisation that is read: its name for messages, and the side of a scale block (0:
    none)."""

    name: str
    block: int = 0


def scheme_of(directory: Path) -> Scheme | None:
    """Scheme of a directory from config.json or ModelOpt's hf_quant_config.json; None: not
    quantised.

    Raises CheckpointError that names a scheme which is not read, or a file that cannot be."""
    for file in ("config.json", "hf_quant_config.json"):
        config = read_object(directory / file) or {}
        quantization = config.get("quantization_config") or config.get("quantization")
        if isinstance(quantization, dict):
            return _read(directory, quantization)
    return None


def refuse_unknown_quantized(
    directory: Path, tensors: Iterable[str], scheme: Scheme | None
) -> None:
    """Raise CheckpointError if tensor names betray a scheme that is not read."""
    for name in tensors:
        suffix = name.rpartition(".")[2]
        if suffix in _QUANTIZED_NAMES and not (scheme and suffix in _FP8_ONLY):
            raise _unsupported(directory, f"{_QUANTIZED_NAMES[suffix]}, as {name} shows")


def scale_of(weight: TensorInfo, tensors: Mapping[str, TensorInfo]) -> TensorInfo | None:
    """The scale tensor of a stored FP8 weight `X.weight`: `X.weight_scale` or
    `X.weight_scale_inv`."""
    return tensors.get(weight.name + "_scale") or tensors.get(weight.name + "_scale_inv")


def scale_shapes(weight: TensorInfo, scheme: Scheme) -> list[tuple[int, ...]]:
    """Shapes that the scale of this weight may have."""
    rows, cols = weight.shape
    if scheme.block:
        return [(-(-rows // scheme.block), -(-cols // scheme.block))]
    return [(rows, 1), (rows,), (), (1,), (1, 1)]


def _read(directory: Path, q: dict[str, Any]) -> Scheme:
    algorithm = q.get("quant_algo")  # ModelOpt's key; its own file has no quant_method
    method = str(q.get("quant_method") or ("modelopt" if algorithm else "unnamed")).lower()
    block = q.get("weight_block_size")
    name = method
    if method == "compressed-tensors":
        name, block = _compressed_tensors(directory, q)
    elif method in ("modelopt", "fp8") and str(algorithm or "FP8").upper() == "FP8":
        if q.get("fmt", "e4m3") != "e4m3":
            raise _unsupported(directory, f"{method} {q['fmt']}")
    else:
        raise _unsupported(directory, f"{method} {algorithm}" if algorithm else method)
    if block is None:
        return Scheme(name)
    if len(block) != 2 or block[0] != block[1] or block[0] < 1:
        raise _unsupported(directory, f"{name} with blocks of {block}")
    return Scheme(f"{name}, blocks of {block[0]}", block[0])


def _compressed_tensors(directory: Path, q: dict[str, Any]) -> tuple[str, list[int] | None]:
    form = q.get("format", "unnamed")
    name = f"compressed-tensors ({form})"
    groups = list((q.get("config_groups") or {}).values())
    weights = [g.get("weights") or {} for g in groups]
    fp8 = all(w.get("type") == "float" and w.get("num_bits") == 8 for w in weights)
    if form not in ("float-quantized", "naive-quantized") or not weights or not fp8:
        raise _unsupported(directory, name)
    strategies = {w.get("strategy") for w in weights}
    if len(strategies) != 1 or not strategies <= {"channel", "tensor", "block"}:
        raise _unsupported(directory, f"{name} with strategies {sorted(map(str, strategies))}")
    return name, weights[0].get("block_structure") if strategies == {"block"} else None


def _unsupported(directory: Path, scheme: str) -> CheckpointError:
    return CheckpointError(
        f"{directory}: quantised checkpoint ({scheme}) is not supported; FP8 e4m3 checkpoints "
        "(compressed-tensors, fp8, ModelOpt) are, and BF16/FP16 ones with --quantization fp8"
    )
