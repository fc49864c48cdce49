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
TAIL_FILL = 0.8  # of the last wave: above, what a split gains is less than what its sums cost
# (block_t, block_n, block_k, stages) of large tiles that win where waves are whole.
TAILED = {
    (256, 128, 64, 4), (128, 256, 64, 4), (128, 128, 64, 3),
    (128, 256, 128, 4), (128, 256, 128, 3), (256, 128, 128, 4), (128, 128, 128, 3),
}  # fmt: skip
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
        if config.kernel == W8A8 or not fp8:
            found.update(dict.fromkeys(_tails(config, t, n, k, sm_count, fp8)))
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
    if _large_tile(config):
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


def _tails(
    config: GemmConfig, t: int, n: int, k: int, sm_count: int, fp8: bool
) -> Iterator[GemmConfig]:
    """A large tile with its last wave split over K, where that is filled to less than TAIL_FILL: as many parts
    as one wave holds, of 8 blocks of K at least."""
    shape = config.block_t, config.block_n, config.block_k, config.stages
    tiles_t, blocks = triton.cdiv(t, config.block_t), triton.cdiv(k, config.block_k)
    same = config.group > 8 and tiles_t <= 8  # the order of tiles of a group of 8
    if not _large_tile(config) or shape not in TAILED or same or config.block_t >= 2 * t:
        return
    # More than 128 registers a thread: 8 warps are a program of a multiprocessor or two.
    wave = sm_count * min(8 // config.warps, SHARED_MEMORY // shared_bytes(config, fp8))
    rest = tiles_t * triton.cdiv(n, config.block_n) % wave
    if 0 < rest < TAIL_FILL * wave and blocks >= 16:
        yield replace(config, tail=max(2, min(8, wave // rest, blocks // 8)), wave=wave)


def _large_tile(config: GemmConfig) -> bool:
    """More than 64 accumulators a thread."""
    return config.block_t * config.block_n > 64 * 32 * config.warps
