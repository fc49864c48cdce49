"""The fusion passes, in order. Each is a pure function Graph -> Graph in a file of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from engine.graph.ir import Graph
from engine.graph.passes.eliminate_dead import eliminate_dead
from engine.graph.passes.fuse_epilogue import fuse_epilogue
from engine.graph.passes.fuse_norm import fuse_norm
from engine.graph.passes.fuse_poll import fuse_poll
from engine.graph.passes.hoist_last_row import hoist_last_row
from engine.graph.passes.lower_collectives import lower_collectives
from engine.graph.passes.merge_gate_up import merge_gate_up
from engine.graph.passes.merge_qkv import merge_qkv
from engine.graph.passes.place_all_reduce import place_all_reduce
from engine.graph.passes.quantize_prefill import quantize_prefill
from engine.graph.passes.rope_pairs import rope_pairs
from engine.graph.passes.split_rows import split_rows
from engine.graph.verify import Checked, verify

Pass = Callable[[Graph], Graph]

PASSES: tuple[Pass, ...] = (
    place_all_reduce,
    hoist_last_row,
    merge_qkv,
    rope_pairs,
    merge_gate_up,
    eliminate_dead,
    fuse_norm,
    split_rows,
    lower_collectives,
    fuse_epilogue,
    fuse_poll,
    quantize_prefill,
)


def run_passes(graph: Graph, observe: Callable[[str, Graph], None] | None = None) -> Graph:
    """Apply PASSES in order, verifying before the first and after each. `observe(name, graph)` sees each stage."""
    checked = Checked()
    verify(graph, checked)
    if observe:
        observe("build", graph)
    for transform in PASSES:
        name = transform.__name__
        graph = transform(graph)
        graph = replace(graph, passes=(*graph.passes, name))
        verify(graph, checked)
        if observe:
            observe(name, graph)
    return graph
