"""The GEMM compiled for the H200 without one: wgmma, TMA, no spills, wgmma left asynchronous, fast
FP8 conversion."""

from __future__ import annotations

import pytest

from tests.kernels.compile_sm90 import run_compile_checks


@pytest.fixture(scope="module")
def reports() -> dict[str, dict]:
    return run_compile_checks("tests.kernels.gemm_compile_cases")


def test_no_spills_and_within_the_card(reports: dict[str, dict]) -> None:
    assert len(reports) > 40 and sum("tail=1," not in name for name in reports) == 36
    for name, report in reports.items():
        assert report["spill_store_bytes"] == report["spill_load_bytes"] == 0, name
        assert report["local_accesses"] == 0, name
        assert report["registers"] <= 255 and report["shared_bytes"] <= 227 * 1024, name


def test_warpgroup_tensor_cores_everywhere(reports: dict[str, dict]) -> None:
    for name, report in reports.items():
        # QGMMA: e4m3 x e4m3, twice the rate of HGMMA. HMMA: the instruction of earlier cards.
        assert set(report["tensor_core"]) == {"QGMMA" if report["kernel"] == "w8a8" else "HGMMA"}, (
            name
        )


def test_tiles_come_by_tma_or_16_byte_copies(reports: dict[str, dict]) -> None:
    for name, report in reports.items():
        if report["tma"]:
            assert report["tma_loads"] >= 2, name
        else:
            assert set(report["async_copies"]) == {"128"}, name
        allowed = {"128", "32"}  # 32: the ticket
        if report["kernel"] == "async" or "split_k=1" not in name:
            allowed.add("64")  # split-K partials, and SiLU pairs of a narrow tile
        assert set(report["global_stores"]) <= allowed, name


def test_wgmma_is_not_serialised(reports: dict[str, dict]) -> None:
    """ptxas puts a fence before every HGMMA when it cannot keep them asynchronous (its note C7515).
    That is so for FP8 with swapped operands, whose A operand comes from registers: it is used where
    memory is the bound. gemm_async.py is the same product without that fault."""
    for name, report in reports.items():
        if report["kernel"] == "async":
            assert report["fences"] == report["waits_in_wgmma"] == 4, name  # 2 in the loop
        elif not (report["fp8"] and report["swap"]):
            assert report["fences"] == 1, name


def test_a_running_wgmma_keeps_its_register_operand(reports: dict[str, dict]) -> None:
    for name, report in reports.items():
        assert report["clobbered_fragments"] == 0, name


def test_fp8_to_bf16_avoids_the_quarter_rate_convert(reports: dict[str, dict]) -> None:
    for name, report in reports.items():
        assert report["slow_converts"] == 0, name


def test_every_variant_waits_for_the_kernel_before_it(reports: dict[str, dict]) -> None:
    for name, report in reports.items():
        assert report["pdl"] == 2, name
