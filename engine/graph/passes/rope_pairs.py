"""Permute the q and k rows so that RoPE rotates neighbours.

HF rotates row i with row i + D/2 of a head. With the rows permuted to 0, D/2, 1, D/2 + 1, ... a pair is
adjacent, so one GEMV tile holds both and the rotation runs in its epilogue. Q, K and the K cache all
carry the permuted order, and q . k does not depend on it; V is untouched. The gains of QK-norm follow the
rows that they scale.
"""

from __future__ import annotations

from dataclasses import replace

from engine.graph.ir import Graph


def rope_pairs(graph: Graph) -> Graph:
    """rope_append style half -> pairs, and the layout of the weights and biases that feed it."""
    weights = dict(graph.weights)
    producers = graph.producers()
    ops = list(graph.ops)
    for i, op in enumerate(graph.ops):
        if op.kind != "rope_append" or op.attrs["style"] != "half":
            continue
        ops[i] = replace(op, attrs={**op.attrs, "style": "pairs"})
        linear = graph.ops[producers[op.input("qkv")]]
        for role in ("w", "bias"):
            value = linear.find(role)
            if value is None:
                continue
            spec = weights[value.name]
            q, k, v = spec.parts
            parts = (replace(q, layout="rope_pairs"), replace(k, layout="rope_pairs"), v)
            weights[value.name] = replace(spec, parts=parts)
        for role in ("q_norm", "k_norm"):
            gain = op.find(role)
            if gain is not None:
                (part,) = weights[gain.name].parts
                permuted = replace(part, layout="rope_pairs")
                weights[gain.name] = replace(weights[gain.name], parts=(permuted,))
    return replace(graph, ops=tuple(ops), weights=weights)
