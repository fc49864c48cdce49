"""`engine COMMAND ...`: one door to the command lines, `python -m engine.COMMAND` being the other."""

from __future__ import annotations

import importlib
import importlib.util
import sys

import engine
from engine.console import run, say
from engine.errors import EngineError

_COMMANDS = {
    "generate": "answer prompts",
    "chat": "talk to a model",
    "serve": "OpenAI-compatible server",
    "bench": "measure latency and throughput",
    "autotune": "time kernel configurations and keep the best",
    "profile": "where the time of a decode step goes",
    "quantize": "write an FP8 checkpoint",
    "visualize": "draw the compiled graph",
    "info": "versions, GPUs, links, caches",
}


def commands() -> dict[str, str]:
    """Name -> description of the commands that this version has."""
    return {n: text for n, text in _COMMANDS.items() if importlib.util.find_spec(f"engine.{n}")}


def usage() -> str:
    lines = ["usage: engine COMMAND [options]     (engine COMMAND --help explains one)", ""]
    lines += [f"  {name:<10} {text}" for name, text in commands().items()]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Dispatch to `engine.<command>.main(argv)`, imports and usage included in what `run` handles."""
    args = sys.argv[1:] if argv is None else argv
    return run(lambda: _dispatch(args))


def _dispatch(args: list[str]) -> int:
    if not args:
        say(usage())
        return 2
    name, rest = args[0], args[1:]
    if name in ("-h", "--help", "help"):
        print(usage())
        return 0
    if name in ("-V", "--version"):
        print(f"engine {engine.__version__}")
        return 0
    if name not in commands():
        raise EngineError(f"no command {name!r}; commands: {', '.join(commands())}")
    return importlib.import_module(f"engine.{name}").main(rest) or 0


if __name__ == "__main__":
    sys.exit(main())
