"""bench/peer_store.py in the interpreter: every kind moves the right bits, its check can fail, its summary is right."""

from __future__ import annotations

import os

import pytest
import torch

from bench import peer_store
from bench.peer_store import PROGRAMS, Bench, best, verdict
from bench.peer_store_ends import ENGINE_SHAPE, KINDS, SIZES, Ends, Variant, calls_of, variants
from bench.rows import identity, load
from engine.kernels.all_reduce import all_reduce_ref

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
NBYTES = 1 << 14


@pytest.fixture
def ends(device) -> Ends:
    where = torch.device("cuda", 0) if device == "cuda" else torch.device("cpu")
    return Ends([where, where], NBYTES)


@pytest.mark.parametrize("kind", KINDS)
def test_kind_moves_the_message(kind, ends):
    if kind == "TMA store" and INTERPRETED:
        pytest.skip("Gluon has no interpreter")
    sizes = (NBYTES,) if kind == "TMA store" else (NBYTES, NBYTES - 64, 64)
    for nbytes in sizes:
        assert ends.wrong(Variant(kind, warps=1, depth=2), nbytes, programs=3) == 0


def test_check_finds_what_is_missing_and_what_is_too_much(ends, monkeypatch):
    launch = Ends.launch

    def spoil(shift):
        def spoiled(self, variant, way, nbytes, programs):
            launch(self, variant, way, nbytes + shift, programs)

        monkeypatch.setattr(Ends, "launch", spoiled)

    for shift in (16, -16):
        spoil(shift)
        assert ends.wrong(Variant("relaxed.sys", warps=1), NBYTES // 2, 2) == 2 * 4
    assert ends.wrong(Variant("weak + own copy", warps=1), NBYTES // 2, 2) == 2 * 2 * 4


def test_messages_differ_by_word_and_by_end(ends):
    first, second = (side.source for side in ends.sides)
    assert first.unique().numel() == first.numel() and not torch.equal(first, second)


def test_exchange_is_an_all_reduce(ends):
    """Pushes of both ends, then both polls: the sum of both and the residual; the slot is armed again."""
    shape = NBYTES // 2
    for side in ends.sides:
        for words in (side.source, side.residual):
            words.copy_(torch.randn(shape).bfloat16().view(torch.int32))
        side.out.fill_(0x7FC07FC0)
        side.slots.fill_(-0x7FFF8000)
    for name in ("push", "poll"):
        for way in range(2):
            ends.run(ends.sides[way], ends.exchange, name, way, 1, NBYTES)
        ends.synchronize()
    partials = [side.source.view(torch.bfloat16) for side in ends.sides]
    for side in ends.sides:
        expected = all_reduce_ref(partials, side.residual.view(torch.bfloat16))
        assert torch.equal(side.out.view(torch.int16), expected.view(torch.int16))
        assert (side.slots == -0x7FFF8000).all()


def test_overlapped_polls_the_slot_of_the_call_before(ends):
    for side in ends.sides:
        side.slots.fill_(1)
    ends.run(ends.sides[0], ends.exchange, "overlapped", 0, 0, NBYTES)
    ends.synchronize()
    mine, other = ends.sides
    assert (mine.slots[1] == -0x7FFF8000).all() and (other.slots[1] == 1).all()
    half = NBYTES // 4
    assert (mine.slots[0, half:] == 1).all() and (mine.slots[0, :half] != 1).any()
    assert torch.equal(mine.slots[0], other.slots[0])


def test_best_of_each_kind():
    weak, deep = Variant("weak", 8, 1), Variant("weak", 8, 4)
    sys = Variant("relaxed.sys", 8, 1)
    found = {(weak, 16): 9.0, (weak, 132): 5.0, (deep, 132): 4.0, (sys, 132): 8.0}
    assert best(found, 2) == {"weak": [(deep, 132), (weak, 132)], "relaxed.sys": [(sys, 132)]}


def test_verdict_says_only_what_was_measured():
    sys, deep = Variant("relaxed.sys", 8, 1), Variant("relaxed.sys", 8, 8)
    sweep = {(sys, 132): 60.0, (deep, 264): 40.0, (Variant("weak"), 132): 20.0}
    more = (256, 528)
    exchange = {
        (ENGINE_SHAPE, "sequence"): 44.0, (ENGINE_SHAPE, "push"): 26.0,
        (more, "sequence"): 36.0, (more, "push"): 24.0,
    }  # fmt: skip
    lines = verdict(sweep, exchange)
    assert [line[:3] for line in lines] == ["(a)", "(b)", "(b)", "(d)"]
    assert "40.0 -> 20.0 us, 2.00 times" in lines[0] and "60.0 -> 40.0" in lines[1]
    assert "44.0 -> 36.0" in lines[2] and "36.0 -> 24.0" in lines[3]
    assert verdict({}, {}) == []


class TimedEnds(Ends):
    """On the CPU, with made-up times: 400 GB/s one way, 320 with both, a message of a "weak" one wrong."""

    def __init__(self, devices):
        super().__init__([torch.device("cpu")] * 2, 1 << 10)

    def wrong(self, variant, nbytes, programs):
        return int(variant == Variant("weak", 8, 2))

    def exchange(self, *args):
        pass

    def transfer_us(self, variant, nbytes, programs, ways):
        return nbytes / (400e3 if ways == 1 else 320e3) * (2 if programs == 16 else 1)

    def exchange_us(self, name, nbytes, shape):
        return nbytes / 300e3


@pytest.mark.parametrize("gpus", [1, 2])
def test_rows_of_a_run(gpus, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(peer_store, "Ends", TimedEnds)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setenv("OUT", str(tmp_path))
    bench = Bench(60.0)
    good = bench.sound(list(KINDS))
    assert len(good) == len(variants()) and bench.failures == 1, "all and the copy engine, but one"
    assert "FAIL  weak w8 d2: 2 wrong words" in capsys.readouterr().out
    exchange, sweep = bench.exchanges(), bench.sweep(good)
    bench.sizes(best(sweep, 2))
    assert verdict(sweep, exchange)
    rows = load(tmp_path)
    assert len({identity(row) for row in rows}) == len(rows)
    (row,) = [
        r for r in rows
        if r["metric"] == "peer_store_both_us" and r["bytes"] == 1 << 24
        and r["algorithm"].startswith("TMA store")
    ]  # fmt: skip
    assert row["value"] == pytest.approx((1 << 24) / 320e3, rel=1e-4)
    assert row["share"] == (None if gpus == 1 else pytest.approx(320 / 478, rel=1e-3))
    assert row["algorithm"] == "TMA store" + (" (loopback)" if gpus == 1 else "")


def test_time_limit_ends_each_section(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(peer_store, "Ends", TimedEnds)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("OUT", str(tmp_path))
    bench = Bench(0.0)
    assert not bench.exchanges() and not bench.sweep(variants())
    bench.sizes({"weak": [(Variant("weak"), 132)]})
    assert capsys.readouterr().out.count("the time limit is spent") == 3 and not bench.rows.rows


def test_plan_fits_its_time():
    """Graphs of 512 MB or 128 launches; the sweep's points in 60 s at about 10 ms each."""
    assert [calls_of(n) for n in SIZES] == [128, 128, 32, 8]
    plan = variants()
    assert len(set(plan)) == len(plan) and {v.kind for v in plan} == set(KINDS)
    assert all(32 * v.warps <= 1024 for v in plan) and PROGRAMS[0] == 16 and 264 in PROGRAMS
    assert len(plan) * len(PROGRAMS) < 300
