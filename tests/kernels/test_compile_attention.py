"""Attention and RoPE configs compiled for sm_90 without a GPU: no spills, 16-byte KV loads, tensor cores."""

from __future__ import annotations

import re

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


def test_prefetch_moves_the_first_tile_before_the_wait(reports: dict) -> None:
    """ACQBULK is griddepcontrol.wait. 16 LDG.128 a thread are the K and V tile; q comes after, always."""
    for name, r in _of(reports, "decode 7b_tp1").items():
        before, _ = r["sass"].split("ACQBULK")
        loads = len(re.findall(r"\bLDG\.E\.128\b", before))
        assert loads == (16 if "prefetch=True" in name else 0), name
        assert len(re.findall(r"\bLDG\b", before)) == (18 if "prefetch=True" in name else 0), name
        assert "PREEXIT" in before and "LDGSTS" not in before, name
        assert not re.search(r"\b(STG|ATOMG|RED)\b", before), name


def test_tickets_release_and_acquire_at_gpu_scope(reports: dict) -> None:
    """Each of the two tickets: barrier, fence, atomic, L1 invalidation, barrier, in this order."""
    for name, r in _of(reports, "decode").items():
        order = re.findall(
            r"\b(BAR\.SYNC|MEMBAR\.\w+\.GPU|ATOMG\.E\.ADD\.STRONG\.GPU|CCTL\.IVALL)", r["sass"]
        )
        for ticket in [i for i, op in enumerate(order) if op.startswith("ATOMG")]:
            assert order[ticket - 2] == "BAR.SYNC" and order[ticket - 1].startswith("MEMBAR"), name
            assert order[ticket + 1] == "CCTL.IVALL" and order[ticket + 2] == "BAR.SYNC", name
        assert sum(op.startswith("ATOMG") for op in order) == 2, name


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


def test_rope_with_norms_sums_a_head_within_a_warp(reports: dict) -> None:
    """The sum of squares goes by shuffles; in prefill only the 128 gains change layout, through 256 bytes of
    shared memory. A decode row of 128 elements is 8 bytes a lane."""
    for name, r in _of(reports, "norm rope").items():
        decode = "decode=True" in name
        assert r["shared_bytes"] == (0 if decode else 256), name
        assert set(r["global_stores"]) == {"64" if decode else "128"}, name
        assert r["global_loads"]["64" if decode else "128"] >= 2, name


def test_fp8_decode_moves_e4m3_in_16_bytes_up_to_the_registers(reports: dict) -> None:
    for name, r in _of(reports, "fp8 decode").items():
        # K and V by LDGSTS.128, as many as in the first tile's LDG.128; the scales are the 4-byte copies.
        assert set(r["async_copies"]) == {"128", "32"}, name
        assert set(r["global_loads"]) <= {"128", "64", "32"}, name
        assert r["tensor_core"].keys() == {"HMMA"}, name
        # V comes transposed in 16-bit units; single bytes from shared memory would cost 64 times as many loads.
        assert "LDSM.16.MT88" in r["sass"] and not re.search(r"\bLDS\.[US]8\b", r["sass"]), name
        # Packed converts only: F2F runs at an eighth of their rate.
        assert re.search(r"\bF2FP\.F16\.E4M3\.UNPACK_B\b", r["sass"]), name
        assert not re.search(r"\bF2F\.(F16|BF16)", r["sass"]), name


def test_fp8_prefetch_holds_one_tile(reports: dict) -> None:
    """Before the wait: slot, position, K and V of the first tile in 16 bytes, its scales; 32 KB for 8 warps."""
    for name, r in _of(reports, "fp8 decode 7b_tp1").items():
        before, _ = r["sass"].split("ACQBULK")
        wide = len(re.findall(r"\bLDG\.E\.128\b", before))
        assert wide == (8 if "prefetch=True" in name else 0), name
        assert "LDGSTS" not in before and not re.search(r"\b(STG|ATOMG|RED)\b", before), name


def test_fp8_decode_fits_its_multiprocessor(reports: dict) -> None:
    """4 warps: two programs each; 8 warps: one (attention_space.py)."""
    for name, r in _of(reports, "fp8 decode").items():
        assert r["shared_bytes"] + 1024 <= 227 * 1024 // (2 if "131072" in name else 1), name
        assert 256 * r["registers"] <= 65536, name


def test_fp8_prefill_is_wgmma_fed_by_16_byte_copies(reports: dict) -> None:
    for name, r in _of(reports, "fp8 prefill").items():
        assert r["tensor_core"].keys() == {"HGMMA"}, name
        assert set(r["async_copies"]) == {"128", "32"}, name
        assert r["async_copies"]["32"] <= r["async_copies"]["128"], name  # scales: not one a score
        assert not re.search(r"\bF2F\.(F16|BF16)", r["sass"]), name


def test_fp8_append_needs_no_local_memory_and_stores_words(reports: dict) -> None:
    for name, r in _of(reports, "fp8 rope").items():
        assert set(r["global_stores"]) <= {"128", "64", "32"}, name
        assert r["global_loads"]["64" if "decode=True" in name else "128"] >= 1, name
        assert r["local_accesses"] == 0, name
