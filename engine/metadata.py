"""The text and JSON files beside the weights: one place that reads them, one error for what cannot be read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine.errors import CheckpointError


def read_text(file: Path) -> str | None:
    """Text of a file; None if there is no such file.

    Raises CheckpointError for one that is there and cannot be read. Opening is the only question asked: is_file()
    raises by itself in a directory that may not be searched, and says nothing about a file that may not be read.
    """
    try:
        return file.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as e:
        raise CheckpointError(f"{file} cannot be read: {e.strerror or e}") from None
    except UnicodeDecodeError as e:
        raise CheckpointError(f"{file} is not UTF-8 text: {e}") from None


def read_object(file: Path) -> dict[str, Any] | None:
    """The JSON object of a file; None if there is no such file. CheckpointError for anything else."""
    text = read_text(file)
    if text is None:
        return None
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as e:  # the latter: brackets nested too deep
        raise CheckpointError(f"{file} is not valid JSON: {e}") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{file} holds a {type(data).__name__}, not an object")
    return data
