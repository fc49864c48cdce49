"""Lowering: each op of a finished graph becomes one kernel launch with a chosen configuration.

A `Launch` is inspectable (op, kernel, config, bytes) and runnable; running it allocates nothing, waits
for nothing and can be captured. Which configuration an op gets is `engine.tune.choose`'s decision.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from engine.graph.facts import ALGORITHM, GEMV_MAX_ROWS, Choice, choice
from engine.graph.ir import Graph, Op, Value
from engine.graph.lower_exchange import ExchangeOps
from engine.graph.plan import BufferPlan, arena_outputs, read_bytes, value_bytes
from engine.kernels import argmax, sample
from engine.kernels.all_reduce import shape_for
from engine.kernels.decode_attention import decode_attention
from engine.kernels.embedding import embedding
from engine.kernels.epilogue import (
    Epilogue,
    Maxima,
    Push,
    Residual,
    RopeAppend,
    Scatter,
    SiluMul,
    Store,
)
from engine.kernels.gather_row import gather_row
from engine.kernels.gemm import gemm
from engine.kernels.gemv import gemv, gemv_programs
from engine.kernels.norm import rmsnorm
from engine.kernels.prefill_attention import prefill_attention
from engine.kernels.quantize_rows import FP8, quantize_rows, rmsnorm_quantize
from engine.kernels.rope_append import DecodeRows, QKNorm, rope_append
from engine.runtime.exchange import EXCHANGE_SLOTS
from engine.runtime.rank import Rank
from engine.tune.choose import choose


@dataclass(frozen=True)
class Launch:
    """One kernel launch of one rank. `bytes` is what it must read and write in device memory."""

    op: Op
    kernel: str
    config: Any
    bytes: int
    key: str  # launches with equal keys run the same compiled kernel: one of them warms all
    run: Callable[[], None] = field(repr=False)
    choice: Choice | None = None  # (op, facts) that the config was chosen by
    # Of a launch that all ranks make at once: uint8 [world, bytes], the slot whose messages NCCL gathers.
    messages: torch.Tensor | None = None

    def __str__(self) -> str:
        layer = "-" if self.op.layer is None else self.op.layer
        return f"{self.op.stage:<10} layer {layer:>2}  {self.kernel:<24} {self.bytes:>14,} B  {self.config}"


def lower(
    graph: Graph, buffers: BufferPlan, rank: Rank, pdl: bool, captured: bool = False
) -> list[Launch]:
    """The launches of one rank, in order.

    pdl: programmatic dependent launch between neighbours. captured: each run is one replay of a CUDA graph,
    so the step before has completed and its KV may be read ahead of the wait; eager runs overlap steps.
    """
    return _Lowering(graph, buffers, rank, pdl, captured).launches()


@dataclass(frozen=True)
class _Form:
    """What launches of the same kernel on tensors of the same shapes and dtypes have in common (see Launch)."""

    config: Any
    bytes: int
    key: str
    choice: Choice | None


class _Lowering(ExchangeOps):
    def __init__(self, graph: Graph, buffers: BufferPlan, rank: Rank, pdl: bool, captured: bool):
        self.graph, self.rank, self.pdl = graph, rank, pdl
        self.prefetch = pdl and captured
        self.forms: dict[tuple, _Form] = {}
        views: dict[tuple, torch.Tensor] = {}  # layers use the same buffers
        self.tensors: dict[Value, torch.Tensor] = {}
        for value, offset in buffers.offsets.items():
            where = (offset, value.dtype, value.shape)
            if where not in views:
                views[where] = self._tensor(value, offset)
            self.tensors[value] = views[where]
        sites = [
            op.attrs["site"]
            for op in graph.ops
            if op.kind == "poll_residual" and "slots" not in op.attrs
        ]
        # Sites alternate between two slots, also across replays and graphs: so their number is even.
        first = sites[0] if sites else 0
        assert sites == list(range(first, first + len(sites))), sites
        assert first % EXCHANGE_SLOTS == len(sites) % EXCHANGE_SLOTS == 0, sites

    def launches(self) -> list[Launch]:
        return [getattr(self, f"_{op.kind}")(op) for op in self.graph.ops]

    # Helpers

    def _tensor(self, value: Value, offset: int) -> torch.Tensor:
        wide = {"act": self.rank.dtype, "f32": torch.float32, "i32": torch.int32, "fp8": FP8}
        dtype = wide[value.dtype]
        size = value_bytes(value, self.rank.dtype.itemsize)
        return self.rank.arena[offset : offset + size].view(dtype).view(value.shape)

    def _in(self, op: Op, role: str) -> torch.Tensor:
        value = op.input(role)
        if value.kind == "weight":
            return self.rank.weights[value.name].weight
        return self.tensors[value]

    def _weight_dtype(self, name: str) -> torch.dtype:
        return self.rank.weights[name].weight.dtype

    def _kv_length(self) -> int:
        return self.rank.state.k_cache[0].shape[2]

    def _row_slots(self) -> torch.Tensor:
        return self.rank.row_slots[: self.graph.rows]

    def _request(self) -> torch.Tensor | None:
        """(slot, start, length) on the device, in prefill."""
        return self.rank.request if self.graph.phase == "prefill" else None

    def _launch(
        self,
        op: Op,
        function: Callable[..., None],
        *args: Any,
        detail: str = "",
        **kwargs: Any,
    ) -> Launch:
        name = f"{function.__name__}{detail}"
        form = self._form(op, name)
        if form.config is not None:
            kwargs["config"] = form.config
        run = partial(function, *args, **kwargs, pdl=self.pdl)
        return Launch(op, name, form.config, form.bytes, form.key, run, form.choice)

    def _form(self, op: Op, name: str) -> _Form:
        """Looked up for all layers but the first."""
        values = (*op.inputs, *op.outputs)
        shapes = [value.shape for value in values]
        dtypes = [self.rank.weights[v.name].weight.dtype for v in op.inputs if v.kind == "weight"]
        alike = (name, op.attrs["roles"], *shapes, *dtypes)
        if alike not in self.forms:
            config = None
            chosen = choice(op, self.graph, self._weight_dtype, self.rank.dtype, self._kv_length())
            if chosen is not None:
                config = choose(*chosen)
                algorithm = ALGORITHM.get(op.kind)  # the links may not allow the tuned one
                if algorithm and algorithm != config.algorithm:
                    config = shape_for(algorithm, chosen[1]["nbytes"])
            key = f"{name} {shapes} {dtypes} {config} {self.pdl}"
            self.forms[alike] = _Form(config, self._bytes(op), key, chosen)
        return self.forms[alike]

    def _joint(self, op: Op, messages: torch.Tensor) -> Launch:
        """Not a kernel of one rank: NCCL gathers `messages` (uint8 [world, bytes]) for all ranks at once."""

        def run() -> None:
            raise AssertionError("a message that NCCL carries moves for all ranks at once")

        return Launch(op, op.kind, None, 0, f"{op.kind} {messages.shape}", run, None, messages)

    def _bytes(self, op: Op) -> int:
        """Weights and activations once; KV is counted by the runtime, which knows the context."""
        total = 0
        item = self.rank.dtype.itemsize
        for value in op.inputs:
            if value.kind == "weight" and op.kind != "embedding":
                loaded = self.rank.weights[value.name]
                total += loaded.weight.nbytes + (0 if loaded.scale is None else loaded.scale.nbytes)
            elif value.kind == "temp":
                total += read_bytes(op, value, item)
        return total + sum(value_bytes(value, item) for value in arena_outputs(op))

    # Ops

    def _embedding(self, op: Op) -> Launch:
        state = self.rank.state
        decode = self.graph.phase == "decode"
        tokens = state.tokens if decode else self.rank.prompt[: self.graph.rows]
        rows = self._row_slots() if decode else None
        table, out = self._in(op, "table"), self.tensors[op.out]
        return self._launch(op, embedding, tokens, table, out, row_slots=rows)

    def _rmsnorm(self, op: Op) -> Launch:
        x, weight, out = self._in(op, "x"), self._in(op, "weight"), self.tensors[op.out]
        return self._launch(op, rmsnorm, x, weight, out, eps=op.attrs["eps"])

    def _quantize_rows(self, op: Op) -> Launch:
        x8, scale = (self.tensors[value] for value in op.outputs)
        return self._launch(op, quantize_rows, self._in(op, "x"), x8, scale)

    def _rmsnorm_quantize(self, op: Op) -> Launch:
        x, weight = self._in(op, "x"), self._in(op, "weight")
        x8, scale = (self.tensors[value] for value in op.outputs)
        return self._launch(op, rmsnorm_quantize, x, weight, x8, scale, eps=op.attrs["eps"])

    def _linear(self, op: Op) -> Launch:
        loaded = self.rank.weights[op.input("w").name]
        x = self._in(op, "x")
        bias = self._in(op, "bias") if op.find("bias") is not None else None
        epilogue = self._epilogue(op)
        detail = f"+{type(epilogue).__name__}"
        shared: dict[str, Any] = {"scale": loaded.scale, "bias": bias}
        if x.shape[0] > GEMV_MAX_ROWS:
            x_scale = self._in(op, "x_scale") if op.find("x_scale") is not None else None
            return self._launch(
                op, gemm, x, loaded.weight, epilogue, **shared, x_scale=x_scale,
                workspace=self.rank.gemm_workspace, detail=detail,
            )  # fmt: skip
        norm = self._in(op, "norm") if op.find("norm") is not None else None
        return self._launch(
            op, gemv, x, loaded.weight, epilogue, **shared, norm_weight=norm,
            eps=op.attrs.get("norm_eps", 0.0), poll=self._poll(op), prefetch=self.prefetch,
            detail=f"{detail}+Poll" if op.polls else detail,
        )  # fmt: skip

    def _epilogue(self, op: Op) -> Epilogue:
        kind = op.attrs.get("epilogue", "store")
        rank = self.rank
        if kind == "push":
            assert rank.peer_table is not None
            return Push(rank.peer_table, self._slot(op), rank.index, rank.world)
        if kind == "two_shot_scatter":
            return Scatter(self._end.message(op.out.shape[0]), self._end.far)
        out = self.tensors[op.out]
        if kind == "maxima":
            return self._maxima(op, out)
        if kind == "silu_mul":
            return SiluMul(out)
        if kind == "residual":
            return Residual(self._in(op, "residual"), out)
        if kind == "rope_append":
            state, layer = rank.state, op.layer
            assert layer is not None
            return RopeAppend(
                out, state.k_cache[layer], state.v_cache[layer], state.cos_sin, state.positions,
                self._row_slots(), op.attrs["num_heads"], op.attrs["num_kv_heads"], op.attrs["head_dim"],
            )  # fmt: skip
        return Store(out)

    def _maxima(self, op: Op, logits: torch.Tensor) -> Maxima:
        rank, state, (rows, n) = self.rank, self.rank.state, logits.shape
        weight = self._in(op, "w")
        chosen = choice(op, self.graph, self._weight_dtype, rank.dtype, self._kv_length())
        assert chosen is not None
        parts = gemv_programs(choose(*chosen), n, weight.shape[1], rows, weight.dtype)
        return Maxima(
            logits, *self._set_best(rows, parts), state.temperature, state.seeds, state.positions,
            rank.row_slots[:rows], op.attrs["vocab_size"], rank.index * op.attrs["shard_size"],
            self._request(),
        )  # fmt: skip

    def _heads(self, op: Op) -> Mapping[str, Any]:
        return {key: op.attrs[key] for key in ("num_heads", "num_kv_heads", "head_dim")}

    def _rope_append(self, op: Op) -> Launch:
        state, layer = self.rank.state, op.layer
        assert layer is not None
        rows, norm = None, None
        if self.graph.phase == "decode":
            rows = DecodeRows(state.positions, self._row_slots())
        if op.find("q_norm") is not None:
            norm = QKNorm(self._in(op, "q_norm"), self._in(op, "k_norm"), op.attrs["qk_norm_eps"])
        return self._launch(
            op, rope_append, self._in(op, "qkv"), self.tensors[op.out], state.k_cache[layer],
            state.v_cache[layer], state.cos_sin, self._request(), rows=rows, norm=norm,
            scales=state.kv_scales[layer],
        )  # fmt: skip

    def _attention(self, op: Op) -> Launch:
        state, layer, rank = self.rank.state, op.layer, self.rank
        assert layer is not None
        q, out = self._in(op, "q"), self.tensors[op.out]
        k, v = state.k_cache[layer], state.v_cache[layer]
        heads = {**self._heads(op), "scale": op.attrs["scale"], "scales": state.kv_scales[layer]}
        if self.graph.phase == "prefill":
            return self._launch(op, prefill_attention, q, k, v, rank.request, out, **heads)
        return self._launch(
            op, decode_attention, q, k, v, state.positions, self._row_slots(), out,
            rank.attention_workspace, **heads, prefetch=self.prefetch,
        )  # fmt: skip

    def _gather_row(self, op: Op) -> Launch:
        x, out = self._in(op, "x"), self.tensors[op.out]
        return self._launch(op, gather_row, x, self.rank.request, out)

    # Sampling

    def _argmax_partial(self, op: Op) -> Launch:
        rank, state = self.rank, self.rank.state
        logits = self._in(op, "logits")
        rows = logits.shape[0]
        return self._launch(
            op, argmax.argmax_partial, logits, state.temperature, state.seeds, state.positions,
            rank.row_slots[:rows], *self._set_best(rows, argmax.argmax_programs(logits.shape[1])),
            vocab_size=op.attrs["vocab_size"], id_offset=rank.index * op.attrs["shard_size"],
            request=self._request(),
        )  # fmt: skip

    def _set_best(self, rows: int, parts: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Values and ids [rows, parts] for the maxima of the op being lowered; those behind it read them."""
        values, ids = self.rank.best_values[: rows * parts], self.rank.best_ids[: rows * parts]
        self.best = values.view(rows, parts), ids.view(rows, parts)
        return self.best

    def _argmax_push(self, op: Op) -> Launch:
        rank = self.rank
        return self._launch(
            op, argmax.argmax_push, *self.best, rank.token_table, 0,
            rank=rank.index, world=rank.world,
        )  # fmt: skip

    def _argmax_poll(self, op: Op) -> Launch:
        rank = self.rank
        return self._launch(
            op, argmax.argmax_poll, rank.token_exchange, 0, 0, *self._outcome(op), rank.status,
            rank=rank.index, world=rank.world, call_site=-1, request=self._request(),
        )  # fmt: skip

    def _argmax_finish(self, op: Op) -> Launch:
        return self._launch(
            op, argmax.argmax_finish, *self.best, *self._outcome(op), request=self._request()
        )

    # Sampling under controls (graph/tail.py)

    def _sample_adjust(self, op: Op) -> Launch:
        rank, state = self.rank, self.rank.state
        logits = self._in(op, "logits")
        return self._launch(
            op, sample.adjust, logits, state.controls, state.counts, state.bias,
            rank.row_slots[: logits.shape[0]], rank.sampling, rank.score_table,
            vocab_size=op.attrs["vocab_size"], rank=rank.index, world=rank.world,
            request=self._request(),
        )  # fmt: skip

    _sample_push = _sample_adjust

    def _sample_gather(self, op: Op) -> Launch:
        rank, (rows, total) = self.rank, op.out.shape
        return self._launch(
            op, sample.gather, rank.score_exchange, total // rank.world, rows, rank.sampling,
            rank.status, rank=rank.index, world=rank.world, call_site=-2,
        )  # fmt: skip

    def _sample_search(self, op: Op) -> Launch:
        rank, state = self.rank, self.rank.state
        rows, total = op.input("scores").shape
        return self._launch(
            op, sample.search, op.attrs["number"], rows, total, state.temperature, state.controls,
            rank.row_slots[:rows], rank.sampling, vocab_size=op.attrs["vocab_size"],
            request=self._request(),
        )  # fmt: skip

    def _sample_pick(self, op: Op) -> Launch:
        rank, state = self.rank, self.rank.state
        rows, total = op.input("scores").shape
        return self._launch(
            op, sample.pick, total, state.temperature, state.seeds, state.positions, state.controls,
            rank.row_slots[:rows], rank.sampling,
            *self._set_best(rows, argmax.argmax_programs(total // rank.world)),
            vocab_size=op.attrs["vocab_size"], request=self._request(),
        )  # fmt: skip

    def _sample_settle(self, op: Op) -> Launch:
        rank, state = self.rank, self.rank.state
        tokens, _, row_slots, ring, step = self._outcome(op)
        return self._launch(
            op, sample.settle, *self.best, tokens, state.controls, state.counts, row_slots, ring,
            step, rank.sampling, rank=rank.index, request=self._request(),
        )  # fmt: skip

    def _outcome(self, op: Op) -> tuple[torch.Tensor, ...]:
        """Where the chosen tokens go: the slots' state and the host ring."""
        rank, rows = self.rank, op.out.shape[0]
        state = rank.state
        ring = rank.ring[:, :rows]
        return state.tokens, state.positions, rank.row_slots[:rows], ring, rank.step
