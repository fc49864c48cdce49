"""RoPE on adjacent pairs and the KV append: against complex rotation, with the rest of the cache untouched."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.attention_cases import (
    QWEN_7B,
    QWEN_72B_TP2,
    QWEN_72B_TP8,
    SMOLLM2,
    UNIT,
    Heads,
)

SLOTS, MAX_LEN = 3, 96


def _table(head_dim: int, theta: float = 10000.0) -> torch.Tensor:
    """cos_sin [MAX_LEN, D] fp32, cos_i at 2i and sin_i at 2i+1."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    angles = torch.arange(MAX_LEN, dtype=torch.float64)[:, None] * theta**-exponents
    return torch.stack((angles.cos(), angles.sin()), dim=-1).flatten(1).float()


def _expected(qkv, table, start: int, length: int, heads: Heads):
    """(q, k, v) [length, heads, D] fp64: each pair is a complex number times cos + i sin."""
    x = qkv[:length].double().view(length, -1, heads.head_dim)
    turned = torch.view_as_complex(x.view(length, x.shape[1], -1, 2).contiguous())
    turn = torch.view_as_complex(table[start : start + length].double().view(length, -1, 2))
    rotated = torch.view_as_real(turned * turn[:, None]).flatten(-2)
    nq, nkv = heads.num_heads, heads.num_kv_heads
    return rotated[:, :nq], rotated[:, nq : nq + nkv], x[:, nq + nkv :]


