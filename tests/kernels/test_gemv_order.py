"""A GEMV that polls sums in the order of one that does not, by the layouts that the compiler gives their sums.

The values are compared in the emulator (test_gemv_ring.py) and on a card (test_gemv_poll.py).
"""

from __future__ import annotations

import re

import pytest

from tests.kernels.compile_sm90 import run_compile_checks


@pytest.fixture(scope="module")
def orders():
    return run_compile_checks("tests.kernels.gemv_order_cases")


def by_axis(sums, axis):
    return [operand for where, operand in sums if where == axis]


def test_sums_over_k_have_one_layout(orders):
    """Ring: all sums, the squares of the norm's too. Plain: those of W x."""
    assert len(orders) >= 40
    for name, forms in orders.items():
        plain, polls = forms["plain"], forms["polls"]
        if name.startswith("simple"):
            plain, polls = by_axis(plain, "1"), by_axis(polls, "1")
            assert len(plain) == 1
        assert plain == polls and len(plain) >= 1, name


def test_plain_kernel_deals_squares_as_loads_do(orders):
    """Loaded values: up to 8 neighbours a thread; polled ones, which `by_thread` has reordered: one by one."""
    for name, forms in orders.items():
        if not name.startswith("simple"):
            continue
        (plain,), (polls,) = (by_axis(forms[form], "0") for form in ("plain", "polls"))
        length, each, warps = blocked(plain)
        assert each == max(1, min(8, length // (32 * warps))), name
        assert blocked(polls) == (length, 1, warps), name
        threads = 32 * warps
        want = [[length // (threads * each), threads, each]] if each > 1 else []
        assert forms["dealt"] == want, name


def blocked(operand):
    """(length, neighbours a thread, warps) of a vector's blocked layout."""
    layout = r"\{sizePerThread = \[(\d+)\], threadsPerWarp = \[32\], warpsPerCTA = \[(\d+)\], order = \[0\]\}"
    found = re.fullmatch(r"tensor<(\d+)xf32, #ttg.blocked<" + layout + ">>", operand)
    assert found, operand
    return tuple(map(int, found.groups()))
