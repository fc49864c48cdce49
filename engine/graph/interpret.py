"""Run any graph, before or after any pass, on torch references, all ranks in lockstep.

This is the oracle that the kernels are compared with, and the CPU back end. Each op runs on every rank
before the next op starts, so an exchange between ranks is a plain read of their values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn.functional import linear, silu

from engine.errors import DeviceError
from engine.graph.ir import Graph, Op, Value
from engine.kernels.argmax import sample_ref
from engine.kernels.decode_attention import decode_attention_ref
from engine.kernels.embedding import embedding_ref
from engine.kernels.epilogue import shard_rows
from engine.kernels.gather_row import gather_row_ref
from engine.kernels.gemm import linear_ref
from engine.kernels.kv_fp8 import write_kv
from engine.kernels.norm import rmsnorm_ref
from engine.kernels.prefill_attention import prefill_attention_ref
from engine.kernels.quantize_rows import quantize_rows_ref, rmsnorm_quantize_ref
from engine.kernels.silu import silu_mul_ref
from engine.runtime.controls import count_tokens, reference_arguments
from engine.runtime.state import RankState


class Weight(Protocol):
    """A loaded weight: [N, K] and, for FP8, its fp32 scale per output row."""

    @property
    def weight(self) -> torch.Tensor: ...

    @property
    def scale(self) -> torch.Tensor | None: ...


@dataclass
class StepInput:
    """What a step is given. Decode: row_slots [R]. Prefill: prompt [T] and (slot, start, T)."""

    row_slots: torch.Tensor | None = None
    prompt: torch.Tensor | None = None
    request: tuple[int, int, int] | None = None


@dataclass
class StepOutput:
    """tokens [R] int64 (None if the graph samples nothing), logits: each rank's [rows, V] fp32."""

    tokens: torch.Tensor | None
    logits: list[torch.Tensor] | None


