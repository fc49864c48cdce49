"""Put with signal: every word of the channel against the reference, refusals, and two ends as
processes."""

from __future__ import annotations

import random
import time

import pytest
import torch

from engine.errors import DeviceError, EngineError
from engine.kernels.put_signal import (
    ABORT,
    ABORT_SEQUENCE,
    ARMED,
    LAST_SEQUENCE,
    Mailbox,
    PutConfig,
    Route,
    consume,
    consume_ref,
    heuristic,
    poll,
    put,
    put_ref,
)
from engine.kernels.sync import ABORT_EXPIRED
from engine.runtime.stream_signal import Channel
from tests.kernels.collective_group import random_delay, run_ranks, status_words

ROUTE = Route(producer=4, consumer=7, channel=20)
SMALL = PutConfig(block=32, num_warps=1, programs=3)  # several programs, each with a loop
SHORT_US, LONG_US = 20_000, 20_000_000


def payload(call: int, nbytes: int) -> torch.Tensor:
    """Random bytes, another row for each call."""
    generator = torch.Generator().manual_seed(call)
    return torch.randint(256, (nbytes,), dtype=torch.uint8, generator=generator)


def boxes(nbytes: int, device: str, slots: int = 3, sequence: int = 0) -> tuple[Mailbox, Mailbox]:
    """The kernels' mailbox and the reference's, payloads poisoned."""
    made = Mailbox(nbytes, device, device, slots), Mailbox(nbytes, "cpu", "cpu", slots)
    for box in made:
        box.payload.fill_(0xA5)
        box.arm(sequence)
    return made


def assert_same(box: Mailbox, reference: Mailbox, what: str) -> None:
    for name in ("payload", "headers", "credits"):
        found, wanted = getattr(box, name).cpu(), getattr(reference, name)
        assert torch.equal(found, wanted), f"{what}: {name}\n{found}\n{wanted}"


@pytest.mark.parametrize("nbytes", [16, 96, 2048, 4096 + 48, 16384, 40000])
@pytest.mark.parametrize("config", [None, SMALL])
def test_hand_offs(nbytes, config, device):
    box, reference = boxes(nbytes + 32, device)  # 32 bytes behind the payload stay poisoned
    status = status_words(device)
    for call in range(4):
        source = payload(call, nbytes).to(device)
        put(source, box.slot(call), status, ROUTE, config=config)
        assert put_ref(reference, source.cpu(), call)
        assert_same(box, reference, f"put {call}")
        poll(box.slot(call), status, ROUTE)
        consume(box.slot(call), status, ROUTE)
        assert consume_ref(reference, call)
        assert_same(box, reference, f"consume {call}")
    assert status.tolist() == [0] * 8


@pytest.mark.parametrize("slots", [1, 3])
def test_any_sequence_of_calls_matches_the_reference(slots, device):
    """Puts into taken slots and consumption of empty ones among them; the sequence wraps."""
    source_of = random.Random(slots)
    box, reference = boxes(64, device, slots, LAST_SEQUENCE - 4)
    status = status_words(device)
    puts = refused = 0
    for step in range(60):
        source = payload(step, 64).to(device)
        if source_of.random() < 0.6:
            put(source, box.slot(puts), status, ROUTE, limit_us=1000)
            done = put_ref(reference, source.cpu(), puts)
            puts += done
        else:
            index = source_of.randrange(slots)
            consume(box.slot(index), status, ROUTE)
            done = consume_ref(reference, index)
        assert_same(box, reference, f"step {step}")
        if device == "cuda":
            torch.cuda.synchronize()
        assert bool(status[0]) != done
        if not done:
            refused += 1
            status.zero_()
            for one in (box, reference):
                one.arm(LAST_SEQUENCE - 2 if refused % 2 else 7)
            puts = 0
    assert refused > 4


def test_sequence_wraps_to_one(device):
    box, _ = boxes(64, device, sequence=LAST_SEQUENCE - 1)
    status = status_words(device)
    seen = []
    for call in range(4):
        put(payload(call, 64).to(device), box.slot(call), status)
        seen.append(int(box.headers[call % 3, 0]))
        consume(box.slot(call), status)
    assert seen == [LAST_SEQUENCE, 1, 2, 3] and status[0] == 0
    assert all(0 <= word < ABORT for word in seen), "no number is an armed or an abort word"


