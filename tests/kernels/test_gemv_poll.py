"""A GEMV that polls in its prologue against `poll_residual` and the same GEMV: bit for bit, on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.errors import EngineError
from engine.kernels.all_reduce import AllReduceConfig, poll_residual, push
from engine.kernels.epilogue import SiluMul, Store
from engine.kernels.gemv import GemvConfig, gemv
from engine.kernels.gemv_config import SHARED_BYTES, ring_shape, simple_config
from engine.kernels.gemv_poll import MOST_BYTES, Poll, polls_in_prologue
from engine.kernels.slots import LamportWorkspace, peer_table
from tests.kernels.collective_group import status_words

FP8, BF16, FP16 = torch.float8_e4m3fn, torch.bfloat16, torch.float16
SMALL = AllReduceConfig(block=32, num_warps=1, programs=3)
RING = GemvConfig("ring", 16, 512, 4, 3, 3, 4, 1)  # the interpreter runs the plain kernel instead
N = 44
SLOTS = 3


def poison(*shape, dtype, device):
    return torch.full(shape, float("nan"), dtype=dtype, device=device)


class Ranks:
    """All ranks of a world on one device, each with a buffer for either form, launched in lockstep."""

    def __init__(self, world, rows, k, dtype, weight, device):
        self.world, self.shape, self.dtype, self.device = world, (rows, k), dtype, device
        self.workspace = LamportWorkspace(world, rows, k, SLOTS)
        self.buffers = [[self.workspace.allocate(device) for _ in range(world)] for _ in range(2)]
        self.tables = [peer_table(buffers, device) for buffers in self.buffers]
        self.status = status_words(device)
        self.n = N if device == "cuda" else 12  # two programs of the plain kernel
        self.w = torch.randn(self.n, k, device=device).to(weight)
        self.extras: dict[str, Any] = dict(
            scale=torch.rand(self.n, device=device) + 0.5 if weight == FP8 else None,
            norm_weight=(torch.rand(k, device=device) + 0.5).to(dtype),
            eps=1e-5,
        )

    def slots(self, call):
        return self.workspace.slot_offset(call), self.workspace.clear_offset(call)

    def random(self):
        x = torch.randn(self.shape, device=self.device) * 3
        special = torch.tensor([0.0, -0.0, 1e-40, -6e-8, 4e3], device=self.device)
        pick = torch.randint(len(special), self.shape, device=self.device)
        return torch.where(torch.rand(self.shape, device=self.device) < 0.1, special[pick], x)

    def push(self, call, form, partials, but=()):
        for r in range(self.world):
            if r not in but:
                push(partials[r], self.tables[form], self.slots(call)[0], rank=r, world=self.world,
                     config=SMALL)  # fmt: skip

    def separate(self, call, residual, epilogue, config, rank):
        h = poison(*self.shape, dtype=self.dtype, device=self.device)
        poll_residual(
            self.buffers[0][rank], *self.slots(call), residual, h, self.status, rank=rank,
            world=self.world, call_site=call, config=SMALL,
        )  # fmt: skip
        gemv(h, self.w, epilogue, config=config, **self.extras)
        return h

    def fused(self, call, residual, epilogue, config, rank, limit_us=20_000_000):
        h = poison(*self.shape, dtype=self.dtype, device=self.device)
        slot, clear = self.slots(call)
        poll = Poll(
            self.buffers[1][rank], slot, clear, h, self.status, rank, self.world, call, limit_us
        )
        gemv(residual, self.w, epilogue, poll=poll, config=config, **self.extras)
        return h


@pytest.mark.parametrize("dtype, weight", [(BF16, FP8), (BF16, BF16), (FP16, FP16), (FP16, FP8)])
@pytest.mark.parametrize(
    "world, rows, k",
    [(2, 1, 1040), (2, 2, 528), (2, 4, 448), (3, 3, 272), (8, 1, 272), (2, 8, 144)],
)
@pytest.mark.parametrize("kernel", ["ring", "simple"])
def test_same_bits_as_the_separate_poll(kernel, world, rows, k, dtype, weight, device):
    """Round the slots and on, so that one is re-armed and used again. Outputs are fp32: 16 bits would hide another
    order of the norm's sum. The last call is another epilogue's."""
    if device == "cpu" and (kernel == "ring" or dtype == FP16):
        pytest.skip("in the interpreter both are the plain kernel")
    config = RING if kernel == "ring" else simple_config(12, k, weight)
    ranks = Ranks(world, rows, k, dtype, weight, device)
    for call in range(SLOTS + 1):
        residual = ranks.random().to(dtype)
        partials = [ranks.random().to(dtype) for _ in range(world)]
        for form in range(2):
            ranks.push(call, form, partials)
        slot, clear = (offset // 2 for offset in ranks.slots(call))
        size = ranks.workspace.slot_bytes // 2
        for r in (0, world - 1):
            before = ranks.buffers[1][r].view(torch.int16)[slot : slot + size].clone()
            if call < SLOTS:
                expected = Store(poison(rows, ranks.n, dtype=torch.float32, device=device))
            else:
                expected = SiluMul(poison(rows, ranks.n // 2, dtype=dtype, device=device))
            actual = type(expected)(torch.full_like(expected.out, float("nan")))
            want = ranks.separate(call, residual, expected, config, r)
            got = ranks.fused(call, residual, actual, config, r)
            assert torch.isfinite(want.float()).all()
            assert torch.equal(got.view(torch.int16), want.view(torch.int16))
            assert torch.equal(actual.out.view(torch.int16), expected.out.view(torch.int16))
            words = ranks.buffers[1][r].view(torch.int16)
            assert torch.equal(words[slot : slot + size], before), "others may still read these"
            assert (words[clear : clear + size] == -(2**15)).all()
        for r in range(1, world - 1):  # lockstep: every rank re-arms
            ranks.fused(call, residual, actual, config, r)
    assert ranks.status.tolist() == [0] * 8


@pytest.mark.parametrize("kernel", ["ring", "simple"])
def test_missing_rank_is_named(kernel, device):
    if device == "cpu" and kernel == "ring":
        pytest.skip("in the interpreter both are the plain kernel")
    config = RING if kernel == "ring" else simple_config(12, 528, FP8)
    ranks = Ranks(3, 1, 528, BF16, FP8, device)
    partials = [ranks.random().bfloat16() for _ in range(3)]
    ranks.push(1, 1, partials, but=(1,))
    out = Store(poison(1, ranks.n, dtype=torch.float32, device=device))
    ranks.fused(1, partials[0], out, config, rank=2, limit_us=20_000)
    if device == "cuda":
        torch.cuda.synchronize()
    words = ranks.status.tolist()
    assert words[:5] == [1, 2, 1, ranks.slots(1)[0], 1]


def test_where_it_pays():
    assert polls_in_prologue(2, 1, 8192) and polls_in_prologue(4, 1, 3584)
    assert not polls_in_prologue(4, 1, 8192) and not polls_in_prologue(4, 2, 3584)
    assert not polls_in_prologue(1, 1, 1024) and not polls_in_prologue(2, 1, 3588)
    assert MOST_BYTES == 32 << 10


def test_what_is_refused():
    x, hidden = torch.zeros(1, 64, dtype=BF16), torch.zeros(1, 64, dtype=BF16)
    w, status = torch.zeros(16, 64, dtype=BF16), torch.zeros(8, dtype=torch.int32)
    out = Store(torch.zeros(1, 16))
    buffer = torch.zeros(1024, dtype=torch.uint8)
    with pytest.raises(EngineError, match="cannot re-arm the slot"):
        gemv(x, w, out, poll=Poll(buffer, 256, 256, hidden, status, 0, 2, 0))
    with pytest.raises(EngineError, match="another tensor"):
        gemv(x, w, out, poll=Poll(buffer, 256, 512, x, status, 0, 2, 0))
    with pytest.raises(EngineError, match="16-byte"):
        gemv(x[:, :12], w[:, :12], out, poll=Poll(buffer, 256, 512, hidden, status, 0, 2, 0))


def test_x_is_staged_for_a_poll_whatever_the_ring_loses():
    """Rows of messages cannot be read again from memory tile by tile."""
    config = GemvConfig("ring", 64, 512, 8, 6, 132, 4, 1)
    assert not ring_shape(config, 8192, 8192, 8, BF16, FP8).stage_x
    polled = ring_shape(config, 8192, 8192, 8, BF16, FP8, polls=True)
    assert polled.stage_x and polled.stages == 2 and polled.shared_bytes <= SHARED_BYTES
    with pytest.raises(EngineError, match="do not fit"):
        ring_shape(config, 8192, 14784, 8, BF16, FP8, polls=True)
