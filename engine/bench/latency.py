"""`engine bench latency`: one batch of requests at a time, as `vllm bench latency`, with TTFT, TPOT and ITL besides."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from engine.bench.compare import add_compare_options, against, read_rows
from engine.bench.rows import Rows
from engine.bench.timing import PERCENTILES, Batch, mean, percentile, random_prompts, run_batch
from engine.config import EngineConfig
from engine.console import Parser, check_output, say
from engine.errors import EngineError
from engine.options import add_engine_options, count, engine_config
from engine.roof import roof_share


def add_options(p: Parser) -> None:
    """Names and defaults of vLLM."""
    group = p.add_argument_group("latency")
    group.add_argument("--input-len", type=count, default=32, metavar="N", help="default 32")
    group.add_argument("--output-len", type=count, default=128, metavar="N", help="default 128")
    group.add_argument("--batch-size", type=count, default=8, metavar="N",
                       help="requests at once, 1 to 8 (default 8)")  # fmt: skip
    group.add_argument("--num-iters", type=count, default=30, metavar="N", help="default 30")
    group.add_argument("--num-iters-warmup", type=count, default=10, metavar="N", help="default 10")
    group.add_argument(
        "--output-json", metavar="FILE", help="all figures, and rows to compare with"
    )
    add_compare_options(group)
    add_engine_options(p)


def check(args: argparse.Namespace) -> None:
    """EngineError for lengths and counts that cannot be measured."""
    for name, low, high in (
        ("input_len", 1, None), ("output_len", 1, None), ("batch_size", 1, 8), ("num_iters", 1, None),
        ("num_iters_warmup", 0, None),
    ):  # fmt: skip
        value = getattr(args, name)
        if value < low or (high is not None and value > high):
            limit = f"{low} or more" if high is None else f"{low} to {high}"
            raise EngineError(f"--{name.replace('_', '-')} {value} is not {limit}")


def sized(config: EngineConfig, args: argparse.Namespace) -> EngineConfig:
    """The deployment with slots for the batch and no more context than it needs, unless told otherwise."""
    need = args.input_len + args.output_len
    return replace(
        config,
        max_num_seqs=args.batch_size,
        max_model_len=config.max_model_len or need,
        prefix_caching=False,  # every iteration sends the same prompts
    )


def measure(config: EngineConfig, args: argparse.Namespace) -> tuple[list[Batch], dict[str, Any]]:
    """(the timed batches, facts about the engine). Starts and closes an LLM."""
    from engine.llm import LLM

    say(f"loading {config.model or 'the demo model'}")
    with LLM(**asdict(config)) as llm:
        prompts = random_prompts(
            args.batch_size, args.input_len, llm.model_config.vocab_size, config.seed
        )
        runs = []
        said = 0.0
        for what, total in (("warm-up", args.num_iters_warmup), ("iteration", args.num_iters)):
            for n in range(1, total + 1):
                if n == 1 or time.monotonic() - said >= 1:  # a line a second is enough
                    say(f"{what} {n} of {total}")
                    said = time.monotonic()
                runs.append(run_batch(llm, prompts, args.output_len))
        stats = llm.stats()
        facts = {
            "model": llm.model_config.name, "vocab_size": llm.model_config.vocab_size,
            "roof": stats.get("roof"), "startup_s": stats.get("startup_s"),
            "counters": stats.get("counters"), "device": stats.get("device"),
        }  # fmt: skip
    return runs[args.num_iters_warmup :], facts


def summary(batches: Sequence[Batch], output_len: int) -> dict[str, Any]:
    """vLLM's keys for the batch latency; means and percentiles of TTFT, TPOT and ITL in ms."""
    latencies = [b.latency for b in batches]
    result: dict[str, Any] = {
        "avg_latency": mean(latencies),
        "latencies": latencies,
        "percentiles": {str(p): percentile(latencies, p) for p in PERCENTILES},
    }
    for name in ("ttft", "tpot", "itl"):
        values = [v * 1e3 for b in batches for v in getattr(b, name)]
        if values:
            result[f"{name}_ms"] = {
                "mean": mean(values),
                **{f"p{p}": percentile(values, p) for p in PERCENTILES},
            }
    made = sum(len(b.tokens) * output_len for b in batches)
    result["output_tok_s"] = made / sum(latencies)
    result["answers_equal"] = len({b.tokens for b in batches}) == 1
    return result


