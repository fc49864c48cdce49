"""Which graphs a deployment on GPUs has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from engine.config import ModelConfig
from engine.graph.build import Logits, build
from engine.graph.ir import Graph, Phase
from engine.graph.passes import run_passes
from engine.graph.plan import BufferPlan
from engine.graph.tail import sampling_tail
from engine.runtime.buckets import DECODE_ROWS, decode_rows
from engine.weights import WeightSpec

GraphKey = tuple[Phase, int, Logits]  # phase, decode rows or prefill bucket, which logits
TailKey = tuple[Phase, int]  # the sampling tail of a phase: decode rows, or 1


def compile_graphs(
    config: ModelConfig,
    tp: int,
    *,
    rows: int,
    buckets: Sequence[int],
    shard_of: int | None,
    prompt_logits_bucket: int,
    fp8_prefill: bool = False,
    fp8_kv: bool = False,
    algorithms: tuple[str, ...] = Graph.algorithms,
    chunks: bool = True,
    adapt: Callable[[dict[str, WeightSpec]], dict[str, WeightSpec]] = dict,
    only: Sequence[GraphKey] | None = None,
) -> dict[GraphKey, Graph]:
    """Every graph of a deployment: decode rows 1, 2, 4, 8 up to `rows`; prefill buckets; the largest bucket
    also without lm_head (chunks: prompts may be longer than it) and one bucket with logits of every
    position (prompt logprobs).
    fp8_prefill, fp8_kv, algorithms: see graph/build.py. adapt: the specs as the checkpoint stores them.
    only: just these (tuning)."""
    wanted: list[GraphKey] = [("decode", n, "last") for n in DECODE_ROWS if n <= decode_rows(rows)]
    wanted += [("prefill", size, "last") for size in buckets]
    wanted += [("prefill", buckets[-1], "none")] if chunks else []
    wanted += [("prefill", prompt_logits_bucket, "all")]
    graphs: dict[GraphKey, Graph] = {}
    for phase, size, logits in wanted if only is None else only:
        unfused = build(
            config, phase=phase, rows=size, tp=tp, logits=logits, shard_of=shard_of,
            fp8_prefill=fp8_prefill, fp8_kv=fp8_kv, algorithms=algorithms,
        )  # fmt: skip
        unfused = replace(unfused, weights=adapt(unfused.weights))
        graphs[(phase, size, logits)] = run_passes(unfused)
    return graphs


def compile_tails(
    config: ModelConfig,
    tp: int,
    *,
    rows: int,
    shard_of: int | None,
    algorithms: tuple[str, ...] = Graph.algorithms,
) -> dict[TailKey, tuple[Graph, BufferPlan]]:
    """Every sampling tail of a deployment: decode rows 1, 2, 4, 8 up to `rows`, and the prefill's."""
    wanted: list[TailKey] = [("decode", n) for n in DECODE_ROWS if n <= decode_rows(rows)]
    return {
        (phase, n): sampling_tail(
            config, phase=phase, rows=n, tp=tp, shard_of=shard_of, algorithms=algorithms
        )
        for phase, n in [*wanted, ("prefill", 1)]
    }
