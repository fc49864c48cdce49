"""Metadata that is damaged or cannot be read: one line that names the file, never a traceback."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine import generate
from engine.checkpoint.index import INDEX, open_checkpoint
from engine.config import EngineConfig, from_dir
from engine.errors import CheckpointError, EngineError, RequestError
from engine.generation_config import sampling_defaults
from engine.metadata import read_object, read_text
from engine.text.tokenizer import Tokenizer, eos_token_ids
from tests.unit.checkpoint_fixtures import edit_json
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


@pytest.mark.parametrize(
    ("weight_map", "what"),
    [
        ({"a": 5}, r"weight_map\['a'\] is 5, no file name"),
        ({"a": []}, r"weight_map\['a'\] is \[\], no file name"),
        (["a"], r"weight_map is \['a'\]"),
        (None, "weight_map is None"),
    ],
)
def test_a_damaged_index(tmp_path, weight_map, what):
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match=f"{INDEX} is not a safetensors index: {what}"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("template", "what"),
    [
        (5, "chat_template is 5, not the text of a template"),
        ({"a": "b"}, "chat_template is {'a': 'b'}, not the text"),
        ([5], "chat_template is a list, but not of named templates"),
        ([{"name": "default", "template": 5}], "chat_template is 5, not the text"),
        ("a\n{% if %}", "chat template, line 2"),
    ],
)
def test_a_damaged_template(tmp_path, template, what):
    write_model(tmp_path, chat_template=template)
    with pytest.raises(CheckpointError, match=f"tokenizer_config.json: {what}"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize("value", [5, {"1": 5}, {"x": {"content": "hello", "special": True}}])
def test_damaged_added_tokens(tmp_path, value):
    write_model(tmp_path, added_tokens_decoder=value)
    with pytest.raises(CheckpointError, match="added_tokens_decoder is damaged"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("template", "what"),
    [
        ("{% for i in range(10**9) %}{% endfor %}", "OverflowError: Range too big"),
        ("{{ tools | length / 0 }}", "TypeError: "),
        ("{{ messages | length / 0 }}", "ZeroDivisionError: division by zero"),
        ("{{ '%(a)s' % {} }}{{ {}['x'].y.z }}", "KeyError: 'a'"),
        ("{{ messages[0].role.index('z') }}", "ValueError: substring not found"),
        ("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", "RecursionError: "),
    ],
)
def test_a_template_that_fails(tmp_path, template, what):
    write_model(tmp_path, chat_template=template)
    message = f"the chat template of .*tokenizer_config.json fails: {what}"
    with pytest.raises(RequestError, match=message):
        Tokenizer(tmp_path).encode_chat([{"role": "user", "content": "x"}])


def test_a_part_without_text(tmp_path):
    tokenizer = Tokenizer(write_model(tmp_path))
    with pytest.raises(RequestError, match=r"messages\[0\].content has a part without text"):
        tokenizer.encode_chat([{"role": "user", "content": [{"type": "text"}]}])


@pytest.mark.parametrize("value", ["x", -1, [], 400, [1, 400], [None], True, 1.0, {}])
def test_an_eos_that_no_token_has(tmp_path, value):
    write_model(tmp_path)
    model = from_dir(tmp_path)
    assert eos_token_ids(tmp_path, model, None) == {0, 1, 2}
    for file in ("config.json", "generation_config.json"):
        write_model(tmp_path)
        edit_json(tmp_path / file, eos_token_id=value)
        with pytest.raises(EngineError) as e:
            eos_token_ids(tmp_path, from_dir(tmp_path), None)
        assert f"{file}: eos_token_id is {value!r}, neither a token id from 0 to 399" in str(
            e.value
        )
