"""Sampling under controls: kernels against the reference, the reference against a float64 softmax."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.kernels import sample
from engine.kernels.argmax import RING_NAN, RING_PADDING, argmax_programs
from engine.kernels.sample_ref import NEUTRAL, sample_ref
from engine.kernels.slots import peer_table
from tests.kernels.collective_group import run_ranks, status_words

SLOTS, RING = 4, 3


def control(**given) -> list[float]:
    names = ("top_k", "top_p", "min_p", "repetition", "frequency", "presence", "counted", "biased")
    return [float(given.get(name, neutral)) for name, neutral in zip(names, NEUTRAL, strict=True)]


CASES = {
    "neutral": control(),
    "top_k": control(top_k=7),
    "top_k_1": control(top_k=1),
    "top_k_all": control(top_k=10**6),
    "top_p": control(top_p=0.8),
    "top_p_0": control(top_p=0.0),
    "top_p_high": control(top_p=0.999),
    "both": control(top_k=20, top_p=0.6),
    "min_p": control(min_p=0.2),
    "three": control(top_k=50, top_p=0.95, min_p=0.05),
    "penalties": control(repetition=1.3, frequency=0.4, presence=0.7, counted=1),
    "bias": control(biased=1, top_k=5),
    "all": control(top_k=30, top_p=0.9, min_p=0.01, repetition=1.1, frequency=-0.2, presence=0.3,
                   counted=1, biased=1),
}  # fmt: skip


class Ranks:
    """All ranks of a vocabulary, on one device, launched in lockstep."""

    def __init__(self, world: int, columns: int, vocab: int, rows: int, device: str) -> None:
        self.world, self.columns, self.vocab, self.rows = world, columns, vocab, rows
        self.device, self.total = device, world * columns
        self.status = status_words(device)
        workspace = sample.sample_workspace(world, rows, columns)
        self.exchange = [workspace.allocate(device) for _ in range(world)]
        self.table = peer_table(self.exchange, device)
        self.temperature = torch.tensor([1.0, 0.0, 0.7, 2.0]).to(device)
        self.seeds = torch.tensor([5, 6, 2**31 - 1, 0], dtype=torch.int32, device=device)
        self.positions = torch.tensor([10, 20, 30, 40], dtype=torch.int32, device=device)
        self.controls = torch.tensor([NEUTRAL] * SLOTS).to(device)
        generator = torch.Generator().manual_seed(world)
        self.counts = torch.randint(0, 7, (SLOTS, self.total), generator=generator).int()
        self.counts *= torch.rand(self.counts.shape, generator=generator) < 0.3
        self.bias = torch.randn((SLOTS, self.total), generator=generator)
        self.shards = [
            [t[:, r * columns : (r + 1) * columns].contiguous().to(device) for r in range(world)]
            for t in (self.counts, self.bias)
        ]
        self.tokens = [
            torch.full((SLOTS,), -7, dtype=torch.int32, device=device) for _ in range(world)
        ]
        self.steps = [torch.zeros(1, dtype=torch.int32, device=device) for _ in range(world)]
        self.ring = torch.full((RING, rows), -1, dtype=torch.int32)
        if device == "cuda":
            self.ring = self.ring.pin_memory()
        self.scratch = [sample.sample_buffers(rows, self.total, device) for _ in range(world)]
        for scratch in self.scratch:
            scratch.scores.fill_(float("nan"))

    def adjust(self, r, logits, row_slots, request=None):
        sample.adjust(
            logits, self.controls, self.shards[0][r], self.shards[1][r], row_slots, self.scratch[r],
            self.table if self.world > 1 else None, vocab_size=self.vocab, rank=r, world=self.world,
            request=request,
        )  # fmt: skip

    def finish(self, r, row_slots, request=None, limit_us=5_000_000):
        rows, scratch = self.rows, self.scratch[r]
        if self.world > 1:
            sample.gather(
                self.exchange[r], self.columns, rows, scratch, self.status, rank=r, world=self.world,
                call_site=-2, limit_us=limit_us,
            )  # fmt: skip
        for number in range(sample.PASSES):
            sample.search(
                number, rows, self.total, self.temperature, self.controls, row_slots, scratch,
                vocab_size=self.vocab, request=request,
            )  # fmt: skip
        shape = (rows, argmax_programs(self.columns))
        values = torch.full(shape, float("nan"), device=self.device)
        ids = torch.full(shape, -1, dtype=torch.int32, device=self.device)
        sample.pick(
            self.total, self.temperature, self.seeds, self.positions, self.controls, row_slots, scratch,
            values, ids, vocab_size=self.vocab, request=request,
        )  # fmt: skip
        sample.settle(
            values, ids, self.tokens[r], self.controls, self.shards[0][r], row_slots, self.ring,
            self.steps[r], scratch, rank=r, request=request,
        )  # fmt: skip

    def expected(self, logits, slots):
        slots = torch.tensor(slots)
        held = [t.cpu()[slots] for t in (self.temperature, self.seeds, self.positions - 1)]
        return sample_ref(
            list(logits), *held, self.vocab, self.controls.cpu()[slots], self.counts[slots],
            self.bias[slots],
        ).tolist()  # fmt: skip

    def run(self, logits, slots):
        """One step; checks every rank's state against the reference, and that all is ready for the next."""
        expected = self.expected(logits, [max(s, 0) for s in slots])
        row_slots = torch.tensor(slots, dtype=torch.int32, device=self.device)
        for r in range(self.world):
            self.adjust(r, logits[r].to(self.device), row_slots)
        for r in range(self.world):
            self.finish(r, row_slots)
        if self.device == "cuda":
            torch.cuda.synchronize()
        assert self.status[0] == 0
        step = int(self.steps[0][0]) - 1
        shown = self.ring[step % RING].tolist()
        for row, slot in enumerate(slots):
            if slot < 0:
                assert shown[row] == RING_PADDING
                continue
            assert shown[row] == expected[row], (row, slot, shown, expected)
            if shown[row] == RING_NAN:
                continue
            assert all(int(t[slot]) == shown[row] for t in self.tokens)
            if self.controls[slot, 6]:
                self.counts[slot, shown[row]] += 2
        whole = torch.cat([c.cpu() for c in self.shards[0]], dim=1)
        assert torch.equal(whole, self.counts)
        for scratch, buffer in zip(self.scratch, self.exchange):
            assert not scratch.sums.any() and bool((scratch.peaks == -(2**31)).all())
            assert self.world == 1 or bool((buffer.view(torch.int32) == -(2**31)).all())
        return shown


