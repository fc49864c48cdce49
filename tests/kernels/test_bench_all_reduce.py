"""The all-reduce bench's checks, in lockstep in the interpreter: they pass and can fail."""

from __future__ import annotations

import random

import pytest
import torch

from bench import all_reduce_soak
from bench.all_reduce import best_entry, tuned_configs
from bench.all_reduce_group import FORMS, Group
from bench.rows import Rows
from engine.kernels.all_reduce import AllReduceConfig
from engine.tune import choose


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
    (local,) = group.locals.values()
    local.expected[3, 5] ^= 1
    local.x_pool[1, 6, 7] += 1
    for call in range(8):  # every row of the pool from 2 to 9
        group.checked_call(call)
    # One element of row 3 and one of row 6, of both ranks.
    assert group.verdict()["wrong"] == 4
    assert group.verdict()["ranks_equal"]
    local.found[0, 1] += 1
    assert not group.verdict()["ranks_equal"]


def soaked(form, device, world=2, total=40, seconds=120.0, spoil=None):
    """Ten tenths of one round of 2 graphs of 2 calls."""
    where = [torch.device(device, 0) if device == "cuda" else torch.device(device)]
    group = Group(
        form, world, where, 512, config=AllReduceConfig(block=32, num_warps=1), programs=2
    )
    if spoil:
        spoil(group)
    return group, all_reduce_soak.soak(group, total, seconds, calls=2, graphs=2)


@pytest.mark.parametrize(
    "form,world", [("lamport_own_slot", 2), ("two_shot_split", 2), ("flag_split", 2)]
)
def test_soak_of_random_sizes(form, world, device):
    group, outcome = soaked(form, device, world)
    assert outcome.calls == 40 and len(outcome.tenths_us) == 10 and outcome.sound
    rows = Rows("all_reduce_soak", write=False)
    line = all_reduce_soak.report(rows, group, world, outcome)
    row, decay = rows.rows
    assert decay["metric"] == "soak_last_over_first" and decay["unit"] == "ratio"
    assert row["value"] == 40 and row["mismatches"] == 0 and row["algorithm"] == form
    assert row["last_over_first"] == outcome.tenths_us[9] / outcome.tenths_us[0]
    assert f"{world} ranks a device" in line and "40 calls, 0 wrong" in line


def test_soak_finds_a_wrong_element_and_stops_in_time(device):
    def spoil(group):
        (local,) = group.locals.values()
        local.expected[:, 0] ^= 1

    _, outcome = soaked("lamport_own_slot", device, spoil=spoil)
    assert (
        outcome.wrong == 2 * (40 + 4) and not outcome.sound
    )  # both ranks, and the replays of the warm-up
    _, outcome = soaked("lamport_own_slot", device, seconds=0.0)
    assert outcome.calls == 0 and outcome.last_over_first is None and not outcome.steady


def test_soak_sizes_and_decay():
    rng = random.Random(0)
    sizes = [all_reduce_soak.random_size(rng, 1 << 16) for _ in range(2000)]
    assert min(sizes) == 8 and max(sizes) > 30_000 and all(size % 8 == 0 for size in sizes)
    assert sum(size * 2 % 512 != 0 for size in sizes) > 1000, "most end in a part of a block"
    steady = all_reduce_soak.Outcome(1, 0, True, [0] * 8, [5.0] * 9 + [5.09])
    decayed = all_reduce_soak.Outcome(1, 0, True, [0] * 8, [5.0] * 9 + [5.11])
    assert steady.steady and not decayed.steady


def test_sweep_has_more_programs_where_messages_are_large():
    def programs(algorithm, nbytes):
        return [config.programs for config in tuned_configs(algorithm, nbytes)]

    assert programs("lamport", 1 << 14) == programs("flag", 1 << 20) == [128, 128]
    assert max(programs("lamport", 1 << 23)) == max(programs("two_shot", 1 << 20)) == 8 * 132
    assert not programs("flag", 1 << 21)
    grid = tuned_configs("two_shot", 1 << 23)[-2].grid((1 << 23) // 32)
    assert grid == (1024,), "a shard of 4 MB has 1024 blocks of 4 KB"


def test_best_of_a_sweep_is_what_the_engine_chooses(tmp_path):
    one, two, flag = (
        AllReduceConfig(name, programs=128) for name in ("lamport", "two_shot", "flag")
    )
    small = best_entry({one: 2.41, two: 5.2, flag: float("nan")})
    assert (
        small["config"] == one
        and small["us"] == 2.41
        and "two_shot" in small["runner_up"]["config"]
    )
    keys = [choose.key_string("all_reduce", {"world": 2, "nbytes": n}) for n in (1 << 14, 1 << 21)]
    try:
        choose.set_target("NVIDIA H200", 132, tmp_path)
        entries = dict(zip(keys, (small, best_entry({one: 9.0, two: 8.0}))))
        choose.save_entries("all_reduce", "NVIDIA H200", entries, choose.metadata("all_reduce"))

        def chosen(nbytes):
            return choose.choose("all_reduce", {"world": 2, "nbytes": nbytes}).algorithm

        # The heuristic never takes two-shot at two ranks: this is the cache, and what is near its sizes.
        assert [chosen(n) for n in (1 << 14, 7168, 1 << 21, 3 << 20)] == [
            "lamport", "lamport", "two_shot", "two_shot",
        ]  # fmt: skip
        assert chosen(64 << 20) == "lamport"
    finally:
        choose.set_target("NVIDIA H200", 132)
