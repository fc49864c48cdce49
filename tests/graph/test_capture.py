"""What a start-up runs to load every kernel, how it captures, and the keys that Triton's disk cache finds kernels by."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import threading
from contextlib import nullcontext
from dataclasses import replace
from typing import ClassVar

import pytest
import torch

from engine.graph.capture import Program, new_columns
from engine.graph.ir import Value, make_op
from engine.graph.lower import Launch


def launch(kind: str, key: str, site: int | None = None) -> Launch:
    attrs = {} if site is None else {"site": site}
    op = make_op(kind, Value("y", (1, 8)), "stage", None, attrs)
    return Launch(op, kind, None, 0, key, lambda: None)


def step(layers: int, last: str = "wait") -> list[tuple[Launch, Launch]]:
    """Launches of two ranks: a norm, a send and a wait a layer; the last layer's wait is another kernel."""
    line = []
    for layer in range(layers):
        line += [launch("rmsnorm", "norm"), launch("push", "send", layer)]
        line.append(launch("poll_residual", last if layer == layers - 1 else "wait", layer))
    return [(item, item) for item in line]


def test_each_kernel_runs_once_and_exchanges_run_whole():
    seen: set[tuple[str, int]] = set()
    # norm, the first layer's exchange, and the last one's send too, as its wait is new
    assert new_columns(step(4, last="other"), [0, 1], seen) == [0, 1, 2, 10, 11]
    assert seen == {(key, at) for key in ("norm", "send", "wait", "other") for at in (0, 1)}
    assert new_columns(step(3), [0, 1], seen) == []
    # Ranks that share a device need each kernel once; another device needs all of them.
    assert new_columns(step(2), [0, 0], set()) == [0, 1, 2]
    assert new_columns(step(2), [0, 2], seen) == [0, 1, 2]


def test_an_unseen_send_takes_its_seen_wait_along():
    columns = [(launch("push", "new send", 0),), (launch("poll_residual", "wait", 0),)]
    assert new_columns(columns, [0], {("wait", 0)}) == [0, 1]


class Stream:
    def __init__(self, device: int):
        self.device = torch.device("cuda", device)

    def synchronize(self) -> None:
        pass


class Graph:
    made: ClassVar[list] = []

    def __init__(self):
        self.made.append(self)

    def capture_begin(self, capture_error_mode: str) -> None:
        assert (
            capture_error_mode == "thread_local"
        )  # a thread's capture must not forbid the others'
        self.thread, self.ran, self.ended = threading.current_thread(), [], False

    def capture_end(self) -> None:
        self.ended = True


@pytest.fixture
def cuda(monkeypatch):
    """torch.cuda as far as a capture needs it."""
    Graph.made.clear()
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    for name in ("device", "stream"):
        monkeypatch.setattr(torch.cuda, name, lambda _: nullcontext())
    monkeypatch.setattr("engine.graph.capture._enter_thread", lambda *_: None)


def recording(rank: int, columns: int) -> list[Launch]:
    """Launches that write themselves into the graph that their thread captures."""

    def run(index: int) -> None:
        (graph,) = (g for g in Graph.made if g.thread is threading.current_thread() and not g.ended)
        graph.ran.append((index, rank))

    op = make_op("add", Value("y", (1, 8)), "stage")
    return [
        Launch(op, "add", None, 0, "add", functools.partial(run, index)) for index in range(columns)
    ]


def test_devices_are_captured_side_by_side_ranks_of_one_in_lockstep(cuda):
    first, second = Stream(0), Stream(1)
    lines = [recording(rank, 3) for rank in range(4)]
    together = threading.Barrier(2)  # breaks after the timeout if one waits for the other's end
    for line in lines[:2]:
        line.insert(0, replace(line[0], run=lambda: together.wait(timeout=10) and None))
    for line in lines[2:]:
        line.insert(0, replace(line[0], run=lambda: None))
    program = Program(lines, [first, second, first, second])
    program.capture()
    ((piece),) = program._pieces
    assert [stream for stream, _ in piece] == [first, second]
    assert [graph.ran for _, graph in piece] == [
        [(index, rank) for index in range(3) for rank in ranks] for ranks in ((0, 2), (1, 3))
    ]


def test_a_launch_that_fails_ends_its_capture(cuda):
    def fail() -> None:
        raise RuntimeError("no such kernel")

    lines = [[replace(item, run=fail) for item in recording(0, 2)], recording(1, 2)]
    program = Program(lines, [Stream(0), Stream(1)])
    with pytest.raises(RuntimeError, match="no such kernel"):
        program.capture()
    assert not program.captured and all(graph.ended for graph in Graph.made)


KEYS = """
import sys
import engine.graph.lower
from triton.runtime.jit import JITCallable
from engine.runtime.jit import KERNELS, settle_keys
modules = [module for name, module in sys.modules.items() if name.startswith(KERNELS)]
functions = [f for module in modules for f in vars(module).values() if isinstance(f, JITCallable)]
settle_keys()
first = [function.cache_key for function in functions]
for again in (False, True):  # as if all had been hashed before, callers first
    for function in reversed(functions):
        function.hash = None
        _ = function.cache_key if not again else None
settle_keys()
print(len(functions), first == [function.cache_key for function in functions])
"""


def test_cache_keys_do_not_depend_on_what_was_hashed_before():
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", KEYS], env=env, capture_output=True, text=True, check=True
    )
    count, equal = done.stdout.split()
    assert int(count) > 100 and equal == "True"
