"""Hand-offs on the card: real stream waits in captured graphs, dead ends, and all forms of a put.

One card: two streams are the two ends. Two cards (multigpu): one stream each.
"""

from __future__ import annotations

import os
import time

import pytest
import torch

from engine.errors import DeviceError
from engine.kernels.put_signal import ARMED, LAST_SEQUENCE, Route
from engine.runtime import stream_ops
from engine.runtime.signal_watchdog import Watchdog
from engine.runtime.stream_ops import (
    finishes,
    independent,
    independent_streams,
    probe_stream_waits,
    stream_wait,
    stream_write,
)
from engine.runtime.stream_signal import Channel, capture

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

# How the consumer waits, how the producer waits for its credit, how a slot is returned, what moves the payload.
FORMS = [("stream", "kernel", "kernel", "kernel"), ("stream", "stream", "kernel", "kernel"),
         ("stream", "kernel", "stream", "kernel"), ("kernel", "kernel", "kernel", "kernel"),
         ("stream", "kernel", "kernel", "copy"), ("stream", "kernel", "stream", "copy")]  # fmt: skip
ROUTE = Route(producer=2, consumer=5, channel=9)
REPLAY = 3


class Ends:
    """A channel between two streams, warmed; captured graphs of REPLAY hand-offs at each end.

    Payloads are those of a pool, chosen by a step counter on each device, so that each replay
    sends others; the consumer's graph keeps a copy of all that it read.
    """

    def __init__(self, devices, nbytes, form=FORMS[0], **options) -> None:
        waits, credit, returns, self.engine = form
        a, b = devices
        self.streams = independent_streams(a, b)
        how = dict(waits=waits, credit=credit, returns=returns)
        self.channel = Channel(nbytes, a, b, **how, route=ROUTE, limit_us=500_000, **options)
        self.source = torch.zeros(REPLAY, nbytes, dtype=torch.uint8, device=a)
        self.found = torch.full((REPLAY, nbytes), 0xA5, dtype=torch.uint8, device=b)
        self.channel.warm(self.source[0])
        with torch.cuda.stream(self.streams[1]):  # load the copy kernel
            self.found[0].copy_(self.channel.box.payload[0])
        self.channel.synchronize()

    def put_all(self) -> None:
        for i in range(REPLAY):
            self.channel.put(self.source[i], engine=self.engine)

    def take_all(self) -> None:
        for i in range(REPLAY):
            self.found[i].copy_(self.channel.next())
        self.channel.consumed()

    def capture(self) -> None:
        self.graphs = [
            capture(stream, body, self.channel)
            for stream, body in zip(self.streams, (self.put_all, self.take_all))
        ]

    def replay(self, end: int) -> None:
        with torch.cuda.device(self.streams[end].device), torch.cuda.stream(self.streams[end]):
            self.graphs[end].replay()

    def dog(self, limit_s: float = 1.0) -> Watchdog:
        return Watchdog([self.channel], self.streams, limit_s)


def same() -> list[torch.device]:
    return [torch.device("cuda", 0)] * 2


@pytest.fixture
def two_cards() -> list[torch.device]:
    if torch.cuda.device_count() < 2:
        pytest.skip("one device")
    return [torch.device("cuda", 0), torch.device("cuda", 1)]


def random_bytes(*shape: int, device: torch.device) -> torch.Tensor:
    return torch.randint(256, shape, dtype=torch.uint8, device=device)


# ---- what the device can do


def test_probe():
    found = probe_stream_waits(0)
    print(found)
    assert found.memops, "a driver of CUDA 12 and later has 32-bit stream memory operations"
    assert None not in (found.wide, found.nor, found.flush)


@pytest.mark.parametrize("mode", ["geq", "nor"])
def test_one_comparison_for_every_value(mode):
    """Armed holds the stream; each number, the unnumbered word and the abort word let it go."""
    if mode == "nor" and not probe_stream_waits(0).nor:
        pytest.skip("this device has no NOR wait")
    value, flags = {"geq": (0, stream_ops.GEQ), "nor": (0x7FFFFFFF, stream_ops.NOR)}[mode]
    stream = torch.cuda.Stream()
    word = torch.zeros(1, dtype=torch.int32).pin_memory()
    for ready in (0, 1, 12345, LAST_SEQUENCE, 2**30, 2**30 + 3, 2**31 - 1):
        word.fill_(ARMED)
        stream_wait(stream, word.data_ptr(), value, flags)
        try:
            assert not finishes(stream, 0.02), "an armed word must hold the stream"
        finally:
            word.fill_(ready)
        assert finishes(stream, 2.0), f"{ready} must release it"


