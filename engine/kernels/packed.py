"""Two 16-bit floats in one int32 word: unpack to fp32, round, pack. Element 0 is the low half."""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.sync import canonical_words


@triton.jit
def low_half(word, DTYPE: tl.constexpr):
    """fp32 value of the low 16 bits."""
    if tl.bfloat16 == DTYPE:  # the upper half of an fp32: one instruction
        return (word << 16).to(tl.float32, bitcast=True)
    return (word & 0xFFFF).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def high_half(word, DTYPE: tl.constexpr):
    """fp32 value of the high 16 bits."""
    if tl.bfloat16 == DTYPE:
        return (word & -65536).to(tl.float32, bitcast=True)
    return (word >> 16).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def pack_halves(low, high, DTYPE: tl.constexpr):
    """Round two fp32 tensors to nearest even and pack them; a zero result is +0.0."""
    low = low.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    high = high.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) << 16
    return canonical_words(low | high)


@triton.jit
def sum_word(words, i, residual, WORLD: tl.constexpr, RESIDUAL: tl.constexpr, DTYPE: tl.constexpr):
    """(low, high) fp32: word i of WORLD messages of 4 words, summed in rank order, then the residual."""
    low = low_half(words[i], DTYPE)
    high = high_half(words[i], DTYPE)
    for r in tl.static_range(1, WORLD):
        low += low_half(words[4 * r + i], DTYPE)
        high += high_half(words[4 * r + i], DTYPE)
    if RESIDUAL:
        low += low_half(residual[i], DTYPE)
        high += high_half(residual[i], DTYPE)
    return low, high


@triton.jit
def sum_messages(words, residual, WORLD: tl.constexpr, RESIDUAL: tl.constexpr, DTYPE: tl.constexpr):
    """Sum WORLD messages of 4 words in rank order in fp32, then the residual, one rounding.

    words: WORLD x 4 int32 tensors; residual: 4 int32 tensors. Returns 4 int32 tensors.
    """
    result = ()
    for i in tl.static_range(4):
        low, high = sum_word(words, i, residual, WORLD, RESIDUAL, DTYPE)
        result += (pack_halves(low, high, DTYPE),)  # type: ignore[assignment]
    return result


@triton.jit
def spread_words(low, high):
    """The halves of 4 words (two tuples of 4 tensors [..., L]) as one tensor [..., L, 2, 2, 2]: flattened
    over its last four axes it is in memory order."""
    first = tl.join(tl.join(low[0], low[2]), tl.join(low[1], low[3]))
    second = tl.join(tl.join(high[0], high[2]), tl.join(high[1], high[3]))
    return tl.join(first, second)
