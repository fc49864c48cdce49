"""Which prefill graph serves a prompt: pure functions of its length."""

from __future__ import annotations

from collections.abc import Sequence

DECODE_ROWS = (1, 2, 4, 8)  # that have a graph
LARGEST = 2048  # tokens; longer prompts run as chunks of this
PROMPT_LOGITS_TOKENS = 256  # positions whose whole-vocabulary logits are held at once


def prefill_buckets(max_model_len: int) -> tuple[int, ...]:
    """Token counts that get a graph: 16, 32, 48, 64, then four to the octave (padding <= 25 %).

    The last bucket is the largest prompt or LARGEST, whichever is smaller, rounded up to 16.
    """
    limit = min(LARGEST, -(-max_model_len // 16) * 16)
    sizes = [16, 32, 48, 64]
    octave = 64
    while octave < LARGEST:
        sizes += [octave + octave * quarter // 4 for quarter in (1, 2, 3, 4)]
        octave *= 2
    kept = [size for size in sizes if size < limit]
    return (*kept, limit)


def prompt_logits_bucket(max_model_len: int) -> int:
    """Token count of the one graph that gives the logits of every position."""
    return min(PROMPT_LOGITS_TOKENS, -(-max_model_len // 16) * 16)


def chunks(length: int, buckets: Sequence[int]) -> list[tuple[int, int, int]]:
    """(offset, tokens, bucket) of each chunk of a prompt of `length` tokens: whole largest buckets, then
    the smallest bucket that holds the rest."""
    largest = buckets[-1]
    result = []
    offset = 0
    while length - offset > largest:
        result.append((offset, largest, largest))
        offset += largest
    rest = length - offset
    result.append((offset, rest, next(size for size in buckets if size >= rest)))
    return result


def decode_rows(count: int) -> int:
    """Rows of the decode graph that serves `count` sequences: 1, 2, 4 or 8."""
    for rows in DECODE_ROWS:
        if count <= rows:
            return rows
    raise ValueError(f"{count} sequences exceed the 8 rows of a decode step")
