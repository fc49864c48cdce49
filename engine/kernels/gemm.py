"""Prefill GEMM: y[T, N] = x[T, K] @ w[N, K]^T (* scale[N]) (+ bias[N]), then an epilogue.

Store, Residual or SiluMul. x is bf16 or fp16, w the same or float8_e4m3fn (converted tile by tile,
exact, so FP8 runs on the 16-bit tensor cores: W8A16), accumulation fp32. T is the prefill bucket,
16 to 8192 rows; rows past the request are computed like the others and never change a real row's
bits.

x may also be e4m3 with an fp32 scale a row, beside an FP8 w: then the products are FP8 too (W8A8).

Four kernels: gemm_kernel.py (Triton; also the interpreter's), gemm_async.py (Gluon, FP8 weights),
gemm_fp8.py (W8A8) and the library's GEMM.

N x K per rank (7B | 72B):
            TP 1            TP 2          TP 1            TP 2          TP 4          TP 8
    qkv     4608 x 3584     2304 x 3584 | 10240 x 8192    5120 x 8192   2560 x 8192   1280 x 8192
    o       3584 x 3584     3584 x 1792 | 8192 x 8192     8192 x 4096   8192 x 2048   8192 x 1024
    gate+up 37888 x 3584    18944 x 3584| 59136 x 8192    29568 x 8192  14784 x 8192  7392 x 8192
    down    3584 x 18944    3584 x 9472 | 8192 x 29568    8192 x 14784  8192 x 7392   8192 x 3696

Roof of an H200: weight bytes / 4.29 TB/s (measured copy) while T is below about 200, else 2 T N K /
989 TFLOP/s. 72B TP=2 gate+up: BF16 484 MB, 113 us to T = 230; T = 512 at least 251 us. FP8 242 MB,
56 us to T = 115.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from engine.errors import EngineError
from engine.kernels import gemm_async, gemm_fp8
from engine.kernels.epilogue import Epilogue, Residual, SiluMul, Store
from engine.kernels.gemm_kernel import gemm_kernel
from engine.kernels.silu import silu_mul
from engine.kernels.sync import INTERPRET

KEY_FIELDS = ("t", "n", "k", "weight_dtype")
NEAREST_FIELD = "t"  # every configuration is valid at every T
SOURCES = ("gemm.py", "gemm_kernel.py", "gemm_async.py", "gemm_fp8.py")

GemmEpilogue = Store | Residual | SiluMul

_TL_DTYPE = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_FP8 = torch.float8_e4m3fn
W8A8 = "w8a8"  # weight_dtype of a key whose x is FP8 as well, and the kernel that takes it


@dataclass(frozen=True)
class GemmConfig:
    """One way to run the GEMM. Powers of two except `stages` and `split_k`."""

    kernel: str = (
        "triton"  # or "async" (FP8 weights), "w8a8" (FP8 weights and x), "cublas" (16-bit weights)
    )
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


@dataclass(frozen=True)
class GemmWorkspace:
    """Preallocated scratch, shared by all GEMM calls of one rank's stream (never by two streams).

    partials: fp32, split-K tiles; tickets: int32, zero between calls; scratch: 16-bit, [T, N]
    gate/up pairs of the cuBLAS route.
    """

    partials: torch.Tensor
    tickets: torch.Tensor
    scratch: torch.Tensor


def workspace_sizes(config: GemmConfig, t: int, n: int, epilogue: type) -> tuple[int, int, int]:
    """Elements of (partials, tickets, scratch) that one call needs; a workspace takes the maxima
    over calls."""
    if config.kernel == "cublas":
        return 0, 0, t * n if epilogue is SiluMul else 0
    if config.split_k == 1:
        return 0, 0, 0
    tiles = triton.cdiv(t, config.block_t) * triton.cdiv(n, config.block_n)
    return tiles * config.split_k * config.block_t * config.block_n, tiles, 0


def workspace(
    sizes: tuple[int, int, int], dtype: torch.dtype, device: torch.device | str
) -> GemmWorkspace:
    """Allocate a workspace of `workspace_sizes` elements; `dtype` is the activations'."""
    partials, tickets, scratch = (max(1, s) for s in sizes)
    return GemmWorkspace(
        torch.empty(partials, dtype=torch.float32, device=device),
        torch.zeros(tickets, dtype=torch.int32, device=device),
        torch.empty(scratch, dtype=dtype, device=device),
    )


