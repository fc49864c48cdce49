"""The slot rule and the flag barrier, checked over all (or many random) interleavings, and the
known-bad variants that the same checker must catch."""

from __future__ import annotations

import pytest

from engine.kernels.slots import clear_slot, lamport_slots
from tests.unit.protocol_model import (
    Exchange,
    Machine,
    exhaustive,
    flag_form,
    fused_form,
    randomised,
    split_form,
)
from tests.unit.protocol_two_shot import (
    PARTIALS,
    Y,
    on_streams,
    two_shot_form,
    two_shot_fused_form,
)


def rotation(calls_per_replay: int, slots: int, replays: int, ahead: int | None = None):
    """Exchanges of some replays of a graph: slots are constants of the call site. ahead: the poll
    re-arms the slot of that many calls later; None: as the engine does (`clear_slot`)."""
    exchanges = []
    for _ in range(replays):
        for site in range(calls_per_replay):
            clear = clear_slot(site, slots) if ahead is None else (site + ahead) % slots
            exchanges.append(Exchange(site % slots, (clear,)))
    return exchanges


def engine_rotation(calls_per_replay: int, replays: int):
    return rotation(calls_per_replay, lamport_slots(calls_per_replay), replays)


# ---- ours


@pytest.mark.parametrize(
    ("world", "programs", "calls", "replays"),
    [(2, 1, 3, 3), (2, 1, 4, 2), (2, 2, 3, 2), (3, 1, 3, 2)],
)
def test_engine_rotation_exhaustively(world, programs, calls, replays):
    assert exhaustive(Machine(split_form(engine_rotation(calls, replays), world, programs))) is None


def test_engine_rotation_fused_exhaustively():
    assert exhaustive(Machine(fused_form(engine_rotation(3, 3), 2, 2))) is None
    assert exhaustive(Machine(fused_form(engine_rotation(3, 2), 3, 1))) is None


def test_every_allowed_distance():
    """The derivation: d from 2 to S - 1, and no other (see test_clear_of_a_wrong_slot)."""
    for slots, ahead in ((3, 2), (4, 2), (4, 3), (5, 2), (5, 3), (5, 4)):
        exchanges = rotation(slots, slots, 2, ahead)
        assert exhaustive(Machine(split_form(exchanges, 2))) is None, (slots, ahead)


def test_consumer_that_polls_in_its_prologue():
    """Every program reads the whole message and clears a part: right, by the delayed clear."""
    assert exhaustive(Machine(split_form(engine_rotation(3, 2), 2, 2, read_all=True))) is None


PREFILL, SAMPLING = 50, 100  # first areas of slots of their own


def polled_step(sites: int, size: int, slots: int | None = None, first: int = 0):
    """A decode step whose consumers poll: slots of their own, rotated by site; then its sampling exchange."""
    slots = slots or lamport_slots(sites)
    step = [
        Exchange(first + i % slots, (first + clear_slot(i, slots),), size, polled=True)
        for i in range(sites)
    ]
    return [*step, Exchange(SAMPLING, (SAMPLING,), 1)]


def separate_step(sites: int, size: int, samples: bool = True):
    """Separate polls in two alternating slots that they re-arm themselves: prefill, or many decode rows."""
    step = [Exchange(PREFILL + i % 2, (PREFILL + i % 2,), size) for i in range(sites)]
    return [*step, *[Exchange(SAMPLING, (SAMPLING,), 1)] * samples]


def test_polling_consumers_between_other_graphs():
    """Row counts have other message sizes, prefill chunks and steps of many rows other slots, and any may follow
    any. Two programs a poll, each reads both chunks and re-arms its own one."""
    one, two = polled_step(3, 1), polled_step(3, 2)
    for steps in ([two, two], [one, two], [two, one, two]):
        exchanges = [exchange for step in steps for exchange in step]
        assert exhaustive(Machine(split_form(exchanges, 2)), 1_000_000) is None
    for between in (separate_step(2, 2, False), separate_step(4, 1)):
        mixed = [*two, *between, *one, *between, *between, *two, *two]
        assert randomised(Machine(split_form(mixed, 2, fine=True)), 60) is None
        assert randomised(Machine(split_form(mixed, 4, fine=True)), 10) is None


