"""The roof of every figure here: what a large copy reaches on this very card, now."""

from __future__ import annotations

import torch


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second of a large device-to-device copy, read + write.

    4 GiB, or what is free: smaller copies show 4 % less. About 30 ms.
    """
    free, _ = torch.cuda.mem_get_info(device)
    size = min(4 << 30, free // 3)
    with torch.cuda.device(device):
        a = torch.empty(size, dtype=torch.uint8, device=device).fill_(1)
        b = torch.empty_like(a)
        times = []
        for _ in range(8):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            b.copy_(a)
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e-3)
        del a, b
        torch.cuda.empty_cache()
    return 2 * size / sorted(times[2:])[3]
