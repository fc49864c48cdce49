"""Tokenizer of a Hugging Face directory: `tokenizer.json` through the `tokenizers` library.

`transformers.AutoTokenizer` gives the same ids but takes 3 s to import against 0.02 s (2-core CPU
host), more than the whole start-up of a small model; tests/unit/test_tokenizer.py holds the two
equal. Special tokens, a leading BOS and the chat template follow transformers 5.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from engine.errors import CheckpointError, RequestError
from engine.metadata import read_object, read_text
from engine.model_config import ModelConfig, read_eos
from engine.text.template import ChatTemplate

_NAMED = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


class Tokenizer:
    """Text <-> token ids of one model directory. Raises CheckpointError if it has no tokenizer.json.

    bos_token_id: int | None; eos_token_ids: the tokenizer's own EOS (0 or 1 ids); template:
    ChatTemplate | None; byte_level: True if a token is a run of bytes (GPT-2 style BPE: Qwen,
    Llama 3, SmolLM2), so that decoding is concatenation of bytes; byte_tokens: the ids of <0x00> to
    <0xFF> in a SentencePiece vocabulary.
    """

    def __init__(self, path: str | Path, chat_template: str | Path | None = None) -> None:
        path = Path(path)
        file = path / "tokenizer.json"
        serialized = read_text(file)
        if serialized is None:
            raise CheckpointError(
                f"{path}: no tokenizer.json; name a directory that has one with --tokenizer"
            )
        try:
            self.backend = Backend.from_str(serialized)
        except Exception as e:  # the library raises bare Exception
            raise CheckpointError(f"{file}: {e}") from None
        # A tokenizer.json may carry its trainer's truncation and padding; a prompt wants neither.
        self.backend.no_truncation()
        self.backend.no_padding()
        config = read_object(path / "special_tokens_map.json") or {}
        config |= read_object(path / "tokenizer_config.json") or {}
        self.special_tokens: dict[str, str] = _named_tokens(config)
        try:
            self._declare_special(config)
        except (AttributeError, TypeError, ValueError) as e:
            raise CheckpointError(
                f"{path / 'tokenizer_config.json'}: added_tokens_decoder is damaged: {e}"
            ) from None
        self.bos_token_id = self._id("bos_token")
        eos = self._id("eos_token")
        self.eos_token_ids: tuple[int, ...] = () if eos is None else (eos,)
        self.byte_level = _is_byte_level(self.backend)
        bytes_ = (self.backend.token_to_id(f"<0x{b:02X}>") for b in range(256))
        self.byte_tokens = frozenset() if self.byte_level else frozenset(bytes_) - {None}
        added = self.backend.get_added_tokens_decoder()
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        source, origin = _template_source(path, config, chat_template)
        self.template: ChatTemplate | None = None
        if source is not None:
            self.template = ChatTemplate(source, self.special_tokens, origin)

    def _declare_special(self, config: dict[str, Any]) -> None:
        """Tokens that only tokenizer_config.json declares; never one that would get a new id."""
        tokens = []
        for key, entry in sorted((config.get("added_tokens_decoder") or {}).items()):
            known = self.backend.token_to_id(entry.get("content", ""))
            if entry.get("special") and known == int(key):
                flags = ("lstrip", "rstrip", "normalized", "single_word")
                options = {k: bool(entry.get(k, False)) for k in flags}
                tokens.append(AddedToken(entry["content"], special=True, **options))
        declared = {t.content for t in tokens}
        declared |= {t.content for t in self.backend.get_added_tokens_decoder().values()}
        for text in self.special_tokens.values():
            if text not in declared and self.backend.token_to_id(text) is not None:
                tokens.append(AddedToken(text, special=True, normalized=False))
        self.backend.add_special_tokens(tokens)

    def _id(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        return None if text is None else self.backend.token_to_id(text)

    @property
    def vocab_size(self) -> int:
        """Ids the tokenizer knows; a model's padded vocabulary may be larger."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    def has_text(self, token: int) -> bool:
        """False for special tokens and for ids that the tokenizer does not know."""
        return token not in self._special_ids and self.backend.id_to_token(token) is not None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`; add_special_tokens applies tokenizer.json's post-processor (a leading BOS).

        As in transformers 5, `add_bos_token` in tokenizer_config.json does not overrule it.
        """
        try:
            return self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        except (TypeError, UnicodeEncodeError):  # a lone surrogate: undecodable bytes in argv
            raise RequestError("the prompt is not valid Unicode text") from None

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `ids`; bytes that are not UTF-8 become U+FFFD; unknown ids give nothing."""
        return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def encode_chat(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        tools: list[dict] | None = None,
        **variables: Any,
    ) -> tuple[str, list[int]]:
        """(prompt text, ids) of a conversation by the checkpoint's template.

        The template writes BOS and all markers itself, so none is added. `variables` go to the
        template (add_generation_prompt is True unless given).
        """
        if self.template is None:
            raise RequestError(
                "this checkpoint has no chat template; use generate() or --no-chat-template, "
                "or name one with --chat-template FILE"
            )
        text = self.template.render(messages, tools=tools, **variables)
        return text, self.encode(text, add_special_tokens=False)


def eos_token_ids(
    path: str | Path | None, model: ModelConfig, tokenizer: Tokenizer | None
) -> frozenset[int]:
    """All ids that end an answer: generation_config.json, config.json and the tokenizer's own.

    Instruct checkpoints often list in one of these an id that another lacks; knowing only one of
    them is the classic reason for answers that do not end.
    """
    ids = set(model.eos_token_ids)
    if path is not None:
        file = Path(path) / "generation_config.json"
        value = (read_object(file) or {}).get("eos_token_id")
        ids |= set(read_eos(value, model.vocab_size, str(file)))
    if tokenizer is not None:
        ids |= set(tokenizer.eos_token_ids)
    return frozenset(ids)


def _named_tokens(config: dict[str, Any]) -> dict[str, str]:
    """{"eos_token": "<|im_end|>", ...}: a token is written as text or as an AddedToken's dict."""
    found = {}
    for name in _NAMED:
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            found[name] = text
    return found


def _is_byte_level(backend: Backend) -> bool:
    decoder = json.loads(backend.to_str())["decoder"] or {}
    parts = decoder.get("decoders", [decoder])
    return [p.get("type") for p in parts] == ["ByteLevel"]


def _template_source(
    path: Path, config: dict[str, Any], override: str | Path | None
) -> tuple[str | None, Path]:
    """(the template, None if there is none; the file that it comes from)."""
    if override is not None:
        text = read_text(Path(override))
        if text is None:
            raise RequestError(f"--chat-template {override}: no such file")
        return text, Path(override)
    file = path / "chat_template.jinja"
    text = read_text(file)
    if text is not None:
        return text, file
    file = path / "tokenizer_config.json"
    template = config.get("chat_template")
    if template is None:
        file = path / "chat_template.json"
        template = (read_object(file) or {}).get("chat_template")
    if isinstance(template, list):  # several named templates
        named = [t for t in template if isinstance(t, dict) and "template" in t]
        if len(named) < len(template):
            raise CheckpointError(f"{file}: chat_template is a list, but not of named templates")
        template = next((t["template"] for t in named if t.get("name") == "default"), None)
    if template is not None and not isinstance(template, str):
        raise CheckpointError(f"{file}: chat_template is {template!r}, not the text of a template")
    return template, file
