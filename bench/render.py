"""Tables of README.md and docs/ from bench/results/*.json, so that text and measurements cannot disagree.

    python -m bench.render            rewrite the blocks between markers
    python -m bench.render --check    exit 1 if a block is out of date (run by the tests)

A block is everything between `<!-- render: NAME -->` and `<!-- /render -->`; NAME is a key of TABLES.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from bench.rows import load, weights_of
from bench.scorecard_summary import CELLS, regimes
from engine.console import Parser, run
from engine.model.exchange import prediction_table

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "docs/performance.md")
EMPTY = "*Nothing measured yet.*"

Row = dict[str, Any]

_BLOCK = re.compile(r"(<!-- render: (?P<name>[\w-]+) -->\n).*?(<!-- /render -->)", re.DOTALL)
_DEPLOYMENT = (
    "model",
    "quantization",
    "kv_cache_dtype",
    "tp",
    "shard_of",
    "rows",
    "context",
    "gpu",
)
# Of the scorecard and of bench.peer_store: in their files only.
_UNSHOWN = ("stage_us", "topology", "section_", "part_failed", "peer_store", "exchange_traffic")
_KERNEL_METRICS = ("gemv_us", "attention_us", "gemm_us", "norm_us")
_BY_TOKENS = (
    "gemm_us",
    "ttft_p50_ms",
)  # grids whose columns are tokens, so that nothing else varies


def _size(row: Row) -> tuple:
    """Sort key: qwen2.5-7b before qwen2.5-72b, then quantisation and TP degree."""
    size = re.search(r"([\d.]+)b\b", row["model"] or "")
    return (
        float(size[1]) if size else 0.0,
        row["model"] or "",
        row["quantization"],
        row.get("kv_cache_dtype", ""),
        row["shard_of"] or 0,
        row["tp"],
        row["rows"] or 0,
        row["context"] or 0,
    )


def _number(value: float | None) -> str:
    """Three significant digits, or whole numbers above 1000."""
    if value is None:
        return ""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    if value == int(value):
        return str(int(value))
    return f"{value:.3g}" if abs(value) < 100 else f"{value:.1f}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}".replace("%", " %")


def _table(header: list[str], lines: Iterable[list[str]]) -> str:
    lines = list(lines)
    if not lines:
        return EMPTY
    keep = [i for i in range(len(header)) if any(line[i] for line in lines)]
    rule = ["---:" if i else "---" for i in range(len(header))]
    return "\n".join(
        "| " + " | ".join(line[i] for i in keep) + " |" for line in [header, rule, *lines]
    )


def _deployments(rows: list[Row], shards: bool) -> list[dict[str, Row]]:
    """Rows of one deployment together, by metric; `shards`: those that run another degree's shapes."""
    groups: dict[tuple, dict[str, Row]] = {}
    wanted = ("decode_tok_s", "ttft_ms", "startup_s")
    for row in rows:
        if row["metric"] in wanted and bool(row["shard_of"]) == shards:
            key = tuple(row.get(name) for name in _DEPLOYMENT if name != "context")
            # Start-up belongs to the deployment, whatever the context of its requests.
            context = None if row["metric"] == "startup_s" else row["context"]
            groups.setdefault((*key, context), {})[row["metric"]] = row
    merged = []
    for key, group in groups.items():
        if "decode_tok_s" in group:
            start = groups.get((*key[:-1], None), {})
            merged.append({**start, **group})
    return sorted(merged, key=lambda g: _size(g["decode_tok_s"]))


def _end_to_end(rows: list[Row], shards: bool = False) -> str:
    lines = []
    for group in _deployments(rows, shards):
        decode = group["decode_tok_s"]
        baseline = decode["baseline"]
        weights = weights_of(decode)
        weights += ", FP8 KV" if decode.get("kv_cache_dtype") == "fp8" else ""
        other = ""
        if baseline:
            ratio = decode["value"] / baseline["value"]
            other = f"{baseline['name']} {_number(baseline['value'])} ({ratio:.2f}x)"
        lines.append(
            [
                decode["model"],
                weights,
                f"{decode['tp']}" + (f" (shards of {decode['shard_of']})" if shards else ""),
                _number(decode["rows"]),
                _number(decode["context"]),
                _number(decode["value"]),
                _share(decode["share"]),
                _number(group["ttft_ms"]["value"]) if "ttft_ms" in group else "",
                _number(group["startup_s"]["value"]) if "startup_s" in group else "",
                other,
            ]
        )
    header = ["model", "weights", "TP", "rows", "prompt", "decode tok/s", "share of the roof"]
    return _table([*header, "TTFT ms", "start-up s", "baseline tok/s"], lines) + _foot(rows)


def _scorecard(rows: list[Row]) -> str:
    lines = []
    for weights, degree, what, found in regimes(rows):
        cells = [found.get(cell) for cell in CELLS]
        share = (cells[2] or {}).get("share")
        lines.append(
            [
                weights,
                f"{degree}",
                what,
                *(_number(c["value"]) if c else "" for c in cells),
                _share(share),
            ]
        )
    header = ["weights", "TP", "what", "TTFT ms, 512 tokens", "2048", "decode tok/s at 512"]
    return _table([*header, "at 8192", "share of the roof"], lines) + _foot(rows)


def _foot(rows: list[Row]) -> str:
    """Where and when the rows were measured."""
    places = sorted(
        {
            f"{r['gpu']}, driver {r['driver']}, torch {r['torch']}, Triton {r['triton']}"
            for r in rows
            if r["metric"] == "decode_tok_s"
        }
    )
    if not places:
        return ""
    dates = sorted(str(r["date"])[:10] for r in rows if r["metric"] == "decode_tok_s")
    when = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    return f"\n\n{'; '.join(places)}; {when}."


