"""What one kernel reaches when it writes to another GPU's memory, and why an all-reduce of megabytes
does not. `python -m bench.peer_store`.

Two GPUs: each way alone and both at once. One GPU: loopback in its own memory, which shows that every
variant works and moves the right bits, not what a link carries; the output and the rows say so.

exchange  a one-shot all-reduce's traffic without its waits: push alone, poll alone, one after the
          other as the engine launches them, and both in one kernel, block by block; by programs
sweep     kind x warps x 16-byte accesses in flight a thread x programs, one way, at 16 MB
sizes     the best few of each kind at 1, 4, 16 and 64 MB, one way and both at once

Every variant is compiled, run and its destination compared bit for bit before anything is timed. No
kernel waits for another, so nothing can hang. All times are medians of CUDA graph replays.
Rows (the best of each kind) go to $OUT/peer_store.json, share = of 478 GB/s (bench/rows.py). Exit 1
if a check failed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

from bench.deployment import choices, script
from bench.peer_store_ends import (
    COPY_ENGINE,
    ENGINE_SHAPE,
    EXCHANGE_SIZES,
    EXCHANGES,
    KINDS,
    SIZES,
    Ends,
    Variant,
    variants,
)
from bench.rows import Rows
from engine.console import Parser
from engine.runtime.links import describe, probe_links

LINK_BYTES_PER_S = 478e9  # NVLink 4, 18 lanes, each way, as the driver says
SWEEP_BYTES = 1 << 24
PROGRAMS = (16, 32, 64, 132, 264, 528)
# Block and programs of an exchange. A lane's spins follow one another, so a larger block helps pushes only.
SHAPES = (ENGINE_SHAPE, (256, 264), (256, 528), (256, 1056), (1024, 132))

Point = tuple[Variant, int]  # and its programs
Shape = tuple[int, int]


def best(found: dict[Point, float], count: int) -> dict[str, list[Point]]:
    """The `count` fastest (variant, programs) of each kind, fastest first."""
    ranked: dict[str, list[Point]] = {}
    for point in sorted(found, key=lambda point: found[point]):
        points = ranked.setdefault(point[0].kind, [])
        if len(points) < count:
            points.append(point)
    return ranked


def shape_text(point: Point) -> str:
    return f"w{point[0].warps} d{point[0].depth} p{point[1]}"


def verdict(sweep: dict[Point, float], exchange: dict[tuple[Shape, str], float]) -> list[str]:
    """What the figures say of each suspicion. sweep: us at SWEEP_BYTES one way; exchange: us of one size, both
    ways."""
    fastest: dict[str, float] = {}
    for (variant, _), us in sweep.items():
        fastest[variant.kind] = min(us, fastest.get(variant.kind, us))
    parts: dict[str, float] = {}
    for (_, name), us in exchange.items():
        parts[name] = min(us, parts.get(name, us))
    lines = []

    def compare(text: str, slow: float | None, fast: float | None) -> None:
        if slow and fast:
            lines.append(f"{text}: {slow:.1f} -> {fast:.1f} us, {slow / fast:.2f} times as fast")

    relaxed, now = fastest.get("relaxed.sys"), exchange.get((ENGINE_SHAPE, "sequence"))
    compare("(a) relaxed.sys -> weak stores", relaxed, fastest.get("weak"))
    compare("(a) relaxed.sys -> TMA stores", relaxed, fastest.get("TMA store"))
    engine = sweep.get((Variant("relaxed.sys", 8, 1), 132))
    compare("(b) relaxed.sys as the engine launches it -> at its best shape", engine, relaxed)
    compare(
        "(b) exchange as the engine launches it -> at its best shape", now, parts.get("sequence")
    )
    compare("(c) with the own copy -> without", fastest.get("relaxed.sys + own copy"), relaxed)
    compare("(d) exchange, best shape -> its push alone", parts.get("sequence"), parts.get("push"))
    compare(
        "(d) exchange, best shape -> overlapped", parts.get("sequence"), parts.get("overlapped")
    )
    compare("what is left: relaxed.sys -> copy engine", relaxed, fastest.get(COPY_ENGINE))
    return lines


class Bench:
    def __init__(self, time_limit: float) -> None:
        self.deadline = time.monotonic() + time_limit
        count = torch.cuda.device_count()
        self.ends = Ends([torch.device("cuda", min(i, count - 1)) for i in range(2)])
        self.loopback = count < 2
        self.rows = Rows("peer_store")
        self.failures = 0

    def late(self, what: str) -> bool:
        if time.monotonic() < self.deadline:
            return False
        print(f"{what}: skipped, the time limit is spent", flush=True)
        return True

    def add(self, metric: str, us: float, nbytes: int, name: str, **facts: Any) -> None:
        share = None if self.loopback else nbytes / (us * 1e-6) / LINK_BYTES_PER_S
        name += " (loopback)" if self.loopback else ""
        self.rows.add(metric, us, "us", tp=2, bytes=nbytes, algorithm=name, share=share, **facts)

    def sound(self, kinds: list[str]) -> list[Variant]:
        """The variants of these kinds, compiled and checked; those that fail are named and left out."""
        start, good = time.monotonic(), []
        for variant in [Variant(COPY_ENGINE), *(v for v in variants() if v.kind in kinds)]:
            try:
                # The second size ends within a block and within a warp's 512 bytes; TMA tiles are whole.
                sizes = (1 << 20,) if variant.kind == "TMA store" else (1 << 20, (1 << 20) - 64)
                wrong = sum(self.ends.wrong(variant, size, 33) for size in sizes)
            except Exception as error:  # a variant that this compiler or driver refuses
                wrong, text = -1, f"{type(error).__name__}: {str(error).splitlines()[:1]}"
            if not wrong:
                good.append(variant)
                continue
            self.failures += 1
            print(f"FAIL  {variant}: {text if wrong < 0 else f'{wrong} wrong words'}", flush=True)
        for block, programs in SHAPES:
            for name in EXCHANGES:
                for way, side in enumerate(self.ends.sides):
                    self.ends.run(
                        side, self.ends.exchange, name, way, 0, 1 << 20, (block, programs)
                    )
        self.ends.synchronize()
        seconds = time.monotonic() - start
        print(f"{len(good)} variants compiled and checked bit for bit in {seconds:.1f} s")
        return good

    def exchanges(self) -> dict[tuple[Shape, str], float]:
        """us of the largest size by shape and part."""
        print("\ntraffic of a one-shot all-reduce of 2 ranks without its waits, both ways, us")
        print("    bytes block programs" + "".join(name.rjust(12) for name in EXCHANGES))
        found: dict[tuple[Shape, str], float] = {}
        for nbytes in EXCHANGE_SIZES:
            if self.late(f"exchange of {nbytes} B"):
                break
            found = {}
            for block, programs in SHAPES:
                names = list(EXCHANGES) if block == 256 else ["push"]
                for name in names:
                    us = self.ends.exchange_us(name, nbytes, (block, programs))
                    found[(block, programs), name] = us
                    where = f"{name} b{block} p{programs}"
                    self.add("exchange_traffic_us", us, nbytes, where)
                cells = [f"{found[(block, programs), name]:12.2f}" for name in names]
                print(f"{nbytes:9d}{block:6d}{programs:9d}" + "".join(cells), flush=True)
        return found

    def sweep(self, good: list[Variant]) -> dict[Point, float]:
        print(f"\nGB/s one way, {SWEEP_BYTES >> 20} MB, by programs")
        print(" " * 36 + "".join(f"{programs:8d}" for programs in PROGRAMS))
        found = {}
        for variant in good:
            if self.late(str(variant)):
                break
            grids = PROGRAMS if variant.kind != COPY_ENGINE else (0,)
            for programs in grids:
                found[variant, programs] = self.ends.transfer_us(variant, SWEEP_BYTES, programs, 1)
            cells = [f"{SWEEP_BYTES / found[variant, p] / 1e3:8.1f}" for p in grids]
            print(f"{variant!s:36}" + "".join(cells), flush=True)
        return found

    def sizes(self, finalists: dict[str, list[Point]]) -> None:
        print("\nGB/s a direction, the best of each kind: one way / both at once")
        print(" " * 28 + "".join(f"{n >> 20} MB".rjust(18) for n in SIZES) + "   at 64 MB, both")
        for kind, points in finalists.items():
            cells, point = [], points[0]
            for nbytes in SIZES:
                if self.late(f"{kind}, {nbytes} B"):
                    return
                rates = []
                for ways, metric in ((1, "peer_store_us"), (2, "peer_store_both_us")):
                    times = {p: self.ends.transfer_us(p[0], nbytes, p[1], ways) for p in points}
                    point = min(times, key=lambda p: times[p])
                    rates.append(nbytes / times[point] / 1e3)
                    self.add(metric, times[point], nbytes, kind, config=shape_text(point))
                cells.append(f"{rates[0]:.1f} / {rates[1]:.1f}".rjust(18))
            print(f"{kind:28}" + "".join(cells) + "   " + shape_text(point), flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: see bench.deployment; 1 if a check failed."""
    parser = Parser(prog="python -m bench.peer_store", description=__doc__)
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds (default 60)")
    parser.add_argument(
        "--kinds", type=choices(*KINDS), default=",".join(KINDS), help="comma-separated"
    )
    return script(parser, measure_all, argv)


def measure_all(options: argparse.Namespace) -> int:
    """Exchanges, the sweep, the best at every size; the exit code."""
    print(describe(probe_links()))
    bench = Bench(options.time_limit)
    if bench.loopback:
        print("one GPU: loopback in its own memory; no link is in these figures")
    good = bench.sound(options.kinds)
    exchange = bench.exchanges()
    sweep = bench.sweep(good)
    bench.sizes(best(sweep, 2))
    print("", *verdict(sweep, exchange), sep="\n")
    print(f"\nrows: {bench.rows.path}")
    return 1 if bench.failures else 0


if __name__ == "__main__":
    sys.exit(main())
