"""Prefill: the row that is sampled is cut out as soon as no other row is needed.

Ops that make a row of their result from that row of their inputs commute with `gather_row`, so it moves up in
front of them: gather_row(add(a, b)) = add(gather_row(a), gather_row(b)). It stops at what mixes rows (attention)
or is read whole as well (the hidden state that enters the last layer, whose K and V need every token). So behind
its attention the last layer has one row: GEMVs and messages of H values in place of GEMMs and T * H.
"""

from __future__ import annotations

from dataclasses import replace

from engine.graph.ir import Graph, Op, Value, make_op

# Row i of the result depends on row i of the temps that are read, and on no other.
ROW_WISE = frozenset({"add", "all_reduce", "linear", "rmsnorm", "silu_mul"})


def hoist_last_row(graph: Graph) -> Graph:
    """gather_row(op(x, ...)) -> op(gather_row(x), ...); each value is gathered once, right behind its producer."""
    moved = _moved(graph)
    last: dict[Value, Value] = {}  # value -> its last row
    edges: dict[Value, Op] = {}  # what is gathered -> its first reader
    for i, op in enumerate(graph.ops):
        if i in moved:
            last[op.out] = replace(op.out, shape=(1, *op.out.shape[1:]))
        elif op.kind != "gather_row":
            continue
        for value in op.inputs:
            if value.kind == "temp" and value not in last:
                edges[value] = op
                last[value] = replace(value, name=f"{value.name}_row", shape=(1, *value.shape[1:]))
    ops: list[Op] = []
    gathered: dict[Value, Value] = {}
    for i, op in enumerate(graph.ops):
        if op.kind == "gather_row":
            gathered[op.out] = last[op.input("x")]
            continue
        names = last if i in moved else gathered
        inputs = tuple(names.get(value, value) for value in op.inputs)
        outputs = (last[op.out],) if i in moved else op.outputs
        same = (inputs, outputs) == (op.inputs, op.outputs)
        ops.append(op if same else replace(op, inputs=inputs, outputs=outputs))
        for value in op.outputs:
            if value in edges:
                ops.append(_gather(value, last[value], edges[value], graph))
    return replace(graph, ops=tuple(ops))


def _moved(graph: Graph) -> set[int]:
    """Indices of the ops of whose result only the last row is read."""
    uses = graph.consumers()
    moved: set[int] = set()
    for i in reversed(range(len(graph.ops))):
        op = graph.ops[i]
        readers = uses.get(op.out, []) if op.kind in ROW_WISE and op.out != graph.output else []
        if readers and all(j in moved or graph.ops[j].kind == "gather_row" for j in readers):
            moved.add(i)
    return moved


def _gather(value: Value, row: Value, reader: Op, graph: Graph) -> Op:
    """It counts as work of the op that wants the row."""
    (where,) = {op.input("where") for op in graph.ops if op.kind == "gather_row"}
    return make_op("gather_row", row, reader.stage, reader.layer, x=value, where=where)
