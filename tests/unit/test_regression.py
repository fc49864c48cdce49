"""The comparison behind bench/test_regression.py: a slowed kernel fails, noise does not. The timing needs a card."""

from __future__ import annotations

import json

import pytest

from bench import regression

COPY = 4.29e12
BYTES = 60_555_264  # gate/up of one rank at TP=8, FP8


def measured(step_us, copy=COPY):
    return {"72b-fp8-tp8 gate_up": regression.share(BYTES, step_us * 1e-6, copy)}


def test_a_slowed_kernel_fails_and_names_itself():
    baselines = measured(19.9)
    [line] = regression.compare(measured(19.9 * 1.10), baselines)
    assert "72b-fp8-tp8 gate_up" in line and "margin 5%" in line and "below the baseline" in line
    assert regression.compare(measured(19.9 * 1.04), baselines) == [], "within the margin"
    assert regression.compare(measured(15.0), baselines) == [], "faster is no failure"
    assert regression.compare(measured(19.9 * 1.04), baselines, margin=0.02)


def test_a_slower_card_is_not_a_slower_kernel():
    baselines = measured(19.9)
    assert regression.compare(measured(19.9 * 1.2, copy=COPY / 1.2), baselines) == []
    assert regression.compare(measured(19.9, copy=COPY * 1.2), baselines), (
        "the card got faster, it did not"
    )


def test_what_has_no_baseline_passes_until_one_is_stored(tmp_path):
    assert regression.load_baselines("NVIDIA H200", tmp_path) == {}
    assert regression.compare(measured(19.9), {}) == []
    file = regression.store_baselines("NVIDIA H200", measured(19.9), {"date": "now"}, tmp_path)
    assert file.name == "nvidia_h200.json"
    regression.store_baselines("NVIDIA H200", {"other qkv": 0.5}, {"date": "later"}, tmp_path)
    kept = regression.load_baselines("NVIDIA H200", tmp_path)
    assert set(kept) == {"72b-fp8-tp8 gate_up", "other qkv"}, "merged, not replaced"
    assert json.loads(file.read_text())["_metadata"] == {"date": "later"}
    assert regression.compare(measured(25.0), kept)


def test_committed_baselines_are_shares_of_known_regimes():
    for file in regression.BASELINES.glob("*.json"):
        for key, value in json.loads(file.read_text())["shares"].items():
            name, stage = key.split(" ")
            assert name in regression.REGIMES and stage in regression.STAGES and value > 0, key


@pytest.mark.parametrize("name", list(regression.REGIMES))
def test_every_regime_has_every_stage_in_its_graph(name):
    from engine.config import preset
    from engine.model.costs import op_costs

    d = regression.REGIMES[name]
    assert d.tp == 1, "one card, no exchange: a stage can run alone"
    rows = d.rows if d.phase == "decode" else d.context
    ops = op_costs(preset(d.model), d.tp, phase=d.phase, rows=rows, context=d.context, fp8=False,
                   shard_of=d.shard_of)  # fmt: skip
    assert set(regression.STAGES) <= {stage for stage, _, _ in ops}
