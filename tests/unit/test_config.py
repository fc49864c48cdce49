"""Model and engine configuration: every error, the presets, shard sizes, both generations of
config.json."""

from __future__ import annotations

import json
import re

import pytest

from engine.config import (
    PRESETS,
    EngineConfig,
    ModelConfig,
    from_dir,
    from_hf,
    parse_count,
    preset,
    with_layers,
)
from engine.demo import MODEL_FOLDER
from engine.errors import EngineError

# As Qwen/Qwen2.5-7B-Instruct ships it (transformers 4 style).
QWEN_7B = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 3584,
    "initializer_range": 0.02,
    "intermediate_size": 18944,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 152064,
}
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000,
    "rope_scaling": None,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "eos_token_id": [2, 0],
}


def model(**changes) -> ModelConfig:
    """A small config: 28 heads in 4 groups."""
    values = dict(
        name="m", architecture="LlamaForCausalLM", hidden_size=448, num_layers=2, num_heads=28,
        num_kv_heads=4, head_dim=16, intermediate_size=840, vocab_size=1000, rope_theta=1e4,
        rms_norm_eps=1e-6, max_position_embeddings=128, tie_word_embeddings=False,
        attention_bias=False,
    )  # fmt: skip
    return ModelConfig(**{**values, **changes})


# from_hf


