"""Prefill at TP > 1: the residual stream is split by rows, and exchanges carry what the next GEMM reads.

all_reduce + residual add + rmsnorm become the four steps of the two-shot exchange (kernels/two_shot.py): each rank
sums, adds and norms its own rows, and the normed rows of all come back. The hidden state between them is never
whole on any rank ("rows"), so this is done where nothing else needs it: its readers are a norm, the next such
exchange's residual, and the gather of the request's last row, which the exchange then sends along. Exchanges for
which that does not hold, or for which two-shot is not the choice (bytes, links), stay as they are.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from engine.graph.facts import all_reduce_algorithm
from engine.graph.ir import Graph, Op, Value, make_op


def split_rows(graph: Graph) -> Graph:
    """all_reduce, add, rmsnorm [, gather_row] -> two_shot_scatter, _publish, _reduce, _gather."""
    exchanges = _exchanges(graph)
    if not exchanges:
        return graph
    norms = {exchange.norm for exchange in exchanges.values()}
    skip = norms | {i for x in exchanges.values() for i in (x.add, *x.last)}
    split: dict[Value, Value] = {}  # hidden states, as rows
    ops: list[Op] = []
    site = 0
    for i, op in enumerate(graph.ops):
        if i in exchanges:
            ops += exchanges[i].steps(graph, site, split)
        elif i not in skip:
            ops.append(op)
        site += op.kind == "all_reduce"
    return replace(graph, ops=tuple(ops))


class _Exchange:
    """Indices of the ops that one exchange replaces."""

    def __init__(self, reduce: int, add: int, norm: int, last: list[int]):
        self.reduce, self.add, self.norm, self.last = reduce, add, norm, last

    def steps(self, graph: Graph, site: int, split: dict[Value, Value]) -> list[Op]:
        reduce, add, norm = (graph.ops[i] for i in (self.reduce, self.add, self.norm))
        partial, residual, h = reduce.input("x"), add.input("residual"), add.out
        split[h] = replace(h, sharding="rows")

        def emit(kind: str, outputs: tuple[Value, ...], **inputs: Value) -> Op:
            attrs = {"site": site} | (
                {"eps": norm.attrs["eps"]} if kind == "two_shot_reduce" else {}
            )
            if self.last and kind in ("two_shot_reduce", "two_shot_gather"):
                attrs["last"] = True
            return make_op(kind, outputs, "all_reduce", reduce.layer, attrs, **inputs)

        names = ("msg", "published", "reduced")
        sent, published, reduced = (
            Value(f"{partial.name}_{name}", partial.shape, sharding="partial") for name in names
        )
        last = [graph.ops[i].out for i in self.last]
        return [
            emit("two_shot_scatter", (sent,), x=partial),
            emit("two_shot_publish", (published,), message=sent),
            emit(
                "two_shot_reduce", (reduced, split[h]), message=published,
                residual=split.get(residual, residual), weight=norm.input("weight"),
            ),
            emit("two_shot_gather", (norm.out, *last), message=reduced, h=split[h]),
        ]  # fmt: skip


def _exchanges(graph: Graph) -> dict[int, _Exchange]:
    """By the index of the all_reduce. One that does not qualify takes with it those that need its rows."""

    @cache
    def algorithm(rows: int, hidden: int) -> str:
        return all_reduce_algorithm(graph.tp, rows, hidden, graph.algorithms)

    uses = graph.consumers()
    found: dict[int, _Exchange] = {}
    for i, op in enumerate(graph.ops):
        if op.kind != "all_reduce":
            continue
        rows, hidden = op.out.shape
        if algorithm(rows, hidden) != "two_shot":
            continue
        (add,) = uses[op.out]
        readers = uses.get(graph.ops[add].out, [])
        kinds = {kind: [j for j in readers if graph.ops[j].kind == kind] for kind in _READERS}
        if len(kinds["rmsnorm"]) == 1 and len(kinds["gather_row"]) <= 1:
            found[i] = _Exchange(i, add, kinds["rmsnorm"][0], kinds["gather_row"])
    while True:
        adds = {exchange.add for exchange in found.values()}
        allowed = adds | {j for x in found.values() for j in (x.norm, *x.last)}
        spread = [i for i, x in found.items() if set(uses[graph.ops[x.add].out]) - allowed]
        if not spread:
            return found
        for i in spread:
            del found[i]


_READERS = ("rmsnorm", "gather_row")
