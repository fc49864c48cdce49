"""What one rank keeps across steps: KV slots, tokens, positions, sampling parameters."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np
import torch

from engine.config import ModelConfig
from engine.kernels.kv_fp8 import KVScales
from engine.kernels.quantize_rows import FP8
from engine.kernels.sample_ref import CONTROLS, NEUTRAL
from engine.rope import rope_frequencies


@dataclass
class RankState:
    """Slot-indexed state of one rank. S slots of L positions; the KV head count is the rank's share."""

    dtype: torch.dtype  # of activations
    k_cache: list[torch.Tensor]  # per layer [S, NKV, L, D], activation dtype or e4m3
    v_cache: list[torch.Tensor]
    kv_scales: list[KVScales | None]  # per layer, of e4m3 caches (kernels/kv_fp8.py)
    cos_sin: torch.Tensor  # [L, D] fp32: cos_i at 2i, sin_i at 2i + 1
    tokens: torch.Tensor  # [S] int32: the token to process next
    positions: torch.Tensor  # [S] int32: its position (= tokens already in the slot's KV)
    temperature: torch.Tensor  # [S] fp32, 0 = greedy
    seeds: torch.Tensor  # [S] int32
    # Read by slots whose controls are not neutral; V is the rank's vocabulary shard (kernels/sample_ref.py).
    controls: torch.Tensor  # [S, CONTROLS] fp32
    counts: torch.Tensor  # [S, V] int32: 2 * occurrences in the answer + 1 if in the prompt
    bias: torch.Tensor  # [S, V] fp32


def rope_table(config: ModelConfig, length: int, device: torch.device | str) -> torch.Tensor:
    """[length, D] fp32: cos and sin of position * frequency interleaved (RoFormer, arXiv:2104.09864), times
    the attention factor of the config's RoPE scaling (engine/rope.py).

    Angles are formed in fp32 as transformers forms them, so that long positions round alike.
    """
    frequencies, factor = rope_frequencies(config)
    angle = torch.arange(length, dtype=torch.float32)[:, None] * frequencies[None, :]
    pairs = torch.stack((angle.cos() * factor, angle.sin() * factor), dim=-1)
    return pairs.reshape(length, config.head_dim).to(device)


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """torch.zeros; on the CPU a page takes memory and time only once it is written to (numpy asks calloc for
    zeros, torch writes them)."""
    if torch.device(device).type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = np.zeros(prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(pages).view(dtype).view(shape)


def new_state(
    config: ModelConfig,
    tp: int,
    *,
    slots: int,
    length: int,
    dtype: torch.dtype,
    device: torch.device | str,
    table: torch.Tensor | None = None,
    fp8_kv: bool = False,
) -> RankState:
    """Zeroed state for one rank. KV bytes: checkpoint/memory.py, kv_bytes_per_token, of `length` tokens."""
    shard = config.shard(tp)
    shape = (slots, shard.num_kv_heads, length, config.head_dim)
    vocabulary = (slots, shard.vocab_size)

    def caches(
        shape: tuple[int, ...] = shape, dtype: torch.dtype = FP8 if fp8_kv else dtype
    ) -> list[torch.Tensor]:
        return [zeros(shape, dtype, device) for _ in range(config.num_layers)]

    def scales() -> list[torch.Tensor]:
        return caches(shape[:3], torch.float32)

    def per_slot(dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(slots, dtype=dtype, device=device)

    return RankState(
        dtype=dtype,
        k_cache=caches(),
        v_cache=caches(),
        kv_scales=list(zip(scales(), scales())) if fp8_kv else [None] * config.num_layers,
        cos_sin=table if table is not None else rope_table(config, length, device),
        tokens=per_slot(torch.int32),
        positions=per_slot(torch.int32),
        temperature=per_slot(torch.float32),
        seeds=per_slot(torch.int32),
        controls=torch.tensor([NEUTRAL] * slots, dtype=torch.float32, device=device).view(
            slots, CONTROLS
        ),
        counts=zeros(vocabulary, torch.int32, device),
        bias=zeros(vocabulary, torch.float32, device),
    )
