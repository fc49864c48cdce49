"""The predicted all-reduce: it returns what it was calibrated to, and says that it is a prediction."""

from __future__ import annotations

import pytest

from engine.bench.main import main
from engine.errors import EngineError
from engine.kernels.all_reduce import TWO_SHOT_BYTES
from engine.model.exchange import (
    CALIBRATION_BYTES,
    MESSAGES,
    PREFILL_LAUNCHES,
    link_costs,
    predicted,
    prediction_table,
)
from engine.model.gpus import GPUS


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
    assert one_shot == pytest.approx(7 * message / 478e9 * 1e6)
    for fp8, sent in ((False, message), (True, message / 2)):
        two_shot = costs.two_shot_us(8, message, fp8=fp8)
        rest = two_shot - 3 * costs.launch_us - 2 * costs.flag_us
        assert rest == pytest.approx(7 / 8 * sent / 478e9 * 1e6)
    assert costs.us("lamport", 8, 16, launches=2) - costs.us("lamport", 8, 16) == costs.launch_us


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("tp", [2, 4, 8])
def test_crossover(tp, fp8):
    """Provisional thresholds near it, at two ranks below it: the one-shot that was measured there is far from the
    links' rate (docs/performance.md), and two-shot has the norm in it."""
    costs = link_costs()
    crossing = costs.crossover(tp, fp8=fp8)
    for share, better in ((0.9, "one-shot"), (1.1, "two-shot")):
        times = {
            "one-shot": costs.us("lamport", tp, crossing * share, PREFILL_LAUNCHES),
            "two-shot": costs.two_shot_us(tp, crossing * share, fp8=fp8),
        }
        assert min(times, key=times.get) == better
    if not fp8:
        assert 0.35 < TWO_SHOT_BYTES[tp] / crossing < 1.3
    else:
        assert crossing < costs.crossover(tp)


def test_table_is_marked_and_complete():
    costs, lines = predicted()
    assert len(lines) == 3 * len(MESSAGES) and [line.measured for line in lines].count(True) == 1
    for line in lines:
        prefill = "tokens" in line.name
        assert (line.decode_us is None) == prefill
        assert (line.two_shot_us is not None) == (line.two_shot_fp8_us is not None) == prefill
        assert line.chosen == ("two_shot" if line.nbytes >= TWO_SHOT_BYTES[line.tp] else "lamport")
        assert line.nbytes < TWO_SHOT_BYTES[line.tp] or prefill
    decode = {line.tp: line for line in lines if line.nbytes == CALIBRATION_BYTES}
    assert decode[2].lamport_us < decode[4].lamport_us < decode[8].lamport_us < 3
    assert decode[2].decode_us < decode[8].decode_us
    table = prediction_table()
    assert table.startswith("**A prediction, not a measurement**")
    assert table.count("*") == 4 + 2 and "| 2 | 72B, 1 row | 16,384 | 2.30* |" in table
    assert f"{costs.flight_us:.2f} us" in table
    assert "in prefill two-shot from 2048 KB at TP=2, 1024 KB at TP=4, 512 KB at TP=8" in table
    for fp8, form in ((False, "over one-shot from "), (True, "with FP8, from ")):
        text = ", ".join(
            f"{costs.crossover(tp, fp8=fp8) / 1024:.0f} KB at TP={tp}" for tp in (2, 4, 8)
        )
        assert form + text in table


def test_command_needs_no_gpu(capsys):
    assert main(["allreduce", "--predict"]) == 0
    assert "A prediction, not a measurement" in capsys.readouterr().out
