"""How the prefill GEMM is walked: the configuration, the scratch it needs, and the choice when nothing was
tuned.

Plain data and arithmetic, no kernels. Formula, shapes and roof: gemm.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from engine.kernels.epilogue import GemmEpilogue, Residual, Scatter, SiluMul, Store
from engine.kernels.integers import cdiv, next_power_of_2

FP8 = torch.float8_e4m3fn
W8A8 = "w8a8"  # weight_dtype of a key whose x is FP8 as well, and the kernel that takes it


@dataclass(frozen=True)
class GemmConfig:
    """One way to run the GEMM. Powers of two except `stages`, `split_k`, `tail` and `wave`.

    kernel: "triton", "async" (FP8 weights), "w8a8" (FP8 weights and x) or "cublas" (16-bit weights).
    """

    kernel: str = "triton"
    block_t: int = 128  # rows of x in a tile
    block_n: int = 128  # weight rows in a tile
    block_k: int = 64
    warps: int = 4
    stages: int = 4  # depth of the load pipeline
    swap: bool = (
        False  # weight rows as the M operand of the tensor-core instruction ("async": always)
    )
    split_k: int = 1  # > 1 needs a workspace
    group: int = 8  # token tiles that run next to each other on one weight tile
    tma: bool = True  # tensor-memory-accelerator loads where alignment allows
    promote: bool = False  # "w8a8": blocks of K summed in fp32, not by the tensor cores' 14 bits
    tail: int = 1  # parts of each tile behind the last whole wave; > 1: no split_k, a workspace
    wave: int = 0  # programs that run at once, for `tail` > 1


@dataclass(frozen=True)
class Operands:
    """What one call reads and writes, checked by `gemm`; names and shapes are its own.

    partials, tickets: of the workspace, or None where nothing is split.
    """

    x: torch.Tensor
    w: torch.Tensor
    epilogue: GemmEpilogue
    scale: torch.Tensor | None
    bias: torch.Tensor | None
    x_scale: torch.Tensor | None
    partials: torch.Tensor | None
    tickets: torch.Tensor | None

    @property
    def sizes(self) -> tuple[int, int, int]:
        """T, N, K."""
        return self.x.shape[0], self.w.shape[0], self.x.shape[1]

    @property
    def out(self) -> torch.Tensor:
        return self.epilogue.out

    @property
    def residual(self) -> torch.Tensor:
        """Of Residual, or the `far` of Scatter."""
        if isinstance(self.epilogue, Scatter):
            return self.epilogue.far
        return self.epilogue.residual if isinstance(self.epilogue, Residual) else self.out

    @property
    def kind(self) -> int:
        """EPILOGUE of the kernels: STORE, RESIDUAL, SILU_MUL or SCATTER of gemm_tile.py."""
        return (Store, Residual, SiluMul, Scatter).index(type(self.epilogue))

    def pointers(self) -> list[torch.Tensor]:
        """out, residual, scale, bias, partials, tickets; out again, never read, for those that the call lacks."""
        found = (self.scale, self.bias, self.partials, self.tickets)
        return [self.out, self.residual, *(self.out if t is None else t for t in found)]

    def operands(self, config: GemmConfig) -> list[Any]:
        """x and w as a Triton kernel takes them: for TMA, or by address."""
        blocks = ((self.x, config.block_t), (self.w, config.block_n))
        if not config.tma:
            return [self.x, self.w]
        return [TensorDescriptor.from_tensor(m, [rows, config.block_k]) for m, rows in blocks]

    def strides(self) -> list[int]:
        """Elements from row to row of x, w, out and residual; for Scatter the last is the rows of a shard."""
        first = [m.stride(0) for m in (self.x, self.w, self.out)]
        scatter = isinstance(self.epilogue, Scatter)
        return [*first, self.out.shape[0] if scatter else self.residual.stride(0)]

    def constants(self, config: GemmConfig, pdl: bool) -> dict[str, Any]:
        """The compile-time arguments and options that all kernels take."""
        return dict(
            BT=config.block_t, BN=config.block_n, BK=config.block_k, GROUP=config.group,
            SPLIT=config.split_k, EPILOGUE=self.kind, HAS_BIAS=self.bias is not None, PDL=pdl,
            num_warps=config.warps, launch_pdl=pdl,
        )  # fmt: skip

    def grid(self, config: GemmConfig) -> tuple[int]:
        """Tiles of T x tiles of N x parts of K; a tail's programs in place of its tiles."""
        t, n, _ = self.sizes
        rest, programs = tail_of(config, t, n)
        tiles = cdiv(t, config.block_t) * cdiv(n, config.block_n)
        return (tiles * config.split_k - rest + programs,)


