"""Argmax and sampling: the noise, the order of candidates, the state updates, the exchange between
ranks.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from engine.errors import EngineError
from engine.kernels.all_reduce import AllReduceConfig, all_reduce, all_reduce_ref
from engine.kernels.argmax import (
    RING_NAN,
    RING_PADDING,
    argmax_finish,
    argmax_partial,
    argmax_poll,
    argmax_programs,
    argmax_push,
    gumbel,
    gumbel_ref,
    sample_ref,
)
from engine.kernels.slots import LamportWorkspace, argmax_workspace, peer_table
from tests.kernels.collective_group import random_delay, run_ranks, status_words

SLOTS = 8
RING = 4


@triton.jit
def gumbel_kernel(out, seed, position, first, BLOCK: tl.constexpr):
    ids = first + tl.arange(0, BLOCK)
    zero = tl.zeros((1,), tl.int32)
    tl.store(out + tl.arange(0, BLOCK), gumbel(zero + seed, zero + position, ids))


@pytest.mark.parametrize(("seed", "position"), [(0, 0), (1, 7), (-5, 131071), (2**31 - 1, 3)])
def test_noise_equals_its_reference(seed, position, device):
    out = torch.full((4096,), float("nan"), device=device)
    gumbel_kernel[(1,)](out, seed, position, 148000, 4096)
    reference = torch.from_numpy(gumbel_ref(seed, position, np.arange(148000, 152096)))
    if device == "cpu":
        assert torch.equal(out, reference)
    # A GPU's log may differ by an ulp, and -log(small) carries it: 2 ulp of values up to 17.
    torch.testing.assert_close(out.cpu(), reference, rtol=1e-6, atol=2e-6)


def test_noise_is_gumbel_and_independent():
    """2e6 draws: mean Euler's constant, deviation pi / sqrt 6; standard errors 1e-3 and 1.4e-3."""
    draws = gumbel_ref(11, 5, np.arange(2_000_000)).astype(np.float64)
    assert np.isfinite(draws).all()
    assert abs(draws.mean() - 0.577216) < 5e-3
    assert abs(draws.std() - 1.282550) < 7e-3
    others = (gumbel_ref(12, 5, np.arange(2_000_000)), gumbel_ref(11, 6, np.arange(2_000_000)))
    for other in (*others, np.roll(draws, 1)):
        assert abs(np.corrcoef(draws, other)[0, 1]) < 5e-3  # standard error 7e-4


def test_samples_follow_the_softmax():
    """Chi-square over 6 ids, 20000 positions: mean 5, deviation sqrt 10; 30 is 8 of them away."""
    logits = torch.tensor([[0.0, 1.0, -1.0, 2.0, 0.5, float("-inf")]])
    for temperature in (0.7, 1.5):
        count = 20_000
        noise = np.stack([gumbel_ref(3, p, np.arange(6)) for p in range(count)])
        chosen = (logits.numpy() + np.float32(temperature) * noise).argmax(axis=1)
        expected = torch.softmax(logits[0] / temperature, 0).numpy() * count
        seen = np.bincount(chosen, minlength=6)
        assert seen[5] == 0
        assert (((seen - expected) ** 2)[:5] / expected[:5]).sum() < 30
        picked = sample_ref(
            [logits[:, :3], logits[:, 3:]],
            torch.tensor([temperature]),
            torch.tensor([3]),
            torch.tensor([17]),
        )
        assert picked.item() == chosen[17]


class State:
    """One rank's slot state, with values that a wrong write would disturb."""

    def __init__(self, device: str, rows: int) -> None:
        self.tokens = torch.full((SLOTS,), -7, dtype=torch.int32, device=device)
        self.positions = (torch.arange(SLOTS) * 10).int().to(device)
        self.temperature = torch.tensor([0, 0.5, 0, 1.0, 2.0, 0, 0.9, 0]).to(device)
        self.seeds = torch.tensor([5, -1, 2**31 - 1, -(2**31), 9, 9, 77, 0]).int().to(device)
        self.step = torch.zeros(1, dtype=torch.int32, device=device)
        self.ring = torch.full((RING, rows), -1, dtype=torch.int32)
        if device == "cuda":
            self.ring = self.ring.pin_memory()

    def partial(self, shard, row_slots, vocab, offset, request=None):
        shape = (shard.shape[0], argmax_programs(shard.shape[1]))
        values = torch.full(shape, float("nan"), device=shard.device)
        ids = torch.full(shape, -1, dtype=torch.int32, device=shard.device)
        argmax_partial(
            shard,
            self.temperature,
            self.seeds,
            self.positions,
            row_slots,
            values,
            ids,
            vocab_size=vocab,
            id_offset=offset,
            request=request,
        )
        return values, ids


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def expected_ids(shards, state, row_slots, vocab):
    slots = row_slots.clamp(min=0).long()
    return sample_ref(
        shards, state.temperature[slots], state.seeds[slots], state.positions[slots], vocab
    )


