"""Small checkpoints and the weight specs that ask for them, made on the fly."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import torch

from engine.checkpoint.safetensors_header import TensorInfo, identity
from engine.config import ModelConfig, from_dir
from engine.weights import Part, WeightSpec

# Odd on purpose: groups of 7 query heads, an MLP that is no multiple of 128, a vocabulary that no
# TP degree's shards divide.
SHAPE = dict(
    vocab_size=203,
    hidden_size=112,
    intermediate_size=200,
    num_hidden_layers=2,
    num_attention_heads=56,
    num_key_value_heads=8,
    head_dim=16,
    max_position_embeddings=128,
)


def save_model(
    directory: Path, kind: str = "qwen2", tied: bool = False, shard_size: str = "5GB", **shape
) -> Path:
    """A random fp32 model written by transformers' save_pretrained; every tensor non-trivial."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

    config_type, model_type = {
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
        "llama": (LlamaConfig, LlamaForCausalLM),
    }[kind]
    model = model_type(config_type(**{**SHAPE, **shape}, tie_word_embeddings=tied))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
    model.save_pretrained(directory, max_shard_size=shard_size)
    return directory


def specs_of(directory: Path, tp: int = 1) -> dict[str, WeightSpec]:
    """The specs that the compiled graph of a directory's model asks for: q, k, v stacked with rows
    in RoPE pairs, gate and up interleaved, o and down split along K, lm_head split over the
    vocabulary."""
    return specs_for(from_dir(directory), tp)


def specs_for(c: ModelConfig, tp: int) -> dict[str, WeightSpec]:
    """As `specs_of`, from a config."""
    shard = c.shard(tp)
    h, d = c.hidden_size, c.head_dim

    def cut(n: int) -> tuple[tuple[int, int], ...]:
        return tuple((r * n, (r + 1) * n) for r in range(tp))

    kv = shard.num_kv_heads * d
    kv_cut = tuple(
        (c.kv_head_of_rank(r, tp) * d, c.kv_head_of_rank(r, tp) * d + kv) for r in range(tp)
    )
    q_cut = cut(shard.num_heads * d)
    specs = [WeightSpec("embed", (Part("model.embed_tokens.weight", (c.vocab_size, h), None, ()),))]
    for i in range(c.num_layers):
        p = f"model.layers.{i}"
        heads = (
            ("q", c.num_heads, q_cut, "rope_pairs"),
            ("k", c.num_kv_heads, kv_cut, "rope_pairs"),
            ("v", c.num_kv_heads, kv_cut, "natural"),
        )
        for suffix, tail in (("weight", (h,)), ("bias", ())):
            if suffix == "bias" and not c.attention_bias:
                continue
            parts = tuple(
                Part(f"{p}.self_attn.{n}_proj.{suffix}", (count * d, *tail), 0, ranges, layout, d)
                for n, count, ranges, layout in heads
            )
            specs.append(WeightSpec(f"{i}.qkv.{suffix}", parts, quantizable=suffix == "weight"))
        o = Part(f"{p}.self_attn.o_proj.weight", (h, c.num_heads * d), 1, q_cut)
        inter, inter_cut = c.intermediate_size, cut(shard.intermediate_size)
        gate_up = tuple(
            Part(f"{p}.mlp.{n}_proj.weight", (inter, h), 0, inter_cut) for n in ("gate", "up")
        )
        down = Part(f"{p}.mlp.down_proj.weight", (h, inter), 1, inter_cut)
        specs += [
            WeightSpec(f"{i}.o", (o,), quantizable=True),
            WeightSpec(f"{i}.gate_up", gate_up, "interleave", quantizable=True),
            WeightSpec(f"{i}.down", (down,), quantizable=True),
        ]
        for norm in ("input_layernorm", "post_attention_layernorm"):
            specs.append(WeightSpec(f"{i}.{norm}", (Part(f"{p}.{norm}.weight", (h,), None, ()),)))
    specs.append(WeightSpec("norm", (Part("model.norm.weight", (h,), None, ()),)))
    name = "model.embed_tokens.weight" if c.tie_word_embeddings else "lm_head.weight"
    specs.append(WeightSpec("lm_head", (Part(name, (c.vocab_size, h), 0, cut(shard.vocab_size)),)))
    return {s.name: s for s in specs}


def edit_json(file: Path, **changes) -> None:
    """Set (or, with None, delete) top-level keys of a JSON file."""
    value = json.loads(file.read_text())
    for key, change in changes.items():
        if change is None:
            value.pop(key, None)
        else:
            value[key] = change
    file.write_text(json.dumps(value))


def store_fp8(
    directory: Path, kind: str, block: int = 32, keep: tuple[str, ...] = ()
) -> dict[str, torch.Tensor]:
    """Rewrite a single-file checkpoint's linear layers in FP8 as `kind` stores them, with random
    scales that differ by powers of ten; `keep` names modules left in their dtype. Returns the value
    of every tensor, fp32: what a loader must see."""
    from safetensors.torch import load_file, save_file

    file = directory / "model.safetensors"
    values, stored = {}, {}
    generator = torch.Generator().manual_seed(2)
    for name, tensor in load_file(file).items():
        module = name.removesuffix(".weight")
        linear = module.endswith("_proj") and name != module
        if not linear or module in keep:
            values[name] = stored[name] = tensor
            continue
        rows, cols = tensor.shape
        shape = {
            "channel": (rows, 1), "channel-flat": (rows,), "tensor": (1,), "scalar": (),
            "block": (-(-rows // block), -(-cols // block)),
        }[kind]  # fmt: skip
        scale = 10.0 ** (torch.rand(shape, generator=generator) * 4 - 5)
        if kind == "channel":
            scale = scale.bfloat16()
        wide = scale.float()
        if kind == "block":
            # Element by element, on purpose unlike the loader.
            wide = torch.stack(
                [wide[i // block].repeat_interleave(block)[:cols] for i in range(rows)]
            )
        elif kind == "channel-flat":
            wide = wide[:, None]
        q = (torch.randn(rows, cols, generator=generator) * 100).clamp(-448, 448)
        q = q.to(torch.float8_e4m3fn)
        stored[name] = q
        stored[name + ("_scale_inv" if kind == "block" else "_scale")] = scale
        values[name] = q.float() * wide
    save_file(stored, file)
    edit_json(directory / "config.json", quantization_config=fp8_config(kind, block))
    return values


def fp8_config(kind: str, block: int = 32) -> dict:
    """The quantization_config that belongs to a `kind` of `store_fp8`."""
    if kind == "block":
        return {
            "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
            "weight_block_size": [block, block],
        }  # fmt: skip
    if kind == "scalar":
        return {"quant_method": "modelopt", "quant_algo": "FP8"}
    weights = {"type": "float", "num_bits": 8, "symmetric": True, "dynamic": False}
    weights["strategy"] = "tensor" if kind == "tensor" else "channel"
    return {
        "quant_method": "compressed-tensors", "format": "float-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }  # fmt: skip


def shrunk(info: TensorInfo, nbytes: int) -> TensorInfo:
    """Its file without the last bytes, as if they had gone after it was opened."""
    os.truncate(info.file, info.file.stat().st_size - nbytes)
    return replace(info, identity=identity(info.file.stat()))
