"""Fixtures that several unit tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.fakes import write_model


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    """A model directory: config.json of a tiny model and a tokenizer, no weights."""
    return write_model(tmp_path_factory.mktemp("model"))
