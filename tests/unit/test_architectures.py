"""config.json of each architecture: what is read, what is harmless, what is refused by name."""

from __future__ import annotations

import json
import re

import pytest
import torch

from engine.architectures import ARCHITECTURES
from engine.config import EngineConfig, RopeScaling, from_dir, from_hf
from engine.errors import EngineError
from engine.rope import rope_frequencies
from engine.runtime.state import rope_table

# The published config.json files, whole.
LLAMA_31_8B = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "hidden_act": "silu",
    "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
    "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "llama",
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                     "original_max_position_embeddings": 8192, "rope_type": "llama3"},
    "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "transformers_version": "4.42.3", "use_cache": True, "vocab_size": 128256,
}  # fmt: skip
QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu",
    "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 12288,
    "max_position_embeddings": 40960, "max_window_layers": 36, "model_type": "qwen3",
    "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.51.0",
    "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
MISTRAL_7B = {
    "architectures": ["MistralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1,
    "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
    "intermediate_size": 14336, "max_position_embeddings": 32768, "model_type": "mistral",
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "sliding_window": None,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.42.0.dev0",
    "use_cache": True, "vocab_size": 32768,
}  # fmt: skip
QWEN2_7B = {**QWEN3_8B, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 3584,
            "num_attention_heads": 28, "num_key_value_heads": 4, "intermediate_size": 18944,
            "num_hidden_layers": 28, "max_window_layers": 28, "max_position_embeddings": 32768,
            "sliding_window": 131072, "vocab_size": 152064}  # fmt: skip
YARN = {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}  # Qwen2.5's card


@pytest.mark.parametrize(
    "config, preset_name",
    [(LLAMA_31_8B, "llama-3.1-8b"), (QWEN3_8B, "qwen3-8b"), (MISTRAL_7B, "mistral-7b"), (QWEN2_7B, "qwen2.5-7b")],
)  # fmt: skip
def test_published_configs_equal_the_presets(config, preset_name):
    from dataclasses import replace

    from engine.config import PRESETS

    got = from_hf(config, preset_name)
    assert replace(got, eos_token_ids=()) == replace(PRESETS[preset_name], eos_token_ids=())
    assert set(got.eos_token_ids) <= set(PRESETS[preset_name].eos_token_ids)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_defaults_are_those_of_transformers(name):
    """Where config.json is silent, the architecture's own configuration class speaks."""
    import transformers

    base = {
        "architectures": [name], "hidden_size": 4096, "num_hidden_layers": 32,
        "num_attention_heads": 32, "intermediate_size": 4096, "vocab_size": 100,
    }  # fmt: skip
    theirs = getattr(transformers, name.replace("ForCausalLM", "Config"))(**base)
    ours = from_hf(base, "m")
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 128)
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.sliding_window == getattr(theirs, "sliding_window", None)


@pytest.mark.parametrize(
    "changes",
    [
        {"partial_rotary_factor": 1.0}, {"rope_parameters": {"partial_rotary_factor": 1.0, "rope_theta": 5e5}},
        {"unsloth_version": "2025.1", "model_name": "x"}, {"residual_multiplier": 1.0},
        {"_attn_implementation_autoset": True}, {"num_experts": None, "final_logit_softcapping": None},
        {"transformers.js_config": {"kv_cache_dtype": {"fp16": "float16"}}, "rope_interleaved": False},
        {"auto_map": {"AutoModel": "x.y"}, "torchscript": False, "max_length": 20, "attention_dropout": 0.1},
    ],
)  # fmt: skip
def test_harmless_keys(changes):
    plain = {k: v for k, v in LLAMA_31_8B.items() if k != "rope_scaling"}
    assert from_hf({**plain, **changes}, "m") == from_hf(plain, "m")


