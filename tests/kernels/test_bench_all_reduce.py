"""The all-reduce bench's checks, in lockstep in the interpreter: they pass and can fail."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from bench import all_reduce_soak
from bench.all_reduce import SECTIONS, TUNED_FORMS, best_entry, main, tuned_configs
from bench.all_reduce_forms import FORMS, TIMED_FORMS
from bench.all_reduce_group import Group
from bench.all_reduce_latency import SHARE_BYTES, SIZES, link_rate, table
from bench.all_reduce_two_shot import same_norm, shapes
from bench.rows import Rows
from engine.kernels.all_reduce import AllReduceConfig
from engine.tune import choose


def small_group(form, device, nbytes=256, world=2, programs=1, **options):
    """Ranks of one device; a two-shot message has rows of 32 elements."""
    where = [torch.device(device, 0) if device == "cuda" else torch.device(device)]
    config = AllReduceConfig(block=32, num_warps=1, programs=3)
    row = 32 if TIMED_FORMS[form].algorithm == "two_shot" else 0
    return Group(
        form, world, where, nbytes, config=config, programs=programs, row=row, **options
    )  # fmt: skip


@pytest.mark.parametrize("form", [name for name, form in FORMS.items() if not form.fused])
def test_checked_calls(form, device):
    group = small_group(form, device)
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
    group = small_group(form, device, 512, world, programs=2)
    if spoil:
        spoil(group)
    return group, all_reduce_soak.soak(group, total, seconds, calls=2, graphs=2)


@pytest.mark.parametrize("form", [f for f in all_reduce_soak.SOAKED if not FORMS[f].fused])
def test_soak_of_random_sizes(form, device):
    world = 2
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
    assert min(sizes) == 8 and 30_000 < max(sizes) <= 1 << 15
    assert all(size % 8 == 0 for size in sizes)
    rows = {all_reduce_soak.random_size(rng, 1 << 16, 1024) / 1024 for _ in range(2000)}
    assert rows == set(range(1, 33))
    assert sum(size * 2 % 512 != 0 for size in sizes) > 1000, "most end in a part of a block"
    steady = all_reduce_soak.Outcome(1, 0, True, [0] * 8, [5.0] * 9 + [5.09])
    decayed = all_reduce_soak.Outcome(1, 0, True, [0] * 8, [5.0] * 9 + [5.11])
    assert steady.steady and not decayed.steady


def test_sweep_has_more_programs_where_messages_are_large():
    def programs(algorithm, nbytes):
        return [config.programs for config in tuned_configs(algorithm, nbytes)]

    assert programs("lamport", 1 << 14) == programs("flag", 1 << 20) == [128, 128]
    assert max(programs("lamport", 1 << 23)) == 8 * 132
    assert not programs("flag", 1 << 21)
    assert programs("two_shot", 256 << 10) == [132, 264, 396, 528] and not programs("two_shot", 1 << 17)  # fmt: skip
    for algorithm, form in TUNED_FORMS.items():
        assert TIMED_FORMS[form].algorithm == algorithm and not TIMED_FORMS[form].fused
        assert all(config.algorithm == algorithm for config in tuned_configs(algorithm, 1 << 20))


def arrived(member):
    """All flags of the one launch, as if the peers were ahead: ranks take turns here."""
    flags = slice(member.end.space.scattered_offset, member.end.space.epochs_offset)
    member.buffer[flags].view(torch.int32).fill_(100)


@pytest.mark.parametrize("form", [*(f for f in TIMED_FORMS if f not in FORMS), "two_shot"])
def test_timed_forms_run(form, device):
    """Several calls of each rank without a GEMM: all flags arrive. y is the norm of what was scattered before."""
    group = small_group(form, device)
    how = TIMED_FORMS[form]
    for m in group.members:
        m.x.fill_(3.0)
        m.residual.fill_(1.0)
        m.end.y(4).view(torch.uint8).fill_(0xFF)
        if "scatter" not in how.phases and not how.fused:
            group.launch(m, 0, "scatter")
    for call in range(3):
        for m in group.members if how.fused else ():
            arrived(m)
            group.launch(m, call, "all")
        if not how.fused:
            group.call(call)
    group.synchronize()
    assert group.status[0] == 0
    for m in group.members:
        if how.norm:  # of equal values: ones
            y = m.end.y(4, how.fp8).float()
            if how.fp8:
                y = y * m.end.scales(4)[:, None]
            torch.testing.assert_close(y, torch.ones_like(y), atol=2**-8, rtol=0)
        else:
            assert bool((m.end.y(4) == 7.0).all())


def test_what_a_form_sends_and_its_share_of_the_links():
    one = 1 << 23
    sent = {name: form.sent_bytes(4, one) / one for name, form in TIMED_FORMS.items()}
    assert sent["lamport"] == sent["flag_split"] == 3
    assert sent["two_shot"] == sent["two_shot_split"] == sent["two_shot_norm"] == 1.5
    assert sent["two_shot_behind_gemm"] == 0.75 and sent["two_shot_norm_fp8"] == 1.125
    assert sent["two_shot_behind_gemm_norm_fp8"] == 0.375
    rate, source = link_rate([torch.device("cpu")])
    assert rate == 478e9 and "driver" in source
    assert set(SHARE_BYTES) < set(SIZES) and max(SIZES) == 2048 * 8192 * 2
    times = {("two_shot", True): {one: 1.5 * one / rate * 2e6}, ("flag", False): {1 << 10: 4.0}}
    head, first, second = table(times, 4, [1 << 10, one], rate)
    assert head.split() == ["1", "KB", "8", "MB", "of", "8", "MB", "of", "32", "MB"]
    assert first.split() == ["two_shot+pdl", "-", f"{times['two_shot', True][one]:.2f}", "50%", "-"]
    assert second.split() == ["flag", "4.00", "-", "-", "-"]


def test_shapes_of_two_shot_in_one_launch():
    """512 rows of 8192 on two ranks: 256 each. More programs than rows, or portions than a program's rows, add nothing."""
    found = {(c.programs, c.portions) for c in shapes(2, 1 << 23)}
    assert found == {(66, 1), (66, 2), (66, 4), (132, 1), (132, 2), (256, 1)}
    assert {(c.programs, c.portions) for c in shapes(2, 1 << 20)} == {(32, 1)}
    assert {c.portions for c in shapes(2, 1 << 25) if c.programs == 528} == {1, 2}


