"""The compiled form as a table: op, kernel, configuration, grid, bytes. Needs no GPU.

The graph is lowered onto `meta` tensors (shapes without memory) and each launcher is run with Triton's launch
replaced by a recorder, so the table shows what the real launch would be, not a second description of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from triton.runtime.jit import JITFunction

from engine.checkpoint.fp8 import FP8_DTYPE
from engine.checkpoint.load import Loaded
from engine.config import ModelConfig
from engine.graph.ir import Graph
from engine.graph.lower import Launch, lower
from engine.graph.plan import plan
from engine.kernels.gemv_config import GemvConfig, rows_config
from engine.runtime.allocate import Sizes, allocate_ranks, gemm_workspace_sizes, maxima_pairs
from engine.runtime.exchange import graph_exchange

META = torch.device("meta")


def meta_launches(
    config: ModelConfig, graph: Graph, quantization: str | None, *, context: int, degree: int
) -> list[Launch]:
    """Launches of rank 0 of `graph` on tensors without memory, activations in bf16."""

    def weight(name: str) -> Loaded:
        spec = graph.weights[name]
        shape = spec.local_shape(0)
        if quantization == "fp8" and spec.quantizable:
            scale = torch.empty(shape[0], dtype=torch.float32, device=META)
            return Loaded(torch.empty(shape, dtype=FP8_DTYPE, device=META), scale)
        return Loaded(torch.empty(shape, dtype=torch.bfloat16, device=META))

    weights = {name: weight(name) for name in graph.weights}
    buffers = plan(graph, 2)
    rows = graph.rows if graph.phase == "decode" else 1
    sizes = Sizes(
        slots=rows, rows=rows, tokens=graph.rows, max_model_len=context, arena_bytes=buffers.arena_bytes,
        gemm=gemm_workspace_sizes([graph], lambda name: weights[name].weight.dtype),
        maxima=maxima_pairs([graph], lambda name: weights[name].weight.dtype),
        exchange=graph_exchange([graph]), fp8_kv=graph.fp8_kv,
    )  # fmt: skip
    ranks = allocate_ranks(
        config, [weights] * graph.tp, [META] * graph.tp, torch.bfloat16, sizes, degree
    )
    return lower(graph, buffers, ranks[0], pdl=True)


@contextmanager
def _recording() -> Iterator[list[tuple[str, tuple[int, ...], dict[str, Any]]]]:
    """Collect (kernel, grid, keyword arguments) of every Triton launch instead of making it."""
    seen: list[tuple[str, tuple[int, ...], dict[str, Any]]] = []

    def record(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        del args, warmup
        size = grid(kwargs) if callable(grid) else grid
        seen.append((self.fn.__name__, tuple(size), kwargs))

    with patch.object(JITFunction, "run", record):
        yield seen


def launch_grids(launch: Launch) -> list[tuple[str, tuple[int, ...], int]]:
    """(kernel, grid, warps) of each Triton launch behind this one (cuBLAS and NCCL leave no entry)."""
    with _recording() as seen:
        if launch.messages is None:
            launch.run()
    return [(name, grid, int(kwargs.get("num_warps", 4))) for name, grid, kwargs in seen]


def _in_force(launch: Launch) -> Any:
    """The configuration; of a GEMV what its row count makes of it."""
    config = launch.config
    if isinstance(config, GemvConfig) and launch.choice is not None:
        return rows_config(config, launch.choice[1]["rows"])
    return config


def format_launches(launches: list[Launch]) -> str:
    """One line a launch; of the layers behind the first only kernels that no layer before them has."""
    lines, seen = [], set()
    for launch in launches:
        if launch.op.layer and launch.key in seen:
            continue
        seen.add(launch.key)
        layer = "-" if launch.op.layer is None else launch.op.layer
        library = "cublas" if launch.messages is None else "nccl"
        kernels = launch_grids(launch) or [(library, (), 0)]
        where = " + ".join(f"{name}{list(grid)}x{32 * warps}" for name, grid, warps in kernels)
        config = "" if launch.config is None else f"  {_in_force(launch)}"
        lines.append(
            f"  {layer:>2} {launch.op.stage:<10} {launch.kernel:<24} {launch.bytes:>13,} B  {where}{config}"
        )
    return "\n".join(lines)
