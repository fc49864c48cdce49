"""RMSNorm moves into the prologue of the GEMV that reads it: in decode, and for the last row of a prefill.

The GEMV loads all of x anyway, so it sums the squares on the fly and scales its result by 1 / rms once;
no launch, no extra pass. A GEMM splits its rows over many tiles and would repeat the sum in
each, so there the norm stays a kernel of its own.
"""

from __future__ import annotations

from dataclasses import replace

from engine.graph.ir import Graph, Op, make_op


def fuse_norm(graph: Graph) -> Graph:
    """rmsnorm + its only reader (a linear of at most 8 rows) -> linear with a norm prologue."""
    uses, producers = graph.consumers(), graph.producers()
    ops: list[Op] = []
    for op in graph.ops:
        if op.kind == "rmsnorm" and all(_takes(graph.ops[i]) for i in uses.get(op.out, [])):
            continue
        if _takes(op):
            source = producers.get(op.input("x"))
            norm = graph.ops[source] if source is not None else None
            if norm is not None and norm.kind == "rmsnorm":
                op = make_op(
                    "linear", op.outputs, op.stage, op.layer,
                    {**op.attrs, "norm_eps": norm.attrs["eps"]},
                    x=norm.input("x"), w=op.input("w"), bias=op.find("bias"), norm=norm.input("weight"),
                )  # fmt: skip
        ops.append(op)
    return replace(graph, ops=tuple(ops))


def _takes(op: Op) -> bool:
    return op.kind == "linear" and op.out.shape[0] <= 8
