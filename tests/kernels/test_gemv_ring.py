"""The ring GEMV without a GPU: compiled for sm_90, its PTX run by `ptx_emulator.py`, against the reference.

And both kernels' polls, against themselves without.
"""

from __future__ import annotations

import pytest
import torch

from engine.errors import EngineError
from engine.kernels.gemv_config import MAX_STAGES, SHARED_BYTES, GemvConfig, heuristic, ring_shape
from tests.kernels.compile_sm90 import run_compile_checks

CASES = 18
FP8 = torch.float8_e4m3fn


@pytest.fixture(scope="module")
def results():
    return run_compile_checks("tests.kernels.gemv_emulated_cases")


def test_every_epilogue_agrees_with_the_reference(results):
    errors = {name: v for name, v in results.items() if not isinstance(v, bool)}
    assert len(errors) == CASES
    assert not {name: v for name, v in errors.items() if not v <= 1.0}


def test_rows_and_polls_do_not_change_bits(results):
    bits = {name: v for name, v in results.items() if isinstance(v, bool)}
    assert len(bits) == 12
    assert all(bits.values()), bits


def shape(n, k, rows=1, x=torch.bfloat16, w=FP8, **change):
    values = dict(
        block_n=64, block_k=512, stages=4, num_warps=8, warps_k=4, programs=132, programs_per_sm=1
    )
    return ring_shape(GemvConfig("ring", **{**values, **change}), n, k, rows, x, w)


@pytest.mark.parametrize("n", [2, 34, 1280, 7392, 8192, 29568, 37888, 152064])
def test_partition_covers_every_row_once(n):
    s = shape(n, 8192)
    assert s.programs <= 132
    assert s.rows_per_program % 2 == 0
    assert (s.programs - 1) * s.rows_per_program < n <= s.programs * s.rows_per_program


def test_x_is_staged_when_it_fits():
    assert shape(8192, 8192, rows=1).stage_x
    assert not shape(8192, 14784, rows=8).stage_x
    for rows in range(1, 9):
        assert shape(8192, 14784, rows=rows).shared_bytes <= SHARED_BYTES


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(k=8200), "not a multiple of 16 bytes"),
        (dict(w=torch.bfloat16, x=torch.float16), "must be equal"),
        (dict(block_n=24), "multiple of 16"),
        (dict(warps_k=3), "multiple of 16"),
        (dict(block_k=256), "multiples of 128 bytes"),
        (dict(stages=12), "shared memory"),
    ],
)
def test_configs_that_do_not_fit_are_refused(change, message):
    with pytest.raises(EngineError, match=message):
        shape(**{"n": 8192, "k": 8192, **change})


@pytest.mark.parametrize("weight", [FP8, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n", [1024, 1280, 3584, 7392, 8192, 29568, 37888, 152064])
@pytest.mark.parametrize("k", [512, 1024, 3584, 3696, 8192, 14784, 18944, 29568])
def test_heuristic_gives_a_deep_ring_that_fits_all_row_counts(n, k, weight):
    config = heuristic(n, k, weight)
    assert config.kernel == "ring" and 3 <= config.stages <= MAX_STAGES
    x = torch.bfloat16 if weight == FP8 else weight
    for rows in range(1, 9):
        assert ring_shape(config, n, k, rows, x, weight).shared_bytes <= SHARED_BYTES
    # At least 64 KB in flight behind the wait: twice what Little's law asks for.
    tile = config.block_n * config.block_k * weight.itemsize
    assert (config.stages - 1) * tile >= 64 << 10
