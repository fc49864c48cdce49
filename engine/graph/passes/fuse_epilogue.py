"""What follows a linear and reads only its result moves into the linear's epilogue.

SiLU x up and the residual add everywhere; the push to the peers and the vocabulary maxima where the linear is
a GEMV, whose programs hold whole output elements (lm_head keeps its logits too); RoPE + KV append in decode (of
a GEMM they are passes over a tile's worth of bytes and stay kernels of their own); the way of each row to its owner
(two-shot), which only GEMMs have.
"""

from __future__ import annotations

from dataclasses import replace

from engine.graph.facts import GEMV_MAX_ROWS
from engine.graph.ir import Graph, Op, make_op

_EPILOGUES = {
    "silu_mul": "silu_mul",
    "add": "residual",
    "rope_append": "rope_append",
    "push": "push",
    "two_shot_scatter": "two_shot_scatter",
    "argmax_partial": "maxima",
}
_GEMV_ONLY = {"push", "argmax_partial"}
# The role of the linear's result, if it is not x.
_READS = {"rope_append": "qkv", "argmax_partial": "logits"}


def fuse_epilogue(graph: Graph) -> Graph:
    """linear + its only reader -> linear with attrs["epilogue"]."""
    uses = graph.consumers()
    ops: list[Op] = []
    skip: set[int] = set()
    for i, op in enumerate(graph.ops):
        if i in skip:
            continue
        readers = uses.get(op.out, []) if op.kind == "linear" else []
        reader = graph.ops[readers[0]] if len(readers) == 1 else None
        first = _READS.get(reader.kind, "x") if reader is not None else "x"
        if (
            reader is None
            or reader.kind not in _EPILOGUES
            or reader.input(first) != op.out
            # A norm over a head, or the scale of one: more than a program holds.
            or reader.find("q_norm") is not None
            or reader.find("k_scale") is not None
            or (reader.kind in _GEMV_ONLY and op.out.shape[0] > GEMV_MAX_ROWS)
            or (reader.kind == "rope_append" and graph.phase != "decode")
        ):
            ops.append(op)
            continue
        ops.append(_fused(op, reader, _EPILOGUES[reader.kind], first))
        skip.add(readers[0])
    return replace(graph, ops=tuple(ops))


def _fused(linear: Op, reader: Op, epilogue: str, first: str) -> Op:
    roles = ("x", "w", "bias", "norm")
    inputs = {role: linear.find(role) for role in roles}
    inputs |= {role: reader.input(role) for role in reader.attrs["roles"] if role != first}
    extra = {key: value for key, value in reader.attrs.items() if key != "roles"}
    attrs = {key: value for key, value in linear.attrs.items() if key != "roles"}
    kept = linear.outputs if epilogue == "maxima" else ()
    return make_op(
        "linear",
        (*kept, *reader.outputs),
        linear.stage,
        linear.layer,
        {**attrs, **extra, "epilogue": epilogue},
        **inputs,
    )
