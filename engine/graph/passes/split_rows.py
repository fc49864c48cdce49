"""Prefill at TP > 1: the residual stream is split by rows, and exchanges carry what the next GEMM reads.

all_reduce + residual add + rmsnorm become the four steps of the two-shot exchange (kernels/two_shot.py): each rank
sums, adds and norms its own rows, and the normed rows of all come back. The hidden state between them is never
whole on any rank ("rows"), so this is done where nothing else needs it: its readers are a norm, the next such
exchange's residual, and the gather of the request's last row, which the exchange then sends along. Exchanges for
which that does not hold, or for which two-shot is not the choice (bytes, links), stay as they are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from engine.graph.facts import algorithm_of
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


@dataclass(frozen=True)
class _Exchange:
    """Indices of the ops that one exchange replaces; last: of the gather of the request's last row, if there is one."""

    reduce: int
    add: int
    norm: int
    last: tuple[int, ...]

    def steps(self, graph: Graph, site: int, split: dict[Value, Value]) -> list[Op]:
        reduce, add, norm = (graph.ops[i] for i in (self.reduce, self.add, self.norm))
        partial, residual, h = reduce.input("x"), add.input("residual"), add.out
        split[h] = replace(h, sharding="rows")
        last = {"last": True} if self.last else {}

        def message(name: str) -> Value:
            return Value(f"{partial.name}_{name}", partial.shape, sharding="partial")

        def emit(kind: str, *outputs: Value, attrs: dict[str, Any], **inputs: Value) -> Op:
            attrs = {"site": site, **attrs}
            return make_op(kind, outputs, "all_reduce", reduce.layer, attrs, **inputs)

        sent, published, reduced = message("msg"), message("published"), message("reduced")
        return [
            emit("two_shot_scatter", sent, attrs={}, x=partial),
            emit("two_shot_publish", published, attrs={}, message=sent),
            emit(
                "two_shot_reduce", reduced, split[h], attrs={"eps": norm.attrs["eps"], **last},
                message=published, residual=split.get(residual, residual), weight=norm.input("weight"),
            ),
            emit(
                "two_shot_gather", norm.out, *(graph.ops[i].out for i in self.last), attrs=last,
                message=reduced, h=split[h],
            ),
        ]  # fmt: skip


def _exchanges(graph: Graph) -> dict[int, _Exchange]:
    """By the index of the all_reduce. One that does not qualify takes with it those that need its rows."""
    algorithm, uses = algorithm_of(graph.tp, graph.algorithms), graph.consumers()

    def readers(exchange: _Exchange) -> set[int]:
        return set(uses[graph.ops[exchange.add].out])

    found: dict[int, _Exchange] = {}
    for i, op in enumerate(graph.ops):
        if op.kind != "all_reduce" or algorithm(*op.out.shape) != "two_shot":
            continue
        (add,) = uses[op.out]
        hidden = uses.get(graph.ops[add].out, [])
        norms = [j for j in hidden if graph.ops[j].kind == "rmsnorm"]
        rows = tuple(j for j in hidden if graph.ops[j].kind == "gather_row")
        if len(norms) == 1 and len(rows) <= 1:
            found[i] = _Exchange(i, add, norms[0], rows)
    while True:
        adds = {exchange.add for exchange in found.values()}
        kept = {i: x for i, x in found.items() if readers(x) <= adds | {x.norm, *x.last}}
        if len(kept) == len(found):
            return found
        found = kept
