"""What a step costs with more rows and with sampling controls, on the card.

    python -m bench.batch qwen2.5-72b:fp8:1 qwen2.5-7b:fp8:1

Dummy weights, 512-token prompts. Rows: `rows` sequences at once, tokens/s of all together and over one row's. Controls:
one sequence, time per token over the greedy one's in the same engine (temperature alone runs in the step's own graph,
the others add the tail's launches).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence

from bench.deployment import add_kv_cache_dtype, each, facts, parse, parser, script
from bench.latency import decode_ahead
from bench.rows import Rows
from engine.config import preset
from engine.roof import roof_share
from engine.runtime import create_executor
from engine.sampling import GREEDY, Controls, Draw

PROMPT = 512
DRAWS = {
    "greedy": GREEDY,
    "temperature": Draw(0.8, 7),
    "top-k 50, top-p 0.9": Draw(0.8, 7, Controls(top_k=50, top_p=0.9)),
    "penalties": Draw(0.8, 7, Controls(repetition_penalty=1.1, presence_penalty=0.5)),
}


def step_s(executor, slots: list[int], draw: Draw, steps: int) -> float:
    """Seconds a decode step of `slots`, prompts and the first step apart; steps are queued ahead of the reads."""
    for slot in slots:
        ids = [(i * 7919 + 31 * slot + 13) % 150000 for i in range(PROMPT)]
        executor.read(executor.prefill(slot, ids, 0, draw))
    executor.read(executor.decode(slots))
    begin = time.perf_counter()
    for _ in decode_ahead(executor, slots, steps):
        pass
    return (time.perf_counter() - begin) / steps


def measure(rows: Rows, args: argparse.Namespace, text: str) -> None:
    """The rows of one deployment."""
    config = parse(text, max_num_seqs=8, max_model_len=2048, kv_cache_dtype=args.kv_cache_dtype)
    steps = args.steps
    executor = create_executor(config, preset(text.split(":")[0]))
    named = dict(facts(config), context=PROMPT)
    roof = executor.stats()["roof"]

    def median(slots: list[int], draw: Draw) -> float:
        return statistics.median(step_s(executor, slots, draw, steps) for _ in range(args.iters))

    try:
        one = 0.0
        for count in (1, 2, 4, 8):
            took = median(list(range(count)), GREEDY)
            one = one or took
            share = roof_share(roof, count * (PROMPT + steps / 2), took)
            rows.add("batch_tok_s", count / took, "tok/s", share=share, rows=count, **named)
            print(f"{text} rows {count}: step {took * 1e3:.3f} ms, {count / took:.1f} tok/s together, "
                  f"{one / took * count:.2f} x one row, {share:.3f} of the roof", flush=True)  # fmt: skip
        for name, draw in DRAWS.items():
            took = median([0], draw)
            rows.add("sampling_cost", took / one, "x greedy", algorithm=name, **named)
            print(f"{text} {name}: step {took * 1e3:.3f} ms, {took / one:.4f} x greedy", flush=True)
    finally:
        executor.close()


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: see bench.deployment."""
    options = parser("batch", __doc__)
    options.add_argument("--steps", type=int, default=64, help="decode steps of a timing")
    options.add_argument("--iters", type=int, default=3)
    add_kv_cache_dtype(options)

    def body(args: argparse.Namespace) -> int:
        rows = Rows("batch")
        return each(args.deployments, lambda text: measure(rows, args, text))

    return script(options, body, argv)


if __name__ == "__main__":
    sys.exit(main())
