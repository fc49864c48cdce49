"""The prefill GEMM against an fp64 reference: tiles, operand order, split-K, FP8, epilogues, ragged
sizes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine.errors import EngineError

FP8 = torch.float8_e4m3fn


def _config(**changes):
    from engine.kernels.gemm import GemmConfig

    small = GemmConfig(block_t=32, block_n=64, block_k=64, warps=4, stages=3)
    return replace(small, **changes)


def _inputs(t: int, n: int, k: int, device: str, *, dtype=torch.bfloat16, fp8: bool = False):
    """x, w, scale, bias with outputs of order 1; w covers e4m3's subnormals and both signs."""
    x = torch.randn(t, k).to(dtype).to(device)
    w = torch.randn(n, k) / k**0.5
    if not fp8:
        return x, w.to(dtype).to(device), None, None
    scale = (torch.rand(n) + 0.5) / (40 * k**0.5)
    w8 = (torch.randn(n, k) * 40).clamp(-448, 448).to(FP8).to(device)
    w8[:, : k // 8] = (torch.randn(n, k // 8, device=device) * 2.0**-7).to(FP8)  # subnormal
    return x, w8, scale.to(device), torch.randn(n).to(dtype).to(device)


def _want(x, w, scale=None, bias=None):
    from engine.kernels.gemm import linear_ref

    double = [None if v is None else v.double() for v in (scale, bias)]
    return linear_ref(x.double(), w.double(), *double)


def _poison(*shape: int, dtype, device):
    return torch.full(shape, float("nan"), dtype=dtype, device=device)


def _close(got: torch.Tensor, want: torch.Tensor, magnitude: float = 1.0) -> None:
    """One rounding of the result plus fp32 accumulation of K <= 1000 terms of order `magnitude`.

    Accumulation: K * 2^-24 * sum|x w| / K ~ 1e-5 * magnitude (sum |x w| is about 0.64 sqrt(K) for
    our inputs).
    """
    assert not got.isnan().any()
    step = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 0.0}[got.dtype]
    torch.testing.assert_close(got.double(), want, rtol=step + 1e-5, atol=3e-5 * magnitude)


@pytest.mark.parametrize("tma", [True, False])
@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_store(device: str, dtype: torch.dtype, swap: bool, tma: bool) -> None:
    from engine.kernels.gemm import Store, gemm

    x, w, _, _ = _inputs(48, 80, 208, device, dtype=dtype)
    out = _poison(48, 80, dtype=dtype, device=device)
    gemm(x, w, Store(out), config=_config(swap=swap, tma=tma))
    _close(out, _want(x, w))


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize(("t", "n", "k"), [(16, 48, 80), (33, 100, 144), (80, 200, 392)])
def test_sizes_that_do_not_fill_tiles(device: str, t: int, n: int, k: int, swap: bool) -> None:
    from engine.kernels.gemm import Store, gemm

    x, w, _, _ = _inputs(t, n, k, device)
    bias = torch.randn(n).bfloat16().to(device)
    out = _poison(t, n, dtype=torch.float32, device=device)
    gemm(x, w, Store(out), bias=bias, config=_config(swap=swap, group=2))
    _close(out, _want(x, w, None, bias))


def test_odd_k_takes_the_pointer_path(device: str) -> None:
    from engine.kernels.gemm import Store, gemm

    x, w, _, _ = _inputs(17, 50, 131, device, dtype=torch.float16)  # rows not 16-byte aligned
    out = _poison(17, 50, dtype=torch.float16, device=device)
    gemm(x, w, Store(out), config=_config(tma=True))
    _close(out, _want(x, w))


def test_output_rows_may_be_strided(device: str) -> None:
    from engine.kernels.gemm import Store, gemm

    x, w, _, _ = _inputs(16, 64, 128, device)
    wide = _poison(16, 96, dtype=torch.bfloat16, device=device)
    gemm(x, w, Store(wide[:, 16:80]), config=_config())
    _close(wide[:, 16:80], _want(x, w))
    assert wide[:, :16].isnan().all() and wide[:, 80:].isnan().all()


