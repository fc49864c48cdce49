"""Drop ops whose results nobody reads: in a prefill chunk without lm_head, what follows the last KV append."""

from __future__ import annotations

from dataclasses import replace

from engine.graph.ir import SENDS, Graph, Op

# These write state or talk to other ranks or the host: they are alive by themselves.
EFFECTS = SENDS | {"kv_append", "rope_append", "sample", "argmax_poll", "argmax_finish"}


def has_effect(op: Op) -> bool:
    """Whether the op does more than compute its outputs."""
    return op.kind in EFFECTS or op.attrs.get("epilogue") in EFFECTS


def eliminate_dead(graph: Graph) -> Graph:
    """Backwards liveness over the line of ops."""
    live = {graph.output} if graph.output is not None else set()
    kept: list[Op] = []
    for op in reversed(graph.ops):
        if has_effect(op) or any(value in live for value in op.outputs):
            kept.append(op)
            live.update(op.inputs)
    return replace(graph, ops=tuple(reversed(kept)))