@pytest.mark.parametrize("world", [1, 2, 3])
def test_kernels_equal_the_reference(world, device):
    columns, rows = 528, 4
    ranks = Ranks(world, columns, world * columns - 21, rows, device)
    generator = torch.Generator().manual_seed(9)
    names = list(CASES)
    for step in range(0, len(names) + 3, 3):
        for slot in range(SLOTS):
            ranks.controls[slot] = torch.tensor(CASES[names[(step + slot) % len(names)]])
        logits = 3 * torch.randn((world, rows, columns), generator=generator)
        if step % 2:
            logits = (logits * 2).round() / 2  # many ties at every threshold
        ranks.run(logits, [[0, 2, 3, 1], [3, -1, 0, 2]][step % 2])


def test_extremes(device):
    """Ties, infinities, all-equal and tiny temperatures; a NaN is flagged; padded ids never win."""
    columns = 64
    ranks = Ranks(2, columns, 100, 1, device)
    ranks.temperature[0] = 1e-30
    ranks.controls[0] = torch.tensor(control(top_k=3, top_p=0.5, min_p=0.1))
    base = torch.randn((2, 1, columns), generator=torch.Generator().manual_seed(1))
    assert ranks.run(base, [0])[0] == int(base.reshape(-1)[:100].argmax())
    ranks.temperature[0] = 1.0
    ranks.run(torch.zeros(2, 1, columns), [0])
    ranks.run(torch.full((2, 1, columns), float("-inf")), [0])
    one = torch.full((2, 1, columns), float("-inf"))
    one[1, 0, 5] = -3.0
    assert ranks.run(one, [0])[0] == columns + 5
    high = base.clone()
    high[0, 0, 9] = float("inf")
    assert ranks.run(high, [0])[0] == 9
    zeros = torch.where(base > 0, torch.tensor(-0.0), base)  # -0.0 is the exchange's sentinel
    ranks.run(zeros, [0])
    high[1, 0, 3] = float("nan")
    assert ranks.run(high, [0])[0] == RING_NAN
    assert 0 <= int(ranks.tokens[1][0]) < 100
    padded = base.clone()
    padded[1, 0, 36:] = float("nan")
    ranks.run(padded, [0])


def test_prefill_request(device):
    ranks = Ranks(1, 208, 200, 1, device)
    ranks.controls[2] = torch.tensor(CASES["all"])
    logits = 2 * torch.randn((1, 1, 208), generator=torch.Generator().manual_seed(3))
    expected = ranks.expected(logits, [2])
    nowhere = torch.full((1,), -1, dtype=torch.int32, device=device)
    request = torch.tensor([2, 9, 21], dtype=torch.int32, device=device)
    ranks.adjust(0, logits[0].to(device), nowhere, request)
    ranks.finish(0, nowhere, request)
    if device == "cuda":
        torch.cuda.synchronize()
    assert ranks.ring[0, 0] == expected[0] == ranks.tokens[0][2] and int(ranks.positions[2]) == 30
    assert ranks.tokens[0].tolist().count(-7) == SLOTS - 1


