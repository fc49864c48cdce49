"""rmsnorm, embedding, gather_row, silu_mul and add against fp64 references."""

from __future__ import annotations

import pytest
import torch

DTYPES = [torch.bfloat16, torch.float16]
# One rounding of the result: half a unit of the last place, relative; fp32 arithmetic inside adds <
# 1e-5.
ROUNDING = {torch.bfloat16: 2.0**-8 + 1e-5, torch.float16: 2.0**-11 + 1e-5}


def _close(got: torch.Tensor, want: torch.Tensor) -> None:
    """got 16-bit, want fp64 from the same 16-bit inputs."""
    assert not got.isnan().any()
    tolerance = ROUNDING[got.dtype]
    # atol: fp16 results below 2^-14 are subnormal with a step of 2^-24.
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=2.0**-24)


def _poison(*shape: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=dtype, device=device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "hidden"), [(3, 80), (2, 3584), (1, 8192)])
def test_rmsnorm(device: str, dtype: torch.dtype, rows: int, hidden: int) -> None:
    from engine.kernels.norm import rmsnorm, rmsnorm_ref

    x = (torch.randn(rows, hidden) * 3).to(dtype).to(device)
    weight = (torch.rand(hidden) + 0.5).to(dtype).to(device)
    out = _poison(rows, hidden, dtype=dtype, device=device)
    rmsnorm(x, weight, out, eps=1e-6)
    _close(out, rmsnorm_ref(x.double(), weight.double(), 1e-6))


def test_rmsnorm_eps_counts_and_output_may_be_the_input(device: str) -> None:
    from engine.kernels.norm import rmsnorm, rmsnorm_ref

    x = (torch.randn(2, 96) * 1e-3).bfloat16().to(device)  # mean square 1e-6, as large as eps
    weight = torch.ones(96, dtype=torch.bfloat16, device=device)
    want = rmsnorm_ref(x.double(), weight.double(), 1e-6)
    rmsnorm(x, weight, x, eps=1e-6)
    _close(x, want)


@pytest.mark.parametrize("hidden", [96, 3584])
def test_embedding_by_token(device: str, hidden: int) -> None:
    from engine.kernels.embedding import embedding, embedding_ref

    table = torch.randn(50, hidden).bfloat16().to(device)
    tokens = torch.tensor([7, 0, 49, 1000, -3], dtype=torch.int32, device=device)
    out = _poison(5, hidden, dtype=torch.bfloat16, device=device)
    embedding(tokens, table, out)
    assert torch.equal(out, embedding_ref(tokens, table))
    assert torch.equal(out[3], table[49]) and torch.equal(out[4], table[0])


def test_embedding_by_slot_and_padding_row(device: str) -> None:
    from engine.kernels.embedding import embedding, embedding_ref

    table = torch.randn(50, 160).half().to(device)
    tokens = torch.tensor([5, 6, 7, 8], dtype=torch.int32, device=device)
    row_slots = torch.tensor([3, -1, 1], dtype=torch.int32, device=device)
    out = _poison(3, 160, dtype=torch.float16, device=device)
    embedding(tokens, table, out, row_slots=row_slots)
    assert torch.equal(out, embedding_ref(tokens, table, row_slots))
    assert torch.equal(out, table[[8, 5, 6]])


@pytest.mark.parametrize("length", [1, 5, 16])
def test_gather_row(device: str, length: int) -> None:
    from engine.kernels.gather_row import gather_row, gather_row_ref

    x = torch.randn(16, 1100).bfloat16().to(device)
    request = torch.tensor([2, 64, length], dtype=torch.int32, device=device)
    out = _poison(1, 1100, dtype=torch.bfloat16, device=device)
    gather_row(x, request, out)
    assert torch.equal(out, gather_row_ref(x, request[2]))
    assert torch.equal(out[0], x[length - 1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [24, 1024, 1500])
def test_silu_mul(device: str, dtype: torch.dtype, columns: int) -> None:
    from engine.kernels.silu import silu_mul, silu_mul_ref

    pairs = (torch.randn(3, 2 * columns) * 4).to(dtype).to(device)
    out = _poison(3, columns, dtype=dtype, device=device)
    silu_mul(pairs, out)
    _close(out, silu_mul_ref(pairs.double()))
    gate, up = pairs[1, 10].double(), pairs[1, 11].double()
    assert abs(float(out[1, 5]) - float(gate * gate.sigmoid() * up)) < 0.05 * (1 + abs(float(up)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_in_place(device: str, dtype: torch.dtype) -> None:
    from engine.kernels.add import add, add_ref

    x, y = (torch.randn(5, 700).to(dtype).to(device) for _ in range(2))
    want = add_ref(x.double(), y.double())
    add(x, y, x)
    _close(x, want)