def heuristic(
    t: int, n: int, k: int, weight_dtype: str | torch.dtype, sm_count: int = 132
) -> GemmConfig:
    """Configuration for a shape no table knows: fills the SMs, then keeps tiles large.

    weight_dtype: "w8a8" where x is FP8 too."""
    if weight_dtype == W8A8:
        return _heuristic_w8a8(t, n, k, sm_count)
    fp8 = weight_dtype in ("fp8", _FP8)
    kernel = "async" if fp8 else "triton"
    if t <= 64:
        # Bound by the read of the weights, so all SMs must stream, with deep pipelines.
        tiles, blocks, split = triton.cdiv(n, 64), triton.cdiv(k, 128), 1
        while tiles * split < sm_count and blocks // (split + 1) >= 8 and split < 8:
            split += 1
        return GemmConfig(
            kernel, block_t=max(16, triton.next_power_of_2(t)), block_n=64, block_k=128, warps=4,
            stages=6 if fp8 else 4, swap=True, split_k=split,
        )  # fmt: skip

    def waves(block_t: int, split: int) -> float:
        """Tile areas one SM works off; a smaller tile reads more, a split adds its partial sums."""
        tiles = triton.cdiv(t, block_t) * triton.cdiv(n, 128) * split
        price = (1.0 if block_t == 256 else 1.1) * (1.0 if split == 1 else 1.05)
        return triton.cdiv(tiles, sm_count) * block_t / split * price

    options = [(256, 1), (128, 1)] if t > 128 else [(128, 1)]
    options += [(128, split) for split in (2, 3) if triton.cdiv(k, 64) // split >= 8]
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
    options += [
        (128, 128, 8, 3, split, 1.1) for split in (2, 3, 4) if triton.cdiv(k, 128) // split >= 8
    ]

    def us(option: tuple[int, int, int, int, int, float]) -> float:
        block_t, block_n, _, _, split, price = option
        programs = triton.cdiv(t, block_t) * triton.cdiv(n, block_n) * split
        work = triton.cdiv(programs, sm_count) * 2 * block_t * block_n * k / split / 10.5e6 * price
        return work + (0 if split == 1 else 8 * programs * block_t * block_n / 4e6)

    block_t, block_n, warps, stages, split, _ = min(options, key=us)
    return GemmConfig(
        W8A8, block_t=block_t, block_n=block_n, block_k=128, warps=warps, stages=stages,
        split_k=split,
    )  # fmt: skip


def gemm(
    x: torch.Tensor,
    w: torch.Tensor,
    epilogue: Epilogue,
    *,
    scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    x_scale: torch.Tensor | None = None,
    config: GemmConfig,
    workspace: GemmWorkspace | None = None,
    pdl: bool = False,
) -> None:
    """Run y = x @ w^T * scale + bias and its epilogue on the current stream.

    x [T, K] bf16 or fp16, w [N, K] the same dtype or float8_e4m3fn, unit stride along K; scale fp32
    [N]; bias [N]. Or x and w float8_e4m3fn with x_scale fp32 [T]: y = (x @ w^T) * x_scale * scale.
    Epilogue: Store, Residual or SiluMul; outputs have unit stride along N.
    A configuration for the other kind of x is replaced by the heuristic's.
    Without a workspace a split-K configuration runs unsplit, and cuBLAS + SiluMul runs on Triton.
    "async" runs on Triton too where it cannot (16-bit weights, rows not 16-byte aligned, the
    interpreter). Raises EngineError for an epilogue, a dtype or a shape it does not do.
    """
    t, k = x.shape
    n = w.shape[0]
    epilogue = _checked(x, w, epilogue, scale, x_scale)
    if (config.kernel == W8A8) != (x.dtype == _FP8):
        config = heuristic(t, n, k, W8A8 if x.dtype == _FP8 else w.dtype)
    if config.kernel == "cublas" and _cublas(x, w, epilogue, scale, bias, workspace, pdl):
        return
    if config.kernel == "cublas":
        config = heuristic(t, n, k, w.dtype)
    split = 1 if workspace is None else min(config.split_k, triton.cdiv(k, config.block_k))
    tiles = triton.cdiv(t, config.block_t) * triton.cdiv(n, config.block_n)
    if workspace is not None and split > 1:
        need = workspace_sizes(config, t, n, type(epilogue))
        if workspace.partials.numel() < need[0] or workspace.tickets.numel() < need[1]:
            raise EngineError(
                f"gemm: workspace of {workspace.partials.numel()} partials and "
                f"{workspace.tickets.numel()} tickets; {config} at T={t} N={n} needs {need[:2]}"
            )
    tma = config.tma and _tma_able(x) and _tma_able(w)
    out = epilogue.out
    residual = epilogue.residual if isinstance(epilogue, Residual) else out
    partials = out if workspace is None else workspace.partials
    tickets = out if workspace is None else workspace.tickets
    kind = _EPILOGUES[type(epilogue)]
    if x_scale is not None and scale is not None:
        gemm_fp8.launch(
            x, w, out, residual, x_scale, scale, bias, partials, tickets,
            blocks=(config.block_t, config.block_n, config.block_k), warps=config.warps,
            stages=config.stages, group=config.group, split=split, promote=config.promote, tma=tma,
            epilogue=kind, pdl=pdl,
        )  # fmt: skip
        return
    if config.kernel == "async" and tma and w.dtype == _FP8 and scale is not None and not INTERPRET:
        gemm_async.launch(
            x, w, out, residual, scale, bias, partials, tickets,
            blocks=(config.block_t, config.block_n, config.block_k), warps=config.warps,
            stages=config.stages, group=config.group, split=split, epilogue=kind, pdl=pdl,
        )  # fmt: skip
        return
    gemm_kernel[(tiles * split,)](
        TensorDescriptor.from_tensor(x, [config.block_t, config.block_k]) if tma else x,
        TensorDescriptor.from_tensor(w, [config.block_n, config.block_k]) if tma else w,
        out, residual, out if scale is None else scale, out if bias is None else bias,
        partials, tickets,
        t, n, k, x.stride(0), w.stride(0), out.stride(0), residual.stride(0),
        BT=config.block_t, BN=config.block_n, BK=config.block_k, GROUP=config.group,
        SWAP=config.swap, SPLIT=split, TMA=tma, EPILOGUE=kind,
        HAS_SCALE=scale is not None, HAS_BIAS=bias is not None, FP8=w.dtype == _FP8,
        DTYPE=_TL_DTYPE[x.dtype], PDL=pdl,
        num_warps=config.warps, num_stages=config.stages, launch_pdl=pdl,
    )  # fmt: skip


_EPILOGUES: dict[type, int] = {Store: 0, Residual: 1, SiluMul: 2}


def _checked(
    x: torch.Tensor,
    w: torch.Tensor,
    epilogue: Epilogue,
    scale: torch.Tensor | None,
    x_scale: torch.Tensor | None,
) -> GemmEpilogue:
    if not isinstance(epilogue, GemmEpilogue):
        raise EngineError(
            f"gemm: no {type(epilogue).__name__} epilogue; it has Store, Residual, SiluMul"
        )
    if x.dtype not in (*_TL_DTYPE, _FP8) or w.dtype not in (x.dtype, _FP8):
        raise EngineError(
            f"gemm: x {x.dtype} with w {w.dtype}; x is bf16, fp16 or e4m3, w the same or e4m3"
        )
    if (x.dtype == _FP8) != (x_scale is not None) or (x_scale is not None and scale is None):
        raise EngineError("gemm: an e4m3 x needs x_scale and scale, and only that takes x_scale")
    columns = w.shape[0] // 2 if isinstance(epilogue, SiluMul) else w.shape[0]
    if x.shape[1] != w.shape[1] or tuple(epilogue.out.shape) != (x.shape[0], columns):
        raise EngineError(
            f"gemm: x {tuple(x.shape)} with w {tuple(w.shape)} into {tuple(epilogue.out.shape)}"
        )
    return epilogue


def _tma_able(matrix: torch.Tensor) -> bool:
    """TMA wants a 16-byte aligned base and row stride."""
    return matrix.data_ptr() % 16 == 0 and matrix.stride(0) * matrix.element_size() % 16 == 0


def _cublas(
    x: torch.Tensor,
    w: torch.Tensor,
    epilogue: GemmEpilogue,
    scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    workspace: GemmWorkspace | None,
    pdl: bool,
) -> bool:
    """The library's GEMM, where it can do the call (True). Allocates nothing once it is warm.

    Residual is the library's own C operand: fp32 sum, one rounding. SiluMul rounds the pairs to 16
    bits first.
    """
    if w.dtype != x.dtype or scale is not None or epilogue.out.dtype != x.dtype:
        return False
    if isinstance(epilogue, Residual):
        if bias is not None:
            return False
        if epilogue.out.data_ptr() != epilogue.residual.data_ptr():
            epilogue.out.copy_(epilogue.residual)
        epilogue.out.addmm_(x, w.t())
        return True
    pairs = epilogue.out
    if isinstance(epilogue, SiluMul):
        size = x.shape[0] * w.shape[0]
        if workspace is None or workspace.scratch.numel() < size:
            return False
        pairs = workspace.scratch[:size].view(x.shape[0], w.shape[0])
    if bias is None:
        torch.mm(x, w.t(), out=pairs)
    else:
        torch.addmm(bias, x, w.t(), out=pairs)
    if isinstance(epilogue, SiluMul):
        silu_mul(
            pairs, epilogue.out, pdl=False
        )  # the library's kernel never releases dependents early
    return True


def linear_ref(
    x: torch.Tensor,
    w: torch.Tensor,
    scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [..., K], w [N, K] (float or float8_e4m3fn), scale fp32 [N], bias [N] -> [..., N] in x's
    dtype.

    16-bit x accumulates in fp32 and is rounded once at the end; fp32 and fp64 x stay in their
    dtype (plain torch linear, so that the CPU back end runs at BLAS speed).
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    if scale is None:
        y = torch.nn.functional.linear(
            x.to(wide), w.to(wide), None if bias is None else bias.to(wide)
        )
        return y.to(x.dtype)
    y = torch.nn.functional.linear(x.to(wide), w.to(wide)) * scale.to(wide)
    if bias is not None:
        y = y + bias.to(wide)
    return y.to(x.dtype)
