"""`engine bench startup`: seconds from starting a Python process to an engine that is ready, cold and warm.

Cold: an empty Triton cache, so every kernel is compiled; warm: the cache of a run before. Each start is a process of
its own. Phases are the engine's own (`LLM.stats()["startup_s"]`).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from engine.bench.compare import add_compare_options, against, read_rows
from engine.bench.rows import Rows
from engine.bench.timing import mean, percentile
from engine.config import EngineConfig
from engine.console import Parser, check_output, say
from engine.errors import DeviceError, EngineError
from engine.options import add_engine_options, count, engine_config

READY = "ready "  # the child's line, followed by its facts as JSON


def add_options(p: Parser) -> None:
    """Names of vLLM."""
    group = p.add_argument_group("startup")
    group.add_argument("--num-iters-cold", type=count, default=1, metavar="N",
                       help="starts with an empty kernel cache (default 1)")  # fmt: skip
    group.add_argument("--num-iters-warm", type=count, default=3, metavar="N",
                       help="starts with a full one (default 3)")  # fmt: skip
    group.add_argument(
        "--output-json", metavar="FILE", help="all figures, and rows to compare with"
    )
    add_compare_options(group, margin=0.1)
    add_engine_options(p)


def once(config: EngineConfig, cache: str) -> dict[str, Any]:
    """Start one process with this Triton cache; {"total_s", "phases", "model"}. Raises what it died of."""
    code = f"from engine.bench.startup import child; child({json.dumps(asdict(config))!r})"
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "TRITON_CACHE_DIR": cache, "PYTHONPATH": path}
    begin = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        line = process.stdout.readline()
        total = time.perf_counter() - begin
        errors = process.stderr.read()
    if not line.startswith(READY):
        last = (errors.strip().splitlines() or ["no message"])[-1]
        kind = EngineError if "EngineError" in last or "CheckpointError" in last else DeviceError
        raise kind(f"the engine did not start: {last}")
    return {"total_s": total, **json.loads(line.removeprefix(READY))}


def child(text: str) -> None:
    """Body of a started process: open the engine, say so, close it."""
    from engine.llm import LLM

    with LLM(**json.loads(text)) as llm:
        facts = {"phases": llm.stats()["startup_s"], "model": llm.model_config.name}
        print(READY + json.dumps(facts), flush=True)


def run(args: argparse.Namespace) -> int:
    """Measure, print, write, compare."""
    if (
        args.num_iters_cold < 0
        or args.num_iters_warm < 0
        or not args.num_iters_cold + args.num_iters_warm
    ):
        raise EngineError("--num-iters-cold and --num-iters-warm: at least one start is needed")
    check_output("--output-json", args.output_json)
    old = read_rows(args.compare) if args.compare else None
    config = engine_config(args)
    runs: dict[str, list[dict[str, Any]]] = {"cold": [], "warm": []}
    with tempfile.TemporaryDirectory(prefix="engine-startup-") as folder:
        warm = os.path.join(folder, "warm")
        for i in range(args.num_iters_cold):
            # The last cold start fills the cache of the warm ones.
            last = i + 1 == args.num_iters_cold
            runs["cold"].append(once(config, warm if last else os.path.join(folder, f"cold{i}")))
            say(f"cold start {i + 1}: {runs['cold'][-1]['total_s']:.2f} s")
        if args.num_iters_warm and not args.num_iters_cold:
            once(config, warm)
        for i in range(args.num_iters_warm):
            runs["warm"].append(once(config, warm))
            say(f"warm start {i + 1}: {runs['warm'][-1]['total_s']:.2f} s")
    rows = Rows("bench_startup", write=False)
    for kind, starts in runs.items():
        if not starts:
            continue
        totals = [start["total_s"] for start in starts]
        names = starts[0]["phases"]
        phases = ", ".join(
            f"{name} {mean([s['phases'][name] for s in starts]):.2f}" for name in names
        )
        rest = mean(totals) - mean([sum(s["phases"].values()) for s in starts])
        print(
            f"{kind} start-up: avg {mean(totals):.2f} s, median {percentile(totals, 50):.2f} s of "
            f"{len(totals)} (phases: {phases}; Python and imports {rest:.2f})"
        )
        rows.add(
            "startup_s", percentile(totals, 50), "s", model=starts[0]["model"],
            quantization=config.quantization or "none", kv_cache_dtype=config.kv_cache_dtype,
            tp=config.tensor_parallel_size, shard_of=config.shard_of, rows=config.max_num_seqs, algorithm=kind,
        )  # fmt: skip
    if args.output_json:
        Path(args.output_json).write_text(json.dumps({**runs, "rows": rows.rows}, indent=1) + "\n")
    return 0 if old is None else against(args.compare, old, rows.rows, args.margin)
