"""All-reduce on the card: links, bits, latency by size, the bounded spin.

Needs one CUDA device (virtual ranks only) or two and more. Every spin ends after 2 s. First the probe's matrix of
links, then the sections, in order, each skipped with a line once --time-limit is spent:
  correctness  checked all-reduces under random delays: wrong elements, equality of all ranks' bits
  latency      us a call in a CUDA graph per form and size, against a copy kernel (the launch floor), and
               the share of the links. two_shot is one launch, two_shot_split four, two_shot_behind_gemm the three
               behind a GEMM that has scattered; _norm and _norm_fp8 as the engine launches it
  tune         the best algorithm of each size to autotune_cache/ (only if named; one rank a device)
  two_shot     shapes of two-shot in one launch, 1 to 32 MB (only if named; one rank a device)
  expiry       a rank that never pushes: the status, then recovery; the host's interrupt
  virtual      every algorithm with 2, 4 and 8 ranks on ONE device, in lockstep on its stream, 1 KB to
               1 MB (--virtual: this section alone)
  baselines    NCCL and torch symm_mem in one process a device (--baselines)
Rows go to $OUT/all_reduce.json (bench/rows.py), a table to the terminal. Exit 1 if a check failed.
The long run is bench/all_reduce_soak.py.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import date
from typing import Any

import torch

from bench.all_reduce_forms import FORMS, TIMED_FORMS
from bench.all_reduce_group import Group
from bench.all_reduce_latency import CALLS, SIZES, floor_us, latency, latency_table, link_rate
from bench.all_reduce_two_shot import sweep
from bench.deployment import choices, script
from bench.rows import Rows
from engine.console import Parser
from engine.kernels.all_reduce import AllReduceConfig
from engine.runtime.links import describe, probe_links
from engine.tune import choose

# As the engine launches them; a two-shot exchange's first half travels while its GEMM runs.
TUNED_FORMS = {
    "lamport": "lamport_own_slot",
    "two_shot": "two_shot_behind_gemm_norm",
    "flag": "flag_split",
}
SECTIONS = ("correctness", "latency", "tune", "two_shot", "expiry", "virtual")
ONLY_NAMED = ("tune", "two_shot")
CHECKED_BYTES = {
    "two_shot": 1 << 18,
    "two_shot_split": 1 << 18,
}  # 16 rows, so that every rank owns some; else 16 KB


class Bench:
    def __init__(self, time_limit: float) -> None:
        self.deadline = time.monotonic() + time_limit
        self.devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
        self.rows = Rows("all_reduce")
        self.table: list[str] = []
        self.failures: list[str] = []
        self.link = link_rate(self.devices)

    def late(self, section: str) -> bool:
        if time.monotonic() < self.deadline:
            return False
        self.say(f"{section}: skipped, the time limit is spent")
        return True

    def say(self, text: str) -> None:
        print(text, flush=True)
        self.table.append(text)

    def check(self, good: bool, text: str) -> None:
        self.say(("ok    " if good else "FAIL  ") + text)
        if not good:
            self.failures.append(text)

    def add(self, metric: str, value: float, unit: str, group: Group, name: str, **facts) -> None:
        self.rows.add(
            metric, value, unit, tp=group.world, bytes=group.nbytes, algorithm=name, **facts
        )


def correctness(
    bench: Bench, form: str, world: int, nbytes: int, calls: int, pdl: bool,
    devices: list[torch.device] | None = None,
) -> None:  # fmt: skip
    group = Group(form, world, devices or bench.devices, nbytes, pdl=pdl)
    group.preload()

    def body(device: torch.device) -> None:
        for call in range(CALLS):
            group.checked_call(call, device)
        group.advance(device)

    replay = group.capture(body)
    group.reset()
    replays = -(-calls // CALLS)
    start = time.monotonic()
    done = 0
    for i in range(replays):
        if i % 50 == 0:
            group.synchronize()
            if time.monotonic() > bench.deadline or group.status[0]:
                break
            group.randomise_delays(0.2 if i % 100 else 0.0, 20_000)
        replay()
        done += CALLS
    verdict = group.verdict()
    seconds = time.monotonic() - start
    good = not verdict["wrong"] and verdict["ranks_equal"] and not verdict["status"][0]
    text = f"{form} x{world} {nbytes} B pdl={int(pdl)}: {done} calls in {seconds:.1f} s, {verdict}"
    bench.check(good, text)
    bench.add("all_reduce_checked_calls", done, "calls", group, form)


def best_entry(times: dict[AllReduceConfig, float]) -> dict[str, Any]:
    """The tuned cache's entry of one message size, from us by configuration (NaN: it failed)."""
    ranked = sorted((us, i) for i, us in enumerate(times.values()) if us == us)
    configs = list(times)
    entry = {
        "config": configs[ranked[0][1]],
        "us": round(ranked[0][0], 3),
        "date": str(date.today()),
    }
    if len(ranked) > 1:
        us, second = ranked[1]
        entry["runner_up"] = {"config": str(configs[second]), "us": round(us, 3)}
    return entry


