"""Check GEMM kernel variants, each on a small ragged shape against an fp32 reference (workers.py)."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch

from bench.workers import run_workers, serve, task_file
from engine.kernels import gemm as op
from engine.kernels.epilogue import GemmEpilogue, Residual, SiluMul, Store
from engine.kernels.silu import silu_mul_ref


@dataclass(frozen=True)
class Variant:
    """One compiled kernel."""

    config: op.GemmConfig
    fp8: bool
    epilogue: str
    bias: bool

    @property
    def w8a8(self) -> bool:
        return self.config.kernel == op.W8A8


def tolerance(config: op.GemmConfig, epilogue: str, k: int) -> float:
    """Bound on the relative RMS error: one bf16 rounding is 2^-9 / sqrt(3) * 1.2 = 1.4e-3; the
    library route rounds gate and up first; FP8 sums keep about 14 bits (gemm_kernel.py)."""
    if config.kernel == op.W8A8:
        return 2.5e-3 + k / 32 * 2.0**-14
    return 5e-3 if config.kernel == "cublas" and epilogue == "SiluMul" else 2.5e-3


def epilogue(name: str, residual: torch.Tensor, out: torch.Tensor) -> GemmEpilogue:
    """Store, Residual or SiluMul into `out`."""
    made: dict[str, GemmEpilogue] = {
        "Store": Store(out), "Residual": Residual(residual, out), "SiluMul": SiluMul(out),
    }  # fmt: skip
    return made[name]


def check(variant: Variant, device: str) -> float:
    """Relative RMS error on T=80, N=208, K=9 blocks + 16 (less than a wave: a tail splits every tile);
    run twice, the second must have the same bits."""
    t, n, k = 80, 208, 9 * variant.config.block_k + 16
    x = torch.randn(t, k, device=device).bfloat16()
    w = torch.randn(n, k, device=device)
    scale = bias = None
    if variant.fp8:
        w = (w * 40).to(torch.float8_e4m3fn)
        scale = torch.rand(n, device=device).add_(0.5).mul_(1e-3)
    else:
        w = (w * 0.05).bfloat16()
    x_scale = None
    if variant.w8a8:
        x = (x * 40).to(torch.float8_e4m3fn)
        x_scale = torch.rand(t, device=device).add_(0.5).div_(40)
    if variant.bias:
        bias = torch.randn(n, device=device).bfloat16()
    residual = torch.randn(t, n, device=device).bfloat16()
    want = x.float() @ w.float().t() * (1.0 if scale is None else scale)
    want = want if x_scale is None else want * x_scale[:, None]
    want = want if bias is None else want + bias.float()
    if variant.epilogue == "SiluMul":
        want = silu_mul_ref(want)
    elif variant.epilogue == "Residual":
        want = want + residual.float()
    results = []
    sizes = op.workspace_sizes(variant.config, t, n, Store)
    workspace = op.workspace(sizes, torch.bfloat16, device)
    for _ in range(2):
        out = torch.full(want.shape, float("nan"), dtype=torch.bfloat16, device=device)
        op.gemm(
            x, w, epilogue(variant.epilogue, residual, out), scale=scale, bias=bias,
            x_scale=x_scale, config=variant.config, workspace=workspace,
        )  # fmt: skip
        results.append(out)
    torch.cuda.synchronize()
    if not torch.equal(*results):
        return float("inf")
    return ((results[0].float() - want).norm() / want.norm()).item()


def check_all(variants: list[Variant], processes: int, limit_s: float) -> set[Variant]:
    """The variants that are right; after `limit_s` seconds what is left counts as bad."""

    def bound(index: int) -> float:
        v = variants[index]
        return tolerance(v.config, v.epilogue, 9 * v.config.block_k)

    good = run_workers(
        "bench.gemm_workers", [asdict(v) for v in variants],
        [range(i, len(variants), processes) for i in range(processes)], limit_s,
        describe=lambda index: str(variants[index]), bound=bound,
    )  # fmt: skip
    return {variants[index] for index in good}


def _check_task(task: dict) -> float:
    return check(Variant(**{**task, "config": op.GemmConfig(**task["config"])}), "cuda")


if __name__ == "__main__":
    serve(task_file("bench.gemm"), _check_task)
