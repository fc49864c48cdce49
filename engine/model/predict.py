"""Roofline and Amdahl predictions of a step's time, for any model, TP degree, phase, rows, context and GPU.

A launch takes  max(bytes / (efficiency x copy bandwidth), FLOPs / (FLOP efficiency x peak)) + launch_us,
an exchange     barrier_us + message bytes / link rate,
and a step is their sum: with programmatic dependent launch `launch_us` is what is left of launch, ramp and tail
after overlap. The constants are calibrated (`engine.model.calibrate`), never per regime.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.config import ModelConfig
from engine.graph.ir import Graph, Phase
from engine.model.calibrate import Constants, constants_for
from engine.model.costs import Cost, op_costs
from engine.model.gpus import GPUS, Gpu


@dataclass(frozen=True)
class StagePrediction:
    """A stage over the whole step. Times in us; calls: launches and exchanges of the stage."""

    stage: str
    calls: int
    cost: Cost
    memory_us: float  # at the copy bandwidth: the roof
    us: float


@dataclass(frozen=True)
class Prediction:
    """One step of one deployment."""

    gpu: Gpu
    tp: int  # the degree whose shard each rank holds
    rows: int
    phase: Phase
    constants: Constants
    stages: tuple[StagePrediction, ...]

    @property
    def total_us(self) -> float:
        return sum(stage.us for stage in self.stages)

    @property
    def roof_us(self) -> float:
        """Weights and KV at the copy bandwidth: the time of "share of the roof" = 1."""
        moved = sum(s.cost.weight_bytes + s.cost.kv_bytes for s in self.stages)
        return moved / self.gpu.copy * 1e6

    @property
    def barrier_us(self) -> float:
        """Time of all exchanges between ranks."""
        cost = sum((s.cost for s in self.stages), Cost())
        return cost.barriers * self.constants.barrier_us + cost.message_bytes / self.gpu.link * 1e6

    @property
    def launch_us(self) -> float:
        """Time of all launches beyond their bytes."""
        return self.constants.launch_us * sum(s.cost.launches for s in self.stages)

    @property
    def tok_s(self) -> float:
        """Tokens per second over all rows (decode), or prompt tokens per second (prefill)."""
        return self.rows / self.total_us * 1e6

    @property
    def share(self) -> float:
        """Of the roof."""
        return self.roof_us / self.total_us


def predict(
    config: ModelConfig,
    tp: int,
    *,
    phase: Phase = "decode",
    quantization: str | None = None,
    rows: int = 1,
    context: int | None = None,
    gpu: Gpu = GPUS["h200"],
    constants: Constants | None = None,
    shard_of: int | None = None,
    fp8_prefill: bool = False,
    fp8_kv: bool = False,
    algorithms: tuple[str, ...] = Graph.algorithms,
) -> Prediction:
    """Predicted step: `rows` sequences with `context` tokens in the KV (decode, default 512), or `rows` prompt
    tokens behind `context` earlier ones (prefill, default 0).

    shard_of: the ranks hold the shard of this degree while `tp` of them exchange. fp8_prefill: prefill multiplies
    FP8 by FP8 where the graph does. fp8_kv: --kv-cache-dtype fp8. algorithms: see graph/build.py. constants None:
    calibrated from bench/results where there are rows of this GPU. Raises EngineError for an impossible TP degree.
    """
    known = constants or constants_for(gpu, quantization)
    context = context if context is not None else 512 if phase == "decode" else 0
    found: dict[str, StagePrediction] = {}
    ops = op_costs(
        config, tp, phase=phase, rows=rows, context=context, fp8=quantization == "fp8",
        shard_of=shard_of, fp8_prefill=fp8_prefill, fp8_kv=fp8_kv, algorithms=algorithms,
    )  # fmt: skip
    for name, count, cost in ops:
        us = count * known.op_us(cost, gpu)
        roof = count * cost.bytes / gpu.copy * 1e6
        old = found.get(name, StagePrediction(name, 0, Cost(), 0.0, 0.0))
        found[name] = StagePrediction(
            name, old.calls + count, old.cost + cost * count, old.memory_us + roof, old.us + us
        )
    stages = tuple(found.values())
    return Prediction(gpu, shard_of or tp, rows, phase, known, stages)


@dataclass(frozen=True)
class ScalingPoint:
    """Tokens per second of one sequence at one TP degree, as three lines of a plot."""

    tp: int
    bandwidth_tok_s: float  # bytes at the copy bandwidth: no launch or barrier costs anything
    amdahl_tok_s: float  # the model: bytes shrink with TP, launches and barriers do not
    barrier_share: float  # of the predicted step
    launch_share: float


def scaling(
    config: ModelConfig, degrees: Sequence[int], *, quantization: str | None = None, rows: int = 1,
    context: int = 512, gpu: Gpu = GPUS["h200"], constants: Constants | None = None, fp8_kv: bool = False,
) -> list[ScalingPoint]:  # fmt: skip
    """The lines of `engine bench sweep` at each TP degree."""
    points = []
    for tp in degrees:
        p = predict(config, tp, quantization=quantization, rows=rows, context=context, gpu=gpu,
                    constants=constants, fp8_kv=fp8_kv)  # fmt: skip
        points.append(
            ScalingPoint(tp, rows / p.roof_us * 1e6, p.tok_s, p.barrier_us / p.total_us,
                         p.launch_us / p.total_us)
        )  # fmt: skip
    return points
