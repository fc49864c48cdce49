"""Which launches a start-up runs to load every kernel, and the keys that Triton's disk cache finds them by."""

from __future__ import annotations

import os
import subprocess
import sys

from engine.graph.capture import new_columns
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


KEYS = """
import sys
import engine.graph.lower
from triton.runtime.jit import JITCallable
from engine.runtime.jit import KERNELS, settle_keys
modules = [module for name, module in sys.modules.items() if name.startswith(KERNELS)]
functions = [f for module in modules for f in vars(module).values() if isinstance(f, JITCallable)]
settle_keys()
first = [f.cache_key for f in functions]
for function in functions:
    function.hash = None  # the globals that were found stay, as for a function hashed late
settle_keys()
print(len(functions), first == [f.cache_key for f in functions])
"""


def test_cache_keys_do_not_depend_on_what_was_hashed_before():
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", KEYS], env=env, capture_output=True, text=True, check=True
    )
    count, equal = done.stdout.split()
    assert int(count) > 100 and equal == "True"
