"""The command lines as a person meets them: flags and aliases, answers, one-line errors. As processes: test_cli_process.py."""

from __future__ import annotations

import dataclasses
import json

import pytest

from engine import cli, generate
from engine.config import EngineConfig
from engine.errors import EngineError
from engine.options import engine_config, sampling_params
from engine.outputs import CompletionOutput, RequestMetrics, RequestOutput
from engine.sampling import SamplingParams
from tests.unit.fakes import FakeExecutor, imported_by, write_model


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return str(write_model(tmp_path_factory.mktemp("model"), positions=4096))


def parse(*args):
    namespace = generate.parser().parse_args(list(args))
    return engine_config(namespace), sampling_params(namespace), namespace


# ---- flags


@pytest.mark.parametrize(
    ("args", "field", "value"),
    [
        (["--tensor-parallel-size", "2"], "tensor_parallel_size", 2),
        (["-tp", "2"], "tensor_parallel_size", 2),
        (["--tp", "4"], "tensor_parallel_size", 4),
        (["--tp-size", "2"], "tensor_parallel_size", 2),
        (["--tp_size", "2"], "tensor_parallel_size", 2),
        (["--model", "m"], "model", "m"),
        (["-m", "m"], "model", "m"),
        (["--model-path", "m"], "model", "m"),
        (["m"], "model", "m"),
        (["m", "--model", "m"], "model", "m"),
        (["--tokenizer-path", "t"], "tokenizer", "t"),
        (["--dtype", "half"], "dtype", "float16"),
        (["--dtype", "bf16"], "dtype", "bfloat16"),
        (["-q", "fp8"], "quantization", "fp8"),
        (["--model-format", "fp8"], "quantization", "fp8"),
        (["--kv-cache-dtype", "fp8"], "kv_cache_dtype", "fp8"),
        (["--max-model-len", "32k"], "max_model_len", 32000),
        (["--context-length", "32K"], "max_model_len", 32768),
        (["--session-len", "1.5k"], "max_model_len", 1500),
        (["--max_seq_len", "77"], "max_model_len", 77),
        (["-c", "77"], "max_model_len", 77),
        (["--mem-fraction-static", "0.8"], "gpu_memory_utilization", 0.8),
        (["--memory-ratio", "0.8"], "gpu_memory_utilization", 0.8),
        (["--max-running-requests", "4"], "max_num_seqs", 4),
        (["--max_batch_size", "4"], "max_num_seqs", 4),
        (["--disable-cuda-graph"], "enforce_eager", True),
        (["--load-format", "dummy"], "load_format", "dummy"),
        (["--dummy-weight"], "load_format", "dummy"),
        (["--random-seed", "5"], "seed", 5),
        (["--device", "cpu"], "device", "cpu"),
    ],
)
def test_engine_flags_and_aliases(args, field, value):
    config, _, _ = parse(*args)
    assert config == dataclasses.replace(EngineConfig(), **{field: value})


@pytest.mark.parametrize(
    ("args", "field", "value"),
    [
        (["--temp", "0.5"], "temperature", 0.5),
        (["--max-new-tokens", "7"], "max_tokens", 7),
        (["-n", "7"], "max_tokens", 7),
        (["--min-tokens", "2"], "min_tokens", 2),
        (["--stop", "a", "-r", "b c"], "stop", ("a", "b c")),
        (["--stop-token-ids", "5", "6"], "stop_token_ids", (5, 6)),
        (["--ignore-eos"], "ignore_eos", True),
        (["--logprobs", "3"], "logprobs", 3),
        (["--prompt-logprobs", "0"], "prompt_logprobs", 0),
        (["--top-k", "-1"], "top_k", -1),
        (["--top-p", "0.9"], "top_p", 0.9),
        (["--repeat-penalty", "1.1"], "repetition_penalty", 1.1),
    ],
)
def test_sampling_flags_and_aliases(args, field, value):
    _, params, _ = parse(*args)
    assert params == dataclasses.replace(SamplingParams(), **{field: value})


def test_every_engine_option_has_a_flag():
    text = generate.parser().format_help()
    for f in dataclasses.fields(EngineConfig):
        assert f"--{f.name.replace('_', '-')}" in text
    assert "--ignore-chat-template" in text and parse("--ignore-chat-template")[2].no_chat_template


def test_flags_are_not_abbreviated():
    with pytest.raises(EngineError, match="--max-tok"):
        parse("--max-tok", "3")


def test_help_is_quick():
    """Neither torch nor a tokenizer is imported before the arguments are known to be good."""
    code = (
        "import engine.generate as g, engine.cli\n"
        "assert g.main(['--prompt', 'x', '--tp', '9']) == 2"
    )
    assert imported_by(code, "torch", "tokenizers", "jinja2", "numpy", "json") == ["json"]


# ---- answers, in process over the fake executor


