"""The sampling tail, lowered and run launch by launch after real steps: its token is the reference's for the
logits that the step left, on every rank; prompt and answer are counted."""

from __future__ import annotations

import pytest
import torch

from engine.graph.lower import lower
from engine.graph.tail import sampling_tail
from engine.kernels.sample_ref import sample_ref
from engine.runtime.controls import set_controls
from engine.sampling import SamplingParams
from tests.graph.models import save_model
from tests.graph.test_lower import PROMPT, TINY, Lowered

PARAMS = SamplingParams(
    temperature=1.3, seed=5, top_k=40, top_p=0.9, min_p=0.01, repetition_penalty=1.2,
    presence_penalty=0.3, frequency_penalty=0.2, logit_bias={7: 3.0, 200: -2.0},
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    save_model("qwen2", path, overrides=TINY)
    return path


class WithTails(Lowered):
    def __init__(self, folder, tp):
        super().__init__(folder, tp)
        for key in (("decode", 1), ("decode", 2), ("prefill", 1)):
            graph, buffers = sampling_tail(self.config, phase=key[0], rows=key[1], tp=tp)
            self.lines[key] = [lower(graph, buffers, rank, pdl=False) for rank in self.ranks]
        self.counts: dict[int, torch.Tensor] = {}

    def control(self, slot, params, prompt):
        states = [rank.state for rank in self.ranks]
        controls = params.controls(prompt, self.config.vocab_size)
        set_controls(states, slot, controls)
        for state in states:
            state.temperature[slot], state.seeds[slot] = params.temperature, params.seed
        self.bias = torch.cat([state.bias for state in states], -1)
        self.counts[slot] = torch.cat([state.counts[slot] for state in states], -1)

    def tail(self, key, slots, logits, positions):
        """Run a tail; the tokens of its ring row, checked against the reference and the ranks' states."""
        state = self.ranks[0].state
        index = torch.tensor(slots)
        expected = sample_ref(
            [logits], state.temperature[index], state.seeds[index], torch.tensor(positions),
            self.config.vocab_size, state.controls[index],
            torch.stack([self.counts.get(s, torch.zeros_like(self.bias[0]).int()) for s in slots]),
            self.bias[index],
        ).tolist()  # fmt: skip
        self.run(key)
        got = self.ring()[-1]
        assert got[: len(slots)] == expected
        for row, slot in enumerate(slots):
            if slot in self.counts:
                self.counts[slot][got[row]] += 2
                whole = torch.cat([rank.state.counts[slot] for rank in self.ranks], -1)
                assert torch.equal(whole, self.counts[slot])
            for rank in self.ranks:
                assert int(rank.state.tokens[slot]) == got[row]
                assert int(rank.state.positions[slot]) == positions[row] + 1
                assert rank.status.tolist() == [0] * 8
        return got


@pytest.mark.parametrize("tp", [1, 2])
def test_tails_replace_the_token(folder, tp):
    ours = WithTails(folder, tp)
    ours.control(1, PARAMS, PROMPT)
    ours.prefill(1, PROMPT)
    tokens = [ours.tail(("prefill", 1), [1], ours.logits(("prefill", 16, "last")), [10])[0]]
    assert ours.counts[1].bitwise_and(1).nonzero().flatten().tolist() == sorted(set(PROMPT))
    for step in range(4):
        ours.decode([1])
        logits = ours.logits(("decode", 1, "last"))
        tokens += ours.tail(("decode", 1), [1], logits, [11 + step])[:1]
    ours.prefill(0, PROMPT[:3])  # slot 0 has no controls, and is sampled as by the plain step
    greedy = ours.ring()[-1][0]
    ours.decode([1, 0])
    logits, plain = ours.logits(("decode", 2, "last")), ours.ring()[-1]
    got = ours.tail(("decode", 2), [1, 0], logits, [15, 3])
    assert got[1] == plain[1] and greedy >= 0
    assert len(set(tokens)) > 2
