"""The long run of the all-reduce: 10^6 checked calls, and does it get slower? `python -m
bench.all_reduce_soak`.

Needs one CUDA device. Deployments: one rank a device where there are two and more, and 2, 4 and 8
virtual ranks on one device. Each call has a random size (16 bytes to 64 KB, a multiple of 16, so most end
in a part of a block; two-shot: 1 to 32 rows of 2 KB), random inputs with -0.0, subnormals, infinities and NaN among them, a random
delay of each rank in front, and a random order of the ranks that share a device. Every element is
compared with the fp32 reference, and a hash of all bits of all calls between the ranks. One-shot's slots
are the engine's: two, re-armed behind each poll, with messages of different sizes after each other.

Several graphs of 250 calls are replayed in random order; each tenth of the run replays each of them equally
often. us a call of the last tenth over the first must be within 2 % of 1: the field report's
failure was a throughput that decays.

One row a deployment in $OUT/all_reduce_soak.json; exit 1 if a check failed. A deployment that runs
out of its share of --time-limit stops early and its row says how many calls were done.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from bench.all_reduce_forms import FORMS
from bench.all_reduce_group import Group
from bench.deployment import choices, script
from bench.rows import Rows
from engine.console import Parser
from engine.kernels.all_reduce import AllReduceConfig
from engine.runtime.links import probe_links

CALLS = 250  # of a graph; even, so that the two slots alternate across replays
GRAPHS = 4
TENTHS = 10
LARGEST = 1 << 16  # bytes of a message
DECAY = 0.02
ROW = 1024  # elements, of a two-shot message
SOAKED = ("lamport_own_slot", "two_shot", "two_shot_split", "flag_split")


@dataclass
class Outcome:
    """What one deployment did. us a call of each finished tenth, compiling and capturing apart."""

    calls: int
    wrong: int
    ranks_equal: bool
    status: list[int]
    tenths_us: list[float]

    @property
    def last_over_first(self) -> float | None:
        """None if the run ended before its last tenth."""
        return self.tenths_us[-1] / self.tenths_us[0] if len(self.tenths_us) == TENTHS else None

    @property
    def sound(self) -> bool:
        return not self.wrong and self.ranks_equal and not self.status[0]

    @property
    def steady(self) -> bool:
        ratio = self.last_over_first
        return ratio is not None and abs(ratio - 1) <= DECAY


def random_size(rng: random.Random, largest: int, row: int = 8) -> int:
    """Elements of a message of at most `largest` bytes: log-uniform, a multiple of `row`."""
    return row * max(1, round(2 ** rng.uniform(0, math.log2(largest / (2 * row)))))


def record(group: Group, seed: int, calls: int) -> list:
    """(size, order of ranks) of every call of one graph: drawn once, so that all devices agree."""
    rng = random.Random(seed)
    plan = []
    for _ in range(calls):
        order = list(range(group.world))
        rng.shuffle(order)
        plan.append((random_size(rng, group.nbytes, group.row), order))
    return plan


def soak(
    group: Group,
    total: int,
    seconds: float,
    *,
    calls: int = CALLS,
    graphs: int = GRAPHS,
    seed: int = 1,
) -> Outcome:
    """Replay until about `total` calls are done (a multiple of 10 x graphs x calls) or the time is spent."""
    group.preload()
    replays = []
    for number in range(graphs):
        plan = record(group, seed + number, calls)

        def body(device: torch.device, plan: list = plan) -> None:
            for call, (size, order) in enumerate(plan):
                group.checked_call(call, device, size, order)
            group.advance(device)

        replays.append(group.capture(body))
    group.reset()
    torch.manual_seed(seed)
    group.randomise_delays(0.05, 4_000)
    for replay in replays:  # clocks and caches as in the run
        replay()
    group.synchronize()
    rng = random.Random(seed)
    rounds = max(1, round(total / (TENTHS * graphs * calls)))
    done, tenths = 0, []
    deadline = time.monotonic() + seconds
    for _ in range(TENTHS):
        times = []
        for _ in range(rounds):
            if time.monotonic() > deadline or group.status[0]:
                break
            rng.shuffle(replays)
            start = time.perf_counter()
            for replay in replays:
                replay()
            group.synchronize()
            times.append((time.perf_counter() - start) * 1e6 / (graphs * calls))
            done += graphs * calls
        if len(times) < rounds:
            break
        tenths.append(statistics.median(times))
    verdict = group.verdict()
    return Outcome(done, verdict["wrong"], verdict["ranks_equal"], verdict["status"], tenths)


def report(rows: Rows, group: Group, ranks_a_device: int, outcome: Outcome) -> str:
    """Add the row; the line for the terminal."""
    first, last = (outcome.tenths_us[i] if outcome.tenths_us else None for i in (0, -1))
    ratio = outcome.last_over_first
    rows.add(
        "soak_calls", outcome.calls, "calls", tp=group.world, bytes=group.nbytes, algorithm=group.form,
        ranks_a_device=ranks_a_device, mismatches=outcome.wrong, ranks_equal=outcome.ranks_equal,
        first_tenth_us=first, last_tenth_us=last, last_over_first=ratio, decay_within=DECAY,
        steady=outcome.steady,
    )  # fmt: skip
    if ratio is not None:
        rows.add(
            "soak_last_over_first", ratio, "ratio", tp=group.world, bytes=group.nbytes,
            algorithm=group.form,
        )  # fmt: skip
    speed = (
        "stopped early" if ratio is None else f"{first:.2f} -> {last:.2f} us a call, x {ratio:.4f}"
    )
    where = "one rank a device" if ranks_a_device == 1 else f"{ranks_a_device} ranks a device"
    good = outcome.sound and (ratio is None or outcome.steady)
    return (
        f"{'ok  ' if good else 'FAIL'} {group.form} x{group.world} ({where}): {outcome.calls} calls, "
        f"{outcome.wrong} wrong elements, ranks equal: {outcome.ranks_equal}, status "
        f"{outcome.status[:5]}, {speed}"
    )


def virtual_worlds(text: str) -> list[int]:
    """Of --worlds; "" is none."""
    return [int(world) for world in choices("2", "4", "8")(text)] if text else []


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: see bench.deployment; 1 if a check failed."""
    parser = Parser(prog="python -m bench.all_reduce_soak", description=__doc__)
    parser.add_argument("--calls", type=int, default=1_000_000, help="of each deployment")
    parser.add_argument("--time-limit", type=float, default=240.0, help="seconds in all")
    parser.add_argument(
        "--forms", type=choices(*SOAKED), default=",".join(SOAKED),
        help="comma-separated; the first does --calls, the others a tenth",
    )  # fmt: skip
    parser.add_argument(
        "--worlds", type=virtual_worlds, default="2,4,8",
        help="virtual ranks on one device; empty: none",
    )  # fmt: skip
    return script(parser, soak_all, argv)