@pytest.fixture
def fake(monkeypatch):
    """Plays the scripts, one per prompt in turn, each followed by EOS; records executors."""
    made = []

    def create(config, model):
        executor = FakeExecutor(3, config.max_model_len or 512, vocab=model.vocab_size)
        executor.script = fake.script
        executor.stats = lambda: {"device": "cpu", "roof": fake.roof, "startup_s": {"load": 0.1}}
        made.append(executor)
        return executor

    fake = type("Fake", (), {"script": None, "roof": None, "made": made})
    monkeypatch.setattr("engine.runtime.create_executor", create)
    return fake


def script(directory, text):
    from engine.text.tokenizer import Tokenizer

    return [*Tokenizer(directory).encode(text), *[2] * 300]


def test_text_on_stdout_and_the_rest_on_stderr(fake, directory, capsys):
    fake.script = script(directory, "hello 🎉 world")
    assert generate.main(["--model", directory, "--prompt", "hi"]) == 0
    out, err = capsys.readouterr()
    assert out == "hello 🎉 world\n"
    last = err.strip().split("\n")[-1]
    assert "prompt tokens" in last and "TTFT" in last and "tok/s" in last and "roof" not in last
    assert fake.made[0].closed == 1


def test_the_chat_template_and_its_overrides(fake, directory, capsys, tmp_path):
    from engine.text.tokenizer import Tokenizer

    tokenizer = Tokenizer(directory)
    fake.script = script(directory, "ok")

    def prompt(*args):
        assert generate.main(["--model", directory, "--prompt", "hi", "--json", *args]) == 0
        return json.loads(capsys.readouterr().out)["prompt_token_ids"]

    user = {"role": "user", "content": "hi"}
    assert prompt() == tokenizer.encode_chat([user])[1]
    system = {"role": "system", "content": "Be brief."}
    assert prompt("--system-prompt", "Be brief.") == tokenizer.encode_chat([system, user])[1]
    assert prompt("--no-chat-template") == tokenizer.encode("hi")
    mine = tmp_path / "t.jinja"
    mine.write_text("Q: {{ messages[-1].content }} A:")
    assert prompt("--chat-template", str(mine)) == tokenizer.encode("Q: hi A:")
    arguments = [
        "--model",
        directory,
        "--prompt",
        "hi",
        "--no-chat-template",
        "--system-prompt",
        "x",
    ]
    assert generate.main(arguments) == 2
    assert "--system-prompt needs a chat template" in capsys.readouterr().err


