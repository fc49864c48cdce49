"""Checks of what callers pass as prompts and sampling parameters; errors name index and field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from engine.errors import RequestError
from engine.sampling import SamplingParams

_BYTES = (bytes, bytearray, memoryview)  # sequences of int, and never meant as token ids
# Text, token ids, or {"prompt": text} / {"prompt_token_ids": ids}.
Prompt = str | Sequence[int] | Mapping[str, Any]


def as_batch(prompts: object) -> list:
    """A list of prompts from one prompt or several; a list that begins with an int is one prompt."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if not isinstance(prompts, Sequence) or isinstance(prompts, _BYTES):
        raise RequestError(f"prompts is {type(prompts).__name__}, not text, token ids or a list")
    return [prompts] if prompts and isinstance(prompts[0], int) else list(prompts)


def one_each(
    params: SamplingParams | Sequence[SamplingParams] | None,
    count: int,
    default: SamplingParams | None = None,
) -> list[SamplingParams]:
    """Parameters for each of `count` prompts; `default` where none are given."""
    if params is None or isinstance(params, SamplingParams):
        return [params or default or SamplingParams()] * count
    if not isinstance(params, Sequence):
        raise RequestError(f"sampling_params is {type(params).__name__}, not SamplingParams")
    if len(params) != count:
        raise RequestError(f"{count} prompts, but {len(params)} sampling_params")
    return list(params)


def check_token_ids(prompt: object, vocab_size: int) -> list[int]:
    """The ids as a list of int, each within the vocabulary."""
    if not isinstance(prompt, Sequence) or isinstance(prompt, _BYTES):
        raise RequestError(f"a prompt is {type(prompt).__name__}, neither text nor token ids")
    for i, token in enumerate(prompt):
        if isinstance(token, bool) or not isinstance(token, int):
            raise RequestError(f"prompt_token_ids[{i}] is {token!r}, not a token id")
        if not 0 <= token < vocab_size:
            raise RequestError(
                f"prompt_token_ids[{i}] = {token} is outside the vocabulary of {vocab_size}"
            )
    return list(prompt)


@contextmanager
def naming(index: int, count: int):
    """Adds the prompt's index to a RequestError when there are several prompts."""
    try:
        yield
    except RequestError as e:
        if count == 1:
            raise
        raise RequestError(f"prompt {index}: {e}") from None
