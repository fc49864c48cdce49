"""RoPE settings of a config.json: `rope_theta` and `rope_scaling`, or `rope_parameters` (transformers 5)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from engine.errors import EngineError
from engine.model_config import RopeScaling

_COMMON = {
    "rope_type", "type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings"
}  # fmt: skip
_KEYS: dict[str, set[str]] = {
    "default": set(),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor"},
    "yarn": {"factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"},
}  # fmt: skip


@dataclass(frozen=True)
class Rope:
    """positions: the longest context that the model is meant for."""

    theta: float
    scaling: RopeScaling | None
    positions: int


def read_rope(config: dict[str, Any], name: str, positions: int) -> Rope:
    """RoPE of a model with `positions` max_position_embeddings. Raises EngineError for unknown kinds and keys."""
    rope = _merged(config, name)
    kind = _kind(rope, name)
    unknown = sorted(
        key for key, value in rope.items()
        if key not in _COMMON | _KEYS[kind] and value not in (None, False, 1)
    )  # fmt: skip
    if unknown:
        shown = ", ".join(f"{key} = {rope[key]}" for key in unknown)
        raise EngineError(f"{name}: RoPE of type {kind!r} with {shown} is not implemented")
    rotary = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if rotary not in (None, 1):
        raise EngineError(
            f"{name}: partial_rotary_factor {rotary} is not implemented; supported: 1.0"
        )
    theta = config.get("rope_theta")
    theta = _number(rope, "rope_theta", name, 10000.0 if theta is None else theta)
    if kind == "default":
        return Rope(theta, None, positions)
    # As transformers has it: the key outside the dict wins, and silence means max_position_embeddings.
    given = config.get("original_max_position_embeddings")
    given = given or rope.get("original_max_position_embeddings")
    original = int(_number({"original": given}, "original", name, positions))
    if kind == "linear":
        return Rope(theta, RopeScaling("linear", _factor(rope, kind, name)), positions)
    if kind == "llama3":
        low, high = (_number(rope, f"{which}_freq_factor", name) for which in ("low", "high"))
        if not low < high:
            raise EngineError(f"{name}: llama3 RoPE needs low_freq_factor {low} < {high}")
        factor = _factor(rope, kind, name)
        return Rope(theta, RopeScaling("llama3", factor, original, low, high), positions)
    return _yarn(rope, name, theta, original, positions, stated=given is not None)


def yarn_attention_factor(
    factor: float, mscale: float | None = None, mscale_all_dim: float | None = None
) -> float:
    """What YaRN multiplies cos and sin by when the checkpoint gives no attention_factor (its section 3.4; the
    ratio of two such terms is DeepSeek's variant)."""

    def term(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if mscale and mscale_all_dim:
        return term(mscale) / term(mscale_all_dim)
    return term(1.0)


def _yarn(
    rope: dict[str, Any], name: str, theta: float, original: int, positions: int, stated: bool
) -> Rope:
    if "factor" in rope and rope["factor"] is None:  # DeepSeek: the ratio of the two lengths
        rope = {**rope, "factor": positions / original}
    factor = _factor(rope, "yarn", name)
    attention = rope.get("attention_factor")
    if attention is None:
        attention = yarn_attention_factor(factor, rope.get("mscale"), rope.get("mscale_all_dim"))
    scaling = RopeScaling(
        "yarn", factor, original,
        beta_fast=_number(rope, "beta_fast", name, 32.0), beta_slow=_number(rope, "beta_slow", name, 1.0),
        truncate=bool(rope.get("truncate", True)), attention_factor=float(attention),
    )  # fmt: skip
    # Qwen's recipe adds YaRN to a config whose max_position_embeddings stays the original length.
    longest = max(positions, int(original * factor)) if stated else positions
    return Rope(theta, scaling, longest)


def _merged(config: dict[str, Any], name: str) -> dict[str, Any]:
    """Both spellings as one dict."""
    merged: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        given = config.get(key) or {}
        if not isinstance(given, dict):
            raise EngineError(f"{name}: {key} {given!r} in config.json is not an object")
        nested = sorted(k for k, value in given.items() if isinstance(value, dict))
        if nested:
            raise EngineError(
                f"{name}: {key} gives RoPE by layer type ({', '.join(nested)}), not implemented"
            )
        clash = sorted(k for k in given if k in merged and merged[k] != given[k])
        if clash:
            raise EngineError(
                f"{name}: rope_scaling and rope_parameters disagree on {', '.join(clash)}"
            )
        merged |= given
    return merged


def _kind(rope: dict[str, Any], name: str) -> str:
    kinds = {rope[key] for key in ("rope_type", "type") if rope.get(key) is not None}
    if len(kinds) > 1:
        raise EngineError(
            f"{name}: RoPE's rope_type {rope['rope_type']!r} and type {rope['type']!r} differ"
        )
    kind = kinds.pop() if kinds else "default"
    if kind not in _KEYS:
        raise EngineError(
            f"{name}: rope scaling {kind!r} is not supported; supported: {', '.join(_KEYS)}"
        )
    return kind


def _factor(rope: dict[str, Any], kind: str, name: str) -> float:
    factor = _number(rope, "factor", name)
    if factor < 1:
        raise EngineError(f"{name}: {kind} RoPE factor {factor} is under 1")
    return factor


def _number(rope: dict[str, Any], key: str, name: str, default: float | None = None) -> float:
    value = rope.get(key)
    value = default if value is None else value
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < math.inf:
        raise EngineError(f"{name}: RoPE needs {key} as a number over 0, config.json has {value!r}")
    return float(value)
