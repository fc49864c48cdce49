"""A GEMV's walk for several rows: which row count gets it, what it may not change, its bits, its candidates."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
import triton

from engine.config import preset, with_layers
from engine.errors import EngineError
from engine.graph.build import build
from engine.graph.passes import run_passes
from engine.kernels.epilogue import Maxima
from engine.kernels.gemv import gemv_programs, plan_gemv
from engine.kernels.gemv_config import (
    WIDE_ROWS,
    GemvConfig,
    Walk,
    heuristic,
    keep_wide,
    ring_shape,
    rows_config,
    simple_config,
    with_wide,
)
from engine.runtime.allocate import maxima_pairs
from engine.tune import choose
from engine.tune.gemv_space import candidates, wide_candidates
from tests.kernels.compile_sm90 import run_compile_checks
from tests.kernels.gemv_compile_cases import meta

FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16
BASE = GemvConfig("ring", 16, 1024, 8, 6, 264, 8, 2)
WIDE = Walk(32, 4, 132, 1)
BOTH = replace(BASE, wide=WIDE)
KEY = {"n": 29568, "k": 8192, "weight_dtype": "fp8"}
CACHE = Path(__file__).parents[2] / "autotune_cache/nvidia_h200/gemv.json"


def test_row_counts_and_their_walks():
    for rows in range(1, 9):
        assert rows_config(BASE, rows) is BASE  # old entries: one walk
        got = rows_config(BOTH, rows)
        walk = (got.block_n, got.stages, got.programs, got.programs_per_sm)
        assert walk == ((32, 4, 132, 1) if rows >= 3 else (16, 6, 264, 2))
        assert (got.block_k, got.num_warps, got.warps_k) == (1024, 8, 8)
        assert rows_config(got, rows) == got


@pytest.mark.parametrize("field, value", [("block_k", 512), ("num_warps", 4), ("warps_k", 4)])
def test_a_walk_that_would_change_bits_is_refused(field, value):
    other = replace(BASE, **{field: value})
    with pytest.raises(EngineError, match=f"changes {field} .* to {value} would change bits"):
        with_wide(BASE, other)
    assert keep_wide(replace(other, wide=None), BOTH).wide is None
    with pytest.raises(TypeError, match=field):  # nor does JSON get it in
        GemvConfig(**{**asdict(BOTH), "wide": {**asdict(WIDE), field: value}})


def test_the_plain_kernel_has_no_wide_walk():
    plain = simple_config(29568, 8192, "fp8")
    with pytest.raises(EngineError, match="changes kernel"):
        with_wide(BASE, plain)
    with pytest.raises(EngineError, match="a wide walk is the ring's"):
        rows_config(replace(plain, wide=WIDE), 8)
    assert wide_candidates(plain, 29568, 8192, "fp8") == []


def test_a_config_of_the_same_sums_keeps_the_walk():
    deeper = replace(BASE, stages=3, block_n=32)
    assert keep_wide(deeper, BOTH) == replace(deeper, wide=WIDE)
    assert with_wide(BASE, rows_config(BOTH, 8)) == BOTH
    for config in candidates(29568, 8192, "fp8", 1, present=BOTH):
        same = (config.kernel, config.block_k, config.num_warps, config.warps_k) == (
            "ring", 1024, 8, 8
        )  # fmt: skip
        assert config.wide == (WIDE if same else None)


@pytest.fixture
def cache(tmp_path) -> Iterator[Path]:
    choose.set_target("NVIDIA H200", 132, tmp_path)
    yield tmp_path / "nvidia_h200" / "gemv.json"
    choose.set_target("NVIDIA H200", 132)


def test_cache_round_trip(cache, caplog):
    name = choose.key_string("gemv", KEY)
    choose.save_entries("gemv", "NVIDIA H200", {name: {"config": BOTH}}, choose.metadata("gemv"))
    assert choose.choose("gemv", KEY) == BOTH
    assert hash(choose.choose("gemv", KEY)) == hash(BOTH)
    content = json.loads(cache.read_text())
    entry = content["entries"][name]["config"]
    assert entry["wide"] == {"block_n": 32, "stages": 4, "programs": 132, "programs_per_sm": 1}

    def choice(wide: dict | None) -> GemvConfig:
        config = {k: v for k, v in entry.items() if k != "wide"}
        content["entries"][name]["config"] = config | ({"wide": wide} if wide else {})
        cache.write_text(json.dumps(content))
        choose.set_target("NVIDIA H200", 132, cache.parents[1])
        return choose.choose("gemv", KEY)

    assert choice(None) == BASE
    assert choice({**entry["wide"], "block_k": 512}) == heuristic(29568, 8192, "fp8")
    assert "does not fit" in caplog.text


def test_the_launch_and_its_maxima_follow_the_rows(monkeypatch):
    """As on a device: without the interpreter, which knows the plain kernel only."""
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    n, k = 76032, 8192
    config = replace(GemvConfig("ring", 32, 512, 8, 3, 264, 4, 2), wide=Walk(64, 3, 132, 1))
    seen = {}
    for rows in (1, 2, 4, 8):
        programs = gemv_programs(config, n, k, rows, BF16)
        ints, floats = meta(8, dtype=torch.int32), meta(8, dtype=torch.float32)
        values = meta(rows, programs, dtype=torch.float32)
        epilogue = Maxima(
            meta(rows, n, dtype=torch.float32), values, values.int(), floats, ints, ints, ints, n, 0
        )
        _, grid, arguments = plan_gemv(meta(rows, k), meta(n, k), epilogue, config=config)
        assert grid == (programs,) and arguments["BLOCK_K"] == 512 and arguments["WARPS_K"] == 4
        seen[rows] = (programs, arguments["BLOCK_N"], arguments["num_warps"])
    assert seen == {1: (264, 32, 8), 2: (264, 32, 8), 4: (132, 64, 8), 8: (132, 64, 8)}


@pytest.mark.parametrize("rows, programs", [(1, 264), (2, 264), (4, 132), (8, 132)])
def test_maxima_are_sized_for_the_walk_in_force(monkeypatch, rows, programs):
    """lm_head of 72B at TP=2; while tuning, for two programs a multiprocessor as well."""
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    config = with_layers(preset("qwen2.5-72b"), 1)
    graph = run_passes(build(config, phase="decode", rows=rows, tp=2))
    key = {"n": 76032, "k": 8192, "weight_dtype": "bf16"}
    wide = replace(GemvConfig("ring", 32, 512, 8, 3, 264, 4, 2), wide=Walk(64, 3, 132, 1))
    choose.set_override("gemv", wide, key)
    try:
        assert maxima_pairs([graph], lambda name: BF16) == rows * programs
        assert maxima_pairs([graph], lambda name: BF16, tuning=True) >= rows * 264
    finally:
        choose.remove_override("gemv", key)


@pytest.mark.parametrize("weight", ["fp8", "bf16"])
@pytest.mark.parametrize("n", [1280, 3584, 7392, 8192, 29568, 152064])
@pytest.mark.parametrize("k", [1024, 3584, 8192, 14784])
def test_candidates_fit_every_row_count_and_keep_the_bits(n, k, weight):
    base = heuristic(n, k, weight)
    found = candidates(n, k, weight, WIDE_ROWS, present=base)
    assert found == wide_candidates(base, n, k, weight)
    assert 2 <= len(found) <= 12 and len(set(found)) == len(found)
    assert found[0].wide == Walk(base.block_n, base.stages, base.programs, base.programs_per_sm)
    for config in found:
        assert replace(config, wide=None) == base
        for rows in range(WIDE_ROWS, 9):
            ring_shape(
                rows_config(config, rows), n, k, rows, BF16, FP8 if weight == "fp8" else BF16
            )


def test_a_candidate_keeps_x_beside_the_ring_where_two_programs_cannot():
    def staged(config):
        return ring_shape(rows_config(config, 8), 29568, 8192, 8, BF16, FP8).stage_x

    found = wide_candidates(BASE, 29568, 8192, "fp8")
    assert not staged(found[0]) and any(staged(config) for config in found)


@pytest.fixture(scope="module")
def results():
    return run_compile_checks("tests.kernels.gemv_wide_cases")


def test_bits_do_not_depend_on_the_walk(results):
    """1, 2, 4 and 8 rows: RMSNorm in front, stores, SiLU, RoPE, maxima; and the comparison can fail."""
    assert len(results["bits"]) == 8
    assert not {name: text for name, text in results["bits"].items() if text}


def test_candidates_compile_without_spills(results):
    """8 bytes at most: ptxas may give up two registers to stay at 128, two programs of 8 warps."""
    entries = json.loads(CACHE.read_text())["entries"]
    assert len(results["compiled"]) >= min(20, len(entries))
    for name, report in results["compiled"].items():
        assert max(report["spill_store_bytes"], report["spill_load_bytes"]) <= 8, name
        assert set(report["async_copies"]) == {"128"} and report["tensor_core"], name
