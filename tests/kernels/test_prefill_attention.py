"""Causal attention of a chunk over its slot against fp64: prefixes, padding rows, poisoned tails."""

from __future__ import annotations

import pytest
import torch

from tests.kernels import attention_cases as cases
from tests.kernels.attention_cases import Heads, attend_one

FP16, BF16 = torch.float16, torch.bfloat16


def _run(heads: Heads, tokens, slot, start, length, dtype, device, *, block=(16, 32), ref=False,
         fp8=False):  # fmt: skip
    """One request through the kernel or the reference, every row and head checked."""
    from engine.kernels.prefill_attention import (
        PrefillAttentionConfig,
        prefill_attention,
        prefill_attention_ref,
    )

    lengths = [9, 9, 9]
    lengths[slot] = start + length
    if fp8:
        (k, v), scales, exact = cases.fp8_cache(lengths, start + length + 70, heads, device)
    else:
        k, v = cases.poisoned_cache(lengths, start + length + 70, heads, dtype, device)
        scales, exact = None, [k.cpu(), v.cpu()]
    q = torch.randn(tokens, heads.num_heads * heads.head_dim).to(dtype).to(device)
    q[length:] = float("nan")
    kwargs = {**heads.kwargs, "scale": heads.head_dim**-0.5, "scales": scales}
    if ref:
        out = prefill_attention_ref(q, k, v, slot, start, length, **kwargs)
    else:
        out = torch.full_like(q, float("nan"))
        request = torch.tensor([slot, start, length], dtype=torch.int32, device=device)
        config = PrefillAttentionConfig(*block, num_warps=4, num_stages=2)
        prefill_attention(q, k, v, request, out, config=config, **kwargs)
    out = out.cpu()
    assert not out.isnan().any() and not out[length:].any()
    keys, values = exact[0][slot], exact[1][slot]
    want, spread = [], []
    for i in range(length):
        n = start + i + 1
        args = (q[i].cpu(), keys[:, :n])
        want.append(attend_one(*args, values[:, :n], heads, kwargs["scale"]))
        spread.append(attend_one(*args, values[:, :n].abs(), heads, kwargs["scale"]))
    roundings = 1.0
    if fp8 and not ref:
        # K and V are rounded to 16 bits. K: a score moves by at most u * scale * sum |q k|, hence a weight by
        # that part of itself, and the sum of the weights too.
        group = heads.num_heads // heads.num_kv_heads
        sizes = q[:length].cpu().double().view(length, heads.num_kv_heads, group, -1).abs()
        scores = torch.einsum("ihgd,hnd->ihgn", sizes, keys[:, : start + length].abs())
        roundings += 1 + 2 * kwargs["scale"] * scores.max().item()
    close = dict(roundings=roundings, floor=2.0**-24 * (2 if fp8 else 1))
    cases.assert_close(out[:length], torch.stack(want), torch.stack(spread), dtype, **close)


# (T, slot, start, length): one token, a padded bucket, a prefix off every block boundary, exact blocks.
REQUESTS = [(1, 0, 0, 1), (24, 1, 0, 17), (20, 2, 45, 13), (16, 1, 64, 16)]


@pytest.mark.parametrize("request_", REQUESTS)
@pytest.mark.parametrize("heads", [cases.QWEN_72B_TP8, cases.QWEN_7B_TP4, cases.SMOLLM2])
def test_requests(device: str, heads: Heads, request_) -> None:
    _run(heads, *request_, FP16, device)


@pytest.mark.parametrize("heads", [cases.QWEN_7B, cases.QWEN_72B_TP2])
def test_full_head_counts(device: str, heads: Heads) -> None:
    """Tiles of 64 rows: a group of 7 leaves tokens cut by a tile's edge."""
    _run(heads, 24, 2, 70, 21, FP16, device, block=(64, 64))


@pytest.mark.parametrize("block", [(16, 16), (64, 32), (128, 64), (32, 128)])
def test_tiles(device: str, block: tuple[int, int]) -> None:
    _run(cases.QWEN_7B_TP4, 50, 0, 150, 41, FP16, device, block=block)


