"""Decode: the wait of an all-reduce moves into the prologue of the GEMV that reads its result.

The GEMV polls the messages itself, its weights already on their way, adds the residual and writes the hidden
state for the next residual add: one launch and one round trip through memory less, twice a layer. Worth it
while the messages are small (kernels/gemv_poll.py), and bits are equal either way. All exchanges of a graph
are fused or none: the slots of the fused ones rotate by site (kernels/slots.py), which takes their whole line.
So a prefill, most of whose exchanges have many rows, keeps its polls.
"""

from __future__ import annotations

from dataclasses import replace

from engine.graph.ir import Graph, Op, Value, make_op
from engine.kernels.gemv_poll import polled_slots


def fuse_poll(graph: Graph) -> Graph:
    """push, poll_residual, linear with a norm prologue -> push, linear with a message input and two outputs."""
    polls = [i for i, op in enumerate(graph.ops) if op.kind == "poll_residual"]
    if graph.phase != "decode" or not polls:
        return graph
    producers = graph.producers()
    if not all(_takes(graph, producers, i) for i in polls):
        return graph
    rows, hidden = graph.ops[polls[0]].out.shape
    slots = polled_slots(graph.tp, rows, hidden, len(polls))
    if not slots:
        return graph
    ops: list[Op] = []
    for i, op in enumerate(graph.ops):
        if i in polls:
            continue
        if i - 1 in polls:
            op = _fused(graph.ops[i - 1], op, slots)
        elif op.attrs.get("epilogue") == "push":
            op = replace(op, attrs={**op.attrs, "slots": slots})
        ops.append(op)
    return replace(graph, ops=tuple(ops))


def _takes(graph: Graph, producers: dict[Value, int], poll: int) -> bool:
    """Whether the op behind a poll is a GEMV on its result, and the message came from a GEMV's epilogue."""
    message, out = graph.ops[poll].input("message"), graph.ops[poll].out
    sender = graph.ops[producers[message]]
    reader = graph.ops[poll + 1]
    reads = reader.kind == "linear" and reader.input("x") == out and "norm_eps" in reader.attrs
    return sender.attrs.get("epilogue") == "push" and reads


def _fused(poll: Op, linear: Op, slots: int) -> Op:
    inputs = {role: linear.input(role) for role in linear.attrs["roles"]}
    inputs |= {"x": poll.input("residual"), "message": poll.input("message")}
    attrs = {key: value for key, value in linear.attrs.items() if key != "roles"}
    return make_op(
        "linear", (*linear.outputs, poll.out), linear.stage, linear.layer,
        {**attrs, "site": poll.attrs["site"], "slots": slots}, **inputs,
    )  # fmt: skip
