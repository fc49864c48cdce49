"""Time to first token over prompt lengths on the card, beside the floor of its matrix products.

    python -m bench.ttft qwen2.5-7b:none:1 qwen2.5-7b:fp8:1 --png ttft.png

Dummy weights, greedy, one request at a time on a warm engine. Floor = 2 x parameters x tokens / (TP x matrix rate),
the rate being what cuBLAS reaches in BF16 in the same run, in a burst (what it keeps up for a second is printed beside it; fp8
activations are compared with the same BF16 floor). One prompt follows the other at once unless --pause says otherwise. Host
synchronisations are counted in a CUPTI trace (torch.profiler) of a request of 512 tokens and 16 decode steps.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from bench.deployment import each, facts, numbers, parse, parser, script
from bench.latency import generate
from bench.rows import Rows
from engine.config import preset
from engine.console import check_output
from engine.errors import EngineError
from engine.graph.passes.quantize_prefill import FP8_MIN_TOKENS
from engine.profiling.plots import pyplot
from engine.runtime import create_executor
from engine.runtime.bandwidth import event_seconds
from engine.runtime.buckets import chunks, prefill_buckets

WAITS_LEN = 512  # tokens of the request whose host synchronisations are counted
SQUARE = 8192  # of the matrix product that measures the rate
SUSTAINED = 700  # products
WAITS = {"cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy",
         "cuStreamSynchronize", "cuCtxSynchronize", "cuEventSynchronize"}  # fmt: skip


def matrix_rates() -> tuple[float, float]:
    """FLOP/s of a large BF16 cuBLAS product on this card: (median of 10 with a pause behind each, mean of the last
    tenth of `SUSTAINED` without pauses, about a second: a card at its power limit lowers its clock)."""
    a, b = (torch.randn(SQUARE, SQUARE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    burst = statistics.median(event_seconds(lambda: a @ b, 13)[3:])
    out, tail = torch.empty_like(a), SUSTAINED // 10

    def products() -> None:
        for _ in range(tail):
            torch.mm(a, b, out=out)

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(9):
        products()
    begin.record()
    products()
    end.record()
    end.synchronize()
    work = 2 * SQUARE**3
    return work / burst, work * tail / (begin.elapsed_time(end) * 1e-3)


def host_waits(executor, ids: list[int], tokens: int) -> dict[str, int]:
    """Blocking CUDA calls of one request, by name, as CUPTI saw them."""
    from torch.profiler import ProfilerActivity, profile, record_function

    both = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=both) as trace, record_function("request"):
        generate(executor, ids, tokens)
    events = list(trace.events())
    request = next(e for e in events if e.name == "request").time_range
    found: dict[str, int] = {}
    for e in events:
        if e.name in WAITS and request.start <= e.time_range.start <= request.end:
            found[e.name] = found.get(e.name, 0) + 1
    launches = sum(e.name.startswith(("cudaGraphLaunch", "cuGraphLaunch")) for e in events)
    assert launches >= tokens, (
        f"the trace holds {launches} graph launches of {tokens}: CUPTI is blind"
    )
    return found


def activations(length: int, buckets: Sequence[int], fp8: bool) -> str:
    """What multiplies the weights in a prompt's largest bucket: "fp8" from FP8_MIN_TOKENS on, if the engine has
    FP8 prefill, else "16bit"."""
    largest = max(bucket for _, _, bucket in chunks(length, buckets))
    return "fp8" if fp8 and largest >= FP8_MIN_TOKENS else "16bit"


def measure(
    rows: Rows, args: argparse.Namespace, text: str, rate: float
) -> list[tuple[int, float, float]]:
    """(prompt length, median TTFT ms, floor ms) of one deployment; writes its rows."""
    lengths = args.input_lens
    longest = max(*lengths, WAITS_LEN) + 64
    engine = parse(text, max_num_seqs=1, max_model_len=longest,
                   prefill_activations=args.prefill_activations, all_reduce=args.all_reduce)  # fmt: skip
    config, degree = preset(text.split(":")[0]), engine.shard_of or engine.tensor_parallel_size
    executor = create_executor(engine, config)
    fp8, buckets = engine.fp8_prefill(engine.quantization), prefill_buckets(longest)
    setting = "" if args.all_reduce == "auto" else f", {args.all_reduce}"
    setting += f", {args.pause:g} s apart" if args.pause else ""

    def named(length: int) -> dict[str, Any]:
        algorithm = f"{activations(length, buckets, fp8)} activations{setting}"
        return dict(facts(engine), context=length, algorithm=algorithm)

    points = []
    try:
        _, _, step = generate(executor, list(range(16)), 33)
        print(f"{text}{setting}: decode step {step * 1e3:.2f} ms", flush=True)
        for length in lengths:
            ids = [(i * 7919 + 13) % 150000 for i in range(length)]
            took = []
            for _ in range(args.iters + 2):
                time.sleep(args.pause)
                took.append(generate(executor, ids, 2)[1] * 1e3)
            took = took[2:]
            floor = 2e3 * config.num_parameters * length / (degree * rate)
            took.sort()
            p50, p90 = statistics.median(took), took[int(0.9 * (len(took) - 1))]
            rows.add("ttft_p50_ms", p50, "ms", share=floor / p50, **named(length))
            rows.add("ttft_p90_ms", p90, "ms", **named(length))
            rows.add("ttft_min_ms", took[0], "ms", **named(length))
            print(f"  {length:6} tokens, {activations(length, buckets, fp8)}: TTFT p50 {p50:8.2f} p90 {p90:8.2f} min {took[0]:8.2f} ms; "
                  f"floor {floor:8.2f} ms, ratio {p50 / floor:.2f}; {p50 / 1e3 / step:.2f} decode steps",
                  flush=True)  # fmt: skip
            points.append((length, p50, floor))
        waits = host_waits(executor, [(i * 31 + 7) % 150000 for i in range(WAITS_LEN)], 17)
        counters = executor.stats()["counters"]
        rows.add("host_waits", sum(waits.values()), "calls", **named(WAITS_LEN))
        print(f"  blocking CUDA calls of a request ({WAITS_LEN} + 17 tokens), CUPTI: {waits or 'none'}; "
              f"own counters {counters}", flush=True)  # fmt: skip
    finally:
        executor.close()
    return points


def draw(curves: Mapping[str, Sequence[tuple[int, float, float]]], path: str) -> None:
    """PNG: TTFT and floor over the prompt length, log-log."""
    plt = pyplot("--png")
    figure, axis = plt.subplots(figsize=(8, 5))
    for name, points in curves.items():
        lengths, p50, floor = zip(*points)
        (line,) = axis.loglog(lengths, p50, marker="o", label=name)
        axis.loglog(lengths, floor, linestyle=":", color=line.get_color())
    axis.set_xlabel("prompt, tokens")
    axis.set_ylabel("TTFT, ms (median; dotted: BF16 matrix floor)")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def check(args: argparse.Namespace) -> None:
    """EngineError for arguments that cannot work."""
    if args.iters < 1:
        raise EngineError(f"--iters {args.iters} is not 1 or more")
    if not 0 <= args.pause <= 60:
        raise EngineError(f"--pause {args.pause}: seconds between prompts, 0 to 60")
    for text in args.deployments:
        engine = parse(text, prefill_activations=args.prefill_activations)
        engine.fp8_prefill(engine.quantization)
    if args.png:
        pyplot("--png")
        check_output("--png", args.png)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: see bench.deployment."""
    options = parser("ttft", __doc__)
    options.add_argument(
        "--input-lens", type=numbers, default="16,64,128,512,2048,8192",
        help="of prompts, tokens, comma-separated",
    )  # fmt: skip
    options.add_argument("--iters", type=int, default=10)
    options.add_argument("--prefill-activations", choices=("auto", "16bit", "fp8"), default="auto")
    options.add_argument("--all-reduce", choices=("auto", "lamport", "two_shot"), default="auto")
    options.add_argument(
        "--pause", type=float, default=0.0, help="seconds between prompts; without one, long prompts "
        "find the card at its power limit and a lower clock (default 0)",
    )  # fmt: skip
    options.add_argument("--png", help="plot (needs matplotlib)")
    return script(options, measure_all, argv, check)


def measure_all(args: argparse.Namespace) -> int:
    """Every deployment, and the plot; the exit code."""
    rows, (rate, sustained) = Rows("ttft"), matrix_rates()
    what = f"cuBLAS BF16, {SQUARE}^3"
    print(f"matrix rate {rate / 1e12:.0f} TFLOP/s, {sustained / 1e12:.0f} after a second ({what})")
    rows.add("matrix_tflops", rate / 1e12, "TFLOP/s", algorithm=what)
    rows.add("matrix_tflops", sustained / 1e12, "TFLOP/s", algorithm=f"{what}, after a second")
    curves: dict[str, list[tuple[int, float, float]]] = {}

    def curve(text: str) -> None:
        begin = time.perf_counter()
        try:
            curves[text] = measure(rows, args, text, rate)
        finally:
            print(f"  {time.perf_counter() - begin:.0f} s", flush=True)

    code = each(args.deployments, curve)
    if args.png and curves:
        draw(curves, args.png)
    return code


if __name__ == "__main__":
    sys.exit(main())
