"""The W8A8 GEMM and the quantisation in front of it, against fp64 on the very values that are multiplied."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine.errors import EngineError

FP8 = torch.float8_e4m3fn
HOPPER_SUM = (
    2.0**-13
)  # error of one of the K / 32 additions, relative to the running sum (gemm_kernel.py)


def _config(**changes):
    from engine.kernels.gemm import GemmConfig

    small = GemmConfig("w8a8", block_t=64, block_n=64, block_k=64, warps=4, stages=3, group=2)
    return replace(small, **changes)


def _inputs(t: int, n: int, k: int, device: str):
    """x8, x_scale, w8, scale of order-1 outputs; both sides hold subnormals and both signs."""
    x8 = (torch.randn(t, k) * 60).clamp(-448, 448).to(FP8)
    x8[:, : k // 8] = (torch.randn(t, k // 8) * 2.0**-7).to(FP8)
    w8 = (torch.randn(n, k) * 40).clamp(-448, 448).to(FP8)
    x_scale, scale = torch.rand(t) + 0.5, (torch.rand(n) + 0.5) / (2400 * k**0.5)
    return tuple(v.to(device) for v in (x8, x_scale, w8, scale))


def _want(x8, x_scale, w8, scale, bias=None):
    y = x8.double() @ w8.double().t() * x_scale.double()[:, None] * scale.double()
    return y if bias is None else y + bias.double()


def _poison(*shape: int, dtype, device):
    return torch.full(shape, float("nan"), dtype=dtype, device=device)


def _close(got: torch.Tensor, want: torch.Tensor, k: int, magnitude: float = 1.0) -> None:
    """One rounding of the result, plus K / 32 sums of HOPPER_SUM each, all of one sign at worst.

    In the interpreter sums are fp32, and K * 2^-24 is far below that; the card is why it is here.
    """
    assert not got.isnan().any()
    step = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 0.0}[got.dtype]
    sums = 1e-5 + (k / 32 * HOPPER_SUM if got.is_cuda else 0.0)
    # A running sum may be several times its end: of order `magnitude`, with the walk's reserve of 4.
    error = (got.double() - want).abs()
    assert (error <= step * want.abs() + sums * (want.abs() + 4 * magnitude)).all(), error.max()


@pytest.mark.parametrize("tma", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("t", "n", "k"), [(130, 80, 208), (33, 200, 144)])
def test_store_with_bias_on_ragged_sizes(device, t, n, k, dtype, tma) -> None:
    from engine.kernels.gemm import Store, gemm

    x8, x_scale, w8, scale = _inputs(t, n, k, device)
    bias = torch.randn(n).bfloat16().to(device)
    out = _poison(t, n, dtype=dtype, device=device)
    gemm(x8, w8, Store(out), scale=scale, bias=bias, x_scale=x_scale, config=_config(tma=tma))
    _close(out, _want(x8, x_scale, w8, scale, bias), k, magnitude=2.0)


def test_odd_k_takes_the_pointer_path(device: str) -> None:
    from engine.kernels.gemm import Store, gemm

    x8, x_scale, w8, scale = _inputs(20, 50, 131, device)
    out = _poison(20, 50, dtype=torch.float32, device=device)
    gemm(x8, w8, Store(out), scale=scale, x_scale=x_scale, config=_config())
    _close(out, _want(x8, x_scale, w8, scale), 131)


@pytest.mark.parametrize("in_place", [False, True])
def test_residual(device: str, in_place: bool) -> None:
    from engine.kernels.gemm import Residual, gemm

    x8, x_scale, w8, scale = _inputs(72, 144, 144, device)
    residual = (torch.randn(72, 144) * 8).bfloat16().to(device)
    want = residual.double() + _want(x8, x_scale, w8, scale)
    out = residual if in_place else _poison(72, 144, dtype=torch.bfloat16, device=device)
    gemm(x8, w8, Residual(residual, out), scale=scale, x_scale=x_scale, config=_config())
    _close(out, want, 144)


def test_silu_mul(device: str) -> None:
    from engine.kernels.gemm import SiluMul, gemm
    from engine.kernels.silu import silu_mul_ref

    x8, x_scale, w8, scale = _inputs(72, 144, 208, device)
    out = _poison(72, 72, dtype=torch.bfloat16, device=device)
    gemm(x8, w8, SiluMul(out), scale=scale * 3, x_scale=x_scale, config=_config())
    _close(out, silu_mul_ref(_want(x8, x_scale, w8, scale * 3)), 208, magnitude=20.0)


def test_split_k_twice_on_one_workspace(device: str) -> None:
    from engine.kernels.gemm import Residual, gemm, workspace, workspace_sizes

    config = _config(split_k=3)
    x8, x_scale, w8, scale = _inputs(72, 100, 464, device)
    residual = torch.randn(72, 100).bfloat16().to(device)
    want = residual.double() + _want(x8, x_scale, w8, scale)
    scratch = workspace(workspace_sizes(config, 72, 100, Residual), torch.bfloat16, device)
    scratch.partials.fill_(float("nan"))
    results = []
    for _ in range(2):
        out = _poison(72, 100, dtype=torch.bfloat16, device=device)
        gemm(
            x8, w8, Residual(residual, out), scale=scale, x_scale=x_scale, config=config,
            workspace=scratch,
        )  # fmt: skip
        _close(out, want, 464)
        results.append(out)
    assert torch.equal(*results)
    assert not scratch.tickets.any()


def test_padding_rows_do_not_change_real_rows(device: str) -> None:
    """From the quantisation on: also NaN and infinity below the request stay where they are."""
    from engine.kernels.gemm import Store, gemm

    _, _, w8, scale = _inputs(1, 80, 320, device)
    x = torch.randn(80, 320).bfloat16().to(device)
    outs = []
    for filler in (0.0, 1e4, float("nan"), float("inf")):
        x[21:] = filler
        x8, x_scale = _quantized(x)
        out = _poison(80, 80, dtype=torch.bfloat16, device=device)
        gemm(x8, w8, Store(out), scale=scale, x_scale=x_scale, config=_config())
        outs.append(out[:21].clone())
        assert out[21:].isfinite().all() == (filler in (0.0, 1e4))
    assert all(torch.equal(outs[0], other) for other in outs)


@pytest.mark.parametrize(("t", "n", "k"), [(128, 128, 3584), (64, 64, 8192)])
def test_heuristic_on_the_real_k(device: str, t: int, n: int, k: int) -> None:
    from engine.kernels.gemm import Store, gemm, heuristic, workspace, workspace_sizes

    config = heuristic(t, n, k, "w8a8", sm_count=4)
    assert config.kernel == "w8a8"
    x8, x_scale, w8, scale = _inputs(t, n, k, device)
    out = _poison(t, n, dtype=torch.bfloat16, device=device)
    scratch = workspace(workspace_sizes(config, t, n, Store), torch.bfloat16, device)
    gemm(x8, w8, Store(out), scale=scale, x_scale=x_scale, config=config, workspace=scratch)
    _close(out, _want(x8, x_scale, w8, scale), k)


@pytest.mark.parametrize("promote", [False, True])
@pytest.mark.parametrize("k", [3584, 8192])
def test_sums_of_the_tensor_cores(device: str, k: int, promote: bool) -> None:
    """RMS over RMS: the random walk's 0.08 % at K = 8192 or, all truncated one way, 0.8 % (allowed: twice that);
    promoted every 128 products 4 additions of 2^-13: 0.02 %, at most 0.05 %."""
    from engine.kernels.gemm import Store, gemm

    t, n = (128, 256) if device == "cuda" else (64, 16)
    x8, x_scale, w8, scale = _inputs(t, n, k, device)
    out = _poison(t, n, dtype=torch.float32, device=device)
    config = _config(block_k=128, promote=promote)
    gemm(x8, w8, Store(out), scale=scale, x_scale=x_scale, config=config)
    want = _want(x8, x_scale, w8, scale)
    error = ((out.double() - want).norm() / want.norm()).item()
    print(f"K={k} promote={promote}: relative RMS error {error:.1e}")
    assert error < (5e-4 if promote else k / 8192 * 1.6e-2)


def test_a_configuration_for_the_other_kind_of_x_is_replaced(device: str) -> None:
    from engine.kernels.gemm import GemmConfig, Store, gemm

    x8, x_scale, w8, scale = _inputs(16, 64, 128, device)
    out = _poison(16, 64, dtype=torch.bfloat16, device=device)
    gemm(x8, w8, Store(out), scale=scale, x_scale=x_scale, config=GemmConfig("async"))
    want = _want(x8, x_scale, w8, scale)
    _close(out, want, 128)
    x = (x8.float() * x_scale[:, None]).bfloat16()
    out = _poison(16, 64, dtype=torch.bfloat16, device=device)
    gemm(x, w8, Store(out), scale=scale, config=_config())
    exact = x.double() @ w8.double().t() * scale.double()
    _close(out, exact, 0)


def test_errors(device: str) -> None:
    from engine.kernels.gemm import Store, gemm

    x8, x_scale, w8, scale = _inputs(16, 64, 128, device)
    out = torch.empty(16, 64, dtype=torch.bfloat16, device=device)
    with pytest.raises(EngineError, match="x_scale"):
        gemm(x8, w8, Store(out), scale=scale, config=_config())
    with pytest.raises(EngineError, match="x_scale"):
        gemm(x8, w8, Store(out), x_scale=x_scale, config=_config())
    with pytest.raises(EngineError, match="float8"):
        gemm(x8, w8.float(), Store(out), scale=scale, x_scale=x_scale, config=_config())


# Quantisation


def _quantized(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    from engine.kernels.quantize_rows import quantize_rows

    x8 = torch.full(x.shape, 77, dtype=torch.uint8, device=x.device).view(FP8)
    scale = _poison(x.shape[0], dtype=torch.float32, device=x.device)
    quantize_rows(x, x8, scale)
    return x8, scale


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("k", [80, 131, 3584])
def test_quantize_rows_is_the_reference_bit_for_bit(device: str, k: int, dtype) -> None:
    from engine.kernels.quantize_rows import quantize_rows_ref

    x = torch.randn(9, k) * torch.exp2(torch.randint(-12, 6, (9, 1)).float())
    x[1, :] *= torch.exp2(torch.randint(-14, 1, (k,)).float())  # from full range to subnormals
    x[2] = 0
    x[3] = -x[3].abs().max()
    x = x.to(dtype).to(device)
    x8, scale = _quantized(x)
    want8, want_scale = quantize_rows_ref(x)
    assert torch.equal(scale, want_scale)
    assert torch.equal(x8.view(torch.uint8), want8.view(torch.uint8))
    assert (x8[2].float() == 0).all() and scale[2] > 0
    back = x8.float() * scale[:, None]
    # Half a step of 3 mantissa bits, or half a subnormal step of 2^-9 of the scale.
    bound = (x.float().abs() * 2.0**-4).maximum(scale[:, None] * 2.0**-10) * (1 + 1e-5)
    assert ((back - x.float()).abs() <= bound).all()
    assert (back.abs().amax(1)[3:] >= x.float().abs().amax(1)[3:] * (1 - 1e-6)).all()


def test_nan_and_infinity_are_not_hidden(device: str) -> None:
    x = torch.randn(3, 64).bfloat16()
    x[0, 5], x[1, 7] = float("nan"), float("inf")
    x8, scale = _quantized(x.to(device))
    back = x8.float() * scale[:, None]
    assert back[0].isnan().any() and back[1].isnan().any() and back[2].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norm_and_quantisation_in_one_pass_are_the_two_kernels_bit_for_bit(device, dtype) -> None:
    from engine.kernels.norm import rmsnorm
    from engine.kernels.quantize_rows import rmsnorm_quantize, rmsnorm_quantize_ref

    x = (torch.randn(7, 1000) * 3).to(dtype).to(device)
    x[4] = 0
    weight = (1 + 0.2 * torch.randn(1000)).to(dtype).to(device)
    normed = _poison(7, 1000, dtype=dtype, device=device)
    rmsnorm(x, weight, normed, eps=1e-5)
    two8, two_scale = _quantized(normed)
    x8 = torch.full(x.shape, 77, dtype=torch.uint8, device=device).view(FP8)
    scale = _poison(7, dtype=torch.float32, device=device)
    rmsnorm_quantize(x, weight, x8, scale, eps=1e-5)
    assert torch.equal(scale, two_scale)
    assert torch.equal(x8.view(torch.uint8), two8.view(torch.uint8))
    want8, want_scale = rmsnorm_quantize_ref(x, weight, 1e-5)
    # The sum of squares may round otherwise: one 16-bit step of the norm, hence one e4m3 step.
    torch.testing.assert_close(scale, want_scale, rtol=2.0**-7, atol=0)
    back, want = x8.float() * scale[:, None], want8.float() * want_scale[:, None]
    assert ((back - want).abs() <= 2.0**-3 * want.abs() + want_scale[:, None] * 2.0**-9).all()


def test_quantisation_compiled_for_the_card() -> None:
    """16-byte loads, no spills, and the conversion that rounds to nearest even and saturates."""
    from tests.kernels.compile_sm90 import run_compile_checks

    reports = run_compile_checks("tests.kernels.quantize_compile_cases")
    assert len(reports) == 6
    for name, report in reports.items():
        assert report["spill_store_bytes"] == report["local_accesses"] == 0, name
        assert report["global_loads"]["128"] >= 1 and report["registers"] <= 128, name
        assert "cvt.rn.satfinite.e4m3x2.f32" in report["ptx"], name
