"""bench/scorecard.py without a GPU: the plan for every machine, sections that fail, and forecasts that say so."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from bench import render, scorecard, scorecard_parts, scorecard_summary
from bench.deployment import parse
from bench.rows import Rows
from bench.scorecard import Scorecard, Section, plan
from engine.config import preset
from engine.errors import EngineError
from engine.model import gpu_named
from engine.model.calibrate import usable

BIG = preset("qwen2.5-72b")


@pytest.mark.parametrize("gpus", [1, 2, 4, 8])
def test_the_plan_covers_every_degree_within_the_limit(gpus):
    sections = plan(gpus)
    by_name = {s.name: s for s in sections}
    assert len(by_name) == len(sections) and sections[0].name == "links"
    assert sum(s.seconds for s in sections) <= scorecard.TIME_LIMIT_S < 600
    assert all(1 <= s.gpus <= gpus for s in sections)
    for degree in (1, 2, 4, 8):
        for weights in ("fp8", "bf16"):
            real, share = f"{weights}-tp{degree}", f"{weights}-tp{degree}-share"
            fits = (weights, degree) != ("bf16", 1)  # 145 GB of weights on a card of 141 GB
            assert (real in by_name) == (fits and degree <= gpus)
            assert (share in by_name) == (degree > gpus and degree >= 4)
            if real in by_name:
                assert by_name[real].kind == "real" and by_name[real].gpus == degree
            if share in by_name:
                assert by_name[share].kind == "share" and by_name[share].gpus == gpus
                assert by_name[share].command[-1].endswith(f":{gpus}:{degree}")
        if degree > 1:
            assert (f"all-reduce-tp{degree}" in by_name) == (degree <= gpus)
        assert (f"virtual-tp{degree}" in by_name) == (degree > gpus and degree >= 4)
    soaks = [s.name for s in sections if "--soak" in s.command]
    assert soaks == [f"fp8-tp{gpus}"], "the soak runs at the largest degree, once"


def test_a_machine_of_three_gpus_is_used_as_two():
    assert [s.name for s in plan(3)] == [s.name for s in plan(2)]


def test_dry_run_prints_the_plan_and_needs_no_gpu(capsys):
    assert scorecard.main(["--dry-run", "--gpus", "8"]) == 0
    text = capsys.readouterr().out
    assert "engine qwen2.5-72b:fp8:8 --soak" in text and "beyond the limit" not in text
    assert scorecard.main(["--dry-run", "--gpus", "1", "--time-limit", "300"]) == 0
    assert "beyond the limit" in capsys.readouterr().out
    assert scorecard.main(["--dry-run", "--gpus", "2", "--sections", "links,fp8-tp9"]) == 2
    assert "error: no section fp8-tp9" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--dry-run", "--gpus", "2", "--model", "gpt-9"], "gpt-9"),
        (["--dry-run", "--gpus", "-1"], "--gpus -1 is not 1 or more"),
        (["--dry-run", "--gpus", "x"], "--gpus"),
        (["--dry-run", "--gpus", "2", "--time-limit", "nan"], "--time-limit nan is not"),
        (["--dry-run", "--gpus", "2", "--time-limit", "-5"], "--time-limit -5.0 is not"),
        (["--gpus", "8"], "--dry-run --gpus N prints a plan for N"),
    ],
)
def test_errors_are_one_line(args, message, capsys):
    assert scorecard.main(args) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and message in err and err.count("\n") == 1


def test_a_model_that_does_not_divide_is_planned_for_its_degrees(capsys, monkeypatch):
    odd = replace(preset("qwen2.5-7b"), num_heads=12, num_kv_heads=4)
    assert odd.valid_tp() == [1, 2, 4]
    monkeypatch.setattr(scorecard, "preset", lambda name: odd)
    assert scorecard.main(["--dry-run", "--gpus", "8"]) == 0
    text = capsys.readouterr().out
    assert "fp8-tp4 " in text and "fp8-tp8" not in text and "all-reduce-tp8" in text
    assert scorecard.main(["--dry-run", "--gpus", "1"]) == 0
    text = capsys.readouterr().out
    assert "virtual-tp4" in text and "fp8-tp4-share" in text and "virtual-tp8" not in text


def section(how: str, seconds: float = 30.0) -> Section:
    return Section(how, "real", 1, seconds, ("tests.unit.scorecard_stub", how))


def kept(folder):
    rows = json.loads((folder / "scorecard.json").read_text())
    assert {row["bench"] for row in rows} == {"scorecard"}
    return [(row["section"], row["metric"]) for row in rows]


def test_a_section_that_fails_is_a_row_and_costs_no_other(tmp_path, monkeypatch):
    monkeypatch.setattr(scorecard, "LEAST_S", 1.0)
    card = Scorecard(tmp_path)
    card.run(section("raise"), 100.0)
    card.run(section("part"), 100.0)
    card.run(section("hang"), 12.0)
    card.run(section("late"), 0.5)
    card.run(section("good"), 100.0)
    assert kept(tmp_path) == [
        ("raise", "all_reduce_us"), ("raise", "section_failed"),
        ("part", "all_reduce_us"), ("part", "part_failed"), ("part", "section_s"),
        ("hang", "all_reduce_us"), ("hang", "section_failed"),
        ("late", "section_failed"),
        ("good", "all_reduce_us"), ("good", "section_s"),
    ]  # fmt: skip
    reasons = {r["section"]: r["algorithm"] for r in card.rows.rows if r["metric"] in scorecard_summary.FAILED}  # fmt: skip
    assert "exit code 1" in reasons["raise"] and "no such link" in reasons["raise"]
    assert "out of time after 12 s" in reasons["hang"] and "no time" in reasons["late"]
    assert "not measured: late: no time" in scorecard_summary.summary(card.rows.rows)

    resumed = Scorecard(tmp_path)  # keeps what is whole, and does the rest again
    assert resumed.done == {"good"}
    resumed.run(section("good"), 100.0)
    resumed.run(section("late"), 100.0)
    assert kept(tmp_path) == [(s, m) for s in ("good", "late") for m in ("all_reduce_us", "section_s")]  # fmt: skip
    assert Scorecard(tmp_path, again=True).done == set()


def measured(text: str, metric: str, value: float, context: int) -> list[dict]:
    rows = Rows("scorecard", write=False)
    unit = "tok/s" if metric == "decode_tok_s" else "ms"
    scorecard_parts.add(rows, parse(text), BIG, metric, value, unit, context, mean_context=560)
    return [{**row, "gpu": "NVIDIA H200"} for row in rows.rows]


@pytest.mark.parametrize("metric,value", [("decode_tok_s", 290.0), ("ttft_ms", 32.0)])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_forecast_is_marked_and_never_a_measurement(metric, value, ranks):
    share, forecast = measured(f"qwen2.5-72b:fp8:{ranks}:8", metric, value, 512)
    assert (share["metric"], share["tp"], share["shard_of"]) == (metric, ranks, 8)
    assert forecast["metric"] == f"predicted_{metric}"
    assert (forecast["tp"], forecast["shard_of"]) == (8, None)
    assert forecast["algorithm"].startswith("PREDICTION from one rank's share")
    assert re.search(r"\d\d\d waits among 8 ranks", forecast["assumptions"])
    assert f"{value:.4g}" in forecast["assumptions"] and "constants:" in forecast["assumptions"]
    slower = forecast["value"] < value if metric == "decode_tok_s" else forecast["value"] > value
    assert slower, "the whole node exchanges among more ranks"

    text = scorecard_summary.summary([share, forecast])
    [line] = [line for line in text.splitlines() if "  8  PREDICTED" in line]
    assert "one rank's share" in line
    assert forecast["assumptions"] in text, "printed beside the figure"
    if metric == "decode_tok_s":
        assert "(PREDICTED)" in text.splitlines()[-1], "a target met on paper says so"
    assert forecast["algorithm"] not in render.TABLES["end-to-end"]([share, forecast])
    table = render.TABLES["scorecard"]([share, forecast]).splitlines()
    assert "one rank's share on" in table[2] and "PREDICTED from one rank's share" in table[3]
    assert render.TABLES["end-to-end"]([forecast]) == render.TABLES["end-to-end"]([])
    assert usable([share, forecast], metric, gpu_named("h200")) == [], "nothing is fitted to it"


def test_the_all_reduce_of_larger_degrees_is_a_forecast_from_the_rows_at_hand():
    rows = Rows("scorecard", write=False)
    rows._environment |= {"gpu": "NVIDIA H200", "gpus": 2, "commit": "abc"}
    for name, value in (("copy_kernel", 1.2), ("lamport_fused", 2.6), ("flag", 4.0)):
        rows.add("all_reduce_us", value, "us", tp=2, bytes=16384, algorithm=name)
    scorecard.forecast_all_reduce(rows, 2)
    added = rows.rows[3:]
    assert {row["tp"] for row in added} == {4, 8} and len(added) >= 6
    for row in added:
        assert row["metric"] == "predicted_all_reduce_us" and row["value"] > 1.2
        assert row["algorithm"].startswith("PREDICTION ") and "at abc" in row["assumptions"]
    names = {row["algorithm"].split()[1] for row in added}
    assert names == {"lamport", "two_shot", "two_shot_fp8", "flag"}
    assert all(row["bytes"] >= 1 << 20 for row in added if "two_shot" in row["algorithm"])
    with pytest.raises(EngineError, match="no figures for the GPU"):
        scorecard.forecast_all_reduce(Rows("scorecard", write=False), 2)


def test_what_is_measured_has_no_forecast():
    [row] = measured("qwen2.5-72b:fp8:2", "decode_tok_s", 102.0, 512)
    assert row["metric"] == "decode_tok_s" and "assumptions" not in row
    [row] = measured("qwen2.5-72b:fp8:2:8", "ttft_ms", 300.0, 8192)
    assert row["metric"] == "ttft_ms", "prompts that run in chunks have no forecast"


def test_the_verdicts_name_what_falls_and_what_misses():
    def row(tp, value, metric="decode_tok_s"):
        return {"metric": metric, "quantization": "fp8", "tp": tp, "shard_of": None, "context": 512, "value": value}  # fmt: skip

    rising = [row(1, 55.0), row(2, 102.0), row(8, 310.0, "predicted_decode_tok_s")]
    lines = scorecard_summary.verdicts(rising)
    assert lines[0].startswith("fp8: decode rises") and "TP8 310.0 (PREDICTED)" in lines[0]
    assert lines[1] == "target fp8 TP8 300 tok/s: reached, 310.0 (PREDICTED)"
    lines = scorecard_summary.verdicts([*rising, row(8, 38.0)])
    assert "DOES NOT RISE" in lines[0] and "TP8 38.0 (measured)" in lines[0]
    assert "MISSED" in lines[1]
