"""Manners of the command lines: one-line errors, signals, exit codes, what goes to stderr.

Exit codes: 0 done, 1 the device failed, 2 the user's input cannot work, 129 SIGHUP, 130 Ctrl-C, 143 SIGTERM.
"""

from __future__ import annotations

import argparse
import codecs
import errno
import io
import json
import logging
import os
import re
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TextIO

from engine.errors import DeviceError, EngineError

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
CLEAN_END_S = 5.0  # after a signal: then the process ends whatever still runs


class _Help(argparse.RawDescriptionHelpFormatter):
    """Spellings of a flag in one line, its value named once."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30, width=100)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return super()._format_action_invocation(action)
        value = self._format_args(action, "") if action.nargs != 0 else ""
        if action.nargs != 0 and not action.metavar and not action.choices:
            value = self._format_args(action, action.dest.upper())
        return ", ".join(action.option_strings) + (f" {value}" if value else "")


class Parser(argparse.ArgumentParser):
    """argparse with exact flags and with errors as one `error: ...` line instead of the usage text."""

    def __init__(self, **options) -> None:
        super().__init__(allow_abbrev=False, formatter_class=_Help, **options)

    def error(self, message: str) -> NoReturn:
        raise EngineError(f"{message} (see {self.prog} --help)")

    def print_help(self, file=None) -> None:
        """argparse drops errors of writing, or leaves them to Python's end; here `run` sees them."""
        print(self.format_help(), end="", file=file or sys.stdout, flush=True)


class _Watchdog:
    """Ends the process if unwinding takes longer than CLEAN_END_S."""

    def __init__(self) -> None:
        self._timer: threading.Timer | None = None

    def start(self, code: int) -> None:
        self._timer = threading.Timer(CLEAN_END_S, os._exit, (code,))
        self._timer.daemon = True
        self._timer.start()

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


_watchdog = _Watchdog()


def say(text: str) -> None:
    """A line for the person, on stderr: stdout carries answers only."""
    print(text, file=sys.stderr, flush=True)


def check_above_zero(flag: str, value: float) -> None:
    """EngineError for a number that is none, infinite or not above 0."""
    if not 0 < value < float("inf"):
        raise EngineError(f"{flag} {value} is not a number above 0")


def check_output(flag: str, name: str | None) -> None:
    """EngineError if the file cannot be written: said before minutes of work, not after. A new one is taken away."""
    if name is None:
        return
    path = Path(name)
    there = path.exists()
    if there and not (path.is_file() or path.is_dir()):  # a pipe would block, a device never end
        raise EngineError(f"{flag} {name} is not a regular file")
    try:
        path.open("a").close()
        if not there:
            path.unlink()
    except OSError as e:
        raise EngineError(f"{flag} {name}: {e.strerror}") from None


def run(body: Callable[[], int]) -> int:
    """Run a command's body; turns its errors and signals into one line and an exit code."""
    _mend_streams()
    previous = _handle_signals()
    try:
        code = body()
        sys.stdout.flush()
        return code
    except EngineError as e:
        say("error: " + " ".join(str(e).split()))
        return 2
    except DeviceError as e:
        say("error: the device failed: " + " ".join(str(e).split()))
        return 1
    except (MemoryError, RuntimeError) as e:  # numpy's and torch's own (of the CPU) among them
        if not isinstance(e, MemoryError) and "DefaultCPUAllocator" not in str(e):
            raise
        asked = re.search(r"allocate (\d\S* \w+)", str(e))
        what = f"{asked[1]} are not to be had" if asked else "an allocation failed"
        say(f"error: out of memory: {what}; lower --max-num-seqs or --max-model-len")
        return 2
    except KeyboardInterrupt as e:
        say(str(e) or "interrupted")  # a batch knows more to say
        return 130
    except BrokenPipeError:  # the reader of stdout went away, as `head` does
        _mute()
        return 141
    except OSError as e:
        if e.errno not in _NO_ROOM:
            raise
        say(f"error: cannot write the output: {e.strerror}")
        _mute()
        return 2
    finally:
        _watchdog.cancel()
        for number, handler in previous.items():
            signal.signal(number, handler)


def _mend_streams() -> None:
    """A standard stream that the caller closed (Python has None for it) becomes one on the null device; what the
    encoding of stdout or stderr lacks is escaped instead of raising after the work (UTF-8 lacks surrogates only).
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  (as long as the process)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def json_line(row: dict[str, Any], stream: TextIO) -> str:
    """`row` as JSON for this stream; ASCII unless it is in UTF-8, for the escapes of a stream are not JSON's."""
    utf8 = codecs.lookup(stream.encoding or "utf-8").name == "utf-8"
    return json.dumps(row, ensure_ascii=not utf8)


def _mute() -> None:
    """What stdout still holds goes nowhere: Python would fail on it again at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def command(
    parser: Parser, body: Callable[[argparse.Namespace], int], argv: list[str] | None
) -> int:
    """`run` a command that has --quiet: parse its arguments, log to stderr, then `body`."""

    def parsed() -> int:
        args = parser.parse_args(argv)
        log_to_stderr(args.quiet)
        return body(args)

    return run(parsed)


def log_to_stderr(quiet: bool) -> None:
    """Progress lines of the engine as plain text; with quiet, warnings only."""
    logging.basicConfig(stream=sys.stderr, format="%(message)s")
    logging.getLogger("engine").setLevel(logging.WARNING if quiet else logging.INFO)


def _handle_signals() -> dict[int, Any]:
    """The first Ctrl-C unwinds (devices are given back), in CLEAN_END_S at most; the second ends the process
    at once. SIGTERM and SIGHUP (the terminal is closed) likewise; not SIGHUP under nohup. While a module is imported
    the first ends the process too: torch's C code drops what a handler raises, and then the command would go on.

    Returns the handlers that were there; only the main thread may set any.
    """
    if threading.current_thread() is not threading.main_thread():
        return {}

    def interrupt(number, frame):
        if _importing(frame):
            say("interrupted")
            os._exit(130)
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))
        _watchdog.start(130)
        raise KeyboardInterrupt

    def terminate(number, frame):
        code = 128 + number
        if _importing(frame):
            os._exit(code)
        signal.signal(number, lambda *_: os._exit(code))
        _watchdog.start(code)
        raise SystemExit(code)

    handlers: dict[int, Any] = {signal.SIGINT: interrupt, signal.SIGTERM: terminate}
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        handlers[signal.SIGHUP] = terminate
    return {number: signal.signal(number, handler) for number, handler in handlers.items()}


def _importing(frame: FrameType | None) -> bool:
    """Whether an import is under way in this frame or below it."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False
