"""From a deployment's names to what they stand for: the model's directory, its shape, its tokenizer."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from engine.checkpoint.scheme import scheme_of
from engine.config import PRESETS, EngineConfig, ModelConfig, from_dir, preset
from engine.errors import EngineError
from engine.presets import hub_id

if TYPE_CHECKING:
    from engine.text.tokenizer import Tokenizer


def resolve(config: EngineConfig) -> tuple[EngineConfig, ModelConfig, Path | None]:
    """(config with `model` made a local directory and `quantization` that of the checkpoint there, the model's shape,
    that directory or None).

    Raises EngineError for what the shapes alone rule out. Imports neither torch nor a tokenizer.
    """
    directory: Path | None = None
    # os.path, not Path: Path.is_dir() raises below a directory that may not be searched.
    if config.load_format == "dummy" and not (config.model and os.path.isdir(config.model)):
        if not config.model:
            raise EngineError(
                f"--load-format dummy needs --model: a directory or one of {', '.join(PRESETS)}"
            )
        model = preset(config.model)
    else:
        from engine.demo import resolve_model

        name = (config.model or "").lower()
        if name in PRESETS and not os.path.exists(config.model or ""):
            raise EngineError(
                f"--model {config.model} is a preset, a shape without weights, and needs --load-format dummy; "
                f"the hub's model is {hub_id(name)}"
            )
        directory = resolve_model(config.model)
        model = from_dir(directory)
        config = replace(config, model=str(directory))
        if config.load_format != "dummy" and scheme_of(directory):
            config = replace(config, quantization="fp8")
    config.fp8_prefill(config.quantization)  # refuses what the weights do not allow
    limit = model.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > limit:
        raise EngineError(
            f"--max-model-len {config.max_model_len} is over the {limit} positions of {model.name}"
        )
    if config.max_model_len is not None:
        model.check_context(config.max_model_len)
    model.shard(config.shard_of or config.tensor_parallel_size)
    return config, model, directory


def load_tokenizer(
    config: EngineConfig, directory: Path | None, chat_template: str | Path | None
) -> Tokenizer | None:
    """None if the model's own directory has none: token ids still work."""
    path = Path(config.tokenizer).expanduser() if config.tokenizer else directory
    if path is None or (config.tokenizer is None and not (path / "tokenizer.json").is_file()):
        return None
    from engine.text.tokenizer import Tokenizer

    return Tokenizer(path, chat_template)
