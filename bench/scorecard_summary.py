"""What a scorecard's rows say: a line for each regime, forecasts marked, and what was asked for beside it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from operator import itemgetter
from typing import Any

from bench.rows import weights_of
from bench.scorecard_parts import CONTEXTS

DEGREES = (1, 2, 4, 8)
FAILED = ("section_failed", "part_failed")
TARGETS = ((8, "fp8", 300.0), (8, "none", 190.0))  # tok/s at CONTEXTS[0] (issue F)
CELLS = (("ttft_ms", 512), ("ttft_ms", 2048), ("decode_tok_s", 512), ("decode_tok_s", 8192))
Found = dict[tuple[str, int], dict[str, Any]]


def regimes(rows: Sequence[dict[str, Any]]) -> list[tuple[str, int, str, Found]]:
    """(weights, TP degree, whether it was measured, (metric, context) -> row), a forecast behind what it is from."""
    found: dict[tuple[str, int, bool, str], Found] = {}
    for row in rows:
        forecast = row["metric"].startswith("predicted_")
        metric = row["metric"].removeprefix("predicted_")
        if metric in ("ttft_ms", "decode_tok_s", "host_syncs_per_request"):
            what = "measured"
            if forecast:
                what = row["algorithm"].replace("PREDICTION", "PREDICTED")
            elif row["shard_of"]:
                what = f"one rank's share on {row['tp']} GPU(s)"
            key = (row["quantization"], row["shard_of"] or row["tp"], forecast, what)
            found.setdefault(key, {})[metric, row["context"]] = row
    return [
        (weights_of(next(iter(cells.values()))), degree, what, cells)
        for (_, degree, _, what), cells in sorted(found.items(), key=itemgetter(0))
    ]


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """A line for each regime, forecasts marked, and what issue F asks for beside what was found."""
    lines = [f"{'weights':<8}{'TP':>3}  {'what':<44}" + "".join(
        f"{head:>14}" for head in ("TTFT 512 ms", "TTFT 2048 ms", "tok/s at 512", "tok/s at 8k")
    ) + f"{'roof':>7}{'syncs':>7}"]  # fmt: skip
    for weights, degree, what, found in regimes(rows):
        cells = [found.get(c) for c in CELLS]
        share = (cells[2] or {}).get("share")
        syncs = found.get(("host_syncs_per_request", CONTEXTS[0]))
        lines.append(
            f"{weights:<8}{degree:>3}  {what:<44}"
            + "".join(f"{c['value']:>14.1f}" if c else f"{'-':>14}" for c in cells)
            + (f"{share:>7.0%}" if share else f"{'':>7}")
            + (f"{syncs['value']:>7.0f}" if syncs else f"{'':>7}")
        )
    for row in rows:
        if row["metric"] in ("predicted_decode_tok_s", "predicted_ttft_ms"):
            what = (
                f"{row['quantization']} TP{row['tp']}, {row['metric'].removeprefix('predicted_')}"
            )
            lines.append(
                f"PREDICTED {what} at {row['context']}: {row['value']:.4g} {row['unit']} = "
                f"{row['assumptions']}; the model alone says {row['baseline']['value']:.4g}"
            )
    lines += verdicts(rows)
    failed = [r["algorithm"] for r in rows if r["metric"] in FAILED]
    lines += [f"not measured: {text}" for text in failed]
    return "\n".join(lines)


def verdicts(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Does decode rise with the degree, are the targets met; forecasts say so."""
    rates: dict[tuple[str, int], tuple[float, str]] = {}
    for row in rows:
        if row["context"] == CONTEXTS[0] and not row["shard_of"]:
            key = (row["quantization"], row["tp"])
            if row["metric"] == "decode_tok_s":
                rates[key] = (row["value"], "measured")
            elif row["metric"] == "predicted_decode_tok_s":
                rates.setdefault(key, (row["value"], "PREDICTED"))
    lines = []
    for quantization in ("fp8", "none"):
        line = [(tp, *rates[quantization, tp]) for tp in DEGREES if (quantization, tp) in rates]
        if len(line) > 1:
            rising = all(b[1] > a[1] for a, b in pairwise(line))
            text = ", ".join(f"TP{tp} {value:.1f} ({how})" for tp, value, how in line)
            lines.append(f"{quantization}: decode {'rises' if rising else 'DOES NOT RISE'}: {text}")
    for tp, quantization, least in TARGETS:
        if (quantization, tp) in rates:
            value, how = rates[quantization, tp]
            met = "reached" if value >= least else "MISSED"
            lines.append(
                f"target {quantization} TP{tp} {least:.0f} tok/s: {met}, {value:.1f} ({how})"
            )
    return lines
