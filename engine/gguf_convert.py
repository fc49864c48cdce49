"""One GGUF file of a Llama-architecture model -> an ordinary Hugging Face directory (demo model
only).

Weights are stored as fp16. A Q4_1 value is d * q + m with fp16 d, m and a 4-bit q, so |value| is at
most about 15 steps d from 0 or from m: fp16's relative rounding of 2^-12 costs at most 15 * 2^-12 =
0.004 of a quantisation step, bf16's 2^-9 would cost 0.03. Norm weights were bf16 in the original
and are exact in fp16. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from engine.errors import CheckpointError, EngineError

_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_CONTROL_TOKEN = 3  # tokenizer.ggml.token_type: a special token, never made by BPE merges


def convert(gguf_file: Path, out: Path) -> None:
    """Write config.json, model.safetensors, tokenizer.json, tokenizer_config.json and
    generation_config.json into the new directory `out`. Raises EngineError if the `gguf` library is
    missing, CheckpointError if the file is not a byte-level-BPE Llama."""
    try:
        from gguf import GGUFReader
    except ImportError:
        raise EngineError(
            'converting the demo model needs the gguf library: pip install "engine[demo]"'
        ) from None
    reader = GGUFReader(gguf_file)
    meta = {key: field.contents() for key, field in reader.fields.items()}
    architecture = meta["general.architecture"]
    tokenizer = (meta["tokenizer.ggml.model"], meta.get("tokenizer.ggml.pre"))
    if architecture != "llama" or tokenizer != ("gpt2", "smollm"):
        raise CheckpointError(
            f"{gguf_file.name}: architecture {architecture!r} with tokenizer {tokenizer} is not "
            "converted; only llama with a gpt2/smollm tokenizer is"
        )
    out.mkdir(parents=True)
    tensors = _tensors(reader, meta)
    _write_json(out / "config.json", _config(meta, tied="lm_head.weight" not in tensors))
    _write_json(out / "generation_config.json", _token_ids(meta))
    _write_tokenizer(meta, out)

    from safetensors.numpy import save_file

    weights = out / "model.safetensors"
    save_file(tensors, weights, metadata={"format": "pt"})
    weights.chmod(0o644)  # safetensors writes 0600: a shared cache could not be read


def unpermute_rope_rows(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Undo llama.cpp's row order of q/k weights [heads * D, H].

    llama.cpp rotates neighbours (2i, 2i+1), Hugging Face rotates (i, i + D/2): its converter stores
    HF row (half, i) of a head as row (i, half)."""
    rows, cols = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, cols)
    return pairs.swapaxes(1, 2).reshape(rows, cols)


def _tensors(reader: Any, meta: dict) -> dict[str, np.ndarray]:
    """Every tensor under its HF name, dequantised and rounded to fp16."""
    from gguf.quants import dequantize

    heads = {
        "attn_q": meta["llama.attention.head_count"],
        "attn_k": meta["llama.attention.head_count_kv"],
    }
    tensors = {}
    for t in reader.tensors:
        value = dequantize(t.data, t.tensor_type)
        if t.name in _TOP_NAMES:
            name = _TOP_NAMES[t.name]
        else:
            _, layer, kind, suffix = t.name.split(".")
            name = f"model.layers.{layer}.{_BLOCK_NAMES[kind]}.{suffix}"
            if kind in heads:
                value = unpermute_rope_rows(value, heads[kind])
        tensors[name] = np.ascontiguousarray(value, dtype=np.float16)
    return tensors


def _token_ids(meta: dict) -> dict[str, int]:
    return {
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
        "pad_token_id": meta["tokenizer.ggml.padding_token_id"],
    }


def _config(meta: dict, tied: bool) -> dict[str, Any]:
    def decimal(value: float) -> float:
        return float(str(np.float32(value)))  # 9.99999974e-06 is fp32's 1e-05

    heads = meta["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": meta["llama.embedding_length"],
        "intermediate_size": meta["llama.feed_forward_length"],
        "num_hidden_layers": meta["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": meta["llama.attention.head_count_kv"],
        "head_dim": meta["llama.embedding_length"] // heads,
        "vocab_size": meta["llama.vocab_size"],
        "max_position_embeddings": meta["llama.context_length"],
        "rms_norm_eps": decimal(meta["llama.attention.layer_norm_rms_epsilon"]),
        "rope_theta": decimal(meta["llama.rope.freq_base"]),
        "rope_scaling": None,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "torch_dtype": "float16",
        **_token_ids(meta),
    }


def _write_tokenizer(meta: dict, out: Path) -> None:
    """Byte-level BPE; llama.cpp's pre-tokenizer "smollm" = every digit alone, then GPT-2's
    pattern."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = meta["tokenizer.ggml.tokens"]
    merges = [tuple(m.split(" ")) for m in meta["tokenizer.ggml.merges"]]
    special = [
        t for t, kind in zip(tokens, meta["tokenizer.ggml.token_type"]) if kind == _CONTROL_TOKEN
    ]
    bpe = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    bpe.save(str(out / "tokenizer.json"))
    ids = _token_ids(meta)
    _write_json(
        out / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": tokens[ids["bos_token_id"]],
            "eos_token": tokens[ids["eos_token_id"]],
            "pad_token": tokens[ids["pad_token_id"]],
            "unk_token": tokens[meta["tokenizer.ggml.unknown_token_id"]],
            "additional_special_tokens": special,
            "clean_up_tokenization_spaces": False,
            "model_max_length": meta["llama.context_length"],
            "chat_template": meta["tokenizer.chat_template"],
        },
    )


def _write_json(file: Path, value: dict) -> None:
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
