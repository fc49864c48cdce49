"""Metadata that is damaged or cannot be read: one line that names the file, never a traceback."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine import generate
from engine.checkpoint.index import INDEX, open_checkpoint
from engine.config import EngineConfig
from engine.errors import CheckpointError
from engine.generation_config import sampling_defaults
from engine.metadata import read_object, read_text
from engine.text.tokenizer import Tokenizer
from tests.unit.fakes import write_model


def _defaults(path: Path) -> None:
    sampling_defaults(EngineConfig(generation_config="auto"), path)


READERS = {
    "config.json": lambda path: generate.main([str(path), "--prompt", "x"]),
    "generation_config.json": _defaults,
    "tokenizer.json": Tokenizer,
    "tokenizer_config.json": Tokenizer,
    "chat_template.jinja": Tokenizer,
    "mine.jinja": lambda path: Tokenizer(path, path / "mine.jinja"),
    INDEX: open_checkpoint,
}


@pytest.mark.parametrize("name", READERS)
def test_a_file_that_cannot_be_read(tmp_path, name, monkeypatch, capsys):
    write_model(tmp_path)
    (tmp_path / name).touch()
    opened = Path.open

    def refusing(self, *args, **kwargs):  # as for a user who is not root
        if self.name == name:
            raise PermissionError(13, "Permission denied", str(self))
        return opened(self, *args, **kwargs)

    monkeypatch.setattr(Path, "open", refusing)
    message = f"{tmp_path / name} cannot be read: Permission denied"
    if name == "config.json":
        assert READERS[name](tmp_path) == 2
        assert capsys.readouterr().err == f"error: {message}\n"
    else:
        with pytest.raises(CheckpointError, match=f"^{message}$"):
            READERS[name](tmp_path)


def test_a_directory_in_place_of_the_file(tmp_path):
    with pytest.raises(CheckpointError, match="cannot be read: Is a directory"):
        read_text(tmp_path)
    assert read_text(tmp_path / "absent") is None


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"{", "is not valid JSON: "),
        (b"[" * 100_000, "is not valid JSON: "),
        (b"\xff{}", "is not UTF-8 text"),
        (b"[]", "holds a list, not an object"),
    ],
)
def test_a_file_that_holds_no_object(tmp_path, content, what):
    file = tmp_path / "x.json"
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"x\.json {what}"):
        read_object(file)
    file.write_text(json.dumps({"a": 1}))
    assert read_object(file) == {"a": 1}
