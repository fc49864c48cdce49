"""The predicted all-reduce: it returns what it was calibrated to, and says that it is a prediction."""

from __future__ import annotations

import pytest

from engine.bench.main import main
from engine.errors import EngineError
from engine.kernels.all_reduce import TWO_SHOT_BYTES
from engine.model.exchange import (
    CALIBRATION_BYTES,
    MESSAGES,
    link_costs,
    predicted,
    prediction_table,
)
from engine.model.gpus import GPUS

SPLIT_LAUNCHES = {"lamport": 2, "two_shot": 3}


def measured(algorithm, value, **facts):
    return {
        "bench": "all_reduce", "metric": "all_reduce_us", "tp": 2, "gpus": 2, "gpu": "NVIDIA H200",
        "bytes": CALIBRATION_BYTES, "algorithm": algorithm, "value": value, "commit": "abc", **facts,
    }  # fmt: skip


ROWS = [measured("copy_kernel", 1.2), measured("lamport_fused", 2.6), measured("flag", 4.0)]


def test_calibration_point_comes_back():
    """First experiments on H200s: 16 KB at TP=2, us."""
    costs = link_costs()
    assert costs.us("lamport", 2, CALIBRATION_BYTES) == pytest.approx(2.30)
    assert costs.us("flag", 2, CALIBRATION_BYTES) == pytest.approx(3.82)
    assert "H200s, 2026-11" in costs.source
    # The flight that is left must be longer than a bare remote store until it is seen, 0.76 us.
    assert 0.76 < costs.flight_us < costs.flag_us


def test_rows_of_two_real_gpus_replace_the_experiments():
    costs = link_costs(ROWS)
    assert costs.us("lamport", 2, CALIBRATION_BYTES) == pytest.approx(2.6)
    assert costs.launch_us == 1.2 and "at abc" in costs.source
    virtual = [{**row, "gpus": 1} for row in ROWS]  # ranks that share a device: no link was crossed
    other = [{**row, "gpu": "NVIDIA H100"} for row in ROWS]
    for rows in (virtual, other, ROWS[:2]):
        assert link_costs(rows) == link_costs()
    assert link_costs(other, GPUS["h100"]).launch_us == 1.2
    with pytest.raises(EngineError, match=r"run bench/all_reduce\.py"):
        link_costs(ROWS, GPUS["h100"])


def test_bytes_and_flights():
    """Against the formulas by hand, 72B at TP=8, 2048 tokens: 33.5 MB a message."""
    costs = link_costs()
    message = 2048 * 8192 * 2
    one_shot = costs.us("lamport", 8, message) - costs.launch_us - costs.flight_us
    two_shot = costs.us("two_shot", 8, message) - costs.launch_us - 2 * costs.flight_us
    assert one_shot == pytest.approx(7 * message / 478e9 * 1e6)
    assert two_shot == pytest.approx(one_shot / 4)
    assert costs.us("lamport", 8, 16, launches=2) - costs.us("lamport", 8, 16) == costs.launch_us


@pytest.mark.parametrize("tp", [4, 8])
def test_the_heuristics_thresholds_are_where_the_prediction_crosses(tp):
    costs = link_costs()
    crossing = costs.crossover(tp, split=True)
    assert 0.8 < TWO_SHOT_BYTES[tp] / crossing < 1.25
    for nbytes, better in ((crossing * 0.9, "lamport"), (crossing * 1.1, "two_shot")):
        times = {a: costs.us(a, tp, nbytes, SPLIT_LAUNCHES[a]) for a in ("lamport", "two_shot")}
        assert min(times, key=times.get) == better
    at = costs.crossover(tp, split=False)
    assert at < crossing
    assert costs.us("lamport", tp, at) == pytest.approx(costs.us("two_shot", tp, at))
    assert costs.crossover(2, split=True) is None and TWO_SHOT_BYTES[2] is None


def test_table_is_marked_and_complete():
    costs, lines = predicted()
    assert len(lines) == 3 * len(MESSAGES) and [line.measured for line in lines].count(True) == 1
    for line in lines:
        assert (line.decode_us is None) == ("tokens" in line.name)
    decode = {line.tp: line for line in lines if line.nbytes == CALIBRATION_BYTES}
    assert decode[2].lamport_us < decode[4].lamport_us < decode[8].lamport_us < 3
    assert decode[2].decode_us < decode[8].decode_us
    table = prediction_table()
    assert table.startswith("**A prediction, not a measurement**")
    assert table.count("*") == 4 + 2 and "| 2 | 72B, 1 row | 16,384 | 2.30* |" in table
    assert f"{costs.flight_us:.2f} us" in table
    assert (
        "the heuristic's choice for split forms, two-shot from 640 KB at TP=4 and 180 KB" in table
    )
    for split, form in ((False, "in this table's form"), (True, "in split forms")):
        first, second = (costs.crossover(tp, split=split) / 1024 for tp in (4, 8))
        assert f"from {first:.0f} KB at TP=4 and {second:.0f} KB at TP=8 {form}" in table


def test_command_needs_no_gpu(capsys):
    assert main(["allreduce", "--predict"]) == 0
    assert "A prediction, not a measurement" in capsys.readouterr().out
