"""What the scripts that measure one deployment after the other share."""

from __future__ import annotations

import importlib
from argparse import ArgumentTypeError
from types import SimpleNamespace

import pytest

from bench import (
    all_reduce,
    all_reduce_soak,
    argmax,
    attention,
    gemm,
    gemv,
    load,
    long_run,
    peer_store,
    poll,
    put_signal,
    rows,
    ttft,
)
from bench.deployment import (
    MAX_ROWS,
    choices,
    decode_rows,
    each,
    linear_shapes,
    numbers,
    parse,
    shapes,
)
from bench.latency import decode_ahead, generate
from engine.errors import EngineError
from engine.kernels import gemv as gemv_op
from engine.runtime.buckets import prefill_buckets
from tests.unit.fakes import FakeExecutor

SCRIPTS = ["latency", "batch", "ttft", "stages", "long_run"]
FORM = "MODEL:QUANTIZATION:TP[:SHARD_OF]"


def test_a_broken_deployment_does_not_stop_the_others(capsys):
    seen = []

    def measure(text):
        seen.append(text)
        if text == "b":
            raise RuntimeError("no memory")

    assert each(["a", "b", "c"], measure) == 1
    assert seen == ["a", "b", "c"]
    assert capsys.readouterr().out == "b: RuntimeError: no memory\n"
    assert each(["a", "c"], measure) == 0


def test_steps_are_queued_ahead_and_all_are_read():
    executor = FakeExecutor(num_slots=1, max_model_len=64, max_in_flight=4, script=[5, 6, 7, 8])
    ids, first, later = generate(executor, [1, 2, 3], 7)
    assert len(ids) == 7 and first >= 0 and later >= 0
    assert executor.deepest > 1, "a step is queued before the one in front of it is read"
    assert len(list(decode_ahead(executor, [0], 5))) == 5
    assert executor.next_read == len(executor.results)


def test_deployments_are_parsed():
    config = parse("qwen2.5-72b:fp8:2:8", max_num_seqs=1, prefill_activations="16bit")
    assert (config.model, config.quantization, config.load_format) == (
        "qwen2.5-72b", "fp8", "dummy",
    )  # fmt: skip
    assert (config.tensor_parallel_size, config.shard_of, config.max_num_seqs) == (2, 8, 1)
    assert config.prefill_activations == "16bit"
    config = parse("Qwen/Qwen2.5-7B-Instruct:none:1")
    assert (config.quantization, config.tensor_parallel_size, config.shard_of) == (None, 1, None)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("nope", "1 field"),
        ("qwen2.5-7b", "1 field"),
        ("qwen2.5-7b:none", "2 field"),
        ("qwen2.5-72b:fp8:2:8:8", "5 field"),
        ("qwen2.5-7b:fp8:x", "'x': not a whole number"),
        ("qwen2.5-72b:fp8:2:x", "'2:x': not a whole number"),
        ("qwen2.5-72b:fp8:2:", "not a whole number"),
        ("qwen2.5-7b:fp4:1", "quantization 'fp4' is not one of none, fp8"),
        ("gpt-9:fp8:1", "no preset 'gpt-9'"),
        ("qwen2.5-72b:fp8:0", "tensor_parallel_size=0"),
        ("qwen2.5-72b:fp8:2:0", "shard_of=0"),
        ("qwen2.5-72b:fp8:4:2", "SHARD_OF 2 is below TP 4"),
    ],
)
def test_a_wrong_deployment_is_one_line(text, problem):
    with pytest.raises(EngineError) as caught:
        parse(text)
    said = str(caught.value)
    assert repr(text) in said and problem in said and FORM in said and "\n" not in said


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_refuse_before_any_work(name, capsys, monkeypatch):
    """Wrong text, also behind a good one, with and without a GPU; no GPU; unknown flags."""
    main = importlib.import_module(f"bench.{name}").main

    def refused(*argv):
        assert main(argv) == 2
        out, err = capsys.readouterr()
        assert not out and err.startswith("error: ") and err.count("\n") == 1
        return err

    for there in (True, False):
        monkeypatch.setattr("torch.cuda.is_available", lambda there=there: there)
        assert FORM in refused("qwen2.5-7b:fp8:1", "nope")
        assert "valid degrees: 1, 2, 4" in refused("qwen2.5-7b:fp8:1", "qwen2.5-7b:fp8:8")
        assert "--nonsense" in refused("qwen2.5-7b:fp8:1", "--nonsense")
    assert refused("qwen2.5-7b:fp8:1") == f"error: bench.{name} needs a CUDA device; here is none\n"


