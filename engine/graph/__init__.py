"""The compiler: build -> passes (verified) -> plan -> lower -> capture, or interpret."""

from engine.graph.build import build
from engine.graph.dump import dump_graph
from engine.graph.passes import PASSES, run_passes

__all__ = ["PASSES", "build", "dump_graph", "run_passes"]
