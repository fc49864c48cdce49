"""Make the sum over ranks explicit: every partial value is reduced right where it is made."""

from __future__ import annotations

from dataclasses import replace

from engine.graph.ir import Graph, Op, Value, make_op


def place_all_reduce(graph: Graph) -> Graph:
    """Row-parallel linears leave partial sums; their one reader gets the all-reduced value."""
    ops: list[Op] = []
    reduced: dict[Value, Value] = {}
    for op in graph.ops:
        if any(value in reduced for value in op.inputs):
            op = replace(op, inputs=tuple(reduced.get(value, value) for value in op.inputs))
        ops.append(op)
        for value in op.outputs:
            if value.sharding == "partial":
                total = Value(f"{value.name}_sum", value.shape, value.dtype)
                reduced[value] = total
                ops.append(make_op("all_reduce", total, "all_reduce", op.layer, x=value))
    return replace(graph, ops=tuple(ops))
