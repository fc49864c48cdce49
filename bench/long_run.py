"""Twenty prompts of 512 tokens one after the other: the same ids each time, and no slow-down.

    python -m bench.long_run qwen2.5-7b:fp8:2

Dummy weights, greedy, batch 1. Five different prompts, each four times: the ids must be those of the first time. Time
per token of the last tenth over the first must be within 2 % of 1 (the field report's failure was a rate that
decays). Rows: long_run (ratio), decode_tok_s is bench.latency's. Exit 1 if a check failed.
"""

from __future__ import annotations

import argparse
import sys

from bench.deployment import each, facts, parse, parser
from bench.latency import generate
from bench.rows import Rows
from engine.config import preset
from engine.runtime import create_executor

DIFFERENT = 5
TOLERANCE = 0.02


def measure(rows: Rows, args: argparse.Namespace, text: str) -> None:
    """One deployment; SystemExit if ids changed or the rate decayed."""
    config = parse(text, max_num_seqs=1, max_model_len=args.input_len + args.output_len)
    executor = create_executor(config, preset(text.split(":")[0]))
    try:
        first: dict[int, list[int]] = {}
        times = []
        for n in range(args.prompts + 1):
            which = n % DIFFERENT
            ids = [(i * 7919 + 13 + 101 * which) % 150000 for i in range(args.input_len)]
            out, _, tpot = generate(executor, ids, args.output_len)
            if out != first.setdefault(which, out):
                sys.exit(f"{text}: prompt {n} gave other ids than prompt {which}")
            times.append(tpot)
    finally:
        executor.close()
    times = times[1:]  # the first warms up
    tenth = max(1, len(times) // 10)
    ratio = min(times[-tenth:]) / min(times[:tenth])
    rows.add("long_run", ratio, "last tenth / first", context=args.input_len, **facts(config))
    print(
        f"{text}: {args.prompts} x {args.output_len} tokens, ids equal; last tenth {ratio:.4f} of the first's "
        f"time; {1 / min(times):.1f} to {1 / max(times):.1f} tok/s",
        flush=True,
    )
    if abs(ratio - 1) > TOLERANCE:
        sys.exit(f"{text}: the last tenth is not within {TOLERANCE:.0%} of the first")


def main() -> None:
    """Deployments as MODEL:QUANTIZATION:TP[:SHARD_OF]."""
    options = parser(__doc__)
    options.add_argument("--prompts", type=int, default=20)
    options.add_argument("--input-len", type=int, default=128)
    options.add_argument("--output-len", type=int, default=512)
    args = options.parse_args()
    rows = Rows("long_run")
    each(args.deployments, lambda text: measure(rows, args, text))


if __name__ == "__main__":
    main()