def test_overrun_is_refused(device):
    """The fourth put finds its slot taken: past the limit it reports and touches nothing."""
    box, reference = boxes(4096, device)
    status = status_words(device)
    for call in range(3):
        put(payload(call, 4096).to(device), box.slot(call), status, ROUTE, config=SMALL)
        put_ref(reference, payload(call, 4096), call)
    put(payload(3, 4096).to(device), box.slot(3), status, ROUTE, config=SMALL, limit_us=SHORT_US)
    assert_same(box, reference, "refused put")
    if device == "cuda":
        torch.cuda.synchronize()
    assert status[:5].tolist() == [ABORT_EXPIRED, ROUTE.producer, 20, 0, ROUTE.consumer]
    # One credit later the same put goes through.
    status.zero_()
    consume(box.slot(0), status, ROUTE)
    consume_ref(reference, 0)
    put(payload(3, 4096).to(device), box.slot(3), status, ROUTE, config=SMALL, limit_us=SHORT_US)
    put_ref(reference, payload(3, 4096), 3)
    assert_same(box, reference, "after the credit")
    assert status[0] == 0


def test_poll_expires_and_its_abort_word_stays(device):
    box, reference = boxes(64, device)
    status = status_words(device)
    poll(box.slot(1), status, ROUTE, limit_us=SHORT_US)
    reference.headers[1, 0] = ABORT + ABORT_EXPIRED
    assert_same(box, reference, "expired poll")
    if device == "cuda":
        torch.cuda.synchronize()
    report = [ABORT_EXPIRED, ROUTE.consumer, 20, 1, ROUTE.producer]
    assert status[:5].tolist() == report
    start = time.monotonic()
    consume(box.slot(1), status, ROUTE)
    poll(box.slot(1), status, ROUTE, limit_us=60_000_000)
    poll(box.slot(2), status, ROUTE, limit_us=60_000_000)  # by the status word
    if device == "cuda":
        torch.cuda.synchronize()
    assert time.monotonic() - start < 5
    reference.headers[2, 0] = ABORT + ABORT_EXPIRED
    assert_same(box, reference, "no credit for an abort word, no re-arming")
    assert status[:5].tolist() == report, "the first report stays"


def test_abort_word_in_a_credit_stops_the_put(device):
    box, reference = boxes(4096, device)
    status = status_words(device)
    for one in (box, reference):
        one.credits[0, 0] = ABORT + 2
    for config in (None, SMALL):
        put(payload(0, 4096).to(device), box.slot(0), status, ROUTE, config=config)
        assert_same(box, reference, "put against an abort word")
    assert status[0] == 0


@pytest.mark.parametrize("word", [ARMED, 4, 6])
def test_header_of_another_put_is_reported(word, device):
    """5 is expected. Armed: consumed without a wait."""
    box, reference = boxes(64, device, sequence=4)
    status = status_words(device)
    for one in (box, reference):
        one.headers[2, 0] = word
        one.credits[2, 0] = ARMED
    consume(box.slot(2), status, ROUTE)
    assert not consume_ref(reference, 2)
    assert_same(box, reference, f"header {word}")
    if device == "cuda":
        torch.cuda.synchronize()
    assert status.tolist() == [ABORT_SEQUENCE, ROUTE.consumer, 20, 2, ROUTE.producer, 0, 5, word]


def test_unnumbered_put_keeps_the_count(device):
    """What a stream write sends: a constant of its graph."""
    box, reference = boxes(64, device, sequence=4)
    status = status_words(device)
    for one in (box, reference):
        one.headers[1, 0] = 0
        one.credits[1, 0] = ARMED
    consume(box.slot(1), status)
    assert consume_ref(reference, 1)
    assert_same(box, reference, "unnumbered")
    assert int(box.headers[-1, 0]) == 4 and int(box.credits[1, 0]) == 0


