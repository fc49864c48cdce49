"""Scheduler over a contract-checking executor: no slot lost, every request ends, tokens its own."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import DeviceError, RequestError
from engine.request import Request, admit
from engine.sampling import SamplingParams
from engine.scheduler import Scheduler
from tests.unit.fakes import FakeExecutor, expected


def make(executor, i, prompt, *, eos=frozenset(), seed=0, tokenizer=None, **params):
    return Request(
        str(i),
        prompt,
        SamplingParams(**params),
        max_model_len=executor.max_model_len,
        eos=eos,
        seed=seed,
        tokenizer=tokenizer,
    )


def run(scheduler, limit=10_000):
    """All updates until idle; fails rather than hangs."""
    updates = []
    for _ in range(limit):
        if not scheduler.has_work:
            return updates
        updates += scheduler.step()
    raise AssertionError("a request never ended")


def truncated(tokens, eos, min_tokens):
    """What a request with this EOS set returns of its endless token sequence."""
    for n, token in enumerate(tokens, start=1):
        if token in eos and n >= min_tokens:
            return tokens[:n]
    return tokens


REQUESTS = st.lists(
    st.fixed_dictionaries(
        {
            # Few different tokens, so that prompts share prefixes.
            "prompt": st.one_of(
                st.lists(st.integers(0, 96), min_size=1, max_size=12),
                st.lists(st.integers(0, 1), min_size=1, max_size=12),
            ),
            "max_tokens": st.one_of(st.none(), st.integers(1, 20)),
            "min_tokens": st.integers(0, 1),
            "ignore_eos": st.booleans(),
            "logprobs": st.sampled_from([None, None, None, 2]),
            "prompt_logprobs": st.sampled_from([None, None, None, 1]),
            "late": st.booleans(),  # added while others run
            "abort_after": st.sampled_from([None, None, None, 0, 3]),
        }
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=200, deadline=None)
@given(
    requests=REQUESTS, slots=st.integers(1, 4), ahead=st.integers(0, 6), caching=st.booleans(),
    data=st.data(),
)  # fmt: skip
def test_invariants(requests, slots, ahead, caching, data):
    executor = FakeExecutor(num_slots=slots, max_model_len=32, max_in_flight=ahead)
    scheduler = Scheduler(executor, prefix_caching=caching)
    eos = frozenset(data.draw(st.sets(st.integers(0, 96), max_size=12)))
    made, updates = [], []
    pending = sorted(enumerate(requests), key=lambda p: p[1]["late"])
    steps = 0
    while pending or scheduler.has_work:
        while pending and (not pending[0][1]["late"] or steps % 3 == 0):
            i, spec = pending.pop(0)
            keys = ("max_tokens", "min_tokens", "ignore_eos", "logprobs", "prompt_logprobs")
            request = make(executor, i, spec["prompt"], eos=eos, **{k: spec[k] for k in keys})
            scheduler.add(request)
            made.append((request, spec))
        updates += scheduler.step()
        steps += 1
        for request, spec in made:
            if spec["abort_after"] is not None and len(request.token_ids) >= spec["abort_after"]:
                scheduler.abort(request)
        assert steps < 2000, "a request never ended"

    assert scheduler.free_slots == slots, "a slot was lost"
    assert len(made) == len(requests)
    for request, spec in made:
        whole = expected(spec["prompt"], request.max_tokens)
        want = truncated(whole, frozenset() if spec["ignore_eos"] else eos, spec["min_tokens"])
        assert request.slot is None
        if request.finish_reason == "abort":
            assert spec["abort_after"] is not None
            assert request.token_ids == want[: len(request.token_ids)]
        else:
            assert request.token_ids == want
            stopped = want[-1] in eos and not spec["ignore_eos"]
            assert request.finish_reason == ("stop" if stopped else "length")
        if spec["logprobs"] is not None:
            assert [next(iter(e)) for e in request.logprobs] == request.token_ids
        if spec["prompt_logprobs"] is not None and request.token_ids:
            assert request.prompt_logprobs[0] is None
            assert [next(iter(e)) for e in request.prompt_logprobs[1:]] == spec["prompt"][1:]
        mine = [d for r, d in updates if r is request]
        assert [t for d in mine for t in d.token_ids] == request.token_ids
        assert all(d.finish_reason is None for d in mine[:-1])


def test_a_conversation_is_prefilled_once():
    executor = FakeExecutor(num_slots=2)
    scheduler = Scheduler(executor, prefix_caching=True)
    first, other = make(executor, 0, [1, 2, 3], max_tokens=4), make(executor, 1, [9], max_tokens=4)
    scheduler.add(first)
    scheduler.add(other)
    run(scheduler)
    history = [1, 2, 3, *first.token_ids]
    second = make(executor, 2, [*history, 5, 6], max_tokens=4)
    scheduler.add(second)
    run(scheduler)
    # All but the last generated token: no step has processed that one.
    assert second.cached_tokens == executor.cached == len(history) - 1
    assert second.token_ids == expected([*history, 5, 6], 4)
    again = make(
        executor, 3, [1, 2, 3], max_tokens=4
    )  # the whole prompt is there: its end runs anew
    scheduler.add(again)
    run(scheduler)
    assert again.cached_tokens == 2 and again.token_ids == first.token_ids
    fresh = make(executor, 4, [50, 51], max_tokens=2)
    scheduler.add(fresh)
    run(scheduler)
    assert fresh.cached_tokens == 0 and fresh.output().metrics.cached_tokens == 0


def test_a_failed_request_ends_alone():
    class Broken:
        """A tokenizer that fails on one token."""

        byte_level, byte_tokens = True, frozenset()

        def has_text(self, token):
            return True

        def decode(self, ids):
            raise ValueError("broken bytes")

    executor = FakeExecutor(num_slots=2)
    executor.refuse = 77
    scheduler = Scheduler(executor)
    good = make(executor, 0, [1], max_tokens=6)
    refused = make(executor, 1, [77], max_tokens=6)
    broken = make(executor, 2, [3], max_tokens=6, tokenizer=Broken())
    for request in (refused, broken, good):
        scheduler.add(request)
    ends = {r: d for r, d in run(scheduler) if d.output is not None}
    assert good.token_ids == expected([1], 6) and good.finish_reason == "length"
    assert ends[refused].output.error == "token 77 is refused"
    assert ends[broken].finish_reason == "error" and ends[broken].output.error == "broken bytes"
    assert scheduler.free_slots == 2 and not scheduler.has_work


def test_runs_ahead_to_the_limit_and_drops_tokens_after_the_end():
    executor = FakeExecutor(num_slots=1, max_in_flight=4, script=[5, 6, 7, 8])
    scheduler = Scheduler(executor)
    request = make(executor, 0, [1, 2], eos=frozenset({7}), max_tokens=40)
    scheduler.add(request)
    run(scheduler)
    assert request.token_ids == [5, 6, 7] and request.finish_reason == "stop"
    assert executor.deepest == 5, "the oldest unread step and max_in_flight beyond it"
    assert len(executor.results) > 3, "nothing was queued ahead"
    # The slot is reused while its last owner's steps are still unread.
    again = make(executor, 1, [3], max_tokens=2)
    scheduler.add(again)
    run(scheduler)
    assert again.token_ids == [5, 6]


def test_no_step_is_queued_beyond_max_tokens():
    executor = FakeExecutor(num_slots=2, max_in_flight=6)
    scheduler = Scheduler(executor)
    for i, n in enumerate((3, 5)):
        scheduler.add(make(executor, i, [i + 1], max_tokens=n))
    run(scheduler)
    assert [len(h) for h in executor.history.values()] == [4, 6]


def test_batches_share_steps():
    executor = FakeExecutor(num_slots=3)
    scheduler = Scheduler(executor)
    for i in range(3):
        scheduler.add(make(executor, i, [i + 1], max_tokens=9))
    run(scheduler)
    assert executor.batches == [3] * 8


def test_more_requests_than_slots_start_in_order():
    executor = FakeExecutor(num_slots=2)
    scheduler = Scheduler(executor)
    requests = [make(executor, i, [i + 1], max_tokens=1 + i % 3) for i in range(7)]
    for request in requests:
        scheduler.add(request)
    first = []
    for request, _ in run(scheduler):
        if request not in first:
            first.append(request)
    assert first == requests


def test_seed_and_temperature_reach_the_slot():
    executor = FakeExecutor(num_slots=1)
    scheduler = Scheduler(executor)
    request = make(executor, 0, [4], max_tokens=6, temperature=0.7, seed=11)
    scheduler.add(request)
    run(scheduler)
    assert executor.params[0] == (0.7, 11)
    assert request.token_ids == expected([4], 6, seed=11) != expected([4], 6)


def test_logprobs_are_those_of_the_step():
    executor = FakeExecutor(num_slots=2)
    scheduler = Scheduler(executor)
    with_logprobs = make(executor, 0, [4, 5, 6], max_tokens=5, logprobs=3, prompt_logprobs=0)
    scheduler.add(make(executor, 1, [9], max_tokens=8))
    scheduler.add(with_logprobs)
    run(scheduler)
    history = [4, 5, 6, *with_logprobs.token_ids]
    for i, entry in enumerate(with_logprobs.logprobs):
        token = with_logprobs.token_ids[i]
        row = torch.log_softmax(executor._logits(history[: 3 + i], token).double(), dim=-1)
        assert entry[token].logprob == pytest.approx(float(row[token]), abs=1e-12)
        assert set(torch.topk(row, 3).indices.tolist()) <= set(entry) and entry[token].rank == 1
    row = torch.log_softmax(executor._logits([4], 5).double(), dim=-1)
    assert with_logprobs.prompt_logprobs[1] == {5: with_logprobs.prompt_logprobs[1][5]}
    assert with_logprobs.prompt_logprobs[1][5].logprob == pytest.approx(float(row[5]), abs=1e-12)


def test_interrupted_read_loses_nothing():
    executor = FakeExecutor(num_slots=2)
    executor.interrupt_at = 2
    scheduler = Scheduler(executor)
    request = make(executor, 0, [1], max_tokens=9)
    scheduler.add(request)
    with pytest.raises(KeyboardInterrupt):
        run(scheduler)
    run(scheduler)
    assert request.token_ids == expected([1], 9)


def test_abort_frees_the_slot_for_the_next():
    executor = FakeExecutor(num_slots=1)
    scheduler = Scheduler(executor)
    first, second = (make(executor, i, [i + 1], max_tokens=20) for i in range(2))
    scheduler.add(first)
    scheduler.add(second)
    scheduler.step()
    assert scheduler.abort(first).finish_reason == "abort"
    assert scheduler.abort(first) is None
    run(scheduler)
    assert second.token_ids == expected([2], 20) and first.token_ids == expected([1], 1)
    third = make(executor, 2, [5], max_tokens=3)
    scheduler.add(third)
    scheduler.abort(third)
    assert not scheduler.has_work and third.token_ids == []


def test_a_slot_is_not_taken_over_while_its_prefill_is_unread():
    executor = FakeExecutor(num_slots=1)
    scheduler = Scheduler(executor)
    first = make(executor, 0, [1], max_tokens=9)
    scheduler.add(first)
    executor.interrupt_at = 0
    with pytest.raises(KeyboardInterrupt):
        scheduler.step()
    scheduler.abort(first)
    assert scheduler.free_slots == 1
    scheduler._unsure = False  # no recovery: the queued steps stay, and are read in order
    second = make(executor, 1, [2], max_tokens=9)
    scheduler.add(second)
    run(scheduler)
    assert second.token_ids == expected([2], 9) and scheduler.free_slots == 1


@pytest.mark.parametrize("at", [0, 3])
@pytest.mark.parametrize("caching", [False, True])
def test_a_lost_handle_is_recovered_from(at, caching):
    """Ctrl-C between queueing a step and noting it, then the aborts that unwinding makes."""
    executor = FakeExecutor(num_slots=2)
    executor.lose_handle_at = at
    scheduler = Scheduler(executor, prefix_caching=caching)
    scheduler.add(make(executor, 0, [1], max_tokens=9))
    with pytest.raises(KeyboardInterrupt):
        run(scheduler)
    scheduler.abort_all()
    request = make(executor, 1, [2], max_tokens=9)
    scheduler.add(request)
    run(scheduler)
    assert request.token_ids == expected([2], 9) and scheduler.free_slots == 2


@pytest.mark.parametrize("dead", [False, True])
def test_a_device_failure_ends_all_requests(dead):
    executor = FakeExecutor(num_slots=2)
    executor.fail_at, executor.dead = 3, dead
    scheduler = Scheduler(executor)
    requests = [make(executor, i, [i + 1], max_tokens=9) for i in range(3)]
    for request in requests:
        scheduler.add(request)
    with pytest.raises(DeviceError, match="rank 1: NaN"):
        run(scheduler)
    assert all(r.finish_reason == "abort" for r in requests)
    assert not scheduler.has_work and scheduler.free_slots == 2
    after = make(executor, 9, [5], max_tokens=4)
    if dead:
        with pytest.raises(DeviceError, match="stopped after a device failure: rank 1: NaN"):
            scheduler.add(after)
    else:
        scheduler.add(after)
        run(scheduler)
        assert after.token_ids == expected([5], 4)


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        (0, {}, "prompt is empty"),
        (64, {}, r"64 tokens .* context of 64; shorten it$"),
        (70, {"max_tokens": 1}, r"70 tokens .* 64"),
        (
            60,
            {"max_tokens": 5},
            r"60 tokens and max_tokens=5 make 65, .* 64; lower max_tokens to 4$",
        ),
        (60, {"min_tokens": 5}, r"min_tokens=5 .* 60 .* leaves 4 .* 64; lower it$"),
    ],
)
def test_a_request_that_can_never_fit_is_refused_with_the_numbers(prompt, params, message):
    with pytest.raises(RequestError, match=message):
        admit(prompt, SamplingParams(**params), 64)
    with pytest.raises(RequestError, match=message):  # the model's own limit: nothing to raise
        admit(prompt, SamplingParams(**params), 64, longest=64)
    if prompt:
        with pytest.raises(RequestError, match=r" or raise --max-model-len \(up to 256\)$"):
            admit(prompt, SamplingParams(**params), 64, longest=256)


def test_max_tokens_is_clipped_only_when_not_given():
    executor = FakeExecutor(max_model_len=64)
    assert make(executor, 0, [1] * 60).max_tokens == 4
    assert make(executor, 0, [1] * 60, max_tokens=4).max_tokens == 4
