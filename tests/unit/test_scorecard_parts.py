"""bench/scorecard_parts.py over the fake executor and the CPU back end: rows, and parts that fail alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench import scorecard_parts as parts
from bench.rows import Rows
from engine.config import preset
from tests.unit.fakes import FakeExecutor

TINY = replace(
    preset("qwen2.5-0.5b"), hidden_size=64, num_layers=3, num_heads=4, num_kv_heads=4, head_dim=16,
    intermediate_size=96, vocab_size=203, tie_word_embeddings=False,
)  # fmt: skip
ROOF = {"weight_bytes": 10**9, "kv_bytes_per_token": 1000, "copy_bandwidth": 4.29e12}


class FakeSession:
    """Stands in for engine.profiling.session.Session; profiling is broken."""

    def __init__(self, engine, model, wanted):
        self.engine, self.model = engine, replace(model, vocab_size=97)
        assert {wanted.input_len, *wanted.prompts} == {*parts.CONTEXTS, *parts.PROMPTS}
        self.executor = FakeExecutor(1, 4 * max(parts.CONTEXTS), max_in_flight=8)
        self.executor.stats = lambda: {"roof": ROOF}
        self.executor.ranks = []

    def counters(self):
        return {"host_syncs": 0, "allocations": 2, "jit_compiles_after_start": 1}

    def profile(self, phase):
        raise RuntimeError(f"no events\nin the {phase} graph")

    def close(self):
        self.executor.close()


@pytest.fixture
def small(monkeypatch):
    """Short prompts and answers, so that the fake is quick."""
    for name, value in dict(CONTEXTS=(16, 64), PROMPTS=(32,), TOKENS=8, SOAK_TOKENS=12).items():
        monkeypatch.setattr(parts, name, value)
    monkeypatch.setattr("engine.profiling.session.Session", FakeSession)
    monkeypatch.setattr(parts, "_ranks_equal", lambda executor: True)


def test_a_deployment_leaves_a_row_for_each_figure(small):
    rows = Rows("scorecard", write=False)
    parts.engine(rows, "qwen2.5-72b:fp8:8", soak=True)
    found = {(r["metric"], r["context"]) for r in rows.rows if r["metric"] not in ("part_failed",)}
    assert found == {
        ("ttft_ms", 16), ("ttft_ms", 64), ("ttft_ms", 32), ("decode_tok_s", 16), ("decode_tok_s", 64),
        ("host_syncs_per_request", 16), ("allocations_per_request", 16), ("jit_compiles_after_start", 16),
        ("soak_ids_stable", None), ("soak_last_over_first", None), ("soak_ranks_equal", None),
    }  # fmt: skip
    assert all((r["quantization"], r["tp"], r["shard_of"]) == ("fp8", 8, None) for r in rows.rows)
    by_metric = {r["metric"]: r for r in rows.rows}
    assert by_metric["soak_ids_stable"]["value"] == 1.0
    assert by_metric["host_syncs_per_request"]["value"] == 0
    rate = next(r for r in rows.rows if r["metric"] == "decode_tok_s" and r["context"] == 64)
    moved = ROOF["weight_bytes"] + 1000 * (64 + 4)
    assert rate["share"] == pytest.approx(moved / 4.29e12 * rate["value"], rel=1e-3)
    failed = [r["algorithm"] for r in rows.rows if r["metric"] == "part_failed"]
    assert failed == [f"profile of {p}: RuntimeError: no events in the {p} graph" for p in ("decode", "prefill")]  # fmt: skip


def test_ids_that_change_over_the_soak_are_seen(small, monkeypatch):
    class Drifting(FakeSession):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            honest, self.calls = self.executor.prefill, 0

            def prefill(slot, ids, start=0, draw=None):
                self.calls += 1
                return honest(slot, [*ids, 5] if self.calls == 40 else ids)

            self.executor.prefill = prefill

    monkeypatch.setattr("engine.profiling.session.Session", Drifting)
    rows = Rows("scorecard", write=False)
    parts.engine(rows, "qwen2.5-72b:fp8:8", soak=True)
    [stable] = [r["value"] for r in rows.rows if r["metric"] == "soak_ids_stable"]
    assert stable == pytest.approx(29 / 30, rel=1e-4)


@pytest.fixture
def on_cpu(monkeypatch):
    """Virtual ranks on the CPU back end, which runs any degree in lockstep."""
    from engine.runtime.create import create_cpu_executor

    def create(config, model):
        assert config.virtual_ranks == (config.tensor_parallel_size > 1)
        return create_cpu_executor(replace(config, device="cpu", dtype="float32"), model)

    monkeypatch.setattr("engine.runtime.create.create_gpu_executor", create)
    monkeypatch.setattr(parts, "preset", lambda name: TINY)
    return create


@pytest.mark.parametrize("equal", [True, False])
def test_virtual_ranks_are_held_against_one_rank(on_cpu, monkeypatch, equal):
    monkeypatch.setattr(parts, "_ranks_equal", lambda executor: equal)
    rows = Rows("scorecard", write=False)
    parts.attempt(rows, "virtual", lambda: parts.virtual(rows, "qwen2.5-0.5b:none:4"))
    values = {r["metric"]: r["value"] for r in rows.rows}
    assert values["virtual_logits_error"] < 1e-4 and values["virtual_ranks_equal"] == equal
    assert ("part_failed" in values) == (not equal)


def test_a_wrong_sum_over_ranks_fails(on_cpu, monkeypatch):
    def broken(config, model):
        if config.virtual_ranks:
            config = replace(config, seed=1)  # other weights: as far off as a sum that lacks a rank
        return on_cpu(config, model)

    monkeypatch.setattr("engine.runtime.create.create_gpu_executor", broken)
    monkeypatch.setattr(parts, "_ranks_equal", lambda executor: True)
    rows = Rows("scorecard", write=False)
    parts.attempt(rows, "virtual", lambda: parts.virtual(rows, "qwen2.5-0.5b:none:4"))
    [reason] = [r["algorithm"] for r in rows.rows if r["metric"] == "part_failed"]
    assert "bound 0.03" in reason
