"""SamplingParams: every bad value is refused by the name of its field; logprobs match a reference."""

from __future__ import annotations

import math

import pytest
import torch

from engine.errors import RequestError
from engine.outputs import top_logprobs
from engine.request import Request
from engine.sampling import SamplingParams


def test_defaults_are_greedy_and_neutral():
    params = SamplingParams()
    assert params.temperature == 0 and params.max_tokens is None and not params.needs_logits
    assert (
        SamplingParams(logprobs=0).needs_logits and SamplingParams(prompt_logprobs=1).needs_logits
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", 1e39),  # over fp32
        ("temperature", 1.1e30),
        ("temperature", 10**400),
        ("temperature", "hot"),
        ("temperature", True),
        ("max_tokens", 0),
        ("max_tokens", 1.5),
        ("min_tokens", -1),
        ("min_tokens", None),
        ("seed", -1),
        ("seed", 2**31),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", [1]),
        ("stop", 3),
        ("stop_token_ids", "12"),
        ("stop_token_ids", [1.0]),
        ("stop_token_ids", 5),
        ("stop_token_ids", [3, -1]),
        ("ignore_eos", 1),
        ("logprobs", -1),
        ("logprobs", 1001),
        ("prompt_logprobs", True),
        # Not implemented: refused unless neutral, never ignored.
        ("n", 2),
        ("n", True),
        ("bad_words", ["x"]),
        ("top_p", 1.1),
        ("top_p", -0.1),
        ("top_p", math.nan),
        ("top_k", -2),
        ("top_k", 1.5),
        ("top_k", 2**24 + 1),
        ("min_p", 2),
        ("presence_penalty", 2.5),
        ("frequency_penalty", "much"),
        ("repetition_penalty", 0),
        ("repetition_penalty", math.inf),
        ("repetition_penalty", 1e-300),  # 0 in fp32
        ("repetition_penalty", 1e39),
        ("logit_bias", {1: math.nan}),
        ("logit_bias", {1: -1e39}),
        ("logit_bias", {1: 10**400}),
        ("logit_bias", {-1: 2.0}),
        ("logit_bias", {"x": 2.0}),
        ("logit_bias", [1]),
    ],
)
def test_a_bad_value_is_refused_by_name(field, value):
    with pytest.raises(RequestError, match=rf"\b{field}\b"):
        SamplingParams(**{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [("n", 1), ("top_p", 1), ("top_p", 1.0), ("top_k", -1), ("top_k", 0), ("min_p", 0.0)],
)
def test_neutral_values_are_accepted(field, value):
    assert getattr(SamplingParams(**{field: value}), field) == value


def test_extremes_that_are_accepted_stay_finite_in_fp32():
    noise, logit = 104.0, 1e8  # the largest of each
    for params in (SamplingParams(temperature=1e30), SamplingParams(repetition_penalty=1e30)):
        factor = max(params.temperature, params.repetition_penalty)
        assert torch.isfinite(torch.tensor(factor) * noise) and torch.isfinite(
            torch.tensor(factor) * logit
        )
    low = SamplingParams(repetition_penalty=1e-30).repetition_penalty
    assert torch.isfinite(torch.tensor(logit) / torch.tensor(low))


def test_controls_are_none_unless_something_needs_them():
    assert SamplingParams(temperature=1, seed=3).controls([1], 10) is None
    assert SamplingParams(top_k=5, top_p=0.5, min_p=0.1).controls([1], 10) is None  # greedy
    assert SamplingParams(temperature=1, top_k=-1, logit_bias={}).controls([1], 10) is None
    drawn = SamplingParams(temperature=1, top_k=5, logit_bias={"3": 2}).controls([1, 2], 10)
    assert drawn.top_k == 5 and drawn.logit_bias == {3: 2.0} and not drawn.counted
    greedy = SamplingParams(presence_penalty=0.5).controls([1, 2], 10)
    assert greedy.counted and greedy.prompt_token_ids == (1, 2)
    with pytest.raises(RequestError, match=r"logit_bias\[10\] .* vocabulary of 10"):
        SamplingParams(logit_bias={10: 1}).controls([1], 10)


def test_an_unknown_field_is_an_error():
    with pytest.raises(TypeError, match="best_of"):
        SamplingParams(best_of=3)


def test_stop_takes_a_string_or_a_list():
    assert SamplingParams(stop="END").stop == ("END",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(stop=None).stop == ()
    assert SamplingParams(stop_token_ids=[5, 6]).stop_token_ids == (5, 6)


def test_stop_ids_are_within_the_vocabulary():
    SamplingParams(stop_token_ids=[0, 99]).check_vocabulary(100)
    SamplingParams().check_vocabulary(100)
    beyond = SamplingParams(stop_token_ids=[1, 100])
    with pytest.raises(RequestError, match=r"holds 100, which is outside the vocabulary of 100"):
        Request("0", [1], beyond, max_model_len=9, vocab_size=100)


def test_min_tokens_beyond_max_tokens():
    with pytest.raises(RequestError, match="min_tokens=9 is more than max_tokens=3"):
        SamplingParams(max_tokens=3, min_tokens=9)


def test_top_logprobs_against_log_softmax():
    torch.manual_seed(0)
    logits = torch.randn(4, 50) * 7
    logits[3] = logits[3].clamp(max=2.0)  # a tie at the top
    chosen = [int(logits[0].argmin()), int(logits[1].argmax()), 7, 11]
    rows = top_logprobs(logits, chosen, 5, lambda i: f"t{i}")
    reference = torch.log_softmax(logits.double(), dim=-1)
    for i, (row, token) in enumerate(zip(rows, chosen)):
        assert next(iter(row)) == token and row[token].decoded_token == f"t{token}"
        assert len(row) in (5, 6)
        for t, entry in row.items():
            # fp64 throughout; only the order of the sum differs: 50 terms x 2^-53 x |log p| < 1e-12
            assert entry.logprob == pytest.approx(float(reference[i, t]), abs=1e-12)
        assert row[token].rank == 1 + int((logits[i] > logits[i, token]).sum())
        best = set(torch.topk(logits[i], 5).indices.tolist())
        assert best <= set(row)
    assert len(rows[0]) == 6 and rows[0][chosen[0]].rank == 50
    assert len(rows[1]) == 5 and rows[1][chosen[1]].rank == 1
    assert list(top_logprobs(logits, chosen, 0, str)[2]) == [7]