def tuned_configs(algorithm: str, nbytes: int) -> list[AllReduceConfig]:
    """What `tune` times. One-shot from 1 MB on also with several programs a multiprocessor: one of 256 lanes has 4 KB
    in flight, where memory wants 30. (Separate launches need not be resident at once.) Two-shot handles a row at a
    time: 1 to 4 programs a multiprocessor."""
    if not TIMED_FORMS[TUNED_FORMS[algorithm]].fits(nbytes):
        return []
    if algorithm == "two_shot":
        return [AllReduceConfig("two_shot", programs=n) for n in (132, 264, 396, 528)]
    shapes = [(128, 4, 128), (256, 8, 128)]
    if algorithm == "lamport" and nbytes >= 1 << 20:
        shapes += [(256, 8, 264), (256, 8, 528), (256, 8, 1056), (1024, 8, 132)]
    return [AllReduceConfig(algorithm, *shape) for shape in shapes]


def tune(bench: Bench, world: int) -> None:
    """Every size by every algorithm in the forms that the engine launches; the best go to the tuned cache, where
    `engine.tune.choose` finds them."""
    if world > len(bench.devices):
        bench.check(False, "tune: virtual ranks cross no link; it needs one rank a device")
        return
    name = torch.cuda.get_device_name(0)
    choose.set_target(name, torch.cuda.get_device_properties(0).multi_processor_count)
    entries = {}
    for nbytes in (1 << k for k in range(11, 26)):
        if bench.late(f"tune from {nbytes} B"):
            break
        times = {}
        for algorithm, form in TUNED_FORMS.items():
            for config in tuned_configs(algorithm, nbytes):
                times[config] = latency(bench, form, world, nbytes, True, config)
        if all(us != us for us in times.values()):
            break  # spins expired: `latency` has said so
        key = choose.key_string("all_reduce", {"world": world, "nbytes": nbytes})
        entries[key] = best_entry(times)
    path = choose.save_entries(
        "all_reduce", name, entries, choose.metadata("all_reduce"), replace=True
    )
    for key, entry in entries.items():
        bench.say(
            f"{key}: {entry['config'].algorithm} {entry['us']} us; then {entry.get('runner_up')}"
        )
    bench.say(f"tuned cache: {path}")


def expiry(bench: Bench, world: int) -> None:
    """The last rank never pushes call 5."""
    group = Group("lamport", world, bench.devices, 1 << 14)
    group.preload()
    for call in range(5):
        group.checked_call(call)
    group.synchronize()
    start = time.monotonic()
    for m in group.members[:-1]:
        with group.on(m.device):
            group.launch(m, 5, "push", residual=False)
    for m in group.members:
        with group.on(m.device):
            group.launch(m, 5, "poll", residual=False)
    group.synchronize()
    first = time.monotonic() - start
    status = group.status.tolist()
    missing = world - 1
    good = status[0] == 1 and status[2] == 5 and status[4] == missing and 1.5 < first < 8
    bench.check(good, f"expiry: after {first:.2f} s status {status} (peer {missing} missing)")
    start = time.monotonic()
    for call in range(6, 6 + 32):  # a queue of calls behind the abort
        for m in group.members:
            with group.on(m.device):
                group.launch(m, call, "poll", residual=False)
    group.synchronize()
    rest = time.monotonic() - start
    bench.check(rest < 0.5, f"expiry: 32 calls queued behind it ended in {rest * 1e3:.1f} ms")
    group.reset()
    for call in range(8):
        group.checked_call(call)
    verdict = group.verdict()
    good = not verdict["wrong"] and verdict["ranks_equal"] and not verdict["status"][0]
    bench.check(good, f"expiry: works again after the reset: {verdict}")
    # Interrupt (Ctrl-C): the host sets the abort word while a rank spins.
    group.limit_us = 20_000_000
    with group.on(group.members[0].device):
        group.launch(group.members[0], 0, "poll", residual=False)
    time.sleep(0.2)
    start = time.monotonic()
    group.status[0] = 2
    group.synchronize()
    stop = time.monotonic() - start
    bench.check(
        stop < 1, f"interrupt: a spin of 20 s ended {stop * 1e3:.1f} ms after the host's word"
    )


