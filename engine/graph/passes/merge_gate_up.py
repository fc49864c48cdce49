"""Gate and up become one matrix with alternating rows, so that SiLU(gate) * up stays inside a tile."""

from __future__ import annotations

from dataclasses import replace

from engine.graph.ir import Graph, Op, Value, make_op
from engine.weights import WeightSpec


def merge_gate_up(graph: Graph) -> Graph:
    """{linear gate, linear up, silu_mul(gate, up)} -> {linear gate_up, silu_mul(pairs)} per layer."""
    weights = dict(graph.weights)
    producers = graph.producers()
    ops: list[Op] = []
    for op in graph.ops:
        if op.kind == "linear" and op.attrs["role"] in {"gate", "up"}:
            continue
        if op.kind != "silu_mul":
            ops.append(op)
            continue
        gate, up = (graph.ops[producers[op.input(role)]] for role in ("gate", "up"))
        names = [linear.input("w").name for linear in (gate, up)]
        specs = [weights.pop(name) for name in names]
        name = names[0].replace("gate_proj", "gate_up_proj")
        parts = tuple(part for spec in specs for part in spec.parts)
        quantizable = all(spec.quantizable for spec in specs)
        weights[name] = WeightSpec(name, parts, "interleave", quantizable)
        weight = Value(name, weights[name].local_shape(), "act", "sharded", "weight")
        rows, width = op.out.shape
        pairs = Value(f"l{op.layer}.gate_up", (rows, 2 * width), sharding="sharded")
        ops.append(
            make_op(
                "linear",
                pairs,
                op.stage,
                op.layer,
                {"role": "gate_up"},
                x=gate.input("x"),
                w=weight,
            )
        )
        ops.append(make_op("silu_mul", op.out, op.stage, op.layer, x=pairs))
    return replace(graph, ops=tuple(ops), weights=weights)
