"""What the compiler makes of the collectives for sm_90: spins in registers, 16-byte accesses, no
spills.
"""

from __future__ import annotations

import pytest

from tests.kernels.compile_sm90 import run_compile_checks


@pytest.fixture(scope="module")
def reports() -> dict[str, dict]:
    return run_compile_checks("tests.kernels.compile_collectives")


def test_no_spills_and_one_wait(reports):
    assert len(reports) >= 18
    for name, report in reports.items():
        assert report["spill_store_bytes"] == report["spill_load_bytes"] == 0, name
        assert report["local_bytes"] == report["local_accesses"] == 0, name
        assert report["waits"] == 1, f"{name}: {report['waits']} griddepcontrol.wait"


def test_only_a_poll_runs_ahead_of_its_wait(reports):
    """And only behind a push, which lets it start behind its own wait."""
    for name, report in reports.items():
        words = report["dependencies"].split()
        order = [word for word in words if word != "load"]
        assert order == (["wait", "signal"] if "lamport/push" in name else ["signal", "wait"]), name
        assert ("lamport/poll" in name) == (words[-1] == "wait"), f"{name}: {words}"
        if "lamport/poll" in name:  # a line of the first-level cache may be an older one
            assert report["loads_ahead"] == 0, name


def test_registers(reports):
    """Two programs of 256 threads a multiprocessor fit below 128 registers a thread."""
    for name, report in reports.items():
        assert report["registers"] <= 128, name


def test_messages_move_16_bytes_at_a_time(reports):
    for name, report in reports.items():
        if name.startswith("lamport"):
            # 64-bit loads are the peer table, 32-bit loads the abort word: no payload among them.
            assert set(report["global_stores"]) == {"128"}, name
            assert report["global_loads"]["128"] >= 1, name
            assert report["global_loads"].get("32", 0) <= 2, name
        elif name.startswith(("two_shot/scatter", "two_shot/reduce", "two_shot/all")):
            # 32-bit stores: the flags (and the epoch), and a row's FP8 scale to each rank.
            scales = report["world"] if "quantize" in name else 0
            flags = report["releases"] + ("all" in name)
            assert set(report["global_stores"]) <= {"128", "32"}, name
            assert report["global_stores"].get("32", 0) <= scales + flags, name
            assert set(report["global_loads"]) <= {"128", "64", "32"}, name
            assert report["global_loads"]["128"] >= 4, name


def test_two_shot_in_one_launch_releases_four_times(reports):
    """Behind a portion, behind the only one, behind the first row, at the end; each a fence of one warp."""
    for name, report in reports.items():
        if name.startswith("two_shot/all"):
            assert report["releases"] == 4, name
            spins = 2  # each has a fence on its way out, between its status words
            assert report["fences"] == report["fences_of_some"] + spins == 4 + spins, name


def test_spins_stay_out_of_shared_memory(reports):
    """A spin that compiled to a block reduction would show barriers and shared memory."""
    for name, report in reports.items():
        if name.startswith("lamport"):
            own = "_own/" in name  # one barrier between reading a slot and re-arming it
            assert report["barriers"] == own and report["shared_bytes"] == 0, name
            assert report["pushes"] >= 1, name
            assert "push" in name or report["polls"] >= report["world"], name


def test_logits_load_wide(reports):
    assert reports["argmax/partial"]["global_loads"].get("128", 0) >= 1
