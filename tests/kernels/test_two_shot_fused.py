"""The two-shot all-reduce in one launch: ranks as processes, bit for bit against the four launches.

A launch spins for its peers, so ranks cannot take turns in one process: these tests are for the interpreter. On cards
`bench.all_reduce` checks it (sections correctness and two_shot).
"""

from __future__ import annotations

import random
import time

import pytest
import torch

from engine.errors import EngineError
from engine.kernels import two_shot_fused
from engine.kernels.all_reduce import AllReduceConfig, all_reduce_ref
from engine.kernels.epilogue import shard_rows
from engine.kernels.sync import release_flag
from engine.kernels.two_shot import (
    MOST_PORTIONS,
    TwoShotWorkspace,
    two_shot_gather,
    two_shot_publish,
    two_shot_ranks,
    two_shot_reduce,
    two_shot_scatter,
)
from engine.kernels.two_shot_fused import two_shot_all_reduce
from tests.kernels.collective_group import (
    assert_same,
    inputs,
    random_delay,
    run_ranks,
    status_words,
)

NEAR_WRAP = 2**31 - 3  # epochs cross the sign of int32 within a test
LIMIT_US = 20_000_000  # a busy CI machine is not a lost peer
EPS = 1e-6
MOST, HIDDEN, DTYPE = 21, 32, torch.bfloat16


class Call:
    """One exchange: its size and form, its inputs, and what each rank holds behind the four launches."""

    def __init__(self, number: int, world: int) -> None:
        rng = random.Random(1000 * world + number)
        self.number = number
        self.rows = rng.choice([1, world - 1, *[MOST] * 3, *[rng.randint(2, MOST)] * 5])
        self.norm = rng.random() < 0.7
        self.fp8 = self.norm and rng.random() < 0.5
        self.length = rng.choice([0, rng.randint(1, self.rows)])  # 0: no last row
        self.config = AllReduceConfig(
            "two_shot", programs=rng.randint(1, 4), portions=rng.randint(1, MOST_PORTIONS)
        )
        *self.partials, residual = inputs(number, world, (self.rows, HIDDEN), DTYPE)
        self.residual = residual if rng.random() < 0.7 else None
        self.split = rng.random() < 0.25  # this call itself by the four launches
        self.weight = residual[0].nan_to_num(1.0, 1.0, 1.0) if self.norm else None

    def options(self) -> dict:
        request = torch.tensor([0, 3, self.length], dtype=torch.int32) if self.length else None
        return dict(
            eps=EPS, fp8=self.fp8, request=request, call_site=self.number, config=self.config,
            limit_us=LIMIT_US,
        )  # fmt: skip

    def h(self) -> torch.Tensor:
        return torch.full((self.rows, HIDDEN), 7.0, dtype=DTYPE)

    def wait(self) -> dict:
        return dict(call_site=self.number, config=self.config, limit_us=LIMIT_US)

    def held(self, end, h) -> list[torch.Tensor]:
        """All that a rank holds behind a call, as bytes."""
        found = [h, end.y(self.rows, self.fp8)]
        found += [end.scales(self.rows)] if self.fp8 else []
        found += [end.last()] if self.length else []
        return [t.contiguous().view(torch.uint8).clone() for t in found]


def poisoned(space: TwoShotWorkspace) -> torch.Tensor:
    buffer = space.allocate("cpu", NEAR_WRAP)
    buffer[space.partials_offset :] = 0xFF
    return buffer


def by_four_launches(call: Call, world: int) -> list[list[torch.Tensor]]:
    """What each rank holds, from fresh buffers, the ranks in lockstep."""
    space = TwoShotWorkspace(world, MOST, HIDDEN)
    ends = two_shot_ranks(space, [poisoned(space) for _ in range(world)], DTYPE)
    status, hs = status_words("cpu"), [call.h() for _ in range(world)]
    for end, x in zip(ends, call.partials):
        two_shot_scatter(x, end)
    for end in ends:
        two_shot_publish(end)
    for end, h in zip(ends, hs):
        two_shot_reduce(end, call.residual, h, call.weight, status, **call.options())
    for end in ends:
        two_shot_gather(end, call.rows, status, **call.wait())
    assert status[0] == 0
    return [call.held(end, h) for end, h in zip(ends, hs)]


@pytest.fixture(autouse=True)
def only_in_the_interpreter(device):
    if device != "cpu":
        pytest.skip(
            "ranks are processes only in the interpreter; bench.all_reduce runs it on cards"
        )


def release_and_stall(address, value, mask) -> None:
    """So that a peer sees a portion long before the next one is stored."""
    release_flag(address, value, mask)
    random_delay(0.2, 15e-3)


