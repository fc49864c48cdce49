"""Which attention configurations are worth timing. Pure; `bench.attention` and `engine.autotune` time them."""

from __future__ import annotations

from dataclasses import replace

import torch

from engine.kernels import decode_attention as decode
from engine.kernels import prefill_attention as prefill

# Tile, warps, stages; 32 x 2 warps, 128 x 8 warps and fan_in = 32 spill and are left out. Loads in flight on a multiprocessor: (stages - 1) tiles of K and V a program.
_DECODE_TILES = (
    (64, 4, 3), (64, 4, 2), (64, 4, 4), (32, 4, 4), (32, 4, 6), (64, 8, 3), (64, 8, 4),
)  # fmt: skip
# FP8: 128 x 4 warps and 256 x 8 spill. 8 warps or two programs for the conversions.
_DECODE_TILES_FP8 = (
    (64, 4, 4), (64, 4, 3), (64, 4, 6), (128, 8, 3), (128, 8, 2), (128, 8, 4), (64, 8, 4), (64, 8, 6),
    (32, 4, 6),
)  # fmt: skip
# Tile of rows and keys, warps, stages; 64 x 128 and 128 x 64 on 4 warps spill.
_PREFILL_TILES = (
    (128, 64, 8, 3), (128, 64, 8, 2), (128, 64, 8, 4), (128, 128, 8, 2), (128, 128, 8, 3), (128, 32, 8, 3),
    (64, 64, 4, 2), (64, 64, 4, 3), (64, 32, 4, 3),
)  # fmt: skip


def decode_candidates(
    num_kv_heads: int,
    context: int,
    sm_count: int = 132,
    kv_dtype: torch.dtype = torch.bfloat16,
    head_dim: int = 128,
    max_splits: int = decode.MAX_SPLITS,
) -> list[decode.DecodeAttentionConfig]:
    """The heuristic's choice first, then tiles, waves of programs, merge widths, where one merge serves.

    Rows are no argument: a slot must give the same bits in a batch of any size.
    """
    base = decode.heuristic(num_kv_heads, context, 1, sm_count, kv_dtype, head_dim)
    if head_dim > 128:
        return [base]
    one = max(1, sm_count // num_kv_heads)
    keys = base.block_n * base.flat_blocks
    found = [base]
    for block_n, warps, stages in _DECODE_TILES_FP8 if kv_dtype.itemsize == 1 else _DECODE_TILES:
        flat = max(1, keys // block_n)
        for splits in (one, 2 * one):
            found.append(
                replace(
                    base, num_splits=splits, block_n=block_n, num_warps=warps, num_stages=stages,
                    flat_blocks=flat,
                )
            )  # fmt: skip
    wave = replace(base, num_splits=one)
    found += [replace(wave, num_splits=splits) for splits in (max(1, one // 2), 3 * one)]
    found += [replace(wave, flat_blocks=flat) for flat in (1, 2, 8)]
    found.append(replace(wave, fan_in=8))
    return list(dict.fromkeys(c for c in found if c.num_splits <= max_splits))


def prefill_candidates(
    head_dim: int = 128, kv_dtype: torch.dtype = torch.bfloat16
) -> list[prefill.PrefillAttentionConfig]:
    """Tiles that fit shared memory and registers at this head_dim."""
    if head_dim > 128:
        return [prefill.heuristic(1, 1, head_dim, 1, 132, kv_dtype)]
    return [prefill.PrefillAttentionConfig(*tile) for tile in _PREFILL_TILES]
