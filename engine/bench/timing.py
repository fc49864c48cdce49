"""Times of one batch of requests, measured where a caller of the API would: at the arrival of each token.

TTFT: from submission to the first token of a request. ITL: between later tokens of a request. TPOT: (end - TTFT) /
(output tokens - 1) of a request. Latency: from submission to the end of the whole batch. Output tokens are the
engine's ids. The names are those of `vllm bench`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from engine.errors import RequestError
from engine.sampling import SamplingParams

if TYPE_CHECKING:
    from engine.llm import LLM

PERCENTILES = (10, 25, 50, 75, 90, 99)


@dataclass(frozen=True)
class Batch:
    """One run: seconds. ttft and tpot per request, itl of all requests together."""

    latency: float
    ttft: tuple[float, ...]
    tpot: tuple[float, ...]
    itl: tuple[float, ...]
    tokens: tuple[tuple[int, ...], ...]  # ids of each answer


def random_prompts(count: int, length: int, vocab: int, seed: int = 0) -> list[list[int]]:
    """`count` prompts of `length` token ids each."""
    source = random.Random(seed)
    return [[source.randrange(vocab) for _ in range(length)] for _ in range(count)]


def run_batch(llm: LLM, prompts: Sequence[Sequence[int]], output_len: int) -> Batch:
    """Submit the prompts together and follow every token to `output_len`; greedy, end tokens passed over."""
    params = SamplingParams(max_tokens=output_len, ignore_eos=True)
    start = time.perf_counter()
    arrivals: list[list[float]] = [[] for _ in prompts]
    ids: list[list[int]] = [[] for _ in prompts]
    updates = llm.stream_many(
        [{"prompt_token_ids": list(p)} for p in prompts], params, arrival=start
    )
    with closing(updates):
        for index, delta in updates:
            now = time.perf_counter()
            arrivals[index] += [now] * len(delta.token_ids)
            ids[index] += delta.token_ids
    end = time.perf_counter()
    short = [len(times) for times in arrivals if len(times) != output_len]
    if short:
        raise RequestError(f"an answer ended at {short[0]} of {output_len} tokens (--output-len)")
    return Batch(
        latency=end - start,
        ttft=tuple(times[0] - start for times in arrivals),
        tpot=tuple((t[-1] - t[0]) / (output_len - 1) for t in arrivals) if output_len > 1 else (),
        itl=tuple(b - a for times in arrivals for a, b in pairwise(times)),
        tokens=tuple(tuple(answer) for answer in ids),
    )


def percentile(values: Sequence[float], p: float) -> float:
    """The p-th percentile, linear between order statistics (numpy's default)."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * p / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