class Interpreter:
    """One graph bound to the weights and states of its `tp` ranks."""

    def __init__(
        self, graph: Graph, weights: Sequence[Mapping[str, Weight]], states: Sequence[RankState]
    ):
        self.graph, self.weights, self.states = graph, weights, states
        self._handlers = [getattr(self, f"_{op.kind}") for op in graph.ops]
        last_use = {value: i for i, op in enumerate(graph.ops) for value in op.inputs}
        self._dead: list[list[Value]] = [[] for _ in graph.ops]
        for value, i in last_use.items():
            if value.kind == "temp" and value != graph.output:
                self._dead[i].append(value)

    @torch.inference_mode()
    def run(self, step: StepInput, progress: Callable[[], object] | None = None) -> StepOutput:
        """One step. Prefill may be given fewer tokens than the graph's bucket: no padding is computed.
        `progress` is called behind each op.

        Raises DeviceError if the winning logit is NaN.
        """
        self.step = step
        self.tokens: torch.Tensor | None = None
        self.env: list[dict[Value, torch.Tensor]] = [{} for _ in self.states]
        self._locate()
        for op, handler, dead in zip(self.graph.ops, self._handlers, self._dead):
            for rank, env in enumerate(self.env):
                result = handler(op, rank)
                if result is not None:
                    env.update(zip(op.outputs, result if isinstance(result, tuple) else (result,)))
            for env in self.env:
                for value in dead:
                    env.pop(value, None)
            if progress is not None:
                progress()
        output = self.graph.output
        logits = None if output is None else [env[output] for env in self.env]
        return StepOutput(self.tokens, logits)

    # Values

    def _locate(self) -> None:
        """Slot and position of every row of the step, from rank 0's state (all ranks agree)."""
        if self.graph.phase == "decode":
            assert self.step.row_slots is not None
            self.row_slots = self.step.row_slots.long()
            self.live = self.row_slots >= 0
            self.slots = self.row_slots.clamp(min=0)
            self.row_positions = self.states[0].positions[self.slots].long()
        else:
            assert self.step.request is not None
            slot, start, length = self.step.request
            self.slots = torch.full((length,), slot)
            self.live = torch.ones(length, dtype=torch.bool)
            self.row_positions = torch.arange(start, start + length)

    def _read(self, op: Op, role: str, rank: int) -> torch.Tensor:
        """An input; a partial sum read by an op that is no collective means the sum over ranks."""
        value = op.input(role)
        if value.kind == "weight":
            return self.weights[rank][value.name].weight
        if value.sharding == "partial":
            return self._sum(value)
        return self.env[rank][value]

    def _sum(self, value: Value) -> torch.Tensor:
        """Sum over ranks in rank order, fp32 or wider."""
        first = self.env[0][value]
        total = first.to(torch.promote_types(first.dtype, torch.float32))
        for env in self.env[1:]:
            total = total + env[value]
        return total

    def _act(self, rank: int) -> torch.dtype:
        return self.states[rank].dtype

    # Ops

    def _embedding(self, op: Op, rank: int) -> torch.Tensor:
        table = self._read(op, "table", rank)
        if self.step.prompt is not None:
            return embedding_ref(self.step.prompt, table).to(self._act(rank))
        ids = embedding_ref(self.states[rank].tokens, table, self.row_slots)
        return ids.to(self._act(rank))

    def _rmsnorm(self, op: Op, rank: int) -> torch.Tensor:
        return rmsnorm_ref(
            self._read(op, "x", rank), self._read(op, "weight", rank), op.attrs["eps"]
        )

    def _quantize_rows(self, op: Op, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        return quantize_rows_ref(self._read(op, "x", rank))

    def _rmsnorm_quantize(self, op: Op, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        return rmsnorm_quantize_ref(
            self._read(op, "x", rank), self._read(op, "weight", rank), op.attrs["eps"]
        )

    def _linear(self, op: Op, rank: int) -> tuple[torch.Tensor, ...]:
        x = self._read(op, "x", rank)
        if op.polls:
            x = (self._sum(op.input("message")) + x).to(x.dtype)
        y = self._product(op, rank, x)
        best = (self._maxima(y),) if op.attrs.get("epilogue") == "maxima" else ()
        return (y, *best, x) if op.polls else (y, *best)

    def _product(self, op: Op, rank: int, x: torch.Tensor) -> torch.Tensor:
        if op.find("norm") is not None:
            x = rmsnorm_ref(x, self._read(op, "norm", rank), op.attrs["norm_eps"])
        if op.find("x_scale") is not None:
            x = x.float() * self._read(op, "x_scale", rank)[:, None]
        loaded = self.weights[rank][op.input("w").name]
        bias = self._read(op, "bias", rank) if op.find("bias") is not None else None
        if op.out.dtype == "f32" and loaded.weight.dtype == torch.float32:
            x = x.float()  # logits are fp32: a 16-bit sum would round near ties together
        if loaded.scale is None and x.dtype == loaded.weight.dtype:
            y = linear(x, loaded.weight, bias)  # BLAS accumulates 16-bit products in fp32
        else:
            y = linear_ref(x, loaded.weight, loaded.scale, bias)
        if op.find("x_scale") is not None:
            y = y.to(self._act(rank))
        epilogue = op.attrs.get("epilogue", "store")
        if epilogue == "silu_mul":
            return silu_mul_ref(y)
        if epilogue == "residual":
            return y + self._read(op, "residual", rank)
        if epilogue == "rope_append":
            return self._split_rotate_append(op, rank, y, "pairs")
        return y.float() if op.out.dtype == "f32" else y

    def _head_norm(self, op: Op, rank: int) -> torch.Tensor:
        x = self._read(op, "x", rank)
        return self._norm_heads(x, self._read(op, "weight", rank), op.attrs["eps"]).to(x.dtype)

    @staticmethod
    def _norm_heads(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x [n, heads * D], weight [D] -> the same shape, fp32 or wider."""
        heads = x.to(torch.promote_types(x.dtype, torch.float32)).unflatten(1, (-1, len(weight)))
        return rmsnorm_ref(heads, weight, eps).flatten(1)

    def _rope(self, op: Op, rank: int) -> torch.Tensor:
        return self._rotate(
            self._read(op, "x", rank), rank, op.attrs["head_dim"], op.attrs["style"]
        )

    def _rotate(self, x: torch.Tensor, rank: int, d: int, style: str) -> torch.Tensor:
        table = self.states[rank].cos_sin[self.row_positions]
        cos, sin = table[:, None, 0::2], table[:, None, 1::2]  # [n, 1, D/2]
        heads = x.view(x.shape[0], -1, d).to(torch.promote_types(x.dtype, torch.float32))
        if style == "half":
            a, b = heads[..., : d // 2], heads[..., d // 2 :]
            out = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
        else:
            a, b = heads[..., 0::2], heads[..., 1::2]
            out = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1)
        return out.reshape(x.shape).to(x.dtype)

    def _append(self, op: Op, rank: int, k: torch.Tensor, v: torch.Tensor) -> None:
        state, layer = self.states[rank], op.layer
        assert layer is not None
        rows, d = self.live, op.attrs["head_dim"]
        slots, positions = self.slots[rows], self.row_positions[rows]
        write_kv(
            state.k_cache[layer], state.v_cache[layer], state.kv_scales[layer],
            (slots, slice(None), positions),
            k.view(k.shape[0], -1, d)[rows], v.view(v.shape[0], -1, d)[rows],
        )  # fmt: skip

    def _kv_append(self, op: Op, rank: int) -> None:
        self._append(op, rank, self._read(op, "k", rank), self._read(op, "v", rank))

    def _rope_append(self, op: Op, rank: int) -> torch.Tensor:
        return self._split_rotate_append(op, rank, self._read(op, "qkv", rank), op.attrs["style"])

    def _split_rotate_append(
        self, op: Op, rank: int, qkv: torch.Tensor, style: str
    ) -> torch.Tensor:
        d = op.attrs["head_dim"]
        q_dim, kv_dim = op.attrs["num_heads"] * d, op.attrs["num_kv_heads"] * d
        q, k, v = qkv.split((q_dim, kv_dim, kv_dim), dim=-1)
        q_and_k = qkv[:, : q_dim + kv_dim]
        if op.find("q_norm") is not None:
            eps = op.attrs["qk_norm_eps"]
            q = self._norm_heads(q, self._read(op, "q_norm", rank), eps)
            k = self._norm_heads(k, self._read(op, "k_norm", rank), eps)
            q_and_k = torch.cat((q, k), dim=-1)
        rotated = self._rotate(q_and_k, rank, d, style).to(qkv.dtype)
        q, k = rotated.split((q_dim, kv_dim), dim=-1)
        self._append(op, rank, k, v)
        return q.contiguous()

    def _attention(self, op: Op, rank: int) -> torch.Tensor:
        state, layer = self.states[rank], op.layer
        assert layer is not None
        heads = {key: op.attrs[key] for key in ("num_heads", "num_kv_heads", "head_dim", "scale")}
        heads["scales"] = state.kv_scales[layer]
        q, k, v = self._read(op, "q", rank), state.k_cache[layer], state.v_cache[layer]
        if self.step.request is not None:
            return prefill_attention_ref(q, k, v, *self.step.request, **heads)
        return decode_attention_ref(q, k, v, state.positions, self.row_slots, **heads)

    def _silu_mul(self, op: Op, rank: int) -> torch.Tensor:
        if op.find("gate") is None:
            return silu_mul_ref(self._read(op, "x", rank))
        return silu(self._read(op, "gate", rank)) * self._read(op, "up", rank)

    def _add(self, op: Op, rank: int) -> torch.Tensor:
        residual = self._read(op, "residual", rank)
        return (self._read(op, "x", rank) + residual).to(residual.dtype)

    def _all_reduce(self, op: Op, rank: int) -> torch.Tensor:
        return self._sum(op.input("x")).to(self._act(rank))

    def _push(self, op: Op, rank: int) -> torch.Tensor:
        return self.env[rank][op.input("x")]

    def _poll_residual(self, op: Op, rank: int) -> torch.Tensor:
        residual = self._read(op, "residual", rank)
        return (self._sum(op.input("message")) + residual).to(residual.dtype)

    _two_shot_scatter = _flag_publish = _push
    _flag_reduce = _poll_residual

    def _two_shot_publish(self, op: Op, rank: int) -> torch.Tensor:
        return self.env[rank][op.input("message")]

    def _nccl_gather(self, op: Op, rank: int) -> torch.Tensor:
        return self.env[rank][op.input("message")]

    def _own_rows(self, rank: int, rows: int) -> slice:
        shard = shard_rows(rows, len(self.env))
        return slice(rank * shard, (rank + 1) * shard)

    def _two_shot_reduce(self, op: Op, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The norm and the sum of the rank's own rows; NaN in those that it does not hold."""
        total = self._poll_residual(op, rank)
        h = torch.full_like(total, float("nan"))
        own = self._own_rows(rank, len(h))
        h[own] = total[own]
        return rmsnorm_ref(h, self._read(op, "weight", rank), op.attrs["eps"]), h

    def _two_shot_gather(self, op: Op, rank: int) -> tuple[torch.Tensor, ...]:
        y, h = (self._whole(op.input(role)) for role in ("message", "h"))
        outputs = quantize_rows_ref(y) if op.out.dtype == "fp8" else (y,)
        return (*outputs, h[-1:]) if op.attrs.get("last") else outputs

    def _whole(self, value: Value) -> torch.Tensor:
        """Each rank's own rows."""
        parts = [env[value][self._own_rows(r, len(env[value]))] for r, env in enumerate(self.env)]
        return torch.cat(parts)

    def _gather_row(self, op: Op, rank: int) -> torch.Tensor:
        assert self.step.request is not None
        return gather_row_ref(self._read(op, "x", rank), self.step.request[2])

    # Sampling: computed once, over all vocabulary shards, then written to every rank's state.

    def _sample(self, op: Op, rank: int) -> torch.Tensor:
        return self._choose(rank)

    def _argmax_partial(self, op: Op, rank: int) -> torch.Tensor:
        return self._maxima(self._read(op, "logits", rank))

    @staticmethod
    def _maxima(logits: torch.Tensor) -> torch.Tensor:
        """(value, id) of each row, for inspection; _choose reads the logits."""
        return torch.stack(logits.max(dim=-1), dim=-1)

    def _argmax_push(self, op: Op, rank: int) -> torch.Tensor:
        return self.env[rank][op.input("best")]

    def _argmax_poll(self, op: Op, rank: int) -> torch.Tensor:
        return self._choose(rank)

    def _argmax_finish(self, op: Op, rank: int) -> torch.Tensor:
        return self._choose(rank)

    def _choose(self, rank: int) -> torch.Tensor:
        if rank == 0:
            output = self.graph.output
            assert output is not None
            shards = [env[output] for env in self.env]
            state, rows = self.states[0], shards[0].shape[0]
            slots, positions = self.slots[-rows:], self.row_positions[-rows:]
            self.tokens = sample_ref(
                shards, state.temperature[slots], state.seeds[slots], positions, self._vocab_size(),
                **reference_arguments(self.states, slots),
            )  # fmt: skip
            if bool((self.tokens < 0).any()):
                raise DeviceError(
                    "the model's logits are NaN: the checkpoint or its scales are damaged"
                )
        assert self.tokens is not None
        state, rows = self.states[rank], self.tokens.shape[0]
        live, slots = self.live[-rows:], self.slots[-rows:]
        state.tokens[slots[live]] = self.tokens[live].to(torch.int32)
        count_tokens(state, rank, slots[live], self.tokens[live])
        state.positions[slots[live]] = (self.row_positions[-rows:][live] + 1).to(torch.int32)
        return self.tokens

    def _vocab_size(self) -> int:
        (size,) = {op.attrs["vocab_size"] for op in self.graph.ops if "vocab_size" in op.attrs}
        return size
