"""One rank: a device, its weights and state, and every buffer that its launches touch.

Exchange protocol of the call sites. All ranks run the same sites in the same order; sites alternate
between two slots (their number per graph is even, so they also alternate across replays and graphs).
A poll re-arms the words that it has just read, before its kernel ends. Why two slots are enough: a peer
writes slot s for call i + 2 only after its own poll of call i + 1, which needs this rank's push of
call i + 1, which this rank launches after its poll of call i has completed, re-arming included.
Sites whose consumers poll have slots of their own, at least three: kernels/slots.py.
The exchanges of sampling, (value, id) and scores, have one slot: between two of its calls lie the all-reduces of a
step, which order them in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from engine.checkpoint.load import Loaded
from engine.kernels.flag_all_reduce import FlagWorkspace
from engine.kernels.sample import SampleBuffers
from engine.kernels.two_shot import TwoShotRank
from engine.runtime.state import RankState


@dataclass
class Rank:
    """Everything static about one rank. Sizes: R = most decode rows, T = largest prefill bucket."""

    index: int
    world: int
    device: torch.device
    dtype: torch.dtype  # of activations
    weights: Mapping[str, Loaded]
    state: RankState
    arena: torch.Tensor  # uint8: the temps of whichever graph runs (graph/plan.py)
    prompt: torch.Tensor  # [T] int32: tokens of the prefill chunk
    request: torch.Tensor  # [3] int32: slot, start, length of the prefill chunk
    row_slots: torch.Tensor  # [R] int32: decode row -> slot, -1 = padding
    best_values: torch.Tensor  # [rows * programs] fp32: per-program maxima of the vocabulary shard
    best_ids: torch.Tensor  # as many int32
    attention_workspace: Any  # split-KV partials, sized for R rows
    gemm_workspace: Any  # split-K partials and cuBLAS scratch, sized for the graphs' configurations
    sampling: SampleBuffers  # scratch of sampling under controls, sized for R rows
    ring: torch.Tensor  # [RING, R] int32, pinned host memory: the tokens of the last RING steps
    step: torch.Tensor  # [1] int32: steps sampled so far (this rank's count)
    status: torch.Tensor  # [8] int32, pinned host memory, one for all ranks: kernels/sync.py
    # Present when world > 1:
    exchange: torch.Tensor | None = None  # uint8: slots of messages (runtime/exchange.py)
    exchange_slot_bytes: int = 0  # of the two slots of separate waits
    polled_slot_bytes: int = 0  # of the slots behind them, which GEMVs poll
    peer_table: torch.Tensor | None = None  # [world] int64: every rank's exchange address
    flag_exchange: torch.Tensor | None = None  # uint8: the flag barrier's buffer, if it is used
    flag_table: torch.Tensor | None = None
    flag_space: FlagWorkspace | None = None
    two_shot: TwoShotRank | None = None  # its buffer, if it is used
    token_exchange: torch.Tensor | None = None  # uint8: one slot of world x R x (value, id)
    token_table: torch.Tensor | None = None
    score_exchange: torch.Tensor | None = None  # uint8: one slot of world x R x V fp32 scores
    score_table: torch.Tensor | None = None
