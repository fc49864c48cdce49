"""Single-stream latency of the whole engine on the card: start-up, TTFT, decode rate, share of the roof.

    python -m bench.latency qwen2.5-72b:fp8:2 qwen2.5-7b:none:1

Dummy weights, greedy, batch 1; 512 tokens in, 256 out. Share of the roof = (weight bytes + KV bytes read per
token per GPU) / (copy bandwidth of the same run, read + write) / time per token.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence

from bench.deployment import add_kv_cache_dtype, each, facts, parse, parser, script
from bench.rows import Rows
from engine.config import preset
from engine.roof import roof_share
from engine.runtime import create_executor


def generate(executor, ids, tokens, slot=0):
    """(ids, seconds to the first token, seconds per later token): steps are queued ahead of the reads."""
    start = time.perf_counter()
    out = executor.read(executor.prefill(slot, ids))
    first = time.perf_counter()
    for row in decode_ahead(executor, [slot], tokens - 1):
        out += row
    end = time.perf_counter()
    return out, first - start, (end - first) / (tokens - 1)


def decode_ahead(executor, slots, steps):
    """The ids of each of `steps` decode steps of these slots, as they are read; the next ones are queued already."""
    handles: list[int] = []
    queued = 0
    for _ in range(steps):
        while queued < steps and len(handles) < executor.max_in_flight:
            handles.append(executor.decode(slots))
            queued += 1
        yield executor.read(handles.pop(0))


def measure(rows: Rows, args: argparse.Namespace, text: str) -> None:
    """One deployment: start, run `--iters` times, write its rows."""
    begin = time.perf_counter()
    config = parse(
        text, max_num_seqs=1, max_model_len=args.max_model_len, kv_cache_dtype=args.kv_cache_dtype
    )
    executor = create_executor(config, preset(text.split(":")[0]))
    startup = time.perf_counter() - begin
    named = dict(facts(config), context=args.input_len)
    ids = [(i * 7919 + 13) % 150000 for i in range(args.input_len)]
    try:
        stats = executor.stats()
        runs = [generate(executor, ids, args.output_len) for _ in range(args.iters + 1)][1:]
    finally:
        executor.close()
    same = all(run[0] == runs[0][0] for run in runs)
    tpot = statistics.median(run[2] for run in runs)
    ttft = statistics.median(run[1] for run in runs)
    share = roof_share(stats["roof"], args.input_len + args.output_len / 2, tpot)
    rows.add("startup_s", startup, "s", **named)
    rows.add("ttft_ms", ttft * 1e3, "ms", **named)
    rows.add("decode_tok_s", 1 / tpot, "tok/s", share=share, **named)
    phases = ", ".join(f"{k} {v:.1f}" for k, v in stats["startup_s"].items())
    print(
        f"{text}: start {startup:.1f} s ({phases}); TTFT {ttft * 1e3:.2f} ms; {1 / tpot:.1f} tok/s, {share:.3f} "
        f"of the roof ({stats['roof']['copy_bandwidth'] / 1e12:.2f} TB/s); runs equal: {same}; min TTFT "
        f"{min(r[1] for r in runs) * 1e3:.2f}",
        flush=True,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: see bench.deployment."""
    options = parser("latency", __doc__)
    options.add_argument("--input-len", type=int, default=512)
    options.add_argument("--output-len", type=int, default=256)
    options.add_argument("--max-model-len", type=int, default=2048)
    options.add_argument("--iters", type=int, default=5)
    add_kv_cache_dtype(options)

    def body(args: argparse.Namespace) -> int:
        rows = Rows("latency")
        return each(args.deployments, lambda text: measure(rows, args, text))

    return script(options, body, argv)


if __name__ == "__main__":
    sys.exit(main())