def _listing(rows: list[Row]) -> str:
    """One line a row, columns that no row uses left out."""
    lines = []
    for r in sorted(
        rows, key=lambda r: (r["metric"], r["algorithm"] or "", _size(r), r["bytes"] or 0)
    ):
        baseline = r["baseline"]
        lines.append(
            [
                r["metric"],
                r["algorithm"] or "",
                r["model"] or "",
                r["quantization"] if r["quantization"] != "none" else "",
                _number(r["tp"]) + (f" (shards of {r['shard_of']})" if r["shard_of"] else ""),
                _number(r["rows"]),
                _number(r["context"]),
                _number(r["bytes"]),
                f"{_number(r['value'])} {r['unit']}".strip(),
                _share(r["share"]),
                f"{baseline['name']} {_number(baseline['value'])}" if baseline else "",
            ]
        )
    header = ["metric", "algorithm", "model", "weights", "TP", "rows", "context", "bytes", "value"]
    return _table([*header, "share of the roof", "baseline"], lines)


def _grid(rows: list[Row], metric: str, column: str) -> str:
    """A line for each (algorithm, model, weights, TP, rows) without `column`, a column for each of its values.

    A cell: value (share of the roof; baseline / value, so above 1 is faster than the baseline).
    """
    rows = [r for r in rows if r["metric"] == metric]
    columns = sorted({r[column] for r in rows})
    fields = [name for name in ("rows", "context") if name != column and metric not in _BY_TOKENS]
    lines: dict[tuple, dict[int, str]] = {}
    for r in sorted(rows, key=lambda r: (r["algorithm"].split()[0], _size(r))):
        marks = [_share(r["share"])] if r["share"] is not None else []
        if r["baseline"]:
            marks.append(f"{r['baseline']['value'] / r['value']:.2f}x")
        key = (
            r["algorithm"],
            r["model"],
            r["quantization"],
            _number(r["tp"]),
            *(_number(r[f]) for f in fields),
        )
        lines.setdefault(key, {})[r[column]] = _number(r["value"]) + (
            f" ({'; '.join(marks)})" if marks else ""
        )
    body = [
        [key[0], key[1], "" if key[2] == "none" else key[2], *key[3:], *(cells.get(c, "") for c in columns)]
        for key, cells in lines.items()
    ]  # fmt: skip
    header = ["", "model", "weights", "TP", *fields, *(_number(c) for c in columns)]
    names = sorted({r["baseline"]["name"] for r in rows if r["baseline"]})
    against = f"; times as fast as {' or '.join(names)}" if names else ""
    unit = rows[0]["unit"] if rows else ""
    return _table(header, body) + (f"\n\n{unit} (share of the roof{against})." if rows else "")


def _attention(rows: list[Row], phase: str) -> list[Row]:
    """Prefill's rows are its tokens, which are its context here."""
    picked = [r for r in rows if r["metric"] == "attention_us" and r["algorithm"].startswith(phase)]
    return [{**r, "rows": 1} for r in picked] if phase == "prefill" else picked


def _kernels(rows: list[Row]) -> str:
    shown = (*_BY_TOKENS, "attention_us")
    return _listing(
        [r for r in rows if r["metric"] in _KERNEL_METRICS and r["metric"] not in shown]
    )


def _all_reduce(rows: list[Row]) -> str:
    names = ("all_reduce", "put_signal")
    rest = [r for r in rows if r["metric"].startswith(names) and r["metric"] != "all_reduce_us"]
    return _grid(rows, "all_reduce_us", "bytes") + (f"\n\n{_listing(rest)}" if rest else "")


def _other(rows: list[Row]) -> str:
    seen = (
        "all_reduce",
        "put_signal",
        "decode_tok_s",
        "ttft_ms",
        "startup_s",
        "ttft_p",
        "ttft_min",
        *_KERNEL_METRICS,
        *_UNSHOWN,
    )
    return _listing([r for r in rows if not r["metric"].startswith(seen)])


TABLES: dict[str, Callable[[list[Row]], str]] = {
    "end-to-end": _end_to_end,
    "scorecard": _scorecard,
    "shards": lambda rows: _end_to_end(rows, shards=True),
    "ttft": lambda rows: _grid(rows, "ttft_p50_ms", "context"),
    "decode-attention": lambda rows: _grid(_attention(rows, "decode"), "attention_us", "context"),
    "prefill-attention": lambda rows: _grid(_attention(rows, "prefill"), "attention_us", "context"),
    "gemm": lambda rows: _grid(rows, "gemm_us", "rows"),
    "kernels": _kernels,
    "all-reduce": _all_reduce,
    "all-reduce-predicted": prediction_table,
    "other": _other,
}


def render(text: str, rows: list[Row]) -> str:
    """`text` with every block filled. KeyError for a block whose name is not a table."""

    def fill(match: re.Match) -> str:
        # The scorecard measures again what others do, in another setting.
        own = [r for r in rows if (r["bench"] == "scorecard") == (match["name"] == "scorecard")]
        return f"{match[1]}{TABLES[match['name']](own)}\n{match[3]}"

    return _BLOCK.sub(fill, text)


def main(argv: list[str] | None = None) -> int:
    """0 if all is up to date or was written; 2 for an unknown argument."""
    return run(lambda: _main(argv))


def _main(argv: list[str] | None) -> int:
    parser = Parser(prog="python -m bench.render", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if out of date")
    args = parser.parse_args(argv)
    rows = load()
    stale = []
    for name in PAGES:
        page = ROOT / name
        old = page.read_text()
        new = render(old, rows)
        if new != old:
            stale.append(name)
            if not args.check:
                page.write_text(new)
    if args.check and stale:
        print(f"out of date: {', '.join(stale)}; run python -m bench.render", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
