"""NCCL and torch symm_mem all-reduce in a CUDA graph, one process a device: JSON lines for
bench/all_reduce.py.

`python -m bench.all_reduce_baselines FOLDER WORLD BYTES...`. NVLink multicast stays off.
"""

from __future__ import annotations

import functools
import json
import os
import statistics
import sys
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from bench.workers import by_hand


def timed(call: Callable[[], object], calls: int) -> float:
    """Median us of one call, `calls` of them in a graph."""
    call()
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    times = []
    for _ in range(9):
        dist.barrier()
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / calls)
    return statistics.median(times)


def main(rank: int, folder: str, world: int, sizes: list[int]) -> None:
    os.environ.update(NCCL_NVLS_ENABLE="0", TORCH_SYMM_MEM_DISABLE_MULTICAST="1")
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=40),
        device_id=torch.device("cuda", rank),
    )

    def report(name: str, nbytes: int, call: Callable[[], object]) -> None:
        calls = 160 if nbytes <= 1 << 16 else 40 if nbytes <= 1 << 20 else 8
        us = timed(call, calls)
        if rank == 0:
            print(json.dumps({"name": name, "bytes": nbytes, "us": us}), flush=True)

    for nbytes in sizes:
        x = torch.randn(nbytes // 2, device="cuda").bfloat16()
        report("nccl", nbytes, functools.partial(dist.all_reduce, x))
    try:
        import torch.distributed._symmetric_memory as symmetric

        everyone = dist.group.WORLD
        assert everyone is not None  # since init_process_group
        group = everyone.group_name
        ops = torch.ops.symm_mem
        here = torch.device("cuda", rank)
        shared = symmetric.empty(max(sizes) // 2, dtype=torch.bfloat16, device=here)
        symmetric.rendezvous(shared, group)
        shared.normal_()
        for nbytes in sizes:
            part = shared[: nbytes // 2]
            if nbytes <= 1 << 20:
                report(
                    "symm_mem_one_shot",
                    nbytes,
                    functools.partial(ops.one_shot_all_reduce, part, "sum", group),
                )
            report(
                "symm_mem_two_shot",
                nbytes,
                functools.partial(ops.two_shot_all_reduce_, part, "sum", group),
            )
    except Exception as error:  # a baseline that is missing is a line, not a failure
        print(f"symm_mem: {error!r:.300}", file=sys.stderr, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    if len(sys.argv) <= 3:
        by_hand("bench.all_reduce --baselines")
    directory, count, *wanted = sys.argv[1:]
    mp.spawn(main, (directory, int(count), [int(w) for w in wanted]), nprocs=int(count))
