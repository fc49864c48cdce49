"""The profiler on a device made of a clock: marks and subtraction must find the times that the launches take."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import lru_cache

import pytest

from engine.config import preset, with_layers
from engine.errors import EngineError
from engine.graph.build import build
from engine.graph.ir import make_op
from engine.graph.lower import Launch
from engine.graph.passes import run_passes
from engine.model import GPUS
from engine.profile import main
from engine.profiling import marks, plots, report, subtract
from engine.profiling.device import stand_in
from engine.profiling.session import Wanted, parse_phases

LAYERS = 10
US = {"embedding": 2.0, "qkv": 7.0, "attention": 4.0, "o_proj": 5.0, "all_reduce": 3.0, "gate_up": 20.0,
      "down": 11.0, "lm_head": 70.0, "sampling": 3.0}  # fmt: skip
MARK_US = 1.5  # what an event between two kernels costs here
PUSH_US = 1.0
MODEL = with_layers(preset("qwen2.5-7b"), LAYERS)


@lru_cache
def ops(phase="decode", rows=None):
    rows = rows or (8 if phase == "decode" else 32)  # 8: messages too large for a GEMV to poll
    return run_passes(build(MODEL, phase=phase, rows=rows, tp=2)).ops


class FakeEvent:
    def __init__(self, device):
        self.device, self.at = device, None

    def record(self):
        self.device.clock += MARK_US
        self.at = self.device.clock

    def elapsed_time(self, end):
        return (end.at - self.at) / 1e3


class FakeProgram:
    def __init__(self, lines):
        self.launches, self.freed = lines, False

    def free(self):
        self.freed = True


class FakeDevice:
    """Ranks one after the other on one clock; each launch takes its stage's time, rank 1's waits are longer."""

    def __init__(self, phase="decode", gap=0.0):
        self.clock, self.gap, self.made = 0.0, gap, []
        self.lines = [
            [self._launch(op, rank) for op in ops(phase) if op.kind != "argmax_push"]
            for rank in range(2)
        ]

    def _launch(self, op, rank):
        us = US[op.stage] + (2.0 if rank == 1 and op.kind == "poll_residual" else 0.0)

        def run():
            self.clock += us

        return Launch(op, op.kind, None, 0, op.kind, run)

    def program(self, lines):
        waits = [
            {op.op.attrs["site"] for op in line if op.op.kind == "poll_residual"} for line in lines
        ]
        sends = [
            {
                op.op.attrs["site"]
                for op in line
                if op.op.kind == "push" or op.op.attrs.get("epilogue") == "push"
            }
            for line in lines
        ]
        assert all(w <= s for w, s in zip(waits, reversed(sends))), "a wait whose peer never sends"
        self.made.append(FakeProgram(lines))
        return self.made[-1]

    def step_s(self, program):
        times = []
        for line in program.launches:
            begin = self.clock
            for launch in line:
                launch.run()
            times.append((self.clock - begin + self.gap) * 1e-6)
        return times

    def replay(self, program, times):
        for _ in range(times):
            self.step_s(program)

    def event(self):
        return FakeEvent(self)

    def stand_ins(self):
        def push(op):
            bare = make_op("push", op.out, op.stage, op.layer, {"site": op.attrs["site"]})
            return replace(self._launch(bare, 0), run=self._advance)

        own = {stand_in(op): push(op) for op in ops() if op.attrs.get("epilogue") == "push"}
        return [own, own]

    def _advance(self):
        self.clock += PUSH_US


ROOFS = {stage: report.Roof(int(us * 2e6), 0.0, us / 2) for stage, us in US.items()}


def profile(device, every, **facts):
    program = device.program(device.lines)
    bare = [seconds * 1e6 for seconds in device.step_s(program)]
    taken = marks.measure(device, program, every, samples=3)
    return report.from_marks(taken, bare, ROOFS, phase="decode", rows=1, context=8, **facts)


def test_segments_cover_the_line_and_mark_every_nth_layer():
    line = FakeDevice().lines[0]
    parts = marks.segments(line, 4)
    assert [i for p in parts for i in range(p.first, p.last + 1)] == list(range(len(line)))
    assert {p.layer for p in parts if not p.is_span and p.layer is not None} == {2, 6}
    assert [p.is_span for p in parts].count(True) == 3
    assert sum(sum(p.calls.values()) for p in parts) == len(line)
    assert [p.stage for p in parts if p.layer == 2 and not p.is_span] == [
        "qkv", "attention", "o_proj", "all_reduce", "gate_up", "down", "all_reduce"
    ]  # fmt: skip
    assert not any(p.is_span for p in marks.segments(line, 1))
    assert {p.layer for p in marks.segments(line, 1000) if not p.is_span} >= {LAYERS // 2}


def test_launches_of_one_stage_in_a_layer_are_one_segment():
    parts = marks.segments(FakeDevice("prefill").lines[0], 1)
    qkv = [p for p in parts if p.stage == "qkv" and p.layer == 0]
    assert len(qkv) == 1 and qkv[0].calls == {"qkv": 3}, "norm, GEMM and rope_append"


@pytest.mark.parametrize("every", [1, 4])
def test_marks_find_each_stages_time(every):
    result = profile(FakeDevice(), every)
    calls = {row.stage: row.calls for row in result.stages}
    assert calls["gate_up"] == LAYERS and calls["all_reduce"] == 2 * LAYERS
    assert result.accounted == pytest.approx(1.0, abs=0.01) and not any(
        "account" in n for n in result.notes()
    )
    for row in result.stages:
        each = US[row.stage] + (
            1.0 if row.stage == "all_reduce" else 0.0
        )  # mean of both ranks' waits
        # a segment also holds the event that ends it, in marked layers
        high = each + MARK_US
        assert each - 1e-6 <= row.us / row.calls <= high + 1e-6, row.stage
    total = sum(US[op.stage] for op in ops() if op.kind != "argmax_push")
    assert result.bare_us[0] == pytest.approx(total)
    assert result.profiled_us[0] == pytest.approx(total + MARK_US * result.marks)


def test_skew_is_the_difference_of_waits_and_names_who_came_late():
    found = profile(FakeDevice(), 4).skew
    assert found.exchanges == 2 * 2 * 3 and found.median_us == pytest.approx(2.0)
    assert found.late == (found.exchanges, 0), "rank 1 waits longer, so rank 0 came last"


def test_what_must_be_said_is_said():
    slow = profile(FakeDevice(), 1)
    assert slow.slowdown > report.TOLERABLE and any("--every" in note for note in slow.notes())
    gap = profile(FakeDevice(gap=100.0), 4)
    assert gap.accounted < report.ENOUGH
    assert "less than 95%" in report.table(gap) and "profiled step" in report.table(gap)


def test_subtraction_keeps_the_sends_that_peers_wait_for():
    device = FakeDevice()
    program = device.program(device.lines)
    added = {a.stage: a for a in subtract.added_by_stage(device, program)}
    assert set(added) == set(US)
    assert added["gate_up"].us == pytest.approx((LAYERS * 20.0, LAYERS * 20.0))
    assert added["all_reduce"].us == pytest.approx((2 * LAYERS * 3.0, 2 * LAYERS * 5.0))
    assert added["down"].us[0] == pytest.approx(LAYERS * (11.0 - PUSH_US))
    assert added["down"].kept == LAYERS and added["gate_up"].kept == 0
    assert all(p.freed for p in device.made[1:]) and not program.freed
    result = report.from_added(
        list(added.values()), [s * 1e6 for s in device.step_s(program)], ROOFS, phase="decode", rows=1, context=8
    )  # fmt: skip
    short = 2 * LAYERS * PUSH_US
    assert result.accounted == pytest.approx(1 - short / result.step_us, abs=1e-6)
    assert result.slowdown == 1.0


def test_a_gemv_that_polls_leaves_its_poll_behind():
    """Left out, it would leave a slot that nobody re-arms; and its segment is where a rank waits."""
    device = FakeDevice()
    line = [device._launch(op, 0) for op in ops(rows=1)]
    bare = {}
    for op in ops(rows=1):
        if stand_in(op) is not None:
            kind, site = stand_in(op)
            bare[kind, site] = device._launch(
                make_op(kind, op.out, op.stage, None, {"site": site}), 0
            )
    kept = {}
    for stage in ("gate_up", "o_proj", "attention"):
        rest = subtract.without(line, stage, bare)
        kept[stage] = [launch.op.kind for launch in rest if launch.op.stage == stage]
    assert kept == {
        "gate_up": ["poll_residual"] * LAYERS,
        "o_proj": ["push"] * LAYERS,
        "attention": [],
    }
    waits = {p.stage for p in marks.segments(line, 1) if p.waits}
    assert waits == {"gate_up", "qkv", "lm_head"}


def test_roof_and_share():
    row = report.StageRow("qkv", 4, (8.0, 12.0), report.Roof(40_000_000, 0.0, 5.0))
    assert row.us == 10.0 and row.share == 0.5 and row.tb_s == pytest.approx(4.0)
    assert report.StageRow("x", 1, (-1.0,), report.Roof(1, 0.0, 1.0)).share is None
    roofs = report.stage_roofs(
        MODEL, 1, phase="prefill", rows=512, context=0, fp8=False, shard_of=None,
        gpu=GPUS["h200"],
    )  # fmt: skip
    rows = (LAYERS - 1) * 512 + 1  # of the last layer only the last
    flops = rows * 2 * 2 * 18944 * 3584
    assert roofs["gate_up"].flops == flops
    assert roofs["gate_up"].us >= flops / 989e12 * 1e6, "bound by arithmetic at 512 tokens"


def test_trace_has_both_ranks_aligned_at_an_exchange(tmp_path):
    result = profile(FakeDevice(), 4)
    trace = json.loads(json.dumps(plots.trace([result])))
    pieces = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    ends = [
        next(e["ts"] + e["dur"] for e in pieces if e["tid"] == rank and e["name"] == "all_reduce")
        for rank in (0, 1)
    ]
    assert ends[0] == pytest.approx(ends[1])
    for rank in (0, 1):
        own = sorted((e for e in pieces if e["tid"] == rank), key=lambda e: e["ts"])
        assert all(a["ts"] + a["dur"] == pytest.approx(b["ts"]) for a, b in zip(own, own[1:]))  # noqa: RUF007
    pytest.importorskip("matplotlib")
    plots.draw([result], "title", tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes()[:4] == b"\x89PNG"


def test_json_holds_what_the_table_shows():
    content = json.loads(json.dumps(report.as_json(profile(FakeDevice(), 4))))
    assert content["accounted"] > 0.95 and content["skew"]["late"][1] == 0
    assert {row["stage"] for row in content["stages"]} == set(US)
    assert all(len(row["rank_us"]) == 2 for row in content["stages"])


def test_a_stored_profile_shows_the_same(capsys, tmp_path):
    first = profile(FakeDevice(), 4)
    again = report.from_json(json.loads(json.dumps(report.as_json(first))))
    assert report.table(again) == report.table(first) and again.skew == first.skew
    file, picture = tmp_path / "p.json", tmp_path / "p.png"
    assert main([*DUMMY, "--tp", "8", "--input-len", "5000", "--json", str(file)]) == 0
    said = capsys.readouterr().out.split("\n\n", 1)[1]  # behind the model's constants
    assert main(["--from", str(file)]) == 0
    title, shown = capsys.readouterr().out.split("\n\n", 1)
    assert shown == said and title.startswith("qwen2.5-72b fp8 TP=8, ")
    pytest.importorskip("matplotlib")
    assert main(["--from", str(file), "--png", str(picture)]) == 0
    assert picture.read_bytes()[:4] == b"\x89PNG"


def test_a_stored_profile_is_not_written_over(capsys, tmp_path):
    file = tmp_path / "p.json"
    assert main([*DUMMY, "--json", str(file)]) == 0
    before = file.read_text()
    capsys.readouterr()
    for flags in (["--trace", str(file)], ["--json", "x.json"], ["--png", str(tmp_path / "x.svg")]):
        assert main(["--from", str(file), *flags]) == 2
        assert capsys.readouterr().err.startswith("error: --")
    assert file.read_text() == before


@pytest.mark.parametrize("change", ["quantization", "shard_of", "input_len", "bare_us", "phases"])
def test_a_profile_that_was_edited_is_one_line(change, capsys, tmp_path):
    file = tmp_path / "p.json"
    assert main([*DUMMY, "--json", str(file)]) == 0
    content = json.loads(file.read_text())
    if change == "bare_us":
        content["phases"][0]["bare_us"] = []
    elif change in ("quantization", "shard_of"):
        del content[change]
    else:
        content[change] = {"input_len": "abc", "phases": []}[change]
    file.write_text(json.dumps(content))
    capsys.readouterr()
    assert main(["--from", str(file)]) == 2
    said = capsys.readouterr()
    assert not said.out and said.err.startswith(f"error: --from {file}: not a profile")


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"phases": [{"phase": "decode"}]}'])
def test_a_file_that_is_no_profile_is_one_line(content, capsys, tmp_path):
    file = tmp_path / "p.json"
    file.write_text(content)
    assert main(["--from", str(file)]) == 2
    assert capsys.readouterr().err.startswith(f"error: --from {file}: not a profile")
    assert main(["--from", str(tmp_path / "absent.json")]) == 2
    assert "not a profile" in capsys.readouterr().err


def test_wanted_is_checked():
    assert parse_phases("prefill,decode") == ("prefill", "decode")
    for bad in (
        lambda: Wanted(rows=3),
        lambda: Wanted(every=0),
        lambda: parse_phases("decode,train"),
    ):
        with pytest.raises(EngineError):
            bad()


DUMMY = [
    "--model",
    "qwen2.5-72b",
    "--load-format",
    "dummy",
    "-q",
    "fp8",
    "--device",
    "cpu",
    "--quiet",
]


def test_without_a_gpu_the_command_predicts(capsys, tmp_path):
    out = tmp_path / "p.json"
    assert main([*DUMMY, "--tp", "8", "--json", str(out), "--trace", str(tmp_path / "t.json")]) == 0
    said = capsys.readouterr()
    assert "no CUDA device" in said.err and "prediction" in said.out and "gate_up" in said.out
    phases = json.loads(out.read_text())["phases"]
    assert [p["phase"] for p in phases] == ["decode", "prefill"] and phases[0][
        "method"
    ] == "predicted"
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]


def test_a_prompt_of_several_chunks_says_that_it_shows_the_first(capsys):
    note = "note: the first chunk, of 2048 tokens, of a prompt of 5000"
    assert main([*DUMMY, "--phase", "prefill", "--input-len", "5000"]) == 0
    assert note in capsys.readouterr().out
    assert main([*DUMMY, "--phase", "decode", "--input-len", "5000"]) == 0
    assert main([*DUMMY, "--phase", "prefill", "--input-len", "2048"]) == 0
    assert "first chunk" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "args",
    [
        ["--rows", "3"],
        ["--phase", "x"],
        ["--gpu", "a100"],
        ["--input-len", "32769"],
        ["--layers", "1000"],
        ["--layers", "0"],
    ],
)
def test_bad_arguments_are_one_line(args, capsys):
    assert main([*DUMMY, *args]) == 2
    assert capsys.readouterr().err.strip().splitlines()[-1].startswith("error: ")


@pytest.mark.parametrize("flag", ["--json", "--trace", "--png"])
def test_an_output_that_cannot_be_written_is_said_first(flag, capsys):
    assert main([*DUMMY, flag, "/dev/null/x"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err == f"error: {flag} /dev/null/x: Not a directory\n"
