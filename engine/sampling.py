"""SamplingParams: what one request asks of the sampler, in the de facto vocabulary of LLM engines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

from engine.errors import RequestError

MAX_LOGPROBS = 1000  # entries a token; bounds what one request can make the host keep
MAX_TOP_K = 2**24  # held exactly as fp32 on the device
MAX_SEED = 2**31 - 1  # seeds live in an int32 device buffer
# Of temperature, repetition penalty (and its inverse) and bias: the kernels multiply it, in fp32 (up to 3.4e38),
# by Gumbel noise (|noise| < 104) or by a logit (under 1e8), and the product must stay finite.
MAX_FACTOR = 1e30


_RANGES = (
    ("top_p", 0, 1),
    ("min_p", 0, 1),
    ("presence_penalty", -2, 2),
    ("frequency_penalty", -2, 2),
)


@dataclass(frozen=True)
class Controls:
    """What of a request's sampling goes beyond temperature and seed; kernels/sample_ref.py defines it."""

    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    prompt_token_ids: Sequence[int] = ()  # the whole prompt, for the repetition penalty

    @property
    def counted(self) -> bool:
        """Whether the occurrences of tokens matter."""
        return (
            self.repetition_penalty != 1
            or self.frequency_penalty != 0
            or self.presence_penalty != 0
        )


@dataclass(frozen=True)
class Draw:
    """How the tokens of a slot are chosen."""

    temperature: float = 0.0  # 0 is greedy
    seed: int = 0  # int32 key of the noise
    controls: Controls | None = None  # None: neutral


GREEDY = Draw()


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
    top_k, top_p, min_p act in this order, after penalties and logit_bias (kernels/sample_ref.py); the
    repetition penalty counts prompt and answer, the other two the answer only.
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
    top_p: float = _option(
        1.0, "sample from the most likely tokens that together have this probability"
    )
    top_k: int = _option(0, "sample from the k most likely tokens; 0 or -1: all")
    min_p: float = _option(0.0, "drop tokens less likely than this share of the most likely one")
    presence_penalty: float = _option(0.0, "lowers the logits of tokens in the answer, -2 to 2")
    frequency_penalty: float = _option(0.0, "the same for each of their occurrences, -2 to 2")
    repetition_penalty: float = _option(
        1.0, "divides (negative: multiplies) the logits of tokens in prompt and answer",
        flags=("--repeat-penalty",),
    )  # fmt: skip
    logit_bias: Mapping[int, float] | None = _option(None, "added to the logits, by token id")
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
        if not _is_number(temperature) or not 0 <= temperature <= MAX_FACTOR:
            raise RequestError(
                f"temperature={temperature!r} is not a finite number from 0 to {MAX_FACTOR:g}"
            )
        self._int("max_tokens", 1, None, optional=True)
        self._int("min_tokens", 0, None)
        self._int("seed", 0, MAX_SEED, optional=True)
        self._int("logprobs", 0, MAX_LOGPROBS, optional=True)
        self._int("prompt_logprobs", 0, MAX_LOGPROBS, optional=True)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}"
            )
        self._int("top_k", -1, MAX_TOP_K)
        for name, low, high in _RANGES:
            value = getattr(self, name)
            if not _is_number(value) or not low <= value <= high:
                raise RequestError(f"{name}={value!r} is not a number from {low} to {high}")
        penalty = self.repetition_penalty
        if not _is_number(penalty) or not 1 / MAX_FACTOR <= penalty <= MAX_FACTOR:
            raise RequestError(
                f"repetition_penalty={penalty!r} is not a finite number > 0, "
                f"from {1 / MAX_FACTOR:g} to {MAX_FACTOR:g}"
            )
        object.__setattr__(self, "logit_bias", self._bias())
        if not isinstance(self.ignore_eos, bool):
            raise RequestError(f"ignore_eos={self.ignore_eos!r} is not True or False")
        stop = (self.stop,) if isinstance(self.stop, str) else self._tuple("stop", str)
        if "" in stop:
            raise RequestError("stop holds an empty string, which would match at once")
        object.__setattr__(self, "stop", stop)
        ids = self._tuple("stop_token_ids", int)
        if min(ids, default=0) < 0:
            raise RequestError(f"stop_token_ids holds {min(ids)}; token ids are 0 or more")
        object.__setattr__(self, "stop_token_ids", ids)

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

    def _bias(self) -> dict[int, float] | None:
        """logit_bias with whole-number keys (JSON has them as text) and finite values."""
        if self.logit_bias is None:
            return None
        if not isinstance(self.logit_bias, Mapping):
            raise RequestError(f"logit_bias={self.logit_bias!r} does not map token ids to numbers")
        found: dict[int, float] = {}
        for key, value in self.logit_bias.items():
            token = int(key) if isinstance(key, str) and key.isascii() and key.isdigit() else key
            whole = isinstance(token, int) and not isinstance(token, bool) and token >= 0
            if not whole or not _is_number(value) or not abs(value) <= MAX_FACTOR:
                raise RequestError(
                    f"logit_bias[{key!r}]={value!r}: a token id and a finite number, "
                    f"{MAX_FACTOR:g} at most"
                )
            found[token] = float(value)
        return found or None

    def check_vocabulary(self, vocab_size: int) -> None:
        """RequestError for a stop id that no token has: it would never stop anything."""
        worst = max(self.stop_token_ids or (), default=0)
        if worst >= vocab_size:
            raise RequestError(
                f"stop_token_ids holds {worst}, which is outside the vocabulary of {vocab_size}"
            )

    def check_tokenizer(self, there: bool) -> None:
        """RequestError for stop strings where no tokenizer would find them."""
        if self.stop and not there:
            raise RequestError(
                "stop needs a tokenizer, and this model has none; use stop_token_ids"
            )

    def controls(self, prompt_token_ids: Sequence[int], vocab_size: int) -> Controls | None:
        """What goes beyond temperature and seed; None if nothing does. RequestError for a bias outside
        the vocabulary."""
        bias = self.logit_bias or {}
        worst = max(bias, default=0)
        if worst >= vocab_size:
            raise RequestError(f"logit_bias[{worst}] is outside the vocabulary of {vocab_size}")
        drawn = self.temperature > 0  # filters change nothing of a greedy answer
        controls = Controls(
            top_k=max(self.top_k, 0) if drawn else 0,
            top_p=self.top_p if drawn else 1.0,
            min_p=self.min_p if drawn else 0.0,
            repetition_penalty=self.repetition_penalty,
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            logit_bias=bias,
        )
        if controls == Controls():
            return None
        return replace(controls, prompt_token_ids=tuple(prompt_token_ids))

    @property
    def needs_logits(self) -> bool:
        """True if the host must see logits after each step: such requests run one step at a time."""
        return self.logprobs is not None or self.prompt_logprobs is not None


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
