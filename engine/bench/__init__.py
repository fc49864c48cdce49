"""`engine bench`: see engine/bench/main.py. Rows of results: engine/bench/rows.py."""

from __future__ import annotations


def main(argv: list[str] | None = None) -> int:
    """Exit code of the command."""
    from engine.bench.main import main as run_main

    return run_main(argv)
