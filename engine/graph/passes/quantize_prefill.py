"""Prefill under FP8 weights: the inputs of compute-bound linears become FP8 too (W8A8).

One fp32 scale a token. A value read by several such linears is quantised once; a norm read by nothing
else writes FP8 itself, and so does the norm within a two-shot exchange, which then carries half the bytes. Which linears is a fixed rule and not a tuned choice, so that the same model gives
the same text whatever the cache holds: an FP8 weight and at least FP8_MIN_TOKENS tokens. Below that the
read of the weights is the bound and 16-bit activations cost nothing; decode keeps them always. (H200, 72B TP=1: 64
tokens took 36.0 ms with 16-bit activations where 128 took 25.4 with FP8: the conversion of weights, not their read,
was the bound.)
"""

from __future__ import annotations

from dataclasses import replace

from engine.graph.ir import Graph, Op, Value, make_op

FP8_MIN_TOKENS = 64


def quantize_prefill(graph: Graph) -> Graph:
    """linear(x, w) -> linear(x8, w, x_scale) behind quantize_rows or rmsnorm_quantize."""
    if graph.phase != "prefill" or not graph.fp8_prefill:
        return graph
    uses = graph.consumers()
    wanted = {op.input("x") for op in graph.ops if _takes_fp8(op, graph)}
    quantized: dict[Value, tuple[Value, Value]] = {}

    def only_fp8(x: Value) -> bool:
        return x in wanted and all(_takes_fp8(graph.ops[i], graph) for i in uses[x])

    gathers = [op for op in graph.ops if op.kind == "two_shot_gather"]
    sites = {op.attrs["site"] for op in gathers if only_fp8(op.out)}
    ops: list[Op] = []
    for op in graph.ops:
        if op.kind == "linear" and _takes_fp8(op, graph):
            x = op.input("x")
            if x not in quantized:
                quantized[x] = _outputs(x)
                outputs = quantized[x]
                ops.append(make_op("quantize_rows", outputs, op.stage, op.layer, x=x))
            ops.append(_with_fp8_input(op, *quantized[x]))
        elif op.kind == "rmsnorm" and only_fp8(op.out):
            quantized[op.out] = _outputs(op.out)
            ops.append(replace(op, kind="rmsnorm_quantize", outputs=quantized[op.out]))
        elif op.kind == "two_shot_reduce" and op.attrs["site"] in sites:
            ops.append(replace(op, attrs={**op.attrs, "quantize": True}))
        elif op.kind == "two_shot_gather" and op.attrs["site"] in sites:
            quantized[op.out] = _outputs(op.out)
            ops.append(replace(op, outputs=(*quantized[op.out], *op.outputs[1:])))
        else:
            ops.append(op)
    return replace(graph, ops=tuple(ops))


def _takes_fp8(op: Op, graph: Graph) -> bool:
    return (
        op.kind == "linear"
        and op.input("x").shape[0] >= FP8_MIN_TOKENS
        and graph.weights[op.input("w").name].quantizable
    )


def _outputs(x: Value) -> tuple[Value, Value]:
    """A row is quantised as its rank holds it, so the scale is sharded where x is."""
    return (
        Value(f"{x.name}_fp8", x.shape, "fp8", x.sharding),
        Value(f"{x.name}_scale", x.shape[:1], "f32", x.sharding),
    )


def _with_fp8_input(op: Op, x8: Value, scale: Value) -> Op:
    inputs = dict(zip(op.attrs["roles"], op.inputs)) | {"x": x8, "x_scale": scale}
    return make_op(op.kind, op.outputs, op.stage, op.layer, op.attrs, **inputs)
