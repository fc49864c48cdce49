"""The row schema of `engine.bench.rows` for the scripts here; `python -m bench.rows merge DIR` folds the rows of a
run into bench/results/, replacing rows that measure the same thing."""

from __future__ import annotations

import sys
from pathlib import Path

from engine.bench.rows import IDENTITY, RESULTS, Rows, environment, identity, load, merge

__all__ = ["IDENTITY", "RESULTS", "Rows", "environment", "identity", "load", "merge"]

if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] != "merge":
        sys.exit("usage: python -m bench.rows merge DIR")
    if not (written := merge(Path(sys.argv[2]))):
        sys.exit(f"error: {sys.argv[2]} holds no files of rows")
    print("\n".join(written))
