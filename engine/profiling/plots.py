"""A profile as a Chrome/Perfetto trace and as a picture of stacked bars."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.errors import EngineError
from engine.profiling.report import PhaseProfile


def trace(profiles: Sequence[PhaseProfile]) -> dict[str, Any]:
    """Trace Event Format (chrome://tracing, ui.perfetto.dev): a process per phase and method, a thread per rank.

    Times in us. The ranks' clocks are aligned at the end of the first marked exchange, which they leave within
    a link latency of each other. Without events there is no timeline: stages lie end to end in graph order.
    """
    events: list[dict[str, Any]] = []
    for pid, profile in enumerate(profiles):
        name = f"{profile.phase} ({profile.method})"
        events.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}})
        for rank in range(len(profile.bare_us)):
            label = {"name": f"rank {rank}"}
            events.append(
                {"ph": "M", "name": "thread_name", "pid": pid, "tid": rank, "args": label}
            )
            for piece in _timeline(profile, rank):
                events.append({"ph": "X", "pid": pid, "tid": rank, "cat": profile.phase, **piece})
    return {"traceEvents": events, "displayTimeUnit": "ns"}


def _timeline(profile: PhaseProfile, rank: int) -> list[dict[str, Any]]:
    if not profile.timeline:
        clock, pieces = 0.0, []
        for row in profile.stages:
            us = max(0.0, row.rank_us[min(rank, len(row.rank_us) - 1)])
            pieces.append({"name": row.stage, "ts": clock, "dur": us, "args": {"calls": row.calls}})
            clock += us
        return pieces
    starts = [_first_exchange(line) for line in profile.timeline]
    shift = max(starts) - starts[rank]
    return [
        {
            "name": i.segment.stage, "ts": i.start_us + shift, "dur": i.us,
            "args": {"layer": i.segment.layer, "launches": i.segment.calls},
        }
        for i in profile.timeline[rank]
    ]  # fmt: skip


def _first_exchange(line: Sequence[Any]) -> float:
    marked = (i for i in line if i.segment.waits and not i.segment.is_span)
    return next((i.end_us for i in marked), 0.0)


def draw(profiles: Sequence[PhaseProfile], title: str, path: str | Path) -> None:
    """PNG: for each phase and method the roof and every rank as stacked bars of the stages, ms a step.

    Raises EngineError without matplotlib.
    """
    plt = pyplot("--png")
    figure, axes = plt.subplots(
        len(profiles), 1, figsize=(11, 1.6 + 1.7 * len(profiles)), squeeze=False
    )
    colours = plt.get_cmap("tab10")
    stages = list(dict.fromkeys(row.stage for p in profiles for row in p.stages))
    for axis, profile in zip(axes[:, 0], profiles):
        bars = [("roof", [row.roof.us for row in profile.stages])]
        for rank in range(len(profile.bare_us)):
            bars.append((f"rank {rank}", [max(0.0, row.rank_us[rank]) for row in profile.stages]))
        for name, times in bars:
            left = 0.0
            for row, us in zip(profile.stages, times):
                axis.barh(name, us / 1e3, left=left, color=colours(stages.index(row.stage) % 10))
                left += us / 1e3
        axis.axvline(max(profile.bare_us) / 1e3, color="black", linewidth=1, linestyle=":")
        axis.set_title(
            f"{profile.phase}, {profile.method}; dotted: the bare step", fontsize=9, loc="left"
        )
        axis.set_xlabel("ms a step", fontsize=8)
        axis.invert_yaxis()
    handles = [plt.Rectangle((0, 0), 1, 1, color=colours(i % 10)) for i in range(len(stages))]
    figure.legend(handles, stages, loc="outside right upper", fontsize=8)
    figure.suptitle(title, fontsize=10, x=0.01, ha="left")
    figure.tight_layout(rect=(0, 0, 0.88, 0.98))
    figure.savefig(path, dpi=120)
    plt.close(figure)


def pyplot(flag: str) -> Any:
    """matplotlib.pyplot on the file back end. EngineError says how to get it."""
    try:
        import matplotlib
    except ImportError:
        raise EngineError(f"{flag} draws with matplotlib: pip install 'engine[plot]'") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt
