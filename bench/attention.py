"""Attention on the card: correctness, then decode and prefill times over shapes, contexts and configs.

    python -m bench.attention --time-limit 120
    python -m bench.attention --time-limit 120 --kv-cache-dtype fp8 --contexts 512,8192,32768,131072

Writes to $OUT (default ./out): attention.json (rows, see bench/rows.py) and autotune_cache/<gpu>/*.json. Times are
medians of CUDA graph replays over as many layers' KV as exceed the L2.

Decode is timed where it will live: each layer is [a small kernel that writes q, attention], both with PDL, and
`attention_us` is what attention adds to the small kernels alone. "plain" is attention alone without PDL. One
config must serve all lengths up to max_model_len, so a config's score is the geometric mean over contexts up
to the limit and over 1 and 8 rows of its time over the best time there.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend

from bench.attention_timing import DecodePoint, Pool, PrefillPoint
from bench.attention_workers import Shape, Variant, check_all
from bench.deployment import numbers, script, shapes
from bench.rows import Rows
from engine.config import preset
from engine.console import Parser
from engine.kernels import decode_attention as decode
from engine.kernels import prefill_attention as prefill
from engine.runtime.bandwidth import copy_bandwidth
from engine.tune import attention_space, cache_file, choose

PEAK = 989e12  # dense BF16 FLOP/s, datasheet
LIMITS = (4096, 8192, 16384, 32768, 65536, 131072)
Decode = decode.DecodeAttentionConfig
Prefill = prefill.PrefillAttentionConfig


def candidates(shape: Shape, context: int, sm_count: int) -> list[Decode]:
    """The search space, with more splits than the engine's workspace holds: to see if it should grow."""
    return attention_space.decode_candidates(
        shape.num_kv_heads,
        context,
        sm_count,
        shape.kv_dtype,
        shape.head_dim,
        max_splits=3 * sm_count,
    )


def attempt(what: str, function: Callable[[], float]) -> float | None:
    """The figure, or None and one line where it cannot be had."""
    try:
        return function()
    except Exception as e:
        print(f"  {what}: {type(e).__name__} {(str(e).strip().splitlines() or [''])[0][:140]}")
        if "CUDA error" in str(e):
            raise  # the context is lost
        return None


def short(config: Decode | Prefill) -> str:
    if isinstance(config, Prefill):
        return f"{config.block_m}x{config.block_n} w{config.num_warps} s{config.num_stages}"
    return (
        f"split{config.num_splits} n{config.block_n} w{config.num_warps} s{config.num_stages} "
        f"fan{config.fan_in} flat{config.flat_blocks}"
    )


