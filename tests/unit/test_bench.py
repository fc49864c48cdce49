"""engine bench: figures from known times, verdicts, the sweep's lines, and what the commands say without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from argparse import Namespace

import numpy as np
import pytest

from engine.bench import latency, startup, sweep
from engine.bench.compare import MARGIN, against, changes, read_rows, verdicts
from engine.bench.main import SCRIPTS, main
from engine.bench.rows import Rows
from engine.bench.timing import Batch, percentile, random_prompts, run_batch
from engine.config import EngineConfig, preset
from engine.console import check_output
from engine.errors import EngineError, RequestError
from engine.model import scaling
from engine.model.calibrate import PRIOR
from engine.outputs import Delta
from tests.unit.fakes import write_model


class FakeLLM:
    """Gives the tokens of two requests in turn."""

    def __init__(self, tokens=4):
        self.tokens = tokens

    def stream_many(self, prompts, params, arrival):
        assert params.ignore_eos and params.temperature == 0
        for i in range(self.tokens):
            for request in range(len(prompts)):
                yield request, Delta("", [100 * request + i])


def test_a_batch_follows_every_token():
    batch = run_batch(FakeLLM(), [[1, 2], [3]], 4)
    assert batch.tokens == ((0, 1, 2, 3), (100, 101, 102, 103))
    assert len(batch.ttft) == 2 and len(batch.itl) == 6 and len(batch.tpot) == 2
    assert 0 < batch.ttft[0] < batch.ttft[1] < batch.latency
    assert sum(batch.itl) == pytest.approx(3 * sum(batch.tpot))
    assert run_batch(FakeLLM(1), [[1]], 1).tpot == ()
    with pytest.raises(RequestError, match="4 of 5"):
        run_batch(FakeLLM(), [[1]], 5)


def test_percentiles_are_numpys():
    values = list(np.random.default_rng(0).normal(size=37))
    for p in (0, 10, 50, 90, 99, 100):
        assert percentile(values, p) == pytest.approx(np.percentile(values, p))


def test_prompts_are_reproducible_ids():
    a = random_prompts(3, 5, 100, seed=1)
    assert a == random_prompts(3, 5, 100, seed=1) != random_prompts(3, 5, 100, seed=2)
    assert all(len(p) == 5 and 0 <= min(p) <= max(p) < 100 for p in a)


BATCHES = [
    Batch(latency=0.5 + i / 100, ttft=(0.1, 0.12), tpot=(0.004, 0.005), itl=(0.003, 0.005, 0.006),
          tokens=((1, 2), (3, 4)))
    for i in range(3)
]  # fmt: skip
ARGS = Namespace(batch_size=2, input_len=512, output_len=256)


def test_summary_has_vllms_keys_and_the_rest_in_ms():
    result = latency.summary(BATCHES, 256)
    assert result["avg_latency"] == pytest.approx(0.51) and len(result["latencies"]) == 3
    assert list(result["percentiles"]) == ["10", "25", "50", "75", "90", "99"]
    assert result["ttft_ms"]["p50"] == pytest.approx(110) and result["itl_ms"]["p50"] == 5
    assert result["output_tok_s"] == pytest.approx(3 * 512 / 1.53) and result["answers_equal"]
    rate = latency.decode_rate(result, 2)
    assert rate == pytest.approx(2 / 0.0045)
    roof = {"copy_bandwidth": 4e12, "weight_bytes": 10e9, "kv_bytes_per_token": 1e5}
    moved = 10e9 + 2 * 640 * 1e5
    share = latency.step_share(result, roof, ARGS)
    assert share == pytest.approx(moved / 4e12 / 0.0045)
    assert latency.step_share(result, None, ARGS) is None
    text = latency.report(result, share, rate)
    assert "Avg latency: 0.51 seconds" in text and "99% percentile" in text and "TTFT" in text
    other = latency.summary([BATCHES[0], Batch(0.5, (0.1,), (0.1,), (0.1,), ((9,),))], 256)
    assert "different answers" in latency.report(other, None, None)


def rows_of(**metrics):
    rows = Rows("bench_latency", write=False)
    for metric, value in metrics.items():
        unit = "tok/s" if metric.endswith("tok_s") else "ms"
        rows.add(metric, value, unit, model="qwen2.5-7b", tp=2, context=512)
    return rows.rows


def test_a_verdict_for_each_regime():
    old = rows_of(decode_tok_s=100.0, tpot_ms=10.0, ttft_ms=20.0)
    same = rows_of(decode_tok_s=100.0 * (1 - MARGIN / 2), tpot_ms=10.1, ttft_ms=20.0)
    text, slower = verdicts(changes(old, same))
    assert not slower and "qwen2.5-7b tp=2 rows=1 context=512: same" in text
    text, slower = verdicts(changes(old, rows_of(decode_tok_s=90.0, ttft_ms=10.0)))
    assert slower and ": slower" in text and "-10.0%" in text and "+100.0%" in text
    text, slower = verdicts(changes(old, rows_of(decode_tok_s=110.0)))
    assert not slower and ": faster" in text
    other = [{**row, "tp": 4} for row in rows_of(decode_tok_s=1.0)]
    assert changes(old, other) == [], "another regime is never compared"
    both = [*rows_of(decode_tok_s=99.9), *other]
    assert [c.metric for c in changes([*old, {**other[0], "value": 2.0}], both)] == [
        "decode_tok_s"
    ] * 2


def test_worst_cases_are_shown_and_decide_nothing():
    text, slower = verdicts(changes(rows_of(itl_p99_ms=10.0), rows_of(itl_p99_ms=20.0)))
    assert not slower and ": same" in text and "slower" in text


def test_rows_are_read_from_either_form(tmp_path):
    file = tmp_path / "a.json"
    rows = rows_of(tpot_ms=1.0)
    for content in (rows, {"avg_latency": 1.0, "rows": rows}):
        file.write_text(json.dumps(content))
        assert read_rows(file) == rows
    for bad in ("{}", "[1]", "nonsense"):
        file.write_text(bad)
        with pytest.raises(EngineError, match=r"a\.json"):
            read_rows(file)
    with pytest.raises(EngineError, match="absent"):
        read_rows(tmp_path / "absent.json")


def test_how_a_degree_is_run():
    config = EngineConfig(model="qwen2.5-72b", load_format="dummy")
    assert sweep.deployment(config, 2, 2, False).tensor_parallel_size == 2
    assert sweep.deployment(config, 8, 2, False) is None
    shard = sweep.deployment(config, 8, 3, True)
    assert (shard.tensor_parallel_size, shard.shard_of) == (2, 8)
    assert sweep.deployment(config, 8, 0, True) is None
    assert sweep.deployment(EngineConfig(model="x"), 8, 2, True) is None, (
        "shards need dummy weights"
    )
    assert sweep.degrees_of(preset("qwen2.5-7b"), None) == [1, 2, 4]
    with pytest.raises(EngineError, match="valid degrees"):
        sweep.degrees_of(preset("qwen2.5-7b"), "1,8")
    with pytest.raises(EngineError, match="1,2,4,8"):
        sweep.degrees_of(preset("qwen2.5-7b"), "all")


def test_amdahl_fit_finds_the_serial_part():
    points = [sweep.Measured(n, n, 1 / (0.001 + 0.020 / n)) for n in (1, 2, 4)]
    serial, parallel = sweep.amdahl_fit(points)
    assert serial == pytest.approx(0.001) and parallel == pytest.approx(0.020)
    assert sweep.amdahl_fit(points[:1]) is None


def test_the_sweep_shows_points_beside_both_lines(tmp_path):
    points = scaling(preset("qwen2.5-72b"), [1, 2, 8], quantization="fp8", constants=PRIOR["fp8"])
    measured = [sweep.Measured(1, 1, 47.0), sweep.Measured(2, 2, 90.0), sweep.Measured(8, 2, 280.0)]
    text = sweep.table(points, measured)
    assert "280.0*" in text and "fewer ranks" in text and "1.91" in text
    assert (
        "does the slope go up? yes (measured; TP 1 -> 2: x1.91" in text and "do not shrink" in text
    )
    worse = sweep.table(points, [measured[0], sweep.Measured(2, 2, 40.0)])
    assert "does the slope go up? no" in worse
    assert "(predicted;" in sweep.table(points, [])
    pytest.importorskip("matplotlib")
    sweep.draw("title", points, measured, str(tmp_path / "s.png"))
    assert (tmp_path / "s.png").stat().st_size > 5000


# ---- command lines


@pytest.mark.parametrize("name", SCRIPTS)
def test_kernel_scripts_say_what_is_missing(name, capsys, monkeypatch, tmp_path):
    import torch

    if not torch.cuda.is_available():
        assert main([name]) == 2
        assert "no CUDA device" in capsys.readouterr().err
    monkeypatch.setattr("engine.bench.main.ROOT", tmp_path)
    assert main([name]) == 2
    assert "part of the repository" in capsys.readouterr().err


def test_every_script_is_in_the_repository():
    from engine.bench.main import ROOT

    assert all((ROOT / "bench" / f"{script}.py").is_file() for script in SCRIPTS.values())


def test_usage_and_unknown_commands(capsys):
    assert main(["--help"]) == 0 and "sweep" in capsys.readouterr().out
    assert main(["train"]) == 2 and "latency, sweep" in capsys.readouterr().err
    assert main(["latency", "--batch-size", "9"]) == 2 and "1 to 8" in capsys.readouterr().err
    assert main(["latency", "--num-iters", "0"]) == 2


def test_the_defaults_are_vllms():
    from engine.console import Parser

    p = Parser()
    latency.add_options(p)
    args = p.parse_args([])
    assert (args.input_len, args.output_len, args.batch_size) == (32, 128, 8)
    assert (args.num_iters, args.num_iters_warmup) == (30, 10)


def test_a_sweep_without_a_gpu_is_a_prediction(capsys, tmp_path):
    out = tmp_path / "s.json"
    argv = ["sweep", "--model", "qwen2.5-72b", "--load-format", "dummy", "-q", "fp8", "--device", "cpu",
            "--gpu", "h100", "--output-json", str(out)]  # fmt: skip
    assert main(argv) == 0
    said = capsys.readouterr()
    assert (
        "NVIDIA H100" in said.out and "predicted" in said.out and "nothing is measured" in said.err
    )
    content = json.loads(out.read_text())
    assert [line["tp"] for line in content["lines"]] == [1, 2, 4, 8] and content["points"] == []


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A tiny model, weights random."""
    return str(write_model(tmp_path_factory.mktemp("model"), positions=256))


