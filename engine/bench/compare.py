"""Two sets of rows against each other: a verdict for each regime."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.bench.rows import SINCE
from engine.errors import EngineError

MARGIN = 0.03  # medians of repeated runs on one card agree to about 1 %
REGIME = (
    "model",
    "quantization",
    "kv_cache_dtype",
    "tp",
    "shard_of",
    "rows",
    "context",
    "bytes",
    "algorithm",
    "gpu",
)
HIGHER_IS_BETTER = ("tok/s", "req/s", "TFLOP/s", "TB/s", "GB/s")


@dataclass(frozen=True)
class Change:
    """One metric of one regime. gain: new over old as speed, > 1 is better."""

    regime: str
    metric: str
    unit: str
    old: float
    new: float
    gain: float

    def verdict(self, margin: float) -> str:
        if self.gain < 1 - margin:
            return "slower"
        return "faster" if self.gain > 1 / (1 - margin) else "same"


def read_rows(path: str | Path) -> list[dict[str, Any]]:
    """Rows of a file of `--output-json` or of bench/results. EngineError names a file that has none."""
    try:
        content = json.loads(Path(path).read_text())
    except OSError as e:
        raise EngineError(f"--compare {path}: {e.strerror}") from None
    except json.JSONDecodeError as e:
        raise EngineError(f"--compare {path} is not JSON: {e}") from None
    rows = content.get("rows") if isinstance(content, dict) else content
    if not isinstance(rows, list) or not all(isinstance(r, dict) and "metric" in r for r in rows):
        raise EngineError(f"--compare {path} holds no result rows (see engine/bench/rows.py)")
    return rows


def changes(old: Sequence[dict[str, Any]], new: Sequence[dict[str, Any]]) -> list[Change]:
    """Metrics that both have for the same regime, in the order of `new`."""
    before = {_key(row): row for row in old}
    found = []
    for row in new:
        match = before.get(_key(row))
        if match is None or not (row["value"] > 0 and match["value"] > 0):
            continue
        ratio = row["value"] / match["value"]
        gain = ratio if row["unit"] in HIGHER_IS_BETTER else 1 / ratio
        found.append(
            Change(regime(row), row["metric"], row["unit"], match["value"], row["value"], gain)
        )
    return found


def _key(row: dict[str, Any]) -> tuple:
    return (row["metric"], *(row.get(name, SINCE.get(name)) for name in REGIME))


def regime(row: dict[str, Any]) -> str:
    """qwen2.5-72b fp8 tp=2 rows=1 context=512"""
    shard = f" shards of {row['shard_of']}" if row.get("shard_of") else ""
    parts = [row["model"] or "", row["quantization"] if row["quantization"] != "none" else ""]
    parts += ["fp8 KV"] if row.get("kv_cache_dtype") == "fp8" else []
    parts += [f"tp={row['tp']}{shard}", f"rows={row['rows']}"]
    parts += [f"{name}={row[name]}" for name in ("context", "bytes") if row.get(name) is not None]
    parts += [str(row["algorithm"])] if row.get("algorithm") else []
    return " ".join(part for part in parts if part)


def add_compare_options(group: argparse._ArgumentGroup, margin: float = MARGIN) -> None:
    """--compare and --margin."""
    group.add_argument("--compare", metavar="FILE",
                       help="an older --output-json: verdict by regime; exit code 1 if slower, "
                       "2 if nothing compares")  # fmt: skip
    group.add_argument("--margin", type=float, default=margin, metavar="X",
                       help=f"differences up to this share are none (default {margin})")  # fmt: skip


def verdicts(found: Sequence[Change], margin: float = MARGIN) -> tuple[str, bool]:
    """(table with a verdict for each regime, whether any is slower).

    A regime is slower if one of its medians is, faster if one is and none is slower. 99th percentiles of a
    few runs are their worst cases: shown with three times the margin, they decide nothing.
    """
    if not found:
        return "nothing to compare: no metric of the same regime and GPU in both", False
    lines, slower = [], False
    for name in dict.fromkeys(change.regime for change in found):
        own = [change for change in found if change.regime == name]
        decisive = {c.verdict(margin) for c in own if "_p99_" not in c.metric}
        whole = next((v for v in ("slower", "faster") if v in decisive), "same")
        slower |= whole == "slower"
        lines.append(f"{name}: {whole}")
        for c in own:
            verdict = c.verdict(3 * margin if "_p99_" in c.metric else margin)
            lines.append(
                f"  {c.metric:<15}{c.old:>11.5g} -> {c.new:<11.5g}{c.unit:<6}{c.gain - 1:>+8.1%}  {verdict}"
            )
    return "\n".join(lines), slower


def against(
    path: str, old: Sequence[dict[str, Any]], new: Sequence[dict[str, Any]], margin: float
) -> int:
    """Print the verdicts; 1 if a regime is slower, 2 if nothing could be compared."""
    found = changes(old, new)
    text, slower = verdicts(found, margin)
    print(f"\nagainst {path}:\n{text}")
    return int(slower) if found else 2