def test_old_style_qwen_equals_the_preset():
    got = from_hf(QWEN_7B, "qwen2.5-7b")
    want = PRESETS["qwen2.5-7b"]
    assert got == ModelConfig(**{**want.__dict__, "eos_token_ids": (151645,)})


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
def test_new_style_config_written_by_transformers(kind, tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

    config_type, model_type = {
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
        "llama": (LlamaConfig, LlamaForCausalLM),
    }[kind]
    config = config_type(
        vocab_size=96, hidden_size=64, intermediate_size=80, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=77,
        rope_parameters={"rope_type": "default", "rope_theta": 54321.0}, rms_norm_eps=3e-6,
        tie_word_embeddings=True, eos_token_id=7,
    )  # fmt: skip
    model_type(config).save_pretrained(tmp_path / "tiny")
    assert "rope_parameters" in json.loads((tmp_path / "tiny" / "config.json").read_text())
    assert from_dir(tmp_path / "tiny") == ModelConfig(
        name="tiny", architecture=model_type.__name__, hidden_size=64, num_layers=1, num_heads=4,
        num_kv_heads=2, head_dim=16, intermediate_size=80, vocab_size=96, rope_theta=54321.0,
        rms_norm_eps=3e-6, max_position_embeddings=77, tie_word_embeddings=True,
        attention_bias=kind == "qwen2", eos_token_ids=(7,), checkpoint_dtype="float32",
    )  # fmt: skip


def test_llama_with_several_eos_tokens_and_derived_head_dim():
    got = from_hf(LLAMA, "smol")
    assert (got.head_dim, got.group, got.rope_theta) == (64, 3, 100000.0)
    assert got.eos_token_ids == (2, 0)
    assert got.tie_word_embeddings and not got.attention_bias


def test_explicit_head_dim_wins():
    assert from_hf({**LLAMA, "head_dim": 128}, "m").head_dim == 128


def test_kv_heads_default_to_heads():
    old = {k: v for k, v in LLAMA.items() if k != "num_key_value_heads"}
    assert from_hf(old, "m").num_kv_heads == 9


def test_model_type_stands_in_for_architectures():
    config = {k: v for k, v in QWEN_7B.items() if k != "architectures"}
    assert from_hf(config, "m").architecture == "Qwen2ForCausalLM"


@pytest.mark.parametrize("dtype_key", ["dtype", "torch_dtype"])
def test_checkpoint_dtype(dtype_key):
    config = {k: v for k, v in QWEN_7B.items() if k != "torch_dtype"}
    assert from_hf({**config, dtype_key: "float16"}, "m").checkpoint_dtype == "float16"
    assert from_hf(config, "m").checkpoint_dtype == "bfloat16"


def test_missing_keys_are_listed_together():
    config = {k: v for k, v in LLAMA.items() if k not in ("hidden_size", "vocab_size")}
    with pytest.raises(EngineError, match=r"config\.json lacks hidden_size, vocab_size"):
        from_hf(config, "m")


def test_directory_without_config(tmp_path):
    with pytest.raises(EngineError, match=r"no config\.json; --model takes"):
        from_dir(tmp_path)


def test_damaged_config(tmp_path):
    (tmp_path / "config.json").write_text('{"hidden_size": ')
    with pytest.raises(EngineError, match="is not valid JSON"):
        from_dir(tmp_path)


# Presets


PARAMETERS = {  # billions, as the model cards state them (0.49, 1.54, 3.09, 7.61, 14.7, 32.5, 72.7; ...)
    "qwen2.5-0.5b": 0.49,
    "qwen2.5-1.5b": 1.54,
    "qwen2.5-3b": 3.09,
    "qwen2.5-7b": 7.61,
    "qwen2.5-14b": 14.7,
    "qwen2.5-32b": 32.5,
    "qwen2.5-72b": 72.7,
    "qwen3-8b": 8.19,
    "qwen3-14b": 14.77,
    "qwen3-32b": 32.76,
    "llama-3.1-8b": 8.03,
    "llama-3.1-70b": 70.55,
    "mistral-7b": 7.25,
}


@pytest.mark.parametrize("name", PRESETS)
def test_preset_sizes(name):
    config = preset(name)
    # The cards round to three figures; 0.5b's 0.49 and 32b's 32.5 (32.76) are rounded more freely.
    assert config.num_parameters / 1e9 == pytest.approx(PARAMETERS[name], rel=0.01)
    assert set(PRESETS) == set(PARAMETERS)


def test_preset_spellings():
    assert preset("Qwen/Qwen2.5-72B-Instruct") is PRESETS["qwen2.5-72b"]
    assert preset("meta-llama/Llama-3.1-8B-Instruct") is PRESETS["llama-3.1-8b"]


def test_unknown_preset_lists_the_known():
    with pytest.raises(
        EngineError, match=r"no preset 'qwen2\.5-8b'.*qwen2\.5-0\.5b, .*72b.*qwen3-8b"
    ):
        preset("qwen2.5-8b")


def test_with_layers_changes_depth_only():
    base = PRESETS["qwen2.5-7b"]
    assert with_layers(base, 2) == ModelConfig(**{**base.__dict__, "num_layers": 2})


# Sharding


@pytest.mark.parametrize(
    "name, tp, heads, kv, inter, vocab",
    [
        ("qwen2.5-72b", 1, 64, 8, 29568, 152064),
        ("qwen2.5-72b", 2, 32, 4, 14784, 76032),
        ("qwen2.5-72b", 4, 16, 2, 7392, 38016),
        ("qwen2.5-72b", 8, 8, 1, 3696, 19008),
        ("qwen2.5-7b", 2, 14, 2, 9472, 76032),
        ("qwen2.5-7b", 4, 7, 1, 4736, 38016),
        ("qwen2.5-0.5b", 2, 7, 1, 2432, 75968),
        ("qwen2.5-3b", 8, 2, 1, 1376, 18992),
    ],
)
def test_shard_shapes(name, tp, heads, kv, inter, vocab):
    shard = PRESETS[name].shard(tp)
    assert (shard.tp, shard.num_heads, shard.num_kv_heads) == (tp, heads, kv)
    assert (shard.intermediate_size, shard.vocab_size) == (inter, vocab)


@pytest.mark.parametrize(
    "name, valid",
    [
        ("qwen2.5-7b", [1, 2, 4]),  # 28 heads: not 8
        ("qwen2.5-72b", [1, 2, 4, 8]),
        ("qwen2.5-0.5b", [1, 2]),  # 14 heads
        ("qwen2.5-3b", [1, 2, 4, 8]),  # 2 KV heads, replicated
        ("qwen2.5-14b", [1, 2, 4, 8]),
    ],
)
def test_valid_degrees(name, valid):
    assert PRESETS[name].valid_tp() == valid


@pytest.mark.parametrize("tp", range(1, 9))
@pytest.mark.parametrize("vocab", [1000, 151665, 152064, 16, 7])
def test_vocabulary_shards_cover_the_vocabulary(tp, vocab):
    config = model(num_heads=840, num_kv_heads=840, vocab_size=vocab)
    shard = config.shard(tp).vocab_size
    assert shard % 16 == 0
    assert vocab <= shard * tp < vocab + 16 * tp


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("kv", [1, 2, 4, 8])
def test_every_rank_has_the_kv_heads_of_its_query_heads(tp, kv):
    config = model(num_heads=16, num_kv_heads=kv)
    shard = config.shard(tp)
    for rank in range(tp):
        first = config.kv_head_of_rank(rank, tp)
        needed = {
            head // config.group
            for head in range(rank * shard.num_heads, (rank + 1) * shard.num_heads)
        }
        assert needed == set(range(first, first + shard.num_kv_heads))


@pytest.mark.parametrize(
    "changes, tp, message",
    [
        ({}, 8, "28 attention heads do not divide by 8; valid degrees: 1, 2, 4"),
        ({}, 0, "a TP degree is 1 to 8"),
        ({}, 9, "a TP degree is 1 to 8"),
        ({"num_heads": 24, "num_kv_heads": 6}, 4, "6 KV heads neither divide by 4 nor replicate"),
        ({"intermediate_size": 842}, 4, "intermediate size 842 does not divide by 4"),
    ],
)
def test_impossible_degrees_list_the_valid_ones(changes, tp, message):
    config = model(**changes)
    with pytest.raises(EngineError, match=re.escape(message)) as e:
        config.shard(tp)
    assert f"cannot run at --tp {tp}" in str(e.value)
    assert f"valid degrees: {', '.join(map(str, config.valid_tp()))}" in str(e.value)


def test_degrees_that_are_no_powers_of_two():
    config = model(num_heads=36, num_kv_heads=1, intermediate_size=24)
    assert config.valid_tp() == [1, 2, 3, 4, 6]
    assert config.shard(6).num_heads == 6


# EngineConfig


@pytest.mark.parametrize(
    "field, value, message",
    [
        (
            "tensor_parallel_size",
            9,
            "is not a whole number from 1 to 8; set --tensor-parallel-size",
        ),
        ("tensor_parallel_size", 0, "--tensor-parallel-size"),
        ("model", "", "is an empty name; set --model"),
        ("model", "  ", "is an empty name; set --model"),
        ("tokenizer", "", "is an empty name; set --tokenizer"),
        ("tensor_parallel_size", True, "--tensor-parallel-size"),
        ("tensor_parallel_size", 2.0, "--tensor-parallel-size"),
        ("max_num_seqs", 9, "is not a whole number from 1 to 8; set --max-num-seqs"),
        ("max_model_len", 0, "--max-model-len"),
        ("seed", -1, "--seed"),
        ("quantization", "awq", "is not one of fp8; set --quantization"),
        ("kv_cache_dtype", "fp8_e5m2", "is not one of auto, fp8; set --kv-cache-dtype"),
        ("load_format", "gguf", "is not one of auto, safetensors, dummy; set --load-format"),
        ("device", "tpu", "is not one of auto, cpu, cuda; set --device"),
        ("dtype", "int8", "set --dtype"),
        ("gpu_memory_utilization", 0, "is not a share in (0, 1]; set --gpu-memory-utilization"),
        ("gpu_memory_utilization", 1.2, "--gpu-memory-utilization"),
        ("gpu_memory_utilization", True, "--gpu-memory-utilization"),
        ("shard_of", 8, "works with load_format='dummy' only"),
        ("shard_of", 3, "is not one of 2, 4, 8"),
    ],
)
def test_engine_config_refuses(field, value, message):
    with pytest.raises(EngineError, match=re.escape(message)) as e:
        EngineConfig(**{field: value})
    assert f"{field}={value!r}" in str(e.value)


def test_a_degree_out_of_range_names_those_of_the_model(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    demo = tmp_path / "cache" / MODEL_FOLDER
    demo.mkdir(parents=True)
    monkeypatch.setenv("ENGINE_CACHE", str(demo.parent))
    for degree in (0, 9):
        with pytest.raises(EngineError, match=r"valid degrees of qwen2.5-7b: 1, 2, 4$"):
            EngineConfig("qwen2.5-7b", load_format="dummy", tensor_parallel_size=degree)
        with pytest.raises(EngineError, match=rf"valid degrees of {tmp_path.name}: 1, 3$"):
            EngineConfig(str(tmp_path), tensor_parallel_size=degree)
        for name in ("org/unknown", None):  # the demo model is not there yet
            with pytest.raises(EngineError, match=r"set --tensor-parallel-size$"):
                EngineConfig(name, tensor_parallel_size=degree)
    (demo / "config.json").write_text(json.dumps(LLAMA))
    with pytest.raises(EngineError, match=rf"valid degrees of {MODEL_FOLDER}: 1, 3$"):
        EngineConfig(tensor_parallel_size=9)


def test_engine_config_defaults_and_spellings():
    config = EngineConfig()
    assert (config.model, config.tensor_parallel_size, config.dtype) == (None, 1, "auto")
    assert EngineConfig(dtype="half").dtype == "float16"
    assert EngineConfig(dtype="bf16").dtype == "bfloat16"
    assert EngineConfig(load_format="dummy", shard_of=8).shard_of == 8


@pytest.mark.parametrize(
    "text, value",
    [("32768", 32768), (77, 77), ("32k", 32000), ("32K", 32768), ("1.5M", 1572864), ("1.5m", 1500000), (" 8 ", 8)],
)  # fmt: skip
def test_parse_count(text, value):
    assert parse_count(text) == value


@pytest.mark.parametrize(
    "text", ["", "k", "lots", "1.0005k", "1.5", "12x", "infk", "nank", "-infM", "1e400k"]
)
def test_parse_count_refuses(text):
    with pytest.raises(EngineError, match="whole number"):
        parse_count(text)
