"""Which GEMV configurations are worth timing for a weight. Pure; `engine.tune.chain` times them."""

from __future__ import annotations

from dataclasses import replace

import torch

from engine.errors import EngineError
from engine.kernels.gemv_config import (
    MAX_STAGES,
    WIDE_ROWS,
    GemvConfig,
    RingShape,
    deepest_ring,
    heuristic,
    keep_wide,
    ring_rows,
    ring_shape,
    simple_config,
    weight_name,
    with_wide,
)

# Rings worth a place: (rows of a tile, bytes of K, warps, warps that share K, programs a multiprocessor).
# From timing all 44 combinations of 16..64 rows, 256..1024 bytes, 4 or 8 warps in the chain on an H200, 72B
# FP8 at TP=2 and 7B BF16 at TP=1 (2026-11-30): the winner of each shape and its neighbours. One warp on a
# row's K never won.
_RINGS = (
    (64, 256, 4, 2, 2), (64, 512, 8, 2, 1), (64, 512, 4, 4, 1), (64, 1024, 8, 4, 1), (64, 512, 8, 4, 1),
    (64, 512, 4, 2, 2), (32, 1024, 8, 4, 2), (32, 1024, 4, 4, 1), (32, 1024, 4, 4, 2), (32, 512, 8, 4, 2),
    (32, 512, 4, 4, 2), (32, 512, 4, 2, 2), (16, 1024, 4, 4, 2), (16, 1024, 8, 8, 2), (16, 512, 4, 4, 2),
    (32, 1024, 8, 8, 1), (16, 2048, 16, 16, 1), (32, 2048, 16, 16, 1), (32, 1024, 16, 8, 1),
)  # fmt: skip

HALF_BYTES = 104 << 10  # of a multiprocessor's shared memory: two kernels' rings fit side by side

# What a thread may hold without spills at 8 rows (compiled for sm_90): bytes of a tile, which FP8 turns into 16-bit
# values, and K of a warp in a tile whose x is not staged, as two tiles of x and of the norm weight are held then.
MOST_THREAD_BYTES = 256
MOST_UNSTAGED_K = 128

_DTYPES = {"fp8": torch.float8_e4m3fn, "bf16": torch.bfloat16, "fp16": torch.float16}


def candidates(
    n: int,
    k: int,
    weight_dtype: torch.dtype | str,
    rows: int = 1,
    sm_count: int = 132,
    present: GemvConfig | None = None,
) -> list[GemvConfig]:
    """Configurations worth timing at `rows` activation rows in the place of `present` (None: nothing was tuned).

    Below WIDE_ROWS: `base_candidates`, with the present wide walk where it fits. From there: `present` itself with
    each of its `wide_candidates`.
    """
    present = present or heuristic(n, k, weight_dtype, sm_count)
    if rows >= WIDE_ROWS:
        return wide_candidates(present, n, k, weight_dtype, sm_count)
    found = (keep_wide(c, present) for c in base_candidates(n, k, weight_dtype, sm_count))
    return list(found)


def base_candidates(
    n: int, k: int, weight_dtype: torch.dtype | str, sm_count: int = 132
) -> list[GemvConfig]:
    """Configurations for an [n, k] weight, the plain kernel and the heuristic's choice included.

    Each ring comes twice: as deep as shared memory allows at any row count (bytes in flight are what a ring
    is for), and in half of it, so that the next kernel's programs become resident and fill their own ring
    while this one ends or a barrier is open.
    """
    name = weight_name(weight_dtype)
    w_dtype = _DTYPES[name]
    found = [heuristic(n, k, name, sm_count), simple_config(n, k, name)]
    for block_n, bytes_k, warps, warps_k, per_sm in _RINGS:
        block_k = bytes_k // w_dtype.itemsize
        ring = GemvConfig("ring", block_n, block_k, warps, 2, sm_count * per_sm, warps_k, per_sm)
        deep = deepest_ring(ring, n, k, w_dtype) if block_k <= k else None
        if deep is None:
            continue
        found.append(deep)
        shallow = HALF_BYTES // per_sm // (block_n * bytes_k)
        if 3 <= shallow < deep.stages:
            found.append(replace(deep, stages=shallow))
    return list(dict.fromkeys(found))


def wide_candidates(
    config: GemvConfig, n: int, k: int, weight_dtype: torch.dtype | str, sm_count: int = 132
) -> list[GemvConfig]:
    """`config` with each wide walk worth timing, its own walk first; none for the plain kernel.

    What several rows ask of a walk: x beside the ring (else it is read from L2 for every tile, 2 x 8 bytes a weight
    column), so one program a multiprocessor and shallower rings; and taller tiles, as a warp reads its x fragments
    once for each. Depths: the deepest ring, the deepest beside 8 staged rows, and half of shared memory, at least
    three tiles each. Two that come to the same at 8 rows are one.
    """
    if config.kernel != "ring":
        return []
    w_dtype = _DTYPES[weight_name(weight_dtype)]
    found = [config]
    shapes = {_key(config, shape) for shape in (_shape(config, n, k, w_dtype),) if shape}
    unit = 16 * (config.num_warps // config.warps_k)
    for per_sm in (1, 2):
        for block_n in (unit, 2 * unit, 4 * unit, 8 * unit):
            tile = block_n * config.block_k * w_dtype.itemsize
            walk = replace(
                config, block_n=block_n, programs=sm_count * per_sm, programs_per_sm=per_sm
            )
            short = block_n > unit and block_n // 2 >= ring_rows(walk, n)
            if short or tile > MOST_THREAD_BYTES * 32 * config.num_warps:
                continue
            for stages in _depths(walk, n, k, w_dtype, HALF_BYTES // per_sm // tile):
                candidate = replace(walk, stages=stages)
                shape = _shape(candidate, n, k, w_dtype)
                if shape is None or _key(candidate, shape) in shapes:
                    continue
                if shape.stage_x or config.block_k // config.warps_k <= MOST_UNSTAGED_K:
                    shapes.add(_key(candidate, shape))
                    found.append(candidate)
    return [with_wide(config, walk) for walk in found]


def _depths(walk: GemvConfig, n: int, k: int, w_dtype: torch.dtype, half: int) -> list[int]:
    """Stages of the deepest ring at 8 rows, of the deepest that leaves room for them, and `half`."""
    fits = {}
    for stages in range(MAX_STAGES, 2, -1):
        shape = _shape(replace(walk, stages=stages), n, k, w_dtype)
        if shape:
            fits[stages] = shape.stage_x
    staged = [stages for stages, stage_x in fits.items() if stage_x]
    return [*list(fits)[:1], *staged[:1], *([half] if half in fits else [])]


def _shape(config: GemvConfig, n: int, k: int, w_dtype: torch.dtype) -> RingShape | None:
    """At 8 rows; None if that does not fit."""
    x_dtype = torch.bfloat16 if w_dtype.itemsize == 1 else w_dtype
    try:
        return ring_shape(config, n, k, 8, x_dtype, w_dtype)
    except EngineError:
        return None


def _key(config: GemvConfig, shape: RingShape) -> tuple[int | bool, ...]:
    return config.block_n, config.programs_per_sm, shape.programs, shape.stages, shape.stage_x
