"""User errors of the command line: one line on stderr, nothing on stdout, exit code 2."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch

from engine import generate
from engine.console import run
from tests.unit.fakes import write_model


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "no prompt: give --prompt"),
        (["--bogus"], "--bogus"),
        (["--prompt", "x", "--tp", "two"], "'two' is not a whole number"),
        (
            ["--prompt", "x", "--tp", "9"],
            "tensor_parallel_size=9 is not a whole number from 1 to 8",
        ),
        (["--prompt", "x", "--tp", "2k"], "'2k' is not a whole number (see"),
        (["--prompt", "x", "--seed", "x"], "'x' is not a whole number (see"),
        (["--prompt", "x", "--stop-token-ids", "1e3"], "'1e3' is not a whole number (see"),
        (
            [
                "qwen2.5-0.5b",
                "--dummy-weight",
                "--input-len",
                "4",
                "--stop-token-ids",
                "1",
                "151936",
            ],
            "stop_token_ids holds 151936, which is outside the vocabulary of 151936",
        ),
        (
            ["qwen2.5-0.5b", "--dummy-weight", "--input-len", "4", "--stop", "x"],
            "stop needs a tokenizer, and this model has none; use stop_token_ids",
        ),
        (["--prompt", "x", "--max-tokens", "x"], "'x' is not a whole number such as 32768, 32k"),
        (
            ["qwen2.5-0.5b", "--dummy-weight", "--input-len", "40000"],
            "leaves no room for an answer in a context of 32768; shorten it\n",
        ),
        (["--prompt", "x", "--max-tokens", "0"], "max_tokens=0"),
        (["--prompt", "x", "--temperature", "-1"], "temperature=-1.0"),
        (["--prompt", "x", "--top-p", "1.9"], "top_p=1.9"),
        (["--prompt", "x", "--repetition-penalty", "0"], "repetition_penalty=0"),
        (["--prompt", "x", "--model", "/absent"], "/absent"),
        (["--prompt-file", "/absent"], "--prompt-file /absent"),
        (["--input-len", "0"], "--input-len 0"),
        (["--prompt", "x", "--input-len", "4"], "--input-len is instead of --prompt"),
        (["--prompt", "-", "--prompt", "-"], "--prompt - is given twice"),
        (["--prompt", "-", "--prompt", "-", "--output", "o"], "--prompt - is given twice"),
        (["--prompt", ""], "the prompt is empty: --prompt ''"),
        (["--prompt-file", "/dev/null"], "--prompt-file /dev/null holds no prompts"),
        (["--prompt", "x", "--logprobs", "1"], "--logprobs and --prompt-logprobs show only with"),
        (["--prompt", "x", "--prompt-logprobs", "0"], "--prompt-logprobs show only with --json"),
        (["Why is the sky blue?"], "is taken as the model"),
        (["--model", "", "--prompt", "x"], "model='' is an empty name"),
        (["--prompt", "x", "--max-tokens", "infk"], "'infk' is not a whole number"),
        (["--prompt", "x", "--temperature", "1e39"], "temperature=1e+39"),
        (
            ["qwen2.5-7b", "--prompt", "x"],
            "needs --load-format dummy; the hub's model is Qwen/Qwen2.5-7B-Instruct",
        ),
        (
            ["qwen2.5-7b", "--dummy-weight", "--tp", "9", "--input-len", "4"],
            "valid degrees of qwen2.5-7b: 1, 2, 4",
        ),
        (["a", "--model", "b", "--prompt", "x"], "two models: 'a' and --model 'b'"),
        (["--prompt", "x", "--load-format", "dummy"], "--load-format dummy needs --model"),
        (
            ["qwen2.5-7b", "--dummy-weight", "--tp", "3", "--input-len", "4"],
            "valid degrees: 1, 2, 4",
        ),
    ],
)
def test_user_errors_in_one_line(args, message, capsys):
    assert generate.main(args) == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err
    assert err.startswith("error: ") and err.count("\n") == 1


# ---- standard streams


def shell(line):
    """(exit code, stdout, stderr) of a line of bash in which $E starts `engine`."""
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; E='{sys.executable} -m engine.cli'; {line}"],
        capture_output=True, timeout=60,
    )  # fmt: skip
    return done.returncode, done.stdout.decode(), done.stderr.decode()


def test_closed_streams_are_like_the_null_device():
    assert shell("$E info --json >&-") == (0, "", "")
    assert shell("$E generate --bogus 2>&-") == (2, "", ""), "no error goes to stdout instead"
    code, out, err = shell("$E generate qwen2.5-7b --prompt - <&-")
    assert (code, out, err) == (2, "", "error: the prompt is empty: stdin\n")
    code, out, err = shell("printf '\\xff' | PYTHONIOENCODING=utf-8:strict $E generate --prompt -")
    assert (code, out, err) == (2, "", "error: --prompt -: stdin: not UTF-8 text\n")


def test_characters_that_stdout_lacks_are_escaped(tmp_path):
    model = write_model(tmp_path / "m", positions=512)
    line = (
        "PYTHONIOENCODING=latin-1 $E generate {} --load-format dummy --device cpu --quiet --max-tokens 2 "
        "-p '\u20ac \U0001f389 \xe9' --no-chat-template"
    )
    for more in ("", "--prompt-lines", "--json"):
        code, out, err = shell(line.format(model) + f" {more}")
        assert code == 0 and "Traceback" not in err, err
        if more:
            assert json.loads(out)["prompt"] == "\u20ac \U0001f389 \xe9"
    code, out, err = shell("$E generate $'/absent\\xff' --prompt x")
    assert (code, out) == (2, "") and "/absent\\udcff" in err


@pytest.mark.parametrize("arguments", ["--help", "generate --help", "bench --help"])
def test_help_that_cannot_be_written_is_no_traceback(arguments):
    gone = shell(f"($E {arguments}; echo $? >&2) | true")
    full = shell(f"$E {arguments} > /dev/full")
    assert gone[1:] in (("", "141\n"), ("", "0\n")), "0: written before the reader was gone"
    assert full == (2, "", "error: cannot write the output: No space left on device\n")


# ---- memory


@pytest.mark.parametrize(
    ("allocate", "what"),
    [
        (lambda: torch.empty(10**15, dtype=torch.uint8), "1000000000000000 bytes are not to be had"),
        (lambda: np.empty(2**50, np.uint8), "1.00 PiB are not to be had"),
        (lambda: bytearray(10**17), "an allocation failed"),
    ],
)  # fmt: skip
def test_out_of_memory_is_one_line(allocate, what, capsys):
    assert run(allocate) == 2
    err = capsys.readouterr().err
    assert err == f"error: out of memory: {what}; lower --max-num-seqs or --max-model-len\n"


def test_other_runtime_errors_are_not_hidden():
    def body():
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        run(body)


def test_an_interrupt_is_said_once(capsys):
    def body():
        signal.raise_signal(signal.SIGINT)

    assert run(body) == 130
    assert capsys.readouterr().err == "interrupted\n"