@pytest.mark.parametrize("tma", [True, False])
@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fp8_weights(device: str, dtype: torch.dtype, swap: bool, tma: bool) -> None:
    from engine.kernels.gemm import Store, gemm

    x, w, scale, bias = _inputs(16, 96, 160, device, dtype=dtype, fp8=True)
    out = _poison(16, 96, dtype=dtype, device=device)
    gemm(x, w, Store(out), scale=scale, bias=bias, config=_config(swap=swap, tma=tma, block_t=16))
    _close(out, _want(x, w, scale, bias), magnitude=2.0)


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
def test_residual(device: str, in_place: bool, swap: bool) -> None:
    from engine.kernels.gemm import Residual, gemm

    x, w, scale, _ = _inputs(40, 72, 144, device, fp8=True)
    residual = (torch.randn(40, 72) * 8).bfloat16().to(device)
    want = residual.double() + _want(x, w, scale)
    out = residual if in_place else _poison(40, 72, dtype=torch.bfloat16, device=device)
    gemm(x, w, Residual(residual, out), scale=scale, config=_config(swap=swap))
    _close(out, want)


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("fp8", [False, True])
def test_silu_mul(device: str, fp8: bool, swap: bool) -> None:
    from engine.kernels.gemm import SiluMul, gemm
    from engine.kernels.silu import silu_mul_ref

    x, w, scale, _ = _inputs(20, 144, 208, device, fp8=fp8)
    x = x * 3
    out = _poison(20, 72, dtype=torch.bfloat16, device=device)
    gemm(x, w, SiluMul(out), scale=scale, config=_config(swap=swap))
    _close(out, silu_mul_ref(_want(x, w, scale)), magnitude=20.0)  # gate and up of order 3


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("split_k", [2, 3])
def test_split_k_twice_on_one_workspace(device: str, split_k: int, swap: bool) -> None:
    from engine.kernels.gemm import Residual, gemm, workspace, workspace_sizes

    config = _config(split_k=split_k, swap=swap)
    x, w, scale, bias = _inputs(40, 100, 336, device, fp8=True)
    residual = torch.randn(40, 100).bfloat16().to(device)
    want = residual.double() + _want(x, w, scale, bias)
    scratch = workspace(workspace_sizes(config, 40, 100, Residual), x.dtype, device)
    scratch.partials.fill_(float("nan"))
    results = []
    for _ in range(2):  # the tickets must be zero again for the second call
        out = _poison(40, 100, dtype=torch.bfloat16, device=device)
        gemm(
            x, w, Residual(residual, out), scale=scale, bias=bias, config=config, workspace=scratch
        )
        _close(out, want)
        results.append(out)
    assert torch.equal(*results)
    assert not scratch.tickets.any()


def test_split_k_without_a_workspace_runs_unsplit(device: str) -> None:
    from engine.kernels.gemm import Store, gemm

    x, w, _, _ = _inputs(16, 64, 256, device)
    whole, split = (_poison(16, 64, dtype=torch.bfloat16, device=device) for _ in range(2))
    gemm(x, w, Store(whole), config=_config())
    gemm(x, w, Store(split), config=_config(split_k=4))
    assert torch.equal(whole, split)


@pytest.mark.parametrize("split_k", [1, 3])
def test_padding_rows_do_not_change_real_rows(device: str, split_k: int) -> None:
    from engine.kernels.gemm import Store, gemm, workspace, workspace_sizes

    config = _config(split_k=split_k)
    x, w, _, _ = _inputs(48, 64, 320, device)
    scratch = workspace(workspace_sizes(config, 48, 64, Store), x.dtype, device)
    outs = []
    for filler in (0.0, 1e4):
        x[21:] = filler
        out = _poison(48, 64, dtype=torch.bfloat16, device=device)
        gemm(x, w, Store(out), config=config, workspace=scratch)
        outs.append(out[:21].clone())
    assert torch.equal(*outs)
    _close(outs[0], _want(x[:21], w))


@pytest.mark.parametrize(("t", "n", "k"), [(16, 64, 8192), (64, 16, 3696), (16, 48, 14784)])
@pytest.mark.parametrize("weight_dtype", ["bf16", "fp8"])
def test_heuristic_on_the_real_k(device: str, t: int, n: int, k: int, weight_dtype: str) -> None:
    """Full K of the 72B shards, few N; also what the heuristic splits when the grid is small."""
    from engine.kernels.gemm import Store, gemm, heuristic, workspace, workspace_sizes

    config = heuristic(t, n, k, weight_dtype, sm_count=8)
    x, w, scale, _ = _inputs(t, n, k, device, fp8=weight_dtype == "fp8")
    out = _poison(t, n, dtype=torch.bfloat16, device=device)
    scratch = workspace(workspace_sizes(config, t, n, Store), x.dtype, device)
    gemm(x, w, Store(out), scale=scale, config=config, workspace=scratch)
    _close(out, _want(x, w, scale), magnitude=4.0)  # K up to 15 times longer


@pytest.mark.parametrize("epilogue", ["Store", "Residual", "SiluMul"])
def test_library_route(device: str, epilogue: str) -> None:
    from engine.kernels import gemm as module
    from engine.kernels.silu import silu_mul_ref

    config = _config(kernel="cublas")
    x, w, _, _ = _inputs(24, 96, 128, device)
    bias = torch.randn(96).bfloat16().to(device)
    y = _want(x, w, None, None if epilogue == "Residual" else bias)
    residual = torch.randn(24, 96).bfloat16().to(device)
    out = _poison(24, 48 if epilogue == "SiluMul" else 96, dtype=x.dtype, device=device)
    sizes = module.workspace_sizes(config, 24, 96, getattr(module, epilogue))
    scratch = module.workspace(sizes, x.dtype, device)
    if epilogue == "Residual":
        module.gemm(x, w, module.Residual(residual, out), config=config, workspace=scratch)
        # cuBLAS may round the product to 16 bits before it adds the residual (seen on an H200).
        want = residual.double() + y
        bound = 2.0**-8 * (want.abs() + y.abs()) + 6e-5
        assert ((out.double() - want).abs() <= bound).all()
    elif epilogue == "Store":
        module.gemm(x, w, module.Store(out), bias=bias, config=config, workspace=scratch)
        _close(out, y, magnitude=2.0)
    else:
        module.gemm(x, w, module.SiluMul(out), bias=bias, config=config, workspace=scratch)
        # The pairs are rounded to bf16 before the gate: up to 2^-9 relative on each of gate and up,
        # and the derivative of silu is at most 1.1.
        want = silu_mul_ref(y)
        bound = 2.0**-9 * (want.abs() + 1.1 * y[:, 0::2].abs() * y[:, 1::2].abs())
        assert ((out.double() - want).abs() <= bound + 2.0**-8 * want.abs() + 1e-4).all()


