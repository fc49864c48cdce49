"""Decode linear layer: y[r, n] = scale[n] * rstd(x_r) * sum_k W[n, k] (x[r, k] g[k]) + bias[n], then an epilogue.

R = 1..8 rows; W is [N, K] row-major, bf16 / fp16 or FP8 e4m3 with one fp32 scale per output channel; g is the
RMSNorm weight of the layer in front (absent: g = rstd = 1), rstd = 1 / sqrt(mean(x^2) + eps). fp32 accumulation.

The weights are read once, so the roof is N*K*bytes / 4.29 TB/s (an H200's copy bandwidth). Per rank:

    model, TP     qkv [N x K]   o            gate+up        down          bytes of the four (FP8)   roof, us
    72B, 1        10240 x 8192  8192 x 8192  59136 x 8192   8192 x 29568  878 MB                    205
    72B, 2         5120 x 8192  8192 x 4096  29568 x 8192   8192 x 14784  439 MB                    102
    72B, 4         2560 x 8192  8192 x 2048  14784 x 8192   8192 x 7392   219 MB                     51
    72B, 8         1280 x 8192  8192 x 1024   7392 x 8192   8192 x 3696   110 MB                     26
    7B,  1         4608 x 3584  3584 x 3584  37888 x 3584   3584 x 18944  233 MB                     54
    7B,  2         2304 x 3584  3584 x 1792  18944 x 3584   3584 x 9472   117 MB                     27
    7B,  4         1152 x 3584  3584 x 896    9472 x 3584   3584 x 4736    58 MB                     14
    7B,  8         1024 x 3584  3584 x 512    4736 x 3584   3584 x 2368    30 MB                      7

Two kernels behind one launcher. "simple" (gemv_simple.py): one program per block of output rows, weights straight into
registers, fp32 FMA; the next tile is in flight while one is used, and the first one is fetched before the wait
on the kernel in front (PDL). "ring" (gemv_ring.py): persistent, a shared-memory ring and tensor cores.

Bit-identity: the order of every sum depends on the config's block_k, num_warps, warps_k and on K only, never on R
or the row's index, so a row gives the same bits alone and among others. A config is chosen per weight; the rest of
it may be another for several rows (`GemvConfig.wide`), as neither tile height nor ring order a sum.
"""

from __future__ import annotations

from typing import Any, TypedDict, Unpack

import torch
import triton

from engine.errors import EngineError
from engine.kernels.epilogue import GemvEpilogue, Maxima, Push, Residual, RopeAppend, SiluMul, Store
from engine.kernels.gemv_config import (
    GemvConfig,
    heuristic,
    ring_rows,
    ring_shape,
    rows_block_n,
    rows_config,
    simple_config,
)
from engine.kernels.gemv_poll import Poll, poll_arguments
from engine.kernels.gemv_ring import gemv_ring_kernel
from engine.kernels.gemv_simple import gemv_kernel
from engine.kernels.rope_append import rotate_pairs
from engine.kernels.silu import silu_mul_ref

# No row count: what orders the sums, and so the bits, is the same for all; what is not is in the config (`wide`).
KEY_FIELDS = ("n", "k", "weight_dtype")
SOURCES = ("gemv_simple.py", "gemv_epilogue.py", "gemv_ring.py", "gemv_poll.py")

__all__ = [
    "KEY_FIELDS",
    "MAX_ROWS",
    "SOURCES",
    "GemvConfig",
    "gemv",
    "gemv_programs",
    "gemv_ref",
    "heuristic",
    "linear_ref",
    "plan_gemv",
]

MAX_ROWS = 8


def _check(x: torch.Tensor, w: torch.Tensor, epilogue: GemvEpilogue) -> tuple[int, int, int]:
    rows, k = x.shape
    n = w.shape[0]
    if w.shape[1] != k:
        raise EngineError(f"x is [{rows}, {k}] and W is {list(w.shape)}: their K differ")
    if not 1 <= rows <= MAX_ROWS:
        raise EngineError(f"the decode GEMV takes 1 to {MAX_ROWS} rows, not {rows}")
    if n % 2 and not isinstance(epilogue, Store | Residual | Maxima):
        raise EngineError(f"{type(epilogue).__name__} works on pairs of outputs; N = {n} is odd")
    return rows, n, k


