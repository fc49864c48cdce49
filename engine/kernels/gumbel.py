"""Gumbel noise of sampling: a 32-bit counter hash of (seed, position, GLOBAL vocabulary id).

    g = -log(E),  E = -log(1 - u),  u in (0, 1)

argmax over v of logit[v] + T * g(v) draws exactly from softmax(logit / T) (Gumbel 1954; Maddison et
al., arXiv:1411.0030). The noise depends on nothing else, so neither does the token: not on the TP
degree, the batch row or the grid.
"""

from __future__ import annotations

import numpy as np
import triton
import triton.language as tl


@triton.jit
def _mix(h):
    """32-bit finaliser of MurmurHash3 (public domain, A. Appleby): full avalanche."""
    h ^= h >> 16
    h *= 0x85EBCA6B
    h ^= h >> 13
    h *= 0xC2B2AE35
    return h ^ (h >> 16)


@triton.jit
def gumbel(seed, position, ids):
    """Standard Gumbel noise, fp32, of int32 tensors (seed and position scalars)."""
    key = _mix(seed.to(tl.uint32) + 0x9E3779B9)
    key = _mix(key ^ (position.to(tl.uint32) * 0x85EBCA77 + 0x165667B1))
    h = _mix(_mix(ids.to(tl.uint32) * 0x9E3779B1 + key) ^ key)
    # u in (0, 1). Small u decides the maximum: steps of 2^-32 there, and a series instead of
    # -log(1 - u), which would lose u's low bits in fp32. The largest u would round to 1.
    u = tl.minimum((h.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)
    series = u + 0.5 * u * u
    exponential = tl.where(u < 0.0009765625, series, -tl.log(1.0 - u))
    return -tl.log(exponential)


def gumbel_ref(seed: int, position: int, ids: np.ndarray) -> np.ndarray:
    """`gumbel` in numpy: bit for bit what the interpreter computes; a GPU's log may differ by an
    ulp.
    """

    def mix(h: np.ndarray) -> np.ndarray:
        h = (h ^ (h >> 16)) * np.uint32(0x85EBCA6B)
        h = (h ^ (h >> 13)) * np.uint32(0xC2B2AE35)
        return h ^ (h >> 16)

    with np.errstate(over="ignore", divide="ignore"):
        key = mix(np.array([seed & 0xFFFFFFFF], dtype=np.uint32) + np.uint32(0x9E3779B9))
        where = np.array([position & 0xFFFFFFFF], dtype=np.uint32)
        key = mix(key ^ (where * np.uint32(0x85EBCA77) + np.uint32(0x165667B1)))
        h = mix(mix(ids.astype(np.uint32) * np.uint32(0x9E3779B1) + key) ^ key)
        u = (h.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32)
        u = np.minimum(u, np.float32(0.99999994))
        series = u + np.float32(0.5) * u * u
        exponential = np.where(u < np.float32(2.0**-10), series, -np.log(np.float32(1.0) - u))
        return -np.log(exponential)
