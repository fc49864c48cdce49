"""`engine bench sweep`: decode speed over TP degrees, beside what the performance model says is possible.

Bandwidth line: weights and KV of one rank at the copy bandwidth, nothing else costs anything. Amdahl line: the same
plus launches and barriers, which do not shrink with the degree. Degrees beyond the GPUs at hand are predicted, or
with --shards measured on one rank's shapes (fewer ranks take part in the exchange than will).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from engine.bench import latency
from engine.bench.compare import add_compare_options, against, read_rows
from engine.config import EngineConfig, ModelConfig
from engine.console import Parser, check_output, say
from engine.errors import EngineError
from engine.model import ScalingPoint, gpu_named, scaling
from engine.model.calibrate import constants_for
from engine.options import add_engine_options, count, engine_config

SHARD_DEGREES = (2, 4, 8)


@dataclass(frozen=True)
class Measured:
    """tok/s of one sequence after the first token; gpus < tp: one rank's shapes of the degree."""

    tp: int
    gpus: int
    tok_s: float


def add_options(p: Parser) -> None:
    """As latency, for one sequence."""
    group = p.add_argument_group("sweep")
    group.add_argument(
        "--degrees", metavar="1,2,4,8", help="TP degrees (default: 1, 2, 4, 8 that fit)"
    )
    group.add_argument("--shards", action="store_true",
                       help="measure degrees beyond the GPUs on their shard shapes (dummy weights)")  # fmt: skip
    group.add_argument(
        "--gpu", default=None, help="of the predictions (default: this one, or h200)"
    )
    group.add_argument("--input-len", type=count, default=512, metavar="N", help="default 512")
    group.add_argument("--output-len", type=count, default=128, metavar="N", help="default 128")
    group.add_argument("--batch-size", type=count, default=1, metavar="N", help="default 1")
    group.add_argument("--num-iters", type=count, default=5, metavar="N", help="default 5")
    group.add_argument("--num-iters-warmup", type=count, default=1, metavar="N", help="default 1")
    group.add_argument(
        "--output-json", metavar="FILE", help="points, lines and rows to compare with"
    )
    group.add_argument("--png", metavar="FILE", help="plot (needs matplotlib)")
    add_compare_options(group)
    add_engine_options(p)


def degrees_of(model: ModelConfig, text: str | None) -> list[int]:
    """Degrees to sweep. EngineError for one that the model does not divide into."""
    if text is None:
        return [n for n in (1, 2, 4, 8) if n in model.valid_tp()]
    try:
        wanted = [int(n) for n in text.split(",")]
    except ValueError:
        raise EngineError(f"--degrees {text!r} is not a list such as 1,2,4,8") from None
    for n in wanted:
        model.shard(n)
    return sorted(set(wanted))


def deployment(config: EngineConfig, degree: int, gpus: int, shards: bool) -> EngineConfig | None:
    """How a degree can be run on `gpus` GPUs; None if it can only be predicted."""
    if degree <= gpus:
        return replace(config, tensor_parallel_size=degree, shard_of=None)
    if shards and gpus and degree in SHARD_DEGREES and config.load_format == "dummy":
        ranks = max(n for n in (1, 2, 4, 8) if n <= gpus)
        return replace(config, tensor_parallel_size=ranks, shard_of=degree)
    return None


def amdahl_fit(points: Sequence[Measured]) -> tuple[float, float] | None:
    """(serial, parallel) seconds of T(n) = serial + parallel / n, least squares; None with fewer than two degrees."""
    if len({p.tp for p in points}) < 2:
        return None
    xs, ys = [1 / p.tp for p in points], [1 / p.tok_s for p in points]
    mx, my = sum(xs) / len(xs), sum(ys) / len(ys)
    slope = sum((x - mx) * (y - my) for x, y in zip(xs, ys)) / sum((x - mx) ** 2 for x in xs)
    return my - slope * mx, slope


def table(points: Sequence[ScalingPoint], measured: Sequence[Measured]) -> str:
    """Measured points and both lines side by side, and whether the slope goes up."""
    by_degree = {m.tp: m for m in measured}
    lines = [
        f"{'TP':>3}{'measured':>11}{'speed-up':>10}{'Amdahl':>9}{'bandwidth':>11}{'of it':>8}"
        f"{'barriers':>10}{'launches':>10}"
    ]
    first = measured[0] if measured else None
    for point in points:
        m = by_degree.get(point.tp)
        value, gain, share = "-", "", ""
        if m is not None and first is not None:
            value = f"{m.tok_s:.1f}" + ("*" if m.gpus < m.tp else "")
            gain = f"{m.tok_s / first.tok_s:.2f}"
            share = f"{m.tok_s / point.bandwidth_tok_s:.0%}"
        lines.append(
            f"{point.tp:>3}{value:>11}{gain:>10}{point.amdahl_tok_s:>9.1f}{point.bandwidth_tok_s:>11.1f}"
            f"{share:>8}{point.barrier_share:>10.1%}{point.launch_share:>10.1%}"
        )
    if any(m.gpus < m.tp for m in measured):
        lines.append("* shapes of that degree on fewer GPUs; the exchange has fewer ranks")
    lines.append("barriers, launches: their predicted share of the step; speeds in tok/s")
    return "\n".join([*lines, slope(points, measured)])


