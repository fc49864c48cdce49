"""Which GEMV configurations are worth timing for a weight. Pure; `engine.tune.chain` times them."""

from __future__ import annotations

from dataclasses import replace

import torch

from engine.kernels.gemv_config import (
    GemvConfig,
    deepest_ring,
    heuristic,
    simple_config,
    weight_name,
)

# Rings worth a place: (rows of a tile, bytes of K, warps, warps that share K, programs a multiprocessor).
# From timing all 44 combinations of 16..64 rows, 256..1024 bytes, 4 or 8 warps in the chain on an H200, 72B
# FP8 at TP=2 and 7B BF16 at TP=1 (2026-11-30): the winner of each shape and its neighbours. One warp on a
# row's K never won.
_RINGS = (
    (64, 256, 4, 2, 2), (64, 512, 8, 2, 1), (64, 512, 4, 4, 1), (64, 1024, 8, 4, 1), (64, 512, 8, 4, 1),
    (64, 512, 4, 2, 2), (32, 1024, 8, 4, 2), (32, 1024, 4, 4, 1), (32, 1024, 4, 4, 2), (32, 512, 8, 4, 2),
    (32, 512, 4, 4, 2), (32, 512, 4, 2, 2), (16, 1024, 4, 4, 2), (16, 1024, 8, 8, 2), (16, 512, 4, 4, 2),
    (32, 1024, 8, 8, 1),
)  # fmt: skip

HALF_BYTES = 104 << 10  # of a multiprocessor's shared memory: two kernels' rings fit side by side


def candidates(
    n: int, k: int, weight_dtype: torch.dtype | str, rows: int = 1, sm_count: int = 132
) -> list[GemvConfig]:
    """Configurations for an [n, k] weight, the plain kernel and the heuristic's choice included.

    Each ring comes twice: as deep as shared memory allows at any row count (bytes in flight are what a ring
    is for), and in half of it, so that the next kernel's programs become resident and fill their own ring
    while this one ends or a barrier is open.
    """
    del rows  # a configuration serves 1 to 8 rows, see gemv.py
    name = weight_name(weight_dtype)
    size = 1 if name == "fp8" else 2
    w_dtype = {"fp8": torch.float8_e4m3fn, "bf16": torch.bfloat16, "fp16": torch.float16}[name]
    found = [heuristic(n, k, name, sm_count), simple_config(n, k, name)]
    for block_n, bytes_k, warps, warps_k, per_sm in _RINGS:
        block_k = bytes_k // size
        ring = GemvConfig("ring", block_n, block_k, warps, 2, sm_count * per_sm, warps_k, per_sm)
        deep = deepest_ring(ring, n, k, w_dtype) if block_k <= k else None
        if deep is None:
            continue
        found.append(deep)
        shallow = HALF_BYTES // per_sm // (block_n * bytes_k)
        if 3 <= shallow < deep.stages:
            found.append(replace(deep, stages=shallow))
    return list(dict.fromkeys(found))
