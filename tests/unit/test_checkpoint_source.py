"""Slices of real files and dummy weights: every rank's piece, and nothing more than the piece."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.checkpoint.dummy import DummySource
from engine.checkpoint.load import load_rank
from engine.checkpoint.source import CheckpointSource, apply_layout
from engine.config import ModelConfig, preset
from engine.errors import CheckpointError
from engine.weights import Part
from tests.unit.checkpoint_fixtures import save_model, specs_for

TP = (1, 2, 4, 8)
TINY = ModelConfig(
    name="tiny", architecture="Qwen2ForCausalLM", hidden_size=112, num_layers=2, num_heads=56,
    num_kv_heads=8, head_dim=16, intermediate_size=200, vocab_size=203, rope_theta=1e4,
    rms_norm_eps=1e-6, max_position_embeddings=128, tie_word_embeddings=False, attention_bias=True,
)  # fmt: skip


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"), "qwen2", shard_size="200KB")


@pytest.fixture(scope="module")
def whole(directory):
    return {k: v for f in directory.glob("*.safetensors") for k, v in load_file(f).items()}


def cut(size: int, tp: int) -> tuple[tuple[int, int], ...]:
    return tuple((r * size, (r + 1) * size) for r in range(tp))


def pieces(source, part: Part, tp: int) -> list[torch.Tensor]:
    return [source.read(part, rank, "cpu") for rank in range(tp)]


@pytest.mark.parametrize("tp", TP)
@pytest.mark.parametrize("axis", [0, 1])
def test_slices_reassemble_to_the_original(directory, whole, tp, axis):
    name = (
        "model.layers.1.mlp.gate_proj.weight"
        if axis == 0
        else "model.layers.1.mlp.down_proj.weight"
    )
    part = Part(name, tuple(whole[name].shape), axis, cut(200 // tp, tp))
    got = pieces(CheckpointSource(directory), part, tp)
    assert all(p.shape[axis] == 200 // tp for p in got)
    assert torch.equal(torch.cat(got, dim=axis), whole[name])


@pytest.mark.parametrize("tp", TP)
def test_range_past_the_end_is_zeros(directory, whole, tp):
    rows = math.ceil(203 / (16 * tp)) * 16
    part = Part("lm_head.weight", (203, 112), 0, cut(rows, tp))
    got = torch.cat(pieces(CheckpointSource(directory), part, tp))
    assert got.shape == (rows * tp, 112)
    assert torch.equal(got[:203], whole["lm_head.weight"])
    assert not got[203:].any()


def test_range_wholly_past_the_end_is_zeros(directory):
    part = Part("model.norm.weight", (112,), 0, ((0, 112), (112, 120), (150, 160)))
    got = pieces(CheckpointSource(directory), part, 3)
    assert not got[1].any() and not got[2].any()
    assert (got[1].shape, got[2].shape) == ((8,), (10,))


def test_padded_columns(directory, whole):
    name = "model.layers.0.mlp.down_proj.weight"
    got = CheckpointSource(directory).read(Part(name, (112, 200), 1, ((192, 208),)), 0, "cpu")
    assert torch.equal(got[:, :8], whole[name][:, 192:])
    assert not got[:, 8:].any()


@pytest.mark.parametrize("suffix", ["weight", "bias"])
def test_rope_pairs_interleave_the_halves_of_each_head(directory, whole, suffix):
    name = f"model.layers.0.self_attn.k_proj.{suffix}"
    part = Part(name, tuple(whole[name].shape), 0, cut(32, 4), "rope_pairs", 16)
    order = [16 * h + i + half for h in range(8) for i in range(8) for half in (0, 8)]
    got = torch.cat(pieces(CheckpointSource(directory), part, 4))
    assert torch.equal(got, whole[name][order])


def test_rope_pairs_rotate_as_the_half_style_does():
    """R_pairs(P x) = P R_half(x): rotating neighbours after the permutation is HF's rotation."""
    d, angle = 16, torch.randn(8, dtype=torch.float64)
    x = torch.randn(d, dtype=torch.float64)
    part = Part("k", (d,), None, (), "rope_pairs", d)
    a, b = x[:8], x[8:]
    half = torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()])
    pairs = apply_layout(x, part).view(8, 2)
    rotated = torch.stack(
        [
            pairs[:, 0] * angle.cos() - pairs[:, 1] * angle.sin(),
            pairs[:, 1] * angle.cos() + pairs[:, 0] * angle.sin(),
        ],
        dim=1,
    ).flatten()
    assert torch.equal(rotated, apply_layout(half, part))


def test_kv_heads_fewer_than_ranks_are_replicated(directory, whole):
    """The same 2 KV heads of 16 rows for ranks 0-3 and 4-7, from a file and from the dummy
    source."""
    name = "model.layers.0.self_attn.v_proj.weight"
    config = replace(TINY, num_kv_heads=2)
    starts = [16 * config.kv_head_of_rank(rank, 8) for rank in range(8)]
    assert starts == [0] * 4 + [16] * 4
    part = Part(name, (128, 112), 0, tuple((s, s + 16) for s in starts))
    for source in (CheckpointSource(directory), DummySource(config)):
        full = source.read(Part(name, (128, 112), None, ()), 0, "cpu")
        for got, start in zip(pieces(source, part, 8), starts):
            assert torch.equal(got, full[start : start + 16])


