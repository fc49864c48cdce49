"""The demo model through the public API on the CPU against transformers: greedy ids and log-probabilities."""

from __future__ import annotations

import pytest
import torch

from engine import LLM, SamplingParams
from engine.demo import demo_model_dir
from engine.errors import EngineError

# Quiet, this file takes about a minute; the limit allows for a loaded machine.
pytestmark = pytest.mark.timeout(1500)

PROMPTS = [
    "The capital of France is", "Water boils at", "def fibonacci(n):", "Once upon a time",
    "The three primary colours are", "In 1969, humans first", "To make bread you need", "2 + 2 =",
    "The opposite of hot is", "Photosynthesis is the process", "A haiku about the sea:\n",
    "SELECT name FROM users", "Dear Sir or Madam,", "The largest planet is", "Q: Who wrote Hamlet?\nA:",
    "import numpy as np\n", "The mitochondria is", "Roses are red,", "My favourite food is",
    "He opened the door and",
]  # fmt: skip
TOKENS = 64


@pytest.fixture(scope="module")
def folder():
    return demo_model_dir()


@pytest.fixture(scope="module")
def reference(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(folder, device="cpu", dtype="float32", max_model_len=256) as engine:
        yield engine


@torch.inference_mode()
def reference_logprobs(reference, ids):
    return reference(torch.tensor([ids])).logits[0].log_softmax(-1)


def test_greedy_ids_equal_transformers(llm, reference):
    """20 prompts x 64 tokens, eight at a time. If every id is the argmax of transformers' logits given
    the ids before it, then by induction transformers' own greedy answer is the same."""
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    for prompt, output in zip(PROMPTS, outputs):
        start, answer = output.prompt_token_ids, output.outputs[0].token_ids
        assert len(answer) == TOKENS and output.outputs[0].finish_reason == "length"
        logprobs = reference_logprobs(reference, [*start, *answer])
        expected = logprobs[len(start) - 1 : -1].argmax(-1).tolist()
        assert answer == expected, prompt


def test_logprobs_equal_transformers(llm, reference):
    """fp32 on both sides: 30 layers of sums over <= 1536 terms, reordered. Each costs about
    sqrt(1536) * 2^-24 = 2e-6 of its terms' size; activations of this model reach 1e2 to 1e3 in a few
    channels, so logits of size 10 to 30 move by up to about 1e-3."""
    params = SamplingParams(
        temperature=0, max_tokens=8, logprobs=5, prompt_logprobs=3, ignore_eos=True
    )
    (output,) = llm.generate(PROMPTS[2], params, use_tqdm=False)
    ids, answer = output.prompt_token_ids, output.outputs[0]
    expected = reference_logprobs(reference, [*ids, *answer.token_ids])
    assert output.prompt_logprobs[0] is None and len(output.prompt_logprobs) == len(ids)
    for position in range(1, len(ids)):
        got = output.prompt_logprobs[position]
        assert ids[position] in got and len(got) >= 3
        for token, entry in got.items():
            assert entry.logprob == pytest.approx(float(expected[position - 1, token]), abs=2e-3)
    assert len(answer.logprobs) == 8
    for step, (token, got) in enumerate(zip(answer.token_ids, answer.logprobs)):
        row = expected[len(ids) - 1 + step]
        assert got[token].rank == 1 and len(got) == 5
        assert set(got) == set(row.topk(5).indices.tolist())
        for other, entry in got.items():
            assert entry.logprob == pytest.approx(float(row[other]), abs=2e-3)


def test_chat_answers_a_question(llm):
    (output,) = llm.chat(
        [{"role": "user", "content": "What is the capital of France?"}],
        SamplingParams(temperature=0, max_tokens=40),
        use_tqdm=False,
    )
    assert "Paris" in output.outputs[0].text and output.outputs[0].finish_reason == "stop"


def test_tp3_lockstep_gives_the_same_ids(folder, llm):
    """9 heads, 3 KV heads: TP=3 is the demo model's other degree."""
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    with LLM(
        folder, device="cpu", dtype="float32", max_model_len=128, tensor_parallel_size=3
    ) as split:
        got = split.generate(PROMPTS[:3], params, use_tqdm=False)
    whole = llm.generate(PROMPTS[:3], params, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in got] == [o.outputs[0].token_ids for o in whole]


def test_impossible_degree_lists_the_valid_ones(folder):
    with pytest.raises(
        EngineError, match=r"9 attention heads do not divide by 2; valid degrees: 1, 3"
    ):
        LLM(folder, device="cpu", tensor_parallel_size=2)


def test_fp8_kv_decodes_what_its_prefill_predicts(folder):
    """--kv-cache-dtype fp8: three answers decoded together; then each prompt and answer read as one prompt, in a slot that
    held another: every token is the best again, as scales lie with the slot and depend on nothing else. The first
    tokens are those of a 16-bit cache, which the model is sure of; later ones may part."""
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    answers = {}
    for kv in ("auto", "fp8"):
        options = dict(device="cpu", dtype="float32", max_model_len=128, kv_cache_dtype=kv)
        with LLM(folder, max_num_seqs=3, **options) as llm:
            outputs = llm.generate(PROMPTS[:3], params, use_tqdm=False)
            answers[kv] = [output.outputs[0].token_ids for output in outputs]
            if kv == "auto":
                continue
            for output in outputs:
                start, answer = output.prompt_token_ids, output.outputs[0].token_ids
                read = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
                again = llm.generate(
                    [{"prompt_token_ids": [*start, *answer]}], read, use_tqdm=False
                )
                for token, entries in zip(answer, again[0].prompt_logprobs[len(start) :]):
                    best = max(entry.logprob for entry in entries.values())
                    assert entries[token].logprob > best - 0.02  # fp32 noise flips a code or two
    first = [a[0] == b[0] for a, b in zip(answers["auto"], answers["fp8"])]
    assert all(first) and answers["auto"] != answers["fp8"]
