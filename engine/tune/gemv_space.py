"""Which GEMV configurations are worth timing for a weight. Pure; `engine.tune.chain` times them."""

from __future__ import annotations

from itertools import product

import torch

from engine.errors import EngineError
from engine.kernels.gemv import GemvConfig, weight_name
from engine.kernels.gemv_ring import SHARED_BYTES, ring_shape


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
    for block_n, block_k, warps in product((2, 4, 8, 16), (512, 1024, 2048), (4, 8)):
        if 16 <= block_n * block_k * size // (32 * warps) <= 64 and block_k <= 2 * k:
            found[GemvConfig("simple", block_n, block_k, warps)] = None
    w_dtype = torch.float8_e4m3fn if size == 1 else torch.bfloat16
    for block_n, bytes_k, (warps, warps_k), stages, per_sm in product(
        (16, 32, 64), (256, 512, 1024), ((4, 2), (4, 4), (8, 4), (8, 8), (4, 1), (8, 2)),
        (3, 4, 6, 8, 12), (1, 2),
    ):  # fmt: skip
        config = GemvConfig(
            "ring", block_n, bytes_k // size, warps, stages, sm_count * per_sm, warps_k, per_sm
        )
        held = block_n * bytes_k * (stages - 1) * per_sm
        if not 48 << 10 <= held <= SHARED_BYTES or bytes_k // size > k:
            continue
        try:
            ring_shape(
                n, k, rows, torch.bfloat16, w_dtype, block_n=config.block_n, block_k=config.block_k,
                stages=stages, num_warps=warps, warps_k=warps_k, programs=config.programs,
                programs_per_sm=per_sm,
            )  # fmt: skip
        except EngineError:
            continue
        found[config] = None
    return list(found)