@pytest.fixture
def runs(monkeypatch):
    """bench.long_run on an executor that is none: `generate` gives what is appended here, (ids, seconds a token)."""
    results: list[tuple[list[int], float]] = []
    closed: list[str] = []

    def generated(executor, ids, tokens):
        out, tpot = results.pop(0)
        return out, 0.0, tpot

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(long_run, "generate", generated)
    monkeypatch.setattr(
        long_run,
        "create_executor",
        lambda engine, model: SimpleNamespace(close=lambda: closed.append(engine.model)),
    )
    rows: list[float] = []
    monkeypatch.setattr(
        long_run,
        "Rows",
        lambda name: SimpleNamespace(add=lambda metric, value, *_, **__: rows.append(value)),
    )
    return SimpleNamespace(results=results, closed=closed, rows=rows)


def prompts(times, changed=None):
    """Results of a warm-up and of len(times) prompts; `changed`: one whose ids differ from the first time's."""
    ids = [[n % long_run.DIFFERENT] for n in range(len(times) + 1)]
    if changed is not None:
        ids[changed] = [-1]
    return list(zip(ids, [9.0, *times], strict=True))


def test_a_failed_check_fails_the_run_and_not_the_others(runs, capsys):
    steady = [0.01] * 10
    runs.results += prompts(steady, changed=7)[:8] + prompts(steady)
    assert long_run.main(["qwen2.5-7b:fp8:1", "qwen2.5-72b:fp8:2", "--prompts", "10"]) == 1
    out = capsys.readouterr().out
    assert "qwen2.5-7b:fp8:1: CheckFailed: prompt 7 gave other ids than prompt 2" in out
    assert "qwen2.5-72b:fp8:2: 10 x 512 tokens, ids equal" in out
    assert "first 100.0 tok/s, last 100.0" in out
    assert runs.closed == ["qwen2.5-7b", "qwen2.5-72b"] and runs.rows == [1.0]
    runs.results += prompts(steady)
    assert long_run.main(["qwen2.5-7b:fp8:1", "--prompts", "10"]) == 0


def test_a_slow_last_prompt_shows(runs, capsys):
    """Twenty prompts: the last tenth is two, and the faster of them would hide the other."""
    runs.results += prompts([0.010] * 19 + [0.020])
    assert long_run.main(["qwen2.5-7b:fp8:1"]) == 1
    out = capsys.readouterr().out
    assert runs.rows == pytest.approx([1.5]) and "not within 2%" in out
    assert "first 100.0 tok/s, last 66.7" in out


def test_prompts_must_be_repeated(runs, capsys):
    assert long_run.main(["qwen2.5-7b:fp8:1", "--prompts", "9"]) == 2
    assert capsys.readouterr().err == (
        "error: --prompts 9 is below 10: 5 different prompts, each twice\n"
    )
    assert long_run.main(["qwen2.5-7b:fp8:1", "--output-len", "1"]) == 2


def test_lengths_are_labelled_by_their_bucket():
    buckets = prefill_buckets(8192 + 64)
    for length, want in ((16, "16bit"), (48, "16bit"), (49, "fp8"), (64, "fp8"), (2049, "fp8")):
        assert ttft.activations(length, buckets, True) == want
        assert ttft.activations(length, buckets, False) == "16bit"


