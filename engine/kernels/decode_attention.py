"""GQA flash-decoding: one query token a row over the KV of its slot, split over the context.

    out[r, h] = softmax(scale * q[r, h] . K[slot, h / group, 0..pos]) @ V[slot, h / group, 0..pos]

with slot = row_slots[r] and pos = positions[slot], the token being decoded: its K and V are already
in the cache. Split-K over the context with a log-sum-exp merge is Flash-Decoding (Dao et al., 2023);
the online softmax is Milakov and Gimelshein's (arXiv:1805.02867).

One program takes one (row, KV head, chunk of the context). The group's query heads (7 for 7B, 8 for
72B) are the M dimension of the tensor core product, padded to 16, so each KV byte is read once.
Chunks are whole blocks of block_n keys and follow the slot's actual length, read on the device: up to
fan_in * flat_blocks blocks are cut into at most fan_in chunks, longer contexts over all num_splits
programs; programs beyond the last chunk end at once. The last program to arrive merges: fan_in
neighbouring chunks share a ticket, and the last of those bunches to be done merges the bunches, so that
no program reads 132 partials. One merge costs about a microsecond, hence the rule for short contexts.
Partials merge in chunk order whoever comes last: results do not depend on timing.

Shapes per rank (KV bytes at context 8192, time at the measured copy bandwidth of 4.29 TB/s):

    | model, TP | NQ / NKV | D   | KV bytes a row | roof    |
    |-----------|----------|-----|----------------|---------|
    | 7B 1      | 28 / 4   | 128 | 16.8 MB        | 3.9 us  |
    | 7B 2      | 14 / 2   | 128 | 8.4 MB         | 2.0 us  |
    | 7B 4      | 7 / 1    | 128 | 4.2 MB         | 1.0 us  |
    | 72B 1     | 64 / 8   | 128 | 33.6 MB        | 7.8 us  |
    | 72B 2     | 32 / 4   | 128 | 16.8 MB        | 3.9 us  |
    | 72B 4     | 16 / 2   | 128 | 8.4 MB         | 2.0 us  |
    | 72B 8     | 8 / 1    | 128 | 4.2 MB         | 1.0 us  |

Row independence: num_splits, block_n, num_warps, fan_in and flat_blocks fix where chunks begin and the
order of every sum. They may depend on the model, the context limit and the SM count, never on the
number of rows: then a slot gives the same bits alone and among seven others.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch.nn.functional import scaled_dot_product_attention

from engine.errors import EngineError
from engine.kernels.online_softmax import LOG2_E, attend
from engine.kernels.split_merge import arrive, merge, store_heads
from engine.kernels.sync import gdc_launch_dependents, gdc_wait

SOURCES = ("decode_attention.py", "online_softmax.py", "split_merge.py", "sync.py")
KEY_FIELDS = ("num_kv_heads", "group", "head_dim", "context", "kv_dtype")  # never rows
MAX_SPLITS = 132  # of the heuristic: a workspace of this many serves every shape
MIN_DOT_ROWS = 16  # the M of mma.m16n8k16


@dataclass(frozen=True)
class DecodeAttentionConfig:
    """At most num_splits programs a (row, KV head), tiles of block_n keys, fan_in partials a merge.

    Contexts of up to fan_in * flat_blocks * block_n keys make at most fan_in chunks, for a single merge.
    block_n, num_warps and fan_in are powers of two.
    """

    num_splits: int
    block_n: int
    num_warps: int
    num_stages: int
    fan_in: int = 16
    flat_blocks: int = 4


def heuristic(
    num_kv_heads: int,
    context: int,
    rows: int,
    sm_count: int,
    kv_dtype: torch.dtype,
    head_dim: int = 128,
) -> DecodeAttentionConfig:
    """Config for KV heads per rank, context limit (max_model_len or the graph's bucket) and SM count.

    `rows` is deliberately unused: the same slot must give the same bits in a batch of 1 and of 8.
    One program a multiprocessor at one row; two where a chunk still has 512 keys, so that one
    program's softmax hides behind the other's loads. At most MAX_SPLITS.
    """
    del rows
    element = torch.empty(0, dtype=kv_dtype).element_size()
    # 16 KB of K and 16 KB of V a stage: 3 stages and 2 programs fit the 227 KB of shared memory.
    block_n = min(128, max(16, 16384 // (triton.next_power_of_2(head_dim) * element)))
    one_wave = max(1, sm_count // num_kv_heads)
    programs = 2 * one_wave if context >= 1024 * one_wave else one_wave
    return DecodeAttentionConfig(
        num_splits=min(programs, triton.cdiv(context, block_n), MAX_SPLITS),
        block_n=block_n,
        num_warps=8 if head_dim > 128 else 4,  # 4 would spill
        num_stages=3,
    )


@dataclass(frozen=True)
class DecodeAttentionWorkspace:
    """Buffers of `decode_attention`; one serves every layer of a rank, as launches follow each other.

    partial: fp32 [R, NKV, max_splits, group, D], sums of exp2(score - max) * V, not yet normalised.
    stats: fp32 [R, NKV, max_splits, 2, group], the row maxima (log2 units) and sums of each chunk.
    tickets: int32 [R, NKV, 1 + max_splits], all zero between launches.
    """

    partial: torch.Tensor
    stats: torch.Tensor
    tickets: torch.Tensor

    def reset(self) -> None:
        """Zero the tickets: after a launch that did not end."""
        self.tickets.zero_()


def workspace(
    rows: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    max_splits: int,
    device: torch.device | str,
) -> DecodeAttentionWorkspace:
    """Allocate the workspace for up to `rows` decode rows and configs of up to `max_splits` splits."""
    group = num_heads // num_kv_heads
    lead = (rows, num_kv_heads, max_splits)
    return DecodeAttentionWorkspace(
        partial=torch.zeros(*lead, group, head_dim, dtype=torch.float32, device=device),
        stats=torch.zeros(*lead, 2, group, dtype=torch.float32, device=device),
        tickets=torch.zeros(rows, num_kv_heads, 1 + max_splits, dtype=torch.int32, device=device),
    )


@triton.jit
def decode_attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
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
    head_at = (tl.maximum(slot, 0).to(tl.int64) * tl.num_programs(1) + kv_head) * max_len * HEAD_DIM
    k_head_ptr = k_ptr + head_at
    v_head_ptr = v_ptr + head_at
    tile = offs_n[:, None] * HEAD_DIM + offs_d[None, :]
    # The chunk's first tile goes to registers now and is folded in last, so that the loop's own
    # loads start at once. The current token's row comes from the kernel before: never before the wait.
    keys0 = first + offs_n
    if PREFETCH:
        ready0 = (keys0 < last) & (keys0 < position)
    else:
        ready0 = keys0 < last
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
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        for start in range(first + BLOCK_N, last, BLOCK_N):
            keys = start + offs_n
            mask = (keys < last)[:, None] & in_d[None, :]
            k = tl.load(k_head_ptr + start * HEAD_DIM + tile, mask=mask, other=0.0)
            v = tl.load(v_head_ptr + start * HEAD_DIM + tile, mask=mask, other=0.0)
            top, totals, acc = attend(
                q, k, v, (keys < last)[None, :], top, totals, acc, qk_scale, True, True
            )
        if PREFETCH:  # The current token is the last key: here only if the loop above was empty.
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


def decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    positions: torch.Tensor,
    row_slots: torch.Tensor,
    out: torch.Tensor,
    workspace: DecodeAttentionWorkspace,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    scale: float,
    config: DecodeAttentionConfig,
    pdl: bool = False,
    prefetch: bool = False,
) -> None:
    """Attend each row's query to keys 0..positions[slot] of its slot; rows of slot -1 become zeros.

    q, out [R, NQ * D] 16-bit; k_cache, v_cache [S, NKV, L, D] 16-bit; positions [S], row_slots [R] int32.
    prefetch: read row_slots, positions and the KV of OLDER positions before the dependency wait. Legal
    only if whatever wrote them had completed before this launch's graph began: true inside one graph
    replay a step (KV of older positions, positions and row_slots are then constants of the step and
    programmatic edges do not cross replays); false for eager launches back to back with PDL, and for
    several steps in one graph. Bits are the same either way.
    Raises EngineError if the config asks for more splits than the workspace holds.
    """
    if config.num_splits > workspace.partial.shape[2]:
        raise EngineError(
            f"config.num_splits = {config.num_splits} exceeds the workspace's max_splits = "
            f"{workspace.partial.shape[2]}; allocate workspace(max_splits=...) for it"
        )
    group = num_heads // num_kv_heads
    grid = (config.num_splits, num_kv_heads, q.shape[0])
    decode_attention_kernel[grid](
        q,
        k_cache,
        v_cache,
        positions,
        row_slots,
        out,
        workspace.partial,
        workspace.stats,
        workspace.tickets,
        k_cache.shape[2],
        workspace.partial.shape[2],
        scale * LOG2_E,
        **kernel_constants(config, group, head_dim, prefetch=prefetch, pdl=pdl),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        launch_pdl=pdl,
    )


def decode_attention_ref(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    positions: torch.Tensor,
    row_slots: torch.Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    scale: float,
) -> torch.Tensor:
    """Reference of `decode_attention`: returns out [R, num_heads * head_dim] in q's dtype.

    Computes in fp64 if q is fp64, else in fp32.
    """
    compute = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = torch.zeros_like(q)
    position_list = positions.tolist()
    for row, slot in enumerate(row_slots.tolist()):
        if slot < 0:
            continue
        length = position_list[slot] + 1
        # A KV head's group of query heads takes the place of the query axis: K and V are not repeated.
        grouped = q[row].view(1, num_kv_heads, num_heads // num_kv_heads, head_dim)
        keys = k_cache[slot : slot + 1, :, :length].to(compute)
        values = v_cache[slot : slot + 1, :, :length].to(compute)
        attended = scaled_dot_product_attention(grouped.to(compute), keys, values, scale=scale)
        out[row] = attended.flatten().to(q.dtype)
    return out
