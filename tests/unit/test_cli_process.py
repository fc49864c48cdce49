"""A command line as a process of its own: exit codes, signals, what becomes of its streams. The model is a tiny one with
random weights on the CPU back end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.unit.checkpoint_fixtures import save_model
from tests.unit.fakes import imported_by, write_model

ENV = {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return str(write_model(tmp_path_factory.mktemp("model"), positions=4096))


def engine(*args, stdin="", module="engine.generate"):
    command = [sys.executable, "-m", module, *args]
    return subprocess.run(
        command, input=stdin, capture_output=True, text=True, timeout=120, env=ENV
    )


def test_user_errors_from_a_process(directory):
    done = engine("--prompt", "x", "--model", directory, "--tp", "3")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ") and "valid degrees: 1, 2, 4" in done.stderr
    assert "Traceback" not in done.stderr and done.stderr.count("\n") == 1


LONG = ["--load-format", "dummy", "--device", "cpu", "--prompt", "hello", "--ignore-eos"]


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_signals_end_a_run_cleanly(directory, number, code):
    command = [sys.executable, "-m", "engine.generate", directory, *LONG, "--max-tokens", "4000"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENV)
    try:
        assert process.stdout.read(1), process.stderr.read().decode()
        start = time.monotonic()
        process.send_signal(number)
        _, err = process.communicate(timeout=30)
        assert process.returncode == code, err
        assert time.monotonic() - start < 5
        assert b"Traceback" not in err
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        ("engine.generate --prompt x", 130, "interrupted\n"),
        ("engine.quantize none out", 130, "interrupted\n"),
        ("engine.autotune --model qwen2.5-7b --dry-run", 130, "interrupted\n"),
        # torch is imported before their main, so the signal ends them: 130 for a shell
        ("bench.gemv", -signal.SIGINT, ""),
        ("bench.gemv_workers", -signal.SIGINT, ""),
    ],
)
def test_ctrl_c_while_torch_is_imported(tmp_path, command, code, said):
    process = subprocess.Popen(
        [sys.executable, "-m", *command.split()], cwd=tmp_path, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, env={**ENV, "PYTHONPATH": str(Path(__file__).parents[2])},
    )  # fmt: skip
    maps = Path(f"/proc/{process.pid}/maps")
    try:
        while "libtorch" not in maps.read_text():
            assert process.poll() is None, process.stderr.read().decode()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
        assert process.returncode == code, err
        assert err.decode() == said
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    "number, code, said", [(signal.SIGINT, 130, "interrupted\n"), (signal.SIGTERM, 143, "")]
)
def test_a_module_that_drops_the_interrupt_cannot_keep_the_command(tmp_path, number, code, said):
    """As torch's C code does while it imports numpy."""
    (tmp_path / "torch.py").write_text(
        "import time\n"
        "print('importing', flush=True)\n"
        "try:\n    time.sleep(60)\nexcept BaseException:\n    pass\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "engine.generate", "--prompt", "x", "--device", "cpu"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**ENV, "PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}"},
    )  # fmt: skip
    try:
        assert process.stdout.readline() == "importing\n"
        process.send_signal(number)
        _, err = process.communicate(timeout=4)  # the watchdog would end it after 5 s
        assert (process.returncode, err) == (code, said)
    finally:
        process.kill()
        process.wait()


def test_an_import_of_bench_leaves_ctrl_c_alone():
    code = "import signal as s; old = s.getsignal(s.SIGINT); import bench; print(old is s.getsignal(s.SIGINT))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("True\n", "")


@pytest.mark.parametrize("name", ["generate", "quantize", "autotune"])
def test_help_imports_no_torch(name):
    code = f"from engine.{name} import main\ntry: main(['--help'])\nexcept SystemExit: pass"
    assert imported_by(code, "torch") == []


def test_a_closed_pipe_is_quiet(directory):
    command = f"{sys.executable} -m engine.generate {directory} {' '.join(LONG)} --max-tokens 800"
    done = subprocess.run(
        ["bash", "-c", f"{command} | head -c 1"], capture_output=True, env=ENV, timeout=120
    )
    assert len(done.stdout) == 1
    assert b"Traceback" not in done.stderr and b"BrokenPipe" not in done.stderr


def test_a_full_disk_is_one_line(directory):
    command = f"{sys.executable} -m engine.generate {directory} {' '.join(LONG)} --max-tokens 4 --json --quiet"
    done = subprocess.run(
        ["bash", "-c", f"{command} > /dev/full"], capture_output=True, env=ENV, timeout=120
    )
    last = done.stderr.decode().splitlines()[-1]
    assert done.returncode == 2 and last.startswith("error: cannot write the output: No space")
    assert b"Traceback" not in done.stderr and b"Exception ignored" not in done.stderr


def test_a_report_without_room_does_not_hide_that_the_checkpoint_is_whole(tmp_path):
    source, made = save_model(tmp_path / "source"), tmp_path / "made"
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m engine.quantize {source} {made} > /dev/full"],
        capture_output=True, env=ENV, timeout=120,
    )  # fmt: skip
    lines = done.stderr.decode().splitlines()
    assert lines[0] == f"written: {made}" and (made / "config.json").is_file()
    assert lines[1:] == ["error: cannot write the output: No space left on device"]
    assert done.returncode == 2


def test_a_real_process_answers(directory):
    arguments = ["--model", directory, *LONG[:4], "--prompt", "-", "--max-tokens", "8", "--json"]
    done = engine(*arguments, "--ignore-eos", stdin="hello")
    assert done.returncode == 0, done.stderr
    row = json.loads(done.stdout)
    assert len(row["token_ids"]) == 8 and "user\nhello<|im_end|>" in row["prompt"]
