"""Two-shot all-reduce: the sums, the norm on the way, FP8, and the protocol between real processes."""

from __future__ import annotations

import time

import pytest
import torch

from engine.errors import EngineError
from engine.kernels.all_reduce import AllReduceConfig, all_reduce_ref
from engine.kernels.epilogue import shard_rows
from engine.kernels.norm import rmsnorm
from engine.kernels.quantize_rows import FP8, rmsnorm_quantize
from engine.kernels.two_shot import (
    TwoShotWorkspace,
    two_shot_gather,
    two_shot_publish,
    two_shot_ranks,
    two_shot_reduce,
    two_shot_scatter,
)
from tests.kernels.collective_group import (
    assert_same,
    checksum,
    inputs,
    random_delay,
    run_ranks,
    status_words,
)

CONFIG = AllReduceConfig("two_shot", programs=3)  # several programs, some with a loop
NEAR_WRAP = 2**31 - 3  # epochs cross the sign of int32 within a test
LIMIT_US = 20_000_000  # a busy CI machine is not a lost peer
EPS = 1e-6


class Group:
    """All ranks in one process, launched in lockstep as virtual ranks are."""

    def __init__(self, world, rows, hidden, dtype, device):
        self.space = TwoShotWorkspace(world, rows, hidden)
        self.buffers = [self.space.allocate(device, NEAR_WRAP) for _ in range(world)]
        for buffer in self.buffers:  # nothing may be read before it was written
            buffer[self.space.partials_offset :] = 0xFF
        self.ends = two_shot_ranks(self.space, self.buffers, dtype)
        self.status = status_words(device)

    def call(self, partials, residuals, hs, number, weight=None, **options):
        rows = partials[0].shape[0]
        for x, end in zip(partials, self.ends):
            two_shot_scatter(x, end)
        for end in self.ends:
            two_shot_publish(end)
        for end, residual, h in zip(self.ends, residuals, hs):
            two_shot_reduce(
                end, residual, h, weight, self.status, call_site=number, config=CONFIG,
                limit_us=LIMIT_US, **options,
            )  # fmt: skip
        for end in self.ends:
            two_shot_gather(
                end, rows, self.status, call_site=number, config=CONFIG, limit_us=LIMIT_US
            )
        assert self.status[0] == 0, self.status.tolist()


def own_rows(rank, world, rows):
    shard = shard_rows(rows, world)
    return slice(min(rows, rank * shard), min(rows, (rank + 1) * shard))


def check_owned(hs, reference, before, world, what):
    """Own rows hold the sum; the others what was there before, bit for bit."""
    for r, h in enumerate(hs):
        own = own_rows(r, world, len(h))
        assert_same(h[own], reference[own], f"rank {r} {what}")
        others = torch.ones(len(h), dtype=torch.bool)
        others[own] = False
        assert torch.equal(
            h.cpu().view(torch.int16)[others], before.cpu().view(torch.int16)[others]
        )


