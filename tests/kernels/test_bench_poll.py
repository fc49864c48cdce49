"""bench/poll.py without a card: its loopback chain in the interpreter, on a tiny shard."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bench import deployment, gemv_workers, poll
from engine.config import preset

TINY = replace(
    preset("qwen2.5-0.5b"), hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16,
    intermediate_size=96,
)  # fmt: skip


@pytest.fixture
def chain(device, monkeypatch):
    for module in (poll, gemv_workers, deployment):
        monkeypatch.setattr(module, "preset", lambda name: TINY)
    monkeypatch.setattr(poll, "DEVICE", device)
    monkeypatch.setattr(poll, "LAYERS", 2)
    if device == "cpu":
        monkeypatch.setattr(poll, "LATE_NS", 0)  # no clock in the interpreter
    monkeypatch.setattr(
        poll, "tuned", lambda weight, sms: poll.heuristic(weight.n, weight.k, weight.dtype, sms)
    )
    return poll.Chain("tiny", 2, False, 1, 132)


def test_forms_agree_and_a_difference_is_found(chain, monkeypatch):
    lines = {form: chain.line(form) for form in poll.FORMS}
    lengths = {form: len(line) // 4 for form, line in lines.items()}
    late = {
        f"{form} late": 3 + (form == "separate") for form in ("separate", "polled", "polled 1/SM")
    }
    assert lengths == {"none": 2, "separate": 3, "polled": 2, "polled 1/SM": 2, **late}
    chain.check(lines)
    first = chain.run(lines["polled"], "polled")
    assert len(first) == 4 * 2 + 2 * 2 and not torch.equal(first[0], chain.start)
    chain.w["o"][1].mul_(2)  # lines hold the same tensors: both forms see it
    assert not torch.equal(chain.run(lines["polled"], "polled")[-1], first[-1])
    lines["polled"][3].options["eps"] = 0.5
    with pytest.raises(RuntimeError, match="other bits"):
        chain.check(lines)
