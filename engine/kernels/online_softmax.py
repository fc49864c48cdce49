"""One tile of keys folded into an online softmax (Milakov and Gimelshein, arXiv:1805.02867, base 2).

Shared by decode and prefill attention. Per query row the state is `top` (largest score so far, in
log2 units), `total` (sum of exp2(score - top)) and `acc` (the same weights times V), all fp32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.sync import INTERPRET

LOG2_E = 1.4426950408889634  # softmax scale * log2(e): exp2 is one instruction, exp is two


@triton.jit
def dot(a, b, acc):
    """a @ b + acc in fp32. The interpreter's own dot knows no bf16 (numpy has none): upcast there."""
    if INTERPRET:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc)


@triton.jit
def weigh(scores, live, top, total, scale, wide_scale, MASKED: tl.constexpr, DEFER: tl.constexpr):
    """Scores [M, N] of one tile -> (top, total, decay [M], weights [M, N]); arguments as in `attend`.

    scale > 0 takes scores to log2 units: a scalar, or [M] with wide_scale = scale[:, None].
    """
    if MASKED:
        scores = tl.where(live, scores, float("-inf"))
    # The maximum is scaled once a row; below, scale and subtraction are one FMA an element.
    new_top = tl.maximum(top, tl.max(scores, 1) * scale)
    decay = tl.exp2(top - new_top)
    weights = tl.exp2(scores * wide_scale - new_top[:, None])
    if DEFER:
        total = total * decay[:, None] + weights
    else:
        total = total * decay + tl.sum(weights, 1)
    return new_top, total, decay, weights


@triton.jit
def attend(q, k, v, live, top, total, acc, qk_scale, MASKED: tl.constexpr, DEFER: tl.constexpr):
    """Fold keys k, v [N, D] into the state of queries q [M, D]; qk_scale = scale * log2(e) > 0.

    live: keys that count, broadcastable to [M, N]; ignored unless MASKED. Every row of the state must
    have met a live key by the end of its first tile, else -inf - -inf makes NaN.
    DEFER: total is [M, N], one sum a column, for the caller to add up after the last tile: where the
    keys are spread over the warps this saves an exchange a tile. Else total is [M].
    """
    scores = dot(q, tl.trans(k), tl.zeros([q.shape[0], k.shape[0]], tl.float32))
    top, total, decay, weights = weigh(scores, live, top, total, qk_scale, qk_scale, MASKED, DEFER)
    acc = dot(weights.to(v.dtype), v, acc * decay[:, None])
    return top, total, acc
