"""Batches from files: fields a line, order, resuming, errors that name the line."""

from __future__ import annotations

import json
import os
import re

import pytest

from engine import generate
from engine.batch import read_output
from engine.errors import EngineError
from tests.unit.fakes import FakeExecutor, expected, write_model

VOCAB = 400


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return str(write_model(tmp_path_factory.mktemp("model")))


@pytest.fixture
def executors(monkeypatch):
    made = []

    def create(config, model):
        made.append(FakeExecutor(3, 128, vocab=VOCAB))
        return made[-1]

    monkeypatch.setattr("engine.runtime.create_executor", create)
    return made


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def rows(text):
    return [json.loads(line) for line in text.splitlines()]


def test_every_line_has_its_own_parameters(executors, directory, tmp_path, capsys):
    file = write(
        tmp_path / "in.jsonl",
        [
            {"prompt_token_ids": [1, 2], "max_tokens": 20, "ignore_eos": True},
            {"id": "b", "prompt": "hello", "max_tokens": 2, "stop": ["zz"], "ignore_eos": True},
            {"id": 3, "messages": [{"role": "user", "content": "hi"}], "temperature": 0.5, "seed": 9},
        ],
    )  # fmt: skip
    assert generate.main(["--model", directory, "--prompt-file", file, "--max-tokens", "4"]) == 0
    out, err = capsys.readouterr()
    got = rows(out)
    assert [r["id"] for r in got] == [f"{file}:1", "b", 3], "in order, though the first is longest"
    assert got[0]["token_ids"] == expected([1, 2], 20, VOCAB)
    assert len(got[1]["token_ids"]) == 2 and got[2]["prompt"].endswith("assistant\n")
    assert (0.5, 9) in executors[0].params.values() and "3 prompts" in err


def test_lines_of_a_text_file_and_resuming(executors, directory, tmp_path, capsys):
    file = tmp_path / "in.txt"
    file.write_text("one\n\ntwo\nthree\nfour\n")
    out = tmp_path / "out.jsonl"
    command = ["--model", directory, "--prompt-file", str(file), "--prompt-lines", "--output"]
    command += [str(out), "--max-tokens", "5", "--ignore-eos", "--no-chat-template"]
    assert generate.main(command) == 0
    whole = out.read_text()
    assert [r["prompt"] for r in rows(whole)] == ["one", "two", "three", "four"]
    cut = whole.splitlines(keepends=True)
    out.write_text("".join(cut[:2]) + cut[2][:10])  # killed while it wrote the third
    assert generate.main(command) == 0
    assert "2 of 4 results" in capsys.readouterr().err
    strip = lambda text: [(r["id"], r["token_ids"]) for r in rows(text)]
    assert strip(out.read_text()) == strip(whole)
    assert generate.main(command) == 0 and strip(out.read_text()) == strip(whole)
    assert len(executors) == 2, "nothing left: no model is loaded"


def test_an_interrupted_batch_goes_on(executors, directory, tmp_path, monkeypatch, capsys):
    file = write(tmp_path / "in.jsonl", [{"prompt_token_ids": [n + 1]} for n in range(9)])
    out = tmp_path / "out.jsonl"
    command = ["--model", directory, "--prompt-file", file, "--output", str(out)]
    command += ["--max-tokens", "8", "--ignore-eos"]
    original = FakeExecutor.read

    def read(self, step):
        if step == 20 and len(executors) == 1:
            raise KeyboardInterrupt
        return original(self, step)

    monkeypatch.setattr(FakeExecutor, "read", read)
    assert generate.main(command) == 130
    count = len(rows(out.read_text()))
    assert 0 < count < 9
    said = capsys.readouterr().err
    assert f"interrupted: {count} of 9 written to {out}; run the same command again" in said
    assert said.count("interrupted:") == 1 and "\ninterrupted\n" not in said
    assert generate.main(command) == 0
    got = rows(out.read_text())
    assert [r["token_ids"] for r in got] == [expected([n + 1], 8, VOCAB) for n in range(9)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"in.jsonl:2 is not JSON"),
        ("[1]", r"in.jsonl:2 is not a JSON object"),
        ('{"text": "x"}', r"in.jsonl:2 needs exactly one of prompt, messages"),
        ('{"prompt": "x", "messages": []}', r"in.jsonl:2 needs exactly one"),
        ('{"prompt": "x", "topp": 0.5}', r"in.jsonl:2: unknown field 'topp'"),
        ('{"prompt": ""}', r"in.jsonl:2: the prompt is empty"),
        ('{"prompt": 3}', r"in.jsonl:2: prompt is not a text"),
        ('{"prompt": "x", "id": 1.5}', r"in.jsonl:2: id 1.5"),
        ('{"prompt": "x", "id": "a"}', r"in.jsonl:2: id 'a' is also that of .*in.jsonl:1"),
        ('{"prompt": "x", "top_p": 3}', r"in.jsonl:2: top_p=3 is not"),
        ('{"prompt_token_ids": [400]}', r"in.jsonl:2: prompt_token_ids\[0\] = 400"),
        ('{"prompt": "x", "temperature": -1}', r"in.jsonl:2: temperature=-1 is not"),
        ('{"prompt": "x", "logit_bias": {"400": 1}}', r"in.jsonl:2: logit_bias\[400\]"),
        ('{"prompt": "x", "max_tokens": 9999}', r"in.jsonl:2: a prompt of .* over the context"),
        ('{"messages": [{"role": 1}]}', r"in.jsonl:2: messages\[0\]"),
    ],
)
def test_a_bad_line_is_named(executors, directory, tmp_path, capsys, line, message):
    file = tmp_path / "in.jsonl"
    file.write_text('{"prompt": "fine", "id": "a"}\n' + line + "\n")
    output = tmp_path / "out.jsonl"
    for more in ([], ["--output", str(output)]):
        assert generate.main(["--model", directory, "--prompt-file", str(file), *more]) == 2
        out, err = capsys.readouterr()
        assert out == "" and re.search(message, err), err
    assert executors == [] and not output.exists(), "found before the model loads"