def test_latency_of_a_real_engine_on_the_cpu(directory, tmp_path, capsys):
    out = tmp_path / "l.json"
    argv = ["latency", directory, "--load-format", "dummy", "--device", "cpu", "--input-len", "8",
            "--output-len", "5", "--batch-size", "2", "--num-iters", "2", "--num-iters-warmup", "1"]  # fmt: skip
    assert main([*argv, "--output-json", str(out)]) == 0
    err = capsys.readouterr().err
    assert err.startswith(f"loading {directory}\nwarm-up 1 of 1\niteration 1 of 2\n")
    content = json.loads(out.read_text())
    assert len(content["latencies"]) == 2 and content["answers_equal"] and content["roof"] is None
    assert {r["metric"] for r in content["rows"]} >= {
        "latency_ms",
        "ttft_ms",
        "tpot_ms",
        "itl_ms",
        "decode_tok_s",
    }
    for row in content[
        "rows"
    ]:  # an engine a thousand times faster before: every regime is slower now
        row["value"] *= 1000 if row["unit"] == "tok/s" else 1e-3
    out.write_text(json.dumps(content))
    assert main([*argv, "--compare", str(out)]) == 1
    assert ": slower" in capsys.readouterr().out


def test_startup_in_processes_of_their_own(directory, capsys):
    argv = ["startup", directory, "--load-format", "dummy", "--device", "cpu"]
    assert main([*argv, "--num-iters-cold", "1", "--num-iters-warm", "0"]) == 0
    out = capsys.readouterr().out
    assert "cold start-up: avg" in out and "load" in out and "warm" not in out
    assert main([*argv, "--num-iters-cold", "0", "--num-iters-warm", "0"]) == 2
    with pytest.raises(EngineError, match=r"did not start.*no such directory"):
        startup.once(EngineConfig(model="/nowhere/at/all"), "/tmp")


