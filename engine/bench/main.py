"""`python -m engine.bench COMMAND`: measure latency and scaling, or run the card's kernel benchmarks.

  latency    one batch of requests: latency, TTFT, TPOT, ITL with percentiles (vLLM's flags and defaults)
  sweep      tokens per second over TP degrees, beside the bandwidth line and the Amdahl line
  startup    from nothing to ready, with an empty kernel cache and with a full one
  allreduce  \\
  gemv        } the scripts bench/all_reduce.py, gemv.py and attention.py of the repository; need a GPU
  attention  /

allreduce --predict prints what an all-reduce should take at TP = 2, 4 and 8, and needs no GPU.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from engine.console import Parser, log_to_stderr, run, say
from engine.errors import EngineError

ROOT = Path(__file__).parents[2]
SCRIPTS = {"allreduce": "all_reduce", "gemv": "gemv", "attention": "attention"}
COMMANDS = ("latency", "sweep", "startup", *SCRIPTS)


def main(argv: list[str] | None = None) -> int:
    """Exit code: see engine.console; 1 also if --compare finds a regime that is slower, 2 if it finds
    nothing to compare with."""
    args = sys.argv[1:] if argv is None else argv
    if not args or args[0] in ("-h", "--help"):
        print(__doc__.rstrip() if __doc__ else "")
        return 0 if args else 2
    return run(lambda: _dispatch(args[0], args[1:]))


def _dispatch(name: str, rest: list[str]) -> int:
    if name == "allreduce" and "--predict" in rest:
        from engine.bench.rows import load
        from engine.model.exchange import prediction_table

        p = Parser(
            prog=f"python -m engine.bench {name}", description="What an all-reduce should take."
        )
        p.add_argument("--predict", action="store_true", help="alone; needs no GPU")
        p.parse_args(rest)
        print(prediction_table(load()))
        return 0
    if name in SCRIPTS:
        return run_script(name, rest)
    if name not in COMMANDS:
        raise EngineError(f"no benchmark {name!r}; there are {', '.join(COMMANDS)}")
    module = importlib.import_module(f"engine.bench.{name}")
    p = Parser(prog=f"python -m engine.bench {name}", description=module.__doc__)
    p.add_argument("--verbose", action="store_true", help="the engine's progress lines on stderr")
    module.add_options(p)
    args = p.parse_args(rest)
    log_to_stderr(quiet=not args.verbose)
    work: Callable[..., int] = module.run
    return work(args)


def run_script(name: str, rest: list[str]) -> int:
    """Run a script of bench/ with these arguments. EngineError without a GPU or without the repository."""
    script = ROOT / "bench" / f"{SCRIPTS[name]}.py"
    if not script.is_file():
        raise EngineError(
            f"engine bench {name} runs {script}, which is not there: it is part of the repository, "
            "not of the installed package"
        )
    help_only = bool({"-h", "--help"} & set(rest))
    if not help_only:
        import torch

        if not torch.cuda.is_available():
            raise EngineError(
                f"engine bench {name} times kernels and torch sees no CUDA device here; without one, "
                "`engine bench sweep` and `engine profile` print predictions, and `engine bench allreduce --predict` that "
                "of an all-reduce"
            )
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    out = os.path.abspath(os.environ.get("OUT", "out"))
    if not help_only:
        say(f"python -m bench.{SCRIPTS[name]}: rows go to {out}")
    command = [sys.executable, "-m", f"bench.{SCRIPTS[name]}", *rest]
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": path, "OUT": out}).returncode