def decode_rate(result: dict[str, Any], batch_size: int) -> float | None:
    """Tokens per second of all rows after the first tokens, from the median TPOT."""
    return batch_size / result["tpot_ms"]["p50"] * 1e3 if "tpot_ms" in result else None


def step_share(
    result: dict[str, Any], roof: dict[str, Any] | None, args: argparse.Namespace
) -> float | None:
    """Of the roof, from the median TPOT at the mean context."""
    if "tpot_ms" not in result:
        return None
    context = args.input_len + args.output_len / 2
    return roof_share(roof, args.batch_size * context, result["tpot_ms"]["p50"] * 1e-3)


def as_rows(
    result: dict[str, Any], facts: dict[str, Any], config: EngineConfig, args: argparse.Namespace
) -> list[dict[str, Any]]:
    """The figures in the schema of engine/bench/rows.py."""
    rows = Rows("bench_latency", write=False)
    regime = dict(model=facts["model"], quantization=config.quantization or "none",
                  kv_cache_dtype=config.kv_cache_dtype, tp=config.tensor_parallel_size,
                  shard_of=config.shard_of, rows=args.batch_size, context=args.input_len)  # fmt: skip
    rows.add("latency_ms", result["percentiles"]["50"] * 1e3, "ms", **regime)
    for name in ("ttft", "tpot", "itl"):
        if f"{name}_ms" in result:
            rows.add(f"{name}_ms", result[f"{name}_ms"]["p50"], "ms", **regime)
            rows.add(f"{name}_p99_ms", result[f"{name}_ms"]["p99"], "ms", **regime)
    rate = decode_rate(result, args.batch_size)
    if rate is not None:
        share = step_share(result, facts["roof"], args)
        rows.add("decode_tok_s", rate, "tok/s", share=share, **regime)
    return rows.rows


def report(result: dict[str, Any], share: float | None, rate: float | None) -> str:
    """For the terminal."""
    lines = [f"Avg latency: {result['avg_latency']:.6g} seconds"]
    lines += [f"{p}% percentile latency: {v:.6g} seconds" for p, v in result["percentiles"].items()]
    for name in ("ttft", "tpot", "itl"):
        if f"{name}_ms" in result:
            f = result[f"{name}_ms"]
            lines.append(
                f"{name.upper():<5} mean {f['mean']:.3f} ms, median {f['p50']:.3f}, p90 {f['p90']:.3f}, "
                f"p99 {f['p99']:.3f}"
            )
    lines.append(f"output {result['output_tok_s']:.1f} tok/s, first tokens included")
    if rate is not None:
        roof = "" if share is None else f", {share:.1%} of the bandwidth roof"
        lines.append(f"decode {rate:.1f} tok/s{roof}")
    if not result["answers_equal"]:
        lines.append("warning: equal batches gave different answers")
    return "\n".join(lines)


def run(args: argparse.Namespace) -> int:
    """Measure, print, write, compare. 1 if --compare finds something slower, 2 if nothing to compare with."""
    check(args)
    check_output("--output-json", args.output_json)
    old = read_rows(args.compare) if args.compare else None
    config = sized(engine_config(args), args)
    batches, facts = measure(config, args)
    result = summary(batches, args.output_len)
    rows = as_rows(result, facts, config, args)
    print(
        report(
            result, step_share(result, facts["roof"], args), decode_rate(result, args.batch_size)
        )
    )
    if args.output_json:
        content = {**result, "input_len": args.input_len, "output_len": args.output_len,
                   "batch_size": args.batch_size, **facts, "rows": rows}  # fmt: skip
        Path(args.output_json).write_text(json.dumps(content, indent=1) + "\n")
    return 0 if old is None else against(args.compare, old, rows, args.margin)
