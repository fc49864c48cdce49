"""Latency-first tensor-parallel LLM inference: a small graph compiler over Triton kernels.

`from engine import LLM, SamplingParams` is the whole public API. Names load on first use, so that
`import engine` pulls in neither torch nor a tokenizer and command lines answer at once.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

# libgomp, which torch's CPU operators run on, reads this when torch is imported. Its threads spin 300,000 times at a
# barrier before they sleep; beside another process that wants the cores they spin while the one they wait for is not
# running: two demo models at once made 14 tokens/s each, 31 with this (alone 49 instead of 51).
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

if TYPE_CHECKING:
    from engine.async_llm import AsyncLLM
    from engine.llm import LLM
    from engine.outputs import CompletionOutput, Delta, Logprob, RequestOutput
    from engine.sampling import SamplingParams

__version__ = "0.1.0"

_HOME = {
    "LLM": "engine.llm",
    "AsyncLLM": "engine.async_llm",
    "SamplingParams": "engine.sampling",
    "RequestOutput": "engine.outputs",
    "CompletionOutput": "engine.outputs",
    "Logprob": "engine.outputs",
    "Delta": "engine.outputs",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "Delta",
    "Logprob",
    "RequestOutput",
    "SamplingParams",
]


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module 'engine' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