def test_several_prompts_in_order(fake, directory, capsys, monkeypatch, tmp_path):
    import io

    fake.script = script(directory, "one line")
    monkeypatch.setattr("sys.stdin", io.StringIO("from stdin"))
    file = tmp_path / "p.txt"
    file.write_text("from a file")
    arguments = ["--prompt", "a", "--prompt", "-", "--prompt-file", str(file), "--model", directory]
    assert generate.main([*arguments, "--no-chat-template"]) == 0
    out, err = capsys.readouterr()
    assert out == "one line\n" * 3
    assert "[1/3]" in err and "[3/3]" in err and "3 prompts" in err.strip().split("\n")[-1]
    monkeypatch.setattr("sys.stdin", io.StringIO("from stdin"))
    assert generate.main([*arguments, "--no-chat-template", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [r["prompt"] for r in rows] == ["a", "from stdin", "from a file"]


def test_json(fake, directory, capsys):
    fake.script = script(directory, "hello")
    arguments = ["--prompt", "hi", "--json", "--logprobs", "1", "--prompt-logprobs", "0", "--quiet"]
    assert generate.main(["--model", directory, *arguments]) == 0
    out, _ = capsys.readouterr()
    row = json.loads(out)
    assert row["text"] == "hello" and row["finish_reason"] == "stop" and row["stop_reason"] is None
    assert len(row["logprobs"]) == len(row["token_ids"]) and row["prompt_logprobs"][0] is None
    assert row["logprobs"][0][str(row["token_ids"][0])]["rank"] == 1
    assert row["metrics"]["output_tokens"] == len(row["token_ids"])
    assert row["metrics"]["roof_share"] is None and row["device"] == "cpu"


def test_length_defaults_and_limits(fake, directory, capsys):
    fake.script = [50]
    base = ["--model", directory, "--json", "--prompt", "hi", "--no-chat-template"]

    def count(*args):
        assert generate.main([*base, *args]) == 0
        return json.loads(capsys.readouterr().out)["metrics"]["output_tokens"]

    assert count() == generate.DEFAULT_MAX_TOKENS
    assert count("--max-model-len", "60") == 60 - 1, "clipped to the context when not given"
    assert count("--max-tokens", "300") == 300
    assert count("--min-tokens", "280") == 280
    assert generate.main([*base, "--max-model-len", "60", "--max-tokens", "60"]) == 2
    err = capsys.readouterr().err
    assert "1 tokens and max_tokens=60 make 61, over the context of 60" in err
    assert generate.main([*base, "--max-model-len", "1"]) == 2
    assert "no room" in capsys.readouterr().err


def test_random_ids_without_a_tokenizer(fake, capsys):
    arguments = ["qwen2.5-0.5b", "--dummy-weight", "--input-len", "16", "--max-tokens", "5"]
    assert generate.main(arguments) == 0
    out, err = capsys.readouterr()
    assert out == "" and "5 token ids generated" in err
    assert generate.main([*arguments, "--json"]) == 0
    first = json.loads(capsys.readouterr().out)
    assert len(first["prompt_token_ids"]) == 16 and first["text"] == ""
    assert generate.main([*arguments, "--json", "--seed", "1"]) == 0
    assert json.loads(capsys.readouterr().out)["prompt_token_ids"] != first["prompt_token_ids"]
    assert generate.main(["qwen2.5-0.5b", "--dummy-weight", "--prompt", "text"]) == 2
    assert "needs a tokenizer" in capsys.readouterr().err


def test_prompts_are_refused_before_the_weights_load(fake, directory, capsys, tmp_path):
    long = ["--prompt", "word " * 40, "--max-model-len", "30"]
    lines = tmp_path / "lines.txt"
    lines.write_text("one\ntwo\n")
    batch = ["--prompt-file", str(lines), "--prompt-lines"]
    for arguments, message in (
        (["qwen2.5-0.5b", "--dummy-weight", "--prompt", "text"], "a text prompt needs a tokenizer"),
        (["qwen2.5-0.5b", "--dummy-weight", *batch], "a text prompt needs a tokenizer"),
        ([directory, "--no-chat-template", "--prompt", ""], "the prompt is empty"),
        (
            [directory, *long],
            "leaves no room for an answer in a context of 30; shorten it or raise",
        ),
        ([directory, "--prompt", "a", "--stop-token-ids", "999999"], "outside the vocabulary"),
        ([directory, "--no-chat-template", "--prompt", "a", *long], "prompt 1: the prompt has"),
    ):
        assert generate.main(arguments) == 2
        assert message in capsys.readouterr().err
    assert fake.made == []


def test_share_of_the_roof():
    metrics = RequestMetrics(prompt_tokens=100, output_tokens=51, ttft_s=1.0, total_s=2.0)
    output = RequestOutput("0", None, [], [CompletionOutput(0, "", [])], None, metrics)
    roof = {"weight_bytes": 10**9, "kv_bytes_per_token": 10**5, "copy_bandwidth": 10**11}
    # 50 tok/s x (1e9 + 1e5 x (100 + 25.5)) bytes / 1e11 bytes/s
    assert generate.answer_share(output, {"roof": roof}) == pytest.approx(0.506275)
    assert generate.answer_share(output, {"roof": None}) is None
    assert generate.answer_share(output, {}) is None
    assert "51 % of" in generate._summary([output], {"roof": roof}).replace("%", " %")


def test_interrupted_in_process(fake, directory, capsys, monkeypatch):
    fake.script = [50]
    original = FakeExecutor.__init__

    def init(self, *args, **kwargs):
        original(self, *args, **kwargs)
        self.interrupt_at = 5

    monkeypatch.setattr(FakeExecutor, "__init__", init)
    assert generate.main(["--model", directory, "--prompt", "hi"]) == 130
    out, err = capsys.readouterr()
    assert out.endswith("\n") and err.count("interrupted") == 1 and "Traceback" not in err
    assert fake.made[0].closed == 1


# ---- real processes


# ---- engine COMMAND


def test_only_existing_commands_are_listed(capsys, monkeypatch):
    listed = cli.commands()
    assert {"generate", "info"} <= set(listed)
    monkeypatch.setitem(cli._COMMANDS, "not_written_yet", "x")
    assert "not_written_yet" not in cli.commands()
    assert cli.main([]) == 2 and "generate" in capsys.readouterr().err
    assert cli.main(["--help"]) == 0 and "info" in capsys.readouterr().out
    assert cli.main(["--version"]) == 0 and capsys.readouterr().out.startswith("engine 0.")
    assert cli.main(["not_written_yet"]) == 2
    assert capsys.readouterr().err.startswith("error: no command 'not_written_yet'; commands: ")
    assert cli.main(["generate", "--bogus"]) == 2


def test_info(capsys):
    assert cli.main(["info", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["versions"]["torch"] and facts["versions"]["python"]
    assert set(facts["caches"]) == {"autotune", "triton", "demo_model"}
    assert cli.main(["info"]) == 0
    assert "torch" in capsys.readouterr().out
    tuned = facts["caches"]["autotune"]["nvidia_h200"]  # the caches in the tree fit its kernels
    assert {"gemv", "gemm", "all_reduce"} <= set(tuned) and "stale" not in tuned.values()


def test_dump_graph(directory, capsys):
    assert generate.main(["--model", directory, "--dump-graph", "--tp", "2"]) == 0
    out, _ = capsys.readouterr()
    assert "after" in out and "embedding" in out and "all_reduce" in out
    assert "flag_publish" not in out
    assert (
        generate.main(["--model", directory, "--dump-graph", "--tp", "2", "--all-reduce", "flag"])
        == 0
    )
    assert "flag_publish" in capsys.readouterr().out
