"""The model's constants: fitted to bench/results where there are rows of the GPU, else to the first experiments.

The fit is least squares on relative errors of decode steps, held to the prior: changing a constant by 10 %
costs as much as an error of 0.3 % in one row. So one row moves little, and many rows decide.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from engine.bench.rows import load
from engine.config import PRESETS
from engine.model.costs import Cost, add_up, op_costs
from engine.model.gpus import Gpu

PRIOR_WEIGHT = 0.001
LONGEST = 1024  # tokens of a prompt whose row is fitted
MEAN_OUTPUT = 128  # tokens into the answer at the mean of bench.latency's 256
# On H200s, 2026-11: chains of the four 72B GEMVs x 80 layers under PDL. FP8: 3.13 ms for 8.78 GB and
# 10.3 ms for 35.1 GB, both 320 launches; BF16: 16.64 ms for 70.2 GB; one exchange adds 1.15 us. Prefill: cuBLAS
# reaches about 0.6 of the datasheet peak at 512 tokens.
EXPERIMENTS = "first experiments on H200s, 2026-11"


@dataclass(frozen=True)
class Constants:
    """Constants for one kind of weights. `source` says what they were fitted to."""

    efficiency: float  # share of the copy bandwidth that a long weight stream reaches
    launch_us: float  # per kernel, beyond its bytes
    barrier_us: float  # per exchange, beyond its message
    flop_efficiency: float = 0.6  # share of the tensor cores' peak that prefill GEMMs reach
    host_us: float = 200.0  # TTFT beyond the prefill step: uploads, launch, polling
    source: str = EXPERIMENTS

    def op_us(self, cost: Cost, gpu: Gpu) -> float:
        """Time of one launch or exchange, us."""
        memory = cost.bytes / (self.efficiency * gpu.copy)
        arithmetic = cost.arithmetic_s(gpu) / self.flop_efficiency
        message = cost.message_bytes / gpu.link
        fixed = cost.launches * self.launch_us + cost.barriers * self.barrier_us
        return (max(memory, arithmetic) + message) * 1e6 + fixed


PRIOR = {
    None: Constants(efficiency=1.0, launch_us=0.9, barrier_us=1.15),
    "fp8": Constants(efficiency=0.855, launch_us=2.3, barrier_us=1.15),
}


def usable(rows: Iterable[dict[str, Any]], metric: str, gpu: Gpu) -> list[dict[str, Any]]:
    """Rows of bench.latency for this GPU with real barriers: one rank a GPU, a preset's shape. Not of long contexts or FP8
    KV: the model knows attention's bytes, not its merges and conversions, which the other constants would be bent for."""
    return [
        r for r in rows
        if r["metric"] == metric and r["bench"] == "latency" and r["model"] in PRESETS
        and gpu.name.lower() in str(r["gpu"]).lower() and r["value"] > 0
        and r["context"] <= LONGEST and r.get("kv_cache_dtype") != "fp8"
    ]  # fmt: skip


def row_costs(row: dict[str, Any]) -> list[tuple[str, int, Cost]]:
    """The ops of the step that a row of bench.latency measured."""
    decode = row["metric"] == "decode_tok_s"
    return op_costs(
        PRESETS[row["model"]], row["tp"], phase="decode" if decode else "prefill",
        rows=row["rows"] if decode else row["context"],
        context=row["context"] + MEAN_OUTPUT if decode else 0,
        fp8=row["quantization"] == "fp8", shard_of=row["shard_of"],
        fp8_kv=row.get("kv_cache_dtype") == "fp8",
        fp8_prefill=row["quantization"] == "fp8",  # as EngineConfig has it on GPUs
    )  # fmt: skip


def measured_us(row: dict[str, Any]) -> float:
    """Time of the row's decode step or first token, us."""
    return (
        row["rows"] / row["value"] * 1e6 if row["metric"] == "decode_tok_s" else row["value"] * 1e3
    )


def predicted_us(row: dict[str, Any], constants: Constants, gpu: Gpu) -> float:
    """The same from the model."""
    step = sum(count * constants.op_us(cost, gpu) for _, count, cost in row_costs(row))
    return step if row["metric"] == "decode_tok_s" else step + constants.host_us


def fit(rows: Sequence[dict[str, Any]], gpu: Gpu, quantization: str | None) -> Constants:
    """Constants for one kind of weights from measured rows (all metrics; those of other weights are ignored)."""
    kind = "fp8" if quantization == "fp8" else "none"
    prior = PRIOR[quantization]
    own = [r for r in rows if r["quantization"] == kind]
    decode, first = usable(own, "decode_tok_s", gpu), usable(own, "ttft_ms", gpu)
    fitted = _fit_decode(decode, gpu, prior)
    fitted = _fit_prefill(first, gpu, fitted)
    if not decode and not first:
        return prior
    return replace(fitted, source=f"{len(decode)} decode and {len(first)} TTFT rows of {gpu.name}")


def _fit_decode(rows: Sequence[dict[str, Any]], gpu: Gpu, prior: Constants) -> Constants:
    """Linear in (1 / efficiency, launch_us, barrier_us)."""
    if not rows:
        return prior
    start = np.array([1 / prior.efficiency, prior.launch_us, prior.barrier_us])
    lines, targets = [], []
    for row in rows:
        cost = add_up(cost * count for _, count, cost in row_costs(row))
        message = cost.message_bytes / gpu.link * 1e6
        time = measured_us(row) - message
        lines.append(np.array([cost.bytes / gpu.copy * 1e6, cost.launches, cost.barriers]) / time)
        targets.append(1.0)
    hold = PRIOR_WEIGHT**0.5
    matrix = np.vstack([*(line * start for line in lines), np.eye(3) * hold])
    scale, *_ = np.linalg.lstsq(matrix, np.array([*targets, *[hold] * 3]), rcond=None)
    inverse, launch, barrier = np.maximum(scale, 0.05) * start
    return replace(
        prior, efficiency=float(1 / inverse), launch_us=float(launch), barrier_us=float(barrier)
    )


def _fit_prefill(rows: Sequence[dict[str, Any]], gpu: Gpu, known: Constants) -> Constants:
    """Grid search of (FLOP efficiency, host time): the maximum over memory and arithmetic is not linear."""
    if not rows:
        return known
    ops = [row_costs(row) for row in rows]

    def error(candidate: Constants) -> float:
        total = PRIOR_WEIGHT * (candidate.flop_efficiency / known.flop_efficiency - 1) ** 2
        for row, line in zip(rows, ops):
            step = sum(count * candidate.op_us(cost, gpu) for _, count, cost in line)
            total += ((step + candidate.host_us) / measured_us(row) - 1) ** 2
        return total

    grid = [
        replace(known, flop_efficiency=share / 50, host_us=host)
        for share in range(5, 48)
        for host in (50.0, 100.0, 200.0, 400.0, 800.0, 1600.0)
    ]
    return min(grid, key=error)


@lru_cache(maxsize=8)
def constants_for(gpu: Gpu, quantization: str | None) -> Constants:
    """Fitted to bench/results, or the prior if nothing there is of this GPU. Read once a process."""
    return fit(load(), gpu, quantization)
