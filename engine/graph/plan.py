"""Static buffers: every temp of a graph gets an offset in one arena per rank, reused by liveness.

All launches of a rank are ordered (one stream; under programmatic dependent launch a kernel writes only
after the one before it has completed), so a buffer is free for the next op once its last reader has
been launched. One launch overlaps the one before: a `poll_residual` is not held up by the end of the push
that it polls (all_reduce.py), so what that push reads is kept until behind the poll. Messages between
ranks and (value, id) maxima live in workspaces of their own.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.graph.ir import SENDS, Graph, Op, Value

ALIGN = 256  # bytes; keeps every row of every buffer 16-byte aligned for vector loads
ITEMSIZE = {"f32": 4, "i32": 4, "fp8": 1}
# Outputs that have no arena buffer: they live in exchange slots, argmax workspaces or the state.
_ELSEWHERE = SENDS | {"sample", "argmax_partial", "argmax_poll", "argmax_finish", "sample_adjust"}
_ELSEWHERE |= {"sample_gather", "sample_search", "sample_pick", "sample_settle", "two_shot_gather"}


@dataclass(frozen=True)
class BufferPlan:
    """Byte offset of each temp in the rank's arena, and the arena's size."""

    offsets: dict[Value, int]
    arena_bytes: int


def value_bytes(value: Value, act_bytes: int) -> int:
    """Bytes of one rank's copy of a value."""
    count = 1
    for size in value.shape:
        count *= size
    return count * ITEMSIZE.get(value.dtype, act_bytes)


def read_bytes(op: Op, value: Value, act_bytes: int) -> int:
    """Bytes that the op reads of a temp: the whole, but of gather_row its one row; flags are read for the message
    that they stand for."""
    if op.kind in ("two_shot_publish", "two_shot_gather"):
        return 0
    return value_bytes(op.out if op.kind == "gather_row" else value, act_bytes)


def _aligned(value: Value, act_bytes: int) -> int:
    return -(-value_bytes(value, act_bytes) // ALIGN) * ALIGN


def arena_outputs(op: Op) -> tuple[Value, ...]:
    """The op's outputs that are tensors in the arena."""
    epilogue = op.attrs.get("epilogue")
    if op.kind == "two_shot_reduce":
        return op.outputs[1:]
    if op.kind in _ELSEWHERE or epilogue in _ELSEWHERE:
        return ()
    return (op.out, *op.outputs[2:]) if epilogue == "maxima" else op.outputs


def plan(graph: Graph, act_bytes: int) -> BufferPlan:
    """First-fit allocation in order of definition. The graph's output, its logits, has the arena's start to
    itself: one sampling tail (graph/tail.py) finds the logits of every graph there.
    """
    last = {value: i for i, op in enumerate(graph.ops) for value in op.inputs}
    producers = graph.producers()
    for i, op in enumerate(graph.ops):
        if op.kind == "poll_residual":
            for value in graph.ops[producers[op.input("message")]].inputs:
                last[value] = max(last[value], i)
    live: list[tuple[int, int, int]] = []  # (start, stop, last use)
    offsets: dict[Value, int] = {}
    top = 0
    if graph.output is not None:
        offsets[graph.output] = 0
        top = _aligned(graph.output, act_bytes)
        live.append((0, top, len(graph.ops)))
    for i, op in enumerate(graph.ops):
        # A buffer read by this op is still live while the op writes its output.
        live = [block for block in live if block[2] >= i]
        for value in arena_outputs(op):
            if value in offsets:
                continue
            size = _aligned(value, act_bytes)
            start = 0
            for block in sorted(live):
                if block[0] - start >= size:
                    break
                start = max(start, block[1])
            offsets[value] = start
            live.append((start, start + size, last.get(value, i)))
            top = max(top, start + size)
    return BufferPlan(offsets, top)
