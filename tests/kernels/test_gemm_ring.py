"""The decode GEMV's ring as a kernel of the prefill GEMM: up to 16 rows, and the heuristic's kernel for the rest.

The interpreter has no Gluon, so the GEMV's plain kernel runs there; the ring itself at 16 rows: test_gemv_ring.py.
"""

from __future__ import annotations

import pytest
import torch

from engine.kernels import gemm as module
from engine.kernels.epilogue import Residual, Scatter, SiluMul, Store
from engine.kernels.gemm import GemmConfig, gemm, linear_ref, workspace, workspace_sizes
from engine.kernels.gemv_config import GemvConfig
from engine.kernels.quantize_rows import quantize_rows_ref
from engine.kernels.silu import silu_mul_ref
from tests.kernels.compile_sm90 import run_compile_checks

FP8 = torch.float8_e4m3fn
N, K = 48, 1040  # ragged for every tile here


def ring(weight: torch.dtype) -> GemmConfig:
    size = weight.itemsize
    return GemmConfig(kernel="ring", ring=GemvConfig("ring", 32, 512 // size, 4, 3, 2, 4, 1))


class Case:
    """Operands with outputs of order 1 (gate and up of order 3), as the outputs stand after `gemm`: poisoned before."""

    def __init__(self, t, device, weight=FP8, *, n=N, k=K, bias=True, dtype=torch.bfloat16):
        self.x = torch.randn(t, k).to(dtype).to(device)
        self.w = (torch.randn(n, k) * (40 if weight == FP8 else k**-0.5)).to(weight).to(device)
        scale = (torch.rand(n, device=device) + 0.5) / (40 * k**0.5)
        self.scale = scale if weight == FP8 else None
        self.bias = torch.randn(n).to(dtype).to(device) if bias else None
        self.residual = (torch.randn(t, n) * 8).to(dtype).to(device)
        self.t, self.n, self.device, self.dtype = t, n, device, dtype

    def poison(self, columns, dtype=None):
        size = self.t, columns
        return torch.full(size, float("nan"), dtype=dtype or self.dtype, device=self.device)

    def epilogue(self, kind):
        if kind == "Residual":
            return Residual(self.residual, self.poison(self.n))
        return (
            SiluMul(self.poison(self.n // 2)) if kind == "SiluMul" else Store(self.poison(self.n))
        )

    def run(self, epilogue, config, **more):
        scratch = workspace(workspace_sizes(config, self.t, self.n, type(epilogue)), self.dtype,
                            self.device)  # fmt: skip
        gemm(
            self.x, self.w, epilogue, scale=self.scale, bias=self.bias, config=config,
            workspace=scratch, **more,
        )  # fmt: skip

    def check(self, epilogue, hopper=0.0):
        """One rounding of the result, and fp32 sums: 2^-24 K sum|x w| / K is below 1e-5 per unit of output.
        hopper: what the FP8 tensor cores' sums, short of fp32, may add (test_gemm_tail.py)."""
        double = [None if v is None else v.double() for v in (self.scale, self.bias)]
        y = linear_ref(self.x.double(), self.w.double(), *double)
        if isinstance(epilogue, Residual):
            y = self.residual.double() + y
        elif isinstance(epilogue, SiluMul):
            y = silu_mul_ref(y)
        step = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 0.0}
        out = epilogue.out
        assert not out.isnan().any()
        torch.testing.assert_close(out.double(), y, rtol=step[out.dtype] + 1e-5, atol=1e-4 + hopper)


@pytest.fixture
def gemvs(monkeypatch):
    """The configurations that the GEMV's launcher was called with."""
    seen, launch = [], module.gemv.gemv

    def spy(*args, **options):
        seen.append(options["config"])
        launch(*args, **options)

    monkeypatch.setattr(module.gemv, "gemv", spy)
    return seen


@pytest.mark.parametrize("weight", [FP8, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["Store", "Residual", "SiluMul"])
@pytest.mark.parametrize("t", [1, 5, 16])
def test_short_prompts_run_on_the_gemv(t, kind, weight, device, gemvs):
    case, config = Case(t, device, weight), ring(weight)
    epilogue = case.epilogue(kind)
    case.run(epilogue, config)
    case.check(epilogue)
    assert gemvs == [config.ring]


def test_fp16_in_place_without_bias(device, gemvs):
    case = Case(16, device, torch.float16, bias=False, dtype=torch.float16)
    epilogue = Residual(case.residual.clone(), case.residual)
    case.residual = epilogue.residual
    gemm(case.x, case.w, Residual(epilogue.out, epilogue.out), config=ring(torch.float16))
    case.check(epilogue)
    assert len(gemvs) == 1


def test_what_the_ring_cannot_do_runs_on_the_heuristics_kernel(device, gemvs):
    """In a workspace of the ring's size, though the heuristic splits K of this shape."""
    k = 2048
    assert module.heuristic(17, N, k, "fp8").split_k > 1
    rows = Case(17, device, k=k)
    wide, strided, unaligned, missing = (Case(16, device, k=k) for _ in range(4))
    unaligned.w = torch.empty(N * k + 1, device=device).to(FP8)[1:].view(N, k).copy_(unaligned.w)
    odd = Case(16, device, torch.bfloat16, k=1044)  # rows of W are no multiple of 16 bytes
    calls = [
        (rows, rows.epilogue("SiluMul"), ring(FP8)),
        (wide, Store(wide.poison(N, torch.float32)), ring(FP8)),
        (strided, Store(strided.poison(2 * N)[:, :N]), ring(FP8)),
        (unaligned, unaligned.epilogue("Store"), ring(FP8)),
        (odd, odd.epilogue("Residual"), ring(torch.bfloat16)),
        (missing, missing.epilogue("Store"), GemmConfig(kernel="ring")),
    ]
    for case, epilogue, config in calls:
        case.run(epilogue, config)
        case.check(epilogue)
    assert not gemvs


def test_rows_for_their_owners_and_fp8_rows_run_on_the_heuristics_kernel(device, gemvs):
    case = Case(16, device, k=2048)
    scatter = Scatter(case.poison(N), torch.zeros(1, dtype=torch.int64, device=device))
    case.run(scatter, ring(FP8))
    case.check(scatter)
    x, x_scale = quantize_rows_ref(case.x)
    case.x, store = x, Store(case.poison(N))
    case.run(store, ring(FP8), x_scale=x_scale)
    case.x = x.double() * x_scale.double()[:, None]
    case.check(store, hopper=2048 / 32 * 2.0**-13 * 4 if device == "cuda" else 0.0)
    assert not gemvs


@pytest.fixture(scope="module")
def reports():
    return run_compile_checks("tests.kernels.gemm_ring_cases")


def test_candidates_compile_without_spills_and_fit_the_multiprocessor(reports):
    assert len(reports) >= 30
    for name, r in reports.items():
        spilled = r["spill_store_bytes"] + r["spill_load_bytes"] + r["local_bytes"]
        assert spilled + r["local_accesses"] == 0, name
        assert r["registers"] <= 255 and r["shared_bytes"] <= 227 * 1024, name
        assert r["resident"] <= 65536, name


def test_weights_move_16_bytes_a_thread_to_the_tensor_cores(reports):
    for name, r in reports.items():
        assert set(r["async_copies"]) == {"128"}, name
        assert r["tensor_core"].get("HMMA", 0) > 0, name
