"""Start-up phases with names and times: "ready in 3.2 s: links 0.1, load 1.9, compile 0.6, capture 0.6"."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

log = logging.getLogger("engine")


class Phases:
    """Collects how long each named phase of start-up took."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._done: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a block; a name used twice adds up. Without garbage collection: what start-up makes stays, and
        walking it again and again took a third of the time that graphs take."""
        log.info("start-up: %s ...", name)
        begin, collected = time.perf_counter(), gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if collected:
                gc.enable()
            self._done[name] = self._done.get(name, 0.0) + time.perf_counter() - begin

    def seconds(self) -> dict[str, float]:
        """Phase -> seconds, and the sum from construction to the last phase's end."""
        return dict(self._done)

    def summary(self) -> str:
        """One line for the log."""
        total = time.perf_counter() - self._start
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self._done.items())
        return f"ready in {total:.1f} s: {parts}"