@pytest.mark.parametrize(
    ("heads", "dtype"),
    [(cases.QWEN_7B_TP4, FP16), (cases.QWEN_72B_TP8, BF16), (cases.SMOLLM2, FP16), (Heads(5, 1, 128), BF16),
     (Heads(2, 2, 64), FP16), (Heads(4, 2, 80), BF16)],
)  # fmt: skip
@pytest.mark.parametrize("request_", REQUESTS)
def test_fp8_kv(device: str, heads: Heads, dtype, request_) -> None:
    _run(heads, *request_, dtype, device, fp8=True)


@pytest.mark.parametrize("start", [0, 31])
def test_bfloat16(device: str, start: int) -> None:
    _run(cases.SMOLLM2, 20, 1, start, 18, BF16, device)


@pytest.mark.parametrize(
    "heads", [Heads(2, 2, 16), Heads(16, 1, 32), Heads(6, 2, 80), Heads(5, 1, 256)]
)
def test_other_groups_and_head_dims(device: str, heads: Heads) -> None:
    _run(heads, 12, 0, 33, 11, FP16, device)


@pytest.mark.parametrize("start", range(17))
def test_diagonal_at_every_offset_in_a_tile(device: str, start: int) -> None:
    _run(Heads(2, 2, 16), 20, 0, start, 19, FP16, device, block=(16, 16))


@pytest.mark.parametrize("dtype", [FP16, BF16])
@pytest.mark.parametrize("request_", REQUESTS)
@pytest.mark.parametrize("fp8", [False, True])
def test_reference(device: str, request_, dtype, fp8: bool) -> None:
    _run(cases.SMOLLM2, *request_, dtype, device, ref=True, fp8=fp8)


@pytest.mark.parametrize("start", [0, 29])
def test_reference_keeps_fp64(start: int) -> None:
    from engine.kernels.prefill_attention import prefill_attention_ref

    heads = cases.SMOLLM2
    k, v = cases.poisoned_cache([start + 11], start + 20, heads, torch.float64, "cpu")
    q = torch.randn(11, heads.num_heads * heads.head_dim).double()
    got = prefill_attention_ref(q, k, v, 0, start, 11, **heads.kwargs, scale=0.125)
    for i in range(11):
        n = start + i + 1
        want = attend_one(q[i], k[0, :, :n], v[0, :, :n], heads, 0.125)
        torch.testing.assert_close(got[i], want, rtol=1e-12, atol=1e-12)


def test_chunks_equal_one_pass(device: str) -> None:
    """A prompt in three chunks gives what one chunk gives, to the rounding of one result each."""
    from engine.kernels.prefill_attention import PrefillAttentionConfig, prefill_attention

    heads, total = cases.QWEN_7B_TP4, 75
    k, v = cases.poisoned_cache([total], 96, heads, FP16, device)
    q = torch.randn(total, heads.num_heads * heads.head_dim).half().to(device)
    config = PrefillAttentionConfig(block_m=32, block_n=32, num_warps=4, num_stages=2)
    outs = []
    for start, stop in [(0, total), (0, 32), (32, 65), (65, total)]:
        out = torch.full_like(q[start:stop], float("nan"))
        request = torch.tensor([0, start, stop - start], dtype=torch.int32, device=device)
        chunk = q[start:stop].contiguous()
        prefill_attention(chunk, k, v, request, out, config=config, scale=0.09, **heads.kwargs)
        outs.append(out.cpu())
    whole, parts = outs[0].double(), torch.cat(outs[1:]).double()
    # Both round weights of at most 1 (u) and the result (u) against values below 4: 4 * 4 * 2^-11.
    torch.testing.assert_close(parts, whole, rtol=0, atol=16 * 2.0**-11)


@pytest.mark.parametrize("t", [1, 64, 512, 2048, 8192])
@pytest.mark.parametrize(("kv_heads", "group"), [(4, 7), (1, 8), (4, 8), (8, 8), (3, 3)])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("kv_dtype", [BF16, torch.float8_e4m3fn])
def test_heuristic(kv_heads: int, group: int, head_dim: int, t: int, kv_dtype) -> None:
    from engine.kernels.prefill_attention import heuristic

    config = heuristic(kv_heads, group, head_dim, t, 132, kv_dtype)
    assert config.block_m == 16 * config.num_warps  # one wgmma row block a warp
    assert config.block_n >= 16 and config.num_stages >= 2
