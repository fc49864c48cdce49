"""bench/workers.py: a variant that is wrong, raises, faults, dies or hangs takes no other with it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from bench.workers import run_workers


def run(kinds, queues, limit_s=60.0):
    tasks = [
        {"number": i, "do": kind, "error": 2.0 if kind == "wrong" else 0.5}
        for i, kind in enumerate(kinds)
    ]
    return run_workers(
        "tests.unit.worker_stub", tasks, queues, limit_s,
        describe=lambda i: f"<{i}>", bound=lambda _: 1.0,
    )  # fmt: skip


def test_one_bad_task_costs_no_other(capsys) -> None:
    kinds = ["ok", "wrong", "raise", "ok", "fault", "ok", "die", "ok"]
    assert run(kinds, [range(len(kinds)), []]) == {0, 3, 5, 7}
    said = capsys.readouterr().out
    assert said.count("dropped") == 4
    assert "<1>: 2.0" in said and "<2>: ValueError: task 2 cannot" in said
    assert "<4>: RuntimeError: CUDA error" in said and "<6>: its worker died" in said


def test_what_is_not_done_in_time_is_not_good(capsys) -> None:
    assert run(["ok", "hang", "ok"], [range(3)], limit_s=8.0) == {0}
    assert "out of time: 2 variants not checked" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["--help"]])
@pytest.mark.parametrize(
    "module, scripts",
    [
        ("attention_workers", ["attention"]),
        ("gemm_workers", ["gemm"]),
        ("gemv_workers", ["gemv"]),
        ("workers", ["gemm", "gemv"]),
        ("all_reduce_baselines", ["all_reduce --baselines"]),
        ("put_signal_baselines", ["put_signal"]),
    ],
)
def test_a_worker_run_by_hand_names_its_script(module, scripts, arguments) -> None:
    done = subprocess.run(
        [sys.executable, "-m", f"bench.{module}", *arguments], capture_output=True, text=True
    )
    run_this = " or ".join(f"python -m bench.{script}" for script in scripts)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: this is only the worker process of a script: run {run_this}\n"
