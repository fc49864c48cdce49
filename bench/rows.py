"""The row schema of `engine.bench.rows` for the scripts here; `python -m bench.rows merge DIR` folds the rows of a
run into bench/results/, replacing rows that measure the same thing."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.bench.rows import IDENTITY, RESULTS, Rows, environment, identity, load, merge
from engine.console import Parser, run
from engine.errors import EngineError

__all__ = ["IDENTITY", "RESULTS", "Rows", "environment", "identity", "load", "merge", "weights_of"]


def weights_of(row: dict[str, Any]) -> str:
    """Of a row's model, as tables name them."""
    return "FP8" if row["quantization"] == "fp8" else "BF16"


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: see engine.console."""
    return run(lambda: _main(argv))


def _main(argv: Sequence[str] | None) -> int:
    parser = Parser(prog="python -m bench.rows", description=__doc__)
    parser.add_argument("command", choices=("merge",))
    parser.add_argument("folder", type=Path, metavar="DIR", help="$OUT of the run")
    folder = parser.parse_args(argv).folder
    if not (written := merge(folder)):
        raise EngineError(f"{folder} holds no files of rows")
    print("\n".join(written))
    return 0


if __name__ == "__main__":
    sys.exit(main())