def _epilogue_arguments(x: torch.Tensor, n: int, epilogue: GemvEpilogue) -> dict:
    """The kernel arguments that an epilogue decides, by name (both kernels take the same)."""
    arguments: dict = dict.fromkeys(
        (
            "out_ptr",
            "residual_ptr",
            "k_cache_ptr",
            "v_cache_ptr",
            "cos_sin_ptr",
            "positions_ptr",
            "row_slots_ptr",
            "table_ptr",
            "temperature_ptr",
            "seeds_ptr",
            "request_ptr",
            "values_ptr",
            "ids_ptr",
            "id_offset",
        )
    )
    arguments.update(push_offset=0, EPILOGUE="store", NUM_HEADS=0, NUM_KV_HEADS=0)
    arguments.update(HEAD_DIM=0, MAX_LEN=0, WORLD=0, VOCAB_SIZE=0)
    if isinstance(epilogue, Store):
        arguments.update(out_ptr=epilogue.out)
    elif isinstance(epilogue, Residual):
        arguments.update(out_ptr=epilogue.out, residual_ptr=epilogue.residual)
    elif isinstance(epilogue, SiluMul):
        arguments.update(EPILOGUE="silu", out_ptr=epilogue.out)
    elif isinstance(epilogue, RopeAppend):
        arguments.update(
            EPILOGUE="rope",
            out_ptr=epilogue.q_out,
            k_cache_ptr=epilogue.k_cache,
            v_cache_ptr=epilogue.v_cache,
            cos_sin_ptr=epilogue.cos_sin,
            positions_ptr=epilogue.positions,
            row_slots_ptr=epilogue.row_slots,
            NUM_HEADS=epilogue.num_heads,
            NUM_KV_HEADS=epilogue.num_kv_heads,
            HEAD_DIM=epilogue.head_dim,
            MAX_LEN=epilogue.k_cache.shape[2],
        )
    elif isinstance(epilogue, Maxima):
        e = epilogue
        arguments.update(
            EPILOGUE="maxima", out_ptr=e.out, values_ptr=e.values, ids_ptr=e.ids,
            temperature_ptr=e.temperature, seeds_ptr=e.seeds, positions_ptr=e.positions,
            row_slots_ptr=e.row_slots, request_ptr=e.request, id_offset=e.id_offset,
            VOCAB_SIZE=e.vocab_size,
        )  # fmt: skip
    else:
        message_bytes = x.shape[0] * n * x.element_size()
        arguments.update(
            EPILOGUE="push",
            table_ptr=epilogue.peer_table,
            push_offset=epilogue.slot_offset_bytes + epilogue.rank * message_bytes,
            WORLD=epilogue.world,
        )
    return arguments


def _runnable(config: GemvConfig, n: int, k: int, w_dtype: torch.dtype) -> GemvConfig:
    """Gluon has no interpreter: there the plain kernel is the ring's twin."""
    if config.kernel not in ("simple", "ring"):
        raise EngineError(f"unknown GEMV kernel {config.kernel!r}; known: simple, ring")
    if config.kernel == "ring" and triton.knobs.runtime.interpret:
        return simple_config(n, k, w_dtype)
    return config


def gemv_programs(config: GemvConfig, n: int, k: int, rows: int, w_dtype: torch.dtype) -> int:
    """Programs that a launch of this shape has: P of the `Maxima` epilogue."""
    config = _runnable(rows_config(config, rows), n, k, w_dtype)
    if config.kernel == "simple":
        return triton.cdiv(n, rows_block_n(config, rows))
    return triton.cdiv(n, ring_rows(config, n))


class Linear(TypedDict, total=False):
    """What makes y of x and W, all [R, K] x [N, K] -> [R, N]: scale [N] fp32; bias [N] and norm_weight [K] 16-bit or
    fp32 (norm_weight None: no RMSNorm, eps unused)."""

    scale: torch.Tensor | None
    bias: torch.Tensor | None
    norm_weight: torch.Tensor | None
    eps: float


class Options(Linear, total=False):
    """And how it is launched. poll: x is the residual, and what is multiplied is h = x + an all-reduce, which the
    kernel waits for (gemv_poll.py). prefetch: RopeAppend's row_slots and positions may be read before the dependency
    wait, as decode_attention.py has it. pdl: with the programmatic-stream-serialisation attribute."""

    poll: Poll | None
    config: GemvConfig | None
    prefetch: bool
    pdl: bool


