"""Prefill GEMM on the card: correctness, TFLOP/s against cuBLAS, the best as a cache file.

    python -m bench.gemm --time-limit 150

Writes to $OUT (default ./out): gemm.json (rows, see bench/rows.py) and
autotune_cache/<gpu>/gemm.json. Times are medians of CUDA graph replays; each replay walks over
copies of the weights that exceed the L2 where the pool allows it. Every kernel variant is first
compiled and checked on a small ragged shape by worker processes, so that one that is wrong, hangs
or faults is dropped with one line and cannot take the run with it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from bench.deployment import choices, linear_shapes, numbers, script, shapes
from bench.gemm_workers import Variant, check_all, epilogue, tolerance
from bench.rows import Rows
from bench.timing import graph_us
from engine.console import Parser
from engine.kernels import gemm as op
from engine.kernels.quantize_rows import quantize_rows_ref
from engine.kernels.silu import silu_mul_ref
from engine.tune import cache_file, choose, gemm_space

HBM = 4.29e12  # bytes/s, measured copy on an H200 (docs/performance.md)
PEAK = 989e12  # dense BF16 FLOP/s, datasheet; FP8 x FP8 twice that
POOL_BYTES = 1 << 30
COLD_BYTES = 200e6  # weights walked over by one replay, where copies fit


@dataclass(frozen=True)
class Case:
    model: str
    tp: int
    layer: str  # qkv, o, gate_up, down
    t: int
    n: int
    k: int
    dtype: str  # bf16, fp8 (weights; x 16-bit) or w8a8 (both)

    @property
    def fp8(self) -> bool:
        return self.dtype != "bf16"

    @property
    def w8a8(self) -> bool:
        return self.dtype == op.W8A8

    @property
    def epilogue(self) -> str:
        if self.layer == "gate_up":
            return "SiluMul"
        return "Residual" if self.tp == 1 and self.layer in ("o", "down") else "Store"

    @property
    def key(self) -> dict:
        return {"t": self.t, "n": self.n, "k": self.k, "weight_dtype": self.dtype}

    @property
    def flops(self) -> float:
        return 2.0 * self.t * self.n * self.k

    @property
    def roof_us(self) -> float:
        """The slower of reading the weights once and the tensor cores."""
        peak = PEAK * (2 if self.w8a8 else 1)
        return 1e6 * max(self.n * self.k * (1 if self.fp8 else 2) / HBM, self.flops / peak)


def cases(models: list[tuple[str, int]], tokens: list[int], dtypes: list[str]) -> list[Case]:
    found = []
    for name, tp in models:
        for t in tokens:
            for layer, (n, k) in linear_shapes(name, tp).items():
                found += [Case(name, tp, layer, t, n, k, dt) for dt in dtypes]
    return found


class Pool:
    """Random weights of both kinds, cut into as many distinct copies as fit."""

    def __init__(self, device: str):
        generator = torch.Generator(device).manual_seed(0)
        elements = POOL_BYTES // 2
        self.bf16 = torch.empty(elements, dtype=torch.bfloat16, device=device)
        self.bf16.normal_(generator=generator).mul_(0.02)
        self.fp8 = torch.empty(elements, dtype=torch.float8_e4m3fn, device=device)
        for i in range(0, elements, 1 << 26):
            part = torch.randn(min(1 << 26, elements - i), device=device, generator=generator)
            self.fp8[i : i + part.numel()] = (part * 40).to(torch.float8_e4m3fn)

    def weights(self, case: Case) -> list[torch.Tensor]:
        pool = self.fp8 if case.fp8 else self.bf16
        size = case.n * case.k
        copies = min(16, pool.numel() // size, 1 + int(COLD_BYTES / (size * pool.element_size())))
        return [pool[i * size : (i + 1) * size].view(case.n, case.k) for i in range(copies)]


class Problem:
    """Inputs, outputs and the fp32 reference of one case."""

    def __init__(self, case: Case, pool: Pool, device: str):
        self.case, self.w = case, pool.weights(case)
        t, n, k = case.t, case.n, case.k
        self.x = torch.randn(t, k, device=device).bfloat16()
        self.x_scale = None
        if case.w8a8:
            self.x, self.x_scale = quantize_rows_ref(self.x)
        self.scale = torch.rand(n, device=device).add_(0.5).mul_(5e-4) if case.fp8 else None
        self.bias = torch.randn(n, device=device).bfloat16() if case.layer == "qkv" else None
        self.residual = torch.randn(t, n, device=device).bfloat16()
        self.out = torch.empty(
            t, n // 2 if case.epilogue == "SiluMul" else n, dtype=torch.bfloat16, device=device
        )
        self.epilogue = epilogue(case.epilogue, self.residual, self.out)
        y = self.x.float() @ self.w[0].float().t()
        y = y if self.x_scale is None else y * self.x_scale[:, None]
        y = y if self.scale is None else y * self.scale
        y = y if self.bias is None else y + self.bias.float()
        y = silu_mul_ref(y) if case.epilogue == "SiluMul" else y
        self.want = y + self.residual.float() if case.epilogue == "Residual" else y

    def call(self, config: op.GemmConfig, workspace: op.GemmWorkspace, w: torch.Tensor) -> None:
        op.gemm(
            self.x, w, self.epilogue, scale=self.scale, bias=self.bias, x_scale=self.x_scale,
            config=config, workspace=workspace,
        )  # fmt: skip

    def error(self, config: op.GemmConfig, workspace: op.GemmWorkspace) -> float:
        """RMS of the error over RMS of the result; NaN if anything was left unwritten."""
        self.out.fill_(float("nan"))
        self.call(config, workspace, self.w[0])
        return ((self.out.float() - self.want).norm() / self.want.norm()).item()


def walk_us(function, weights: list[torch.Tensor], estimate_us: float, stop_us: float) -> float:
    """Median time of one call, us: a graph of about 300 us walks over `weights`, again and again."""
    rounds = max(1, round(300.0 / (estimate_us * len(weights))))

    def body() -> None:
        for _ in range(rounds):
            for w in weights:
                function(w)

    return graph_us(body, rounds * len(weights), stop_us)


def library_us(problem: Problem) -> dict[str, float]:
    """cuBLAS on the same shape, plain Store: BF16, and for FP8 weights also its FP8 x FP8 (W8A8)
    kernel."""
    case, x = problem.case, problem.x
    out = torch.empty(case.t, case.n, dtype=torch.bfloat16, device=x.device)
    size = case.n * case.k
    weights = [w.bfloat16() if case.fp8 else w for w in problem.w[: max(1, int(3e8 / size))]]
    wide = x.bfloat16()
    times = {
        "cublas": walk_us(lambda w: torch.mm(wide, w.t(), out=out), weights, case.roof_us, 1e9)
    }
    if problem.scale is not None:
        x8 = x.to(torch.float8_e4m3fn)
        rows, columns = torch.ones(case.t, 1, device=x.device), problem.scale.view(1, -1)
        if problem.x_scale is not None:
            rows = problem.x_scale.view(-1, 1)

        def scaled(w: torch.Tensor) -> None:
            torch._scaled_mm(
                x8, w.t(), rows, columns, out_dtype=torch.bfloat16, use_fast_accum=True
            )

        try:
            times["scaled_mm"] = walk_us(scaled, problem.w, case.roof_us, 1e9)
        except Exception as e:
            print(f"  torch._scaled_mm: {str(e).splitlines()[0][:100]}")
    return times


def measure(case: Case, good: set[Variant], pool: Pool, rows: Rows, device: str) -> dict | None:
    """Time the case's candidates; add its row; return its cache entry."""
    problem = Problem(case, pool, device)
    sm_count = torch.cuda.get_device_properties(0).multi_processor_count
    wanted = gemm_space.candidates(case.t, case.n, case.k, case.dtype, sm_count)
    wanted += promoted(case)
    wanted.append(op.heuristic(case.t, case.n, case.k, case.dtype, sm_count))
    timed: list[tuple[float, op.GemmConfig]] = []
    errors: dict[op.GemmConfig, float] = {}
    best = float("inf")
    # Prefill at TP > 1 sends these rows to their owners (epilogue.Scatter), which the library cannot.
    scattered = case.tp > 1 and case.layer in ("o", "down") and case.t >= 64
    for config in dict.fromkeys(wanted):
        if scattered if config.kernel == "cublas" else variant(case, config) not in good:
            continue
        sizes = op.workspace_sizes(config, case.t, case.n, type(problem.epilogue))
        workspace = op.workspace(sizes, torch.bfloat16, device)
        error = errors[config] = problem.error(config, workspace)
        if not error < tolerance(config, case.epilogue, case.k):
            print(
                f"  WRONG {case.layer} T={case.t} {short(config)}: relative RMS error {error:.2e}"
            )
            continue
        us = walk_us(lambda w: problem.call(config, workspace, w), problem.w,  # noqa: B023
                      min(best, 4 * case.roof_us), 3 * best)  # fmt: skip
        if config.promote:  # what exact sums cost: shown, never kept
            print(f"  {short(config)}: {us:.1f} us, relative RMS error {error:.2e}")
            continue
        timed.append((us, config))
        best = min(best, us)
    if not timed:
        print(f"  no candidate ran for {case}")
        return None
    timed.sort(key=lambda item: item[0])
    library = library_us(problem)
    us, config = timed[0]
    if case.w8a8:
        print(f"  {short(config)}: {us:.1f} us, relative RMS error {errors[config]:.2e}")
    split, whole = (
        next((item for item in timed if (item[1].tail > 1) is wished), None)
        for wished in (True, False)
    )
    if split and whole:
        print(
            f"  last wave split: {short(split[1])} {split[0]:.1f} us, error {errors[split[1]]:.1e}; "
            f"not: {short(whole[1])} {whole[0]:.1f} us ({whole[0] / split[0] - 1:+.1%})"
        )
    heuristic_us = next((u for u, c in timed if c == wanted[-1]), float("nan"))
    triton_us, triton_config = next(
        ((u, c) for u, c in timed if c.kernel != "cublas"), (float("nan"), None)
    )
    quantization = case.dtype if case.fp8 else "none"
    rows.add(
        "gemm_us", triton_us, "us", model=case.model, tp=case.tp, rows=case.t, quantization=quantization,
        algorithm=f"{case.layer} {case.n}x{case.k}", share=case.roof_us / triton_us,
        baseline={"name": "cublas bf16 store", "value": float(f"{library['cublas']:.5g}")},
    )  # fmt: skip
    print(
        f"{case.model[8:]:>4} {case.tp} {case.layer:8}{case.n:6}x{case.k:<6}{case.dtype:>5}{case.t:5} "
        f"{triton_us:8.1f} {case.flops / triton_us / 1e6:5.0f} {case.roof_us / triton_us:5.0%} "
        f"{library['cublas']:8.1f} {library.get('scaled_mm', float('nan')):8.1f} "
        f"{heuristic_us / us:5.2f} {config.kernel:7} {short(triton_config)}",
        flush=True,
    )
    return {
        "config": asdict(config),
        "us": float(f"{us:.4g}"),
        "runner_up": {"config": short(timed[1][1]), "us": float(f"{timed[1][0]:.4g}")}
        if len(timed) > 1
        else None,
        "date": time.strftime("%Y-%m-%d"),
    }


