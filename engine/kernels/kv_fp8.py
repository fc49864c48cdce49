"""FP8 KV cache: e4m3 K and V with one fp32 scale for each (slot, KV head, position), for K and for V.

    scale = max |x| / 448 over the head vector x [D] of one token, x8 = e4m3(x / scale)

made on the device when the token is appended (rope_append.py), from its own head vector as a 16-bit cache
would hold it: nothing is calibrated, and no other token changes a token's bytes. e4m3 travels from HBM to
the registers. Decode multiplies once a key, not once an element: q . (s_k k8) = s_k (q . k8) after the first
product, p (s_v v8) = (p s_v) v8 before the second, so that what enters the products is exact. Prefill, whose
products read shared memory, dequantises there, to 16 bits.

Error: rounding to nearest moves an element by at most 2^-4 of itself (half a step of 2^-3), 2.6 % RMS over
uniform mantissas; an element below 2^-6 scale by at most 2^-10 scale, which is 2^-18.8 of max |x|.
Bytes of a token and KV head: 2 (D + 4) against 4 D in 16 bits, 0.516 of it at D = 128.

Conversions are what decode could be bound by: at the copy bandwidth a multiprocessor takes in 18.5 bytes a
clock. e4m3 -> fp16 is half an instruction an element, -> bf16 two, and Triton's own way to bf16 goes
through F2F, which runs at 16 lanes a clock. So in decode K becomes fp16, against q in fp16 with a power of
two taken out of each row, and V the activations' type, as its weights need bf16's range there.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from engine.kernels.online_softmax import dot, weigh
from engine.kernels.quantize_rows import FP8_MAX, quantize_rows_ref
from engine.kernels.sync import INTERPRET

KVScales = tuple[torch.Tensor, torch.Tensor]  # of K and of V, fp32 [S, NKV, L] each
Index = tuple[Any, ...]  # into [S, NKV, L]
# V's weights are p * 448 s_v = p max |v|: p s_v would be subnormal in fp16, while max |v| is a value that
# the activations' type holds. `FP8_UNIT` takes the 448 out of the result.
FP8_TOP = tl.constexpr(FP8_MAX)
FP8_UNIT = tl.constexpr(1.0 / FP8_MAX)


@triton.jit
def fp16_rows(q):
    """q [M, D] -> (q / unit in fp16, unit [M] fp32), unit the power of two below the row's largest element.

    Exact but for elements below 2^-14 of that, which lose at most 2^-25 of it.
    """
    q = q.to(tl.float32)
    largest = tl.max(tl.abs(q), 1).to(tl.int32, bitcast=True)
    unit = tl.maximum(largest & 0x7F800000, 0x00800000).to(tl.float32, bitcast=True)
    return (q / unit[:, None]).to(tl.float16), unit


@triton.jit
def widen(x, DTYPE: tl.constexpr):
    """e4m3 -> DTYPE (fp16 or fp32), exact, by one packed convert to fp16. The interpreter's way starts at
    fp32, as only that one knows NaN."""
    x = x.to(tl.float32) if INTERPRET else x.to(tl.float16)
    return x.to(DTYPE)


@triton.jit
def dequantize(x, scale, DTYPE: tl.constexpr):
    """x [N, D] e4m3 times scale [N] -> a 16-bit type, rounded once."""
    return (widen(x, tl.float32) * scale[:, None]).to(DTYPE)


@triton.jit
def widen_pairs(words, DTYPE: tl.constexpr):
    """int16 words of two e4m3 each -> (even elements, odd elements) in a 16-bit type, exact.

    Words, because V is read from shared memory transposed (ldmatrix.trans), in units of 16 bits; as bytes
    each would be a load of its own.
    """
    if INTERPRET:
        even = (words & 0xFF).to(tl.int8).to(tl.float8e4nv, bitcast=True)
        odd = ((words >> 8) & 0xFF).to(tl.int8).to(tl.float8e4nv, bitcast=True)
        return widen(even, tl.float32).to(DTYPE), widen(odd, tl.float32).to(DTYPE)
    # Two words in a register, bytes (e0 o0 e1 o1) from the low end, become (e0 e1) and (o0 o1).
    even, odd = tl.inline_asm_elementwise(
        """{
        .reg .b32 t; .reg .b16 e, o;
        prmt.b32 t, $2, $2, 0x3120;
        mov.b32 {e, o}, t;
        cvt.rn.f16x2.e4m3x2 $0, e;
        cvt.rn.f16x2.e4m3x2 $1, o;
        }""",
        "=r,=r,r",
        [words],
        dtype=(tl.float16, tl.float16),
        is_pure=True,
        pack=2,
    )
    return even.to(tl.float32).to(DTYPE), odd.to(tl.float32).to(DTYPE)


@triton.jit
def attend_pairs(q, scale, tile, live, state, DTYPE: tl.constexpr):
    """`online_softmax.attend` for decode: tile = (k [N, D] e4m3, v [N, D / 2] words, k_scale, v_scale [N]);
    state = (top [M], totals [M, N], acc of the even and of the odd elements [M, D / 2], 448 times too large).

    q [M, D] of `fp16_rows`; scale [M] = unit * softmax scale * log2(e); DTYPE: 16-bit type for V.
    """
    k, words, k_scale, v_scale = tile
    top, totals, acc_even, acc_odd = state
    scores = dot(q, tl.trans(widen(k, q.dtype)), tl.zeros([q.shape[0], k.shape[0]], tl.float32))
    scores *= k_scale[None, :]
    top, totals, decay, weights = weigh(
        scores, live, top, totals, scale, scale[:, None], True, True
    )
    weights = (weights * (v_scale * FP8_TOP)[None, :]).to(DTYPE)
    even, odd = widen_pairs(words, DTYPE)
    acc_even = dot(weights, even, acc_even * decay[:, None])
    acc_odd = dot(weights, odd, acc_odd * decay[:, None])
    return top, totals, acc_even, acc_odd


def read_kv(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    scales: KVScales | None,
    index: Index,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V at `index` [..., D] in `dtype`, fp32 or wider; e4m3 caches times their scales."""
    keys, values = k_cache[index].to(dtype), v_cache[index].to(dtype)
    if scales is None:
        return keys, values
    k_scale, v_scale = (scale[index].to(dtype)[..., None] for scale in scales)
    return keys * k_scale, values * v_scale


def write_kv(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    scales: KVScales | None,
    index: Index,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> None:
    """Store keys and values [..., D], any float type, at `index`; e4m3 caches take them quantised."""
    if scales is None:
        k_cache[index], v_cache[index] = keys.to(k_cache.dtype), values.to(v_cache.dtype)
        return
    for cache, scale, x in zip((k_cache, v_cache), scales, (keys, values)):
        cache[index], scale[index] = quantize_rows_ref(x)