def plan_gemv(
    x: torch.Tensor,
    w: torch.Tensor,
    epilogue: GemvEpilogue,
    *,
    scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    poll: Poll | None = None,
    config: GemvConfig | None = None,
    prefetch: bool = False,
    pdl: bool = False,
) -> tuple[Any, tuple[int], dict[str, Any]]:
    """(kernel, grid, arguments) of the launch that `gemv` makes. Needs shapes and dtypes only."""
    rows, n, k = _check(x, w, epilogue)
    config = rows_config(config or heuristic(n, k, w.dtype), rows)
    config = _runnable(config, n, k, w.dtype)
    arguments = {**_epilogue_arguments(x, n, epilogue), **poll_arguments(poll, x)}
    arguments.update(
        x_ptr=x, w_ptr=w, scale_ptr=scale, bias_ptr=bias, norm_ptr=norm_weight, eps=eps, N=n, K=k, R=rows,
        PREFETCH=prefetch, PDL=pdl, BLOCK_N=config.block_n, BLOCK_K=config.block_k, num_warps=config.num_warps,
        launch_pdl=pdl,
    )  # fmt: skip
    grid = (gemv_programs(config, n, k, rows, w.dtype),)
    if isinstance(epilogue, Maxima) and epilogue.values.shape != (rows, grid[0]):
        raise EngineError(
            f"maxima {list(epilogue.values.shape)} of {rows} rows, {grid[0]} programs"
        )
    if config.kernel == "simple":
        return gemv_kernel, grid, {**arguments, "BLOCK_N": rows_block_n(config, rows)}
    shape = ring_shape(config, n, k, rows, x.dtype, w.dtype, polls=poll is not None)
    arguments.update(
        k_tiles=triton.cdiv(k, config.block_k), STAGES=shape.stages, WARPS_K=config.warps_k,
        ROWS_PER_PROGRAM=shape.rows_per_program, STAGE_X=shape.stage_x,
    )  # fmt: skip
    return gemv_ring_kernel, grid, arguments


def gemv(
    x: torch.Tensor, w: torch.Tensor, epilogue: GemvEpilogue, **options: Unpack[Options]
) -> None:
    """Launch y = scale * rstd(x) * (W @ (x * norm_weight)) + bias and its epilogue on the current stream.

    x [R, K] 16-bit, R 1..8; w [N, K] bf16, fp16 or float8_e4m3fn; everything contiguous. Outputs live in `epilogue`.
    In the interpreter every config runs the plain kernel. Raises EngineError for shapes that do not fit together
    or a config that does not fit them.
    """
    kernel, grid, arguments = plan_gemv(x, w, epilogue, **options)
    kernel[grid](**arguments)


def linear_ref(
    x: torch.Tensor,
    w: torch.Tensor,
    *,
    scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> torch.Tensor:
    """y [R, N] in fp32 (fp64 if x is): scale * rstd(x) * (W @ (x * norm_weight)) + bias. x [R, K], w [N, K]."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    value = x.to(wide)
    if norm_weight is not None:
        value = value * torch.rsqrt(value.square().mean(-1, keepdim=True) + eps)
        value = value * norm_weight.to(wide)
    y = value @ w.to(wide).T
    if scale is not None:
        y = y * scale.to(wide)
    if bias is not None:
        y = y + bias.to(wide)
    return y


def gemv_ref(
    x: torch.Tensor, w: torch.Tensor, epilogue: GemvEpilogue, **linear: Unpack[Linear]
) -> torch.Tensor:
    """Reference of `gemv`: the output as a new tensor, computed in fp32 (fp64 if x is), rounded once.

    Store, Residual, Maxima -> [R, N] of out's dtype (the maxima: sample_ref.py); SiluMul -> [R, N/2]; RopeAppend ->
    q_out, with the caches filled in place; Push -> the message [R, N] of x's dtype with -0.0 as +0.0. `epilogue.out` is read for its dtype only.
    """
    y = linear_ref(x, w, **linear)
    if isinstance(epilogue, Store | Maxima):
        return y.to(epilogue.out.dtype)
    if isinstance(epilogue, Residual):
        return (epilogue.residual.to(y.dtype) + y).to(epilogue.out.dtype)
    if isinstance(epilogue, SiluMul):
        return silu_mul_ref(y).to(epilogue.out.dtype)
    if isinstance(epilogue, Push):
        return y.to(x.dtype) + 0.0
    return _rope_append_ref(y, epilogue)


def _rope_append_ref(y: torch.Tensor, e: RopeAppend) -> torch.Tensor:
    slots = e.row_slots.long()
    held = (slots >= 0).nonzero().flatten()
    positions = e.positions.long()[slots.clamp(min=0)]
    heads = y.unflatten(1, (-1, e.head_dim))
    rotated = rotate_pairs(heads[:, : e.num_heads + e.num_kv_heads], e.cos_sin[positions])
    where = (slots[held], slice(None), positions[held])
    e.k_cache[where] = rotated[held, e.num_heads :].to(e.k_cache.dtype)
    e.v_cache[where] = heads[held, e.num_heads + e.num_kv_heads :].to(e.v_cache.dtype)
    return rotated[:, : e.num_heads].flatten(1).to(e.q_out.dtype)
