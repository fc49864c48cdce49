"""Ranks, buffers, the step loop. `create_executor` is the door."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.config import EngineConfig, ModelConfig
    from engine.runtime.executor import Executor

log = logging.getLogger("engine")


def create_executor(engine: EngineConfig, model: ModelConfig) -> Executor:
    """Load the model and make it ready to run. Raises EngineError for anything that cannot work, before
    the device is touched."""
    from engine.runtime.create import create_cpu_executor, create_gpu_executor, pick_device

    if pick_device(engine) == "cpu":
        return create_cpu_executor(engine, model)
    return create_gpu_executor(engine, model)