def soak_all(options: argparse.Namespace) -> int:
    """Every form on every deployment; the exit code."""
    forms = options.forms
    devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    if len(devices) > 1:
        probe_links()  # reaches every peer
    deployments = [devices[:8]] if len(devices) > 1 else []
    worlds = [len(d) for d in deployments]
    for ranks in options.worlds:
        deployments.append(devices[:1])
        worlds.append(ranks)
    rows, failed = Rows("all_reduce_soak"), False
    deadline = time.monotonic() + options.time_limit
    jobs = [
        (form, world, where)
        for form in forms
        for world, where in zip(worlds, deployments)
        if len(where) == world or not FORMS[form].fused
    ]
    for number, (form, world, where) in enumerate(jobs):
        left = deadline - time.monotonic()
        if left <= 0:
            print(f"{form} x{world}: skipped, the time limit is spent")
            failed = True
            continue
        algorithm = FORMS[form].algorithm
        config = AllReduceConfig(algorithm, block=128, num_warps=4)
        row = ROW if algorithm == "two_shot" else 0
        group = Group(form, world, where, LARGEST, pdl=len(where) == world, config=config, row=row)
        total = options.calls if form == forms[0] else options.calls // 10
        first = sum(form == forms[0] for form, _, _ in jobs)
        share = left if number >= first else left * 0.9 / (first - number)
        outcome = soak(group, total, share)
        line = report(rows, group, world // len(where), outcome)
        print(line, flush=True)
        failed |= line.startswith("FAIL") or outcome.last_over_first is None
    print(f"rows: {rows.path}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
