"""Results of requests, in the de facto shape: RequestOutput holds CompletionOutputs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Logprob:
    """Natural log-probability of a token (raw logits, before temperature) and its rank from 1."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(frozen=True)
class RequestMetrics:
    """Times of one request, in seconds. TTFT counts from submission, tokenisation and queueing included."""

    prompt_tokens: int
    output_tokens: int
    ttft_s: float | None  # submission to the first token on the host
    total_s: float  # submission to the end
    queue_s: float | None = None  # submission to the prefill's launch
    cached_tokens: int = 0  # of the prompt, whose KV the slot still held (prefix caching)

    @property
    def decode_tok_s(self) -> float | None:
        """Tokens after the first, over the time after the first."""
        if self.ttft_s is None or self.output_tokens < 2 or self.total_s <= self.ttft_s:
            return None
        return (self.output_tokens - 1) / (self.total_s - self.ttft_s)

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first."""
        rate = self.decode_tok_s
        return None if rate is None else 1 / rate


@dataclass
class CompletionOutput:
    """One answer. finish_reason: "stop" (EOS, stop string or id), "length", "abort", "error"
    (RequestOutput.error says which); None while running.

    token_ids are the ids the engine produced, the ending EOS or stop id among them; text excludes
    it, excludes special tokens and is cut before a stop string. stop_reason is the stop string or
    the id of stop_token_ids that ended the answer, None for an EOS. logprobs[i] maps token ids to
    Logprob for output token i: the chosen one and the k most likely.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[dict[int, Logprob]] | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    """A prompt and its answer. prompt is None if the request came as token ids."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = (
        None  # [0] is None: nothing precedes it
    )
    metrics: RequestMetrics | None = None
    finished: bool = False
    error: str | None = None  # why finish_reason is "error"


@dataclass(frozen=True)
class Delta:
    """A piece of a streamed answer: str(delta) is its text. The last one carries the whole output."""

    text: str
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    output: RequestOutput | None = None

    def __str__(self) -> str:
        return self.text


def top_logprobs(
    logits: torch.Tensor, chosen: list[int], k: int, decode
) -> list[dict[int, Logprob]]:
    """For each row of logits [rows, vocab] fp32: the chosen id and the k most likely, best first.

    log p_i = x_i - logsumexp(x), in fp64 so that the sum over 152k entries does not round. Rank is
    1 + the number of strictly greater logits. `decode(id) -> str | None` gives decoded_token.
    """
    import torch

    logits = logits.double()
    log_z = torch.logsumexp(logits, dim=-1)  # [rows]
    index = torch.tensor(chosen, dtype=torch.long).unsqueeze(1)  # [rows, 1]
    chosen_logit = logits.gather(1, index)
    rank = (logits > chosen_logit).sum(dim=-1) + 1
    best = torch.topk(logits, min(k, logits.shape[-1]), dim=-1)
    rows = []
    for i, token in enumerate(chosen):
        z = float(log_z[i])
        own = Logprob(float(chosen_logit[i, 0]) - z, int(rank[i]), decode(token))
        entry = {token: own}  # the chosen token first, then the best
        pairs = zip(best.indices[i].tolist(), best.values[i].tolist())
        for place, (other, value) in enumerate(pairs, start=1):
            if other != token:
                entry[other] = Logprob(value - z, place, decode(other))
        rows.append(entry)
    return rows
