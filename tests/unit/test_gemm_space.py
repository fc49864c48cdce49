"""The GEMM search space and heuristic, without a GPU."""

from __future__ import annotations

import itertools
from dataclasses import asdict

import pytest

SHAPES = [(4608, 3584), (3584, 18944), (1280, 8192), (29568, 8192), (8192, 3696), (152064, 8192)]


@pytest.mark.parametrize("weight_dtype", ["bf16", "fp8", "w8a8"])
def test_space_and_heuristic_stay_within_the_card(weight_dtype: str) -> None:
    from engine.kernels.gemm import heuristic
    from engine.tune import gemm_space

    fp8 = weight_dtype != "bf16"
    for (n, k), t in itertools.product(SHAPES, (16, 48, 64, 80, 128, 512, 2048)):
        found = gemm_space.candidates(t, n, k, weight_dtype, 132)
        assert len(found) == len(set(found))
        assert any(c.kernel == "cublas" for c in found) is not fp8
        assert 4 <= len(found) <= 48
        for config in [*found, heuristic(t, n, k, weight_dtype, 132)]:
            assert gemm_space.shared_bytes(config, fp8) <= gemm_space.SHARED_MEMORY, config
            assert all(isinstance(v, (int, str, bool)) for v in asdict(config).values())
            assert (config.kernel == "w8a8") is (weight_dtype == "w8a8") and not config.promote
            if config.kernel == "async":
                assert fp8 and config.block_t <= 256 and config.block_n % (16 * config.warps) == 0
            if config.kernel != "cublas":
                rows = config.block_n if config.swap or config.kernel == "async" else config.block_t
                assert rows % 64 == 0, f"{config}: the M operand of wgmma is a multiple of 64"
                parts = max(config.split_k, config.tail)
                assert parts == 1 or -(-k // config.block_k) // parts >= 8


@pytest.mark.parametrize(
    ("t", "n", "k", "weight_dtype", "tile", "tail", "wave"),
    [
        (512, 29568, 8192, "w8a8", (128, 256), 2, 132),  # 464 tiles: 68 behind 3 waves
        (512, 10240, 8192, "w8a8", (128, 256), 4, 132),  # 160: 28 behind the first
        (512, 37888, 3584, "bf16", (128, 256), 2, 132),  # 592: 64 behind 4
        (512, 3584, 18944, "bf16", (128, 256), 2, 132),  # 56, less than a wave
        (512, 3584, 18944, "bf16", (128, 128), 2, 264),  # 112 of two programs a multiprocessor
        (512, 59136, 8192, "w8a8", (128, 256), 1, 0),  # 924: 7 whole waves
        (512, 8192, 29568, "w8a8", (128, 256), 1, 0),  # 128 of 132
        (512, 10240, 8192, "fp8", (128, 256), 1, 0),  # conversion: gemm_async.py, which has no tail
    ],
)
def test_part_filled_waves_have_a_tail(t, n, k, weight_dtype, tile, tail, wave) -> None:
    from engine.tune import gemm_space

    found = gemm_space.candidates(t, n, k, weight_dtype, 132)
    tails = [c for c in found if c.tail > 1]
    mine = {(c.tail, c.wave) for c in tails if (c.block_t, c.block_n) == tile}
    assert mine == ({(tail, wave)} if tail > 1 else set())
    assert all(c.split_k == 1 for c in tails) and len(tails) <= 0.4 * (len(found) - len(tails))


def test_small_grids_are_split_and_large_ones_are_not() -> None:
    from engine.kernels.gemm import heuristic

    assert heuristic(16, 1280, 8192, "fp8", 132).split_k > 1  # 20 tiles of 64 rows on 132 SMs
    assert heuristic(16, 29568, 8192, "fp8", 132).split_k == 1
    assert heuristic(512, 29568, 8192, "bf16", 132).split_k == 1
    assert heuristic(512, 5120, 8192, "fp8", 132).split_k > 1  # 80 or 160 tiles: half the SMs idle


def test_w8a8_splits_only_where_the_partial_tiles_cost_less_than_idle_processors() -> None:
    from engine.kernels.gemm import heuristic

    assert heuristic(512, 59136, 8192, "w8a8", 132).block_n == 256  # 924 tiles: 7 whole waves
    assert heuristic(512, 8192, 29568, "w8a8", 132).split_k == 1  # 128 tiles of 132
    assert heuristic(128, 1280, 8192, "w8a8", 132).split_k > 1  # 10 tiles of 128 x 128
