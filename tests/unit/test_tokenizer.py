"""Tokenizer and chat template: the same ids and text as transformers.AutoTokenizer."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from engine.config import PRESETS
from engine.errors import CheckpointError, RequestError
from engine.text.tokenizer import Tokenizer, eos_token_ids
from tests.unit.fakes import (
    CHATML,
    CORPUS,
    imported_by,
    write_byte_level,
    write_sentencepiece,
)

CHATS = [
    [{"role": "user", "content": 'Hi <b>there</b> & "you"'}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "你好 🎉"}],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ],
]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "é <&> 'q'"}}]


@pytest.fixture(scope="module", params=["byte_level", "sentencepiece", "add_bos", "no_bos", "late"])
def directory(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    if request.param == "byte_level":
        return write_byte_level(path)
    if request.param == "late":  # a special token that only tokenizer_config.json declares special
        return write_byte_level(path, pad_token="hello")
    extra = {"add_bos": {"add_bos_token": True}, "no_bos": {"add_bos_token": False}}
    return write_sentencepiece(path, chat_template=CHATML, **extra.get(request.param, {}))


def test_equals_transformers(directory):
    transformers = pytest.importorskip("transformers")
    reference = transformers.AutoTokenizer.from_pretrained(directory)
    mine = Tokenizer(directory)
    texts = [*CORPUS, "", " a  b", "<s>a", "x<|im_end|>y", "a" * 50, "hello hello", "\r\n\x00"]
    for text in texts:
        ids = mine.encode(text)
        assert ids == reference.encode(text), text
        assert mine.encode(text, add_special_tokens=False) == reference.encode(
            text, add_special_tokens=False
        )
        for skip in (True, False):
            assert mine.decode(ids, skip_special_tokens=skip) == reference.decode(
                ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
            )
    assert mine.eos_token_ids == (reference.eos_token_id,)
    assert mine.bos_token_id == reference.bos_token_id
    for messages in CHATS:
        for tools in (None, TOOLS):
            text, ids = mine.encode_chat(messages, tools=tools)
            want = reference.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=True
            )
            assert text == want
            assert ids == reference.encode(want, add_special_tokens=False)


def test_default_system_prompt_is_the_templates_own(tmp_path):
    tokenizer = Tokenizer(write_byte_level(tmp_path))
    text, ids = tokenizer.encode_chat([{"role": "user", "content": "hi"}])
    assert "You are a test assistant." in text and text.endswith("<|im_start|>assistant\n")
    own, fewer = tokenizer.encode_chat(
        [{"role": "system", "content": "S"}, {"role": "user", "content": "hi"}]
    )
    assert "test assistant" not in own and len(fewer) < len(ids)
    assert tokenizer.encode_chat([{"role": "user", "content": "a"}], add_generation_prompt=False)[
        0
    ].endswith("<|im_end|>\n")


def test_truncation_left_by_the_trainer_does_not_apply(tmp_path):
    tokenizer = Tokenizer(write_byte_level(tmp_path))
    assert len(tokenizer.encode("The quick brown fox jumps over the lazy dog. " * 9)) > 5


def test_template_sources_in_order(tmp_path):
    def rendered(**kwargs):
        return Tokenizer(tmp_path, **kwargs).encode_chat([{"role": "user", "content": "x"}])[0]

    write_byte_level(tmp_path, chat_template=None)
    with pytest.raises(RequestError, match=r"no chat template.*--no-chat-template"):
        rendered()
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "from json"}))
    assert rendered() == "from json"
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "named"}]
    write_byte_level(tmp_path, chat_template=named)
    assert rendered() == "named"
    (tmp_path / "chat_template.jinja").write_text("from jinja")
    assert rendered() == "from jinja"
    file = tmp_path / "mine.jinja"
    file.write_text("{% generation %}mine{% endgeneration %}{{ strftime_now('%%') }}")
    assert rendered(chat_template=file) == "mine%"
    with pytest.raises(RequestError, match=r"--chat-template .*no such file"):
        rendered(chat_template=tmp_path / "absent")
    file.write_text("{% if %}")
    with pytest.raises(CheckpointError, match="chat template, line 1"):
        rendered(chat_template=file)


@pytest.mark.parametrize(
    ("messages", "what"),
    [
        ([], "messages is empty"),
        (["hi"], r"messages\[0\]"),
        ([{"role": "user"}], r"messages\[0\] has no content"),
        ([{"content": "x"}], r"messages\[0\]"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "not of type 'text'"),
        ([{"role": "user", "content": 3}], "content is not text"),
    ],
)
def test_malformed_messages_are_named(tmp_path, messages, what):
    tokenizer = Tokenizer(write_byte_level(tmp_path))
    with pytest.raises(RequestError, match=what):
        tokenizer.encode_chat(messages)


def test_a_template_that_refuses(tmp_path):
    template = "{{ raise_exception('roles must alternate') }}"
    tokenizer = Tokenizer(write_byte_level(tmp_path, chat_template=template))
    with pytest.raises(RequestError, match="roles must alternate"):
        tokenizer.encode_chat([{"role": "user", "content": "x"}])


def test_text_parts_are_joined(tmp_path):
    tokenizer = Tokenizer(write_byte_level(tmp_path))
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert "user\nab<|im_end|>" in tokenizer.encode_chat([{"role": "user", "content": parts}])[0]


def test_eos_is_the_union_of_its_three_sources(tmp_path):
    tokenizer = Tokenizer(write_byte_level(tmp_path))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    model = replace(PRESETS["mistral-7b"], eos_token_ids=(5,))
    assert eos_token_ids(tmp_path, model, tokenizer) == {2, 5, 7, 9}
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 7}))
    assert eos_token_ids(tmp_path, replace(model, eos_token_ids=()), None) == {7}
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": None}))
    assert eos_token_ids(tmp_path, model, None) == {5}
    assert eos_token_ids(None, model, None) == {5}


def test_missing_and_broken_files(tmp_path):
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json.*--tokenizer"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer(tmp_path)
    write_byte_level(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[1")
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json is not valid JSON"):
        Tokenizer(tmp_path)


def test_lone_surrogates_are_refused(tmp_path):
    tokenizer = Tokenizer(write_byte_level(tmp_path))
    with pytest.raises(RequestError, match="not valid Unicode"):
        tokenizer.encode("a\udcff")


def test_the_product_path_does_not_import_transformers_or_torch():
    code = (
        "import engine, engine.text.tokenizer, engine.sampling, engine.scheduler\n"
        "from engine import SamplingParams"
    )
    assert imported_by(code, "torch", "transformers", "triton", "json") == ["json"]
