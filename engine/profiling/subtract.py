"""Stage times by subtraction: the captured step with and without each stage.

What a stage adds between its neighbours is what leaving it out saves; under programmatic dependent launch that
is less than it takes alone. A stage whose GEMV also sends to the other ranks keeps its send as a bare push, since
the peers wait for it, and one whose GEMV waits for them keeps a bare poll, which re-arms a slot: such a stage
shows less by that launch's time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine.profiling.device import Device, StandIns, stand_in

if TYPE_CHECKING:
    from engine.graph.lower import Launch


@dataclass(frozen=True)
class Added:
    """What all `calls` launches of a stage add to a step, us, on each rank."""

    stage: str
    calls: int
    us: tuple[float, ...]
    kept: int  # of the calls, those of which a bare push or poll stayed


def calls_of(line: list[Launch]) -> dict[str, int]:
    """Stage -> launches, in order of first use."""
    return dict(Counter(launch.op.stage for launch in line))


def without(line: list[Launch], stage: str, bare: StandIns) -> list[Launch]:
    """The line less one stage; `bare`: what replaces its fused ops."""
    rest = []
    for launch in line:
        if launch.op.stage != stage:
            rest.append(launch)
        elif (key := stand_in(launch.op)) is not None:
            rest.append(bare[key])
    return rest


def added_by_stage(
    device: Device, program: Any, whole_s: list[float] | None = None
) -> Iterator[Added]:
    """Each stage of the program in order, as it is measured. whole_s: the step's time, if known."""
    whole = whole_s or device.step_s(program)
    bare = device.stand_ins()
    for stage, calls in calls_of(program.launches[0]).items():
        lines = [without(line, stage, own) for line, own in zip(program.launches, bare)]
        rest = device.program(lines)
        try:
            times = device.step_s(rest)
        finally:
            rest.free()
        kept = len(lines[0]) - len(program.launches[0]) + calls
        yield Added(stage, calls, tuple((a - b) * 1e6 for a, b in zip(whole, times)), kept)