def virtual(bench: Bench, forms: list[str], calls: int) -> None:
    """Every algorithm with more ranks than devices, as the engine launches them (no PDL)."""
    for nbytes in (1 << 14, 1 << 10, 1 << 18, 1 << 20):
        for ranks in (2, 4, 8):
            for form in forms:
                if not bench.late(f"{form} x{ranks} virtual, {nbytes} B"):
                    few = max(CALLS, calls // (1 if nbytes <= 1 << 14 else 8))
                    correctness(bench, form, ranks, nbytes, few, False, bench.devices[:1])


def baselines(bench: Bench, seconds: float) -> None:
    """NCCL and torch symm_mem, one process a device; each row names its algorithm."""
    world = len(bench.devices)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "bench.all_reduce_baselines", folder, str(world)]
        command += [str(size) for size in SIZES]
        # Its own session, so that a time-out can end the ranks that it spawns.
        child = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            output, errors = child.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            output, errors = child.communicate()
            bench.say(f"baselines: cut off after {seconds:.0f} s")
    found = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    for row in found:
        bench.rows.add(
            "all_reduce_us", row["us"], "us", tp=world, bytes=row["bytes"], algorithm=row["name"]
        )
        bench.say(f"{row['bytes']:9d} {row['name']:>20} {row['us']:.2f}")
    if not found:
        bench.say("baselines: nothing measured: " + errors.strip()[-600:])


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: see bench.deployment; 1 if a check failed."""
    parser = Parser(
        prog="python -m bench.all_reduce", description=__doc__,
        epilog="engine bench allreduce --predict needs no GPU",
    )  # fmt: skip
    parser.add_argument("--time-limit", type=float, default=120.0, help="seconds (default 120)")
    parser.add_argument("--calls", type=int, default=100_000, help="checked all-reduces")
    parser.add_argument("--baselines", action="store_true", help="also NCCL and torch symm_mem")
    every = ",".join(name for name in SECTIONS if name not in ONLY_NAMED)
    parser.add_argument(
        "--sections",
        type=choices(*SECTIONS),
        default=every,
        help=f"of {', '.join(SECTIONS)}, comma-separated (default: {every})",
    )
    parser.add_argument("--virtual", action="store_true", help="the section virtual alone")
    return script(parser, measure_all, argv)


def measure_all(options: argparse.Namespace) -> int:
    """Every section that was asked for; the exit code."""
    sections = ["virtual"] if options.virtual else options.sections
    matrix = probe_links()  # reaches every peer
    bench = Bench(options.time_limit)
    bench.say(describe(matrix))
    world = min(len(bench.devices), 8)
    single = [name for name, form in FORMS.items() if not form.fused]
    alone = world > 1  # one rank a device
    forms = list(FORMS) if alone else single
    world = max(world, 2)
    if "correctness" in sections:
        for form in forms:
            for pdl in (False, True):
                if not bench.late(f"correctness of {form}"):
                    main_form = form == "lamport" and pdl
                    calls = options.calls if main_form else options.calls // 20
                    correctness(bench, form, world, CHECKED_BYTES.get(form, 1 << 14), calls, pdl)
        for nbytes in (1 << 10, 1 << 16, 1 << 18):
            if not bench.late(f"correctness at {nbytes} B"):
                correctness(bench, "lamport", world, nbytes, options.calls // 20, True)
    if "latency" in sections and not bench.late("latency"):
        group = Group("lamport", world, bench.devices, 1 << 14)
        group.preload()
        floors = [floor_us(group, CALLS, pdl) for pdl in (False, True)]
        bench.say(f"launch floor (copy of 16 KB): {floors[0]:.2f} us, PDL {floors[1]:.2f} us")
        bench.add("all_reduce_us", floors[0], "us", group, "copy_kernel")
        latency_table(bench, world, list(TIMED_FORMS) if alone else single)
    if "tune" in sections and not bench.late("tune"):
        tune(bench, world)
    if "two_shot" in sections:
        sweep(bench, world)
    if "expiry" in sections and not bench.late("expiry"):
        expiry(bench, world)
    if "virtual" in sections:
        virtual(bench, single, options.calls // 40)
    if options.baselines and len(bench.devices) > 1:
        baselines(bench, max(60.0, bench.deadline - time.monotonic()))
    print("\n".join(["", *bench.table, "", f"rows: {bench.rows.path}"]))
    if bench.failures:
        print(f"{len(bench.failures)} checks failed:", *bench.failures, sep="\n  ")
    return 1 if bench.failures else 0


if __name__ == "__main__":
    sys.exit(main())
