"""Which GEMV configurations are worth timing for a weight. Pure; `engine.tune.chain` times them."""

from __future__ import annotations

from itertools import product

import torch

from engine.errors import EngineError
from engine.kernels.gemv_config import GemvConfig, ring_shape, weight_name


def candidates(
    n: int, k: int, weight_dtype: torch.dtype | str, rows: int = 1, sm_count: int = 132
) -> list[GemvConfig]:
    """Configurations for an [n, k] weight that fit shared memory at `rows` rows, no duplicates.

    Plain kernel: 16 to 64 bytes of weights a thread and tile. Ring: at least 48 KB in flight on a
    multiprocessor (Little's law: 4.3 TB/s x 1 us over 132 of them is 33 KB), one or two programs on each.
    """
    name = weight_name(weight_dtype)
    size = 1 if name == "fp8" else 2
    found: dict[GemvConfig, None] = {}
    for block_n, block_k, warps in product((2, 4, 8), (512, 1024), (4, 8)):
        if 16 <= block_n * block_k * size // (32 * warps) <= 32 and block_k <= 2 * k:
            found[GemvConfig("simple", block_n, block_k, warps)] = None
    w_dtype = torch.float8_e4m3fn if size == 1 else torch.bfloat16
    for block_n, bytes_k, (warps, warps_k), per_sm in product(
        (16, 32, 64), (256, 512, 1024), ((4, 1), (4, 2), (4, 4), (8, 2), (8, 4), (8, 8)), (1, 2)
    ):
        if bytes_k // size > k:
            continue
        deepest = [
            config for stages in (12, 8, 6, 4, 3)
            if _fits(config := GemvConfig(
                "ring", block_n, bytes_k // size, warps, stages, sm_count * per_sm, warps_k, per_sm
            ), n, k, rows, w_dtype)
            and block_n * bytes_k * (stages - 1) * per_sm >= 64 << 10
        ]  # fmt: skip
        found.update(dict.fromkeys(deepest[:1]))  # the deepest ring that fits: bytes in flight
    return list(found)


def _fits(config: GemvConfig, n: int, k: int, rows: int, w_dtype: torch.dtype) -> bool:
    try:
        ring_shape(config, n, k, rows, torch.bfloat16, w_dtype)
    except EngineError:
        return False
    return True
