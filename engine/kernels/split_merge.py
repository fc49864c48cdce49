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
):
    """Merge partials first, first + stride, ... (`count` of them) in this order, WIDTH a round.

    partial_ptr: fp32 [max_splits, GROUP, D]; stats_ptr: fp32 [max_splits, 2, GROUP] of tops and totals.
    Returns top, total [BLOCK_G] and acc [BLOCK_G, BLOCK_D]. Reads go to L2 (.cg): other
    multiprocessors wrote the partials.
    """
    offs_g = tl.arange(0, BLOCK_G)
    offs_d = tl.arange(0, BLOCK_D)
    heads = offs_g < GROUP
    top = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for base in range(0, count, WIDTH):
        # [head, partial, D]: warps share out the heads, so a thread holds all partials of its
        # elements and the sums over partials need no exchange between warps.
        each = base + tl.arange(0, WIDTH)
        index = (first + each * stride)[None, :]
        there = heads[:, None] & (each < count)[None, :]
        stats_at = stats_ptr + index * (2 * GROUP) + offs_g[:, None]
        part_at = partial_ptr + (index * GROUP + offs_g[:, None])[:, :, None] * HEAD_DIM
        part = tl.load(
            part_at + offs_d[None, None, :],
            mask=there[:, :, None] & (offs_d < HEAD_DIM)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        tops = tl.load(stats_at, mask=there, other=float("-inf"), cache_modifier=".cg")
        totals = tl.load(stats_at + GROUP, mask=there, other=0.0, cache_modifier=".cg")
        # Padding heads keep a finite top and a total of 1: neither -inf - -inf nor 0 / 0.
        new_top = tl.where(heads, tl.maximum(top, tl.max(tops, 1)), 0.0)
        decay = tl.exp2(top - new_top)
        weights = tl.exp2(tops - new_top[:, None])
        total = tl.where(heads, total * decay + tl.sum(weights * totals, 1), 1.0)
        acc = acc * decay[:, None] + tl.sum(part * weights[:, :, None], 1)
        top = new_top
    return top, total, acc


@triton.jit
def store_heads(base_ptr, values, heads, GROUP, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Store [heads, D] values of the group's real heads at base_ptr, contiguous."""
    offs_d = tl.arange(0, BLOCK_D)
    mask = (heads < GROUP)[:, None] & (offs_d < HEAD_DIM)[None, :]
    at = base_ptr + heads[:, None] * HEAD_DIM + offs_d[None, :]
    tl.store(at, values.to(base_ptr.dtype.element_ty), mask=mask)
