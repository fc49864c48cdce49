"""GEMM whose part-filled last wave is split over K, against fp64: a wave is three programs here, so tails
occur on small shapes."""

from __future__ import annotations

import itertools
from contextlib import contextmanager

import pytest
import torch

from engine.errors import EngineError
from engine.kernels.epilogue import Residual, Scatter, SiluMul, Store
from engine.kernels.gemm import GemmConfig, gemm, workspace, workspace_sizes
from engine.kernels.gemm_config import settle, tail_of
from engine.kernels.quantize_rows import quantize_rows_ref
from engine.kernels.silu import silu_mul_ref

BF16 = torch.bfloat16
TILE = dict(block_t=32, block_n=64, block_k=64, warps=4, stages=3, group=2)
WIDE = dict(block_t=64, block_n=64, block_k=64, warps=4, stages=3, group=2)
KINDS = {
    "bf16": GemmConfig(**WIDE),
    "swap": GemmConfig(**TILE, swap=True),
    "fp8": GemmConfig(**TILE, swap=True),
    "w8a8": GemmConfig("w8a8", **WIDE),
}
# (tiles of T, tiles of N, tail, wave): (whole tiles, tail tiles, their programs, most parts of a tile)
GRIDS = {
    (2, 2, 2, 3): (3, 1, 2, 2),
    (1, 2, 2, 3): (0, 2, 3, 2),  # less than one wave; a range that begins in one tile, ends in the next
    (2, 4, 3, 5): (5, 3, 5, 3),  # ranges of 3/5 of a tile
    (1, 1, 8, 8): (0, 1, 8, 8),  # one program a part
    (3, 2, 2, 3): (6, 0, 0, 0),  # whole waves
}  # fmt: skip
K = 9 * 64 - 16  # a short last block


def _case(kind, tiles_t, tiles_n, tail, wave, epilogue):
    """(run(config, workspace) -> poisoned and filled output, fp64 result, config) of a ragged shape."""
    config = KINDS[kind].__class__(**{**vars(KINDS[kind]), "tail": tail, "wave": wave})
    t, n = tiles_t * config.block_t - 13, tiles_n * config.block_n - 16
    x = torch.randn(t, K).to(BF16)
    w = (torch.randn(n, K) / K**0.5).to(BF16)
    scales = {}
    if kind in ("fp8", "w8a8"):
        w, scales["scale"] = quantize_rows_ref(w)
    if kind == "w8a8":
        x, scales["x_scale"] = quantize_rows_ref(x)
    bias = torch.randn(n).to(BF16) if epilogue == "Store" else None
    residual = torch.randn(t, n).to(BF16)
    y = x.double() @ w.double().t()
    y = y * scales["x_scale"].double()[:, None] if "x_scale" in scales else y
    y = y * scales["scale"].double() if "scale" in scales else y
    y = y if bias is None else y + bias.double()
    want = {"Residual": y + residual.double(), "SiluMul": silu_mul_ref(y)}.get(epilogue, y)
    return config, x, w, scales, bias, residual, want


def _run(case, epilogue, device, scratch, pdl=False):
    config, x, w, scales, bias, residual, want = case
    out = torch.full(want.shape, float("nan"), dtype=BF16, device=device)
    if (
        epilogue == "Residual"
    ):  # in place: who finishes before the last would add the residual twice
        out.copy_(residual)
    to = {"Residual": Residual(out, out), "SiluMul": SiluMul(out), "Store": Store(out)}[epilogue]
    gemm(
        x.to(device), w.to(device), to, bias=None if bias is None else bias.to(device),
        **{k: v.to(device) for k, v in scales.items()}, config=config, workspace=scratch, pdl=pdl,
    )  # fmt: skip
    return out


def _scratch(config, t, n, device):
    scratch = workspace(workspace_sizes(config, t, n, Store), BF16, device)
    scratch.partials.fill_(float("nan"))
    return scratch


def _close(got, want, kind: str) -> None:
    """One rounding to bf16 (2^-8 of the result), fp32 sums (K * 2^-24 * sum |x w|, about 0.64 here, times 4
    for |y| up to 4: 1e-4), and on the card W8A8's sums: 2^-13 of a running sum of up to 4, K / 32 times."""
    hopper = K / 32 * 2.0**-13 * 4 if kind == "w8a8" and got.is_cuda else 0.0
    assert not got.isnan().any()
    error = (got.cpu().double() - want).abs()
    assert (error <= 2.0**-8 * want.abs() + 1e-4 + hopper).all(), error.max()


@contextmanager
def _order(device: str, order):
    """Under the interpreter, programs run one after another: in `order`, a function of (index, programs)."""
    if device != "cpu":
        yield  # the card has an order of its own
        return
    from triton.runtime.interpreter import interpreter_builder as builder

    original = builder.set_grid_idx
    builder.set_grid_idx = lambda x, y, z: original(order(x, builder.grid_dim[0]), y, z)
    try:
        yield
    finally:
        builder.set_grid_idx = original


@pytest.mark.parametrize("epilogue", ["Store", "Residual", "SiluMul"])
@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("kind", ["bf16", "w8a8"])
def test_tails(device: str, kind: str, grid, epilogue: str) -> None:
    case = _case(kind, *grid, epilogue)
    t, n = case[1].shape[0], case[2].shape[0]
    scratch = _scratch(case[0], t, n, device)
    results = []
    for order in (lambda i, count: i, lambda i, count: count - 1 - i):
        with _order(device, order):
            results.append(_run(case, epilogue, device, scratch))
        _close(results[-1], case[-1], kind)
        assert not scratch.tickets.any()
    assert torch.equal(*results)  # whoever was last


