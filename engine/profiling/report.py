"""The result of a profile and its table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from engine.config import ModelConfig
from engine.graph.ir import Phase
from engine.model.costs import op_costs
from engine.model.gpus import Gpu
from engine.model.predict import Prediction
from engine.profiling.marks import Interval, Marked, Skew, skew, stage_us
from engine.profiling.subtract import Added

Method = Literal["events", "subtract", "predicted"]
ENOUGH = 0.95  # of the step that the stages must account for
TOLERABLE = 1.05  # profiled step over bare step

HOW = {
    "events": "events in the graph; marked layers run without programmatic edges",
    "subtract": "the step with and without each stage; programmatic edges kept",
    "predicted": "prediction of the performance model, nothing was run",
}


@dataclass(frozen=True)
class Roof:
    """What a stage must move and multiply over a whole step, on one rank, and the time that this takes."""

    bytes: int
    flops: float
    us: float  # the slower of bytes at the copy bandwidth and FLOPs at the tensor cores' peak


@dataclass(frozen=True)
class StageRow:
    """One stage over a whole step: us on each rank, and their mean."""

    stage: str
    calls: int
    rank_us: tuple[float, ...]
    roof: Roof

    @property
    def us(self) -> float:
        return sum(self.rank_us) / len(self.rank_us)

    @property
    def share(self) -> float | None:
        """Of the roof; None for a stage that moves next to nothing or shows no time."""
        return self.roof.us / self.us if self.us > 0 and self.roof.us > 0 else None

    @property
    def tb_s(self) -> float | None:
        """Bytes over time."""
        return self.roof.bytes / self.us * 1e-6 if self.us > 0 and self.roof.bytes else None


@dataclass(frozen=True)
class PhaseProfile:
    """One phase by one method. bare_us: the step as the engine runs it, on each rank."""

    phase: Phase
    rows: int
    context: int
    method: Method
    stages: tuple[StageRow, ...]
    bare_us: tuple[float, ...]
    profiled_us: tuple[float, ...] | None = None
    marks: int = 0
    skew: Skew | None = None
    timeline: tuple[tuple[Interval, ...], ...] = ()  # per rank
    copy_bandwidth: float = 0.0

    @property
    def step_us(self) -> float:
        """Mean over ranks of the step that the stages are parts of."""
        steps = self.profiled_us or self.bare_us
        return sum(steps) / len(steps)

    @property
    def accounted(self) -> float:
        """Share of that step in the stages' sum."""
        return sum(row.us for row in self.stages) / self.step_us

    @property
    def slowdown(self) -> float:
        """Profiled step over bare step, slowest ranks."""
        return max(self.profiled_us) / max(self.bare_us) if self.profiled_us else 1.0

    def notes(self) -> list[str]:
        """What the reader must be told before the figures are used."""
        notes = []
        if self.accounted < ENOUGH:
            notes.append(
                f"the stages account for {self.accounted:.1%} of the step, less than {ENOUGH:.0%}: "
                + ("launches overlap (their times alone sum to more)" if self.method == "subtract"
                   else "the gap is between replays")
            )  # fmt: skip
        if self.slowdown > TOLERABLE:
            notes.append(
                f"the profiled step is {self.slowdown - 1:.1%} slower than the bare one, over "
                f"{TOLERABLE - 1:.0%}: mark fewer layers (--every) or use --method subtract"
            )
        return notes


def stage_roofs(
    config: ModelConfig, tp: int, *, phase: Phase, rows: int, context: int, fp8: bool,
    shard_of: int | None, gpu: Gpu, fp8_prefill: bool = False, fp8_kv: bool = False,
) -> dict[str, Roof]:  # fmt: skip
    """Roof of each stage, from the compiled graph, by gpu.copy and the peaks of its tensor cores.

    context: tokens in the KV before the step."""
    roofs: dict[str, Roof] = {}
    for stage, count, cost in op_costs(config, tp, phase=phase, rows=rows, context=context, fp8=fp8,
                                       shard_of=shard_of, fp8_prefill=fp8_prefill, fp8_kv=fp8_kv):  # fmt: skip
        old = roofs.get(stage, Roof(0, 0.0, 0.0))
        us = max(cost.bytes / gpu.copy, cost.arithmetic_s(gpu)) * 1e6
        roofs[stage] = Roof(
            old.bytes + count * cost.bytes, old.flops + count * cost.flops, old.us + count * us
        )
    return roofs


def from_marks(
    result: Marked, bare_us: Sequence[float], roofs: Mapping[str, Roof], **facts: Any
) -> PhaseProfile:
    """Profile by events."""
    timeline = tuple(tuple(result.median(rank)) for rank in range(len(result.samples)))
    ranks = [stage_us(intervals) for intervals in timeline]
    stages = tuple(
        StageRow(stage, calls, tuple(rank[stage][1] for rank in ranks), roofs[stage])
        for stage, (calls, _) in ranks[0].items()
    )
    return PhaseProfile(
        method="events", stages=stages, bare_us=tuple(bare_us), profiled_us=result.step_us,
        marks=result.marks, skew=skew(result), timeline=timeline, **facts,
    )  # fmt: skip