@pytest.mark.parametrize(("world", "calls"), [(2, 32), (3, 12), (4, 16)])
def test_processes_against_the_four_launches(world, calls, monkeypatch):
    """Random sizes, forms, programs and portions behind each other on one workspace, now and then a call by the four
    launches in between; random delays around calls and releases."""
    monkeypatch.setattr(two_shot_fused, "release_flag", release_and_stall)
    todo = [Call(number, world) for number in range(calls)]
    wanted = [by_four_launches(call, world) for call in todo]
    assert sum(call.split for call in todo) >= 2 and not all(call.split for call in todo)
    for call, ranks in zip(todo, wanted):  # the reference is right itself
        if not call.norm:
            y = ranks[0][1].view(DTYPE).view(call.rows, HIDDEN)
            assert_same(y, all_reduce_ref(call.partials, call.residual), f"call {call.number}")
    space = TwoShotWorkspace(world, MOST, HIDDEN)
    buffers = [poisoned(space).share_memory_() for _ in range(world)]
    ends = two_shot_ranks(space, buffers, DTYPE)
    status = torch.zeros(8, dtype=torch.int32).share_memory_()

    def body(rank: int) -> None:
        end = ends[rank]
        for call, ranks in zip(todo, wanted):
            x, h = call.partials[rank].clone(), call.h()
            random_delay()
            if call.split:
                two_shot_scatter(x, end)
                two_shot_publish(end)
                two_shot_reduce(end, call.residual, h, call.weight, status, **call.options())
                random_delay()
                two_shot_gather(end, call.rows, status, **call.wait())
            else:
                two_shot_all_reduce(x, end, call.residual, h, call.weight, status, **call.options())
            assert status[0] == 0, status.tolist()
            random_delay()  # while a peer is in its next call
            for found, expected in zip(call.held(end, h), ranks[rank], strict=True):
                assert torch.equal(found, expected), f"rank {rank} call {call.number}"

    run_ranks(world, body)


def test_the_residual_stream_in_place():
    """h is the residual, and each rank's own rows alone go on."""
    world, rows, calls = 2, 7, 4
    space = TwoShotWorkspace(world, rows, HIDDEN)
    buffers = [poisoned(space).share_memory_() for _ in range(world)]
    ends = two_shot_ranks(space, buffers, DTYPE)
    status = torch.zeros(8, dtype=torch.int32).share_memory_()
    config = AllReduceConfig("two_shot", programs=2)
    tensors = [
        torch.randn(world + 1, rows, HIDDEN, generator=torch.Generator().manual_seed(call)).to(
            DTYPE
        )
        for call in range(calls)
    ]
    stream, streams = tensors[0][world], []
    for call in range(calls):
        stream = all_reduce_ref(list(tensors[call][:world]), stream)
        streams.append(stream)

    def body(rank: int) -> None:
        h = tensors[0][world].clone()
        own = slice(rank * shard_rows(rows, world), (rank + 1) * shard_rows(rows, world))
        for call in range(calls):
            two_shot_all_reduce(
                tensors[call][rank].clone(), ends[rank], h, h, None, status, call_site=call,
                config=config, limit_us=LIMIT_US,
            )  # fmt: skip
            assert torch.equal(h[own], streams[call][own])
            assert torch.equal(ends[rank].y(rows), streams[call])

    run_ranks(world, body)


@pytest.mark.parametrize("slot", [0, 1])
def test_a_missing_rank_is_named_and_the_next_call_works(slot):
    """Rank 1 never comes: rank 0 expires in front of its sum (0), or, with the first flags there, of its end (1)."""
    space = TwoShotWorkspace(2, 4, HIDDEN)
    buffers = [space.allocate("cpu").share_memory_() for _ in range(2)]
    ends = two_shot_ranks(space, buffers, DTYPE)
    status = torch.zeros(8, dtype=torch.int32).share_memory_()
    *partials, residual = inputs(1, 2, (4, HIDDEN), DTYPE)
    if slot == 1:
        flags = buffers[0][space.scattered_offset : space.reduced_offset].view(torch.int32)
        flags[:] = 1
    start = time.monotonic()
    two_shot_all_reduce(
        partials[0], ends[0], residual, residual.clone(), None, status, call_site=11,
        config=AllReduceConfig("two_shot", programs=2), limit_us=30_000,
    )  # fmt: skip
    assert time.monotonic() - start < 20
    assert status.tolist()[:5] == [1, 0, 11, slot, 1]
    for buffer in buffers:
        space.reset(buffer)
    status.zero_()

    def body(rank: int) -> None:
        two_shot_all_reduce(
            partials[rank], ends[rank], residual, residual.clone(), None, status, call_site=12,
            config=AllReduceConfig("two_shot", programs=2), limit_us=LIMIT_US,
        )  # fmt: skip
        assert_same(ends[rank].y(4), all_reduce_ref(partials, residual), "after the reset")

    run_ranks(2, body)
    assert status[0] == 0


def test_what_it_cannot_carry():
    space = TwoShotWorkspace(2, 4, HIDDEN)
    (end, _) = two_shot_ranks(space, [space.allocate("cpu") for _ in range(2)], DTYPE)
    status, good = status_words("cpu"), torch.zeros(4, HIDDEN, dtype=DTYPE)
    wide = torch.zeros(5, HIDDEN, dtype=DTYPE)
    common = dict(call_site=0, config=AllReduceConfig("two_shot"))
    for x, h in ((wide, wide), (good, good.half()), (good, good.t()), (good, good[:2])):
        with pytest.raises(EngineError, match="two-shot all-reduce"):
            two_shot_all_reduce(x, end, None, h, None, status, **common)
    odd = torch.zeros(4 * HIDDEN + 1, dtype=DTYPE)[1:].view(4, HIDDEN)
    with pytest.raises(EngineError, match="16 bytes"):
        two_shot_all_reduce(odd, end, None, good.clone(), None, status, **common)
    for portions in (0, MOST_PORTIONS + 1):
        common["config"] = AllReduceConfig("two_shot", portions=portions)
        with pytest.raises(EngineError, match=f"in {portions} portions"):
            two_shot_all_reduce(good, end, None, good.clone(), None, status, **common)