@pytest.mark.parametrize("sites", [3, 4, 5, 6, 8, 10])
def test_polling_consumers_of_any_number_of_layers(sites):
    exchanges = polled_step(sites, 2) * 3
    assert randomised(Machine(split_form(exchanges, 2, fine=True)), 40) is None
    assert randomised(Machine(split_form(exchanges, 3)), 20) is None


def test_two_calls_per_replay_clear_their_own_slot():
    assert exhaustive(Machine(split_form(engine_rotation(2, 4), 2, 2))) is None
    assert exhaustive(Machine(fused_form(engine_rotation(2, 4), 2, 2))) is None


def two_graphs(slots: int, replays: int, sizes: tuple[int, int] = (1, 2)):
    """Decode and prefill (messages of `sizes` chunks, hence other places in a slot) take turns on
    one buffer; `slots` calls each, and a sampling exchange after each graph."""
    exchanges = []
    for replay in range(replays):
        for site in range(slots):
            exchanges.append(Exchange(site, (clear_slot(site, slots),), sizes[replay % 2]))
        exchanges.append(Exchange(100, (100,), 1))
    return exchanges


@pytest.mark.parametrize("slots", [2, 3, 4])
def test_graphs_of_different_sizes_share_their_slots(slots):
    """A poll re-arms, in its graph's own layout, what the same replay uses two calls later (or has
    used in its first two slots): whatever another graph left beyond that is re-armed before it
    matters."""
    for sizes in ((1, 2), (2, 1)):
        graphs = two_graphs(slots, 4, sizes)
        if slots < 4:
            assert exhaustive(Machine(split_form(graphs, 2))) is None
        assert randomised(Machine(split_form(graphs, 2)), 100) is None
    assert randomised(Machine(split_form(two_graphs(slots, 6, (1, 3)), 4, fine=True)), 10) is None


@pytest.mark.parametrize("sizes", [(2, 2, 1, 1), (1, 1, 2, 2), (2, 1, 1, 2)])
def test_messages_of_different_sizes_alternate_in_one_graph(sizes):
    """A prefill: the last layer's two messages have one row. Each poll re-arms what it read."""
    step = [Exchange(site % 2, (site % 2,), size) for site, size in enumerate(sizes)]
    replays = [*step, Exchange(100, (100,), 1)] * 3
    assert exhaustive(Machine(split_form(replays, 2))) is None
    assert randomised(Machine(split_form(replays, 4, fine=True)), 10) is None
    left = [Exchange(site % 2, (site % 2,) if site < 2 else (), s) for site, s in enumerate(sizes)]
    caught(split_form(left * 3, 2))


def with_argmax(calls: int, replays: int, slots: int | None = None):
    """A decode step: all-reduces, then the argmax exchange in its single slot (area 100)."""
    step = engine_rotation(calls, 1) if calls else []
    return [*step, Exchange(100, (100,))] * replays


@pytest.mark.parametrize("calls", [2, 3, 4])
def test_argmax_slot_between_all_reduces(calls):
    assert exhaustive(Machine(split_form(with_argmax(calls, 3), 2))) is None


@pytest.mark.parametrize(("world", "programs"), [(3, 2), (4, 1), (4, 2)])
def test_engine_rotation_at_random(world, programs):
    for exchanges in (engine_rotation(4, 4), engine_rotation(6, 3), with_argmax(4, 3)):
        assert randomised(Machine(split_form(exchanges, world, programs, fine=True)), 12) is None
        assert randomised(Machine(fused_form(exchanges, world, programs, fine=True)), 12) is None


@pytest.mark.parametrize("split", [False, True])
def test_flag_barrier(split):
    """4-bit epochs: 20 calls wrap."""
    assert exhaustive(Machine(flag_form(20, 2, 1, split=split), bits=4)) is None
    assert exhaustive(Machine(flag_form(4, 3, 1, split=split), bits=4)) is None
    assert exhaustive(Machine(flag_form(4, 2, 2, split=split), bits=4)) is None
    assert randomised(Machine(flag_form(40, 4, 2, split=split), bits=4), 5) is None


WRAP = dict(bits=3, epoch=6)  # epochs 7, 0, 1, ...


@pytest.mark.parametrize("sharing", [1, 2])
@pytest.mark.parametrize(("calls", "programs"), [(2, 1), (3, 1), (2, 2)])
def test_two_shot_exhaustively(calls, programs, sharing):
    """Two ranks, each on a device of its own or in lockstep on one."""
    streams = on_streams(two_shot_form(calls, 2, programs), sharing)
    assert exhaustive(Machine(streams, **WRAP)) is None


