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

FP8 KV (kv_fp8.py): 0.516 of these bytes, but every element is widened: a key takes 25 (fp16) to 33 warp
instructions of the loop as compiled (D = 128), at the copy bandwidth 45 to 58 % of a multiprocessor's issue
slots, so the heuristic puts 8 warps on each.

Row independence: num_splits, block_n, num_warps, fan_in and flat_blocks fix where chunks begin and the
order of every sum. They may depend on the model, the context limit and the SM count, never on the
number of rows: then a slot gives the same bits alone and among seven others.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch.nn.functional import scaled_dot_product_attention

from engine.errors import EngineError
from engine.kernels.decode_attention_kernel import decode_attention_kernel, kernel_constants
from engine.kernels.kv_fp8 import KVScales, read_kv
from engine.kernels.online_softmax import LOG2_E

SOURCES = (
    "decode_attention.py", "decode_attention_kernel.py", "online_softmax.py", "kv_fp8.py",
    "split_merge.py", "sync.py",
)  # fmt: skip
KEY_FIELDS = ("num_kv_heads", "group", "head_dim", "context", "kv_dtype")  # never rows
MAX_SPLITS = 132  # of the heuristic: a workspace of this many serves every shape


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
    element = kv_dtype.itemsize
    one_wave = max(1, sm_count // num_kv_heads)
    programs = min(2 * one_wave if context >= 1024 * one_wave else one_wave, MAX_SPLITS)
    # 16 KB of K and 16 KB of V a stage: 3 stages and 2 programs fit the 227 KB of shared memory.
    tile, num_warps, num_stages = 16384, 8 if head_dim > 128 else 4, 3  # 4 would spill
    if element == 1 and head_dim <= 128:
        # Conversions to 16 bits want 8 warps a multiprocessor; 4 of them hold tiles of 8 KB without spills.
        alone = programs * num_kv_heads <= sm_count
        tile, num_warps, num_stages = (16384, 8, 3) if alone else (8192, 4, 4)
    block_n = min(128, max(16, tile // (triton.next_power_of_2(head_dim) * element)))
    return DecodeAttentionConfig(
        num_splits=min(programs, triton.cdiv(context, block_n)),
        block_n=block_n,
        num_warps=num_warps,
        num_stages=num_stages,
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
    scales: KVScales | None = None,
    pdl: bool = False,
    prefetch: bool = False,
) -> None:
    """Attend each row's query to keys 0..positions[slot] of its slot; rows of slot -1 become zeros.

    q, out [R, NQ * D] 16-bit; k_cache, v_cache [S, NKV, L, D] 16-bit, or e4m3 with scales
    (kv_fp8.py); positions [S], row_slots [R] int32.
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
        *(scales or (None, None)),
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
    scales: KVScales | None = None,
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
        at = (slice(slot, slot + 1), slice(None), slice(length))
        keys, values = read_kv(k_cache, v_cache, scales, at, compute)
        attended = scaled_dot_product_attention(grouped.to(compute), keys, values, scale=scale)
        out[row] = attended.flatten().to(q.dtype)
    return out
