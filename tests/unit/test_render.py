"""Tables made from result rows; the committed pages are up to date with bench/results."""

from __future__ import annotations

import json
import re

import pytest

from bench import render
from bench.rows import RESULTS


def row(metric, value, unit="", **facts):
    base = {
        "bench": "latency", "model": "qwen2.5-7b", "quantization": "none", "tp": 1, "shard_of": None,
        "rows": 1, "context": 512, "bytes": None, "algorithm": None, "metric": metric, "value": value,
        "unit": unit, "share": None, "baseline": None, "gpu": "NVIDIA H200", "gpus": 1,
        "torch": "2.11.0", "triton": "3.6.0", "driver": "580", "commit": "abc", "date": "2026-11-30 05:00",
        "command": "python -m bench.latency",
    }  # fmt: skip
    return {**base, **facts}


ROWS = [
    row("decode_tok_s", 88.8, "tok/s", model="qwen2.5-72b", quantization="fp8", tp=2, share=0.764),
    row(
        "decode_tok_s", 251.5, "tok/s", share=0.8234, baseline={"name": "vLLM 0.24", "value": 210.0}
    ),
    row("ttft_ms", 12.34, "ms"),
    row("startup_s", 5.5, "s", context=None),
    row("decode_tok_s", 301.0, "tok/s", model="qwen2.5-72b", quantization="fp8", tp=2, shard_of=8),
    row(
        "all_reduce_us",
        2.3,
        "us",
        bench="all_reduce",
        bytes=16384,
        algorithm="push",
        model="",
        tp=2,
    ),
    row("gemv_us", 64.6, "us", bench="gemv", share=0.88),
    row("soak_last_over_first", 0.999, "", bench="soak"),
]


def test_deployments_become_lines_with_their_metrics():
    table = render.TABLES["end-to-end"](ROWS)
    lines = [re.sub(r" +", " ", line) for line in table.split("\n")]
    assert lines[2].startswith("| qwen2.5-7b | BF16 | 1 | 1 | 512 | 251.5 | 82 % | 12.3 | 5.5 |")
    assert "vLLM 0.24 210 (1.20x)" in lines[2]
    assert lines[3].startswith("| qwen2.5-72b | FP8 | 2 |"), "7B comes before 72B"
    assert "301" not in table and "NVIDIA H200, driver 580" in table and "2026-11-30" in table
    shards = render.TABLES["shards"](ROWS)
    assert "2 (shards of 8)" in shards and "301" in shards and "251.5" not in shards


def test_every_row_is_in_some_table():
    page = "\n".join(make(ROWS) for make in render.TABLES.values())
    for value in ("88.8", "251.5", "12.3", "5.5", "301", "2.3", "64.6 us", "0.999"):
        assert value in page
    assert "16,384" in render.TABLES["all-reduce"](ROWS)


def test_blocks_are_replaced_and_nothing_else():
    text = "a\n<!-- render: all-reduce -->\nold\n<!-- /render -->\nb\n"
    new = render.render(text, ROWS)
    assert new.startswith("a\n<!-- render: all-reduce -->\n|  | TP |") and new.endswith("\nb\n")
    assert "old" not in new and render.render(new, ROWS) == new
    empty = render.render(text, [])
    assert render.EMPTY in empty
    with pytest.raises(KeyError):
        render.render(text.replace("all-reduce", "absent"), ROWS)


def test_the_scorecard_has_a_table_of_its_own():
    """It measures the same deployments in another setting; neither may hide the other."""
    again = row("decode_tok_s", 77.7, "tok/s", bench="scorecard", model="qwen2.5-7b", context=512)
    block = "<!-- render: {} -->\n<!-- /render -->"
    own, whole = (
        render.render(block.format(name), [*ROWS, again]) for name in ("scorecard", "end-to-end")
    )
    assert "77.7" in own and "251.5" not in own
    assert "251.5" in whole and "77.7" not in whole


def test_a_file_that_is_not_rows_is_named(tmp_path):
    (tmp_path / "x.json").write_text(json.dumps({"a": 1}))
    with pytest.raises(ValueError, match=r"x\.json"):
        render.load(tmp_path)


def test_the_committed_pages_are_up_to_date(capsys):
    assert render.main(["--check"]) == 0, capsys.readouterr().err
    for name in render.PAGES:
        assert "render: " in (render.ROOT / name).read_text()
    assert render.load(RESULTS) == render.load()


def test_help_and_unknown_arguments_write_nothing(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(render, "ROOT", tmp_path)
    monkeypatch.setattr(render, "PAGES", ("page.md",))
    page = tmp_path / "page.md"
    page.write_text("<!-- render: gemm -->\nold\n<!-- /render -->\n")
    with pytest.raises(SystemExit, match="0"):
        render.main(["--help"])
    assert "--check" in capsys.readouterr().out
    assert render.main(["--chekc"]) == 2 and "--chekc" in capsys.readouterr().err
    assert "old" in page.read_text()
    assert render.main([]) == 0 and "old" not in page.read_text()