@pytest.mark.parametrize("epilogue", ["Store", "Residual", "SiluMul"])
@pytest.mark.parametrize("kind", ["swap", "fp8"])
def test_swapped_operands(device: str, kind: str, epilogue: str) -> None:
    case = _case(kind, 2, 4, 3, 5, epilogue)
    scratch = _scratch(case[0], case[1].shape[0], case[2].shape[0], device)
    _close(_run(case, epilogue, device, scratch, pdl=device != "cpu"), case[-1], kind)
    assert not scratch.tickets.any()


@pytest.mark.parametrize("kind", ["bf16", "swap", "w8a8"])
def test_rows_lie_with_their_owners(device: str, kind: str) -> None:
    """Scatter stores the bits of Store: to shard `owner` at the owner's distance from the own memory."""
    case = _case(kind, 2, 2, 2, 3, "Scatter")
    config, x, w, scales, _, _, want = case
    (t, n), world = want.shape, 3
    scratch = _scratch(config, t, n, device)
    stored = _run(case, "Store", device, scratch)
    _close(stored, want, kind)
    shard = -(-t // world)
    memory = torch.full((world, 2, shard, n), float("nan"), dtype=BF16, device=device)
    step = memory.stride(0) * memory.element_size()
    far = torch.tensor([(owner - 1) * step for owner in range(world)], device=device)
    gemm(
        x.to(device), w.to(device), Scatter(memory[1, 1], far), config=config, workspace=scratch,
        **{k: v.to(device) for k, v in scales.items()},
    )  # fmt: skip
    found = memory[:, 1].reshape(world * shard, n)
    assert torch.equal(found[:t], stored) and found[t:].isnan().all() and memory[:, 0].isnan().all()


def test_whole_tiles_have_the_bits_of_a_launch_without_tail(device: str) -> None:
    case = _case("bf16", 2, 2, 2, 3, "Store")
    config, _, _, _, _, _, want = case
    plain = KINDS["bf16"]
    scratch = _scratch(config, *want.shape, device)
    split = _run(case, "Store", device, scratch)
    whole = _run((plain, *case[1:]), "Store", device, scratch)
    last = torch.zeros(want.shape, dtype=torch.bool)
    last[plain.block_t :, plain.block_n :] = True  # the fourth tile, of a wave of three
    assert torch.equal(split.cpu()[~last], whole.cpu()[~last])
    unsplit = _run(case, "Store", device, None)  # no workspace: no tail
    assert torch.equal(unsplit, whole)


def test_padding_rows_do_not_change_real_rows(device: str) -> None:
    config, x, w, scales, bias, residual, want = _case("bf16", 1, 2, 2, 3, "Store")
    scratch = _scratch(config, *want.shape, device)
    outs = []
    for filler in (0.0, 1e4):
        x[21:] = filler
        case = (config, x, w, scales, bias, residual, want)
        outs.append(_run(case, "Store", device, scratch)[:21])
    assert torch.equal(*outs)


def test_a_small_workspace_is_refused(device: str) -> None:
    case = _case("bf16", 1, 2, 2, 3, "Store")
    with pytest.raises(EngineError, match=r"needs \(16384, 2\)"):  # 2 tiles + 3 programs - 1 slots
        _run(case, "Store", device, workspace((0, 0, 0), BF16, device))


# The walk, on paper


@pytest.mark.parametrize(("grid", "facts"), GRIDS.items())
def test_grid_and_workspace(grid, facts) -> None:
    tiles_t, tiles_n, tail, wave = grid
    whole, rest, programs, _ = facts
    config = GemmConfig(**TILE, tail=tail, wave=wave)
    t, n = tiles_t * 32, tiles_n * 64 - 1
    assert tail_of(config, t, n) == (rest, programs) and whole + rest == tiles_t * tiles_n
    slots = rest + programs - 1 if rest else 0
    assert workspace_sizes(config, t, n, Store) == (slots * 32 * 64, rest, 0)
    settled = settle(config, t, n, K, True)
    assert (settled.tail, settled.wave) == ((tail, wave) if rest else (1, 0))
    assert settle(config, t, n, K, False) == settle(config, t, n, 64, True) == GemmConfig(**TILE)


def test_parts_tile_the_line_and_have_slots_of_their_own() -> None:
    """The arithmetic of gemm_tail.py in Python: every tail block is computed once, slots are unique, and those
    of one tile follow each other in order of K from the first that the last to arrive reads."""
    for rest, tail, wave, blocks in itertools.product(
        (1, 2, 28, 68), (2, 3, 4, 8), (132,), (8, 57, 64)
    ):
        programs, total = min(rest * tail, wave), rest * blocks
        parts: dict[int, list[tuple[int, int, int]]] = {}
        for program in range(programs):
            begin, end = program * total // programs, (program + 1) * total // programs
            for tile in range(begin // blocks, -(-end // blocks)):
                first, last = max(begin - tile * blocks, 0), min(end - tile * blocks, blocks)
                parts.setdefault(tile, []).append((program + tile, first, last))
        slots = [slot for found in parts.values() for slot, _, _ in found]
        assert len(set(slots)) == len(slots) and max(slots) < rest + programs - 1
        for tile, found in parts.items():
            assert [first for _, first, _ in found] == [0, *(last for _, _, last in found[:-1])]
            assert found[-1][2] == blocks and all(last > first for _, first, last in found)
            opening = (tile * blocks * programs + programs - 1) // total
            closing = ((tile + 1) * programs - 1) // rest
            assert [slot for slot, _, _ in found] == [
                program + tile for program in range(opening, closing + 1)
            ]
            assert 2 <= len(found) <= tail + 1
