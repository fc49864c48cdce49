"""Allocate everything that a deployment touches: nothing is allocated after start-up."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from engine.checkpoint.load import Loaded
from engine.config import ModelConfig
from engine.graph.facts import choices
from engine.graph.ir import Graph
from engine.kernels import argmax, gemm, sample
from engine.kernels.decode_attention import MAX_SPLITS
from engine.kernels.decode_attention import workspace as attention_workspace
from engine.kernels.epilogue import SiluMul, Store
from engine.kernels.gemv import gemv_programs
from engine.kernels.sync import STATUS_WORDS
from engine.kernels.two_shot import two_shot_ranks
from engine.runtime.exchange import ExchangeSizes
from engine.runtime.rank import Rank
from engine.runtime.state import new_state, rope_table
from engine.tune import gemm_space, gemv_space
from engine.tune.choose import choose

RING = 64  # steps whose tokens the host ring holds; more than can be in flight
SENTINEL = -2147450880  # 0x80008000 as int32: "not written yet" (kernels/sync.py)
TOKEN_SENTINEL = -2147483648  # 0x80000000
OVERRUN = 16  # positions past the context that queued-ahead steps of a finished request may write


def kv_length(max_model_len: int) -> int:
    """Positions that a slot's KV has room for."""
    return -(-(max_model_len + OVERRUN) // 64) * 64


@dataclass(frozen=True)
class Sizes:
    """What the buffers are sized for."""

    slots: int
    rows: int  # most decode rows, R
    tokens: int  # largest prefill bucket, T
    max_model_len: int
    arena_bytes: int
    gemm: tuple[int, int, int]  # kernels/gemm.py: workspace_sizes
    exchange: ExchangeSizes  # of the graphs' all-reduces
    maxima: int  # (value, id) pairs that a step's lm_head leaves
    fp8_kv: bool = False

    @property
    def kv_length(self) -> int:
        """Positions a slot's KV has room for."""
        return kv_length(self.max_model_len)


def _distinct(
    op: str, graphs: Iterable[Graph], weight_dtype: Callable[[str], torch.dtype]
) -> list[dict[str, Any]]:
    """The facts that the graphs choose a configuration of `op` by, each once: layers ask the same."""
    found = {
        tuple(facts.items()): facts
        for graph in graphs
        for name, facts in choices(graph, weight_dtype, torch.bfloat16, 0)
        if name == op
    }
    return list(found.values())


def gemm_workspace_sizes(
    graphs: Iterable[Graph], weight_dtype: Callable[[str], torch.dtype], tuning: bool = False
) -> tuple[int, int, int]:
    """Largest workspace that the graphs' GEMMs need; `tuning`: that any candidate of theirs may need."""
    largest = (0, 0, 0)
    for facts in _distinct("gemm", graphs, weight_dtype):
        t, n, k = facts["t"], facts["n"], facts["k"]
        configs = [choose("gemm", facts)]
        if tuning:
            configs += gemm_space.candidates(t, n, k, facts["weight_dtype"])
        epilogue = SiluMul if facts["epilogue"] == "silu_mul" else Store
        for config in configs:
            sizes = gemm.workspace_sizes(config, t, n, epilogue)
            largest = (
                max(largest[0], sizes[0]),
                max(largest[1], sizes[1]),
                max(largest[2], sizes[2]),
            )
    return largest


def maxima_pairs(
    graphs: Iterable[Graph], weight_dtype: Callable[[str], torch.dtype], tuning: bool = False
) -> int:
    """Most vocabulary maxima that an lm_head of the graphs leaves: rows x programs of its GEMV. `tuning`: that any
    candidate for it would."""
    most = 0
    for facts in _distinct("gemv", graphs, weight_dtype):
        if facts["epilogue"] != "maxima":
            continue
        n, k, rows, dtype = (facts[key] for key in ("n", "k", "rows", "weight_dtype"))
        configs = [choose("gemv", facts)]
        if tuning:
            configs += gemv_space.candidates(n, k, dtype, rows, present=configs[0])
        most = max(most, *(rows * gemv_programs(c, n, k, rows, dtype) for c in configs))
    return most


def allocate_ranks(
    config: ModelConfig,
    weights: Sequence[Mapping[str, Loaded]],
    devices: Sequence[torch.device],
    dtype: torch.dtype,
    sizes: Sizes,
    degree: int,
) -> list[Rank]:
    """One Rank per entry of `devices` (an entry may repeat: ranks that share a device).

    degree: the TP degree whose shard each rank holds (= number of ranks, unless `--shard-of`).
    """
    world = len(devices)
    shard = config.shard(degree)
    flags = sizes.exchange.flag
    scores = sample.sample_workspace(world, sizes.rows, shard.vocab_size)
    ranks: list[Rank] = []
    status = _host(
        (STATUS_WORDS,), devices[0]
    )  # one for all ranks: an expired spin ends every other
    tables: dict[torch.device, torch.Tensor] = {}
    for index, device in enumerate(devices):
        if device not in tables:
            tables[device] = rope_table(config, sizes.kv_length, device)
        state = new_state(
            config, degree, slots=sizes.slots, length=sizes.kv_length, dtype=dtype,
            device=device, table=tables[device], fp8_kv=sizes.fp8_kv,
        )  # fmt: skip

        def on(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device = device):
            return torch.zeros(shape, dtype=dtype, device=device)

        pairs = max(sizes.maxima, sizes.rows * argmax.argmax_programs(shard.vocab_size))
        ranks.append(
            Rank(
                index=index, world=world, device=device, dtype=dtype, weights=weights[index],
                state=state, arena=on((sizes.arena_bytes,), torch.uint8),
                prompt=on((sizes.tokens,), torch.int32), request=on((3,), torch.int32),
                row_slots=on((sizes.rows,), torch.int32).fill_(-1),
                best_values=on((pairs,), torch.float32), best_ids=on((pairs,), torch.int32),
                attention_workspace=attention_workspace(
                    sizes.rows, shard.num_heads, shard.num_kv_heads, config.head_dim, MAX_SPLITS, device
                ),
                gemm_workspace=gemm.workspace(sizes.gemm, dtype, device),
                sampling=sample.sample_buffers(sizes.rows, world * shard.vocab_size, device),
                ring=_host((RING, sizes.rows), device), step=on((1,), torch.int32),
                status=status,
                exchange=on((sizes.exchange.lamport_bytes,), torch.uint8) if world > 1 else None,
                exchange_slot_bytes=sizes.exchange.slot_bytes,
                polled_slot_bytes=sizes.exchange.polled_slot_bytes,
                flag_exchange=on((flags.nbytes,), torch.uint8) if flags else None, flag_space=flags,
                token_exchange=on((world * sizes.rows * 8,), torch.uint8) if world > 1 else None,
                score_exchange=on((scores.nbytes,), torch.uint8) if world > 1 else None,
            )
        )  # fmt: skip
    if world > 1:
        for rank in ranks:
            peers = [rank] * world if sizes.exchange.nccl else ranks
            rank.peer_table = _addresses([r.exchange for r in peers], rank.device)
            rank.flag_table = _addresses([r.flag_exchange for r in peers], rank.device)
            rank.token_table = _addresses([r.token_exchange for r in peers], rank.device)
            rank.score_table = _addresses([r.score_exchange for r in peers], rank.device)
        space = sizes.exchange.two_shot
        if space:
            ends = two_shot_ranks(space, [space.allocate(rank.device) for rank in ranks], dtype)
            for rank, end in zip(ranks, ends):
                rank.two_shot = end
    reset(ranks)
    return ranks


def reset(ranks: Sequence[Rank]) -> None:
    """Protocol and step state as at the start: after warm-up and after an expired spin. Synchronises."""
    _synchronize(ranks)
    for rank in ranks:
        if rank.exchange is not None:
            rank.exchange.view(torch.int32).fill_(SENTINEL)
        if rank.flag_space is not None and rank.flag_exchange is not None:
            rank.flag_space.reset(rank.flag_exchange)
        if rank.two_shot is not None:
            rank.two_shot.space.reset(rank.two_shot.buffer)
        for words in (rank.token_exchange, rank.score_exchange):
            if words is not None:
                words.view(torch.int32).fill_(TOKEN_SENTINEL)
        rank.sampling.reset()
        rank.attention_workspace.reset()
        rank.gemm_workspace.tickets.zero_()
        rank.step.zero_()
        rank.status.zero_()
        rank.ring.fill_(-1)
        rank.row_slots.fill_(-1)
    _synchronize(ranks)


def _host(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """int32 host memory that the device can write (for CPU ranks, in tests: any memory)."""
    tensor = torch.zeros(shape, dtype=torch.int32)
    return tensor.pin_memory() if device.type == "cuda" else tensor


def _synchronize(ranks: Sequence[Rank]) -> None:
    for device in {rank.device for rank in ranks if rank.device.type == "cuda"}:
        torch.cuda.synchronize(device)


def _addresses(tensors: Sequence[torch.Tensor | None], device: torch.device) -> torch.Tensor:
    pointers = [tensor.data_ptr() for tensor in tensors if tensor is not None]
    return torch.tensor(pointers, dtype=torch.int64, device=device)
