"""Named model shapes for `--load-format dummy`: random weights, real sizes (from the models' config.json)."""

from __future__ import annotations

from dataclasses import replace

from engine.errors import EngineError
from engine.model_config import ModelConfig, RopeScaling


def _qwen(
    name: str, h: int, layers: int, heads: int, kv: int, inter: int, vocab: int, tied: bool
) -> ModelConfig:
    return ModelConfig(
        name=name,
        architecture="Qwen2ForCausalLM",
        hidden_size=h,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv,
        head_dim=h // heads,
        intermediate_size=inter,
        vocab_size=vocab,
        rope_theta=1e6,
        rms_norm_eps=1e-6,
        max_position_embeddings=32768,
        tie_word_embeddings=tied,
        attention_bias=True,
        eos_token_ids=(151645, 151643),
    )


def _qwen3(name: str, h: int, layers: int, heads: int, inter: int) -> ModelConfig:
    base = _qwen(name, h, layers, heads, 8, inter, 151936, False)
    return replace(
        base, architecture="Qwen3ForCausalLM", head_dim=128, attention_bias=False, qk_norm=True,
        max_position_embeddings=40960, eos_token_ids=(151645, 151643),
    )  # fmt: skip


def _llama(name: str, h: int, layers: int, heads: int, inter: int) -> ModelConfig:
    base = _qwen(name, h, layers, heads, 8, inter, 128256, False)
    return replace(
        base, architecture="LlamaForCausalLM", attention_bias=False, rope_theta=5e5, rms_norm_eps=1e-5,
        max_position_embeddings=131072, eos_token_ids=(128001, 128008, 128009),
        rope_scaling=RopeScaling("llama3", 8.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0),
    )  # fmt: skip


def _mistral(name: str, h: int, layers: int, heads: int, inter: int) -> ModelConfig:
    base = _qwen(name, h, layers, heads, 8, inter, 32768, False)
    return replace(
        base, architecture="MistralForCausalLM", attention_bias=False, rope_theta=1e6, rms_norm_eps=1e-5,
        eos_token_ids=(2,),
    )  # fmt: skip


PRESETS: dict[str, ModelConfig] = {
    c.name: c
    for c in (
        _qwen("qwen2.5-0.5b", 896, 24, 14, 2, 4864, 151936, True),
        _qwen("qwen2.5-1.5b", 1536, 28, 12, 2, 8960, 151936, True),
        _qwen("qwen2.5-3b", 2048, 36, 16, 2, 11008, 151936, True),
        _qwen("qwen2.5-7b", 3584, 28, 28, 4, 18944, 152064, False),
        _qwen("qwen2.5-14b", 5120, 48, 40, 8, 13824, 152064, False),
        _qwen("qwen2.5-32b", 5120, 64, 40, 8, 27648, 152064, False),
        _qwen("qwen2.5-72b", 8192, 80, 64, 8, 29568, 152064, False),
        _qwen3("qwen3-8b", 4096, 36, 32, 12288),
        _qwen3("qwen3-14b", 5120, 40, 40, 17408),
        _qwen3("qwen3-32b", 5120, 64, 64, 25600),
        _llama("llama-3.1-8b", 4096, 32, 32, 14336),
        _llama("llama-3.1-70b", 8192, 80, 64, 28672),
        _mistral("mistral-7b", 4096, 32, 32, 14336),  # v0.3: no sliding window
    )
}


_HUB = {
    "qwen2.5": "Qwen/Qwen2.5-{}-Instruct",
    "qwen3": "Qwen/Qwen3-{}",
    "llama-3.1": "meta-llama/Llama-3.1-{}-Instruct",
    "mistral": "mistralai/Mistral-{}-Instruct-v0.3",
}


def hub_id(name: str) -> str:
    """The hub id of the model whose shape a preset has."""
    family, _, size = name.rpartition("-")
    return _HUB[family].format(size.upper())


def preset(name: str) -> ModelConfig:
    """A named shape for `--load-format dummy`; the hub's spelling is understood. Raises EngineError."""
    key = name.lower().rpartition("/")[2].removesuffix("-instruct")
    if key not in PRESETS:
        raise EngineError(
            f"no preset {name!r} for --load-format dummy; presets: {', '.join(PRESETS)}"
        )
    return PRESETS[key]


def with_layers(config: ModelConfig, layers: int) -> ModelConfig:
    """The same shape with another depth (tests and benchmarks)."""
    return replace(config, num_layers=layers)