def test_ranks_are_processes(device):
    if device != "cpu":
        pytest.skip("ranks are processes only in the interpreter")
    world, columns, rows = 2, 512, 2
    ranks = Ranks(world, columns, 1000, rows, "cpu")
    for tensor in (*ranks.exchange, ranks.status):
        tensor.share_memory_()
    ranks.table = peer_table(ranks.exchange, "cpu")
    ranks.controls[0] = torch.tensor(CASES["both"])
    ranks.controls[2] = torch.tensor(CASES["all"])
    logits = 3 * torch.randn((world, rows, columns), generator=torch.Generator().manual_seed(4))
    row_slots = torch.tensor([0, 2], dtype=torch.int32)
    expected = ranks.expected(logits, [0, 2])

    def body(r: int) -> None:
        ranks.adjust(r, logits[r], row_slots)
        ranks.finish(r, row_slots, limit_us=60_000_000)
        assert ranks.status[0] == 0, ranks.status.tolist()
        assert ranks.tokens[r][[0, 2]].tolist() == expected

    run_ranks(world, body)


def softmax64(logits, temperature, keep):
    z = np.where(keep, logits.astype(np.float64) / temperature, -np.inf)
    w = np.exp(z - z.max())
    return w / w.sum()


def naive_keep(logits, temperature, top_k=0, top_p=1.0, min_p=0.0):
    """The textbook filter by sorting, float64; distinct logits."""
    p = softmax64(logits, temperature, np.ones(logits.size, bool))
    order = np.argsort(-logits)
    keep = np.zeros(logits.size, bool)
    n = top_k or logits.size
    kept = order[:n]
    cumulative = np.cumsum(p[kept] / p[kept].sum())
    keep[kept[: int(np.searchsorted(cumulative, top_p)) + 1]] = True
    return keep & (p >= min_p * p.max())


@pytest.mark.parametrize(
    ("temperature", "filters"),
    [
        (1.0, dict(top_k=4)),
        (0.7, dict(top_p=0.8)),
        (1.5, dict(top_k=9, top_p=0.7)),
        (1.0, dict(min_p=0.15)),
        (1.3, dict(top_k=10, top_p=0.95, min_p=0.05)),
    ],
)
def test_draws_follow_the_filtered_softmax(temperature, filters):
    """Chi-square of 4000 draws with fixed seeds; with f degrees of freedom mean f, deviation sqrt(2 f):
    the bound is f + 6 deviations. Ids outside the float64 filter never appear."""
    rng = np.random.default_rng(2)
    logits = (2 * rng.standard_normal(24)).astype(np.float32)
    keep = naive_keep(logits, temperature, **filters)
    expected = softmax64(logits, temperature, keep)
    count = 4000
    rows = torch.from_numpy(np.tile(logits, (count, 1)))
    many = torch.ones(count)
    held = torch.tensor([control(**filters)]).repeat(count, 1)
    nothing = torch.zeros((count, 24))
    chosen = sample_ref(
        [rows[:, :10], rows[:, 10:]], many * temperature, many * 8, torch.arange(count), 24, held,
        nothing.int(), nothing,
    )  # fmt: skip
    seen = np.bincount(chosen.numpy(), minlength=24)
    assert seen[~keep].sum() == 0 and keep.sum() > 1
    freedom = keep.sum() - 1
    statistic = (((seen - count * expected) ** 2)[keep] / (count * expected[keep])).sum()
    assert statistic < freedom + 6 * np.sqrt(2 * freedom)


def test_penalties_are_those_of_the_definition():
    logits = torch.tensor([[2.0, -2.0, 1.0, 0.5, 0.0]])
    counts = torch.tensor(
        [[1, 5, 6, 0, 0]]
    ).int()  # in the prompt; both, twice; answer, three times
    held = torch.tensor([control(repetition=2.0, frequency=0.25, presence=0.5, counted=1)])
    from engine.kernels.sample_ref import adjust_ref

    z = adjust_ref(logits[0].numpy(), held[0].numpy(), counts[0].numpy(), np.zeros(5, np.float32))
    assert z.tolist() == [1.0, -4 - 0.5 - 0.5, 0.5 - 0.75 - 0.5, 0.5, 0.0]
