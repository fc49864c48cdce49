"""Sampling under controls with the demo model on the CPU: a request's tokens do not depend on its neighbours,
on its slot or on the TP degree; every control does what it says; prefix caching gives the same text."""

from __future__ import annotations

import pytest

from engine import LLM, SamplingParams
from engine.demo import demo_model_dir

pytestmark = pytest.mark.timeout(900)

PROMPTS = ["The capital of France is", "Once upon a time", "2 + 2 =", "def f(x):"]
PARAMS = [
    SamplingParams(temperature=0.8, seed=1, top_k=20, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=2, top_p=0.9, repetition_penalty=1.1, max_tokens=12,
                   ignore_eos=True),
    SamplingParams(temperature=1.2, seed=3, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=0, presence_penalty=1.0, frequency_penalty=0.5, max_tokens=12,
                   ignore_eos=True),
]  # fmt: skip


def engine(**options):
    return LLM(demo_model_dir(), device="cpu", dtype="float32", max_model_len=256, **options)


def ids(outputs):
    return [o.outputs[0].token_ids for o in outputs]


@pytest.fixture(scope="module")
def llm():
    with engine() as made:
        yield made


@pytest.fixture(scope="module")
def together(llm):
    return ids(llm.generate(PROMPTS, PARAMS, use_tqdm=False))


def test_neighbours_and_slots_do_not_matter(llm, together):
    alone = [llm.generate(p, s, use_tqdm=False)[0] for p, s in zip(PROMPTS, PARAMS)]
    assert ids(alone) == together
    backwards = llm.generate(PROMPTS[::-1], PARAMS[::-1], use_tqdm=False)
    assert ids(backwards)[::-1] == together


def test_the_degree_does_not_matter(together):
    """fp32 logits differ by rounding (1e-5 of their size) between degrees: a near tie of scores within that
    would be needed to change one of these 48 tokens."""
    with engine(tensor_parallel_size=3) as split:
        assert ids(split.generate(PROMPTS, PARAMS, use_tqdm=False)) == together


def test_controls_do_what_they_say(llm):
    def run(prompt=PROMPTS[1], **params):
        [output] = llm.generate(
            prompt, SamplingParams(max_tokens=24, ignore_eos=True, **params), use_tqdm=False
        )
        return output.outputs[0].token_ids

    greedy = run()
    assert run(temperature=1.0, top_k=1) == run(temperature=1.0, top_p=0.0) == greedy
    assert run(temperature=1.0, min_p=1.0) == greedy
    assert run(temperature=2.0, seed=1) != greedy
    banned = run(logit_bias={greedy[0]: -100.0})
    assert greedy[0] not in banned
    forced = run(logit_bias={greedy[3]: 1000.0})
    assert set(forced) == {greedy[3]}
    penalised = run(frequency_penalty=2.0, presence_penalty=2.0, repetition_penalty=5.0)
    assert max(map(penalised.count, penalised)) < max(map(forced.count, forced))
    assert run() == greedy, "a slot keeps nothing of its last request's controls"


def test_prefix_caching_gives_the_same_text():
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    params = SamplingParams(max_tokens=24)

    def talk(llm):
        history, outputs = list(messages), []
        for question in (None, "And of Italy?"):
            if question:
                history.append({"role": "user", "content": question})
            [output] = llm.chat(history, params, use_tqdm=False)
            history.append({"role": "assistant", "content": output.outputs[0].text})
            outputs.append(output)
        return outputs

    with engine(max_num_seqs=2) as plain, engine(max_num_seqs=2, prefix_caching=True) as caching:
        expected, got = talk(plain), talk(caching)
    assert ids(got) == ids(expected)
    assert got[0].metrics.cached_tokens == 0 and got[1].metrics.cached_tokens > 30
    assert all(o.metrics.cached_tokens == 0 for o in expected)
