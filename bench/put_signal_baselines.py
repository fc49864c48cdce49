"""NCCL send/recv between two GPUs in CUDA graphs, one process a GPU: JSON lines for
bench/put_signal.py.

`python -m bench.put_signal_baselines FOLDER BYTES...`: half a round trip, and sends back to back.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from bench.all_reduce_baselines import timed
from bench.workers import by_hand

CALLS = 10  # hand-offs in one call of `timed`, which captures several of these


def main(rank: int, folder: str, sizes: list[int]) -> None:
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl", init_method=f"file://{folder}/store", rank=rank, world_size=2,
        timeout=timedelta(seconds=40), device_id=torch.device("cuda", rank),
    )  # fmt: skip
    for nbytes in sizes:
        x = torch.zeros(nbytes, dtype=torch.uint8, device="cuda")

        def turn(sends: bool, x: torch.Tensor = x) -> None:
            dist.send(x, 1 - rank) if sends else dist.recv(x, 1 - rank)

        def ping_pong(turn=turn) -> None:
            for _ in range(CALLS):
                turn(rank == 0)
                turn(rank == 1)

        def one_way(turn=turn) -> None:
            for _ in range(CALLS):
                turn(rank == 0)

        calls = 6 if nbytes <= 1 << 20 else 1
        for kind, body, hops in (("latency", ping_pong, 2), ("bandwidth", one_way, 1)):
            us = timed(body, calls) / (hops * CALLS)
            if rank == 0:
                row = {"metric": f"put_signal_{kind}_us", "bytes": nbytes, "us": us}
                print(json.dumps(row), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    if len(sys.argv) <= 2:
        by_hand("bench.put_signal")
    directory, *wanted = sys.argv[1:]
    mp.spawn(main, (directory, [int(size) for size in wanted]), nprocs=2)
