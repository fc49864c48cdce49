"""What the scripts that measure one deployment after the other share."""

from __future__ import annotations

from bench.deployment import each
from bench.latency import decode_ahead, generate
from tests.unit.fakes import FakeExecutor


def test_a_broken_deployment_does_not_stop_the_others(capsys):
    seen = []

    def measure(text):
        seen.append(text)
        if text == "b":
            raise RuntimeError("no memory")

    each(["a", "b", "c"], measure)
    assert seen == ["a", "b", "c"]
    assert capsys.readouterr().out == "b: RuntimeError: no memory\n"


def test_steps_are_queued_ahead_and_all_are_read():
    executor = FakeExecutor(num_slots=1, max_model_len=64, max_in_flight=4, script=[5, 6, 7, 8])
    ids, first, later = generate(executor, [1, 2, 3], 7)
    assert len(ids) == 7 and first >= 0 and later >= 0
    assert executor.deepest > 1, "a step is queued before the one in front of it is read"
    assert len(list(decode_ahead(executor, [0], 5))) == 5
    assert executor.next_read == len(executor.results)
