"""SamplingParams: what one request asks of the sampler, in the de facto vocabulary of LLM engines."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields

from engine.errors import RequestError

MAX_LOGPROBS = 1000  # entries a token; bounds what one request can make the host keep
MAX_SEED = 2**31 - 1  # seeds live in an int32 device buffer


def _option(default, help: str, *, flags: tuple[str, ...] = (), neutral: tuple = (), **extra):
    """A field; `neutral` lists the only values of a parameter that the sampler does not implement."""
    metadata = {"help": help, "flags": flags, "neutral": neutral, **extra}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class SamplingParams:
    """One request's sampling, validated at construction. RequestError names the offending field.

    temperature 0 (the default, whatever the model's generation_config says) is greedy; above 0 the
    token is drawn from softmax(logits / temperature) with noise keyed by (seed, position, token id).
    max_tokens None generates up to the context limit. logprobs k returns, for each generated token,
    its own log-probability and the k most likely ones (natural log of the softmax of the raw
    logits, before temperature); prompt_logprobs the same for each prompt token but the first.
    Parameters that are not implemented are accepted at their neutral value and refused otherwise.
    """

    temperature: float = _option(0.0, "0 is greedy", flags=("--temp",))
    max_tokens: int | None = _option(
        None, "most tokens to generate", flags=("--max-new-tokens", "-n")
    )
    min_tokens: int = _option(
        0, "act on no EOS or stop before this many tokens (their logits are not masked)"
    )
    seed: int | None = _option(None, "seed of this request; default: drawn from the engine's seed")
    stop: str | Sequence[str] | None = _option(  # kept as a tuple
        (), "end at this text, which is not returned (repeatable)", flags=("-r",)
    )
    stop_token_ids: Sequence[int] | None = _option((), "end at any of these token ids")
    ignore_eos: bool = _option(False, "go on after an end-of-sequence token")
    logprobs: int | None = _option(None, "log-probabilities of this many tokens at each step")
    prompt_logprobs: int | None = _option(None, "the same for each prompt token")
    n: int = _option(1, "answers per prompt", neutral=(1,))
    top_p: float = _option(1.0, "nucleus sampling", neutral=(1,))
    top_k: int = _option(0, "sample from the k most likely", neutral=(0, -1))
    min_p: float = _option(0.0, "least probability relative to the best", neutral=(0,))
    presence_penalty: float = _option(0.0, "presence penalty", neutral=(0,))
    frequency_penalty: float = _option(0.0, "frequency penalty", neutral=(0,))
    repetition_penalty: float = _option(
        1.0, "repetition penalty", flags=("--repeat-penalty",), neutral=(1,)
    )
    logit_bias: Mapping[int, float] | None = _option(None, "bias by token id", neutral=(None,))
    bad_words: tuple[str, ...] | None = _option(None, "texts never generated", neutral=(None,))

    def __post_init__(self) -> None:
        for f in fields(self):
            neutral = f.metadata["neutral"]
            value = getattr(self, f.name)
            if neutral and (isinstance(value, bool) or value not in neutral):
                allowed = " or ".join(map(repr, neutral[:2]))
                raise RequestError(
                    f"{f.name}={value!r} is not supported by this engine; leave {f.name} at {allowed}"
                )
        temperature = self.temperature
        if not _is_number(temperature) or not 0 <= temperature < math.inf:
            raise RequestError(f"temperature={temperature!r} is not a finite number >= 0")
        self._int("max_tokens", 1, None, optional=True)
        self._int("min_tokens", 0, None)
        self._int("seed", 0, MAX_SEED, optional=True)
        self._int("logprobs", 0, MAX_LOGPROBS, optional=True)
        self._int("prompt_logprobs", 0, MAX_LOGPROBS, optional=True)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}"
            )
        if not isinstance(self.ignore_eos, bool):
            raise RequestError(f"ignore_eos={self.ignore_eos!r} is not True or False")
        stop = (self.stop,) if isinstance(self.stop, str) else self._tuple("stop", str)
        if "" in stop:
            raise RequestError("stop holds an empty string, which would match at once")
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", self._tuple("stop_token_ids", int))

    def _int(self, name: str, low: int, high: int | None, *, optional: bool = False) -> None:
        value = getattr(self, name)
        if value is None and optional:
            return
        whole = isinstance(value, int) and not isinstance(value, bool)
        if not whole or value < low or (high is not None and value > high):
            limit = f">= {low}" if high is None else f"from {low} to {high}"
            raise RequestError(f"{name}={value!r} is not a whole number {limit}")

    def _tuple(self, name: str, kind: type) -> tuple:
        value = getattr(self, name)
        if value is None:
            return ()
        ok = isinstance(value, Iterable) and not isinstance(value, (str, bytes, dict))
        items = tuple(value) if ok else ()
        if not ok or any(not isinstance(v, kind) or isinstance(v, bool) for v in items):
            raise RequestError(f"{name}={value!r} is not a list of {kind.__name__}")
        return items

    @property
    def needs_logits(self) -> bool:
        """True if the host must see logits after each step: such requests run one step at a time."""
        return self.logprobs is not None or self.prompt_logprobs is not None


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