def _close(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    """One rounding (u * |want|); the fp32 sum of two products adds 2^-22 of at most 12 (inputs below 8)."""
    assert not got.isnan().any()
    error = (got.double() - want).abs()
    assert (error <= UNIT[dtype] * want.abs() + 12 * 2.0**-22).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("use_kernel", [True, False], ids=["kernel", "ref"])
@pytest.mark.parametrize(
    "heads",
    [QWEN_7B, QWEN_72B_TP2, QWEN_72B_TP8, SMOLLM2, Heads(4, 2, 16), Heads(2, 1, 80), Heads(1, 1, 256)],
)  # fmt: skip
@pytest.mark.parametrize(
    ("tokens", "slot", "start", "length"), [(1, 0, 0, 1), (20, 2, 37, 17), (16, 1, 80, 16)]
)
def test_rope_append(device, dtype, use_kernel, heads: Heads, tokens, slot, start, length) -> None:
    from engine.kernels.rope_append import rope_append, rope_append_ref

    nq, nkv, d = heads.num_heads, heads.num_kv_heads, heads.head_dim
    qkv = torch.randn(tokens, (nq + 2 * nkv) * d).to(dtype).to(device)
    qkv[length:] = float("nan")  # what padding rows hold must not matter
    table = _table(d)
    before = torch.full((2, SLOTS, nkv, MAX_LEN, d), float("nan"), dtype=dtype, device=device)
    k_cache, v_cache = before[0].clone(), before[1].clone()
    where = (slot, start, length)
    if use_kernel:
        q_out = torch.full((tokens, nq * d), float("nan"), dtype=dtype, device=device)
        request = torch.tensor(where, dtype=torch.int32, device=device)
        rope_append(qkv, q_out, k_cache, v_cache, table.to(device), request)
    else:
        q_out = rope_append_ref(qkv, k_cache, v_cache, table.to(device), *where)
    q, k, v = _expected(qkv.cpu(), table, start, length, heads)
    _close(q_out[:length].cpu().view(length, nq, d), q, dtype)
    assert not q_out[length:].any() and not q_out[length:].isnan().any()
    stop = start + length
    _close(k_cache[slot, :, start:stop].transpose(0, 1).cpu(), k, dtype)
    assert torch.equal(v_cache[slot, :, start:stop].transpose(0, 1).cpu().double(), v)
    for cache in (k_cache, v_cache):  # nothing else was written
        cache[slot, :, start:stop] = float("nan")
        assert cache.isnan().all()


def test_reference_keeps_fp64(device: str) -> None:
    from engine.kernels.rope_append import rope_append_ref

    heads = SMOLLM2
    qkv = torch.randn(5, (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim).double()
    caches = torch.zeros(2, SLOTS, heads.num_kv_heads, MAX_LEN, heads.head_dim).double()
    table = _table(heads.head_dim)
    got = rope_append_ref(qkv, caches[0], caches[1], table, 1, 9, 5)
    q, k, _ = _expected(qkv, table, 9, 5, heads)
    torch.testing.assert_close(got, q.flatten(1), rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(caches[0, 1, :, 9:14], k.transpose(0, 1), rtol=1e-13, atol=1e-13)


# QK-norm, and rows of a decode step


def _normed(qkv, gains, heads: Heads, eps: float = 1e-6):
    """qkv [T, ...] fp64 with each q and k head divided by its RMS and multiplied by its gain."""
    nq, nkv, d = heads.num_heads, heads.num_kv_heads, heads.head_dim
    x = qkv.double().view(len(qkv), -1, d).clone()
    for first, last, gain in ((0, nq, gains[0]), (nq, nq + nkv, gains[1])):
        part = x[:, first:last]
        x[:, first:last] = part / (part.pow(2).mean(-1, keepdim=True) + eps).sqrt() * gain.double()
    return x.flatten(1)


def _close_normed(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    """As `_close`; the norm adds a fp32 sum of D <= 256 squares, rsqrt and two products: 2^-20 of |x| <= 24
    (a normalised element is at most sqrt(D) = 16, times a gain under 1.5) and of what it is rotated with."""
    assert not got.isnan().any()
    error = (got.double() - want).abs()
    assert (error <= UNIT[dtype] * want.abs() + 2 * 24 * 2.0**-20).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("use_kernel", [True, False], ids=["kernel", "ref"])
@pytest.mark.parametrize(
    "heads", [Heads(4, 1, 128), Heads(9, 3, 64), Heads(4, 2, 16), Heads(2, 1, 80)]
)
@pytest.mark.parametrize("row_slots", [[1], [2, -1, 0], [-1], [0, 1, 2, -1, -1]], ids=str)
@pytest.mark.parametrize("norm", [True, False], ids=["norm", "plain"])
def test_decode_rows(device, dtype, use_kernel, heads: Heads, row_slots, norm) -> None:
    from engine.kernels.rope_append import DecodeRows, QKNorm, rope_append, rope_append_ref

    nq, nkv, d = heads.num_heads, heads.num_kv_heads, heads.head_dim
    rows = len(row_slots)
    qkv = (torch.randn(rows, (nq + 2 * nkv) * d) * 3).to(dtype).to(device)
    gains = (1 + 0.15 * torch.randn(2, d).clamp(-3, 3)).to(dtype).to(device)
    qkv[[i for i, slot in enumerate(row_slots) if slot < 0]] = float(
        "nan"
    )  # padding must not matter
    positions = torch.tensor([95, 0, 41], dtype=torch.int32, device=device)
    slots = torch.tensor(row_slots, dtype=torch.int32, device=device)
    table = _table(d)
    caches = torch.full((2, SLOTS, nkv, MAX_LEN, d), float("nan"), dtype=dtype, device=device)
    extra = dict(rows=DecodeRows(positions, slots))
    if norm:
        extra |= dict(norm=QKNorm(gains[0], gains[1], 1e-6))
    if use_kernel:
        q_out = torch.full((rows, nq * d), float("nan"), dtype=dtype, device=device)
        rope_append(qkv, q_out, caches[0], caches[1], table.to(device), **extra)
    else:
        q_out = rope_append_ref(qkv, caches[0], caches[1], table.to(device), **extra)
    whole = _normed(qkv.cpu(), gains.cpu(), heads) if norm else qkv.cpu().double()
    for row, slot in enumerate(row_slots):
        if slot < 0:
            assert not q_out[row].any() and not q_out[row].isnan().any()
            continue
        at = int(positions[slot])
        q, k, v = _expected(whole[row : row + 1], table[at : at + 1], 0, 1, heads)
        _close_normed(q_out[row].cpu().view(1, nq, d), q, dtype)
        _close_normed(caches[0, slot, :, at].cpu()[None], k, dtype)
        assert torch.equal(caches[1, slot, :, at].cpu().double()[None], v)
        caches[:, slot, :, at] = float("nan")
    assert caches.isnan().all()  # nothing else was written


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("use_kernel", [True, False], ids=["kernel", "ref"])
@pytest.mark.parametrize(
    "heads", [Heads(4, 1, 128), Heads(9, 3, 64), Heads(1, 1, 256), Heads(2, 1, 80)]
)
def test_prefill_with_norms(device, dtype, use_kernel, heads: Heads) -> None:
    from engine.kernels.rope_append import QKNorm, rope_append, rope_append_ref

    nq, nkv, d = heads.num_heads, heads.num_kv_heads, heads.head_dim
    tokens, slot, start, length = 20, 2, 37, 17
    qkv = (torch.randn(tokens, (nq + 2 * nkv) * d) * 3).to(dtype).to(device)
    qkv[length:] = float("nan")
    gains = (1 + 0.15 * torch.randn(2, d).clamp(-3, 3)).to(dtype).to(device)
    table = _table(d)
    caches = torch.full((2, SLOTS, nkv, MAX_LEN, d), float("nan"), dtype=dtype, device=device)
    where, extra = (slot, start, length), dict(norm=QKNorm(gains[0], gains[1], 1e-6))
    if use_kernel:
        q_out = torch.full((tokens, nq * d), float("nan"), dtype=dtype, device=device)
        request = torch.tensor(where, dtype=torch.int32, device=device)
        rope_append(qkv, q_out, caches[0], caches[1], table.to(device), request, **extra)
    else:
        q_out = rope_append_ref(qkv, caches[0], caches[1], table.to(device), *where, **extra)
    whole = _normed(qkv[:length].cpu(), gains.cpu(), heads)
    q, k, v = _expected(whole, table, start, length, heads)
    _close_normed(q_out[:length].cpu().view(length, nq, d), q, dtype)
    assert not q_out[length:].any() and not q_out[length:].isnan().any()
    stop = start + length
    _close_normed(caches[0, slot, :, start:stop].transpose(0, 1).cpu(), k, dtype)
    assert torch.equal(caches[1, slot, :, start:stop].transpose(0, 1).cpu().double(), v)
    caches[:, slot, :, start:stop] = float("nan")
    assert caches.isnan().all()


# FP8 KV


def _fp8_append(qkv, table, heads: Heads, use_kernel: bool, where: dict, norm=None):
    """(q_out, the two caches, their scales) after an append to a poisoned e4m3 cache."""
    from engine.kernels.rope_append import rope_append, rope_append_ref

    shape = (SLOTS, heads.num_kv_heads, MAX_LEN, heads.head_dim)
    codes = torch.full((2, *shape), 0x7F, dtype=torch.uint8, device=qkv.device)  # NaN
    caches = codes.view(torch.float8_e4m3fn)
    scales = torch.full((2, *shape[:3]), float("nan"), device=qkv.device)
    extra = dict(scales=(scales[0], scales[1]), norm=norm)
    if use_kernel:
        q_out = torch.full_like(qkv[:, : heads.num_heads * heads.head_dim], float("nan"))
        q_out = q_out.contiguous()
        if "request" in where:
            where = {"request": torch.tensor(where["request"], dtype=torch.int32).to(qkv.device)}
        rope_append(qkv, q_out, *caches, table, **where, **extra)
    else:
        position = where.get("request", ())
        rows = {} if position else where
        q_out = rope_append_ref(qkv, *caches, table, *position, **rows, **extra)
    return q_out, codes, scales


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("use_kernel", [True, False], ids=["kernel", "ref"])
@pytest.mark.parametrize(
    "heads", [QWEN_7B, Heads(4, 2, 64), Heads(5, 1, 128), Heads(2, 1, 80), Heads(4, 2, 16)]
)
@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("qk_norm", [False, True], ids=["plain", "norm"])
def test_fp8_is_the_16_bit_cache_quantised(
    device, dtype, use_kernel, heads, phase, qk_norm
) -> None:
    """Bit for bit e4m3(x * (448 / max |x|)) of what a 16-bit cache holds, with the scale max |x| / 448; tokens of any
    size and of nothing but zeros; the rest of the cache and of the scales untouched."""
    from engine.kernels.rope_append import DecodeRows, QKNorm, rope_append, rope_append_ref

    nq, nkv, d = heads.num_heads, heads.num_kv_heads, heads.head_dim
    tokens, table = (20, _table(d).to(device)) if phase == "prefill" else (4, _table(d).to(device))
    qkv = torch.randn(tokens, nq + 2 * nkv, d)
    qkv *= torch.exp2(torch.randint(-9, 10, (tokens, nq + 2 * nkv, 1)).float())
    qkv[1] = 0.0
    qkv = qkv.flatten(1).to(dtype).to(device)
    norm = None
    if qk_norm:
        gains = (1 + 0.15 * torch.randn(2, d).clamp(-3, 3)).to(dtype).to(device)
        norm = QKNorm(gains[0], gains[1], 1e-6)
    if phase == "prefill":
        qkv[17:] = float("nan")
        where, written = {"request": (2, 37, 17)}, [(2, 37 + i) for i in range(17)]
    else:
        qkv[2] = float("nan")
        positions = torch.tensor([95, 0, 41], dtype=torch.int32, device=device)
        slots = torch.tensor([2, 0, -1, 1], dtype=torch.int32, device=device)
        where, written = {"rows": DecodeRows(positions, slots)}, [(2, 41), (0, 95), (1, 0)]
    q_out, codes, scales = _fp8_append(qkv, table, heads, use_kernel, where, norm)

    plain = torch.full((2, SLOTS, nkv, MAX_LEN, d), float("nan"), dtype=dtype, device=device)
    extra = dict(norm=norm)
    q_plain = torch.full((tokens, nq * d), float("nan"), dtype=dtype, device=device)
    if use_kernel:
        request = torch.tensor(where.get("request", (0, 0, 0)), dtype=torch.int32, device=device)
        rope_append(qkv, q_plain, *plain, table, request, rows=where.get("rows"), **extra)
    else:
        place = where.get("request", ())
        q_plain = rope_append_ref(qkv, *plain, table, *place, rows=where.get("rows"), **extra)
    # On a card the two compiled variants may round a sum of the norm otherwise: a 16-bit step, hence a code's step.
    few = 0.01 if device == "cuda" and use_kernel else 0.0
    assert (q_out != q_plain).float().mean() <= few
    different = []
    for slot, at in written:
        x = plain[:, slot, :, at].float().cpu()  # [2, NKV, D]
        amax = x.abs().amax(-1).clamp(min=1e-30)
        most = torch.full_like(amax, 448.0)
        want = (x * (most / amax)[..., None]).to(torch.float8_e4m3fn).view(torch.uint8)
        different.append((codes[:, slot, :, at].cpu() != want).float().mean())
        step = 2.0**-7 if few else 0.0
        torch.testing.assert_close(scales[:, slot, :, at].cpu(), amax / most, rtol=step, atol=0)
        codes[:, slot, :, at], scales[:, slot, :, at] = 0x7F, float("nan")
    assert sum(different) <= few * len(written)
    assert (codes == 0x7F).all() and scales.isnan().all()


def test_fp8_keeps_nan(device: str) -> None:
    """A NaN in a head vector stays one in the cache, so that the logits show it."""
    heads = Heads(1, 1, 64)
    qkv = torch.randn(1, 192, device=device).bfloat16()
    qkv[0, 64 + 5] = qkv[0, 128 + 9] = float("nan")
    _, codes, scales = _fp8_append(qkv, _table(64).to(device), heads, True, {"request": (0, 3, 1)})
    values = codes.view(torch.float8_e4m3fn)[:, 0, 0, 3].float() * scales[:, 0, 0, 3, None]
    assert values[0, 4:6].isnan().all() and values[1, 9].isnan()  # RoPE spreads it over the pair
    assert values.isnan().sum() == 3
