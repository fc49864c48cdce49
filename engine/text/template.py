"""Chat template of a checkpoint: a Jinja program, run in a sandbox as transformers runs it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.errors import CheckpointError, RequestError


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's text for training; for inference its body is plain."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """Renders conversations. A system prompt that the template holds by default is the template's own.

    `file` is where the source comes from, for messages.
    """

    def __init__(self, source: str, special_tokens: dict[str, str], file: str | Path) -> None:
        env = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        env.filters["tojson"] = _to_json  # Jinja's own escapes HTML, which would change the prompt
        env.globals["raise_exception"] = _raise
        env.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self._template = env.from_string(source)
        except jinja2.TemplateSyntaxError as e:
            raise CheckpointError(f"{file}: chat template, line {e.lineno}: {e.message}") from None
        except Exception as e:  # blocks nested too deep for Python's own compiler, and the like
            raise CheckpointError(f"{file}: chat template: {_told(e)}") from None
        self._file = file
        self._special_tokens = special_tokens

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        tools: list[dict] | None = None,
        **variables: Any,
    ) -> str:
        """The prompt text. RequestError if a message is malformed or the template refuses it."""
        checked = check_messages(messages)
        names = {"add_generation_prompt": True, "documents": None, **self._special_tokens}
        try:
            return self._template.render(
                {**names, **variables, "messages": checked, "tools": tools},
            )
        except jinja2.TemplateError as e:  # raise_exception, or a variable that is not there
            raise RequestError(f"the chat template refuses this conversation: {e}") from None
        except Exception as e:  # a template is a program: it may fail as any program does
            raise RequestError(f"the chat template of {self._file} fails: {_told(e)}") from None


def check_messages(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages as templates expect them: content a string; lists of text parts are joined."""
    if not messages:
        raise RequestError("messages is empty")
    checked = []
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise RequestError(f"messages[{i}] is not a dict with a role")
        content = message.get("content")
        if isinstance(content, list):
            if any(not isinstance(p, dict) or p.get("type") != "text" for p in content):
                raise RequestError(f"messages[{i}].content has a part that is not of type 'text'")
            if any(not isinstance(p.get("text"), str) for p in content):
                raise RequestError(f"messages[{i}].content has a part without text")
            content = "".join(p["text"] for p in content)
        elif content is not None and not isinstance(content, str):
            raise RequestError(f"messages[{i}].content is not text")
        if content is None and not message.get("tool_calls"):
            raise RequestError(f"messages[{i}] has no content")
        checked.append({**message, "content": content})
    return checked


def _told(e: Exception) -> str:
    """An exception in words: the text of a KeyError alone, say, is only the key."""
    return f"{type(e).__name__}: {e}"


def _to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message):
    raise jinja2.TemplateError(message)
