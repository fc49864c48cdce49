"""What the compiler makes of the kernels of sampling under controls for sm_90."""

from __future__ import annotations

import pytest

from tests.kernels.compile_sm90 import run_compile_checks


@pytest.fixture(scope="module")
def reports() -> dict[str, dict]:
    return run_compile_checks("tests.kernels.sample_compile_cases")


def test_no_spills_and_one_wait(reports):
    assert len(reports) == 7
    for name, report in reports.items():
        assert report["spill_store_bytes"] == report["spill_load_bytes"] == 0, name
        assert report["local_bytes"] == report["local_accesses"] == 0, name
        assert report["waits"] == 1, name
        assert report["registers"] <= 128, name


def test_every_pair_is_pushed_and_polled_once(reports):
    """A program of 128 threads holds 256 pairs: two a thread and peer, and no replica."""
    for world in (2, 8):
        assert reports[f"adjust/{world}"]["pushes"] == 2 * world
    assert reports["gather"]["polls"] == 2 and reports["gather"]["pushes"] == 2


def test_sums_are_integer_atomics(reports):
    assert any("add.u64" in atomic for atomic in reports["search"]["atomics"])
    for name, report in reports.items():
        assert not any("f32" in a or "f64" in a for a in report["atomics"]), name