def test_the_next_scatter_needs_the_gather_and_no_more():
    """It may run before y is read: partial sums and y have areas of their own."""
    early = two_shot_form(3, 2, early=("gemm",), before="read")
    assert exhaustive(Machine(early, **WRAP)) is None


@pytest.mark.parametrize(("world", "sharing"), [(3, 1), (3, 3), (4, 1), (4, 2), (4, 4)])
def test_two_shot_at_random(world, sharing):
    for programs in (1, 2):
        streams = on_streams(two_shot_form(5, world, programs), sharing)
        assert randomised(Machine(streams, **WRAP), 25) is None


@pytest.mark.parametrize("portions", [1, 2])
@pytest.mark.parametrize(("sizes", "programs"), [([2, 2], 1), ([1, 2], 1), ([2, 1], 2)])
def test_two_shot_in_one_launch_exhaustively(sizes, programs, portions):
    machine = Machine(two_shot_fused_form(sizes, 2, portions, programs), **WRAP)
    assert exhaustive(machine, 1_500_000) is None


@pytest.mark.parametrize(("world", "runs"), [(2, 60), (3, 25), (4, 10)])
def test_two_shot_in_one_launch_at_random(world, runs):
    """Calls of different sizes behind each other, programs without a row in some; and between the four launches."""
    for sizes in ([3, 3, 3], [1, 4, 2, 1], [4, 1, 3]):
        for portions, programs in ((1, 1), (2, 1), (2, 2), (3, 2)):
            for split in ((), (0,), (1,)):
                form = two_shot_fused_form(sizes, world, portions, programs, split=split)
                assert randomised(Machine(form, **WRAP), runs // 6 + 1) is None


# ---- known-bad variants: each must be caught, or the model proves nothing


def caught(kernels, *, runs: int = 300, **options) -> str:
    found = randomised(Machine(kernels, **options), runs)
    assert found is not None, "the checker missed a broken protocol"
    return found


def test_two_slots_cleared_by_the_next_poll():
    """Poll i re-arms the slot of call i + 1, while a fast peer pushes call i + 1 into it."""
    exchanges = rotation(4, 2, 3, ahead=1)
    assert exhaustive(Machine(split_form(exchanges, 2))) is not None
    caught(split_form(exchanges, 3))


def test_two_slots_when_other_programs_still_read():
    """The own-slot rule is only for a location that one program reads."""
    caught(split_form(engine_rotation(2, 4), 2, 2, read_all=True))


def test_polling_consumers_in_the_slots_of_separate_polls():
    """Decode rotates over slots that a prefill chunk of another number of sites leaves half re-armed."""
    prefill = rotation(2, 4, 1)  # two sites, in the first two of decode's four slots
    caught(split_form([*polled_step(4, 1), *prefill] * 3, 2))


def test_polling_consumers_in_two_slots():
    """Neither the own slot (others still read it) nor the other one (a peer writes it) may be re-armed."""
    for ahead in (0, 1):
        step = [Exchange(i % 2, ((i + ahead) % 2,), 2, polled=True) for i in range(4)]
        caught(split_form([*step, Exchange(SAMPLING, (SAMPLING,), 1)] * 3, 2))


def test_polling_consumers_of_a_line_that_is_fused_in_part():
    """Every other site polled by a consumer, with the slot of its number: it re-arms one that a separate poll
    of a later site still needs, or none does."""
    line = polled_step(4, 2, 4)
    part = [
        e if i % 2 else Exchange(PREFILL + i % 2, (PREFILL + i % 2,), 2) for i, e in enumerate(line)
    ]
    caught(split_form(part * 3, 2))


@pytest.mark.parametrize("slots", [3, 4, 5])
def test_clear_of_a_wrong_slot(slots):
    """One call ahead is too late for a peer that runs one call ahead."""
    exchanges = rotation(slots, slots, 3, ahead=1)
    assert exhaustive(Machine(split_form(exchanges, 2))) is not None
    caught(split_form(exchanges, 3))


def test_own_slot_cleared_while_others_read():
    caught(split_form(rotation(3, 3, 3, ahead=0), 2, 2, read_all=True))


def test_never_cleared():
    exchanges = [Exchange(i % 3, ()) for i in range(6)]
    assert "overwrite" in caught(split_form(exchanges, 2, overlaps=0))
    assert "stale" in caught(split_form(exchanges, 2))


@pytest.mark.parametrize(("calls", "slots"), [(3, 2), (4, 3), (5, 3), (5, 4), (7, 3)])
def test_slot_count_that_does_not_divide_the_calls(calls, slots):
    caught(split_form(rotation(calls, slots, 4), 2))
    assert randomised(Machine(split_form(rotation(calls, slots, 1), 2)), 50) is None, (
        "one replay alone is fine: only a model with replays can catch this"
    )


def test_poll_behind_a_push_that_lets_it_start_too_early():
    """A poll that may overlap the kernel before the push clears what the poll before it still reads (S = 3: the slot
    of the previous call). So a push lets it start behind its own wait."""
    caught(split_form(rotation(3, 3, 3, ahead=2), 2, 2, read_all=True, overlaps=2))


def test_argmax_slot_without_an_all_reduce_between():
    caught(split_form(with_argmax(0, 4), 2))


def test_monotonic_counter_without_wrap():
    """Plain `flag >= epoch` on a counter that wraps: an old flag looks new, or a new one old."""
    short = flag_form(12, 2, 1)
    assert exhaustive(Machine(short, bits=3, wrap_aware=False)) is not None
    caught(flag_form(20, 3, 2), bits=4, wrap_aware=False)
    assert randomised(Machine(flag_form(12, 3, 2), bits=4, wrap_aware=False), 20) is None, (
        "it works until the wrap, which is why it passes short tests"
    )


def test_flag_barrier_with_one_data_buffer():
    """Without the second half, a fast rank overwrites what a slow one still reads."""
    caught(flag_form(6, 2, 1, buffers=1), bits=8)


# Of the two-shot exchange: what breaks, and where it is seen.


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(
    ("area", "variant"),
    [
        (
            PARTIALS,
            dict(early=("gemm",), before="gather"),
        ),  # the next scatter does not wait for the gather
        (PARTIALS, dict(publish_waits=False)),  # published before the GEMM ended
        (Y, dict(store_first=False)),  # a program's flag before its row
        (Y, dict(order=("gemm", "publish", "reduce", "read"))),  # y is read without the gather
        # The next call is published before y of this one was read.
        (Y, dict(early=("gemm", "publish"), before="read")),
    ],
    ids=[
        "scatter before gather",
        "early publish",
        "early flag",
        "no gather",
        "publish before read",
    ],
)
def test_broken_two_shot(area, variant, world):
    found = caught(two_shot_form(4, world, **variant), **WRAP)
    assert found.startswith("stale") and f"in area {area}" in found


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(
    ("areas", "variant"),
    [
        ((PARTIALS, Y), dict(read_waits=False)),
        ((PARTIALS, Y), dict(last_waits=False)),
        ((PARTIALS,), dict(all_portions=False)),
        ((PARTIALS,), dict(scatter_first=False)),
        ((Y,), dict(sum_first=False)),
    ],
    ids=["no wait for readers", "no second wait", "first portion only", "early flag", "early y"],
)
def test_broken_two_shot_in_one_launch(areas, variant, world):
    found = caught(two_shot_fused_form([3, 3, 3], world, 3, **variant), **WRAP)
    assert found.startswith("stale") and any(f"in area {area}" in found for area in areas), found


def test_two_shot_in_one_launch_for_two_ranks_of_a_device():
    """One spins in front of the launch that it waits for."""
    streams = on_streams(two_shot_fused_form([1, 1], 2), 2)
    assert randomised(Machine(streams, **WRAP), 3) is not None


def test_two_shot_with_an_absolute_compare():
    """Right until the epoch wraps; then an old flag looks new."""
    assert exhaustive(Machine(two_shot_form(3, 2), bits=3, epoch=6, wrap_aware=False)) is not None
    assert exhaustive(Machine(two_shot_form(3, 2), bits=3, epoch=2, wrap_aware=False)) is None


def test_two_shot_out_of_lockstep():
    """One rank's launches in front of the other's on their stream: its reduce spins in front of what it waits for."""
    streams = on_streams(two_shot_form(2, 2), 2, lockstep=False)
    assert exhaustive(Machine(streams, **WRAP)) == "hang"
