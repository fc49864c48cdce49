"""Compile and check GEMM kernel variants in worker processes, so that a bad one dies alone.

A worker runs each variant on a small ragged shape against an fp32 reference and prints one JSON
line for it. The compiled kernels land in Triton's disk cache, where the main process finds them.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from engine.kernels import gemm as op
from engine.kernels.epilogue import Residual, SiluMul, Store
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
    library route rounds gate and up first; FP8 sums keep about 14 bits (gemm_fp8.py)."""
    if config.kernel == op.W8A8:
        return 2.5e-3 + k / 32 * 2.0**-14
    return 5e-3 if config.kernel == "cublas" and epilogue == "SiluMul" else 2.5e-3


def check(variant: Variant, device: str) -> float:
    """Relative RMS error on T=80, N=208, K=9 blocks + 16; run twice, the second must have the same
    bits."""
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
        epilogue = {
            "Store": Store(out), "Residual": Residual(residual, out), "SiluMul": SiluMul(out),
        }[variant.epilogue]  # fmt: skip
        op.gemm(
            x, w, epilogue, scale=scale, bias=bias, x_scale=x_scale, config=variant.config,
            workspace=workspace,
        )  # fmt: skip
        results.append(out)
    torch.cuda.synchronize()
    if not torch.equal(*results):
        return float("inf")
    return ((results[0].float() - want).norm() / want.norm()).item()


def check_all(variants: list[Variant], processes: int, limit_s: float) -> set[Variant]:
    """The variants that are right. A worker that dies is started again behind the variant it died
    on; after `limit_s` seconds what is left counts as bad. One printed line for each bad
    variant."""
    deadline = time.perf_counter() + limit_s
    queues = [variants[i::processes] for i in range(processes)]
    good: set[Variant] = set()
    with tempfile.TemporaryDirectory() as folder:
        jobs = [_Job(queue, Path(folder) / str(i)) for i, queue in enumerate(queues) if queue]
        while any([job.running(good) for job in jobs]):  # a list: every job is looked at each time
            if time.perf_counter() > deadline:
                for job in jobs:
                    job.stop(good)
                break
            time.sleep(0.1)
    return good


class _Job:
    """One worker process and the variants it still has to do."""

    def __init__(self, queue: list[Variant], path: Path):
        self.queue, self.path = queue, path
        self._start()

    def _start(self) -> None:
        self.path.write_text(json.dumps([asdict(v) for v in self.queue]))
        self.output = self.path.with_suffix(".out").open("w+")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "bench.gemm_workers", str(self.path)],
            stdout=self.output,
            stderr=subprocess.STDOUT,
        )

    def running(self, good: set[Variant]) -> bool:
        """Collect a finished worker's results; start it again if it died before the end of its
        queue."""
        if not self.queue:
            return False
        if self.process.poll() is None:
            return True
        last = self._collect(good)
        if (
            self.queue and "CUDA" not in last
        ):  # after a reported CUDA error the next variant is innocent
            print(f"  dropped {self.queue[0]}: its worker died: {last[:160]}")
            self.queue = self.queue[1:]
        if self.queue:
            self._start()
        return bool(self.queue)

    def _collect(self, good: set[Variant]) -> str:
        """Move finished variants from the queue to `good` or to the floor; returns the last line
        printed."""
        self.output.seek(0)
        lines = [line for line in self.output.read().splitlines() if line.strip()]
        done = [json.loads(line)["error"] for line in lines if line.startswith('{"error"')]
        for error, variant in zip(done, self.queue):
            if isinstance(error, float) and error < tolerance(
                variant.config, variant.epilogue, 9 * variant.config.block_k
            ):
                good.add(variant)
            else:
                print(f"  dropped {variant}: {error}")
        self.queue = self.queue[len(done) :]
        return lines[-1] if lines else ""

    def stop(self, good: set[Variant]) -> None:
        """Kill the worker; what it had not finished is dropped."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._collect(good)
        if self.queue:
            print(f"  dropped {len(self.queue)} variants: out of time, first {self.queue[0]}")
        self.queue = []


def main(path: str) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    for item in json.loads(Path(path).read_text()):
        variant = Variant(op.GemmConfig(**item.pop("config")), **item)
        try:
            error: float | str = check(variant, "cuda")
        except Exception as e:
            error = f"{type(e).__name__}: {str(e).strip().splitlines()[0][:160]}"
        print(json.dumps({"error": error}), flush=True)
        if isinstance(error, str) and "CUDA" in error:
            return  # the context is lost: a fresh process goes on behind this variant


if __name__ == "__main__":
    main(sys.argv[1])
