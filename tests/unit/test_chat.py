"""engine chat over the fake executor, and as a process on a pseudo-terminal with the demo model."""

from __future__ import annotations

import io
import os
import pty
import select
import signal
import subprocess
import sys
import time

import pytest

from engine import chat
from tests.unit.fakes import FakeExecutor, write_model


@pytest.fixture
def talk(tmp_path, monkeypatch, capsys):
    directory = write_model(tmp_path / "model", positions=256)
    made = []

    def create(config, model):
        assert config.prefix_caching and config.max_num_seqs == 1
        made.append(FakeExecutor(1, 256, vocab=400))
        from engine.text.tokenizer import Tokenizer

        made[-1].script = [*Tokenizer(directory).encode("hello world"), 2]
        return made[-1]

    monkeypatch.setattr("engine.runtime.create_executor", create)

    def run(text, *args):
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
        assert chat.main(["--model", str(directory), *args]) == 0
        return (*capsys.readouterr(), made[-1])

    return run


def test_what_cannot_work_is_refused_before_loading(tmp_path, capsys):
    directory = str(write_model(tmp_path / "model", positions=256))
    assert chat.main(["--model", directory, "--stop-token-ids", "999999"]) == 2
    assert "outside the vocabulary" in capsys.readouterr().err
    assert chat.main(["--model", directory, "--logprobs", "2"]) == 2
    assert "--logprobs" in capsys.readouterr().err


def test_turns_reuse_the_history(talk):
    out, err, executor = talk("hi\nagain\n")
    assert out == "hello world\nhello world\n"
    lines = [line for line in err.splitlines() if line.startswith("[")]
    assert "(0 cached)" in lines[0] and "(0 cached)" not in lines[1]
    assert executor.cached > 30 and executor.closed == 1


def test_commands_and_several_lines(talk):
    out, err, executor = talk(
        'a\\\nb\n/reset\n"""one\ntwo"""\n/system Be brief.\nhi\n/nothing\n/help\n/exit\nnever\n'
    )
    assert out == "hello world\n" * 3
    for text in ("forgotten", "system prompt: Be brief.", "no command /nothing", "/reset "):
        assert text in err
    assert executor.closed == 1


def test_a_conversation_too_long_keeps_the_session(talk):
    out, err, _ = talk("x " * 400 + "\nhi\n")
    assert out == "hello world\n" and "error: the prompt has" in err


@pytest.mark.parametrize(
    ("typed", "message"),
    [(["one"], "one"), (["a\\", "b"], "a\nb"), (['"""a', 'b"""'], "a\nb"), (['"""', "x", '"""'], "x"),
     (['"""x"""'], "x")],
)  # fmt: skip
def test_messages_of_several_lines(typed, message, monkeypatch):
    lines = iter(typed)
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    assert chat.read_message("") == message


class Terminal:
    """A command on a pseudo-terminal."""

    def __init__(self, *command):
        main, side = pty.openpty()
        self.fd, self.seen = main, ""
        env = {**os.environ, "TERM": "dumb", "PYTHONUNBUFFERED": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", *command], stdin=side, stdout=side, stderr=side, env=env,
            start_new_session=True,
        )  # fmt: skip
        os.close(side)

    def until(self, text, seconds=90):
        """Output up to and including `text`, taken off."""
        end = time.monotonic() + seconds
        while text not in self.seen:
            ready, _, _ = select.select([self.fd], [], [], 0.2)
            if ready:
                try:
                    self.seen += os.read(self.fd, 4096).decode(errors="replace")
                except OSError:
                    break
            assert time.monotonic() < end, f"no {text!r} in {self.seen!r}"
        assert text in self.seen, self.seen
        before, _, self.seen = self.seen.partition(text)
        return before + text

    def type(self, text):
        os.write(self.fd, text.encode())

    def end(self):
        self.process.kill()
        self.process.wait()
        os.close(self.fd)


@pytest.fixture
def demo():
    from engine.demo import MODEL_FOLDER, cache_dir

    folder = cache_dir() / MODEL_FOLDER
    if not (folder / "config.json").is_file():
        pytest.skip("the demo model is not in the cache")
    return str(folder)


def test_a_terminal_session_with_the_demo_model(demo):
    terminal = Terminal("engine.chat", demo, "--device", "cpu", "--max-model-len", "1024")
    try:
        terminal.until("> ")
        terminal.type("What is the capital of France?\n")
        answer = terminal.until("tok/s]")
        assert "Paris" in answer and "(0 cached)" in answer
        terminal.until("> ")
        terminal.type("Count from 1 to 200, one number a line.\n")
        terminal.until("2")
        time.sleep(0.5)
        terminal.process.send_signal(signal.SIGINT)
        assert "interrupted]" in terminal.until("interrupted]", 10)
        terminal.until("> ")
        assert terminal.process.poll() is None, "Ctrl-C ended the program"
        terminal.type("/reset\n")
        terminal.until("forgotten")
        terminal.until("> ")
        terminal.type("/exit\n")
        assert terminal.process.wait(20) == 0
    finally:
        terminal.end()


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_signal_ends_generate_within_five_seconds(demo, number, code):
    terminal = Terminal(
        "engine.generate", demo, "--device", "cpu", "--prompt", "Tell me a very long story.",
        "--max-tokens", "1500", "--ignore-eos", "--max-model-len", "2048",
    )  # fmt: skip
    try:
        terminal.until("ready in")
        time.sleep(2)
        started = time.monotonic()
        terminal.process.send_signal(number)
        assert terminal.process.wait(10) == code
        assert time.monotonic() - started < 5
    finally:
        terminal.end()


def test_a_model_that_cannot_chat_is_refused_before_it_loads(monkeypatch, capsys):
    made = []
    monkeypatch.setattr("engine.runtime.create_executor", lambda *_: made.append(1))
    assert chat.main(["qwen2.5-0.5b", "--dummy-weight"]) == 2
    assert "chat needs a tokenizer" in capsys.readouterr().err and made == []
