"""GEMM whose rows go to their owners: the bits of Store, in the ranks' memory, from each kernel."""

from __future__ import annotations

import pytest
import torch

from engine.errors import EngineError
from engine.kernels.epilogue import Scatter, Store, shard_rows
from engine.kernels.gemm import GemmConfig, gemm, workspace, workspace_sizes
from engine.kernels.quantize_rows import quantize_rows_ref
from engine.kernels.two_shot import TwoShotWorkspace, two_shot_ranks

FP8 = torch.float8_e4m3fn
SMALL = dict(block_t=32, block_n=64, block_k=64, warps=4, stages=3)
WIDE = dict(block_t=64, block_n=128, block_k=128, warps=4, stages=3)
CONFIGS = {
    "triton": GemmConfig(**SMALL),
    "swap": GemmConfig(**SMALL, swap=True),
    "split": GemmConfig(**SMALL, split_k=2),
    "fp8": GemmConfig(**SMALL, swap=True),
    "async": GemmConfig("async", **WIDE),
    "w8a8": GemmConfig("w8a8", **WIDE),
    "cublas": GemmConfig("cublas"),
}


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize(("world", "rows"), [(2, 45), (4, 40), (3, 7)])
def test_rows_lie_with_their_owners(kind, world, rows, device):
    n, k, dtype = 96, 256, torch.bfloat16
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, k, generator=generator).to(dtype).to(device)
    w = (torch.randn(n, k, generator=generator) / 16).to(dtype).to(device)
    scales = {}
    if kind in ("fp8", "async", "w8a8"):
        w, scales["scale"] = quantize_rows_ref(w)
    if kind == "w8a8":
        x, scales["x_scale"] = quantize_rows_ref(x)
    config = CONFIGS[kind]
    scratch = workspace(workspace_sizes(config, rows, n, Store), dtype, device)
    space = TwoShotWorkspace(world, 48, n)
    ends = two_shot_ranks(space, [space.allocate(device) for _ in range(world)], dtype)
    for end in ends:
        end.buffer.fill_(0xFF)
    for end in ends:  # each rank's partial sum has its sign and size
        scaled = {**scales, "scale": scales["scale"] * (end.rank + 1)} if scales else {}
        mine = w if scales else w * (end.rank + 1)
        wanted = torch.full((rows, n), float("nan"), dtype=dtype, device=device)
        gemm(x, mine, Store(wanted), **scaled, config=config, workspace=scratch)
        # The library's GEMM cannot store to another device: Triton's does, with its own order of sums.
        gemm(
            x, mine, Scatter(end.message(rows), end.far), **scaled, config=config, workspace=scratch
        )
        shard = shard_rows(rows, world)
        for owner in ends:
            own = wanted[owner.rank * shard : (owner.rank + 1) * shard]
            start = space.partials_offset + end.rank * shard * n * 2
            found = owner.buffer[start : start + shard * n * 2].view(dtype).view(shard, n)
            if kind == "cublas":
                torch.testing.assert_close(found[: len(own)], own, rtol=2**-7, atol=1e-3)
            else:
                assert torch.equal(found[: len(own)], own), f"from {end.rank} to {owner.rank}"
            assert (found[len(own) :].view(torch.int16) == -1).all(), "a row that no rank has"


def test_a_message_of_another_size_is_refused(device):
    x, w = torch.zeros(8, 64, dtype=torch.bfloat16), torch.zeros(32, 64, dtype=torch.bfloat16)
    far = torch.zeros(2, dtype=torch.int64, device=device)
    out = torch.zeros(8, 32, dtype=torch.bfloat16, device=device)
    with pytest.raises(EngineError, match=r"gemm: x \(8, 64\)"):
        gemm(x.to(device), w.to(device), Scatter(out, far), config=CONFIGS["triton"])