class Run:
    """State of one run: what is right, what was measured, when to stop."""

    def __init__(self, args: argparse.Namespace):
        self.args, self.begin = args, time.perf_counter()
        properties = torch.cuda.get_device_properties(0)
        self.sm_count = properties.multi_processor_count
        choose.set_target(properties.name, self.sm_count)
        self.out = Path(os.environ.get("OUT", "out"))
        self.cache = self.out / "autotune_cache" / choose.gpu_slug(properties.name)
        self.rows = Rows("attention")
        self.table: list[str] = []
        self.bandwidth = copy_bandwidth(torch.device("cuda", 0))
        print(f"copy bandwidth {self.bandwidth / 1e12:.2f} TB/s")
        self.shapes = []
        for name, tp in args.models:
            shard, config = preset(name).shard(tp), preset(name)
            heads = shard.num_heads, shard.num_kv_heads, config.head_dim
            self.shapes.append(Shape(name, tp, *heads, fp8_kv=args.kv_cache_dtype == "fp8"))
        self.points: dict[Shape, list[DecodePoint]] = {shape: [] for shape in self.shapes}
        self.choices: dict[str, str] = {}
        self.contexts: list[int] = args.contexts

    def named(self, phase: str) -> str:
        """What the tables call a row."""
        return phase + (" FP8 KV" if self.args.kv_cache_dtype == "fp8" else "")

    def late(self, share: float = 1.0) -> bool:
        return time.perf_counter() - self.begin > share * self.args.time_limit

    def check(self) -> None:
        """Which configs are right, in worker processes; num_splits is no compile-time constant."""
        wanted: dict[Variant, None] = {}
        for shape in self.shapes:
            for config in candidates(shape, max(self.contexts), self.sm_count):
                wanted[Variant(shape, config)] = None
            for tiles in attention_space.prefill_candidates(shape.head_dim, shape.kv_dtype):
                wanted[Variant(shape, tiles)] = None
        self.good = check_all(list(wanted), self.args.processes, 0.45 * self.args.time_limit)
        seconds = time.perf_counter() - self.begin
        print(f"{len(self.good)} of {len(wanted)} configs right, {seconds:.0f} s", flush=True)

    def decode(self, pool: Pool, rows_list: list[int], share: float) -> None:
        """All points of all shapes, one-row points first; then the cache entries."""
        for rows in rows_list:
            for shape in self.shapes:
                for context in self.contexts:
                    if self.late(share):
                        print(f"  time limit: no decode {shape.model}/{shape.tp} {context} {rows}")
                        continue
                    point = DecodePoint(pool, shape, context, rows)
                    for config in candidates(shape, max(self.contexts), self.sm_count):
                        if Variant(shape, config) in self.good:
                            us = attempt(
                                f"decode {context} {rows} {short(config)}",
                                lambda: point.time(config),  # noqa: B023
                            )
                            if us is not None:
                                point.us[config] = us
                    if point.us:
                        self.report_decode(point)
                        self.points[shape].append(point)
        for shape, measured in self.points.items():
            self.save_decode(shape, measured)

    def report_decode(self, point: DecodePoint) -> None:
        shape, best = point.shape, min(point.us, key=point.us.__getitem__)
        us = point.us[best]
        base = decode.heuristic(
            shape.num_kv_heads, max(self.contexts), 1, self.sm_count, shape.kv_dtype, shape.head_dim
        )
        variants = {
            "no prefetch": lambda: point.time(best, prefetch=False),
            "plain": lambda: point.time(best, pdl=False, prefetch=False),
        }
        if point.rows == 1 and not shape.fp8_kv:
            variants["sdpa"] = point.sdpa_us
        extra = {name: attempt(name, f) or float("nan") for name, f in variants.items()}
        share = point.kv_bytes / self.bandwidth * 1e6 / us
        baseline = None
        if extra.get("sdpa", float("nan")) == extra.get("sdpa"):
            baseline = {"name": "torch sdpa", "value": float(f"{extra['sdpa']:.5g}")}
        self.rows.add(
            "attention_us", us, "us", model=shape.model, tp=shape.tp, rows=point.rows,
            context=point.context, bytes=point.kv_bytes, algorithm=self.named("decode"), share=share,
            baseline=baseline, kv_cache_dtype=self.args.kv_cache_dtype,
        )  # fmt: skip
        line = (
            f"decode {shape.model[8:]:>3}/{shape.tp} {point.rows} {point.context:6} {us:8.2f} "
            f"{point.kv_bytes / us / 1e6:5.2f} {share:5.0%} {point.us.get(base, float('nan')):8.2f} "
            f"{extra['no prefetch']:8.2f} {extra['plain']:8.2f} {extra.get('sdpa', float('nan')):8.1f}  "
            f"{short(best)}"
        )
        self.table.append(line)
        print(line, flush=True)

    def save_decode(self, shape: Shape, points: list[DecodePoint]) -> None:
        """One entry per max_model_len: the best geometric mean over all measured points up to it."""
        entries = {}
        for limit in (x for x in LIMITS if x <= max(self.contexts)):
            inside = [p for p in points if p.context <= limit]
            common = set.intersection(*(set(p.us) for p in inside)) if inside else set()
            common = {c for c in common if c.num_splits <= decode.MAX_SPLITS}
            if not common:
                continue

            def score(config: Decode) -> float:
                return math.exp(
                    statistics.fmean(math.log(p.us[config] / min(p.us.values())) for p in inside)  # noqa: B023
                )

            best = min(common, key=score)
            key = {
                "num_kv_heads": shape.num_kv_heads, "group": shape.group, "head_dim": shape.head_dim,
                "context": limit, "kv_dtype": shape.kv_dtype,
            }  # fmt: skip
            entries[choose.key_string("decode_attention", key)] = {
                "config": asdict(best), "score": float(f"{score(best):.4g}"),
                "date": time.strftime("%Y-%m-%d"),
            }  # fmt: skip
            self.choices[f"best for decode {shape.model[8:]:>3}/{shape.tp} up to {limit:6}"] = (
                f"{short(best)}, {score(best):.2f} x the best at each point"
            )
        self.save("decode_attention", entries)

    def prefill(self, pool: Pool, tokens: list[int]) -> None:
        entries = {}
        for shape in self.shapes:
            for t in tokens:
                if self.late():
                    print(f"  time limit: no prefill {shape.model}/{shape.tp} {t}")
                    continue
                entry = self.prefill_point(pool, shape, t)
                if entry:
                    key = {
                        "num_kv_heads": shape.num_kv_heads, "group": shape.group,
                        "head_dim": shape.head_dim, "t": t, "kv_dtype": shape.kv_dtype,
                    }  # fmt: skip
                    entries[choose.key_string("prefill_attention", key)] = entry
        self.save("prefill_attention", entries)

    def prefill_point(self, pool: Pool, shape: Shape, t: int) -> dict | None:
        """Time all configs at start 0, the best also at the end of its slot, and torch's kernels."""
        point = PrefillPoint(pool, shape, t)
        timed = {}
        for config in attention_space.prefill_candidates(shape.head_dim, shape.kv_dtype):
            if Variant(shape, config) in self.good:
                us = attempt(f"prefill {t} {short(config)}", lambda: point.time(config, 0))  # noqa: B023
                if us is not None:
                    timed[config] = us
        if not timed:
            return None
        best = min(timed, key=timed.__getitem__)
        us = timed[best]
        start = point.prefix
        prefixed = attempt("prefix", lambda: point.time(best, start)) if start else None
        backends = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
        library = {
            name: float("nan") if shape.fp8_kv  # torch has none over FP8 KV
            else attempt(name, lambda: point.sdpa_us(backend)) or float("nan")  # noqa: B023
            for name, backend in backends.items()
        }  # fmt: skip
        fastest = min((v for v in library.values() if v == v), default=None)

        base = prefill.heuristic(
            shape.num_kv_heads, shape.group, shape.head_dim, t, self.sm_count, shape.kv_dtype
        )
        self.rows.add(
            "attention_us", us, "us", model=shape.model, tp=shape.tp, rows=t, context=t,
            algorithm=self.named("prefill"), share=point.tflops(us, 0) * 1e12 / PEAK,
            baseline=fastest and {"name": "torch sdpa, best of flash and cudnn", "value": fastest},
            kv_cache_dtype=self.args.kv_cache_dtype,
        )  # fmt: skip
        line = (
            f"prefill {shape.model[8:]:>3}/{shape.tp} {t:5} {us:8.1f} {point.tflops(us, 0):5.0f} TFLOP/s "
            f"heuristic {timed.get(base, float('nan')):8.1f} flash {library['flash']:8.1f} cudnn "
            f"{library['cudnn']:8.1f} prefix {point.tflops(prefixed, start) if prefixed else 0:5.0f} TFLOP/s  "
            f"{short(best)}"
        )
        self.table.append(line)
        print(line, flush=True)
        return {
            "config": asdict(best), "us": float(f"{us:.4g}"), "date": time.strftime("%Y-%m-%d"),
        }  # fmt: skip

    def save(self, op: str, entries: dict) -> None:
        if entries:
            path = self.cache / f"{op}.json"
            cache_file.save(path, entries, choose.metadata(op), replace=False)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: see bench.deployment."""
    parser = Parser(prog="python -m bench.attention", description=__doc__)
    parser.add_argument("--models", type=shapes, default="qwen2.5-72b/8,qwen2.5-72b/2,qwen2.5-7b/1")
    parser.add_argument(
        "--contexts",
        type=numbers,
        default="512,2048,8192,32768,131072",
        help="of decode, comma-separated",
    )
    parser.add_argument("--kv-cache-dtype", default="auto", choices=("auto", "fp8"))
    parser.add_argument("--rows", type=numbers, default="1,8", help="of decode, comma-separated")
    parser.add_argument(
        "--tokens", type=numbers, default="512,2048,8192,128", help="of prefill, comma-separated"
    )
    parser.add_argument("--time-limit", type=float, default=120.0, help="seconds")
    parser.add_argument("--processes", type=int, default=min(12, os.cpu_count() or 1))
    return script(parser, measure_all, argv)


def measure_all(args: argparse.Namespace) -> int:
    """Check every config, time every point; the exit code."""
    run = Run(args)
    run.check()
    rows_list, tokens = args.rows, args.tokens
    longest = max(2 * max(run.contexts) * max(rows_list), 4 * max(8192, *tokens))
    width = max(s.num_kv_heads * s.head_dim for s in run.shapes)
    pool = Pool(width * longest, fp8=args.kv_cache_dtype == "fp8")
    run.decode(pool, rows_list[:1], 0.8)
    run.prefill(pool, tokens)
    if rows_list[1:]:
        run.decode(pool, rows_list[1:], 1.0)
    print(
        "\ndecode model/tp rows context us TB/s share, heuristic, no prefetch, plain, sdpa us; config"
    )
    print("\n".join(run.table))
    print("\n".join(f"{name}: {text}" for name, text in run.choices.items()))
    print(json.dumps({"seconds": round(time.perf_counter() - run.begin, 1)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
