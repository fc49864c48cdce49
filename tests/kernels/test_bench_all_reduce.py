"""The all-reduce bench's checks, in lockstep in the interpreter: they pass and can fail."""

from __future__ import annotations

import pytest
import torch

from bench.all_reduce_group import FORMS, Group
from engine.kernels.all_reduce import AllReduceConfig


@pytest.mark.parametrize("form", [form for form, fused in FORMS.items() if not fused])
def test_checked_calls(form, device):
    group = Group(
        form,
        2,
        [torch.device(device, 0) if device == "cuda" else torch.device(device)],
        256,
        config=AllReduceConfig(block=32, num_warps=1),
        programs=1,
    )
    group.preload()
    assert group.status[0] == 0
    group.randomise_delays(0.3, 100_000)
    for _ in range(2):
        for call in range(4):
            group.checked_call(call)
        group.advance()
    verdict = group.verdict()
    assert verdict["wrong"] == 0 and verdict["ranks_equal"] and verdict["status"][0] == 0
    group.members[0].expected[3, 5] ^= 1
    group.members[1].x_pool[6, 7] += 1
    for call in range(8):  # every row of the pool from 2 to 9
        group.checked_call(call)
    # One element of rank 0's row 3; one of every rank in row 6.
    assert group.verdict()["wrong"] == 3
    assert group.verdict()["ranks_equal"]
    group.members[0].found[1] += 1
    assert not group.verdict()["ranks_equal"]
