"""Decode GEMV on the card: every variant checked, then timed cold, alone and behind a 3 us barrier, under PDL.

    python -m bench.gemv --time-limit 140

Writes to $OUT (default ./out): gemv.json (rows, see bench/rows.py) and autotune_cache/<gpu>/gemv.json. Workers
compile and check first; then one process times. A graph walks over weight copies of at least 160 MB (the L2 has
60); figures are medians of replays.
  alone   the GEMV again and again, programmatic launches: the next one's first tiles are loaded under its tail
  pair    [stand-in for an all-reduce that spins 3 us and writes x, GEMV]: what is above `alone` was not hidden
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import triton
import triton.language as tl

from bench.deployment import choices, script, shapes
from bench.gemv_workers import Problem, Weight, check_all, short, weights
from bench.rows import Rows
from bench.timing import graph_us
from engine.console import Parser
from engine.kernels.gemv import GemvConfig, heuristic
from engine.kernels.gemv_config import deepest_ring
from engine.kernels.sync import gdc_launch_dependents, gdc_wait
from engine.runtime.bandwidth import copy_bandwidth
from engine.tune import cache_file, choose

DEVICE = "cuda"
COLD_BYTES = 160e6
BARRIER_NS = 3000
# block_n, bytes of K in a tile, warps, warps that share K, programs per multiprocessor, part of the deepest ring.
# Half rings leave room for the next kernel's ring beside them.
RINGS = (
    (16, 1024, 8, 8, 1, 1),
    (16, 1024, 8, 8, 1, 2),
    (16, 2048, 8, 8, 1, 1),
    (32, 1024, 8, 8, 1, 1),
    (32, 1024, 8, 8, 1, 2),
    (32, 512, 8, 4, 1, 1),
    (64, 512, 8, 4, 1, 1),
    (64, 512, 8, 4, 1, 2),
    (64, 512, 16, 4, 1, 1),
    (64, 256, 8, 2, 1, 1),
    (16, 1024, 8, 8, 2, 1),
    (32, 512, 8, 4, 2, 1),
    (16, 512, 4, 4, 2, 1),
    (32, 512, 4, 4, 2, 1),
)
SIMPLE = (GemvConfig("simple", 8, 512, 4), GemvConfig("simple", 4, 1024, 4))


@triton.jit
def barrier_kernel(source_ptr, x_ptr, SIZE: tl.constexpr, NS: tl.constexpr, BLOCK: tl.constexpr):
    """Stand-in for an all-reduce: waits NS ns after its input is there, then writes x."""
    gdc_launch_dependents()
    gdc_wait()
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(source_ptr + offs, mask=offs < SIZE)
    tl.inline_asm_elementwise(
        "{ .reg .u64 a, b; .reg .pred p; mov.u64 a, %globaltimer; SPIN: mov.u64 b, %globaltimer;"
        " sub.u64 b, b, a; setp.lt.u64 p, b, $1; @p bra SPIN; mov.u32 $0, 0; }",
        "=r,l", [tl.full((), NS, tl.int64)], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    tl.store(x_ptr + offs, value, mask=offs < SIZE)


@dataclass
class Timing:
    config: GemvConfig
    alone: float  # us
    pair: float  # us, with the barrier

    @property
    def score(self) -> float:
        """A layer has two GEMVs behind a barrier and two behind another kernel."""
        return self.alone + self.pair


def shortlist(weight: Weight, sm_count: int) -> list[GemvConfig]:
    """Configs worth timing. Dropped: tiles that would be mostly padding, rings that do not fit."""
    size = 1 if weight.fp8 else 2
    rows = 2 * triton.cdiv(weight.n, 2 * sm_count)
    found = [heuristic(weight.n, weight.k, weight.dtype, sm_count), *SIMPLE]
    for block_n, bytes_k, warps, warps_k, per_sm, part in RINGS:
        mine = triton.cdiv(rows, per_sm)
        padding = triton.cdiv(mine, block_n) * block_n / mine
        if bytes_k > weight.k * size or (block_n > 16 and padding > 1.5):
            continue
        config = GemvConfig(
            "ring", block_n, bytes_k // size, warps, 2, sm_count * per_sm, warps_k, per_sm
        )
        deep = deepest_ring(config, weight.n, weight.k, weight.dtype)
        if deep is not None:
            found.append(replace(deep, stages=max(3, deep.stages // part)))
    return list(dict.fromkeys(found))


class Timer:
    """Times configs of one weight: copies, activations, the stand-in's own time."""

    def __init__(self, weight: Weight, rows: int):
        copies = max(1, -(-int(COLD_BYTES) // weight.bytes))
        self.w = weight.random(copies, DEVICE)
        self.problem = Problem(weight, rows, DEVICE)
        self.source = self.problem.x.clone()

    def barrier(self) -> None:
        size = self.source.numel()
        barrier_kernel[(triton.cdiv(size, 1024),)](
            self.source, self.problem.x, SIZE=size, NS=BARRIER_NS, BLOCK=1024, launch_pdl=True
        )

    def time(self, config: GemvConfig) -> Timing:
        calls = len(self.w)

        def alone() -> None:
            for w in self.w:
                self.problem.call(config, w)

        def pair() -> None:
            for w in self.w:
                self.barrier()
                self.problem.call(config, w)

        return Timing(config, graph_us(alone, calls), graph_us(pair, calls))


def measure(weight: Weight, configs: list[GemvConfig], rows: int) -> list[Timing]:
    """Timings of all configs that run, best score first."""
    timer = Timer(weight, rows)
    timings = []
    for config in configs:
        try:
            timings.append(timer.time(config))
        except Exception as e:
            print(f"  {short(config)}: {type(e).__name__}: {str(e).splitlines()[0][:120]}")
            if "CUDA error" in str(e):
                raise
    return sorted(timings, key=lambda t: t.score)


def task(weight: Weight, config: GemvConfig, rows: int) -> dict:
    return {"weight": asdict(weight), "config": asdict(config), "rows": rows}


def show(weight: Weight, timings: list[Timing], copy: float) -> None:
    """One line: best of each kernel."""
    dtype = "fp8" if weight.fp8 else "bf16"
    text = f"{weight.model[8:]:>4}/{weight.tp} {weight.layer:8}{weight.n:6}x{weight.k:<6}{dtype:>5}"
    for kernel in ("simple", "ring"):
        best = next((t for t in timings if t.config.kernel == kernel), None)
        if best is None:
            text += f" | {'-':>37}"
            continue
        rate = weight.bytes / best.alone * 1e6
        text += f" | {best.alone:7.2f} {rate / 1e12:5.2f} {rate / copy:5.2f} {best.pair:7.2f} "
        text += short(best.config)
    print(text, flush=True)


def record(rows: Rows, weight: Weight, timing: Timing, count: int, copy: float) -> None:
    rate = weight.bytes / timing.alone * 1e6
    common = dict(
        model=weight.model, tp=weight.tp, rows=count, quantization="fp8" if weight.fp8 else "none",
        bytes=weight.bytes,
    )  # fmt: skip
    name = f"{weight.layer} {weight.n}x{weight.k}"
    rows.add("gemv_us", timing.alone, "us", algorithm=name, share=rate / copy, **common)
    rows.add("gemv_us", timing.pair, "us", algorithm=f"{name} after a 3 us barrier", **common)


def entry(timings: list[Timing], many: Timing | None) -> dict:
    """Cache entry; the runner-up for the record."""
    best = timings[0]
    return {
        "config": asdict(best.config),
        "us": float(f"{best.alone:.4g}"),
        "us_after_barrier": float(f"{best.pair:.4g}"),
        "us_8_rows": float(f"{many.alone:.4g}") if many else None,
        "runner_up": {"config": short(timings[1].config), "us": float(f"{timings[1].alone:.4g}")}
        if len(timings) > 1
        else None,
        "date": time.strftime("%Y-%m-%d"),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: see bench.deployment."""
    parser = Parser(prog="python -m bench.gemv", description=__doc__)
    parser.add_argument("--models", type=shapes, default="qwen2.5-72b/2,qwen2.5-72b/8,qwen2.5-7b/1")
    parser.add_argument(
        "--dtypes",
        type=choices("fp8", "bf16"),
        default="fp8,bf16",
        help="of the weights, comma-separated: fp8, bf16",
    )
    parser.add_argument("--time-limit", type=float, default=140.0, help="seconds")
    parser.add_argument("--processes", type=int, default=min(15, os.cpu_count() or 1))
    parser.add_argument("--all", action="store_true", help="print every config's time")
    return script(parser, measure_all, argv)


def measure_all(args: argparse.Namespace) -> int:
    """Every weight with one row, then the best configs with eight; the exit code."""
    begin = time.perf_counter()

    def left() -> float:
        return args.time_limit - (time.perf_counter() - begin)

    properties = torch.cuda.get_device_properties(0)
    sm_count = properties.multi_processor_count
    choose.set_target(properties.name, sm_count)
    work = weights(args.models, args.dtypes)
    tasks = [task(w, c, 1) for w in work for c in shortlist(w, sm_count)]
    good = check_all(tasks, args.processes, 0.5 * args.time_limit)
    right: dict[Weight, list[GemvConfig]] = {w: [] for w in work}
    for i in sorted(good):
        right[Weight(**tasks[i]["weight"])].append(GemvConfig(**tasks[i]["config"]))
    copy = copy_bandwidth(torch.device("cuda", 0))
    spent = time.perf_counter() - begin
    print(f"{len(good)} of {len(tasks)} variants right, {spent:.0f} s; copy {copy / 1e12:.2f} TB/s")
    print("model/tp layer N x K dtype | simple: alone us, TB/s, share of copy, pair us, config | ring: same",
          flush=True)  # fmt: skip

    rows = Rows("gemv")
    found: dict[Weight, list[Timing]] = {}
    out = Path(os.environ.get("OUT", "out"))
    cache = out / "autotune_cache" / choose.gpu_slug(properties.name) / "gemv.json"
    entries: dict[str, dict] = {}

    def save(weight: Weight, many: Timing | None = None) -> None:
        entries[choose.key_string("gemv", weight.key)] = entry(found[weight], many)
        cache_file.save(cache, entries, choose.metadata("gemv"), replace=True)

    for weight in work:
        if left() < 5:
            print("time limit: the remaining weights are left out")
            break
        timings = measure(weight, right[weight], 1)
        if not timings:
            print(f"  no config ran for {weight}")
            continue
        found[weight] = timings
        show(weight, timings, copy)
        if args.all:
            for t in timings:
                print(f"      {t.alone:7.2f} {t.pair:7.2f}  {short(t.config)}")
        record(rows, weight, timings[0], 1, copy)
        save(weight)
    winners = [task(w, found[w][0].config, 8) for w in found]
    if left() < 10 or not winners:
        return 0
    good = check_all(winners, args.processes, 0.7 * left())
    print("8 rows with the best config (same bits as 1 row): alone us, share of copy, pair us")
    for i in sorted(good):
        if left() < 2:
            break
        weight = Weight(**winners[i]["weight"])
        timings = measure(weight, [found[weight][0].config], 8)
        if timings:
            t = timings[0]
            share = weight.bytes / t.alone * 1e6 / copy
            print(f"  {weight.layer} {weight.n}x{weight.k} {'fp8' if weight.fp8 else 'bf16'} "
                  f"{t.alone:7.2f} {share:5.2f} {t.pair:7.2f}", flush=True)  # fmt: skip
            record(rows, weight, t, 8, copy)
            save(weight, t)
    print(json.dumps({"weights": len(found), "seconds": round(time.perf_counter() - begin, 1)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
