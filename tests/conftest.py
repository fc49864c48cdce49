"""Before any test module imports a kernel: the interpreter when there is no CUDA device."""

from __future__ import annotations

import torch

from tests.kernels.interpreter import prepare

prepare(torch.cuda.is_available())
