"""Bytes, FLOPs, launches and barriers of each stage of a step, counted on the compiled graph."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import lru_cache
from math import prod

from engine.config import ModelConfig, with_layers
from engine.graph.build import build
from engine.graph.ir import SENDS, WAITS, Graph, Op, Phase
from engine.graph.passes import run_passes
from engine.graph.plan import arena_outputs, read_bytes, value_bytes
from engine.model.gpus import Gpu

ACT_BYTES = 2  # 16-bit activations and KV


@dataclass(frozen=True)
class Cost:
    """What one op, or all ops of a stage, do on one rank. Sums with `+`.

    fp8_flops: those of `flops` that multiply FP8 by FP8; launches: kernels that neither send a message nor wait for one
    (two-shot's publish sends a flag); barriers: waits for the other ranks; message_bytes: what a rank stores into its
    peers' memory while nothing else runs.
    """

    weight_bytes: int = 0
    kv_bytes: int = 0
    activation_bytes: int = 0
    flops: float = 0.0
    fp8_flops: float = 0.0
    launches: int = 0
    barriers: int = 0
    message_bytes: int = 0

    @property
    def bytes(self) -> int:
        """Device memory traffic."""
        return self.weight_bytes + self.kv_bytes + self.activation_bytes

    def arithmetic_s(self, gpu: Gpu) -> float:
        """Seconds at the tensor cores' peaks."""
        return (self.flops - self.fp8_flops) / gpu.flops + self.fp8_flops / gpu.fp8_flops

    def __add__(self, other: Cost) -> Cost:
        return Cost(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(Cost)))

    def __mul__(self, count: int) -> Cost:
        return Cost(*(getattr(self, f.name) * count for f in fields(Cost)))


def op_cost(op: Op, graph: Graph, fp8: bool, context: int, act_bytes: int = ACT_BYTES) -> Cost:
    """Cost of one op of a finished graph on rank 0.

    fp8: e4m3 for the weights that may be (one fp32 scale a row). context: tokens in the KV before this
    step: of each row in decode, of the prompt's earlier chunks in prefill. Weights and activations
    count once (as `Launch.bytes`); KV is what attention reads and the step appends.
    """
    weight = activation = 0
    for value in op.inputs:
        if value.kind == "weight" and op.kind != "embedding":
            count = prod(value.shape)
            quantized = fp8 and graph.weights[value.name].quantizable
            weight += count + 4 * value.shape[0] if quantized else count * act_bytes
        elif value.kind == "temp":
            activation += read_bytes(op, value, act_bytes)
    activation += sum(value_bytes(value, act_bytes) for value in arena_outputs(op))
    flops = _flops(op, graph, context)
    return Cost(
        weight_bytes=weight,
        kv_bytes=_kv_bytes(op, graph, context, act_bytes),
        activation_bytes=activation,
        flops=flops,
        fp8_flops=flops if op.kind == "linear" and op.find("x_scale") else 0.0,
        launches=int(op.kind not in (SENDS | WAITS) - {"two_shot_publish"}),
        barriers=int(op.is_wait),
        message_bytes=_message_bytes(op, graph, act_bytes),
    )


def _kv_bytes(op: Op, graph: Graph, context: int, act_bytes: int) -> int:
    if "num_kv_heads" not in op.attrs:
        return 0
    head = op.attrs["head_dim"] * act_bytes
    if op.find("k_scale") is not None:  # e4m3 and an fp32 scale
        head = op.attrs["head_dim"] + 4
    token = 2 * op.attrs["num_kv_heads"] * head
    if op.kind != "attention":  # the append
        return graph.rows * token
    return token * (graph.rows * (context + 1) if graph.phase == "decode" else context + graph.rows)


def _flops(op: Op, graph: Graph, context: int) -> float:
    if op.kind == "linear":
        return 2.0 * op.input("x").shape[0] * prod(op.input("w").shape)
    if op.kind != "attention":
        return 0.0
    rows = graph.rows
    pairs = rows * (context + 1)  # (query, key) pairs that the mask lets through
    if graph.phase == "prefill":
        pairs = rows * context + rows * (rows + 1) // 2
    return 4.0 * op.attrs["num_heads"] * op.attrs["head_dim"] * pairs


def _message_bytes(op: Op, graph: Graph, act_bytes: int) -> int:
    """What crosses the links while nothing else runs: one-shot sends the whole message to every peer; the flag
    barrier's reader fetches the whole one from every peer; two-shot sends the own rows, in FP8 if they are quantised
    (the first half of it travels while its GEMM runs)."""
    one_shot = op.kind in ("push", "argmax_push", "flag_reduce")
    if not one_shot and op.kind != "two_shot_reduce" and op.attrs.get("epilogue") != "push":
        return 0
    whole = (graph.tp - 1) * value_bytes(op.out, 1 if op.attrs.get("quantize") else act_bytes)
    return whole // graph.tp if op.kind == "two_shot_reduce" else whole


def add_up(costs: Iterable[Cost]) -> Cost:
    """The sum."""
    return sum(costs, Cost())


@lru_cache(maxsize=64)
def _short(
    config: ModelConfig, phase: Phase, rows: int, tp: int, shard_of: int | None, fp8_prefill: bool,
    fp8_kv: bool, algorithms: tuple[str, ...],
) -> Graph:  # fmt: skip
    unfused = build(
        with_layers(config, min(3, config.num_layers)), phase=phase, rows=rows, tp=tp,
        shard_of=shard_of, fp8_prefill=fp8_prefill, fp8_kv=fp8_kv, algorithms=algorithms,
    )  # fmt: skip
    return run_passes(unfused)


def op_costs(
    config: ModelConfig, tp: int, *, phase: Phase, rows: int, context: int, fp8: bool,
    shard_of: int | None = None, fp8_prefill: bool = False, fp8_kv: bool = False,
    algorithms: tuple[str, ...] = Graph.algorithms,
) -> list[tuple[str, int, Cost]]:  # fmt: skip
    """(stage, times a step runs it, cost of one) of each op. fp8_prefill: --prefill-activations fp8; fp8_kv:
    --kv-cache-dtype fp8; algorithms: see graph/build.py. Raises EngineError for an impossible TP degree.

    Three layers are compiled, and the second counted for all between the first and the last. In decode only the
    first differs from it (its qkv GEMV awaits no all-reduce), in prefill only the last (one row behind its attention).
    """
    graph = _short(config, phase, rows, tp, shard_of, fp8_prefill, fp8_kv, algorithms)
    between = max(1, config.num_layers - 2)
    return [
        (op.stage, between if op.layer == 1 else 1, op_cost(op, graph, fp8, context))
        for op in graph.ops
    ]
