"""Counts what must not happen after start-up: kernels compiled or loaded by the JIT."""

from __future__ import annotations

from typing import Any

import triton

_compiles = 0


def _count(**_: Any) -> None:
    global _compiles
    _compiles += 1


def jit_compiles() -> int:
    """Kernel specialisations that Triton's JIT has built or taken from its disk cache in this process."""
    if triton.knobs.runtime.jit_post_compile_hook is None:
        triton.knobs.runtime.jit_post_compile_hook = _count
    return _compiles
