"""Properties of the prefill bucket choice."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.config import preset
from engine.runtime.buckets import LARGEST, chunks, decode_rows, prefill_buckets
from engine.runtime.graphs import compile_graphs


@given(st.integers(1, 40000))
def test_buckets_cover_the_context_with_little_waste(limit):
    buckets = prefill_buckets(limit)
    assert list(buckets) == sorted(set(buckets))
    assert buckets[-1] >= min(limit, LARGEST)
    assert all(size % 16 == 0 for size in buckets)
    for low, high in pairwise(buckets):
        if low >= 64:
            assert (
                high - low - 1
            ) / high < 0.25  # padding of the shortest prompt that needs `high`


@given(st.integers(1, 20000), st.integers(1, 20000))
def test_chunks_tile_the_prompt(length, limit):
    buckets = prefill_buckets(limit)
    pieces = chunks(length, buckets)
    assert sum(count for _, count, _ in pieces) == length
    position = 0
    for offset, count, bucket in pieces:
        assert offset == position and 0 < count <= bucket and bucket in buckets
        position += count
    assert all(count == bucket == buckets[-1] for _, count, bucket in pieces[:-1])
    smaller = [size for size in buckets if size < pieces[-1][2]]
    assert all(size < pieces[-1][1] for size in smaller)


@pytest.mark.parametrize("chunked", [False, True])
def test_only_prompts_beyond_the_largest_bucket_need_a_graph_without_head(chunked):
    config = replace(preset("qwen2.5-0.5b"), num_layers=1)
    graphs = compile_graphs(
        config, 1, rows=2, buckets=(16, 32), shard_of=None, prompt_logits_bucket=32, chunks=chunked
    )
    chunk = {("prefill", 32, "none")} if chunked else set()
    assert set(graphs) == chunk | {
        ("decode", 1, "last"), ("decode", 2, "last"), ("prefill", 16, "last"),
        ("prefill", 32, "last"), ("prefill", 32, "all"),
    }  # fmt: skip


def test_decode_rows():
    assert [decode_rows(n) for n in range(1, 9)] == [1, 2, 4, 4, 8, 8, 8, 8]
    with pytest.raises(ValueError, match="9 sequences"):
        decode_rows(9)
