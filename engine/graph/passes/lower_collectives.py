"""Split each exchange between ranks into its sends and waits, as kernels run them.

They are separate launches, so ranks that share a device can run in lockstep on one stream (every rank's
send before any rank's wait for it) and nothing can spin in front of what it waits for. Which algorithm
sums is chosen here, by ranks and bytes of the message: one-shot or the flag barrier (two-shot: split_rows.py).
"""

from __future__ import annotations

from dataclasses import replace

from engine.graph.facts import algorithm_of
from engine.graph.ir import Graph, Op, Value, make_op

# What a rank sends, one message a step, and what it then waits for.
_SENDS = {
    "lamport": ("push",),
    "nccl": ("push", "nccl_gather"),
    "flag": ("flag_publish",),
}
_WAIT = {"lamport": "poll_residual", "nccl": "poll_residual", "flag": "flag_reduce"}


def lower_collectives(graph: Graph) -> Graph:
    """all_reduce + add -> sends and a wait; sample -> argmax_partial + (push + poll | finish)."""
    uses = graph.consumers()
    ops: list[Op] = []
    skip: set[int] = set()
    site = 0
    algorithm = algorithm_of(graph.tp, [name for name in graph.algorithms if name != "two_shot"])
    for i, op in enumerate(graph.ops):
        if i in skip:
            continue
        site += op.kind == "two_shot_scatter"
        if op.kind == "all_reduce":
            (reader,) = uses[op.out]
            add = graph.ops[reader]
            if add.kind != "add" or add.input("x") != op.out:
                raise AssertionError("an all_reduce is read by a residual add and nothing else")
            skip.add(reader)
            ops += _all_reduce(op, add, site, algorithm(*op.out.shape))
            site += 1
        elif op.kind == "sample":
            ops += _sample(op, graph)
        else:
            ops.append(op)
    return replace(graph, ops=tuple(ops))


def _all_reduce(op: Op, add: Op, site: int, algorithm: str) -> list[Op]:
    partial, residual = op.input("x"), add.input("residual")
    sends = _SENDS[algorithm]

    def emit(kind: str, out: Value, **inputs: Value) -> Op:
        return make_op(kind, out, "all_reduce", op.layer, {"site": site}, **inputs)

    first = Value(f"{partial.name}_msg", partial.shape, sharding="partial")
    ops = [emit(sends[0], first, x=partial)]
    for kind in sends[1:]:
        message = Value(f"{partial.name}_{kind}", partial.shape, sharding="partial")
        ops.append(emit(kind, message, message=ops[-1].out))
    return [*ops, emit(_WAIT[algorithm], add.out, message=ops[-1].out, residual=residual)]


def _sample(op: Op, graph: Graph) -> list[Op]:
    rows, tp = op.out.shape[0], graph.tp
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
    ops = [first, make_op("argmax_push", message, "sampling", best=best)]
    ops += carried(message, "sampling", graph.algorithms)
    message = ops[-1].out
    ops.append(make_op("argmax_poll", op.out, "sampling", None, None, message=message, **state))
    return ops


def carried(message: Value, stage: str, algorithms: tuple[str, ...]) -> list[Op]:
    """The op that moves a sampling message where the ranks cannot reach each other; else none."""
    if "nccl" not in algorithms:
        return []
    gathered = replace(message, name=f"{message.name}_nccl_gather")
    return [make_op("nccl_gather", gathered, stage, message=message)]
