"""Prompts of --input-len tokens one after the other, --output-len generated: the same ids each time, no slow-down.

    python -m bench.long_run qwen2.5-7b:fp8:2

Dummy weights, greedy, batch 1. Five different prompts in turn: the ids must be those of the first time. The median time
per token of the last tenth of the prompts over that of the first tenth must be within 2 % of 1 (the field report's
failure was a rate that decays). Rows: long_run (the ratio). Exit 1 if a check failed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence

from bench.deployment import each, facts, parse, parser, script
from bench.latency import generate
from bench.rows import Rows
from engine.config import preset
from engine.errors import EngineError
from engine.runtime import create_executor

DIFFERENT = 5
TOLERANCE = 0.02


class CheckFailed(RuntimeError):
    """Ids changed, or the rate did."""


def tenths(times: Sequence[float]) -> tuple[float, float]:
    """Medians of the first and of the last tenth."""
    count = max(1, len(times) // 10)
    return statistics.median(times[:count]), statistics.median(times[-count:])


def check(args: argparse.Namespace) -> None:
    """EngineError for numbers that would measure nothing."""
    least = 2 * DIFFERENT
    if args.prompts < least:
        raise EngineError(
            f"--prompts {args.prompts} is below {least}: {DIFFERENT} different prompts, each twice"
        )
    for flag, value, low in (
        ("--input-len", args.input_len, 1),
        ("--output-len", args.output_len, 2),
    ):
        if value < low:
            raise EngineError(f"{flag} {value} is below {low}")


def measure(rows: Rows, args: argparse.Namespace, text: str) -> None:
    """One deployment; CheckFailed if ids changed or the rate decayed."""
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
                raise CheckFailed(f"prompt {n} gave other ids than prompt {which}")
            times.append(tpot)
    finally:
        executor.close()
    early, late = tenths(times[1:])  # the first warms up
    ratio = late / early
    rows.add("long_run", ratio, "last tenth / first", context=args.input_len, **facts(config))
    print(
        f"{text}: {args.prompts} x {args.output_len} tokens, ids equal; last tenth {ratio:.4f} of the first's "
        f"time; first {1 / early:.1f} tok/s, last {1 / late:.1f}",
        flush=True,
    )
    if abs(ratio - 1) > TOLERANCE:
        raise CheckFailed(f"the last tenth is not within {TOLERANCE:.0%} of the first")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: see bench.deployment."""
    options = parser("long_run", __doc__)
    options.add_argument("--prompts", type=int, default=20, help=f"{2 * DIFFERENT} or more")
    options.add_argument("--input-len", type=int, default=128)
    options.add_argument("--output-len", type=int, default=512)

    def body(args: argparse.Namespace) -> int:
        rows = Rows("long_run")
        return each(args.deployments, lambda text: measure(rows, args, text))

    return script(options, body, argv, check)


if __name__ == "__main__":
    sys.exit(main())
