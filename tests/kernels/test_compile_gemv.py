"""Every shipped GEMV config, compiled for sm_90 without a GPU: registers, spills, load widths."""

from __future__ import annotations

import pytest

from tests.kernels.compile_sm90 import run_compile_checks


@pytest.fixture(scope="module")
def reports():
    return run_compile_checks("tests.kernels.gemv_compile_cases")


def test_everything_compiles(reports):
    assert len(reports) >= 30
    assert not {name: text for name, text in reports.items() if isinstance(text, str)}


def test_no_spills_and_no_local_memory(reports):
    for name, r in reports.items():
        spilled = r["spill_store_bytes"] + r["spill_load_bytes"] + r["local_bytes"]
        assert spilled + r["local_accesses"] == 0, name


def test_registers_let_two_programs_share_a_multiprocessor(reports):
    """64 Ki registers an SM. Simple, one row: at least 512 resident threads; rings take what they like."""
    for name, r in reports.items():
        one_row = name.startswith("simple") and name.endswith("rows=1") and "polls" not in name
        limit = 128 if one_row else 255
        assert r["registers"] <= limit, name


def test_dependents_start_at_once_but_behind_a_push(reports):
    """A poll launch overlaps the push in front of it and nothing before that (all_reduce.py)."""
    assert any(" push " in name for name in reports)
    for name, r in reports.items():
        words = r["dependencies"].split()
        order = [word for word in words if word != "load"]
        assert order == (["wait", "signal"] if " push " in name else ["signal", "wait"]), name
        assert words.index("load") < words.index("wait"), f"{name}: weights come before the wait"


def test_weights_move_16_bytes_a_thread(reports):
    """Weights are the only loads that must be wide: LDG.128 (simple) or LDGSTS.128 (ring), none narrower."""
    for name, r in reports.items():
        if name.startswith("simple"):
            # Two tiles (before the wait, and the next one) of at least one 16-byte load each.
            assert r["global_loads"].get("128", 0) >= 2, name
        else:
            assert set(r["async_copies"]) == {"128"}, name
            if "polls" in name:  # 16 bytes of a message or the residual at a time; the status word
                assert r["ptx"] == "ld.relaxed.sys.global.u32 ld.relaxed.sys.global.v4.u32", name
            assert sum(r["tensor_core"].values()) > 0, name


@pytest.mark.parametrize("kernel", ["simple", "ring"])
def test_only_a_captured_rope_reads_its_rows_ahead_of_the_wait(reports, kernel):
    """Of eager runs, the step before may still be writing positions."""
    captured = reports[f"{kernel} fp8 1280x8192 rope rows=1"]
    assert captured["loads_ahead"] > reports[f"{kernel} eager rope rows=1"]["loads_ahead"]