@pytest.mark.parametrize("epilogue", ["Store", "Residual", "SiluMul"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("block_t", "block_n", "warps", "split_k", "k"),
    [(16, 64, 4, 1, 1040), (64, 64, 4, 3, 1040), (128, 128, 8, 2, 400), (256, 128, 8, 1, 80)],
)
def test_async_kernel(
    device: str, block_t: int, block_n: int, warps: int, split_k: int, k: int, dtype, epilogue: str
) -> None:
    """gemm_async.py on the card (the interpreter has no Gluon: there the plain kernel runs in its
    place)."""
    from engine.kernels import gemm as module
    from engine.kernels.silu import silu_mul_ref

    config = _config(
        kernel="async", block_t=block_t, block_n=block_n, warps=warps, split_k=split_k, stages=4
    )
    t, n = 80, 208
    x, w, scale, bias = _inputs(t, n, k, device, dtype=dtype, fp8=True)
    residual = torch.randn(t, n).to(dtype).to(device)
    scratch = module.workspace(module.workspace_sizes(config, t, n, module.Store), dtype, device)
    scratch.partials.fill_(float("nan"))
    y = _want(x, w, scale, bias)
    want = {"Store": y, "Residual": residual.double() + y, "SiluMul": silu_mul_ref(y)}[epilogue]
    results = []
    for _ in range(2):
        out = _poison(t, n // 2 if epilogue == "SiluMul" else n, dtype=dtype, device=device)
        arguments = (residual, out) if epilogue == "Residual" else (out,)
        module.gemm(
            x, w, getattr(module, epilogue)(*arguments), scale=scale, bias=bias, config=config,
            workspace=scratch,
        )  # fmt: skip
        _close(out, want, magnitude=4.0)
        results.append(out)
    assert torch.equal(*results)


def test_library_route_falls_back_for_fp8(device: str) -> None:
    """Unsplit, as a workspace of the library's size has no partial sums."""
    from engine.kernels.gemm import Store, gemm, heuristic, workspace, workspace_sizes

    config, k = _config(kernel="cublas"), 2048
    assert heuristic(16, 64, k, "fp8").split_k > 1
    x, w, scale, bias = _inputs(16, 64, k, device, fp8=True)
    own = workspace(workspace_sizes(config, 16, 64, Store), x.dtype, torch.device(device))
    for scratch in (None, own):
        out = _poison(16, 64, dtype=torch.bfloat16, device=device)
        gemm(x, w, Store(out), scale=scale, bias=bias, config=config, workspace=scratch)
        _close(out, _want(x, w, scale, bias), magnitude=4.0)


def test_errors_name_the_shapes(device: str) -> None:
    from engine.kernels.gemm import Store, gemm, workspace

    x, w, _, _ = _inputs(16, 64, 128, device)
    out = torch.empty(16, 64, dtype=torch.bfloat16, device=device)
    with pytest.raises(EngineError, match=r"\(16, 128\).*\(64, 120\)"):
        gemm(x, w[:, :120], Store(out), config=_config())
    with pytest.raises(EngineError, match="no object epilogue"):
        gemm(x, w, object(), config=_config())
    with pytest.raises(EngineError, match=r"torch.float32"):
        gemm(x.float(), w, Store(out), config=_config())
    with pytest.raises(EngineError, match="needs"):
        gemm(
            x,
            w,
            Store(out),
            config=_config(split_k=2),
            workspace=workspace((0, 0, 0), x.dtype, device),
        )


def test_linear_ref_against_plain_arithmetic() -> None:
    from engine.kernels.gemm import linear_ref

    x, w = torch.randn(3, 8, dtype=torch.float64), torch.randn(4, 8, dtype=torch.float64)
    scale, bias = torch.rand(4), torch.randn(4)
    want = torch.stack(
        [(x * w[i]).sum(-1) * scale[i].double() + bias[i].double() for i in range(4)], -1
    )
    torch.testing.assert_close(linear_ref(x, w, scale, bias), want)
    w8 = (w * 50).to(FP8)
    got = linear_ref(x.float(), w8, scale)
    torch.testing.assert_close(got, (x.float() @ w8.float().t()) * scale)
    assert linear_ref(x.bfloat16(), w8).dtype == torch.bfloat16
