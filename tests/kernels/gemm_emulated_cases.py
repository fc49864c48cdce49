"""Child process of test_gemm_emulated.py: runs the GEMM's sm_90 PTX on the CPU and prints the
errors as JSON.

Each case runs twice, with TMA data landing as early and as late as the hardware may
(ptx_hopper.py).
"""

from __future__ import annotations

import json

import torch
import triton

from engine.kernels.gemm import GemmConfig, Store, linear_ref, workspace_sizes
from engine.kernels.gemm_config import tail_of
from engine.kernels.silu import silu_mul_ref
from tests.kernels.gemm_compile_cases import compile_gemm
from tests.kernels.ptx_hopper import TensorMap, launch

DTYPE = {"bf16": torch.bfloat16, "fp16": torch.float16}


def error(
    config: GemmConfig, epilogue: str, *, fp8: bool, t: int, n: int, k: int, early: bool,
    act: str = "bf16",
) -> float:  # fmt: skip
    """Relative RMS error against fp64; inf if something is left unwritten or a ticket is not
    re-armed."""
    torch.manual_seed(1)
    dtype = DTYPE[act]
    w8a8 = config.kernel == "w8a8"
    x = torch.randn(t, k).to(dtype)
    x_scale = torch.rand(t) + 0.5
    if w8a8:
        x = (x * 40).to(torch.float8_e4m3fn)
    w = torch.randn(n, k) * 40
    w[:, : k // 8] = torch.randn(n, k // 8) * 2.0**-7  # e4m3 subnormals
    w = w.to(torch.float8_e4m3fn if fp8 else dtype)
    scale = (torch.rand(n) + 0.5) / ((1600 if w8a8 else 40) * k**0.5)
    bias, residual = torch.randn(n).to(dtype), torch.randn(t, n).to(dtype)
    out = torch.full((t, n // 2 if epilogue == "silu_mul" else n), float("nan"), dtype=dtype)
    y = linear_ref(
        x.double() * (x_scale.double()[:, None] if w8a8 else 1.0), w.double(),
        scale.double() if fp8 else None,
        bias.double() if epilogue == "store" else None,
    )  # fmt: skip
    want = {"store": y, "residual": residual.double() + y, "silu_mul": silu_mul_ref(y)}[epilogue]
    bt, bn, bk = config.block_t, config.block_n, config.block_k
    tiles = triton.cdiv(t, bt) * triton.cdiv(n, bn)
    partials, tickets, _ = workspace_sizes(config, t, n, Store)
    partials = torch.full((max(1, partials),), float("nan"))
    tickets = torch.zeros(max(1, tickets), dtype=torch.int32)
    rest, programs = tail_of(config, t, n)
    report = compile_gemm(config, fp8=fp8, epilogue=epilogue, act=act)
    strides = [out.stride(0), residual.stride(0)]
    scales = [x_scale, scale] if w8a8 else [scale]
    if config.kernel != "async":
        strides = [x.stride(0), w.stride(0), *strides]
    maps = [TensorMap(m, rows, min(128, bk * m.element_size())) for m, rows in ((x, bt), (w, bn))]
    # Triton's own form of FP8 with swapped operands rewrites the fragments of wgmma in flight; that
    # is right only because ptxas then waits after each one (test_compile_gemm.py): run it as ptxas
    # does.
    rewrites = fp8 and config.swap and config.kernel == "triton"
    launch(
        report.ptx, tiles * config.split_k - rest + programs, report.shared_bytes,
        [*maps, out, residual, *scales, bias, partials, tickets, t, n, k, *strides],
        early=early, lazy=not rewrites,
    )  # fmt: skip
    if out.isnan().any() or tickets.any():
        return float("inf")
    return ((out.double() - want).norm() / want.norm()).item()


def _async(bt: int, bn: int, bk: int, warps: int, stages: int, split: int = 1) -> GemmConfig:
    return GemmConfig("async", bt, bn, bk, warps, stages, swap=True, split_k=split, group=2)


def _plain(bt: int, bn: int, bk: int, warps: int, swap: bool, **rest: int) -> GemmConfig:
    return GemmConfig("triton", bt, bn, bk, warps, 3, swap=swap, group=2, **rest)


def _w8a8(bt: int, bn: int, bk: int, warps: int, stages: int, **rest: int) -> GemmConfig:
    return GemmConfig("w8a8", bt, bn, bk, warps, stages, group=2, **rest)


CASES = [
    (_w8a8(128, 256, 128, 8, 4), "residual", dict(fp8=True, t=144, n=304, k=400)),
    (_w8a8(128, 256, 128, 8, 3), "silu_mul", dict(fp8=True, t=80, n=144, k=912)),
    (_w8a8(128, 128, 128, 8, 3, split_k=2), "store", dict(fp8=True, t=144, n=144, k=912)),
    (_w8a8(64, 128, 64, 4, 4), "silu_mul", dict(fp8=True, t=80, n=144, k=464, act="fp16")),
    (_w8a8(128, 128, 128, 8, 3, promote=True), "store", dict(fp8=True, t=80, n=144, k=400)),
    # A whole wave of three and a tile in two parts; three ranges of 2/3 of a tile, one of them in both.
    (_w8a8(128, 256, 128, 8, 3, tail=2, wave=3), "residual", dict(fp8=True, t=144, n=304, k=400)),
    (_w8a8(128, 256, 128, 8, 3, tail=2, wave=3), "silu_mul", dict(fp8=True, t=80, n=304, k=656)),
    (_plain(64, 128, 64, 4, False, tail=2, wave=3), "store", dict(fp8=False, t=80, n=80, k=464)),
    (_plain(128, 64, 64, 4, True, tail=2, wave=3), "silu_mul", dict(fp8=False, t=80, n=80, k=400)),
    (_async(16, 64, 64, 4, 4), "store", dict(fp8=True, t=40, n=80, k=464)),
    (_async(16, 64, 128, 4, 6, split=2), "store", dict(fp8=True, t=40, n=80, k=912)),
    (_async(32, 128, 64, 8, 3), "silu_mul", dict(fp8=True, t=40, n=80, k=272, act="fp16")),
    (_async(64, 64, 64, 4, 4, split=3), "residual", dict(fp8=True, t=40, n=80, k=464)),
    (_async(128, 128, 64, 8, 4), "residual", dict(fp8=True, t=144, n=208, k=336)),
    (_async(256, 128, 64, 8, 4), "silu_mul", dict(fp8=True, t=80, n=144, k=208)),
    (_async(256, 128, 64, 8, 4), "residual", dict(fp8=True, t=80, n=144, k=64)),
    (_plain(16, 64, 64, 4, True), "store", dict(fp8=False, t=40, n=80, k=464)),
    (_plain(16, 64, 64, 4, True, split_k=2), "silu_mul", dict(fp8=True, t=40, n=80, k=464)),
    (_plain(128, 128, 64, 8, False), "silu_mul", dict(fp8=True, t=144, n=208, k=336)),
    (_plain(64, 128, 64, 4, False), "residual", dict(fp8=False, t=80, n=144, k=464)),
    (_plain(128, 128, 64, 8, True), "residual", dict(fp8=False, t=80, n=144, k=272, act="fp16")),
]  # fmt: skip


if __name__ == "__main__":
    found = {}
    for config, epilogue, facts in CASES:
        for early in (True, False):
            name = f"{config} {epilogue} {facts} early={early}"
            found[name] = error(config, epilogue, early=early, **facts)
    print(json.dumps(found))
