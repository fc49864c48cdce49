"""RoPE scaling at 64k positions: the logits of a one-layer model against transformers.

One layer, so that K and V of the first 65504 tokens depend on no attention: only the last 32 tokens attend, over
65536 positions, on both sides.
"""

from __future__ import annotations

import json

import pytest
import torch

from tests.graph.models import Lockstep, save_model
from tests.unit.checkpoint_fixtures import edit_json

LENGTH, LAST = 65536, 32
# Sums over 65536 softmax terms in fp32 cost sqrt(65536) * 2^-24 = 2e-5 relative, beside test_interpret's 2e-4.
TOLERANCE = 3e-4
LLAMA3 = dict(rope_type="llama3", rope_theta=5e5, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=8192)  # fmt: skip
YARN = dict(rope_type="yarn", rope_theta=1e6, factor=4.0, original_max_position_embeddings=16384)


@torch.inference_mode()
def reference(model, ids: list[int]) -> torch.Tensor:
    """Logits of the last 32 tokens; transformers' own modules fill its cache with what comes before."""
    from transformers import DynamicCache
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    core, before = model.model, torch.tensor([ids[:-LAST]])
    layer, attention = core.layers[0], core.layers[0].self_attn
    x = layer.input_layernorm(core.embed_tokens(before))
    heads = (1, before.shape[1], -1, attention.head_dim)
    k, v = (p(x).view(heads).transpose(1, 2) for p in (attention.k_proj, attention.v_proj))
    k, _ = apply_rotary_pos_emb(k, k, *core.rotary_emb(x, torch.arange(LENGTH - LAST)[None]))
    cache = DynamicCache(config=model.config)
    cache.update(k, v, 0)
    return model(torch.tensor([ids[-LAST:]]), past_key_values=cache).logits[0]


def ours(folder, ids: list[int]) -> torch.Tensor:
    lockstep = Lockstep(folder, 2, length=LENGTH, slots=1)
    lockstep.prefill(0, ids[:-LAST], logits="none")
    return lockstep.vocab_logits(lockstep.prefill(0, ids[-LAST:], LENGTH - LAST, logits="all"))


@pytest.mark.parametrize("shape,rope", [("llama", LLAMA3), ("qwen2", YARN)], ids=["llama3", "yarn"])
def test_logits_at_64k(tmp_path, shape, rope):
    config = dict(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
                  intermediate_size=72, vocab_size=203, num_hidden_layers=1, tie_word_embeddings=False,
                  max_position_embeddings=LENGTH, rope_parameters=rope)  # fmt: skip
    model = save_model(shape, tmp_path, overrides=config)
    with (
        torch.no_grad()
    ):  # sharp attention: a uniform average over 64k keys would hide any rotation
        model.model.layers[0].self_attn.q_proj.weight.mul_(3)
        model.save_pretrained(tmp_path)
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, 203, (LENGTH,), generator=generator).tolist()
    expected, got = reference(model, ids), ours(tmp_path, ids)
    assert expected.abs().max() > 1
    torch.testing.assert_close(got, expected, atol=TOLERANCE, rtol=TOLERANCE)
    # And it matters: without the scaling the logits are others.
    plain = json.loads((tmp_path / "config.json").read_text())["rope_parameters"]["rope_theta"]
    edit_json(
        tmp_path / "config.json", rope_parameters={"rope_type": "default", "rope_theta": plain}
    )
    assert (ours(tmp_path, ids) - expected).abs().max() > 100 * TOLERANCE
