"""Merge of the partial softmax results of one (row, KV head): the last program to arrive does it.

A partial is (top, total, acc) of `online_softmax`, not yet normalised. Any set of partials merges to
top = max(tops), total = sum(2^(top_i - top) total_i), acc = sum(2^(top_i - top) acc_i), which is itself a
partial: so merges nest. All sums run in chunk order, whoever arrives last.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def arrive(ticket_ptr, expected):
    """True in the last of `expected` programs to arrive, which then sees what the others stored.

    The barrier before orders every thread's stores before the release; the one after orders every
    thread's loads after the acquire. The last one re-arms the ticket for the next launch.
    """
    tl.debug_barrier()
    arrived = tl.atomic_add(ticket_ptr, 1, sem="acq_rel", scope="gpu")
    tl.debug_barrier()
    last = arrived == expected - 1
    if last:
        tl.store(ticket_ptr, 0)
    return last


@triton.jit
def merge(
    partial_ptr,
    stats_ptr,
    first,
    stride,
    count,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WIDTH: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Merge partials first, first + stride, ... (count <= WIDTH of them), always in this order.

    Reads go to L2 (.cg): other multiprocessors wrote the partials.
    """
    offs_g = tl.arange(0, BLOCK_G)
    offs_d = tl.arange(0, BLOCK_D)
    heads = offs_g < GROUP
    each = tl.arange(0, WIDTH)
    stats_at = stats_ptr + (first + each * stride)[:, None] * (2 * GROUP) + offs_g[None, :]
    there = (each < count)[:, None] & heads[None, :]
    tops = tl.load(stats_at, mask=there, other=float("-inf"), cache_modifier=".cg")
    totals = tl.load(stats_at + GROUP, mask=there, other=0.0, cache_modifier=".cg")
    top = tl.where(heads, tl.max(tops, 0), 0.0)  # padding heads: -inf - -inf would be NaN
    total = tl.sum(tl.exp2(tops - top[None, :]) * totals, 0)
    total = tl.where(heads, total, 1.0)
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for base in tl.static_range(0, WIDTH, UNROLL):
        each_u = base + tl.arange(0, UNROLL)
        index = first + each_u * stride
        there_u = (each_u < count)[:, None] & heads[None, :]
        tops_u = tl.load(
            stats_ptr + index[:, None] * (2 * GROUP) + offs_g[None, :],
            mask=there_u,
            other=float("-inf"),
            cache_modifier=".cg",
        )
        at = (index[:, None, None] * GROUP + offs_g[None, :, None]) * HEAD_DIM
        part = tl.load(
            partial_ptr + at + offs_d[None, None, :],
            mask=there_u[:, :, None] & (offs_d < HEAD_DIM)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        acc += tl.sum(part * tl.exp2(tops_u - top[None, :])[:, :, None], 0)
    return top, total, acc


@triton.jit
def store_heads(base_ptr, values, heads, GROUP, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Store [heads, D] values of the group's real heads at base_ptr, contiguous."""
    offs_d = tl.arange(0, BLOCK_D)
    mask = (heads < GROUP)[:, None] & (offs_d < HEAD_DIM)[None, :]
    at = base_ptr + heads[:, None] * HEAD_DIM + offs_d[None, :]
    tl.store(at, values.to(base_ptr.dtype.element_ty), mask=mask)
