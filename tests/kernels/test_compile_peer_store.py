"""Each kind of bench/peer_store.py compiles for sm_90 to the instruction that it is named after."""

from __future__ import annotations

import pytest

from tests.kernels.compile_sm90 import run_compile_checks

# kind: what stores, what loads in PTX (None: nothing of global memory), and the store in SASS. Volatile
# is the same machine instruction as relaxed.sys.
EXPECTED = {
    "relaxed.sys": ("st.relaxed.sys.global.v4.u32", "ld.relaxed.sys.global.v4.u32", "STG.E.128.STRONG.SYS"),
    "weak": ("st.weak.global.v4.u32", "ld.relaxed.sys.global.v4.u32", "STG.E.128"),
    "tl.store": ("st.global.v4.b32", "ld.global.v4.b32", "STG.E.128"),
    "volatile": ("st.volatile.global.v4.u32", "ld.relaxed.sys.global.v4.u32", "STG.E.128.STRONG.SYS"),
    "relaxed.gpu": ("st.relaxed.gpu.global.v4.u32", "ld.relaxed.sys.global.v4.u32", "STG.E.128.STRONG.GPU"),
    "relaxed.sys from registers": ("st.relaxed.sys.global.v4.u32", None, "STG.E.128.STRONG.SYS"),
    "weak from registers": ("st.weak.global.v4.u32", None, "STG.E.128"),
    "relaxed.sys + own copy": (
        "st.relaxed.sys.global.v4.u32", "ld.relaxed.sys.global.v4.u32", "STG.E.128.STRONG.SYS"),
    "weak + own copy": ("st.weak.global.v4.u32", "ld.relaxed.sys.global.v4.u32", "STG.E.128"),
    "TMA store": ("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group", "ld.global.v4.b32", "UTMASTG.2D"),
    "pull relaxed.sys": ("st.weak.global.v4.u32", "ld.relaxed.sys.global.v4.u32", "STG.E.128"),
    "pull weak": ("st.weak.global.v4.u32", "ld.weak.global.v4.u32", "STG.E.128"),
    "pull tl.load": ("st.global.v4.b32", "ld.global.v4.b32", "STG.E.128"),
}  # fmt: skip


@pytest.fixture(scope="module")
def reports() -> dict[str, dict]:
    return run_compile_checks("tests.kernels.compile_peer_store")


def test_instructions(reports):
    assert {name for name in reports if not name.startswith("exchange")} == set(EXPECTED)
    for name, (store, load, machine) in EXPECTED.items():
        found = reports[name]["ptx"]
        moved = {k for k in found if k.startswith(("st.", "ld.")) and "global" in k}
        moved |= {k for k in found if "bulk.tensor" in k}
        assert moved == {store, load} - {None}, name
        stores = [s for s in reports[name]["sass"] if not s.startswith("LDG")]
        assert stores == [machine], name


def test_two_stores_in_flight_16_bytes_each(reports):
    for name in EXPECTED:
        if name != "TMA store":
            copies = 2 if "own copy" in name else 1
            assert reports[name]["global_stores"] == {"128": 2 * copies}, name
            expected = {} if "registers" in name else {"128": 2}
            assert reports[name]["global_loads"] == expected, name
    assert reports["TMA store"]["shared_bytes"] == 2 * (16 << 10)
    assert reports["TMA store"]["ptx"]["cp.async.bulk.wait_group.read"] == 2


def test_exchange_moves_what_an_all_reduce_moves(reports):
    """Push: 1 load, 2 stores. Poll: residual and 2 messages read; 2 armed, 1 result written."""
    for name, loads, stores in (("10", 1, 2), ("01", 3, 3), ("11", 4, 5)):
        report = reports[f"exchange/{name}"]
        assert report["global_loads"] == {"128": loads} and report["global_stores"] == {
            "128": stores
        }
        assert set(report["ptx"]) == {
            "st.relaxed.sys.global.v4.u32",
            "ld.relaxed.sys.global.v4.u32",
        }


def test_no_spills(reports):
    for name, report in reports.items():
        assert report["spill_store_bytes"] == report["spill_load_bytes"] == 0, name
        assert report["local_bytes"] == report["local_accesses"] == 0, name
        assert report["registers"] <= 64, name
