"""Prefill GEMM: y[T, N] = x[T, K] @ w[N, K]^T (* scale[N]) (+ bias[N]), then an epilogue.

Store, Residual, SiluMul or Scatter. x is bf16 or fp16, w the same or float8_e4m3fn (converted tile by tile,
exact, so FP8 runs on the 16-bit tensor cores: W8A16), accumulation fp32. T is the prefill bucket,
16 to 8192 rows; rows past the request are computed like the others and never change a real row's
bits. Two buckets of one configuration give a row the same bits too, except with `tail` > 1: which
tiles are split over K then depends on T, so that the same row may differ by the order of its fp32
sums. Launches of one T agree bit by bit.

x may also be e4m3 with an fp32 scale a row, beside an FP8 w: then the products are FP8 too (W8A8).

Three kernels: gemm_kernel.py (Triton, W8A8 too; also the interpreter's), gemm_async.py (Gluon, FP8
weights) and the library's GEMM. gemm_tile.py: what the first two share on the device; gemm_tail.py: a
part-filled last wave split over K (the Triton kernel); gemm_config.py: configurations, the heuristic
and what a launch takes.

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

from dataclasses import dataclass, replace

import torch

from engine.errors import EngineError
from engine.kernels import gemm_async, gemm_kernel
from engine.kernels.epilogue import (
    Epilogue,
    GemmEpilogue,
    Residual,
    Scatter,
    SiluMul,
    Store,
    shard_rows,
)
from engine.kernels.gemm_config import (
    FP8,
    W8A8,
    GemmConfig,
    Operands,
    heuristic,
    settle,
    workspace_sizes,
)
from engine.kernels.silu import silu_mul
from engine.kernels.sync import INTERPRET

KEY_FIELDS = ("t", "n", "k", "weight_dtype")
NEAREST_FIELD = "t"  # every configuration is valid at every T
SOURCES = ("gemm_tile.py", "gemm_tail.py", "gemm_kernel.py", "gemm_async.py")

__all__ = [
    "KEY_FIELDS",
    "NEAREST_FIELD",
    "SOURCES",
    "W8A8",
    "GemmConfig",
    "GemmWorkspace",
    "Residual",
    "Scatter",
    "SiluMul",
    "Store",
    "gemm",
    "heuristic",
    "linear_ref",
    "workspace",
    "workspace_sizes",
]


@dataclass(frozen=True)
class GemmWorkspace:
    """Preallocated scratch, shared by all GEMM calls of one rank's stream (never by two streams).

    partials: fp32, parts of split tiles; tickets: int32, zero between calls; scratch: 16-bit, [T, N]
    gate/up pairs of the cuBLAS route.
    """

    partials: torch.Tensor
    tickets: torch.Tensor
    scratch: torch.Tensor


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
    Epilogue: Store, Residual, SiluMul or Scatter; outputs have unit stride along N.
    A configuration for the other kind of x is replaced by the heuristic's.
    Without a workspace a split-K or tail configuration runs unsplit, and cuBLAS + SiluMul runs on
    Triton.
    "async" runs on Triton too where it cannot (16-bit weights, rows not 16-byte aligned, the
    interpreter). Raises EngineError for an epilogue, a dtype or a shape it does not do.
    """
    call = Operands(
        x, w, _checked(x, w, epilogue, scale, x_scale), scale, bias, x_scale,
        None if workspace is None else workspace.partials,
        None if workspace is None else workspace.tickets,
    )  # fmt: skip
    t, n, k = call.sizes
    if (config.kernel == W8A8) != (x.dtype == FP8):
        config = _replaced(config, call)
    elif config.kernel == "cublas":
        if _cublas(call, None if workspace is None else workspace.scratch):
            return
        config = _replaced(config, call)
    tma = config.tma and _tma_able(x) and _tma_able(w)
    asynchronous = (
        config.kernel == "async" and tma and w.dtype == FP8 and scale is not None and not INTERPRET
    )
    if asynchronous:
        config = replace(config, tail=1)
    settled = replace(settle(config, t, n, k, workspace is not None), tma=tma)
    if workspace is not None:
        need = workspace_sizes(settled, t, n, type(epilogue))
        if workspace.partials.numel() < need[0] or workspace.tickets.numel() < need[1]:
            raise EngineError(
                f"gemm: workspace of {workspace.partials.numel()} partials and "
                f"{workspace.tickets.numel()} tickets; {settled} at T={t} N={n} needs {need[:2]}"
            )
    if asynchronous:
        gemm_async.launch(call, settled, pdl)
    else:
        gemm_kernel.launch(call, settled, pdl)


