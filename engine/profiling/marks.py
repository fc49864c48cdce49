"""Stage times from events recorded inside the captured graphs, at stage boundaries of every Nth layer.

An event node breaks the programmatic edge between the kernels beside it, so a marked layer runs without that
overlap and takes longer. Layers between marked ones are one span with all its edges; the spans and the marked
stages together cover the step without a gap. A stage's time over the step is what its marks show plus its share
of the spans (`stage_us`).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from engine.graph.ir import Op
from engine.profiling.device import Device, Event

if TYPE_CHECKING:
    from engine.graph.lower import Launch

SPAN = "layers"  # name of an unmarked stretch
STEPS_BEFORE = 4  # replays queued in front of the one whose events are read


@dataclass(frozen=True)
class Segment:
    """Consecutive launches [first, last] of one stage, or of unmarked layers."""

    stage: str
    layer: int | None
    first: int
    last: int
    calls: dict[str, int]  # launches by stage
    waits: bool = False  # whether an all-reduce is awaited in it

    @property
    def is_span(self) -> bool:
        return self.stage == SPAN


@dataclass(frozen=True)
class Interval:
    """A segment's time in one step: from the event before it to the one behind it. us from the step's start."""

    segment: Segment
    start_us: float
    end_us: float

    @property
    def us(self) -> float:
        return self.end_us - self.start_us


def segments(line: Sequence[Launch], every: int) -> list[Segment]:
    """Where the marks go. every: mark one layer in so many (1: all); what is in no layer is always marked."""
    layers = {launch.op.layer for launch in line} - {None}
    every = max(1, min(every, len(layers)))
    found: list[Segment] = []
    for index, launch in enumerate(line):
        layer, stage = launch.op.layer, launch.op.stage
        waits = launch.op.is_wait and "site" in launch.op.attrs
        marked = layer is None or layer % every == every // 2
        name = stage if marked else SPAN
        last = found[-1] if found else None
        if last is not None and last.stage == name and (not marked or last.layer == layer):
            calls = {**last.calls, stage: last.calls.get(stage, 0) + 1}
            found[-1] = replace(last, last=index, calls=calls, waits=last.waits or waits)
        else:
            found.append(Segment(name, layer, index, index, {stage: 1}, waits))
    return found


def _mark(event: Event) -> Launch:
    """A launch that records an event."""
    from engine.graph.lower import Launch

    return Launch(Op("mark", (), (), "mark"), "event", None, 0, "mark", event.record)


def marked(
    line: Sequence[Launch], parts: Sequence[Segment], events: Sequence[Event]
) -> list[Launch]:
    """The line with an event before each segment and one at the end."""
    result: list[Launch] = []
    for part, event in zip(parts, events):
        result.append(_mark(event))
        result += line[part.first : part.last + 1]
    return [*result, _mark(events[len(parts)])]


@dataclass(frozen=True)
class Marked:
    """The marked program's own time and, per rank, the intervals of each sampled step."""

    step_us: tuple[float, ...]
    samples: tuple[tuple[tuple[Interval, ...], ...], ...]  # [rank][sample][segment]
    marks: int  # events in each rank's graph

    def median(self, rank: int) -> list[Interval]:
        """The rank's segments laid end to end, each as long as its median over the samples."""
        clock, result = 0.0, []
        for same in zip(*self.samples[rank]):
            us = statistics.median(interval.us for interval in same)
            result.append(Interval(same[0].segment, clock, clock + us))
            clock += us
        return result


def measure(device: Device, program: Any, every: int, samples: int = 20) -> Marked:
    """Mark the program's launches, time the marked step, and read the events of `samples` steps."""
    lines = program.launches
    parts = segments(lines[0], every)
    events = [[device.event() for _ in range(len(parts) + 1)] for _ in lines]
    timed = device.program([marked(line, parts, own) for line, own in zip(lines, events)])
    try:
        step = device.step_s(timed)
        taken: list[list[tuple[Interval, ...]]] = [[] for _ in lines]
        for _ in range(samples):
            device.replay(timed, 1 + STEPS_BEFORE)
            for rank, own in enumerate(events):
                taken[rank].append(_intervals(parts, own))
    finally:
        timed.free()
    return Marked(
        tuple(seconds * 1e6 for seconds in step),
        tuple(tuple(rank) for rank in taken),
        len(parts) + 1,
    )


def _intervals(parts: Sequence[Segment], events: Sequence[Event]) -> tuple[Interval, ...]:
    at = [events[0].elapsed_time(event) * 1e3 for event in events[1:]]
    return tuple(
        Interval(part, start, end)
        for part, start, end in zip(parts, [0.0, *at[:-1]], at, strict=True)
    )


def stage_us(intervals: Sequence[Interval]) -> dict[str, tuple[int, float]]:
    """Stage -> (calls, us over the step): its marked time and its part of the spans.

    A mark costs every segment about the same (the overlap that its event breaks). That cost is what marked
    layers take beyond the layers of the spans, over their segments; a span is divided in proportion to the
    marked times less it. ValueError if a stage of a span is marked nowhere.
    """
    spans = [i for i in intervals if i.segment.is_span]
    direct: dict[str, list[Interval]] = {}
    for interval in intervals:
        if not interval.segment.is_span:
            direct.setdefault(interval.segment.stage, []).append(interval)
    missing = {stage for span in spans for stage in span.segment.calls} - direct.keys()
    if missing:
        raise ValueError(f"no marked layer shows {sorted(missing)}")
    total = {stage: sum(i.us for i in own) for stage, own in direct.items()}
    calls = {stage: sum(i.segment.calls[stage] for i in own) for stage, own in direct.items()}
    mean = {stage: total[stage] / len(own) for stage, own in direct.items()}  # of one segment
    # Segments of each stage that a span would have if it were marked.
    counts = [
        {stage: n * len(direct[stage]) / calls[stage] for stage, n in span.segment.calls.items()}
        for span in spans
    ]
    as_marked = sum(n * mean[stage] for count in counts for stage, n in count.items())
    segments_in_spans = sum(sum(count.values()) for count in counts)
    cost = 0.0
    if segments_in_spans:
        cost = max(0.0, (as_marked - sum(span.us for span in spans)) / segments_in_spans)
    for span, count in zip(spans, counts):
        weight = {s: n * max(mean[s] - cost, 0.1 * mean[s]) for s, n in count.items()}
        for stage, part in weight.items():
            total[stage] += span.us * part / sum(weight.values())
            calls[stage] += span.segment.calls[stage]
    return {stage: (calls[stage], total[stage]) for stage in total}


@dataclass(frozen=True)
class Skew:
    """How far apart the ranks arrive at an exchange: longest less shortest wait among the ranks, us.

    Every rank leaves an exchange within a link latency of the others, so who waits long came early: no common
    clock is needed. late[rank]: exchanges at which this rank came last.
    """

    exchanges: int
    median_us: float
    worst_us: float
    late: tuple[int, ...]


def skew(result: Marked) -> Skew | None:
    """Over the marked exchanges of all samples; None with one rank or no marked exchange."""
    if len(result.samples) < 2:
        return None
    spreads, late = [], [0] * len(result.samples)
    for steps in zip(*result.samples):  # one sample, all ranks
        for same in zip(*steps):  # one segment, all ranks
            if same[0].segment.is_span or not same[0].segment.waits:
                continue
            waits = [interval.us for interval in same]
            spreads.append(max(waits) - min(waits))
            late[waits.index(min(waits))] += 1
    if not spreads:
        return None
    return Skew(len(spreads), statistics.median(spreads), max(spreads), tuple(late))
