"""Which Hugging Face architectures run here, and how their config.json is read.

An architecture is a description (`Architecture`); everything else is one path. A key of config.json is read, or
known not to matter, or its name says that it changes the maths: then it is an error, never silently ignored.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.errors import EngineError
from engine.metadata import read_object
from engine.model_config import ModelConfig, read_eos
from engine.rope_config import read_rope


@dataclass(frozen=True)
class Architecture:
    """A pre-norm decoder with RMSNorm, RoPE, GQA and SwiGLU; what is said here is where they differ."""

    name: str  # in config.json's "architectures"
    model_type: str
    qkv_bias: bool = False  # on q, k and v, never on o
    qk_norm: bool = False
    window_is_flagged: bool = False  # sliding_window counts only with use_sliding_window
    # What the architecture's own configuration class takes where config.json is silent.
    defaults: Mapping[str, Any] = field(default_factory=dict)
    neutral: frozenset[str] = frozenset()  # keys that this architecture does not look at


ARCHITECTURES: dict[str, Architecture] = {
    a.name: a
    for a in (
        Architecture(
            "Qwen2ForCausalLM", "qwen2", qkv_bias=True, window_is_flagged=True,
            defaults={"num_key_value_heads": 32, "max_position_embeddings": 32768, "sliding_window": 4096},
            neutral=frozenset({"attention_bias", "qkv_bias"}),
        ),
        Architecture(
            "Qwen3ForCausalLM", "qwen3", qk_norm=True, window_is_flagged=True,
            defaults={"num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 32768,
                      "sliding_window": 4096},
        ),
        Architecture("LlamaForCausalLM", "llama"),
        Architecture(
            "MistralForCausalLM", "mistral",
            defaults={"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
        ),
    )
}  # fmt: skip

_REQUIRED = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size"
)  # fmt: skip
_READ = {
    *_REQUIRED, "architectures", "model_type", "hidden_act", "num_key_value_heads", "head_dim",
    "rms_norm_eps", "max_position_embeddings", "tie_word_embeddings", "eos_token_id", "dtype",
    "torch_dtype", "rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor",
    "original_max_position_embeddings", "sliding_window", "use_sliding_window", "max_window_layers",
    "layer_types",
    "quantization_config", "compression_config", "quantization",  # engine/checkpoint/scheme.py
}  # fmt: skip
# Names that look like maths and are none: training, other heads, ways to compute the same.
_NEUTRAL = {
    "attention_dropout", "hidden_dropout", "resid_dropout", "embd_dropout", "classifier_dropout",
    "output_attentions", "output_hidden_states", "attn_implementation", "_attn_implementation",
    "_attn_implementation_internal", "_attn_implementation_autoset", "_flash_attn_2_enabled",
    "use_flash_attn", "use_flash_attention_2", "attn_impl", "chunk_size_feed_forward",
    "output_router_logits",
}  # fmt: skip
_MATHS = re.compile(
    "rope|rotary|yarn|alibi|norm|bias|scal|cap|window|att|expert|moe|router|multipl|resid|embed|logit|mlp|mask|sink|"
    "clip|act|parallel|spars|cross|layer|head|hidden|kv|qk|query|key|value"
)


def from_hf(config: dict[str, Any], name: str) -> ModelConfig:
    """ModelConfig from the dict of an HF `config.json`. Raises EngineError for what we do not implement."""
    arch = _architecture(config, name)
    missing = [key for key in _REQUIRED if config.get(key) is None]
    if missing:
        raise EngineError(f"{name}: config.json lacks {', '.join(missing)}")
    _refuse_unknown(config, arch, name)

    def size(key: str, default: int | None = None) -> int:
        value = _get(config, arch, key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise EngineError(
                f"{name}: {key} {value!r} in config.json is not a whole number over 0"
            )
        return value

    eps = _get(config, arch, "rms_norm_eps", 1e-6)
    if isinstance(eps, bool) or not isinstance(eps, (int, float)) or not 0 < eps < 1:
        raise EngineError(
            f"{name}: rms_norm_eps {eps!r} in config.json is not a number over 0 and under 1"
        )
    heads, hidden = size("num_attention_heads"), size("hidden_size")
    layers = size("num_hidden_layers")
    rope = read_rope(config, name, size("max_position_embeddings", 2048))
    vocab = size("vocab_size")
    result = ModelConfig(
        name=name,
        architecture=arch.name,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=size("num_key_value_heads", heads),
        head_dim=size("head_dim", hidden // heads),
        intermediate_size=size("intermediate_size"),
        vocab_size=vocab,
        rope_theta=rope.theta,
        rms_norm_eps=eps,
        max_position_embeddings=rope.positions,
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        attention_bias=arch.qkv_bias,
        qk_norm=arch.qk_norm,
        rope_scaling=rope.scaling,
        sliding_window=_window(config, arch, name, layers),
        checkpoint_dtype=str(config.get("dtype") or config.get("torch_dtype") or "bfloat16"),
        eos_token_ids=read_eos(config.get("eos_token_id"), vocab, f"{name}: config.json"),
    )
    if result.num_heads % result.num_kv_heads:
        raise EngineError(
            f"{name}: {heads} attention heads are not a multiple of {result.num_kv_heads} KV heads"
        )
    if result.head_dim % 16 or result.head_dim > 256:
        raise EngineError(f"{name}: head_dim {result.head_dim} is not a multiple of 16 up to 256")
    return result


def from_dir(path: str | Path) -> ModelConfig:
    """ModelConfig of a local HF model directory. Raises EngineError."""
    file = Path(path) / "config.json"
    config = read_object(file)
    if config is None:
        raise EngineError(
            f"{path}: no config.json; --model takes a Hugging Face model directory or hub id"
        )
    return from_hf(config, name=Path(path).name)


def _architecture(config: dict, name: str) -> Architecture:
    listed = config.get("architectures") or []
    if not isinstance(listed, list) or not isinstance(listed[0] if listed else "", str):
        raise EngineError(f"{name}: architectures {listed!r} in config.json is not a list of names")
    model_type = config.get("model_type")
    by_type = {a.model_type: a.name for a in ARCHITECTURES.values()}
    found = listed[0] if listed else by_type.get(str(model_type), "")
    if found not in ARCHITECTURES:
        raise EngineError(
            f"{name}: architecture {found or model_type!r} is not supported; "
            f"supported: {', '.join(ARCHITECTURES)}"
        )
    return ARCHITECTURES[found]


def _get(config: dict, arch: Architecture, key: str, default: Any = None) -> Any:
    """A key's value; null and absent mean what the architecture's own class takes."""
    if key in config and config[key] is not None:
        return config[key]
    return default if key in config else arch.defaults.get(key, default)


def _refuse_unknown(config: dict, arch: Architecture, name: str) -> None:
    if config.get("hidden_act", "silu") != "silu":
        raise EngineError(
            f"{name}: hidden_act {config['hidden_act']!r} is not supported; supported: silu"
        )
    unknown = [
        key
        for key, value in config.items()
        if key not in _READ | _NEUTRAL | arch.neutral and _MATHS.search(key) and _active(key, value)
    ]
    if unknown:
        shown = ", ".join(f"{key} = {json.dumps(config[key])}" for key in sorted(unknown))
        raise EngineError(
            f"{name}: config.json sets {shown}, which this engine does not implement for {arch.name}; if it "
            "does not change what the model computes, delete it from config.json"
        )


def _active(key: str, value: Any) -> bool:
    """Whether a setting does anything: off, empty, and factors of one do not."""
    if not value:
        return False
    return not (value == 1 and key.endswith(("factor", "multiplier", "scale", "scaling")))


def _window(config: dict, arch: Architecture, name: str, layers: int) -> int | None:
    """Keys that a token of some layer attends to at most, or None."""
    if arch.window_is_flagged and not config.get("use_sliding_window"):
        return None
    types = config.get("layer_types")
    if types is not None:
        if not isinstance(types, list):
            raise EngineError(f"{name}: layer_types {types!r} in config.json is not a list")
        unknown = sorted({str(t) for t in types} - {"full_attention", "sliding_attention"})
        if unknown:
            raise EngineError(f"{name}: layer_types {', '.join(unknown)} are not implemented")
        if "sliding_attention" not in types:
            return None
    elif arch.window_is_flagged and config.get("max_window_layers", 28) >= layers:
        return None  # only layers from max_window_layers on have a window
    window = config.get("sliding_window", arch.defaults.get("sliding_window"))
    if window is None:
        return None
    if isinstance(window, bool) or not isinstance(window, int) or window < 1:
        raise EngineError(f"{name}: sliding_window {window!r} is not a whole number over 0")
    return window
