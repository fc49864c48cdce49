"""Sampling defaults that a checkpoint brings in generation_config.json; used only when asked for."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.errors import CheckpointError, RequestError
from engine.metadata import read_object
from engine.sampling import SamplingParams

if TYPE_CHECKING:
    from engine.config import EngineConfig

log = logging.getLogger("engine")

_FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_FILTERS = ("temperature", "top_k", "top_p", "min_p")


def sampling_defaults(config: EngineConfig, directory: Path | None) -> dict[str, Any]:
    """Fields of SamplingParams from the model directory, under generation_config="auto"; else {}.

    As transformers reads the file: do_sample false is greedy, and without a temperature sampling is at 1.
    Says in the log what it took. CheckpointError for a file that is not valid.
    """
    if config.generation_config == "none" or directory is None:
        return {}
    file = directory / "generation_config.json"
    values = read_object(file)
    if values is None:
        log.warning("%s: no generation_config.json; sampling defaults stay greedy", directory)
        return {}
    found = {name: values[name] for name in _FIELDS if values.get(name) is not None}
    sampled = values.get("do_sample", "temperature" in found)
    if not sampled:
        found = {name: value for name, value in found.items() if name not in _FILTERS}
    else:
        found.setdefault("temperature", 1.0)
    try:
        SamplingParams(**found)
    except RequestError as e:
        raise CheckpointError(f"{file}: {e}; --generation-config none ignores the file") from None
    shown = ", ".join(f"{name} {value}" for name, value in found.items()) or "greedy"
    log.info("sampling defaults of generation_config.json: %s", shown)
    return found
