"""Channel and watchdog against simulated streams: order of the stream operations, replays, ends
that die. The real waits are in tests/gpu/test_put_signal.py."""

from __future__ import annotations

import functools
import random
import threading
import time

import pytest
import torch

from engine.errors import DeviceError, EngineError
from engine.kernels.put_signal import ABORT, ARMED, Route
from engine.kernels.sync import ABORT_INTERRUPTED, INTERPRET
from engine.runtime import signal_watchdog
from engine.runtime.signal_watchdog import Stall, Watchdog, missing_end
from engine.runtime.stream_ops import StreamWaits
from engine.runtime.stream_signal import Channel
from tests.unit.stream_simulator import Ends

pytestmark = pytest.mark.skipif(
    not INTERPRET.value, reason="simulated streams run the kernels in the interpreter"
)

NBYTES = 64
ROUTE = Route(producer=2, consumer=5, channel=9)


@pytest.fixture
def ends(monkeypatch):
    return Ends(monkeypatch, NBYTES, route=ROUTE, limit_us=50_000)


@functools.cache  # queued puts read it later
def payload(call: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(call)
    return torch.randint(256, (NBYTES,), dtype=torch.uint8, generator=generator)


def receive(ends: Ends, found: list[torch.Tensor], count: int = 1) -> None:
    """Wait, read the payload, consumed: as one consumer's kernels would; `count` hand-offs in turn."""
    channel = ends.on(ends.sink)
    for _ in range(count):
        slot = channel.next()

        def read(slot: torch.Tensor = slot) -> bool:
            found.append(slot.clone())
            return True

        ends.sink.add(read)
    channel.consumed()


@pytest.mark.parametrize("returns", ["kernel", "stream"])
@pytest.mark.parametrize("engine", ["kernel", "copy"])
@pytest.mark.parametrize("replay", [1, 3, 4])
def test_replays_of_two_graphs(ends, engine, replay, returns):
    """Constants of the graphs only, and no reset between replays; the consumer is always early."""
    ends.channel.returns = returns
    source = torch.zeros(replay, NBYTES, dtype=torch.uint8)
    found: list[torch.Tensor] = []

    def puts() -> None:
        for i in range(replay):
            ends.on(ends.source).put(source[i], engine=engine)

    producer = ends.source.capture(puts, ends.channel)
    consumer = ends.sink.capture(lambda: receive(ends, found, replay), ends.channel)
    sent = []
    for step in range(6):
        ends.sink.replay(consumer)
        assert not ends.sink.query(), "it must wait: nothing was put in this replay"
        for i in range(replay):
            source[i] = payload(100 * step + i)
            sent.append(source[i].clone())
        ends.source.replay(producer)
        ends.drain()
        assert len(found) == len(sent) and all(map(torch.equal, found, sent))
    ends.channel.check()


def test_copy_put_in_order(ends):
    """Credit waited for and taken, payload, then the header: one release, a stream write's."""
    channel = ends.on(ends.source)
    channel.put(payload(1), engine="copy")
    assert len(ends.source.queue) == 4  # and no kernel
    box = channel.box

    def state() -> tuple:
        sent = torch.equal(box.payload[0], payload(1))
        return int(box.credits[0, 0]), sent, int(box.headers[0, 0])

    steps = [state()]
    while ends.source.queue:
        assert ends.source.queue.pop(0)()
        steps.append(state())
    assert steps == [
        (0, False, ARMED), (0, False, ARMED), (ARMED, False, ARMED), (ARMED, True, ARMED),
        (ARMED, True, 0),
    ]  # fmt: skip


def test_next_in_order(ends):
    """The header is armed, the credit goes back, then the next is waited for; and no kernel."""
    ends.channel.returns = "stream"
    for call in range(2):
        ends.on(ends.source).put(payload(call))
    assert ends.source.query()
    box = ends.channel.box
    channel = ends.on(ends.sink)
    channel.wait()
    assert torch.equal(channel.next(), payload(1))
    channel.consumed()

    def state() -> list[int]:
        return [*box.headers[:2, 0].tolist(), *box.credits[:2, 0].tolist()]

    steps = [state()]
    while ends.sink.queue:
        assert ends.sink.queue.pop(0)()
        steps.append(state())
    first, second = [ARMED, 2, ARMED, ARMED], [ARMED, 2, 0, ARMED]
    assert steps == [
        [1, 2, ARMED, ARMED], [1, 2, ARMED, ARMED], first, second, second,
        [ARMED, ARMED, 0, ARMED], [ARMED, ARMED, 0, 0],
    ]  # fmt: skip
    with pytest.raises(EngineError, match="returns 'host'"):
        Channel(NBYTES, "cpu", "cpu", returns="host")


def test_fourth_put_waits_for_the_first_credit(ends):
    for call in range(4):
        ends.on(ends.source).put(payload(call))
    assert not ends.source.query() and int(ends.channel.box.credits[-1, 0]) == 3
    found: list[torch.Tensor] = []
    receive(ends, found)
    assert ends.sink.query() and ends.source.query()
    assert int(ends.channel.box.credits[-1, 0]) == 4
    assert torch.equal(found[0], payload(0)) and torch.equal(
        ends.channel.box.payload[0], payload(3)
    )


def test_random_interleavings(ends):
    """Both kinds of put, either end ahead."""
    rng = random.Random(3)
    found: list[torch.Tensor] = []
    puts = takes = 0
    while takes < 60:
        if rng.random() < 0.5 and puts < 60 and puts - takes < 3:
            ends.on(ends.source).put(payload(puts), engine=rng.choice(["kernel", "copy"]))
            puts += 1
        elif takes - puts < 2:
            receive(ends, found)
            takes += 1
        if rng.random() < 0.5:
            ends.source.query()
        else:
            ends.sink.query()
    ends.drain()
    assert all(torch.equal(f, payload(i)) for i, f in enumerate(found)) and len(found) == 60


# ---- a dead end


@pytest.mark.parametrize("returns", ["kernel", "stream"])
def test_dead_producer_is_found_and_the_channel_works_again(ends, returns):
    ends.channel.returns = returns
    found: list[torch.Tensor] = []
    with Watchdog([ends.channel], [ends.source, ends.sink], limit_s=0.3) as dog:
        ends.on(ends.source).put(payload(0))
        for _ in range(5):  # four of them in vain, one behind the other
            receive(ends, found)
        start = time.monotonic()
        dog.watch()
        counted = ", 1 consumed" if returns == "kernel" else ""
        with pytest.raises(
            DeviceError,
            match=rf"end 5 waited in vain for end 2 \(channel 9, 1 puts sent{counted}\)",
        ):
            dog.wait()
        assert 0.2 < time.monotonic() - start < 3
        assert torch.equal(found[0], payload(0)) and len(found) == 5
        for call in range(4):
            ends.on(ends.source).put(payload(call))
            receive(ends, found)
        dog.watch()
        dog.wait()
    assert all(torch.equal(found[5 + i], payload(i)) for i in range(4))


@pytest.mark.parametrize("engine", ["kernel", "copy"])
def test_dead_consumer_is_found(ends, engine):
    with Watchdog([ends.channel], [ends.source, ends.sink], limit_s=0.3) as dog:
        for call in range(8):
            ends.on(ends.source).put(payload(call), engine=engine)
        dog.watch()
        with pytest.raises(DeviceError, match="end 2 waited in vain for end 5"):
            dog.wait()
        assert not ends.source.queue and bool((ends.channel.box.credits[:-1, 0] == 0).all())


def test_slow_is_not_dead(ends):
    """Each hand-off comes within the limit, all together far beyond it."""
    found: list[torch.Tensor] = []

    def produce() -> None:
        for call in range(6):
            time.sleep(0.15)
            ends.source.queue.clear()
            ends.on(ends.source).put(payload(call))
            ends.source.query()

    with Watchdog([ends.channel], [ends.source, ends.sink], limit_s=0.4) as dog:
        for _ in range(6):
            receive(ends, found)
        thread = threading.Thread(target=produce)
        dog.watch()
        thread.start()
        dog.wait()
        thread.join()
    assert len(found) == 6 and ends.channel.status[0] == 0


def test_interrupt_ends_the_waits(ends):
    start = time.monotonic()
    with (
        pytest.raises(KeyboardInterrupt),
        Watchdog([ends.channel], [ends.sink], limit_s=60.0) as dog,
    ):
        receive(ends, [])
        dog.watch()
        raise KeyboardInterrupt
    assert time.monotonic() - start < 2
    assert ends.channel.status[0] == ABORT_INTERRUPTED
    assert bool((ends.channel.box.headers[:-1, 0] == ABORT + ABORT_INTERRUPTED).all())
    with pytest.raises(DeviceError, match="interrupted"):
        ends.channel.check()


def test_a_blocked_writer_is_not_filled(ends, monkeypatch):
    """One sweep of abort words waits there, not one each millisecond: a full queue blocks the call."""
    monkeypatch.setattr(signal_watchdog, "DRAIN_S", 0.3)
    with Watchdog([ends.channel], [ends.sink], limit_s=0.1) as dog:
        (writer,) = dog._writers.values()
        writer.add(lambda: False)
        receive(ends, [])
        dog.watch()
        with pytest.raises(DeviceError, match="cannot be ended"):
            dog.wait()
    assert len(writer.queue) == 1, "nothing behind what is blocked"


def test_interrupt_with_nothing_to_end_is_forgotten(ends):
    found: list[torch.Tensor] = []
    with Watchdog([ends.channel], [ends.sink]) as dog:
        dog.abort()
        ends.on(ends.source).put(payload(0))
        ends.source.query()
        receive(ends, found)
        dog.watch()
        dog.wait()
    assert len(found) == 1


def test_stall_is_a_matter_of_change():
    stall = Stall(2.0)
    assert not stall.expired(0.0, (1, [0])) and not stall.expired(1.9, (1, [0]))
    assert not stall.expired(2.5, (1, [1])), "a word changed: the clock starts anew"
    assert not stall.expired(4.4, (1, [1])) and stall.expired(4.6, (1, [1]))


def test_missing_end():
    assert missing_end([ARMED, ARMED, ARMED], [0, 0, 0]) == "producer"
    assert missing_end([4, ARMED, ARMED], [ARMED, 2, 3]) == "producer"
    assert missing_end([4, 5, 6], [ARMED, ARMED, ARMED]) == "consumer"


def test_capabilities_as_text():
    assert "cuda" in str(StreamWaits())
    text = str(StreamWaits(memops=True, wide=True, nor=True, flush=False))
    assert text == "memops v2 yes, 64-bit yes, NOR yes, flush no"


def test_cpu_ends_wait_in_kernels():
    channel = Channel(NBYTES, "cpu", "cpu")
    assert (channel.waits, channel.credit) == ("kernel", "kernel")
    with pytest.raises(EngineError, match="put engine"):
        channel.put(payload(0), engine="dma")
