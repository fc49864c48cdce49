"""The oracle chain's first links: transformers == unfused graph == fused graph, at TP = 1, 2, 4, 8 in lockstep."""

from __future__ import annotations

import pytest
import torch

from engine.errors import DeviceError
from tests.graph.models import SHAPES, Lockstep, save_model

PROMPT = [5, 17, 99, 3, 42, 42, 7, 150, 11, 8, 64]
# fp32 throughout. A logit is a sum over ~4 chained layers of <= 264-term dot products of O(1) values:
# reordering costs about sqrt(264) * 2^-24 * |terms| per layer, well under 1e-4 on logits of size ~10.
TOLERANCE = 2e-4


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}
    for shape in SHAPES:
        folder = tmp_path_factory.mktemp(shape)
        made[shape] = (folder, save_model(shape, folder))
    return made


def cases():
    for shape, kwargs in SHAPES.items():
        heads, kv = kwargs["num_attention_heads"], kwargs["num_key_value_heads"]
        for tp in (1, 2, 4, 8):
            if heads % tp == 0 and (kv % tp == 0 or tp % kv == 0):
                for fused in (False, True):
                    yield pytest.param(
                        shape, tp, fused, id=f"{shape}-tp{tp}-{'fused' if fused else 'raw'}"
                    )


@torch.inference_mode()
def reference_logits(model, ids):
    return model(torch.tensor([ids])).logits[0]


@pytest.mark.parametrize("shape,tp,fused", list(cases()))
def test_prefill_and_decode_match_transformers(folders, shape, tp, fused):
    """Logits of every prompt position, then of 6 decode steps in a slot other than 0."""
    folder, model = folders[shape]
    ours = Lockstep(folder, tp, fused=fused)
    expected = reference_logits(model, PROMPT)
    logits = ours.vocab_logits(ours.prefill(1, PROMPT, logits="all"))
    assert expected.abs().max() > 1  # a model of zeros would pass everything
    torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=TOLERANCE)

    ids = list(PROMPT)
    output = ours.prefill(1, PROMPT)
    for _ in range(6):
        expected = reference_logits(model, ids)[-1]
        last = ours.vocab_logits(output)[-1]
        torch.testing.assert_close(last, expected, atol=TOLERANCE, rtol=TOLERANCE)
        token = int(output.tokens[0])
        assert token == int(last.argmax())
        ids.append(token)
        assert [int(s.tokens[1]) for s in ours.states] == [token] * tp
        assert [int(s.positions[1]) for s in ours.states] == [len(ids) - 1] * tp
        output = ours.decode([1])


@pytest.mark.parametrize("tp", [1, 2])
def test_chunked_prefill_equals_whole(folders, tp):
    folder, _ = folders["qwen2"]
    whole, parts = Lockstep(folder, tp), Lockstep(folder, tp)
    expected = whole.prefill(0, PROMPT)
    parts.prefill(0, PROMPT[:4], logits="none")
    parts.prefill(0, PROMPT[4:9], start=4, logits="none")
    got = parts.prefill(0, PROMPT[9:], start=9)
    torch.testing.assert_close(
        parts.vocab_logits(got), whole.vocab_logits(expected), atol=TOLERANCE, rtol=TOLERANCE
    )
    for layer in range(2):
        torch.testing.assert_close(
            parts.states[0].k_cache[layer], whole.states[0].k_cache[layer], atol=1e-5, rtol=1e-5
        )


@pytest.mark.parametrize("tp", [1, 4])
def test_rows_do_not_depend_on_their_neighbours(folders, tp):
    """Three sequences of different lengths decode together as they do alone; a padding row writes nothing."""
    folder, _ = folders["llama"]
    prompts = [PROMPT, PROMPT[:3], PROMPT[4:9]]
    together = Lockstep(folder, tp)
    for slot, prompt in enumerate(prompts):
        together.prefill(slot, prompt)
    before = together.states[0].k_cache[0].clone()
    outputs = together.decode([2, 0, 1, -1])
    changed = (together.states[0].k_cache[0] != before).any(dim=(1, 3)).nonzero().tolist()
    assert sorted(changed) == [[0, len(PROMPT)], [1, 3], [2, 5]]
    for row, slot in enumerate((2, 0, 1)):
        alone = Lockstep(folder, tp)
        alone.prefill(slot, prompts[slot])
        expected = alone.decode([slot])
        assert outputs.tokens[row] == expected.tokens[0]
        torch.testing.assert_close(
            together.vocab_logits(outputs)[row], alone.vocab_logits(expected)[0],
            atol=TOLERANCE, rtol=TOLERANCE,
        )  # fmt: skip


def test_nan_is_an_error_and_not_token_zero(folders):
    folder, _ = folders["llama"]
    broken = Lockstep(folder, 1)
    broken.weights[0]["model.norm.weight"].weight.fill_(float("nan"))
    with pytest.raises(DeviceError, match="NaN"):
        broken.prefill(0, PROMPT)