def test_unaligned_data_is_read(tmp_path):
    """Old writers did not pad the header: data may begin at any byte."""
    save_file({"a": torch.arange(6.0)}, tmp_path / "model.safetensors")
    raw = (tmp_path / "model.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = raw[8 : 8 + length].rstrip() + b" "
    while len(header) % 4 != 3:
        header += b" "
    (tmp_path / "model.safetensors").write_bytes(
        len(header).to_bytes(8, "little") + header + raw[8 + length :]
    )
    got = CheckpointSource(tmp_path).read(Part("a", (6,), 0, ((1, 4),)), 0, "cpu")
    assert got.tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("name, shape", [("absent", (2,)), ("model.norm.weight", (113,))])
def test_reading_what_is_not_there(directory, name, shape):
    with pytest.raises(CheckpointError, match=name):
        CheckpointSource(directory).read(Part(name, shape, None, ()), 0, "cpu")


# Dummy weights


def dummy_parts(tp: int) -> list[Part]:
    return [p for s in specs_for(TINY, tp).values() for p in s.parts]


@pytest.mark.parametrize("tp", TP[1:])
def test_dummy_slices_are_slices_of_the_same_whole_tensor(tp):
    source = DummySource(TINY, seed=3)
    one = {p.name: source.read(p, 0, "cpu") for p in dummy_parts(1)}
    for part in dummy_parts(tp):
        got = pieces(source, part, tp)
        if part.axis is None:
            assert all(torch.equal(g, one[part.name]) for g in got)
        else:
            joined = torch.cat(got, dim=part.axis)
            whole = one[part.name]
            shared = min(len(joined), len(whole))
            assert torch.equal(joined[:shared], whole[:shared])
            assert not joined[shared:].any()


def test_dummy_is_reproducible_and_depends_on_seed_and_name():
    part = Part("model.layers.0.self_attn.q_proj.weight", (896, 112), None, ())
    a, b = (DummySource(TINY, seed=5).read(part, 0, "cpu") for _ in range(2))
    assert torch.equal(a, b)
    assert not torch.equal(a, DummySource(TINY, seed=6).read(part, 0, "cpu"))
    other = replace(part, name="model.layers.1.self_attn.q_proj.weight")
    assert not torch.equal(a, DummySource(TINY, seed=5).read(other, 0, "cpu"))


def test_dummy_values_have_the_stated_scale():
    source = DummySource(TINY, dtype=torch.float32)

    def read(name: str, *shape: int) -> torch.Tensor:
        return source.read(Part(name, shape, None, ()), 0, "cpu")

    # 22400 or more samples: the sample std is within 1/sqrt(2 * 22400) = 0.5 % (1 sigma); 3 % is 6.
    assert read("x.gate_proj.weight", 200, 112).std() == pytest.approx(112**-0.5, rel=0.03)
    assert read("x.down_proj.weight", 112, 200).std() == pytest.approx((200 * 4) ** -0.5, rel=0.03)
    assert read("x.o_proj.weight", 112, 896).std() == pytest.approx((896 * 4) ** -0.5, rel=0.03)
    assert read("model.embed_tokens.weight", 203, 112).std() == pytest.approx(1, rel=0.03)
    tied = DummySource(replace(TINY, tie_word_embeddings=True), dtype=torch.float32)
    table = tied.read(Part("model.embed_tokens.weight", (203, 112), None, ()), 0, "cpu")
    assert table.std() == pytest.approx(112**-0.5, rel=0.03)
    norm, bias = read("x.input_layernorm.weight", 112), read("x.q_proj.bias", 896)
    assert ((norm - 1).abs() < 0.3).all() and norm.std() > 0.02
    assert bias.abs().max() < 0.3 and (bias != 0).all()


def test_dummy_rows_are_distinct():
    """Windows of one pool: no two rows of a tensor may coincide (they would make ties)."""
    got = DummySource(TINY).read(Part("lm_head.weight", (4096, 112), None, ()), 0, "cpu")
    assert len({tuple(row) for row in got.tolist()}) >= 4096 - 12  # 4096^2 / 2 / 2^20 = 8 expected


def test_dummy_activations_stay_finite_over_80_layers():
    """One token through 80 layers (attention over one key is v itself) in bf16."""
    config = replace(
        preset("qwen2.5-72b"), hidden_size=256, num_heads=8, num_kv_heads=2, head_dim=32,
        intermediate_size=512, vocab_size=512,
    )  # fmt: skip
    weights = load_rank(specs_for(config, 1), DummySource(config), 0, "cpu", torch.bfloat16)
    w = {name: loaded.weight for name, loaded in weights.items()}

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        x32 = x.float()
        return (x32 * (x32.square().mean(-1, keepdim=True) + 1e-6).rsqrt()).bfloat16() * w[name]

    x = w["embed"][:16]
    start = x.float().square().mean().sqrt()
    for i in range(config.num_layers):
        qkv = norm(x, f"{i}.input_layernorm") @ w[f"{i}.qkv.weight"].T + w[f"{i}.qkv.bias"]
        v = qkv[:, -64:].view(16, 2, 1, 32).expand(16, 2, 4, 32).reshape(16, 256)
        x = x + v @ w[f"{i}.o"].T
        gate, up = (
            (norm(x, f"{i}.post_attention_layernorm") @ w[f"{i}.gate_up"].T)
            .view(16, -1, 2)
            .unbind(-1)
        )
        x = x + (torch.nn.functional.silu(gate) * up) @ w[f"{i}.down"].T
    end = x.float().square().mean().sqrt()
    assert 1.0 <= end / start < 2.0
    logits = norm(x, "norm") @ w["lm_head"].T
    assert logits.isfinite().all()
    assert 0.5 < logits.float().std() < 2.0
