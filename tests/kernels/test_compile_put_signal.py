"""What the compiler makes of put, poll and consume for sm_90: wide stores, one release behind a
barrier, no spills."""

from __future__ import annotations

import pytest

from tests.kernels.compile_sm90 import run_compile_checks


@pytest.fixture(scope="module")
def reports() -> dict[str, dict]:
    return run_compile_checks("tests.kernels.compile_put_signal")


def test_no_spills_few_registers(reports):
    assert len(reports) == 12
    for name, report in reports.items():
        assert report["spill_store_bytes"] == report["spill_load_bytes"] == 0, name
        assert report["local_bytes"] == report["local_accesses"] == 0, name
        assert report["registers"] <= 64, name  # 1024 threads a multiprocessor
        assert report["waits"] == int(name[-1]), name


def test_one_release_behind_the_payload_and_a_barrier(reports):
    for name, report in reports.items():
        if name.startswith("put"):
            assert report["releases"] == 1, name
            release = report["release_at"][0]
            last = max(report["payload_stores"])
            assert any(last < barrier < release for barrier in report["barriers_at"]), name
            assert report["fences_sys"] >= 1 and report["acquires"] == 1, name


def test_ticket_only_where_several_programs_meet(reports):
    for name, report in reports.items():
        many = name.startswith(f"put/{1 << 20}")
        assert report["tickets"] == (["atom.global.gpu.acq_rel.add.u32"] if many else []), name


def test_payload_moves_16_bytes_at_a_time(reports):
    """32-bit stores are the counter, the credit, the header and the ticket; loads are the counter,
    the credit and the abort word. Two 16-byte stores are the report of an expired wait."""
    for name, report in reports.items():
        if name.startswith("put"):
            assert report["global_stores"]["128"] >= 3 and report["global_loads"]["128"] >= 1, name
            assert report["global_stores"]["32"] <= 4 and report["global_loads"]["32"] <= 3, name
            assert set(report["global_stores"]) == set(report["global_loads"]) == {"32", "128"}