def tail_of(config: GemmConfig, t: int, n: int) -> tuple[int, int]:
    """(tiles behind the last whole wave, programs that share them); (0, 0) where none is split."""
    if config.tail == 1 or config.wave == 0 or config.split_k > 1:
        return 0, 0
    rest = cdiv(t, config.block_t) * cdiv(n, config.block_n) % config.wave
    return rest, min(rest * config.tail, config.wave)


def settle(config: GemmConfig, t: int, n: int, k: int, splits: bool) -> GemmConfig:
    """The configuration as it runs on one shape: no part without a block of K, no tail where waves are
    whole; splits: whether there is a workspace to meet in."""
    blocks = cdiv(k, config.block_k)
    split = min(config.split_k, blocks) if splits else 1
    tail = min(config.tail, blocks) if splits and config.split_k == 1 else 1
    if tail > 1 and tail_of(config, t, n)[0]:
        return replace(config, tail=tail)
    return replace(config, split_k=split, tail=1, wave=0)


def workspace_sizes(config: GemmConfig, t: int, n: int, epilogue: type) -> tuple[int, int, int]:
    """Elements of (partials, tickets, scratch) that one call needs; a workspace takes the maxima
    over calls."""
    if config.kernel == "cublas":
        return 0, 0, t * n if epilogue is SiluMul else 0
    tile = config.block_t * config.block_n
    if config.split_k == 1:
        rest, programs = tail_of(config, t, n)
        return max(0, rest + programs - 1) * tile, rest, 0
    tiles = cdiv(t, config.block_t) * cdiv(n, config.block_n)
    return tiles * config.split_k * tile, tiles, 0


def heuristic(
    t: int, n: int, k: int, weight_dtype: str | torch.dtype, sm_count: int = 132
) -> GemmConfig:
    """Configuration for a shape no table knows: fills the SMs, then keeps tiles large.

    weight_dtype: "w8a8" where x is FP8 too."""
    if weight_dtype == W8A8:
        return _heuristic_w8a8(t, n, k, sm_count)
    fp8 = weight_dtype in ("fp8", FP8)
    kernel = "async" if fp8 else "triton"
    if t <= 64:
        # Bound by the read of the weights, so all SMs must stream, with deep pipelines.
        tiles, blocks, split = cdiv(n, 64), cdiv(k, 128), 1
        while tiles * split < sm_count and blocks // (split + 1) >= 8 and split < 8:
            split += 1
        return GemmConfig(
            kernel, block_t=max(16, next_power_of_2(t)), block_n=64, block_k=128, warps=4,
            stages=6 if fp8 else 4, swap=True, split_k=split,
        )  # fmt: skip

    def waves(block_t: int, split: int) -> float:
        """Tile areas one SM works off; a smaller tile reads more, a split adds its partial sums."""
        tiles = cdiv(t, block_t) * cdiv(n, 128) * split
        price = (1.0 if block_t == 256 else 1.1) * (1.0 if split == 1 else 1.05)
        return cdiv(tiles, sm_count) * block_t / split * price

    options = [(256, 1), (128, 1)] if t > 128 else [(128, 1)]
    options += [(128, split) for split in (2, 3) if cdiv(k, 64) // split >= 8]
    block_t, split = min(options, key=lambda option: waves(*option))
    small = block_t == 128 and split == 1 and not fp8
    return GemmConfig(
        kernel, block_t=block_t, block_n=128, block_k=64, warps=4 if small else 8,
        stages=3 if small else 4, swap=fp8, split_k=split,
    )  # fmt: skip


def _heuristic_w8a8(t: int, n: int, k: int, sm_count: int) -> GemmConfig:
    """Least estimated time: tiles one SM works off at 70 % of 15 TFLOP/s, smaller ones at less,
    and a split's fp32 partial tiles written and read at 4 TB/s."""
    # block_t, block_n, warps, stages, split, price of a product
    options = [(128, 256, 8, 4, 1, 1.0), (128, 128, 8, 3, 1, 1.1), (64, 128, 4, 3, 1, 1.4)]
    options += [(128, 128, 8, 3, split, 1.1) for split in (2, 3, 4) if cdiv(k, 128) // split >= 8]

    def us(option: tuple[int, int, int, int, int, float]) -> float:
        block_t, block_n, _, _, split, price = option
        programs = cdiv(t, block_t) * cdiv(n, block_n) * split
        work = cdiv(programs, sm_count) * 2 * block_t * block_n * k / split / 10.5e6 * price
        return work + (0 if split == 1 else 8 * programs * block_t * block_n / 4e6)

    block_t, block_n, warps, stages, split, _ = min(options, key=us)
    return GemmConfig(
        W8A8, block_t=block_t, block_n=block_n, block_k=128, warps=warps, stages=stages,
        split_k=split,
    )  # fmt: skip
