"""Times of CUDA graph replays."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

REPLAYS = 9
ENOUGH_US = 2e4  # of replays in all, from the third on


def graph_us(body: Callable[[], object], calls: int, stop_us: float = float("inf")) -> float:
    """Median time of one of the `calls` calls that `body` makes, us; after one replay above `stop_us` it is that."""
    body()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    graph.replay()
    times: list[float] = []
    while len(times) < REPLAYS:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / calls)
        if times[0] > stop_us or (sum(times) * calls > ENOUGH_US and len(times) >= 3):
            break
    return statistics.median(times)
