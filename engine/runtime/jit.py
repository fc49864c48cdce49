"""Triton's cache keys: computed once, in one order, before threads compile.

Triton 3.6 hashes a kernel together with the globals of the functions that it calls, as far as those have been
hashed before. So its key, hence hit or miss in the disk cache, depends on which function came first: a warm start
compiled some kernels anew. And every thread that asks for the hash of Triton's own files (0.4 GB) computes it.
"""

from __future__ import annotations

import sys
import threading
from types import ModuleType

from triton.compiler.compiler import make_backend
from triton.runtime.cache import triton_key
from triton.runtime.driver import driver
from triton.runtime.jit import JITCallable

KERNELS = "engine.kernels."
_hashing = threading.Lock()


def hash_compiler() -> None:
    """Hash Triton's files and ask ptxas for its version, once a process. Needs a CUDA device; 0.3 s, nearly all
    of it without the interpreter's lock, so start-up does it in a thread beside other work."""
    with _hashing:
        triton_key()
        make_backend(driver.active.get_current_target()).hash()


def settle_keys() -> None:
    """Compute the key of every kernel function imported so far, callees before callers.

    Forgets the globals then: every launch would compare all of them, 2 us, and the engine changes none.
    """
    done: set[str] = set()
    hashed: list[JITCallable] = []

    def settle(module: ModuleType) -> None:
        if module.__name__ in done:
            return
        done.add(module.__name__)
        functions = [value for value in vars(module).values() if isinstance(value, JITCallable)]
        for function in functions:
            if function.__module__.startswith(KERNELS):
                settle(sys.modules[function.__module__])
        for function in functions:  # a module defines a function above what calls it
            _ = function.cache_key
        hashed.extend(functions)

    for name in sorted(name for name in sys.modules if name.startswith(KERNELS)):
        settle(sys.modules[name])
    for function in hashed:
        function.used_global_vals.clear()
