"""Kernel tests run in Triton's interpreter without a CUDA device and natively with one.

TRITON_INTERPRET must be set before the first `import triton` of the process: no kernel module may
be imported above `prepare` (tests/conftest.py makes it so for the whole suite).
"""

from __future__ import annotations

import os

import pytest
import torch

from tests.kernels.interpreter import prepare

prepare(torch.cuda.is_available())


@pytest.fixture(scope="session")
def device() -> str:
    """cpu under the interpreter, cuda on a card."""
    return "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(1234)