@pytest.mark.parametrize(("rows", "columns"), [(1, 5000), (8, 700), (3, 2048)])
def test_one_rank(rows, columns, device):
    vocab = columns - 13
    state = State(device, rows)
    row_slots = torch.tensor([5, -1, 1, 2, 3, 4, 6, 0][:rows], dtype=torch.int32, device=device)
    for step in range(RING + 1):
        before = state.positions.clone()
        logits = torch.randn(rows, columns, device=device)
        logits[:, vocab:] = 50.0  # padding ids must never win
        reference = expected_ids([logits], state, row_slots, vocab)
        values, ids = state.partial(logits, row_slots, vocab, 0)
        argmax_finish(values, ids, state.tokens, state.positions, row_slots, state.ring, state.step)
        synchronize(device)
        for r, slot in enumerate(row_slots.tolist()):
            if slot < 0:
                assert state.ring[step % RING, r] == RING_PADDING
                continue
            assert state.ring[step % RING, r] == reference[r] == state.tokens[slot]
            assert state.positions[slot] == before[slot] + 1
    live = set(row_slots.tolist())
    for slot in set(range(SLOTS)) - live:
        assert state.tokens[slot] == -7 and state.positions[slot] == 10 * slot
    assert state.step.item() == RING + 1


def greedy_case(device, shards, vocab=None):
    """Ring entry of one greedy row whose logits are given per rank; all ranks in lockstep."""
    world = len(shards)
    columns = shards[0].shape[0]
    workspace = argmax_workspace(world, 1)
    buffers = [workspace.allocate(device) for _ in range(world)]
    table = peer_table(buffers, device)
    status = status_words(device)
    states = [State(device, 1) for _ in range(world)]
    row_slots = torch.tensor([2], dtype=torch.int32, device=device)
    for r in range(world):
        shard = shards[r].to(device).reshape(1, -1)
        found = states[r].partial(shard, row_slots, vocab or world * columns, r * columns)
        argmax_push(*found, table, 0, rank=r, world=world)
    for r in range(world):
        s = states[r]
        argmax_poll(
            buffers[r], 0, 0, s.tokens, s.positions, row_slots, s.ring, s.step, status,
            rank=r, world=world, call_site=1,
        )  # fmt: skip
    synchronize(device)
    assert status[0] == 0
    assert len({int(s.tokens[2]) for s in states}) == 1, "ranks disagree"
    assert all(bool((b.view(torch.int32) == -(2**31)).all()) for b in buffers), "not re-armed"
    return int(states[0].ring[0, 0]), int(states[0].tokens[2])


def test_lowest_id_wins_ties_across_programs_and_ranks(device):
    columns = 4500  # three programs a rank
    flat = torch.zeros(4 * columns)
    for places in ([7, 17000], [4000, 4499, 9001], [2047, 2048], [4499, 4500], [12345]):
        flat.fill_(-1.0)
        flat[torch.tensor(places)] = 3.0
        assert greedy_case(device, list(flat.split(columns)))[0] == min(places)
    # The two zeros are equal, so the first one wins whatever its sign.
    flat.fill_(-1.0)
    flat[5000] = -0.0
    flat[6000] = 0.0
    assert greedy_case(device, list(flat.split(columns)))[0] == 5000


def test_extreme_logits(device):
    low = torch.full((600,), float("-inf"))
    assert greedy_case(device, list(low.split(300)))[0] == 0
    low[333] = -3e38
    assert greedy_case(device, list(low.split(300)))[0] == 333
    high = torch.randn(600)
    high[450] = float("inf")
    assert greedy_case(device, list(high.split(300)))[0] == 450
    negative = torch.full((600,), -5.0)
    negative[301] = -4.0
    assert greedy_case(device, list(negative.split(300)))[0] == 301


