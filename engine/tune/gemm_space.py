"""Which GEMM configurations are worth timing for a shape. Pure; the tuner and bench/gemm.py time
them.

Every member compiles for sm_90 without spills and without serialised wgmma
(tests/kernels/test_compile_gemm.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
import triton

from engine.kernels.gemm import W8A8, GemmConfig

SHARED_MEMORY = 227 * 1024  # bytes a program may use on an H100 or H200
_FP8 = ("fp8", torch.float8_e4m3fn)


def candidates(
    t: int, n: int, k: int, weight_dtype: str | torch.dtype, sm_count: int = 132
) -> list[GemmConfig]:
    """Configurations to time for x [t, k] @ w [n, k]^T, most promising kinds first, no
    duplicates. weight_dtype "w8a8": FP8 weights and FP8 x."""
    fp8 = weight_dtype in (*_FP8, W8A8)
    if weight_dtype == W8A8:
        shapes = _w8a8()
    else:
        shapes = _small(t, fp8) if t <= 128 else _large(t, fp8)
    found: dict[GemmConfig, None] = {}
    if not fp8:
        found[GemmConfig(kernel="cublas")] = None
    for config in shapes:
        if shared_bytes(config, fp8) > SHARED_MEMORY:
            continue
        for split in _splits(config, t, n, k, sm_count):
            found[replace(config, split_k=split)] = None
    return list(found)


def shared_bytes(config: GemmConfig, fp8: bool) -> int:
    """Pipeline buffers of one program, and the 16-bit copy of the weight tile where FP8 goes
    through memory."""
    weight = config.block_n * config.block_k * (1 if fp8 else 2)
    stage = weight + config.block_t * config.block_k * (1 if config.kernel == W8A8 else 2)
    copy = 2 * weight if fp8 and not config.swap and config.kernel == "triton" else 0
    return config.stages * stage + copy + 1024


def _small(t: int, fp8: bool) -> Iterator[GemmConfig]:
    """Bound by the read of the weights: narrow token tiles, deep pipelines of 16 to 64 KB a
    stage."""
    block_t = min(128, max(16, triton.next_power_of_2(t)))
    if fp8:
        for block_n, block_k, warps, stages in (
            (64, 128, 4, 4), (64, 128, 4, 6), (64, 128, 4, 8), (64, 256, 4, 4), (128, 128, 8, 4),
            (128, 128, 8, 6), (64, 64, 4, 8),
        ):  # fmt: skip
            yield GemmConfig(
                kernel="async", block_t=block_t, block_n=block_n, block_k=block_k, warps=warps,
                stages=stages, swap=True,
            )  # fmt: skip
        # Weights through shared memory, tokens as M: 64 rows at least.
        for block_n, block_k, stages in ((64, 128, 4), (128, 64, 4), (128, 128, 3)):
            yield GemmConfig(
                block_t=max(64, block_t), block_n=block_n, block_k=block_k, warps=4, stages=stages
            )
        return
    for block_n, block_k, stages in (
        (64, 64, 4), (64, 128, 3), (64, 128, 4), (128, 64, 4), (128, 64, 6), (128, 128, 3),
    ):  # fmt: skip
        yield GemmConfig(
            block_t=block_t, block_n=block_n, block_k=block_k, warps=4, stages=stages, swap=True
        )
    if t > 32:
        yield GemmConfig(block_t=64, block_n=128, block_k=64, warps=4, stages=4)
        yield GemmConfig(block_t=128, block_n=128, block_k=64, warps=4, stages=3)


def _large(t: int, fp8: bool) -> Iterator[GemmConfig]:
    """Bound by the tensor cores: 128 x 128 twice a multiprocessor, or 256 x 128 once."""
    if fp8:
        for block_t, block_n, block_k, warps, stages in (
            (256, 128, 64, 8, 4), (256, 128, 64, 8, 5), (128, 128, 64, 8, 4), (128, 128, 128, 8, 4),
            (256, 64, 64, 4, 4), (128, 64, 64, 4, 4), (128, 256, 64, 8, 6),
        ):  # fmt: skip
            yield GemmConfig(
                kernel="async", block_t=block_t, block_n=block_n, block_k=block_k, warps=warps,
                stages=stages, swap=True,
            )  # fmt: skip
        for block_t, block_n, block_k, warps, stages in (
            (256, 64, 64, 4, 3), (256, 64, 64, 8, 3), (128, 128, 64, 8, 4), (128, 128, 64, 8, 3),
            (128, 128, 128, 8, 3), (256, 128, 64, 8, 4), (128, 64, 128, 4, 3), (256, 128, 128, 8, 2),
        ):  # fmt: skip
            yield GemmConfig(
                block_t=block_t, block_n=block_n, block_k=block_k, warps=warps, stages=stages
            )
        return
    for block_t, block_n, block_k, warps, stages, swap in (
        (256, 128, 64, 8, 4, False), (256, 128, 64, 8, 3, False), (256, 128, 64, 8, 4, True),
        (128, 256, 64, 8, 4, True), (128, 128, 64, 4, 3, False), (128, 128, 64, 8, 4, False),
        (128, 128, 64, 8, 3, True), (128, 128, 128, 8, 3, False), (64, 128, 64, 4, 4, False),
    ):  # fmt: skip
        yield GemmConfig(
            block_t=block_t, block_n=block_n, block_k=block_k, warps=warps, stages=stages, swap=swap
        )


def _w8a8() -> Iterator[GemmConfig]:
    """Bound by the FP8 tensor cores: 128 x 256 or 256 x 128 once a multiprocessor, smaller tiles
    twice."""
    for block_t, block_n, block_k, warps, stages in (
        (128, 256, 128, 8, 4), (128, 256, 128, 8, 3), (256, 128, 128, 8, 4), (128, 128, 128, 8, 3),
        (128, 128, 128, 4, 3), (128, 128, 128, 8, 4), (128, 128, 64, 8, 6), (128, 256, 64, 8, 6),
        (64, 256, 128, 4, 3), (64, 128, 128, 4, 4),
    ):  # fmt: skip
        for group in (8,) if block_t == 64 else (8, 32):
            yield GemmConfig(W8A8, block_t, block_n, block_k, warps, stages, group=group)


def _splits(config: GemmConfig, t: int, n: int, k: int, sm_count: int) -> Iterator[int]:
    """Whole, and splits of K that bring a part-filled grid closer to whole waves.

    The last program holds two tiles, so only those of at most 64 accumulators a thread are split.
    """
    yield 1
    if config.block_t * config.block_n > 64 * 32 * config.warps:
        return
    tiles = triton.cdiv(t, config.block_t) * triton.cdiv(n, config.block_n)
    blocks = triton.cdiv(k, config.block_k)
    most = 8 if t <= 128 else 3
    useful = [
        split
        for split in (2, 3, 4, 6, 8)
        if split <= most
        and 0.75 * sm_count <= tiles * split <= 3 * sm_count
        and blocks // split >= 8
    ]
    yield from useful[:2]
