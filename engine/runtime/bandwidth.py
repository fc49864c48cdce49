"""The roof of every figure here: what a large copy reaches on this very card, now."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch


def event_seconds(body: Callable[[], object], count: int) -> list[float]:
    """Time of each of `count` calls of `body` on the current stream, first ones included."""
    times = []
    for _ in range(count):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        body()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e-3)
    return times


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second of a large device-to-device copy, read + write: the fastest of 16, as a card that was
    idle may take longer than two of them to be at its clock (a median of 8 once gave 3.79 of 4.29 TB/s).

    4 GiB, or what is free: smaller copies show 4 % less. About 40 ms.
    """
    free, _ = torch.cuda.mem_get_info(device)
    size = min(4 << 30, free // 3)
    with torch.cuda.device(device):
        a = torch.empty(size, dtype=torch.uint8, device=device).fill_(1)
        b = torch.empty_like(a)
        times = event_seconds(partial(b.copy_, a), 16)
        del a, b
        torch.cuda.empty_cache()
    return 2 * size / min(times)
