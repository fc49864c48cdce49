"""Sampling controls of requests as rows of the slot-indexed state (definition: kernels/sample_ref.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from engine.kernels.sample_ref import COUNTED, NEUTRAL
from engine.runtime.state import RankState
from engine.sampling import Controls


def fill(
    controls: Controls | None, row: torch.Tensor, counts: torch.Tensor, bias: torch.Tensor
) -> tuple[bool, bool]:
    """Write a request's controls into row fp32 [8], counts int32 [V] and bias fp32 [V] (host memory, V over
    all ranks); counts and bias only where they are used: returns (counted, biased)."""
    if controls is None:
        row.copy_(torch.tensor(NEUTRAL))
        return False, False
    counted, biased = controls.counted, bool(controls.logit_bias)
    values = (
        max(controls.top_k, 0), controls.top_p, controls.min_p, controls.repetition_penalty,
        controls.frequency_penalty, controls.presence_penalty, counted, biased,
    )  # fmt: skip
    row.copy_(torch.tensor([float(v) for v in values]))
    if counted:
        counts.zero_()
        counts[torch.tensor(controls.prompt_token_ids, dtype=torch.long)] = 1
    if biased:
        bias.zero_()
        ids = torch.tensor(list(controls.logit_bias))
        bias[ids] = torch.tensor([float(v) for v in controls.logit_bias.values()])
    return counted, biased


def set_controls(states: Sequence[RankState], slot: int, controls: Controls | None) -> None:
    """`fill` into the states of all ranks, on the CPU."""
    width = states[0].counts.shape[1]
    counts = torch.empty(width * len(states), dtype=torch.int32)
    bias = torch.empty(width * len(states))
    counted, biased = fill(controls, states[0].controls[slot], counts, bias)
    for rank, state in enumerate(states):
        state.controls[slot] = states[0].controls[slot]
        shard = slice(rank * width, (rank + 1) * width)
        if counted:
            state.counts[slot] = counts[shard]
        if biased:
            state.bias[slot] = bias[shard]


def reference_arguments(states: Sequence[RankState], slots: torch.Tensor) -> dict[str, Any]:
    """The controls' arguments of sample_ref for rows in these slots; {} if all are neutral."""
    controls = states[0].controls[slots]
    if bool((controls == torch.tensor(NEUTRAL)).all()):
        return {}
    return {
        "controls": controls,
        "counts": torch.cat([state.counts[slots] for state in states], dim=-1),
        "bias": torch.cat([state.bias[slots] for state in states], dim=-1),
    }


def count_tokens(state: RankState, rank: int, slots: torch.Tensor, tokens: torch.Tensor) -> None:
    """Add the chosen tokens to the rank's counts, for slots that count. slots and tokens [n]."""
    width = state.counts.shape[1]
    local = tokens - rank * width
    mine = (state.controls[slots, COUNTED] > 0) & (local >= 0) & (local < width)
    state.counts[slots[mine], local[mine]] += 2