def test_wait_is_captured_and_replayed_with_the_same_constant():
    """The word is re-armed by a stream write of the graph itself; three replays wait three times."""
    stream, other = independent_streams("cuda", "cuda")
    word = torch.full((1,), ARMED, dtype=torch.int32, device="cuda")
    count = torch.zeros(1, dtype=torch.int32, device="cuda")
    count.add_(0)
    torch.cuda.synchronize()

    def body() -> None:
        stream_wait(stream, word.data_ptr())
        count.add_(1)
        stream_write(stream, word.data_ptr(), ARMED)

    graph = capture(stream, body)
    for step in range(3):
        with torch.cuda.stream(stream):
            graph.replay()
        held = not finishes(stream, 0.05)
        stream_write(other, word.data_ptr(), 7 + step)
        assert finishes(stream, 2.0) and held, f"replay {step}"
    assert int(count) == 3 and int(word) == ARMED


def most_held(work: torch.cuda.Stream, tries: int = 16) -> list[torch.cuda.Stream]:
    """New streams that can all be held at once while `work` runs: the hardware queues bound them."""
    held: list[torch.cuda.Stream] = []
    for _ in range(tries):
        stream = torch.cuda.Stream()
        if stream != work and independent([*held, stream], work):
            held.append(stream)
    return held


def test_no_multiprocessor_is_spent():
    """Programs that fill the device take no longer while as many streams are held as it allows."""
    work = torch.cuda.Stream()
    x = torch.ones(1 << 26, device="cuda")
    x.mul_(1.0)
    word = torch.full((1,), ARMED, dtype=torch.int32).pin_memory()
    torch.cuda.synchronize()
    held = most_held(work)
    print(f"{len(held)} streams held")
    assert len(held) >= 2, "a consumer's wait, and its producer's for a credit"
    times = []
    try:
        for waiting in ([], held):
            for stream in waiting:
                stream_wait(stream, word.data_ptr())
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            with torch.cuda.stream(work):
                start.record()
                for _ in range(200):
                    x.mul_(1.0)
                end.record()
            assert finishes(work, 10.0), f"blocked by {len(waiting)} held streams"
            times.append(start.elapsed_time(end))
        assert not any(stream.query() for stream in held)
    finally:
        word.zero_()
    assert all(finishes(stream, 2.0) for stream in held)
    assert times[1] < 1.1 * times[0], f"{times} ms"


@pytest.mark.parametrize("count", [1, 3])
def test_a_set_that_passed_the_trial_does_not_block(count):
    work, *held = (torch.cuda.Stream() for _ in range(count + 1))
    x = torch.ones(1 << 20, device="cuda")
    x.mul_(1.0)
    word = torch.full((1,), ARMED, dtype=torch.int32).pin_memory()
    torch.cuda.synchronize()
    assert independent(held, work)
    try:
        for stream in held:
            stream_wait(stream, word.data_ptr())
        with torch.cuda.stream(work):
            x.mul_(1.0)
        assert finishes(work, 1.0) and not any(stream.query() for stream in held)
    finally:
        word.zero_()
    assert all(finishes(stream, 2.0) for stream in held)


def test_the_trial_finds_that_all_queues_are_held():
    """30 waits on the 8 hardware queues that a process gets by default."""
    if "CUDA_DEVICE_MAX_CONNECTIONS" in os.environ:
        pytest.skip("the number of queues was set")
    work, *held = (torch.cuda.Stream() for _ in range(31))
    assert not independent(held, work)


# ---- hand-offs in graphs


def check_replays(devices, nbytes, form, replays=40) -> None:
    ends = Ends(devices, nbytes, form)
    ends.capture()
    ends.channel.box.arm(LAST_SEQUENCE - 7)  # the sequence wraps on the way
    ends.channel.synchronize()
    with ends.dog() as dog:
        for step in range(replays):
            ends.found.fill_(0xA5)
            ends.source.copy_(random_bytes(*ends.source.shape, device=ends.source.device))
            wanted = ends.source.cpu()
            ends.channel.synchronize()
            order = (1, 0) if step % 2 else (0, 1)
            for end in order:
                ends.replay(end)
                if step % 5 == 0:
                    time.sleep(2e-3)  # the other end is late
            dog.watch()
            dog.wait()
            assert torch.equal(ends.found.cpu(), wanted), f"replay {step}"
    assert ends.channel.status[0] == 0


@pytest.mark.parametrize("form", FORMS, ids="-".join)
@pytest.mark.parametrize("nbytes", [16, 16384, 1 << 20, (4 << 20) + 48])
def test_replays(form, nbytes):
    check_replays(same(), nbytes, form, 40 if nbytes < 1 << 20 else 12)


@pytest.mark.multigpu
@pytest.mark.parametrize("form", FORMS, ids="-".join)
@pytest.mark.parametrize("nbytes", [16, 16384, (4 << 20) + 48])
def test_replays_between_cards(form, nbytes, two_cards):
    check_replays(two_cards, nbytes, form)


