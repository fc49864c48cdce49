"""User errors of the command line: one line on stderr, nothing on stdout, exit code 2."""

from __future__ import annotations

import pytest

from engine import generate


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
