"""Check kernel variants in worker processes, so that one that is wrong, hangs or faults dies alone.

A worker takes tasks (dicts that JSON can hold) one by one and prints a line {"error": number or text} for each; one
that dies is started again behind the task it died on. Kernels it compiled lie in Triton's disk cache, where the main
process finds them.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

from engine.console import say


class _Job:
    """One worker process and the tasks (indices) it still has to do."""

    def __init__(self, run: _Run, queue: Sequence[int], path: Path):
        self.run, self.queue, self.path = run, list(queue), path
        self._start()

    def _start(self) -> None:
        self.path.write_text(json.dumps([self.run.tasks[i] for i in self.queue]))
        self.output = self.path.with_suffix(".out").open("w+")
        command = [sys.executable, "-m", self.run.module, str(self.path)]
        self.process = subprocess.Popen(command, stdout=self.output, stderr=subprocess.STDOUT)

    def running(self) -> bool:
        """Collect a finished worker's results; start it again if it died before the end of its queue."""
        if not self.queue:
            return False
        if self.process.poll() is None:
            return True
        last = self._collect()
        # After a reported CUDA error the next task is innocent.
        if self.queue and "CUDA" not in last:
            self.run.drop(self.queue.pop(0), f"its worker died: {last[:160]}")
        if self.queue:
            self._start()
        return bool(self.queue)

    def _collect(self) -> str:
        """Judge the finished tasks and take them off the queue; the last line that the worker printed."""
        self.output.seek(0)
        lines = [line for line in self.output.read().splitlines() if line.strip()]
        done = [json.loads(line)["error"] for line in lines if line.startswith('{"error"')]
        for error, index in zip(done, self.queue):
            self.run.judge(index, error)
        self.queue = self.queue[len(done) :]
        return lines[-1] if lines else ""

    def stop(self) -> int:
        """Kill the worker; how many of its tasks were not finished."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._collect()
        return len(self.queue)


class _Run:
    """The tasks of one `run_workers` and which of them are good."""

    def __init__(
        self, module: str, tasks: Sequence[dict[str, Any]], describe: Callable[[int], str],
        bound: Callable[[int], float],
    ):  # fmt: skip
        self.module, self.tasks, self._describe, self._bound = module, tasks, describe, bound
        self.good: set[int] = set()

    def judge(self, index: int, error: float | str) -> None:
        if isinstance(error, float) and error <= self._bound(index):
            self.good.add(index)
        else:
            self.drop(index, str(error))

    def drop(self, index: int, reason: str) -> None:
        print(f"  dropped {self._describe(index)}: {reason}", flush=True)


def run_workers(
    module: str, tasks: Sequence[dict[str, Any]], queues: Sequence[Sequence[int]], limit_s: float, *,
    describe: Callable[[int], str], bound: Callable[[int], float],
) -> set[int]:  # fmt: skip
    """Indices of the tasks whose error is at most bound(index); one printed line for each that is not.

    module: has `serve` under its `__main__`; queues: the indices that each worker takes, in order. After limit_s
    seconds what is left counts as bad.
    """
    deadline = time.perf_counter() + limit_s
    run = _Run(module, tasks, describe, bound)
    with tempfile.TemporaryDirectory() as folder:
        jobs = [_Job(run, queue, Path(folder) / str(i)) for i, queue in enumerate(queues) if queue]
        while any([job.running() for job in jobs]):  # a list: every job is looked at each time
            if time.perf_counter() > deadline:
                print(f"  out of time: {sum(job.stop() for job in jobs)} variants not checked")
                break
            time.sleep(0.1)
    return run.good


def serve(path: str, check: Callable[[dict[str, Any]], float]) -> None:
    """The worker: one line for each task of the file."""
    torch.backends.cuda.matmul.allow_tf32 = False
    for task in json.loads(Path(path).read_text()):
        error: float | str
        try:
            error = check(task)
        except Exception as e:
            lines = str(e).strip().splitlines() or [""]
            error = f"{type(e).__name__}: {lines[0][:160]}"
        print(json.dumps({"error": error}), flush=True)
        if isinstance(error, str) and "CUDA" in error:
            return  # the context is lost: a fresh process goes on behind this task


def task_file(script: str) -> str:
    """The file that `script` gave its worker, this process; see `by_hand` for one without."""
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_file():
        by_hand(script)
    return sys.argv[1]


def by_hand(*scripts: str) -> NoReturn:
    """Tell the person who ran a module of worker processes what to run."""
    names = " or ".join(f"python -m {script}" for script in scripts)
    say(f"error: this is only the worker process of a script: run {names}")
    raise SystemExit(2)


if __name__ == "__main__":
    by_hand("bench.gemm", "bench.gemv")
