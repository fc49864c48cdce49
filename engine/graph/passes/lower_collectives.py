"""Split each exchange between ranks into its two halves, a send and a wait, as kernels run them.

The halves are separate launches, so ranks that share a device can run in lockstep on one stream (every
rank's send before any rank's wait) and nothing can spin in front of what it waits for.
"""

from __future__ import annotations

from dataclasses import replace

from engine.graph.ir import Graph, Op, Value, make_op


def lower_collectives(graph: Graph) -> Graph:
    """all_reduce + add -> push + poll_residual; sample -> argmax_partial + (push + poll | finish)."""
    uses = graph.consumers()
    ops: list[Op] = []
    skip: set[int] = set()
    site = 0
    for i, op in enumerate(graph.ops):
        if i in skip:
            continue
        if op.kind == "all_reduce":
            (reader,) = uses[op.out]
            add = graph.ops[reader]
            if add.kind != "add" or add.input("x") != op.out:
                raise AssertionError("an all_reduce is read by a residual add and nothing else")
            skip.add(reader)
            partial = op.input("x")
            message = Value(f"{partial.name}_msg", partial.shape, sharding="partial")
            attrs = {"site": site}
            ops.append(make_op("push", message, "all_reduce", op.layer, attrs, x=partial))
            ops.append(
                make_op(
                    "poll_residual", add.out, "all_reduce", op.layer, attrs,
                    message=message, residual=add.input("residual"),
                )
            )  # fmt: skip
            site += 1
        elif op.kind == "sample":
            ops += _sample(op, graph.tp)
        else:
            ops.append(op)
    return replace(graph, ops=tuple(ops))


def _sample(op: Op, tp: int) -> list[Op]:
    rows = op.out.shape[0]
    best = Value("best", (rows, 2), "f32", "partial" if tp > 1 else "replicated")
    state = {role: op.input(role) for role in ("tokens", "positions", "where")}
    attrs = {key: op.attrs[key] for key in ("vocab_size", "shard_size")}
    first = make_op(
        "argmax_partial", best, "sampling", None, attrs,
        logits=op.input("logits"), positions=state["positions"], where=state["where"],
    )  # fmt: skip
    if tp == 1:
        return [first, make_op("argmax_finish", op.out, "sampling", None, None, best=best, **state)]
    message = Value("best_msg", (rows, 2), "f32", "partial")
    return [
        first,
        make_op("argmax_push", message, "sampling", best=best),
        make_op("argmax_poll", op.out, "sampling", None, None, message=message, **state),
    ]
