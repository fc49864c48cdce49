"""Causal GQA flash attention of a prefill chunk over the KV of its slot, earlier chunks included.

    out[i, h] = softmax(scale * q[i, h] . K[slot, h / group, 0..start+i]) @ V[slot, h / group, 0..start+i]

FlashAttention (Dao, arXiv:2307.08691) with the tensor cores' wgmma on sm_90. One program takes BLOCK_M
(token, query head) pairs of one KV head: the group is packed into the tile, token-major, so a tile of 128
rows spans 128 / group tokens. K and V are then read once for the whole group, a short chunk still fills
the tile, and the masked wedge at the diagonal is a group-th as wide. Tiles left of the diagonal run
without a mask, those right of it not at all; the longest tiles start first.

Shapes per rank and floor at T = 2048, start = 0 (2 T^2 NQ D FLOPs, half of the full square, at the H200's
dense 16-bit peak of 989 TFLOP/s):

    | model, TP | NQ / NKV | D   | GFLOP | floor   |
    |-----------|----------|-----|-------|---------|
    | 7B 1      | 28 / 4   | 128 | 30.1  | 30.4 us |
    | 7B 2      | 14 / 2   | 128 | 15.0  | 15.2 us |
    | 7B 4      | 7 / 1    | 128 | 7.5   | 7.6 us  |
    | 72B 1     | 64 / 8   | 128 | 68.7  | 69.5 us |
    | 72B 2     | 32 / 4   | 128 | 34.4  | 34.7 us |
    | 72B 4     | 16 / 2   | 128 | 17.2  | 17.4 us |
    | 72B 8     | 8 / 1    | 128 | 8.6   | 8.7 us  |

FP8 KV (kv_fp8.py): the tile's conversion to 16 bits, 1.4 times the instructions a tile, makes it issue-bound.

Bytes: K and V once from HBM (2 (start + T) NKV D x 2), q and out (2 T NQ D x 2): 50 MB, 11.7 us for 72B at
TP=1, well below the FLOPs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch.nn.functional import scaled_dot_product_attention

from engine.kernels.kv_fp8 import KVScales, dequantize, read_kv
from engine.kernels.online_softmax import LOG2_E, attend
from engine.kernels.sync import gdc_launch_dependents, gdc_wait

SOURCES = ("prefill_attention.py", "online_softmax.py", "kv_fp8.py", "sync.py")
KEY_FIELDS = ("num_kv_heads", "group", "head_dim", "t", "kv_dtype")
UNWRITTEN = {"kv_dtype": ("bf16", "fp16")}
NEAREST_FIELD = "t"  # every tile is valid at every T


@dataclass(frozen=True)
class PrefillAttentionConfig:
    """Tiles of block_m (token, head) rows by block_n keys; wgmma needs 16 rows a warp, 64 a warp group."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def heuristic(
    num_kv_heads: int,
    group: int,
    head_dim: int,
    t: int,
    sm_count: int,
    kv_dtype: torch.dtype = torch.bfloat16,
) -> PrefillAttentionConfig:
    """Config for a bucket of t tokens: large tiles once they fill the multiprocessors."""
    if head_dim > 128:
        keys = 16 if kv_dtype.itemsize == 1 else 32  # more would spill
        return PrefillAttentionConfig(block_m=64, block_n=keys, num_warps=4, num_stages=2)
    large_tiles = num_kv_heads * triton.cdiv(t * group, 128)
    if large_tiles >= sm_count:
        return PrefillAttentionConfig(block_m=128, block_n=64, num_warps=8, num_stages=3)
    return PrefillAttentionConfig(block_m=64, block_n=64, num_warps=4, num_stages=3)