def short(config: op.GemmConfig | None) -> str:
    """256x128x64 w8 s4 swap split2, in tokens x weight rows x K."""
    if config is None or config.kernel == "cublas":
        return "cublas"
    text = f"{config.block_t}x{config.block_n}x{config.block_k} w{config.warps} s{config.stages}"
    text += " async" * (config.kernel == "async") + " w8a8" * (config.kernel == op.W8A8)
    text += " promoted" * config.promote
    text += " swap" * config.swap + f" split{config.split_k}" * (config.split_k > 1)
    return text + f" tail{config.tail}" * (config.tail > 1)


def promoted(case: Case) -> list[op.GemmConfig]:
    """W8A8 with blocks of K summed in fp32, to see what it costs."""
    square = op.GemmConfig(op.W8A8, 128, 128, 128, warps=8, stages=3, promote=True)
    return [square] if case.w8a8 else []


def variant(case: Case, config: op.GemmConfig) -> Variant:
    return Variant(config, case.fp8, case.epilogue, case.layer == "qkv")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: see bench.deployment."""
    parser = Parser(prog="python -m bench.gemm", description=__doc__)
    parser.add_argument("--models", type=shapes, default="qwen2.5-72b/2,qwen2.5-7b/1,qwen2.5-72b/8")
    parser.add_argument(
        "--tokens", type=numbers, default="512,64,2048,16", help="of prefill, comma-separated"
    )
    parser.add_argument(
        "--dtypes",
        type=choices("bf16", "fp8", op.W8A8),
        default="bf16,fp8,w8a8",
        help="of the weights, comma-separated: bf16, fp8, w8a8",
    )
    parser.add_argument("--time-limit", type=float, default=150.0, help="seconds")
    parser.add_argument("--processes", type=int, default=min(12, os.cpu_count() or 1))
    return script(parser, measure_all, argv)


def measure_all(args: argparse.Namespace) -> int:
    """Check every variant, time every case; the exit code."""
    begin = time.perf_counter()
    device = "cuda"
    properties = torch.cuda.get_device_properties(0)
    choose.set_target(properties.name, properties.multi_processor_count)
    torch.backends.cuda.matmul.allow_tf32 = False
    work = cases(args.models, args.tokens, args.dtypes)
    variants: dict[Variant, None] = {}
    for case in work:
        found = gemm_space.candidates(
            case.t, case.n, case.k, case.dtype, properties.multi_processor_count
        )
        found += promoted(case)
        found.append(op.heuristic(case.t, case.n, case.k, case.dtype))
        variants.update({variant(case, c): None for c in found if c.kernel != "cublas"})
    good = check_all(list(variants), args.processes, limit_s=args.time_limit * 0.5)
    print(
        f"{len(good)} of {len(variants)} kernel variants right, {time.perf_counter() - begin:.0f} s"
    )
    print("model tp layer  N x K          dtype   T  triton us TFLOP/s roof cublas us scaled_mm "
          "heuristic/best, best kernel, best triton config (T x N x K)")  # fmt: skip
    pool, rows = Pool(device), Rows("gemm")
    entries: dict[str, dict] = {}
    out = Path(os.environ.get("OUT", "out"))
    cache = out / "autotune_cache" / choose.gpu_slug(properties.name) / "gemm.json"
    left = len(work)
    for case in work:
        if time.perf_counter() - begin > args.time_limit:
            print(f"time limit: {left} cases left out")
            break
        left -= 1
        try:
            entry = measure(case, good, pool, rows, device)
        except torch.cuda.OutOfMemoryError as e:
            print(f"  {case}: {str(e).splitlines()[0][:100]}")
            continue
        if entry:
            entries[choose.key_string("gemm", case.key)] = entry
            cache_file.save(cache, entries, choose.metadata("gemm"), replace=True)
    print(json.dumps({"cases": len(entries), "seconds": round(time.perf_counter() - begin, 1)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