@pytest.mark.parametrize(
    "base, changes, message",
    [
        (LLAMA_31_8B, {"architectures": ["GPT2LMHeadModel"]}, "architecture 'GPT2LMHeadModel' is not"),
        (LLAMA_31_8B, {"architectures": None, "model_type": "t5"}, "architecture 't5' is not supported"),
        (LLAMA_31_8B, {"architectures": [], "model_type": None},
            "supported: Qwen2ForCausalLM, Qwen3ForCausalLM, LlamaForCausalLM, MistralForCausalLM"),
        (LLAMA_31_8B, {"architectures": "LlamaForCausalLM"},
            "architectures 'LlamaForCausalLM' in config.json is not a list of names"),
        (LLAMA_31_8B, {"architectures": [5]}, "architectures [5] in config.json is not a list of names"),
        (MISTRAL_7B, {"layer_types": 5}, "layer_types 5 in config.json is not a list"),
        (LLAMA_31_8B, {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; supported: silu"),
        (LLAMA_31_8B, {"final_logit_softcapping": 30.0, "alibi": True}, "alibi = true, final_logit_softcapping = 30.0"),
        (LLAMA_31_8B, {"mlp_bias": True}, "mlp_bias = true, which this engine does not implement"),
        (LLAMA_31_8B, {"attention_bias": True}, "attention_bias = true"),
        (LLAMA_31_8B, {"num_key_value_heads": 5}, "32 attention heads are not a multiple of 5 KV heads"),
        (LLAMA_31_8B, {"head_dim": 40}, "head_dim 40 is not a multiple of 16 up to 256"),
        (LLAMA_31_8B, {"head_dim": 512}, "head_dim 512"),
        (LLAMA_31_8B, {"attention_multiplier": 0.5}, "attention_multiplier = 0.5"),
        (QWEN2_7B, {"dual_chunk_attention_config": {"chunk_size": 262144}}, "dual_chunk_attention_config"),
        (MISTRAL_7B, {"num_local_experts": 8}, "sets num_local_experts = 8"),
        (LLAMA_31_8B, {"rope_interleaved": True}, "rope_interleaved = true"),
        (QWEN3_8B, {"attention_bias": True}, "attention_bias = true"),
        (QWEN3_8B, {"residual_scale": 0.22}, "residual_scale = 0.22"),
        (QWEN3_8B, {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
        (QWEN3_8B, {"partial_rotary_factor": 0.25}, "partial_rotary_factor 0.25"),
        (QWEN3_8B, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope scaling 'dynamic' is not supported; "
            "supported: default, linear, llama3, yarn"),
        (QWEN3_8B, {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}, "rope scaling 'mrope'"),
        (QWEN3_8B, {"rope_scaling": {"rope_type": "longrope"}}, "rope scaling 'longrope'"),
        (QWEN3_8B, {"rope_scaling": {"factor": 4.0}}, "RoPE of type 'default' with factor = 4.0"),
        (QWEN3_8B, {"rope_scaling": {**YARN, "attn_factor": 0.7}}, "'yarn' with attn_factor = 0.7"),
        (QWEN3_8B, {"rope_scaling": {**YARN, "rope_type": "default"}}, "rope_type 'default' and type 'yarn' differ"),
        (QWEN3_8B, {"rope_scaling": {"type": "yarn"}}, "factor as a number over 0, config.json has None"),
        (QWEN3_8B, {"rope_scaling": {**YARN, "factor": 0.5}}, "factor 0.5 is under 1"),
        (QWEN3_8B, {"rope_scaling": {**YARN, "factor": "4"}}, "config.json has '4'"),
        (QWEN3_8B, {"rope_scaling": YARN, "rope_parameters": {**YARN, "factor": 2.0}}, "disagree on factor"),
        (QWEN3_8B, {"rope_scaling": "yarn"}, "rope_scaling 'yarn' in config.json is not an object"),
        (QWEN3_8B, {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "by layer type (full_attention)"),
        (LLAMA_31_8B, {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        (QWEN3_8B, {"use_sliding_window": True, "sliding_window": "x", "max_window_layers": 1}, "sliding_window 'x'"),
        (QWEN3_8B, {"use_sliding_window": True, "layer_types": ["chunked_attention"]}, "chunked_attention"),
        (QWEN3_8B, {"hidden_size": "4096"}, "hidden_size '4096' in config.json is not a whole number"),
        (QWEN3_8B, {"num_hidden_layers": 0}, "num_hidden_layers 0"),
        (QWEN3_8B, {"rope_theta": 0}, "needs rope_theta as a number over 0, config.json has 0"),
        (QWEN3_8B, {"rope_theta": -1e6}, "needs rope_theta as a number over 0, config.json has -1000000.0"),
        (QWEN3_8B, {"rope_theta": float("inf")}, "needs rope_theta as a number over 0, config.json has inf"),
        (QWEN3_8B, {"rms_norm_eps": 0}, "rms_norm_eps 0 in config.json"),
        (QWEN3_8B, {"rms_norm_eps": -1e-6}, "rms_norm_eps -1e-06 in config.json"),
        (QWEN3_8B, {"rms_norm_eps": "1e-6"}, "rms_norm_eps '1e-6' in config.json"),
    ],
)  # fmt: skip
def test_what_changes_the_maths_is_refused_by_name(base, changes, message):
    with pytest.raises(EngineError, match=re.escape(message)) as e:
        from_hf({**base, **changes}, "the-model")
    assert str(e.value).startswith("the-model: ")


@pytest.mark.parametrize("text", ["[]", "3", '"x"', "null"])
def test_a_config_that_is_no_object(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(EngineError, match=r"config\.json holds a \w+, not an object"):
        from_dir(tmp_path)


def test_a_config_that_is_no_text(tmp_path):
    (tmp_path / "config.json").write_bytes(b"\xff\xfe{")
    with pytest.raises(EngineError, match=r"config\.json is not UTF-8 text"):
        from_dir(tmp_path)


# Sliding windows


@pytest.mark.parametrize(
    "base, changes, window",
    [
        (MISTRAL_7B, {}, None), (MISTRAL_7B, {"sliding_window": 4096}, 4096),
        (LLAMA_31_8B, {"sliding_window": 4096}, 4096),
        (QWEN2_7B, {}, None), (QWEN2_7B, {"use_sliding_window": True}, None),  # no layer of 28 is over 28
        (QWEN2_7B, {"use_sliding_window": True, "max_window_layers": 20}, 131072),
        (QWEN3_8B, {"use_sliding_window": True, "sliding_window": 512, "layer_types": ["full_attention"] * 36}, None),
        (QWEN3_8B, {"use_sliding_window": True, "sliding_window": 512,
                    "layer_types": ["full_attention", "sliding_attention"] * 18}, 512),
    ],
)  # fmt: skip
def test_which_window_is_active(base, changes, window):
    assert from_hf({**base, **changes}, "m").sliding_window == window


def test_an_active_window_needs_a_context_that_fits_it():
    config = from_hf({**MISTRAL_7B, "sliding_window": 4096}, "old-mistral")
    config.check_context(4096)
    with pytest.raises(
        EngineError, match=r"last 4096 tokens only.*context is 4097; use --max-model-len 4096"
    ):
        config.check_context(4097)
    from_hf(MISTRAL_7B, "m").check_context(32768)


def test_the_longest_context_is_within_positions_and_window():
    model = from_hf(MISTRAL_7B, "m")
    assert model.longest_context == 32768
    assert from_hf({**MISTRAL_7B, "sliding_window": 4096}, "m").longest_context == 4096
    assert from_hf({**MISTRAL_7B, "sliding_window": 65536}, "m").longest_context == 32768


def test_the_front_and_the_executor_refuse_an_active_window(tmp_path):
    """By the flag before anything is loaded; without the flag when the context is known."""
    from engine.resolve import resolve
    from engine.runtime.create import create_cpu_executor

    (tmp_path / "config.json").write_text(json.dumps({**MISTRAL_7B, "sliding_window": 4096}))
    asked = EngineConfig(model=str(tmp_path), device="cpu", max_model_len=8192)
    with pytest.raises(EngineError, match="use --max-model-len 4096"):
        resolve(asked)
    silent = EngineConfig(model=str(tmp_path), device="cpu")
    _, config, _ = resolve(silent)
    with pytest.raises(EngineError, match="use --max-model-len 4096"):
        create_cpu_executor(silent, config)


# RoPE scaling


def test_llama3_and_yarn_are_read():
    llama = from_hf(LLAMA_31_8B, "m")
    assert llama.rope_scaling == RopeScaling("llama3", 8.0, 8192, 1.0, 4.0)
    assert llama.max_position_embeddings == 131072
    qwen = from_hf({**QWEN2_7B, "rope_scaling": YARN}, "m")
    assert qwen.rope_scaling == RopeScaling(
        "yarn", 4.0, 32768, attention_factor=pytest.approx(1.13863, abs=1e-5)
    )
    assert qwen.max_position_embeddings == 131072  # the recipe leaves 32768 in config.json
    other = {k: v for k, v in YARN.items() if k != "type"} | {"rope_type": "yarn"}
    assert from_hf({**QWEN2_7B, "rope_scaling": other}, "m") == qwen
    new = {**other, "rope_theta": 1e6}
    plain = {k: v for k, v in QWEN2_7B.items() if k not in ("rope_theta", "rope_scaling")}
    assert from_hf({**plain, "rope_parameters": new}, "m") == qwen


SCALINGS = [
    None,
    {"rope_type": "linear", "factor": 2.5},
    LLAMA_31_8B["rope_scaling"],
    {**LLAMA_31_8B["rope_scaling"], "factor": 32.0},  # Llama 3.2
    YARN,
    {**YARN, "rope_type": "yarn", "factor": 2.0},
    {**YARN, "attention_factor": 1.25},
    {**YARN, "beta_fast": 16, "beta_slow": 2, "truncate": False},
    {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7},
    {**YARN, "factor": 1.0},
    {"type": "yarn", "factor": 4.0},  # no original length: max_position_embeddings
    {"type": "yarn", "factor": None, "original_max_position_embeddings": 4096},
]


@pytest.mark.parametrize("theta", [1e4, 1e6])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
def test_table_equals_transformers_to_64k(scaling, head_dim, theta):
    """Frequencies and factor bit for bit; so are cos and sin of every position, because both sides round
    position * frequency once and call the same cos."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    raw = {
        **LLAMA_31_8B, "head_dim": head_dim, "rope_theta": theta, "max_position_embeddings": 32768,
        "rope_scaling": scaling,
    }  # fmt: skip
    ours = from_hf(raw, "m")
    theirs = LlamaRotaryEmbedding(LlamaConfig(**json.loads(json.dumps(raw))))
    frequencies, factor = rope_frequencies(ours)
    assert torch.equal(frequencies, theirs.inv_freq) and factor == theirs.attention_scaling
    positions = torch.arange(65536)
    cos, sin = theirs(torch.zeros(1), positions[None])
    table = rope_table(ours, 65536, "cpu")
    assert table.dtype == torch.float32
    assert torch.equal(table[:, 0::2], cos[0, :, : head_dim // 2])
    assert torch.equal(table[:, 1::2], sin[0, :, : head_dim // 2])