def test_nan_is_flagged_on_every_rank(device):
    for place in (0, 299, 300, 599):
        logits = torch.randn(600)
        logits[place] = float("nan")
        logits[100] = float("inf")
        shown, token = greedy_case(device, list(logits.split(300)))
        assert shown == RING_NAN and 0 <= token < 600
    padded = torch.randn(600)
    padded[580:] = float("nan")  # beyond the vocabulary: not real
    assert greedy_case(device, list(padded.split(300)), vocab=580)[0] == int(padded[:580].argmax())
    # A last rank that holds nothing but padding.
    assert greedy_case(device, list(padded.split(300)), vocab=280)[0] == int(padded[:280].argmax())


def test_prefill_request_sets_the_position(device):
    state = State(device, 1)
    request = torch.tensor([4, 100, 28], dtype=torch.int32, device=device)
    nowhere = torch.full((1,), -1, dtype=torch.int32, device=device)
    logits = torch.randn(1, 900, device=device)
    values, ids = state.partial(logits, nowhere, 900, 0, request)
    argmax_finish(
        values, ids, state.tokens, state.positions, nowhere, state.ring, state.step, request=request
    )
    synchronize(device)
    reference = sample_ref(
        [logits], state.temperature[4:5], state.seeds[4:5], torch.tensor([127]), 900
    )
    assert state.tokens[4] == reference[0] == state.ring[0, 0]
    assert state.positions[4] == 128
    assert state.tokens.tolist().count(-7) == SLOTS - 1


def test_bad_logits_are_refused(device):
    state = State(device, 1)
    with pytest.raises(EngineError, match="fp32"):
        state.partial(torch.zeros(1, 8, device=device).half(), state.step, 8, 0)


@pytest.mark.parametrize(("world", "steps"), [(2, 30), (4, 12), (8, 8)])
def test_decode_steps_between_processes(world, steps, device):
    """An all-reduce, then sampling, per step: one argmax slot, re-armed by its own poll."""
    if device != "cpu":
        pytest.skip("ranks are processes only in the interpreter")
    rows, columns = 3, 256
    vocab = world * columns - 9
    reduce_space = LamportWorkspace(world, 1, 64, slots=4)
    sample_space = argmax_workspace(world, rows)
    reduce_buffers = [reduce_space.allocate("cpu").share_memory_() for _ in range(world)]
    sample_buffers = [sample_space.allocate("cpu").share_memory_() for _ in range(world)]
    reduce_table = peer_table(reduce_buffers, "cpu")
    sample_table = peer_table(sample_buffers, "cpu")
    status = torch.zeros(8, dtype=torch.int32).share_memory_()
    config = AllReduceConfig(block=32, num_warps=1)
    row_slots = torch.tensor([6, -1, 2], dtype=torch.int32)
    torch.manual_seed(world)
    logits = torch.randn(steps, world, rows, columns)
    partials = torch.randn(steps, world, 1, 64).bfloat16()

    def body(rank: int) -> None:
        state = State("cpu", rows)
        for step in range(steps):
            out = torch.full((1, 64), float("nan"), dtype=torch.bfloat16)
            random_delay()
            all_reduce(
                partials[step, rank], reduce_buffers[rank], reduce_table,
                reduce_space.slot_offset(step), reduce_space.clear_offset(step), None, out, status,
                rank=rank, world=world, call_site=step, config=config, limit_us=20_000_000,
            )  # fmt: skip
            assert torch.equal(out, all_reduce_ref(list(partials[step])))
            reference = expected_ids(list(logits[step]), state, row_slots, vocab)
            found = state.partial(logits[step, rank], row_slots, vocab, rank * columns)
            random_delay()
            argmax_push(*found, sample_table, 0, rank=rank, world=world)
            argmax_poll(
                sample_buffers[rank], 0, 0, state.tokens, state.positions, row_slots, state.ring,
                state.step, status, rank=rank, world=world, call_site=99, limit_us=20_000_000,
            )  # fmt: skip
            assert status[0] == 0, status.tolist()
            assert state.tokens[[6, 2]].tolist() == reference[[0, 2]].tolist(), (rank, step)
            if rank == 0:
                shown = state.ring[step % RING].tolist()
                assert shown == [reference[0], RING_PADDING, reference[2]]

    run_ranks(world, body)
