"""Hand-offs on the card: latency and bandwidth by size, captured in graphs. `python -m bench.put_signal`.

Two GPUs: from one to the other, against NCCL send/recv. One GPU: loopback between two streams of
it, and the rows say so; that shows what waiting and signalling cost, not a link.

latency    ping-pong: put, wait for the answer and end the one before; half a round trip, us
bandwidth  puts back to back against waits that end the one before; us a hand-off, GB/s
floor      one copy of the size in the same kind of graph

Forms: stream (stream wait and return, put kernel: no kernel on the consumer), stream_credit (the producer's credit by a
stream wait too), stream_checked (returned by a kernel that checks the put's number), copy_engine (no kernel on either end),
poll and poll_pdl (in-kernel wait and return). A watchdog bounds every
stream wait, so nothing hangs. Rows go to $OUT/put_signal.json (bench/rows.py). Exit 1 if a check
failed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from bench.deployment import choices, script
from bench.rows import Rows
from engine.console import Parser
from engine.errors import DeviceError
from engine.kernels.put_signal import ARMED
from engine.runtime.links import describe, probe_links
from engine.runtime.signal_watchdog import Watchdog
from engine.runtime.stream_ops import (
    independent_streams,
    probe_stream_waits,
    stream_copy,
    stream_wait,
)
from engine.runtime.stream_signal import Channel, capture

SIZES = (16, 1 << 10, 1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26)
LINK_BYTES_PER_S = 478e9  # NVLink 4, 18 lanes, each way, as the driver says
# name: how the consumer waits, how the producer waits for its credit, how a slot is returned, what moves the payload, PDL
FORMS = {
    "stream": ("stream", "kernel", "stream", "kernel", False),
    "stream_credit": ("stream", "stream", "stream", "kernel", False),
    "stream_checked": ("stream", "kernel", "kernel", "kernel", False),
    "copy_engine": ("stream", "kernel", "stream", "copy", False),
    "poll": ("kernel", "kernel", "kernel", "kernel", False),
    "poll_pdl": ("kernel", "kernel", "kernel", "kernel", True),
}
STALL_S = 3.0


def calls_of(nbytes: int) -> int:
    """Hand-offs each way in a graph; the slots divide them."""
    return 60 if nbytes <= 1 << 16 else 30 if nbytes <= 1 << 20 else 6


class Pair:
    """Two ends with a channel each way, for one form and size."""

    def __init__(self, devices: Sequence[torch.device], form: str, nbytes: int) -> None:
        waits, credit, returns, self.engine, self.pdl = FORMS[form]
        self.gated = all(probe_stream_waits(device.index).memops for device in devices)
        self.streams = independent_streams(*devices)
        ends = (devices, devices[::-1])
        how: dict[str, Any] = dict(waits=waits, credit=credit, returns=returns)
        self.channels = [Channel(nbytes, a, b, **how) for a, b in ends]
        self.sources = [
            torch.randint(256, (nbytes,), dtype=torch.uint8, device=device) for device in devices
        ]
        for channel, source in zip(self.channels, self.sources):
            channel.warm(source, pdl=self.pdl)
            channel.box.payload.fill_(0xA5)
            channel.synchronize()

    def put(self, end: int) -> None:
        self.channels[end].put(self.sources[end], engine=self.engine, pdl=self.pdl)

    def take(self, end: int) -> None:
        """At `end`: the next hand-off, which ends the one before it."""
        self.channels[1 - end].next(pdl=self.pdl)

    def ping_pong(self, end: int, calls: int) -> None:
        for _ in range(calls):
            if end == 0:
                self.put(0)
            self.take(end)
            if end == 1:
                self.put(1)
        self.channels[1 - end].consumed(pdl=self.pdl)

    def one_way(self, end: int, calls: int) -> None:
        for _ in range(calls):
            self.put(0) if end == 0 else self.take(1)
        if end == 1:
            self.channels[0].consumed(pdl=self.pdl)

    def capture(self, body: Callable[[int, int], None], calls: int) -> list[torch.cuda.CUDAGraph]:
        return [
            capture(stream, partial(body, end, calls), *self.channels)
            for end, stream in enumerate(self.streams)
        ]

    def timed(self, body: Callable[[int, int], None], calls: int, repeats: int = 9) -> list[float]:
        """us of each replay of both graphs, by events at end 0 (ping-pong) or end 1 (one way)."""
        graphs = self.capture(body, calls)
        clock = 1 if body == self.one_way else 0
        # Both streams start together, however long the host takes to queue the second one.
        gate = torch.empty(1, dtype=torch.int32).pin_memory()
        times = []
        with Watchdog(self.channels, self.streams, STALL_S) as dog:
            for _ in range(repeats + 2):
                events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
                gate.fill_(ARMED)
                for end, stream in enumerate(self.streams):
                    with torch.cuda.device(stream.device), torch.cuda.stream(stream):
                        if self.gated:
                            stream_wait(stream, gate.data_ptr())
                        if end == clock:
                            events[0].record(stream)
                        graphs[end].replay()
                        if end == clock:
                            events[1].record(stream)
                gate.zero_()
                dog.watch()
                dog.wait()
                times.append(events[0].elapsed_time(events[1]) * 1e3)
        return times[2:]

    def wrong(self, ways: int) -> int:
        """Bytes in the slots that are not the source's."""
        found = 0
        for channel, source in list(zip(self.channels, self.sources))[:ways]:
            wanted = source.to(channel.consumer)
            found += sum(int((slot != wanted).sum()) for slot in channel.box.payload)
        return found


