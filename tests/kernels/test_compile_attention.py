"""Attention and RoPE configs compiled for sm_90 without a GPU: no spills, 16-byte KV loads, tensor cores."""

from __future__ import annotations

import pytest

from tests.kernels.compile_sm90 import run_compile_checks


@pytest.fixture(scope="module")
def reports() -> dict:
    return run_compile_checks("tests.kernels.attention_compile_cases")


def _of(reports: dict, op: str) -> dict:
    found = {name: r for name, r in reports.items() if name.startswith(op)}
    assert len(found) >= 2
    return found


def test_nothing_spills(reports: dict) -> None:
    for name, r in reports.items():
        assert r["spill_store_bytes"] == r["spill_load_bytes"] == r["local_bytes"] == 0, name
        assert r["local_accesses"] == 0, name


def test_decode_reads_kv_in_16_bytes_on_tensor_cores(reports: dict) -> None:
    for name, r in _of(reports, "decode").items():
        # The pipelined loop copies K and V by LDGSTS.128 and by nothing narrower.
        assert set(r["async_copies"]) == {"128"}, name
        # The first tile, q and the partials: LDG.128. The rest is scalars and softmax statistics.
        assert r["global_loads"]["128"] >= 17, name
        assert set(r["global_loads"]) <= {"128", "64", "32"}, name
        assert r["tensor_core"].keys() == {"HMMA"}, name


def test_two_decode_programs_fit_a_multiprocessor(reports: dict) -> None:
    """The heuristic puts up to two on each: 64 K registers and 227 KB of shared memory (1 KB each reserved)."""
    for name, r in _of(reports, "decode").items():
        if "d256" in name:  # 8 warps: one program
            continue
        assert 2 * 128 * r["registers"] <= 65536, name
        assert 2 * (r["shared_bytes"] + 1024) <= 227 * 1024, name


def test_prefill_is_wgmma_fed_by_16_byte_copies(reports: dict) -> None:
    for name, r in _of(reports, "prefill").items():
        assert r["tensor_core"].keys() == {"HGMMA"}, name
        assert set(r["async_copies"]) == {"128"}, name
        assert r["shared_bytes"] <= 227 * 1024, name


def test_rope_moves_16_bytes_and_needs_no_exchange(reports: dict) -> None:
    for name, r in _of(reports, "rope").items():
        assert r["shared_bytes"] == 0, name
        assert set(r["global_loads"]) == {"128", "32"} and r["global_loads"]["32"] == 3, name
        assert set(r["global_stores"]) == {"128"}, name