def from_added(
    added: Sequence[Added], bare_us: Sequence[float], roofs: Mapping[str, Roof], **facts: Any
) -> PhaseProfile:
    """Profile by subtraction."""
    stages = tuple(StageRow(a.stage, a.calls, a.us, roofs[a.stage]) for a in added)
    return PhaseProfile(method="subtract", stages=stages, bare_us=tuple(bare_us), **facts)


def from_prediction(p: Prediction, context: int) -> PhaseProfile:
    """What the performance model says, in the same form."""
    stages = tuple(
        StageRow(s.stage, s.calls, (s.us,), Roof(s.cost.bytes, s.cost.flops, max(
            s.memory_us, s.cost.arithmetic_s(p.gpu) * 1e6)))
        for s in p.stages
    )  # fmt: skip
    return PhaseProfile(p.phase, p.rows, context, "predicted", stages, (p.total_us,),
                        copy_bandwidth=p.gpu.copy)  # fmt: skip


def table(profile: PhaseProfile) -> str:
    """The profile as text, widths for a terminal."""
    many = len(profile.bare_us) > 1
    size = f"rows {profile.rows}" + (
        f", context {profile.context}" if profile.phase == "decode" else ""
    )
    ranks = "".join(f"{f'rank {i}':>10}" for i in range(len(profile.bare_us))) if many else ""
    lines = [
        f"{profile.phase}, {size}: {HOW[profile.method]}",
        f"  {'stage':<11}{'calls':>6}{'us':>10}{'us/call':>9}{'step':>7}{ranks}{'MB':>10}"
        f"{'TB/s':>7}{'roof us':>10}{'of roof':>9}",
    ]
    for row in profile.stages:
        each = "".join(f"{us:>10.1f}" for us in row.rank_us) if many else ""
        rate = f"{row.tb_s:>7.2f}" if row.tb_s is not None else " " * 7
        share = f"{row.share:>9.1%}" if row.share is not None else ""
        lines.append(
            f"  {row.stage:<11}{row.calls:>6}{row.us:>10.1f}{row.us / row.calls:>9.2f}"
            f"{row.us / profile.step_us:>7.1%}{each}{row.roof.bytes / 1e6:>10.2f}{rate}"
            f"{row.roof.us:>10.1f}{share}"
        )
    total = sum(row.us for row in profile.stages)
    lines.append(f"  sum {total:.1f} us, {profile.accounted:.1%} of the step")
    name = "predicted" if profile.method == "predicted" else "bare"
    lines.append(f"  {name} step " + " / ".join(f"{us:.1f}" for us in profile.bare_us) + " us")
    if profile.profiled_us is not None:
        lines[-1] += (
            ", profiled step " + " / ".join(f"{us:.1f}" for us in profile.profiled_us)
            + f" us ({profile.slowdown - 1:+.1%}), {profile.marks} events a rank"
        )  # fmt: skip
    if profile.skew is not None:
        late = " / ".join(f"{n / profile.skew.exchanges:.0%}" for n in profile.skew.late)
        lines.append(
            f"  skew of the ranks at an exchange: median {profile.skew.median_us:.2f} us, worst "
            f"{profile.skew.worst_us:.2f} us; last to arrive, by rank: {late}"
        )
    return "\n".join([*lines, *(f"  note: {note}" for note in profile.notes())])


def as_json(profile: PhaseProfile) -> dict[str, Any]:
    """JSON-able, with what the properties compute."""
    rows = [
        {**asdict(row), "us": row.us, "share": row.share, "tb_s": row.tb_s}
        for row in profile.stages
    ]
    return {
        "phase": profile.phase, "rows": profile.rows, "context": profile.context,
        "method": profile.method, "how": HOW[profile.method], "bare_us": profile.bare_us,
        "profiled_us": profile.profiled_us, "slowdown": profile.slowdown,
        "accounted": profile.accounted, "marks": profile.marks,
        "skew": None if profile.skew is None else asdict(profile.skew),
        "copy_bandwidth": profile.copy_bandwidth, "stages": rows, "notes": profile.notes(),
    }  # fmt: skip


def from_json(content: Mapping[str, Any]) -> PhaseProfile:
    """What `as_json` wrote, without its timeline."""
    stages = tuple(
        StageRow(row["stage"], row["calls"], tuple(row["rank_us"]), Roof(**row["roof"]))
        for row in content["stages"]
    )
    late = content["skew"]
    return PhaseProfile(
        content["phase"], content["rows"], content["context"], content["method"], stages,
        tuple(content["bare_us"]), content["profiled_us"] and tuple(content["profiled_us"]),
        content["marks"], late and Skew(**{**late, "late": tuple(late["late"])}),
        copy_bandwidth=content["copy_bandwidth"],
    )  # fmt: skip
