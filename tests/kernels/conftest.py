"""Kernel tests run in Triton's interpreter without a CUDA device and natively with one.

TRITON_INTERPRET must be set before the first `import triton` of the process: no kernel module may be imported
above `prepare`.
"""

from __future__ import annotations

import pytest
import torch

from tests.kernels.interpreter import prepare

prepare(torch.cuda.is_available())


@pytest.fixture(scope="session")
def device() -> str:
    """cpu under the interpreter, cuda on a card."""
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(1234)