def test_the_module_runs():
    done = subprocess.run(
        [sys.executable, "-m", "engine.bench"], capture_output=True, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 2 and "startup" in done.stdout


@pytest.mark.parametrize("command", ["latency", "sweep", "startup"])
def test_an_output_that_cannot_be_written_is_said_before_the_work(command, capsys, monkeypatch):
    def nothing(*_):
        raise AssertionError("measured first")

    monkeypatch.setattr("engine.bench.latency.measure", nothing)
    monkeypatch.setattr("engine.bench.sweep._gpus", nothing)
    monkeypatch.setattr("engine.bench.startup.once", nothing)
    argv = [command, "qwen2.5-7b", "--load-format", "dummy", "--device", "cpu"]
    assert main([*argv, "--output-json", "/dev/null/x"]) == 2
    err = capsys.readouterr().err
    assert err == "error: --output-json /dev/null/x: Not a directory\n"


def test_check_output_leaves_what_was_there(tmp_path):
    new, old = tmp_path / "new", tmp_path / "old"
    old.write_text("x")
    for path in (new, old):
        check_output("--json", str(path))
    assert old.read_text() == "x" and not new.exists()
    with pytest.raises(EngineError, match=r"--json .*: Is a directory"):
        check_output("--json", str(tmp_path))


def test_nothing_to_compare_is_not_a_success(capsys):
    old = rows_of(tpot_ms=1.0)
    assert against("a.json", old, rows_of(ttft_ms=1.0), MARGIN) == 2
    assert "nothing to compare" in capsys.readouterr().out
    assert against("a.json", old, old, MARGIN) == 0


def test_help_of_a_script_is_its_help_alone(capfd):
    assert main(["allreduce", "--help"]) == 0
    out, err = capfd.readouterr()
    assert "the bounded spin." in out and "python -m\n" not in out and "--predict" in out
    assert "rows go to" not in err


def test_the_prediction_takes_no_other_arguments(capsys):
    assert main(["allreduce", "--predict"]) == 0
    assert "prediction" in capsys.readouterr().out
    assert main(["allreduce", "--predict", "--nonsense"]) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith("error: ") and "--nonsense" in err and err.count("\n") == 1


@pytest.mark.parametrize(
    "name",
    [
        "gemm", "argmax", "poll", "attention", "gemv", "put_signal", "peer_store", "all_reduce",
        "all_reduce_soak",
    ],
)  # fmt: skip
def test_scripts_without_a_gpu_say_so(name, capsys, monkeypatch):
    import importlib

    module = importlib.import_module(f"bench.{name}")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert module.main([]) == 2
    said = capsys.readouterr()
    assert not said.out
    assert said.err == f"error: bench.{name} needs a CUDA device; here is none\n"