def test_rows_of_short_prompts_do_not_say_fp8(monkeypatch, capsys):
    found = []
    executor = SimpleNamespace(stats=lambda: {"counters": {}}, close=lambda: None)
    monkeypatch.setattr(ttft, "create_executor", lambda engine, model: executor)
    monkeypatch.setattr(ttft, "generate", lambda *_: ([], 0.1, 0.01))
    monkeypatch.setattr(ttft, "host_waits", lambda *_: {})
    rows = SimpleNamespace(add=lambda metric, *_, **facts: found.append((metric, facts)))
    args = SimpleNamespace(
        input_lens=[16, 64], prefill_activations="auto", all_reduce="lamport", iters=1, pause=0.0
    )
    ttft.measure(rows, args, "qwen2.5-7b:fp8:1", 1e15)
    labels = {(m, f["context"]): f["algorithm"] for m, f in found}
    assert labels["ttft_p50_ms", 16] == labels["ttft_p90_ms", 16] == "16bit activations, lamport"
    assert labels["ttft_p50_ms", 64] == labels["host_waits", 512] == "fp8 activations, lamport"
    assert "16 tokens, 16bit: TTFT" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--input-lens", "16,x"], "--input-lens: 'x' is not"),
        (["--input-lens", "0"], "--input-lens: '0' is not"),
        (["--prefill-activations", "fp8"], "needs FP8 weights"),
        (["--png", "/dev/null/x.png"], "--png /dev/null/x.png: Not a directory"),
    ],
)
def test_ttft_checks_its_arguments_first(flags, problem, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert ttft.main(["qwen2.5-7b:none:1", *flags]) == 2
    assert problem in capsys.readouterr().err


def test_shapes_of_the_kernel_benches():
    assert shapes("qwen2.5-72b/8,qwen2.5-7b/1") == [("qwen2.5-72b", 8), ("qwen2.5-7b", 1)]
    assert linear_shapes("qwen2.5-72b", 2) == {
        "gate_up": (29568, 8192), "down": (8192, 14784), "qkv": (5120, 8192), "o": (8192, 4096),
    }  # fmt: skip


@pytest.mark.parametrize(
    "text,problem",
    [
        ("qwen2.5-72b", "the form is MODEL/TP"),
        ("qwen2.5-72b/two", "the form is MODEL/TP"),
        ("qwen9-72b/2", "qwen9-72b"),
        ("qwen2.5-7b/3", "3"),
    ],
)
@pytest.mark.parametrize("script", [attention, gemm, gemv, poll])
def test_a_wrong_shape_is_one_line_with_code_2(script, text, problem, capsys):
    assert script.main(["--models", text]) == 2
    said = capsys.readouterr()
    assert "--models" in said.err and problem in said.err and repr(text) in said.err
    assert not said.out and said.err.startswith("error: ") and said.err.count("\n") == 1


@pytest.mark.parametrize(
    ("tokens", "starts"), [(512, {0, 7680}), (8192, {0}), (8193, {0}), (20000, {0})]
)
def test_a_prefix_has_room_in_front_of_the_chunk(tokens, starts, monkeypatch, capsys):
    lengths, seen = [], set()

    class Point(attention.PrefillPoint):
        def time(self, config, start):
            seen.add(start)
            return 1.0

        def sdpa_us(self, backend):
            return 1.0

    def layers(slots, shape, length):
        lengths.append(length)
        return []

    shape = attention.Shape("qwen2.5-7b", 1, 2, 1, 64)
    monkeypatch.setattr("bench.attention_timing.DEVICE", "cpu")
    monkeypatch.setattr(attention, "PrefillPoint", Point)
    run = attention.Run.__new__(attention.Run)
    run.args, run.sm_count, run.table = SimpleNamespace(kv_cache_dtype="auto"), 132, []
    run.rows = SimpleNamespace(add=lambda *_, **__: None)
    configs = attention.attention_space.prefill_candidates(64, shape.kv_dtype)
    run.good = {attention.Variant(shape, config) for config in configs}
    assert run.prefill_point(SimpleNamespace(layers=layers), shape, tokens)["us"] == 1.0
    assert seen == starts and lengths[0] >= tokens + max(starts)


def test_lists_are_parsed():
    assert numbers("1,8, 512") == [1, 8, 512]
    assert choices("fp8", "bf16")("bf16,fp8") == ["bf16", "fp8"]


@pytest.mark.parametrize("text,item", [("x", "x"), ("1,,2", ""), ("", ""), ("8,0", "0"), ("1,-2", "-2"), ("1.5", "1.5")])  # fmt: skip
def test_numbers_name_the_wrong_one(text, item):
    with pytest.raises(ArgumentTypeError, match=f"^{item!r} is not a whole number above 0"):
        numbers(text)


def test_a_decode_step_has_as_many_rows_as_a_gemv_takes():
    assert MAX_ROWS == gemv_op.MAX_ROWS and decode_rows("1,8") == [1, 8]


@pytest.mark.parametrize("text,item", [("fp9", "fp9"), ("fp8,", ""), ("", ""), ("fp8, bf16", " bf16")])  # fmt: skip
def test_choices_name_the_wrong_one(text, item):
    with pytest.raises(ArgumentTypeError, match=f"^{item!r} is not one of fp8, bf16$"):
        choices("fp8", "bf16")(text)


LISTS = {
    attention: {"--contexts": "1,,2", "--rows": "x", "--tokens": "0"},
    gemm: {"--tokens": "512,0", "--dtypes": "fp9"},
    gemv: {"--dtypes": "bf16,"},
    poll: {"--dtypes": "w8a8", "--rows": "1,x"},
    argmax: {"--rows": "9"},
    load: {"--chunks": "4,x"},
    all_reduce: {"--sections": "latency,tunes"},
    all_reduce_soak: {"--forms": "one", "--worlds": "2,3"},
    peer_store: {"--kinds": "strong"},
    put_signal: {"--forms": "poll,"},
}


@pytest.mark.parametrize(
    "script,flag,text", [(s, *given) for s, lists in LISTS.items() for given in lists.items()]
)
def test_a_wrong_list_is_one_line_with_code_2(script, flag, text, capsys, monkeypatch, tmp_path):
    """With a GPU too, before any work."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    others = ["--dir", str(tmp_path)] if script is load else []
    assert script.main([flag, text, *others]) == 2
    said = capsys.readouterr()
    assert flag in said.err and " is not " in said.err and not said.out
    assert said.err.startswith("error: ") and said.err.count("\n") == 1


@pytest.mark.parametrize("script", LISTS)
def test_defaults_are_lists(script, capsys, monkeypatch, tmp_path):
    """What a script's body gets without arguments, and its exit code."""
    bodies = {load: "measure", all_reduce_soak: "soak_all"}
    seen = []
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(
        script, bodies.get(script, "measure_all"), lambda args: seen.append(args) or 7
    )
    others = ["--dir", str(tmp_path)] if script is load else []
    assert script.main(others) == 7
    for flag in LISTS[script]:
        assert isinstance(getattr(seen[0], flag.removeprefix("--")), list)


def test_no_virtual_ranks():
    assert all_reduce_soak.virtual_worlds("") == []
    assert all_reduce_soak.virtual_worlds("8,2") == [8, 2]


def test_load_names_a_folder_that_cannot_be(capsys, tmp_path):
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "x"
    assert load.main(["--dir", str(folder), "--model", "qwen2.5-0.5b", "--layers", "1"]) == 2
    assert capsys.readouterr().err == f"error: --dir {folder}: Not a directory\n"


def test_merge_ends_as_the_scripts_do(capsys, tmp_path):
    assert rows.main(["merge", str(tmp_path)]) == 2 and rows.main(["fold", "x"]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first == f"error: {tmp_path} holds no files of rows" and "'fold'" in second