def _checked(
    x: torch.Tensor,
    w: torch.Tensor,
    epilogue: Epilogue,
    scale: torch.Tensor | None,
    x_scale: torch.Tensor | None,
) -> GemmEpilogue:
    if not isinstance(epilogue, GemmEpilogue):
        raise EngineError(
            f"gemm: no {type(epilogue).__name__} epilogue; it has Store, Residual, SiluMul, Scatter"
        )
    if x.dtype not in (torch.bfloat16, torch.float16, FP8) or w.dtype not in (x.dtype, FP8):
        raise EngineError(
            f"gemm: x {x.dtype} with w {w.dtype}; x is bf16, fp16 or e4m3, w the same or e4m3"
        )
    if (x.dtype == FP8) != (x_scale is not None) or (x_scale is not None and scale is None):
        raise EngineError("gemm: an e4m3 x needs x_scale and scale, and only that takes x_scale")
    columns = w.shape[0] // 2 if isinstance(epilogue, SiluMul) else w.shape[0]
    rows = x.shape[0]
    if isinstance(epilogue, Scatter):
        rows = shard_rows(rows, epilogue.far.numel())
    if x.shape[1] != w.shape[1] or tuple(epilogue.out.shape) != (rows, columns):
        raise EngineError(
            f"gemm: x {tuple(x.shape)} with w {tuple(w.shape)} into {tuple(epilogue.out.shape)}"
        )
    return epilogue


def _tma_able(matrix: torch.Tensor) -> bool:
    """TMA wants a 16-byte aligned base and row stride."""
    return matrix.data_ptr() % 16 == 0 and matrix.stride(0) * matrix.element_size() % 16 == 0


def _replaced(config: GemmConfig, call: Operands) -> GemmConfig:
    """The heuristic's choice in the place of `config`, which cannot do the call; unsplit where the
    workspace, sized for `config`, has no partial sums."""
    t, n, k = call.sizes
    chosen = heuristic(t, n, k, W8A8 if call.x.dtype == FP8 else call.w.dtype)
    return replace(chosen, split_k=1) if config.kernel == "cublas" else chosen


def _cublas(call: Operands, scratch: torch.Tensor | None) -> bool:
    """The library's GEMM, where it can do the call (True). Allocates nothing once it is warm.

    Residual is the library's own C operand: fp32 sum, one rounding. SiluMul rounds the pairs to 16
    bits first.
    """
    x, w, bias, out = call.x, call.w, call.bias, call.out
    if w.dtype != x.dtype or call.scale is not None or out.dtype != x.dtype:
        return False
    if isinstance(call.epilogue, Scatter):
        return False
    if isinstance(call.epilogue, Residual):
        if bias is not None:
            return False
        if out.data_ptr() != call.residual.data_ptr():
            out.copy_(call.residual)
        out.addmm_(x, w.t())
        return True
    pairs = out
    if isinstance(call.epilogue, SiluMul):
        t, n, _ = call.sizes
        if scratch is None or scratch.numel() < t * n:
            return False
        pairs = scratch[: t * n].view(t, n)
    if bias is None:
        torch.mm(x, w.t(), out=pairs)
    else:
        torch.addmm(bias, x, w.t(), out=pairs)
    if isinstance(call.epilogue, SiluMul):  # the library never releases dependents early
        silu_mul(pairs, out, pdl=False)
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
