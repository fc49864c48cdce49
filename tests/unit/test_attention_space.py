"""The attention search spaces: the heuristic comes first, nothing twice, nothing the kernels cannot run."""

from __future__ import annotations

import pytest
import torch


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_decode_space(kv_heads: int, head_dim: int, kv_dtype: torch.dtype) -> None:
    from engine.kernels import decode_attention as decode
    from engine.tune.attention_space import decode_candidates

    found = decode_candidates(kv_heads, 32768, 132, kv_dtype, head_dim)
    assert found[0] == decode.heuristic(kv_heads, 32768, 1, 132, kv_dtype, head_dim)
    assert len(set(found)) == len(found)
    for config in found:
        assert 1 <= config.num_splits <= decode.MAX_SPLITS
        constants = decode.kernel_constants(config, 8, head_dim, prefetch=True, pdl=True)
        assert 1 <= constants["WIDTH"] <= config.fan_in
        for size in (config.block_n, config.num_warps, config.fan_in, constants["WIDTH"]):
            assert size & (size - 1) == 0
        # K and V tiles of all stages, and the first tile: the 227 KB of one multiprocessor.
        tile = 2 * config.block_n * head_dim * kv_dtype.itemsize
        assert tile * (config.num_stages + 1) <= 227 * 1024


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_prefill_space(head_dim: int, kv_dtype: torch.dtype) -> None:
    from engine.tune.attention_space import prefill_candidates

    found = prefill_candidates(head_dim, kv_dtype)
    assert found and len(set(found)) == len(found)
    for config in found:
        assert config.block_m % (16 * config.num_warps) == 0  # whole wgmma row blocks
        kv = 2 * config.block_n * head_dim * 2 * config.num_stages
        assert kv + config.block_m * head_dim * 2 <= 227 * 1024