def test_refused_arguments(device):
    box = Mailbox(64, device, device)
    status = status_words(device)
    for source, text in (
        (torch.zeros(8, dtype=torch.uint8, device=device), "multiple of 16"),
        (torch.zeros(96, dtype=torch.uint8, device=device), "up to the channel's 64"),
        (torch.zeros(4, 32, dtype=torch.uint8, device=device)[:, :16], "contiguous"),
        (torch.zeros(64, dtype=torch.uint8, device=device)[8:24], "aligned"),
    ):
        with pytest.raises(EngineError, match=text):
            put(source, box.slot(0), status)
    for nbytes in (0, 24):
        with pytest.raises(EngineError, match="multiple of 16"):
            Mailbox(nbytes, device, device)
    with pytest.raises(EngineError, match="block"):
        PutConfig(block=64, num_warps=4)
    with pytest.raises(EngineError, match="cannot wait on a stream"):
        Channel(64, "cpu", "cpu", waits="stream")
    with pytest.raises(EngineError, match="choose stream or kernel"):
        Channel(64, "cpu", "cpu", waits="spin")
    assert heuristic(16).programs == 1 and heuristic(1 << 20).programs > 64


# ---- both ends as processes over shared memory (interpreter)


def shared_channel(nbytes: int, device: str, sequence: int = LAST_SEQUENCE - 5) -> Channel:
    if device != "cpu":
        pytest.skip("ends are processes only in the interpreter; tests/gpu has two streams")
    channel = Channel(nbytes, "cpu", "cpu", limit_us=LONG_US, route=ROUTE)
    channel.box.arm(sequence)
    for tensor in (channel.box.payload, *channel.words(), channel.status):
        tensor.share_memory_()
    return channel


@pytest.mark.parametrize(("replay", "calls"), [(3, 240), (1, 80), (4, 80)])
def test_processes(replay, calls, device):
    """A graph of `replay` hand-offs, replayed; random delays; the sequence wraps early on."""
    channel = shared_channel(96, device)
    ahead = torch.zeros(1, dtype=torch.int32).share_memory_()

    def body(rank: int) -> None:
        for call in range(calls):
            if call % replay == 0:
                channel.rewind()
            random_delay(0.2)
            if rank == 0:
                channel.put(payload(call, 96))
                sent = int(channel.box.credits[-1, 0])
                ahead[0] = max(int(ahead[0]), sent - int(channel.box.headers[-1, 0]))
            else:
                found = channel.wait()
                random_delay(0.2)  # the producer may not overwrite it meanwhile
                assert torch.equal(found, payload(call, 96)), f"call {call}"
                channel.consumed()
            channel.check()

    run_ranks(2, body)
    produced, consumed = int(channel.box.credits[-1, 0]), int(channel.box.headers[-1, 0])
    assert produced == consumed == calls - 5, "counted through the wrap"
    assert 1 <= int(ahead[0]) <= min(replay, 3)


def test_processes_both_ways(device):
    """Ping-pong: the payload comes back one larger."""
    there, back = shared_channel(64, device), shared_channel(64, device)

    def body(rank: int) -> None:
        mine, other = (there, back) if rank == 0 else (back, there)
        for call in range(60):
            random_delay()
            if rank == 0:
                mine.put(torch.full((16,), call, dtype=torch.int32))
            value = other.wait().view(torch.int32).clone()
            other.consumed()
            assert bool((value == call + (rank == 0)).all())
            if rank == 1:
                mine.put(value + 1)

    run_ranks(2, body)


def test_dead_producer_is_named_and_the_channel_recovers(device):
    channel = shared_channel(64, device, sequence=0)
    channel.limit_us = SHORT_US
    channel.wait()
    channel.consumed()
    with pytest.raises(DeviceError, match="end 7 waited in vain for end 4"):
        channel.check()
    source = payload(1, 64)
    channel.put(source)
    assert torch.equal(channel.wait(), source)
    channel.consumed()
    channel.check()
    channel.consumed()
    with pytest.raises(DeviceError, match="expected put 2 and found none"):
        channel.check()
