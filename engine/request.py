"""One request from admission to its last token: ids in, text and a finish reason out. No device here."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from engine.errors import RequestError
from engine.outputs import CompletionOutput, Delta, Logprob, RequestMetrics, RequestOutput
from engine.sampling import MAX_TOP_K, SamplingParams
from engine.text.detokenize import Detokenizer
from engine.text.stops import StopStrings

Clock = Callable[[], float]  # seconds, monotonic


def admit(
    prompt_tokens: int, params: SamplingParams, max_model_len: int, longest: int | None = None
) -> int:
    """How many tokens the request may generate. RequestError, with the numbers, if it can never fit.

    longest: the model's own limit. A larger context is advice only where that allows one.
    """
    larger = longest is not None and max_model_len < longest
    advice = f" or raise --max-model-len (up to {longest})" if larger else ""
    if prompt_tokens < 1:
        raise RequestError("the prompt is empty: it has no tokens")
    room = max_model_len - prompt_tokens
    if room < 1:
        raise RequestError(
            f"the prompt has {prompt_tokens} tokens and leaves no room for an answer in a context "
            f"of {max_model_len}; shorten it{advice}"
        )
    if params.max_tokens is None:
        if params.min_tokens > room:
            raise RequestError(
                f"min_tokens={params.min_tokens} does not fit: a prompt of {prompt_tokens} tokens "
                f"leaves {room} of a context of {max_model_len}; lower it{advice}"
            )
        return room
    if params.max_tokens > room:
        raise RequestError(
            f"a prompt of {prompt_tokens} tokens and max_tokens={params.max_tokens} make "
            f"{prompt_tokens + params.max_tokens}, over the context of {max_model_len}; lower "
            f"max_tokens to {room}{advice}"
        )
    return params.max_tokens


class Request:
    """State of one request. `seed` is the int32 key of its sampling noise; `eos` all ids that end it.

    The scheduler sets `slot` and counts in `queued` the tokens it has asked the device for; accept()
    takes the tokens in order until `finish_reason` is set, and later ones must be dropped.
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        max_model_len: int,
        longest: int | None = None,
        eos: frozenset[int] = frozenset(),
        tokenizer=None,
        prompt: str | None = None,
        seed: int = 0,
        vocab_size: int = MAX_TOP_K,
        arrival: float | None = None,
        clock: Clock = time.perf_counter,
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_token_ids = list(prompt_token_ids)
        self.params = params
        self.max_tokens = admit(len(self.prompt_token_ids), params, max_model_len, longest)
        params.check_tokenizer(tokenizer is not None)
        params.check_vocabulary(vocab_size)
        self.controls = params.controls(self.prompt_token_ids, vocab_size)
        self.seed = seed
        self.slot: int | None = None
        self.queued = 0
        self.token_ids: list[int] = []
        self.logprobs: list[dict[int, Logprob]] | None = None if params.logprobs is None else []
        self.prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.error: str | None = None
        self.cached_tokens = 0  # of the prompt, not computed again
        self._tokenizer = tokenizer
        self._eos = frozenset() if params.ignore_eos else eos
        self._stop_ids = frozenset(params.stop_token_ids or ())
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer)
        self._stops = StopStrings(tuple(params.stop or ()))
        self._text: list[str] = []
        self._clock = clock
        self._arrival = clock() if arrival is None else arrival
        self._launched: float | None = None
        self._first: float | None = None
        self._last: float | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def text(self) -> str:
        return "".join(self._text)

    def launched(self) -> None:
        """The prefill is being queued now."""
        self._launched = self._clock()

    def accept(self, token: int, logprobs: dict[int, Logprob] | None = None) -> Delta:
        """Take the next generated token; the Delta holds the text it made certain."""
        self._last = self._clock()
        if self._first is None:
            self._first = self._last
        self.token_ids.append(token)
        if self.logprobs is not None and logprobs is not None:
            self.logprobs.append(logprobs)
        count = len(self.token_ids)
        may_stop = count >= self.params.min_tokens
        if may_stop and token in self._eos:
            return self._finish("stop", [token])
        if may_stop and token in self._stop_ids:
            return self._finish("stop", [token], token)
        text = self._detokenizer.push(token) if self._detokenizer else ""
        if may_stop:
            text, stop = self._stops.push(text)
            if stop is not None:
                return self._finish("stop", [token], stop, text)
        if count >= self.max_tokens:
            return self._finish("length", [token], None, text)
        self._text.append(text)
        return Delta(text, [token])

    def abort(self) -> Delta:
        """End the request where it is; held text is still part of the answer."""
        return self._finish("abort", [])

    def fail(self, error: Exception) -> Delta:
        """End the request alone: what is wrong with it does not concern the others."""
        self.error = str(error) or type(error).__name__
        self.finish_reason = "error"
        self._last = self._clock()
        return Delta("", [], "error", self.output())

    def _finish(
        self, reason: str, tokens: list[int], stop: int | str | None = None, text: str = ""
    ) -> Delta:
        if not isinstance(stop, str):  # after a stop string nothing follows
            rest = self._detokenizer.flush() if self._detokenizer else ""
            rest, late = self._stops.push(rest)
            text += rest
            if late is None:
                text += self._stops.flush()
            else:
                reason, stop = "stop", late
        self._text.append(text)
        self.finish_reason, self.stop_reason = reason, stop
        self._last = self._clock()
        return Delta(text, tokens, reason, self.output())

    def decode_token(self, token: int) -> str | None:
        """Text of one id by itself, special tokens by name; None without a tokenizer."""
        if self._tokenizer is None:
            return None
        return self._tokenizer.decode([token], skip_special_tokens=False)

    def output(self) -> RequestOutput:
        """The result so far, in the public shape."""
        completion = CompletionOutput(
            0, self.text, self.token_ids, self.finish_reason, self.stop_reason, self.logprobs
        )
        since = self._arrival
        metrics = RequestMetrics(
            prompt_tokens=len(self.prompt_token_ids),
            output_tokens=len(self.token_ids),
            ttft_s=None if self._first is None else self._first - since,
            total_s=(self._clock() if self._last is None else self._last) - since,
            queue_s=None if self._launched is None else self._launched - since,
            cached_tokens=self.cached_tokens,
        )
        return RequestOutput(
            self.request_id,
            self.prompt,
            self.prompt_token_ids,
            [completion],
            self.prompt_logprobs,
            metrics,
            self.finished,
            self.error,
        )
