"""Flash-decoding against an fp64 attention: poisoned tails, odd contexts, merges, tickets, bitwise rows."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.attention_cases import (
    QWEN_7B,
    QWEN_7B_TP4,
    QWEN_72B_TP2,
    QWEN_72B_TP8,
    SMOLLM2,
    Heads,
    assert_close,
    attend_one,
    fp8_cache,
    poisoned_cache,
)

BF16, FP16 = torch.bfloat16, torch.float16
CONTEXTS = [1, 15, 16, 17, 127, 300]
MAX_LEN = 320
# 300 keys make ten chunks: one round of tickets in bunches of 4 and a second over the bunches.
SPLIT_CONFIG = dict(num_splits=10, block_n=32, num_warps=4, num_stages=3, fan_in=4, flat_blocks=1)


class Case:
    """Slots of the given contexts and rows that read them."""

    def __init__(
        self, heads: Heads, contexts: list[int], row_slots: list[int], dtype, device, scale=None,
        fp8=False,
    ) -> None:  # fmt: skip
        self.heads, self.dtype, self.contexts, self.device = heads, dtype, contexts, device
        self.slots, self.scales = row_slots, None
        if fp8:
            (self.k, self.v), self.scales, self.exact = fp8_cache(contexts, MAX_LEN, heads, device)
        else:
            self.k, self.v = poisoned_cache(contexts, MAX_LEN, heads, dtype, device)
        self.positions = torch.tensor(contexts, dtype=torch.int32, device=device) - 1
        self.row_slots = torch.tensor(row_slots, dtype=torch.int32, device=device)
        self.q = torch.randn(len(row_slots), heads.num_heads * heads.head_dim).to(dtype).to(device)
        self.kwargs = {**heads.kwargs, "scale": scale or heads.head_dim**-0.5}

    def workspace(self, max_splits: int = 132):
        from engine.kernels.decode_attention import workspace

        h = self.heads
        return workspace(
            len(self.slots), h.num_heads, h.num_kv_heads, h.head_dim, max_splits, self.device
        )

    def run(self, config, workspace=None, **kwargs) -> torch.Tensor:
        from engine.kernels.decode_attention import decode_attention

        out = torch.full_like(self.q, float("nan"))
        space = workspace or self.workspace()
        decode_attention(
            self.q, self.k, self.v, self.positions, self.row_slots, out, space,
            config=config, scales=self.scales, **self.kwargs, **kwargs,
        )  # fmt: skip
        assert not space.tickets.any(), "a ticket was not reset"
        return out

    def expected(self, absolute: bool = False) -> torch.Tensor:
        """fp64 [R, NQ * D]; over |V| if `absolute`."""
        rows = []
        k, v = (self.k.cpu(), self.v.cpu()) if self.scales is None else self.exact
        for row, slot in enumerate(self.slots):
            if slot < 0:
                rows.append(torch.zeros(self.q.shape[1], dtype=torch.float64))
                continue
            n = self.contexts[slot]
            keys, values = k[slot, :, :n], v[slot, :, :n]
            rows.append(
                attend_one(
                    self.q[row].cpu(),
                    keys,
                    values.abs() if absolute else values,
                    self.heads,
                    self.kwargs["scale"],
                )
            )
        return torch.stack(rows)

    def check(self, out: torch.Tensor) -> None:
        # FP8 weights p max |v| below fp16's normal numbers lose 2^-25 each, of values that are 1 at most.
        floor = 2.0**-24 if self.scales is None else max(self.contexts) * 2.0**-25
        spread = self.expected(absolute=True)
        assert_close(out.cpu(), self.expected(), spread, self.dtype, floor=floor)


def _config(**changes):
    from engine.kernels.decode_attention import DecodeAttentionConfig

    return DecodeAttentionConfig(**{**SPLIT_CONFIG, **changes})


@pytest.mark.parametrize("dtype", [BF16, FP16, torch.float32, torch.float64])
@pytest.mark.parametrize("fp8", [False, True])
def test_reference_matches_an_independent_attention(dtype, fp8) -> None:
    from engine.kernels.decode_attention import decode_attention_ref

    case = Case(QWEN_7B, CONTEXTS, [3, -1, 5, 0, 4, 2, 1], dtype, "cpu", fp8=fp8)
    got = decode_attention_ref(
        case.q, case.k, case.v, case.positions, case.row_slots, scales=case.scales, **case.kwargs
    )
    assert got.dtype == dtype
    eps = max(torch.finfo(dtype).eps, 1e-6 if dtype != torch.float64 else 1e-14)
    torch.testing.assert_close(got.double(), case.expected(), rtol=eps, atol=eps)


@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize("heads", [QWEN_7B, QWEN_72B_TP2, QWEN_72B_TP8, QWEN_7B_TP4, SMOLLM2])
def test_shapes_and_odd_contexts(device: str, heads: Heads, prefetch: bool) -> None:
    case = Case(heads, CONTEXTS, [3, -1, 5, 0, 4, 2, 1], FP16, device)
    out = case.run(_config(), prefetch=prefetch)
    case.check(out)
    assert not out[1].any()  # the padding row is zero, not merely finite


@pytest.mark.parametrize(
    ("heads", "dtype"),
    [(QWEN_7B, BF16), (QWEN_72B_TP8, FP16), (QWEN_72B_TP8, BF16), (SMOLLM2, FP16), (Heads(5, 1, 128), BF16),
     (Heads(2, 2, 64), FP16), (Heads(16, 1, 32), BF16), (Heads(4, 2, 80), BF16)],
)  # fmt: skip
def test_fp8_kv(device: str, heads: Heads, dtype) -> None:
    """The same bound as for a 16-bit cache of the dequantised values: decode rounds nothing else."""
    case = Case(heads, CONTEXTS, [3, -1, 5, 0, 4, 2, 1], dtype, device, fp8=True)
    out = case.run(_config(), prefetch=True)
    case.check(out)
    assert not out[1].any()
    assert torch.equal(case.run(_config(), prefetch=False), out)


@pytest.mark.parametrize("size", [1e-20, 1e-4, 3e3])
def test_fp8_queries_of_any_size(device: str, size: float) -> None:
    """bf16 queries far outside fp16's range beside ordinary ones; scores stay ordinary as K's scale makes up."""
    case = Case(QWEN_7B_TP4, [300, 33], [0, 1], BF16, device, fp8=True)
    head = slice(128, 256)
    case.q[:, head] = (case.q[:, head].float() * size).to(BF16)
    case.check(case.run(_config()))
    case = Case(QWEN_7B_TP4, [300, 33], [0, 1], BF16, device, fp8=True)
    case.q *= 2.0**100
    case.scales[0].mul_(2.0**-100)
    case.exact[0] *= 2.0**-100
    case.check(case.run(_config()))


def test_fp8_nan_is_not_lost(device: str) -> None:
    """A NaN code or scale of a live key reaches the output."""
    for spoil in (lambda c: c.k.view(torch.uint8)[0, 0, 7, 5].fill_(0x7F),
                  lambda c: c.v.view(torch.uint8)[0, 0, 7, 5].fill_(0xFF),
                  lambda c: c.scales[1][0, 0, 7].fill_(float("nan"))):  # fmt: skip
        case = Case(QWEN_7B_TP4, [20], [0], BF16, device, fp8=True)
        spoil(case)
        assert case.run(_config()).isnan().any()


@pytest.mark.parametrize("heads", [QWEN_7B_TP4, SMOLLM2])
def test_bfloat16(device: str, heads: Heads) -> None:
    case = Case(heads, CONTEXTS, [5, 4, -1, 3], BF16, device)
    case.check(case.run(_config()))


@pytest.mark.parametrize(
    "heads", [Heads(2, 2, 16), Heads(16, 1, 32), Heads(6, 2, 80), Heads(5, 1, 256), Heads(3, 1, 64)]
)
@pytest.mark.parametrize("prefetch", [False, True])
def test_other_groups_and_head_dims(device: str, heads: Heads, prefetch: bool) -> None:
    case = Case(heads, [77, 300], [1, 0], FP16, device)
    case.check(case.run(_config(block_n=16), prefetch=prefetch))


@pytest.mark.parametrize("num_splits", [1, 2, 10, 40])
@pytest.mark.parametrize(("fan_in", "flat_blocks"), [(2, 1), (16, 1), (4, 8)])
def test_splits_and_merges(device: str, num_splits: int, fan_in: int, flat_blocks: int) -> None:
    """300 keys are 19 blocks of 16: from one program to a bunch of bunches, and 19 flat ones in fours."""
    case = Case(QWEN_7B_TP4, [300, 33], [0, 1], FP16, device)
    config = _config(num_splits=num_splits, fan_in=fan_in, flat_blocks=flat_blocks, block_n=16)
    case.check(case.run(config))


def test_merge_takes_several_rounds(device: str) -> None:
    """Group 16 at D = 256 leaves registers for one partial a round."""
    case = Case(Heads(16, 1, 256), [300], [0], FP16, device)
    case.check(case.run(_config(num_splits=19, block_n=16, fan_in=8)))


def test_scores_of_any_size(device: str) -> None:
    """Scores up to some thousands, growing and shrinking along the context: exp must never overflow."""
    case = Case(QWEN_7B_TP4, [300, 300], [0, 1], FP16, device, scale=8.0)
    slope = torch.linspace(0.1, 8, MAX_LEN, device=device)[:, None].to(FP16)
    case.k[0] *= slope
    case.k[1] *= slope.flip(0)
    case.check(case.run(_config()))


def test_one_workspace_serves_many_calls(device: str) -> None:
    """Tickets rearm, and stale partials of a longer context never leak into a shorter one."""
    case = Case(QWEN_7B_TP4, [300, 40, 1, 170], [0, 1, 2, 3], FP16, device)
    space = case.workspace(max_splits=10)
    first = case.run(_config(), space)
    case.check(first)
    case.row_slots.copy_(case.row_slots.flip(0))
    case.q.copy_(case.q.flip(0))
    for _ in range(2):
        assert torch.equal(case.run(_config(), space), first.flip(0))


@pytest.mark.parametrize("heads", [QWEN_72B_TP8, SMOLLM2])
@pytest.mark.parametrize("fp8", [False, True])
def test_a_slot_gives_the_same_bits_in_any_batch(device: str, heads: Heads, fp8: bool) -> None:
    from engine.kernels.decode_attention import heuristic

    batch = Case(heads, CONTEXTS, [5, 0, 4, -1, 1, 2, 3, 5], FP16, device, fp8=fp8)
    kv = batch.k.dtype
    configs = {heuristic(heads.num_kv_heads, MAX_LEN, r, 132, kv, heads.head_dim) for r in (1, 8)}
    assert len(configs) == 1
    (config,) = configs
    together = batch.run(config)
    for row, slot in enumerate(batch.slots):
        if row in (0, 2, 6):
            alone = Case(heads, CONTEXTS, [slot], FP16, device)
            alone.k, alone.v, alone.q = batch.k, batch.v, batch.q[row : row + 1].contiguous()
            alone.scales = batch.scales
            assert torch.equal(alone.run(config)[0], together[row])


@pytest.mark.parametrize("heads", [QWEN_7B_TP4, Heads(3, 1, 64)])
def test_prefetch_changes_no_bit(device: str, heads: Heads) -> None:
    """Contexts where the current token opens a tile, ends one, and stands alone in its chunk."""
    case = Case(heads, [64, 65, 1, 33, 97, 300], [0, 1, 2, 3, 4, 5], FP16, device)
    assert torch.equal(case.run(_config(), prefetch=True), case.run(_config(), prefetch=False))


def test_workspace_too_small(device: str) -> None:
    from engine.errors import EngineError

    case = Case(SMOLLM2, [5], [0], FP16, device)
    with pytest.raises(EngineError, match=r"num_splits = 10 exceeds .* max_splits = 9"):
        case.run(_config(), case.workspace(max_splits=9))


@pytest.mark.parametrize("context", [64, 512, 4096, 32768, 131072])
@pytest.mark.parametrize("kv_heads", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("kv_dtype", [BF16, torch.float8_e4m3fn])
def test_heuristic(kv_heads: int, context: int, head_dim: int, kv_dtype) -> None:
    from engine.kernels.decode_attention import MAX_SPLITS, heuristic

    config = heuristic(kv_heads, context, 1, 132, kv_dtype, head_dim)
    assert config == heuristic(kv_heads, context, 8, 132, kv_dtype, head_dim)
    assert 1 <= config.num_splits <= MAX_SPLITS
    assert config.num_splits * config.block_n < context + config.block_n
    if context >= 32768:  # a long context fills the chip, but for the last few multiprocessors
        assert config.num_splits * kv_heads >= 132 - kv_heads
