"""The sampling tail: a graph of its own, replayed after a step whose requests have controls.

The step's graph samples greedily or by temperature and never changes; the tail reads the logits that it
left at the arena's start, makes the token under top-k, top-p, min-p, penalties and bias, and replaces it.
So steps without controls launch nothing more, and one tail for each number of rows serves every graph.
To the host a tail is a step of its own: it writes the next row of the ring.
"""

from __future__ import annotations

from engine.config import ModelConfig
from engine.graph.ir import Graph, Op, Phase, Value, make_op, state
from engine.graph.passes.lower_collectives import carried
from engine.graph.plan import BufferPlan
from engine.kernels.sample_kernel import PASSES


def sampling_tail(
    config: ModelConfig, *, phase: Phase, rows: int, tp: int, shard_of: int | None = None,
    algorithms: tuple[str, ...] = Graph.algorithms,
) -> tuple[Graph, BufferPlan]:  # fmt: skip
    """Tail of a decode step of `rows` rows, or of a prefill (rows 1), with the plan that lower() needs.

    algorithms: as in graph/build.py; they say whether NCCL must carry the scores."""
    columns = config.shard(shard_of or tp).vocab_size
    total = tp * columns
    logits = Value("logits", (rows, columns), "f32", "sharded", "input")
    scores = Value("scores", (rows, total), "f32")
    picked, token = Value("picked", (rows, 2), "f32"), Value("token", (rows,), "i32")
    tokens = state("tokens", (0,), "i32")
    attrs = {"vocab_size": min(config.vocab_size, total)}
    ops: list[Op] = []

    def emit(kind: str, out: Value | tuple[()], attrs: dict | None = None, **inputs: Value) -> None:
        ops.append(make_op(kind, out, "sampling", None, attrs, **inputs))

    if tp == 1:
        emit("sample_adjust", scores, attrs, logits=logits)
    else:
        message = Value("scores_msg", (rows, columns), "f32", "sharded")
        emit("sample_push", message, attrs, logits=logits)
        ops += carried(message, "sampling", algorithms)
        emit("sample_gather", scores, None, message=ops[-1].out)
    for number in range(PASSES):
        emit("sample_search", (), {**attrs, "number": number}, scores=scores)
    emit("sample_pick", picked, attrs, scores=scores)
    emit("sample_settle", token, None, best=picked, tokens=tokens)
    graph = Graph(phase, rows, tp, config.name, tuple(ops), {}, None, algorithms=algorithms)
    return graph, BufferPlan({logits: 0}, 0)
