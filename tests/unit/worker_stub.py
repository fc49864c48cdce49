"""Child process of test_bench_workers.py: does to each task what the task says."""

import os
import sys
import time

from bench.workers import serve


def check(task: dict) -> float:
    if task["do"] == "die":
        os._exit(11)
    if task["do"] == "hang":
        time.sleep(60)
    if task["do"] == "raise":
        raise ValueError(f"task {task['number']} cannot\nbe done")
    if task["do"] == "fault":
        raise RuntimeError("CUDA error: an illegal memory access")
    return float(task["error"])


if __name__ == "__main__":
    serve(sys.argv[1], check)