@pytest.mark.parametrize("world", [2, 3, 4, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sum(world, dtype, device):
    """Without a norm it is the all-reduce; rows that the world does not divide, fewer rows than ranks."""
    most, hidden = 13, 72
    group = Group(world, most, hidden, dtype, device)
    for call, rows in enumerate([13, 1, 8, 13, 5, 2]):
        *partials, residual = (t.to(device) for t in inputs(call, world, (rows, hidden), dtype))
        hs = [torch.full_like(residual, 7.0) for _ in range(world)]
        group.call(partials, [residual] * world, hs, call)
        reference = all_reduce_ref(partials, residual)
        check_owned(hs, reference, torch.full_like(residual, 7.0), world, f"call {call}")
        for end in group.ends:
            assert_same(end.y(rows), reference, f"rank {end.rank} call {call}")
            assert torch.equal(
                end.y(rows).view(torch.int16).cpu(), group.ends[0].y(rows).view(torch.int16).cpu()
            )


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("world", [2, 4])
def test_norm_on_the_way_has_the_bits_of_the_kernels_of_their_own(world, fp8, device):
    rows, hidden, dtype = 9, 384, torch.bfloat16
    generator = torch.Generator().manual_seed(world)
    group = Group(world, rows, hidden, dtype, device)
    weight = (1 + 0.3 * torch.randn(hidden, generator=generator)).to(dtype).to(device)
    request = torch.tensor([0, 5, rows - 2], dtype=torch.int32, device=device)
    residual = torch.randn(rows, hidden, generator=generator).to(dtype).to(device)
    hs = [residual.clone() for _ in range(world)]
    stream = residual
    for call in range(3):  # the residual stream stays split by rows, in place
        partials = [
            torch.randn(rows, hidden, generator=generator).to(dtype).to(device)
            for _ in range(world)
        ]
        group.call(partials, hs, hs, call, weight, eps=EPS, fp8=fp8, request=request)
        stream = all_reduce_ref(partials, stream)
        for r, h in enumerate(hs):
            own = own_rows(r, world, rows)
            assert torch.equal(h[own], stream[own])
        if fp8:
            y, scale = torch.empty(rows, hidden, dtype=FP8, device=device), torch.empty(rows)
            scale = scale.to(device)
            rmsnorm_quantize(stream, weight, y, scale, eps=EPS)
            for end in group.ends:
                assert torch.equal(end.y(rows, True).view(torch.uint8), y.view(torch.uint8))
                assert torch.equal(end.scales(rows), scale)
        else:
            y = torch.empty_like(stream)
            rmsnorm(stream, weight, y, eps=EPS)
            for end in group.ends:
                assert torch.equal(end.y(rows), y)
        for end in group.ends:  # of the request's last row, not the bucket's
            assert torch.equal(end.last()[0], stream[rows - 3])


def test_what_the_buffers_cannot_carry(device):
    group = Group(2, 4, 64, torch.bfloat16, device)
    end = group.ends[0]
    for bad in (
        torch.zeros(5, 64, dtype=torch.bfloat16, device=device),
        torch.zeros(4, 32, dtype=torch.bfloat16, device=device),
        torch.zeros(4, 64, dtype=torch.float16, device=device),
        torch.zeros(64, 4, dtype=torch.bfloat16, device=device).t(),
    ):
        with pytest.raises(EngineError, match="two-shot all-reduce"):
            two_shot_scatter(bad, end)


@pytest.mark.parametrize("lost", ["publish", "reduce"])
def test_a_missing_rank_is_named_and_the_next_call_works(lost, device):
    rows, hidden, dtype = 4, 64, torch.bfloat16
    group = Group(2, rows, hidden, dtype, device)
    *partials, residual = (t.to(device) for t in inputs(0, 2, (rows, hidden), dtype))
    h = torch.empty_like(residual)
    common = dict(call_site=11, config=CONFIG, limit_us=30_000)
    two_shot_publish(group.ends[0])
    if lost == "reduce":
        two_shot_publish(group.ends[1])
    start = time.monotonic()
    two_shot_reduce(group.ends[0], residual, h, None, group.status, **common)
    two_shot_gather(group.ends[0], rows, group.status, **common)
    if device == "cuda":
        torch.cuda.synchronize()
    assert time.monotonic() - start < 20
    # expired, rank 0, call site, 0: in reduce or 1: in gather, rank 1 is missing
    assert group.status.tolist()[:5] == [1, 0, 11, int(lost == "reduce"), 1]
    for buffer in group.buffers:
        group.space.reset(buffer)
    group.status.zero_()
    group.call(partials, [residual] * 2, [torch.empty_like(residual) for _ in range(2)], 12)
    for end in group.ends:
        assert_same(end.y(rows), all_reduce_ref(partials, residual), "after the reset")


@pytest.mark.parametrize(("world", "calls"), [(2, 60), (4, 24), (8, 12)])
def test_processes(world, calls, device):
    """Ranks as processes over shared memory, with random delays; messages of different sizes take turns."""
    if device != "cpu":
        pytest.skip(
            "ranks are processes only in the interpreter; the engine's tests run it on cards"
        )
    hidden, most, dtype = 16, 9, torch.bfloat16
    space = TwoShotWorkspace(world, most, hidden)
    buffers = [space.allocate("cpu", NEAR_WRAP).share_memory_() for _ in range(world)]
    ends = two_shot_ranks(space, buffers, dtype)
    status = torch.zeros(8, dtype=torch.int32).share_memory_()
    sums = torch.zeros(world, calls, dtype=torch.int64).share_memory_()
    tensors = [inputs(call, world, ([9, 2, 5][call % 3], hidden), dtype) for call in range(calls)]
    references = [all_reduce_ref(partials, residual) for *partials, residual in tensors]

    def body(rank: int) -> None:
        end = ends[rank]
        for call, (*partials, residual) in enumerate(tensors):
            rows = len(residual)
            common = dict(call_site=call, config=CONFIG, limit_us=LIMIT_US)
            random_delay()
            two_shot_scatter(partials[rank], end)
            random_delay()
            two_shot_publish(end)
            random_delay()
            two_shot_reduce(end, residual, residual.clone(), None, status, **common)
            random_delay()
            two_shot_gather(end, rows, status, **common)
            assert status[0] == 0, status.tolist()
            y = end.y(rows).clone()
            assert_same(y, references[call], f"rank {rank} call {call}")
            sums[rank, call] = checksum(y)

    run_ranks(world, body)
    assert bool((sums == sums[0]).all()), "ranks hold different bits"
    assert sums[0].unique().numel() >= calls // 2