@triton.jit
def prefill_attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    k_scale_ptr,
    v_scale_ptr,
    request_ptr,
    out_ptr,
    tokens,
    max_len,
    qk_scale,
    GROUP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    kv_head = tl.program_id(0)
    first_row = (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK_M
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    slot = tl.load(request_ptr)
    start = tl.load(request_ptr + 1)
    length = tl.load(request_ptr + 2)

    rows = first_row + tl.arange(0, BLOCK_M)
    token = rows // GROUP
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    in_d = (offs_d < HEAD_DIM)[None, :]
    q_row: tl.constexpr = NUM_KV_HEADS * GROUP * HEAD_DIM
    in_head = kv_head * GROUP + rows % GROUP
    at = token[:, None] * q_row + in_head[:, None] * HEAD_DIM + offs_d[None, :]
    valid = (token < length)[:, None] & in_d
    q = tl.load(q_ptr + at, mask=valid, other=0.0)

    # Keys [0, full) precede every row of the tile; [full, stop) hold the diagonal.
    first_token = first_row // GROUP
    last_token = tl.minimum((first_row + BLOCK_M - 1) // GROUP, length - 1)
    any_row = first_token < length
    full = tl.where(any_row, (start + first_token + 1) // BLOCK_N * BLOCK_N, 0)
    stop = tl.where(any_row, start + last_token + 1, 0)
    line = (slot.to(tl.int64) * NUM_KV_HEADS + kv_head) * max_len
    k_head_ptr = k_ptr + line * HEAD_DIM
    v_head_ptr = v_ptr + line * HEAD_DIM
    tile = offs_n[:, None] * HEAD_DIM + offs_d[None, :]

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    FP8: tl.constexpr = k_scale_ptr is not None
    if FP8:
        k_scale_ptr += line
        v_scale_ptr += line
    for key in range(0, full, BLOCK_N):
        k_at = k_head_ptr + key * HEAD_DIM + tile
        v_at = v_head_ptr + key * HEAD_DIM + tile
        if HEAD_DIM == BLOCK_D:
            k = tl.load(k_at)
            v = tl.load(v_at)
        else:
            k = tl.load(k_at, mask=in_d, other=0.0)
            v = tl.load(v_at, mask=in_d, other=0.0)
        if FP8:
            k = dequantize(k, tl.load(k_scale_ptr + key + offs_n), q.dtype)
            v = dequantize(v, tl.load(v_scale_ptr + key + offs_n), q.dtype)
        top, total, acc = attend(q, k, v, in_d, top, total, acc, qk_scale, False, False)
    for key in range(full, stop, BLOCK_N):
        # Beyond `stop` the cache holds other requests' leftovers: zeros, as 0 * NaN is NaN.
        ready = key + offs_n < stop
        mask = ready[:, None] & in_d
        k = tl.load(k_head_ptr + key * HEAD_DIM + tile, mask=mask, other=0.0)
        v = tl.load(v_head_ptr + key * HEAD_DIM + tile, mask=mask, other=0.0)
        if FP8:
            k_scale = tl.load(k_scale_ptr + key + offs_n, mask=ready, other=0.0)
            v_scale = tl.load(v_scale_ptr + key + offs_n, mask=ready, other=0.0)
            k, v = dequantize(k, k_scale, q.dtype), dequantize(v, v_scale, q.dtype)
        seen = (key + offs_n)[None, :] <= (start + token)[:, None]
        top, total, acc = attend(q, k, v, seen, top, total, acc, qk_scale, True, False)

    out = tl.where(valid, acc / tl.where(total > 0.0, total, 1.0)[:, None], 0.0)
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=(token < tokens)[:, None] & in_d)


def prefill_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    request: torch.Tensor,
    out: torch.Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    scale: float,
    config: PrefillAttentionConfig,
    scales: KVScales | None = None,
    pdl: bool = False,
) -> None:
    """Attend query i to keys 0..start+i of the slot; rows >= length become zeros.

    q, out [T, NQ * D] 16-bit; k_cache, v_cache [S, NKV, L, D] 16-bit, or e4m3 with scales
    (kv_fp8.py), the chunk's own KV included; request int32 [3] = (slot, start, length)
    on the device.
    """
    tokens, group = q.shape[0], num_heads // num_kv_heads
    prefill_attention_kernel[(num_kv_heads, triton.cdiv(tokens * group, config.block_m))](
        q,
        k_cache,
        v_cache,
        *(scales or (None, None)),
        request,
        out,
        tokens,
        k_cache.shape[2],
        scale * LOG2_E,
        **kernel_constants(config, num_kv_heads, group, head_dim, pdl=pdl),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        launch_pdl=pdl,
    )


def kernel_constants(
    config: PrefillAttentionConfig, num_kv_heads: int, group: int, head_dim: int, *, pdl: bool
) -> dict[str, int | bool]:
    """Compile-time arguments of `prefill_attention_kernel` for one config."""
    return {
        "GROUP": group,
        "NUM_KV_HEADS": num_kv_heads,
        "HEAD_DIM": head_dim,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_D": max(16, triton.next_power_of_2(head_dim)),
        "PDL": pdl,
    }


def prefill_attention_ref(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot: int,
    start: int,
    length: int,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    scale: float,
    scales: KVScales | None = None,
) -> torch.Tensor:
    """Reference of `prefill_attention`: returns out [T, num_heads * head_dim] in q's dtype.

    Computes in fp64 if q is fp64, else in fp32. Rows >= length come back as zeros.
    """
    slot, start, length = int(slot), int(start), int(length)
    compute = torch.float64 if q.dtype == torch.float64 else torch.float32
    stop = start + length
    queries = q[:length].view(1, length, num_heads, head_dim).transpose(1, 2).to(compute)
    at = (slice(slot, slot + 1), slice(None), slice(stop))
    keys, values = read_kv(k_cache, v_cache, scales, at, compute)
    mask = None
    if start > 0:  # is_causal would align the diagonal with key 0, not with key `start`.
        mask = torch.ones(length, stop, dtype=torch.bool, device=q.device).tril(start)
    attended = scaled_dot_product_attention(
        queries,
        keys,
        values,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=num_heads != num_kv_heads,
    )
    out = torch.zeros_like(q)
    out[:length] = attended[0].transpose(0, 1).flatten(1).to(q.dtype)
    return out
