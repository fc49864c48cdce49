"""The compiler: build -> passes (verified) -> plan -> lower -> capture, or interpret."""

from engine.config import ModelConfig
from engine.graph.build import build
from engine.graph.dump import dump_graph
from engine.graph.passes import PASSES, run_passes
from engine.weights import WeightSpec

__all__ = ["PASSES", "build", "dump_graph", "run_passes", "weight_specs"]


def weight_specs(
    config: ModelConfig, tp: int, shard_of: int | None = None
) -> dict[str, WeightSpec]:
    """By name, the weights that a model's compiled graphs ask for at a TP degree; all of them ask for the same."""
    graph = run_passes(build(config, phase="decode", rows=1, tp=tp, shard_of=shard_of))
    return graph.weights
