"""One schema for every measured figure, and the file it goes to.

A row: bench, model, quantization, kv_cache_dtype, tp, shard_of, rows, context, bytes, algorithm, metric, value, unit, share
(of the roof), baseline {name, value}, gpu, gpus, torch, triton, driver, commit, date, command. Scripts write to
$OUT (default ./out); `python -m bench.rows merge DIR` folds such files into bench/results/, replacing rows that
measure the same thing.
"""

from __future__ import annotations

import datetime
import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[2] / "bench" / "results"
# What makes two rows measurements of the same thing: the newer replaces the older.
IDENTITY = ("bench", "model", "quantization", "kv_cache_dtype", "tp", "shard_of", "rows", "context", "bytes",
            "algorithm", "metric", "gpu", "gpus")  # fmt: skip
SINCE = {"kv_cache_dtype": "auto"}  # fields that older rows lack, and what they were


def environment() -> dict[str, Any]:
    """GPU, versions, driver, commit, date and command of this run."""
    import torch
    import triton

    cuda = torch.cuda.is_available()
    commit = os.environ.get("ENGINE_COMMIT")
    if not commit:
        git = ["git", "rev-parse", "--short", "HEAD"]
        commit = subprocess.run(git, capture_output=True, text=True).stdout.strip() or "unknown"
    return {
        "gpu": torch.cuda.get_device_name(0) if cuda else "cpu",
        "gpus": torch.cuda.device_count(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "driver": driver_version() if cuda else "",
        "commit": commit,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M"),
        "command": " ".join(["python", *sys.orig_argv[1:]]),
    }


@functools.cache
def driver_version() -> str:
    """Of the NVIDIA driver, such as 580.159.04; empty where nvidia-smi is not there."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True).stdout.split("\n")[0].strip()
    except OSError:
        return ""


class Rows:
    """Collects rows of one bench and writes them as it goes, so that a run cut short keeps what it has.

    write False: collect only.
    """

    def __init__(self, bench: str, out: str | None = None, *, write: bool = True):
        self.bench, self._write = bench, write
        self.path = Path(out or os.environ.get("OUT", "out")) / f"{bench}.json"
        self.rows: list[dict[str, Any]] = []
        self._environment = environment()

    def add(self, metric: str, value: float, unit: str, **facts: Any) -> dict[str, Any]:
        """Append one row; facts fill the schema's other fields (model, tp, rows, context, share, ...)."""
        row: dict[str, Any] = {
            "bench": self.bench, "model": "", "quantization": "none", **SINCE, "tp": 1, "shard_of": None, "rows": 1,
            "context": None, "bytes": None, "algorithm": None, "metric": metric,
            "value": float(f"{value:.5g}"), "unit": unit, "share": None, "baseline": None,
            **facts, **self._environment,
        }  # fmt: skip
        if row["share"] is not None:
            row["share"] = float(f"{row['share']:.4g}")
        self.rows.append(row)
        if self._write:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(json.dumps(self.rows, indent=1) + "\n")
        return row


def merge(folder: Path, results: Path = RESULTS) -> list[str]:
    """Fold the rows of `folder`'s files, whatever their names and with the later date winning, into
    results/<bench>.json; returns the files written."""
    found: dict[str, list[dict[str, Any]]] = {}
    for file in sorted(folder.glob("*.json")):
        new = json.loads(file.read_text())
        if isinstance(new, list) and all(isinstance(r, dict) and "metric" in r for r in new):
            for row in new:
                found.setdefault(row["bench"], []).append(row)
    for bench, rows in found.items():
        target = results / f"{bench}.json"
        old = json.loads(target.read_text()) if target.exists() else []
        ordered = sorted([*old, *rows], key=lambda row: row.get("date") or "")
        merged = {identity(row): row for row in ordered}
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(list(merged.values()), indent=1) + "\n")
    return [f"{bench}.json" for bench in found]


def identity(row: dict[str, Any]) -> tuple:
    """Key of what a row measures."""
    return tuple(row.get(name, SINCE.get(name)) for name in IDENTITY)


def load(results: Path = RESULTS) -> list[dict[str, Any]]:
    """All rows of all result files, with every field. ValueError names a file that is not a list of rows."""
    rows: list[dict[str, Any]] = []
    for file in sorted(results.glob("*.json")):
        content = json.loads(file.read_text())
        if not isinstance(content, list) or any("metric" not in row for row in content):
            raise ValueError(f"{file} is not a list of result rows")
        rows += [{**SINCE, **row} for row in content]
    return rows
