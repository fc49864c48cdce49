"""Each architecture x stored format x TP degree against transformers' logits in fp32."""

from __future__ import annotations

import pytest
import torch

from engine.config import from_dir
from tests.graph.models import FP8_KINDS, SHAPES, Lockstep, save_model, store_fp8

PROMPT = [5, 17, 99, 3, 42, 42, 7, 150, 11, 8, 64]
# The reference holds the very values that are stored, so what differs is the order of fp32 sums, as in
# test_interpret (its derivation), and the scale, which comes after the sum: one more rounding of 2^-24.
TOLERANCE = 2e-4
# An odd group of 7, tied embeddings with 2 KV heads on up to 8 ranks, QK-norm, and plain: every vocabulary needs
# padding, no MLP is a multiple of the 32-wide blocks, shards begin inside blocks.
ARCHITECTURES = ("qwen2", "qwen2-gqa8", "qwen3", "mistral", "llama")


@pytest.fixture(
    scope="module", params=[(a, k) for a in ARCHITECTURES for k in FP8_KINDS], ids="-".join
)
def stored(request, tmp_path_factory):  # fmt: skip
    shape, kind = request.param
    folder = tmp_path_factory.mktemp(f"{shape}-{kind}")
    model = save_model(shape, folder)
    store_fp8(model, folder, kind)
    return folder, model, kind


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@torch.inference_mode()
def test_stored_fp8_equals_transformers(stored, tp):
    """Row scales stay FP8 (the kernels' form); block scales are multiplied out into fp32."""
    folder, model, kind = stored
    if tp not in from_dir(folder).valid_tp():
        assert SHAPES["qwen2"]["num_attention_heads"] % tp and "28 attention heads" in refusal(
            folder, tp
        )
        return
    ours = Lockstep(folder, tp, quantization=None if kind == "block" else "fp8")
    scales = [w.scale is not None for w in ours.weights[0].values()]
    assert any(scales) == (kind != "block")
    expected = model(torch.tensor([[*PROMPT, 9]])).logits[0]
    assert expected.abs().max() > 1
    logits = ours.vocab_logits(ours.prefill(1, PROMPT, logits="all"))
    torch.testing.assert_close(logits, expected[:-1], atol=TOLERANCE, rtol=TOLERANCE)
    for state in ours.states:  # one decode step from a given token
        state.tokens[1], state.positions[1] = 9, len(PROMPT)
    last = ours.vocab_logits(ours.decode([1]))
    torch.testing.assert_close(last, expected[-1:], atol=TOLERANCE, rtol=TOLERANCE)


def refusal(folder, tp) -> str:
    from engine.errors import EngineError

    with pytest.raises(EngineError) as error:
        from_dir(folder).shard(tp)
    return str(error.value)