class Bench:
    def __init__(self, time_limit: float) -> None:
        self.deadline = time.monotonic() + time_limit
        count = torch.cuda.device_count()
        self.devices = [torch.device("cuda", min(i, count - 1)) for i in range(2)]
        self.loopback = count < 2
        self.rows = Rows("put_signal")
        self.failures = 0
        self.nccl: dict[tuple[str, int], float] = {}

    def late(self, what: str) -> bool:
        if time.monotonic() < self.deadline:
            return False
        print(f"{what}: skipped, the time limit is spent", flush=True)
        return True

    def add(self, metric: str, us: float, nbytes: int, form: str) -> None:
        name = form + ("_loopback" if self.loopback else "")
        rate = nbytes / (us * 1e-6)
        linked = metric == "put_signal_bandwidth_us" and not self.loopback and nbytes >= 1 << 20
        other = self.nccl.get((metric, nbytes))
        baseline = {"name": "nccl", "value": other} if other and form != "nccl" else None
        facts = dict(tp=2, bytes=nbytes, algorithm=name, baseline=baseline)
        self.rows.add(metric, us, "us", share=rate / LINK_BYTES_PER_S if linked else None, **facts)

    def measure(self, form: str, nbytes: int) -> tuple[float, float]:
        """us of half a round trip, us of a hand-off back to back; nan after a failed check."""
        calls = calls_of(nbytes)
        try:
            pair = Pair(self.devices, form, nbytes)
            trips = pair.timed(pair.ping_pong, calls)
            wrong = pair.wrong(2)
            hand_offs = pair.timed(pair.one_way, calls)
            wrong += pair.wrong(1)
        except DeviceError as error:
            return self.fail(f"{form} {nbytes} B: {error}")
        if wrong:
            return self.fail(f"{form} {nbytes} B: {wrong} wrong bytes")
        latency = statistics.median(trips) / (2 * calls)
        through = statistics.median(hand_offs) / calls
        self.add("put_signal_latency_us", latency, nbytes, form)
        self.add("put_signal_bandwidth_us", through, nbytes, form)
        return latency, through

    def fail(self, text: str) -> tuple[float, float]:
        print("FAIL  " + text, flush=True)
        self.failures += 1
        return float("nan"), float("nan")

    def floor(self, nbytes: int) -> float:
        """us of one copy between the same memories, in a graph of them."""
        stream = torch.cuda.Stream(self.devices[0])
        source = torch.empty(nbytes, dtype=torch.uint8, device=self.devices[0])
        target = torch.empty(nbytes, dtype=torch.uint8, device=self.devices[1])
        calls = calls_of(nbytes)

        def body() -> None:
            for _ in range(calls):
                stream_copy(stream, target.data_ptr(), source.data_ptr(), nbytes)

        graph = capture(stream, body)
        times = []
        for _ in range(7):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            with torch.cuda.device(stream.device), torch.cuda.stream(stream):
                start.record(stream)
                graph.replay()
                end.record(stream)
            torch.cuda.synchronize(stream.device)
            times.append(start.elapsed_time(end) * 1e3 / calls)
        us = statistics.median(times)
        self.add("put_signal_bandwidth_us", us, nbytes, "copy_floor")
        return us

    def baselines(self, seconds: float) -> None:
        """NCCL send/recv, one process a GPU."""
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "bench.put_signal_baselines", folder]
            child = subprocess.Popen(
                command + [str(size) for size in SIZES],
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
            )  # fmt: skip
            try:
                output, errors = child.communicate(timeout=seconds)
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGKILL)
                output, errors = child.communicate()
                print(f"baselines: cut off after {seconds:.0f} s", flush=True)
        for line in output.splitlines():
            if line.startswith("{"):
                row = json.loads(line)
                self.nccl[row["metric"], row["bytes"]] = row["us"]
                self.add(row["metric"], row["us"], row["bytes"], "nccl")
        if not self.nccl:
            print("baselines: nothing measured: " + errors.strip()[-600:], flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: see bench.deployment; 1 if a check failed."""
    parser = Parser(prog="python -m bench.put_signal", description=__doc__)
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds (default 60)")
    parser.add_argument(
        "--forms", type=choices(*FORMS), default=",".join(FORMS), help="comma-separated"
    )
    return script(parser, measure_all, argv)


def measure_all(options: argparse.Namespace) -> int:
    """Every form at every size; the exit code."""
    forms = options.forms
    bench = Bench(options.time_limit)
    print(describe(probe_links()))
    waits = probe_stream_waits(bench.devices[0].index)
    print(f"stream waits: {waits}")
    if not waits.memops:
        forms = [form for form in forms if FORMS[form][0] == "kernel"]
    if bench.loopback:
        print("one GPU: loopback between two of its streams; there is no link and no NCCL in this")
    elif not bench.late("baselines"):
        bench.baselines(options.time_limit / 2)
    print("us: half a round trip / a hand-off back to back (60 in a graph, fewer when large)")
    names = [*forms, *(["nccl"] if bench.nccl else [])]
    print("bytes".rjust(9) + "copy".rjust(9) + "".join(name.rjust(19) for name in names))
    for nbytes in SIZES:
        if bench.late(f"from {nbytes} B"):
            break
        cells = [f"{bench.floor(nbytes):9.2f}"]
        for form in forms:
            if bench.late(f"{form} {nbytes} B"):
                break
            latency, through = bench.measure(form, nbytes)
            cells.append(f"{latency:.2f} /{through:8.2f}".rjust(19))
        if bench.nccl:
            pair = [
                bench.nccl.get((f"put_signal_{kind}_us", nbytes), float("nan"))
                for kind in ("latency", "bandwidth")
            ]
            cells.append(f"{pair[0]:.2f} /{pair[1]:8.2f}".rjust(19))
        print(f"{nbytes:9d}" + "".join(cells), flush=True)
    return 1 if bench.failures else 0


if __name__ == "__main__":
    sys.exit(main())
