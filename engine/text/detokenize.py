"""Incremental detokenisation: text as tokens arrive, never half a character.

Invariant (tested on random splits): the deltas, flush included, concatenate to the decode of all
ids at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

_REPLACEMENT = "\ufffd"  # what decoders put for bytes that are not, or not yet, UTF-8

# A UTF-8 character has at most three continuation bytes, so a decoder that starts anywhere is in
# step again after four bytes: four non-empty tokens always hold enough context.
_CONTEXT = 4
_LONGEST_WINDOW = 32  # tokens; bounds the work per token in a run of bytes that never become text


class Decoder(Protocol):
    """What of a tokenizer the detokeniser needs."""

    byte_level: bool  # tokens are runs of bytes; decoding concatenates them
    byte_tokens: frozenset[int]  # SentencePiece's <0x00>..<0xFF>

    def has_text(self, token: int) -> bool: ...  # False for special and unknown ids

    def decode(self, ids: Sequence[int]) -> str: ...


class Detokenizer:
    """One request's text: push(id) gives the text that has become certain, flush() the rest.

    Byte-level vocabularies decode to lossy UTF-8 of the concatenated bytes; more bytes can change
    only a replacement character at the very end, so just that is held. SentencePiece vocabularies
    decode a run of byte tokens as a whole and the first token of a text in its own way: there a run
    is held until it ends, and the tokens last emitted are decoded along with the new ones.
    """

    def __init__(self, tokenizer: Decoder) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []  # tokens that the next text depends on
        self._emitted = 0  # characters of decode(window) that are out already

    def push(self, token: int) -> str:
        """Text that `token` makes certain; "" if there is none yet."""
        tokenizer = self._tokenizer
        if not tokenizer.has_text(token):
            return ""
        self._window.append(token)
        if token in tokenizer.byte_tokens:
            return ""
        text = tokenizer.decode(self._window)
        if not tokenizer.byte_level:
            return self._emit(text, keep=1)
        if not text.endswith(_REPLACEMENT):
            return self._emit(text, keep=0)
        keep = len(self._window) if len(self._window) < _LONGEST_WINDOW else _CONTEXT
        return self._emit(text[:-1], keep)

    def flush(self) -> str:
        """The text still held: at the end an unfinished character becomes U+FFFD."""
        return self._emit(self._tokenizer.decode(self._window), keep=len(self._window))

    def _emit(self, text: str, keep: int) -> str:
        """Text beyond what is out; afterwards the window is its last `keep` tokens."""
        delta = text[self._emitted :]
        if keep >= len(self._window):
            self._emitted = max(self._emitted, len(text))
            return delta
        self._window = self._window[len(self._window) - keep :]
        self._emitted = 0
        if keep:
            rest = self._tokenizer.decode(self._window)
            held = self._tokenizer.byte_level and rest.endswith(_REPLACEMENT)
            self._emitted = len(rest) - held
        return delta