def slope(points: Sequence[ScalingPoint], measured: Sequence[Measured]) -> str:
    """Does each further degree still pay?"""
    speeds = [(m.tp, m.tok_s) for m in measured]
    what = "measured"
    if len(speeds) < 2:
        speeds, what = [(p.tp, p.amdahl_tok_s) for p in points], "predicted"
    steps = [(a[0], b[0], b[1] / a[1]) for a, b in pairwise(speeds)]
    text = ", ".join(f"TP {a} -> {b}: x{gain:.2f}" for a, b, gain in steps)
    verdict = "yes" if all(gain > 1 for *_, gain in steps) else "no"
    line = f"does the slope go up? {verdict} ({what}; {text or 'one degree only'})"
    fitted = amdahl_fit(measured)
    if fitted is not None:
        serial = max(0.0, fitted[0])
        line += f"; Amdahl fit of the measured points: {serial * 1e3:.2f} ms a token do not shrink"
    return line


def draw(
    title: str, points: Sequence[ScalingPoint], measured: Sequence[Measured], path: str
) -> None:
    """PNG of the three."""
    from engine.profiling.plots import pyplot

    plt = pyplot("--png")
    figure, axis = plt.subplots(figsize=(6.4, 4.2))
    degrees = [p.tp for p in points]
    axis.plot(degrees, [p.bandwidth_tok_s for p in points], "k--", label="bandwidth line")
    axis.plot(degrees, [p.amdahl_tok_s for p in points], "C0-", label="Amdahl line (model)")
    for kind, marker in ((True, "o"), (False, "s")):
        some = [m for m in measured if (m.gpus >= m.tp) == kind]
        if some:
            label = "measured" if kind else "measured, shard shapes on fewer GPUs"
            axis.plot([m.tp for m in some], [m.tok_s for m in some], f"C3{marker}", label=label)
    axis.set_xticks(degrees)
    axis.set_xlabel("TP degree")
    axis.set_ylabel("decode tok/s")
    axis.set_ylim(bottom=0)
    axis.set_title(title, fontsize=10)
    axis.legend(fontsize=8)
    axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def run(args: argparse.Namespace) -> int:
    """Measure what can be measured, predict all, print, plot, write, compare."""
    from engine.llm import resolve

    latency.check(args)
    check_output("--output-json", args.output_json)
    check_output("--png", args.png)
    old = read_rows(args.compare) if args.compare else None
    config, model, _ = resolve(replace(engine_config(args), tensor_parallel_size=1))
    if args.png:
        from engine.profiling.plots import pyplot

        pyplot("--png")
    gpus, name = _gpus(config)
    gpu = gpu_named(args.gpu or (name if gpus else "h200"))
    degrees = degrees_of(model, args.degrees)
    measured, rows = _measure(config, args, degrees, gpus)
    points = scaling(
        model, degrees, quantization=config.quantization, rows=args.batch_size,
        context=args.input_len + args.output_len // 2, gpu=gpu, fp8_kv=config.fp8_kv,
    )  # fmt: skip
    title = f"{model.name} {config.quantization or '16-bit'}, {args.batch_size} row(s), {gpu.name}"
    source = constants_for(gpu, config.quantization).source
    print(f"{title}; model constants from {source}")
    print(table(points, measured))
    if args.output_json:
        content = {"points": [asdict(m) for m in measured], "lines": [asdict(p) for p in points],
                   "constants": source, "rows": rows}  # fmt: skip
        Path(args.output_json).write_text(json.dumps(content, indent=1) + "\n")
    if args.png:
        draw(title, points, measured, args.png)
    return 0 if old is None else against(args.compare, old, rows, args.margin)


def _gpus(config: EngineConfig) -> tuple[int, str]:
    from engine.runtime.create import pick_device

    if pick_device(config) == "cpu":
        return 0, ""
    import torch

    return torch.cuda.device_count(), torch.cuda.get_device_name(0)


def _measure(
    config: EngineConfig, args: argparse.Namespace, degrees: Sequence[int], gpus: int
) -> tuple[list[Measured], list[dict[str, Any]]]:
    if not gpus:
        say("no CUDA device in use: the lines are predictions and nothing is measured")
    measured: list[Measured] = []
    rows: list[dict[str, Any]] = []
    for degree in degrees:
        chosen = deployment(config, degree, gpus, args.shards)
        if chosen is None:
            if gpus:
                say(
                    f"TP {degree}: predicted only, {gpus} GPU(s) here (--shards measures its shapes)"
                )
            continue
        try:
            batches, facts = latency.measure(latency.sized(chosen, args), args)
        except EngineError as e:  # such as a model too large for one GPU
            say(f"TP {degree}: {e}")
            continue
        result = latency.summary(batches, args.output_len)
        rows += latency.as_rows(result, facts, chosen, args)
        rate = latency.decode_rate(result, args.batch_size)
        if rate is not None:
            measured.append(Measured(degree, chosen.tensor_parallel_size, rate))
            say(f"TP {degree}: {rate:.1f} tok/s")
    return measured, rows