@pytest.mark.parametrize("form", ["two_shot_norm", "two_shot_norm_fp8"])
def test_bits_of_the_norm_are_checked(form, device, monkeypatch):
    """By four launches here, where ranks take turns."""
    phases = FORMS["two_shot_split"].phases
    monkeypatch.setitem(TIMED_FORMS, form, replace(TIMED_FORMS[form], phases=phases))
    group = small_group(form, device)
    assert same_norm(group)
    group.members[1].weight[3] += 0.25
    monkeypatch.setattr(group, "call", lambda call: None)  # y is that of the call before
    assert not same_norm(group)


def test_each_form_is_timed_in_its_own_shape():
    """Where the heuristic takes another algorithm too."""
    for form in TIMED_FORMS.values():
        for nbytes in (1 << 14, 1 << 22, 1 << 25):
            assert form.config(2, nbytes).algorithm == form.algorithm
    assert TIMED_FORMS["lamport"].config(2, 1 << 25).block == 256


def test_best_of_a_sweep_is_what_the_engine_chooses(tmp_path):
    one, two, flag = (
        AllReduceConfig(name, programs=128) for name in ("lamport", "two_shot", "flag")
    )
    small = best_entry({two: 2.41, one: 5.2, flag: float("nan")})
    assert small["config"] == two and small["us"] == 2.41
    assert "lamport" in small["runner_up"]["config"]
    keys = [choose.key_string("all_reduce", {"world": 2, "nbytes": n}) for n in (1 << 14, 1 << 21)]
    try:
        choose.set_target("NVIDIA H200", 132, tmp_path)
        entries = dict(zip(keys, (small, best_entry({one: 8.0, two: 9.0}))))
        choose.save_entries("all_reduce", "NVIDIA H200", entries, choose.metadata("all_reduce"))

        def chosen(nbytes):
            return choose.choose("all_reduce", {"world": 2, "nbytes": nbytes}).algorithm

        # The cache, and what is near its sizes, before the heuristic, which has it the other way round.
        assert [chosen(n) for n in (1 << 14, 10240, 1 << 21, 3 << 20)] == [
            "two_shot", "two_shot", "lamport", "lamport",
        ]  # fmt: skip
        assert chosen(64 << 20) == "two_shot" and chosen(64) == "lamport"
    finally:
        choose.set_target("NVIDIA H200", 132)


def test_sections_are_named_and_checked(capsys):
    for wrong in ("nonsense", "latency,tunes", ""):
        assert main(["--sections", wrong]) == 2
        out, err = capsys.readouterr()
        assert not out and err.count("\n") == 1
        assert repr(wrong.split(",")[-1]) in err and ", ".join(SECTIONS) in err
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert end.value.code == 0 and all(name in said for name in SECTIONS) and "tune" in SECTIONS
