"""Each kernel in each regime as a share of the copy bandwidth of the same run, against stored baselines.

A share compares across days and clocks where microseconds do not: both figures come from one process on one card.
All launches of a stage over the layers of a short model run as one graph, cold in L2. Used by
bench/test_regression.py; the comparison itself needs no GPU.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine.model import GPUS
from engine.profiling.report import stage_roofs
from engine.tune.chain import Chain, Deployment
from engine.tune.choose import gpu_slug

BASELINES = Path(__file__).parent / "baselines"
# Repeated runs of one kernel on one card differ by 1 to 2 % in share (clock, DRAM refresh, the copy itself).
MARGIN = 0.05

REGIMES: dict[str, Deployment] = {
    # 4096 tokens: the KV of the short model's layers together exceeds the L2.
    "7b-bf16-tp1": Deployment("qwen2.5-7b", None, 1, None, 1, 4096),
    "7b-fp8-tp1": Deployment("qwen2.5-7b", "fp8", 1, None, 1, 4096),
    "72b-fp8-tp2": Deployment("qwen2.5-72b", "fp8", 1, 2, 1, 4096),
    "72b-fp8-tp8": Deployment("qwen2.5-72b", "fp8", 1, 8, 1, 4096),
    "72b-fp8-tp8-rows8": Deployment("qwen2.5-72b", "fp8", 1, 8, 8, 4096),
    "72b-fp8-tp2-prefill512": Deployment("qwen2.5-72b", "fp8", 1, 2, 1, 512, "prefill"),
}
STAGES = ("qkv", "attention", "o_proj", "gate_up", "down", "lm_head")


@dataclass(frozen=True)
class Verdict:
    """A measured share beside its baseline."""

    key: str
    share: float
    baseline: float | None

    def failure(self, margin: float = MARGIN) -> str | None:
        """Why this is a regression, or None. A missing baseline is none."""
        if self.baseline is None or self.share >= self.baseline * (1 - margin):
            return None
        return (
            f"{self.key}: {self.share:.3f} of the copy bandwidth, {1 - self.share / self.baseline:.1%} below "
            f"the baseline of {self.baseline:.3f} (margin {margin:.0%})"
        )


def share(step_bytes: int, step_s: float, copy_bandwidth: float) -> float:
    """Bytes per second over the copy bandwidth of the same run."""
    return step_bytes / step_s / copy_bandwidth


def compare(
    shares: Mapping[str, float], baselines: Mapping[str, float], margin: float = MARGIN
) -> list[str]:
    """One line for each regression."""
    verdicts = (Verdict(key, value, baselines.get(key)) for key, value in shares.items())
    return [line for v in verdicts if (line := v.failure(margin)) is not None]


def load_baselines(gpu: str, folder: Path = BASELINES) -> dict[str, float]:
    """ "regime stage" -> share of one GPU model; empty if none were stored."""
    file = folder / f"{gpu_slug(gpu)}.json"
    return json.loads(file.read_text())["shares"] if file.exists() else {}


def store_baselines(
    gpu: str, shares: Mapping[str, float], facts: Mapping[str, Any], folder: Path = BASELINES
) -> Path:
    """Merge into the GPU's file; `facts`: versions and date of the run."""
    file = folder / f"{gpu_slug(gpu)}.json"
    merged = {**load_baselines(gpu, folder), **{k: float(f"{v:.4g}") for k, v in shares.items()}}
    folder.mkdir(parents=True, exist_ok=True)
    content = {"_metadata": dict(facts), "shares": dict(sorted(merged.items()))}
    file.write_text(json.dumps(content, indent=1) + "\n")
    return file


class Bench:
    """One regime on the card. Close it to give the memory back."""

    def __init__(self, regime: str):
        deployment = REGIMES[regime]
        self.chain = Chain(deployment)
        self.copy_bandwidth = float(self.chain.executor.stats()["roof"]["copy_bandwidth"])
        decode = deployment.phase == "decode"
        self._roofs = stage_roofs(
            self.chain.executor.config, 1, phase=deployment.phase,
            rows=deployment.rows if decode else deployment.context,
            context=deployment.context if decode else 0, fp8=deployment.quantization == "fp8",
            shard_of=deployment.shard_of, gpu=replace(GPUS["h200"], copy=self.copy_bandwidth),
        )  # fmt: skip

    def program(self, stage: str) -> Any:
        """A program of this stage's launches only."""
        lines = self.chain.executor.lower(self.chain.graph).launches
        return self.chain.device.program(
            [[launch for launch in line if launch.op.stage == stage] for line in lines]
        )

    def bytes(self, stage: str) -> int:
        """What one replay of the stage's program moves."""
        return self._roofs[stage].bytes

    def close(self) -> None:
        self.chain.close()