def many_replays(devices, form, replays=2000) -> None:
    """Queued far ahead without a look from the host: every payload is checked on the device."""
    a, b = devices
    ends = Ends(devices, 4096, form)
    step, wrong = (torch.zeros(1, dtype=torch.int64, device=d) for d in (a, b))
    taken = torch.zeros(1, dtype=torch.int64, device=b)

    def puts() -> None:
        for i in range(REPLAY):
            ends.source[i].view(torch.int64).copy_((step + i).expand(512))
            ends.channel.put(ends.source[i], engine=ends.engine)
        step.add_(REPLAY)

    def takes() -> None:
        for i in range(REPLAY):
            found = ends.channel.next().view(torch.int64)
            wrong.add_((found != taken + i).sum())
        ends.channel.consumed()
        taken.add_(REPLAY)

    for stream, body in zip(ends.streams, (puts, takes)):
        with torch.cuda.stream(stream):  # loads the kernels, in lockstep
            body()
    ends.channel.synchronize()
    ends.channel.arm()
    graphs = [capture(s, body, ends.channel) for s, body in zip(ends.streams, (puts, takes))]
    for tensor in (step, taken, wrong):
        tensor.zero_()
    ends.channel.synchronize()
    with ends.dog(5.0) as dog:
        for i in range(replays):
            for end in (0, 1) if i % 2 else (1, 0):
                with torch.cuda.device(devices[end]), torch.cuda.stream(ends.streams[end]):
                    graphs[end].replay()
        dog.watch()
        dog.wait()
    assert int(wrong) == 0 and int(taken) == int(step) == REPLAY * replays
    counted = form[2:] == ("kernel", "kernel")  # a put and a return that a kernel does
    assert int(ends.channel.box.headers[-1, 0]) == (REPLAY * replays if counted else 0)


@pytest.mark.parametrize("form", FORMS, ids="-".join)
def test_many_replays_queued_ahead(form):
    many_replays(same(), form)


@pytest.mark.multigpu
@pytest.mark.parametrize("form", FORMS, ids="-".join)
def test_many_replays_between_cards(form, two_cards):
    many_replays(two_cards, form)


@pytest.mark.parametrize("form", FORMS, ids="-".join)
def test_both_ends_on_one_stream(form):
    """Virtual ends in lockstep: nothing waits for what is behind it."""
    ends = Ends(same(), 4096, form)
    ends.streams = (ends.streams[0],) * 2
    ends.source.copy_(random_bytes(REPLAY, 4096, device=ends.source.device))
    ends.channel.synchronize()

    def body() -> None:
        for i in range(REPLAY):
            ends.channel.put(ends.source[i], engine=ends.engine)
            ends.found[i].copy_(ends.channel.wait())
            ends.channel.consumed()

    graph = capture(ends.streams[0], body, ends.channel)
    for _ in range(3):
        ends.found.fill_(0xA5)
        torch.cuda.synchronize()
        with torch.cuda.stream(ends.streams[0]):
            graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(ends.found, ends.source)
    ends.channel.check()


# ---- a dead end


def check_dead_end(devices, dead: int, form) -> None:
    ends = Ends(devices, 16384, form)
    ends.capture()
    ends.source.copy_(random_bytes(*ends.source.shape, device=ends.source.device))
    ends.channel.synchronize()
    waiter, missing = (ROUTE.consumer, ROUTE.producer)[:: 1 if dead == 0 else -1]
    with ends.dog(0.5) as dog:
        for _ in range(4):  # 12 hand-offs, one behind the other, without the other end
            ends.replay(1 - dead)
        start = time.monotonic()
        dog.watch()
        with pytest.raises(DeviceError, match=f"end {waiter} waited in vain for end {missing}"):
            dog.wait()
        assert time.monotonic() - start < 5
        for _ in range(2):
            ends.replay(0)
            ends.replay(1)
            dog.watch()
            dog.wait()
            assert torch.equal(ends.found.cpu(), ends.source.cpu())


@pytest.mark.parametrize("form", FORMS, ids="-".join)
@pytest.mark.parametrize("dead", [0, 1], ids=["producer", "consumer"])
def test_dead_end(dead, form):
    check_dead_end(same(), dead, form)


@pytest.mark.multigpu
@pytest.mark.parametrize("dead", [0, 1], ids=["producer", "consumer"])
def test_dead_end_between_cards(dead, two_cards):
    check_dead_end(two_cards, dead, FORMS[0])


def test_interrupt_while_waiting():
    ends = Ends(same(), 4096)
    ends.capture()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt), ends.dog(60.0) as dog:
        ends.replay(1)
        dog.watch()
        time.sleep(0.2)
        raise KeyboardInterrupt
    assert time.monotonic() - start < 5
    with pytest.raises(DeviceError, match="interrupted"):
        ends.channel.check()
    torch.cuda.synchronize()


def test_fourth_put_waits_then_is_refused():
    """Without a consumer three puts go through; the fourth expires and touches nothing."""
    ends = Ends(same(), 4096)
    sources = random_bytes(4, 4096, device=ends.source.device)
    torch.cuda.synchronize()
    with torch.cuda.stream(ends.streams[0]):
        for i in range(4):
            ends.channel.put(sources[i])
    torch.cuda.synchronize()
    assert ends.channel.status[:2].tolist() == [1, ROUTE.producer]
    assert torch.equal(ends.channel.box.payload.cpu(), sources[:3].cpu())
    with pytest.raises(DeviceError, match="end 2 waited in vain for end 5"):
        ends.channel.check()
