"""The detokeniser's deltas concatenate to the full decode, and never show half a character."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.text.detokenize import Detokenizer
from engine.text.tokenizer import Tokenizer
from tests.unit.fakes import write_byte_level, write_sentencepiece

TEXTS = st.text(
    alphabet=st.one_of(
        st.characters(codec="utf-8"),
        st.sampled_from("👩\u200d👩👧🎉你好世é\u0301ñ\ufffd a\n"),
    ),
    max_size=40,
)


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory):
    return Tokenizer(write_byte_level(tmp_path_factory.mktemp("byte_level")))


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory):
    return Tokenizer(write_sentencepiece(tmp_path_factory.mktemp("spm")))


def stream(tokenizer, ids):
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.push(i) for i in ids), detokenizer.flush()]


@settings(max_examples=300, deadline=None)
@given(text=TEXTS)
def test_text_comes_back_token_by_token(byte_level, text):
    ids = byte_level.encode(text)
    deltas = stream(byte_level, ids)
    assert "".join(deltas) == text
    if "\ufffd" not in text:
        assert "\ufffd" not in "".join(deltas), "half a character was shown"


# Any ids at all: lone continuation bytes, characters cut by special tokens, ids without a token.
IDS = st.lists(st.one_of(st.integers(0, 420), st.integers(3, 258)), max_size=60)


@settings(max_examples=400, deadline=None)
@given(ids=IDS, cut=st.integers(0, 60))
@example(ids=[100] * 60, cut=0)
def test_any_ids_equal_the_full_decode(byte_level, ids, cut):
    ids = ids[cut:] + ids[:cut]  # every beginning
    assert "".join(stream(byte_level, ids)) == byte_level.decode(ids)


@settings(max_examples=100, deadline=None)
@given(run=st.lists(st.integers(0, 127), min_size=30, max_size=90), tail=TEXTS)
def test_long_runs_of_lone_bytes_stay_exact_and_bounded(byte_level, run, tail):
    """Random weights give such runs; the window, so the work per token, must not grow with them."""
    high_bytes = [i for i in range(3, 259) if byte_level.decode([i]) == "\ufffd"]
    assert len(high_bytes) == 128
    ids = [high_bytes[i] for i in run] + byte_level.encode(tail)
    detokenizer = Detokenizer(byte_level)
    out = []
    for i in ids:
        out.append(detokenizer.push(i))
        assert len(detokenizer._window) <= 32
    assert "".join([*out, detokenizer.flush()]) == byte_level.decode(ids)


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(0, 270), max_size=40))
@example(ids=[259, 263, 259, 259, 260])  # lone word marks: the first one's space is stripped
@example(ids=[227, 185, 163, 231])  # a character, then a byte that spoils the run
def test_sentencepiece_equals_the_full_decode(sentencepiece, ids):
    assert "".join(stream(sentencepiece, ids)) == sentencepiece.decode(ids)


def test_emoji_is_held_until_whole(byte_level):
    ids = byte_level.encode("a🎊b")
    deltas = stream(byte_level, ids)
    assert len(ids) > 4, "the test's tokenizer must split this emoji"
    assert deltas[:2] == ["a", ""] and "".join(deltas) == "a🎊b"


def test_flush_shows_an_unfinished_character_once(byte_level):
    ids = byte_level.encode("a🎊")[:-1]
    detokenizer = Detokenizer(byte_level)
    assert "".join(detokenizer.push(i) for i in ids) == "a"
    assert detokenizer.flush() == byte_level.decode(ids)[1:] == "\ufffd"
    assert detokenizer.flush() == ""


def test_special_tokens_have_no_text(byte_level):
    ids = [*byte_level.encode("hi"), *byte_level.eos_token_ids, *byte_level.encode(" there")]
    assert "".join(stream(byte_level, ids)) == "hi there"
