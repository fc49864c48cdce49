"""Before any test module imports a kernel: the interpreter when there is no CUDA device."""

from __future__ import annotations

import signal

import torch

from tests.kernels.interpreter import prepare

prepare(torch.cuda.is_available())
# Under nohup it is ignored, and so it would be in the processes whose end by it is tested.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
