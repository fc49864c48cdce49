"""Device side of `decode_attention.py`: one program's chunk of keys, and the merge by the last to arrive."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from engine.kernels.kv_fp8 import FP8_UNIT, attend_pairs, fp16_rows
from engine.kernels.online_softmax import attend
from engine.kernels.split_merge import arrive, merge, store_heads
from engine.kernels.sync import gdc_launch_dependents, gdc_wait

if TYPE_CHECKING:
    from engine.kernels.decode_attention import DecodeAttentionConfig

MIN_DOT_ROWS = 16  # the M of mma.m16n8k16


@triton.jit
def _load_fp8(
    pointers,
    start,
    ready,
    other,
    STEP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Tile of `attend_pairs`: row i is key start + i * STEP where ready[i], else row i of `other`.

    pointers: K, V as words, and the scales of the slot's KV head.
    """
    k_ptr, v_ptr, k_scale_ptr, v_scale_ptr = pointers
    row = tl.arange(0, BLOCK_N) * STEP
    offs_d = tl.arange(0, BLOCK_D)
    offs_w = tl.arange(0, BLOCK_D // 2)
    k_at = k_ptr + start * HEAD_DIM + row[:, None] * HEAD_DIM + offs_d[None, :]
    v_at = v_ptr + start * (HEAD_DIM // 2) + row[:, None] * (HEAD_DIM // 2) + offs_w[None, :]
    in_k = ready[:, None] & (offs_d < HEAD_DIM)[None, :]
    in_v = ready[:, None] & (offs_w < HEAD_DIM // 2)[None, :]
    return (
        tl.load(k_at, mask=in_k, other=other[0]),
        tl.load(v_at, mask=in_v, other=other[1]),
        tl.load(k_scale_ptr + start + row, mask=ready, other=other[2]),
        tl.load(v_scale_ptr + start + row, mask=ready, other=other[3]),
    )


@triton.jit
def decode_attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    k_scale_ptr,
    v_scale_ptr,
    positions_ptr,
    row_slots_ptr,
    out_ptr,
    partial_ptr,
    stats_ptr,
    tickets_ptr,
    max_len,
    max_splits,
    qk_scale,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    FLAT_BLOCKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    FAN_IN: tl.constexpr,
    WIDTH: tl.constexpr,
    PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
):
    FP8: tl.constexpr = k_scale_ptr is not None
    split = tl.program_id(0)
    kv_head = tl.program_id(1)
    row = tl.program_id(2)
    pair = row * tl.num_programs(1) + kv_head
    if PDL:
        gdc_launch_dependents()
        if not PREFETCH:
            gdc_wait()

    slot = tl.load(row_slots_ptr + row)
    position = tl.load(positions_ptr + tl.maximum(slot, 0))
    length = tl.where(slot < 0, 0, position + 1)
    blocks = tl.cdiv(length, BLOCK_N)
    flat = tl.cdiv(blocks, FAN_IN)
    spread = tl.cdiv(blocks, tl.num_programs(0))
    chunk = tl.where(flat <= FLAT_BLOCKS, tl.maximum(flat, spread), spread)
    chunk = tl.maximum(chunk, 1) * BLOCK_N
    active = tl.cdiv(length, chunk)
    first = split * chunk
    last = tl.minimum(first + chunk, length)

    offs_m = tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    in_d = offs_d < HEAD_DIM
    line = (tl.maximum(slot, 0).to(tl.int64) * tl.num_programs(1) + kv_head) * max_len
    k_head_ptr = k_ptr + line * HEAD_DIM
    v_head_ptr = v_ptr + line * HEAD_DIM
    if FP8:
        v_words_ptr = v_head_ptr.to(tl.pointer_type(tl.int16), bitcast=True)
        pointers = k_head_ptr, v_words_ptr, k_scale_ptr + line, v_scale_ptr + line
    tile = offs_n[:, None] * HEAD_DIM + offs_d[None, :]
    # The chunk's first tile goes to registers now and is folded in last, so that the loop's own
    # loads start at once. The current token's row comes from the kernel before: never before the wait.
    keys0 = first + offs_n
    if PREFETCH:
        ready0 = (keys0 < last) & (keys0 < position)
    else:
        ready0 = keys0 < last
    if FP8:
        empty = 0.0, 0, 0.0, 0.0
        tile0 = _load_fp8(pointers, first, ready0, empty, 1, HEAD_DIM, BLOCK_N, BLOCK_D)
    else:
        mask0 = ready0[:, None] & in_d[None, :]
        k0_at = k_head_ptr + first * HEAD_DIM + tile
        v0_at = v_head_ptr + first * HEAD_DIM + tile
        k0 = tl.load(k0_at, mask=mask0, other=0.0)
        v0 = tl.load(v0_at, mask=mask0, other=0.0)
    if PDL and PREFETCH:
        gdc_wait()

    out_head_ptr = out_ptr + pair * GROUP * HEAD_DIM
    if split < active:
        q = tl.load(
            q_ptr + pair * GROUP * HEAD_DIM + offs_m[:, None] * HEAD_DIM + offs_d[None, :],
            mask=(offs_m < GROUP)[:, None] & in_d[None, :],
            other=0.0,
        )
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        totals = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        if FP8:
            q16, unit = fp16_rows(q)
            scale = unit * qk_scale
            half = tl.zeros([BLOCK_M, BLOCK_D // 2], tl.float32)
            state = top, totals, half, half
            for start in range(first + BLOCK_N, last, BLOCK_N):
                live = start + offs_n < last
                kv = _load_fp8(pointers, start, live, empty, 1, HEAD_DIM, BLOCK_N, BLOCK_D)
                state = attend_pairs(q16, scale, kv, live[None, :], state, q.dtype)
            if PREFETCH:  # as below; from one address, as a tile of them would not outlive the loop
                new = keys0 == position
                tile0 = _load_fp8(pointers, position, new, tile0, 0, HEAD_DIM, BLOCK_N, BLOCK_D)
            live = (keys0 < last)[None, :]
            state = attend_pairs(q16, scale, tile0, live, state, q.dtype)
            top, totals, acc_even, acc_odd = state
            acc = tl.reshape(tl.join(acc_even, acc_odd), [BLOCK_M, BLOCK_D]) * FP8_UNIT
        else:
            acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
            for start in range(first + BLOCK_N, last, BLOCK_N):
                keys = start + offs_n
                mask = (keys < last)[:, None] & in_d[None, :]
                k = tl.load(k_head_ptr + start * HEAD_DIM + tile, mask=mask, other=0.0)
                v = tl.load(v_head_ptr + start * HEAD_DIM + tile, mask=mask, other=0.0)
                top, totals, acc = attend(
                    q, k, v, (keys < last)[None, :], top, totals, acc, qk_scale, True, True
                )
            if (
                PREFETCH
            ):  # The current token is the last key: here only if the loop above was empty.
                mask0 = (keys0 == position)[:, None] & in_d[None, :]
                k0 = tl.load(k0_at, mask=mask0, other=k0)
                v0 = tl.load(v0_at, mask=mask0, other=v0)
            live = (keys0 < last)[None, :]
            top, totals, acc = attend(q, k0, v0, live, top, totals, acc, qk_scale, True, True)
        total = tl.sum(totals, 1)

        if active == 1:
            store_heads(out_head_ptr, acc / total[:, None], offs_m, GROUP, HEAD_DIM, BLOCK_D)
        else:
            pair_partial = partial_ptr + pair.to(tl.int64) * max_splits * GROUP * HEAD_DIM
            pair_stats = stats_ptr + pair * max_splits * 2 * GROUP
            pair_tickets = tickets_ptr + pair * (1 + max_splits)
            mine = pair_stats + split * 2 * GROUP + offs_m
            tl.store(mine, top, mask=offs_m < GROUP)
            tl.store(mine + GROUP, total, mask=offs_m < GROUP)
            my_partial = pair_partial + split * GROUP * HEAD_DIM
            store_heads(my_partial, acc, offs_m, GROUP, HEAD_DIM, BLOCK_D)
            bunch = split // FAN_IN
            head = bunch * FAN_IN
            size = tl.minimum(active - head, FAN_IN)
            if arrive(pair_tickets + 1 + bunch, size):
                offs_g = tl.arange(0, BLOCK_G)
                top_g, total_g, acc_g = merge(
                    pair_partial,
                    pair_stats,
                    head,
                    1,
                    size,
                    GROUP,
                    HEAD_DIM,
                    BLOCK_G,
                    BLOCK_D,
                    WIDTH,
                )
                bunches = tl.cdiv(active, FAN_IN)
                if bunches == 1:
                    final = acc_g / total_g[:, None]
                    store_heads(out_head_ptr, final, offs_g, GROUP, HEAD_DIM, BLOCK_D)
                else:
                    # The merged bunch replaces its first partial, which no one else reads.
                    tl.debug_barrier()
                    merged = pair_stats + head * 2 * GROUP + offs_g
                    tl.store(merged, top_g, mask=offs_g < GROUP)
                    tl.store(merged + GROUP, total_g, mask=offs_g < GROUP)
                    head_partial = pair_partial + head * GROUP * HEAD_DIM
                    store_heads(head_partial, acc_g, offs_g, GROUP, HEAD_DIM, BLOCK_D)
                    if arrive(pair_tickets, bunches):
                        _, total_all, acc_all = merge(
                            pair_partial,
                            pair_stats,
                            0,
                            FAN_IN,
                            bunches,
                            GROUP,
                            HEAD_DIM,
                            BLOCK_G,
                            BLOCK_D,
                            WIDTH,
                        )
                        whole = acc_all / total_all[:, None]
                        store_heads(out_head_ptr, whole, offs_g, GROUP, HEAD_DIM, BLOCK_D)
    elif (split == 0) & (slot < 0):
        zeros = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        store_heads(out_head_ptr, zeros, offs_m, GROUP, HEAD_DIM, BLOCK_D)


def kernel_constants(
    config: DecodeAttentionConfig, group: int, head_dim: int, *, prefetch: bool, pdl: bool
) -> dict[str, int | bool]:
    """Compile-time arguments of `decode_attention_kernel` for one config."""
    block_g = triton.next_power_of_2(group)
    block_d = max(16, triton.next_power_of_2(head_dim))
    # A merge round holds 128 fp32 registers a thread of partials, all loaded at once; groups beyond 8
    # leave less room.
    registers = 128 if block_g <= 8 else 32
    width = registers * 32 * config.num_warps // (block_g * block_d)
    return {
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "FLAT_BLOCKS": config.flat_blocks,
        "BLOCK_M": max(MIN_DOT_ROWS, block_g),
        "BLOCK_G": block_g,
        "BLOCK_N": config.block_n,
        "BLOCK_D": block_d,
        "FAN_IN": config.fan_in,
        "WIDTH": max(1, min(config.fan_in, width)),
        "PREFETCH": prefetch,
        "PDL": pdl,
    }