def test_a_byte_order_mark_and_a_file_of_no_prompts(executors, directory, tmp_path, capsys):
    file = tmp_path / "in.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"prompt_token_ids": [1], "max_tokens": 2}\n')
    assert generate.main(["--model", directory, "--prompt-file", str(file)]) == 0
    capsys.readouterr()
    file.write_text("\n\n")
    assert generate.main(["--model", directory, "--prompt-file", str(file)]) == 2
    assert capsys.readouterr().err == f"error: --prompt-file {file} holds no prompts\n"


def test_an_output_that_is_something_else_is_left_alone(tmp_path):
    file = tmp_path / "notes.txt"
    file.write_text("my notes\n")
    with pytest.raises(EngineError, match=r"notes.txt:1 is not a result"):
        read_output(str(file), {})
    assert file.read_text() == "my notes\n"


@pytest.mark.timeout(20)
def test_an_output_that_is_no_regular_file_is_refused(executors, directory, tmp_path, capsys):
    os.mkfifo(tmp_path / "fifo")
    for name in (str(tmp_path / "fifo"), "/dev/full", "/dev/null"):
        assert generate.main(["--model", directory, "--prompt", "x", "--output", name]) == 2
        assert capsys.readouterr().err == f"error: --output {name} is not a regular file\n"
    assert executors == []


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt, 130), (SystemExit(143), 143)])
def test_an_interrupt_writes_what_waits_for_an_earlier_answer(
    executors, directory, tmp_path, monkeypatch, capsys, error, code
):
    lines = [{"prompt_token_ids": [1], "max_tokens": 90, "ignore_eos": True}]
    lines += [{"prompt_token_ids": [n], "max_tokens": 2, "ignore_eos": True} for n in (2, 3, 4)]
    out = tmp_path / "out.jsonl"
    command = ["--model", directory, "--prompt-file", write(tmp_path / "in.jsonl", lines)]
    command += ["--output", str(out)]
    original = FakeExecutor.read

    def read(self, step):
        if step == 60 and len(executors) == 1:
            raise error
        return original(self, step)

    monkeypatch.setattr(FakeExecutor, "read", read)
    if code == 143:
        with pytest.raises(SystemExit, match="143"):
            generate.main(command)
    else:
        assert generate.main(command) == code
    assert [r["prompt_token_ids"] for r in rows(out.read_text())] == [[2], [3], [4]]
    assert f"interrupted: 3 of 4 written to {out}" in capsys.readouterr().err
    assert generate.main(command) == 0
    assert [r["prompt_token_ids"] for r in rows(out.read_text())] == [[2], [3], [4], [1]]


def test_answers_to_other_questions_are_refused(executors, directory, tmp_path, capsys):
    out = tmp_path / "out.jsonl"

    def ask(prompt, *more):
        command = ["--model", directory, "--prompt", prompt, "--output", str(out)]
        return generate.main([*command, "--no-chat-template", "--max-tokens", "3", *more])

    assert ask("one") == 0 and ask("one") == 0
    held = out.read_text()
    for prompt, more in (("two", ()), ("one", ("--temperature", "0.5")), ("one", ("--top-k", "3"))):
        capsys.readouterr()
        assert ask(prompt, *more) == 2 and out.read_text() == held
        err = capsys.readouterr().err
        assert "holds answers to other questions: line 1 (id 'prompt:1') was asked with" in err
        assert err.endswith("use another --output or delete it\n") and err.count("\n") == 1
    [row] = rows(held)
    del row["request_hash"]
    write(out, [row])
    assert ask("one") == 2 and "has no request_hash (an older file)" in capsys.readouterr().err
    assert len(executors) == 1
