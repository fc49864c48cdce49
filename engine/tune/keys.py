"""The tuned choices that a deployment's graph makes, from its compiled graph and no GPU."""

from __future__ import annotations

import torch

from engine.config import preset, with_layers
from engine.graph.build import build
from engine.graph.facts import Choice, choices
from engine.graph.passes import run_passes
from engine.runtime.allocate import kv_length
from engine.tune import choose
from engine.tune.chain import Deployment


def graph_keys(deployment: Deployment) -> list[Choice]:
    """Distinct (op, facts) of the deployment's graph, 16-bit activations in bf16."""
    config = with_layers(preset(deployment.model), 2)  # the last layer of a prefill differs
    rows = deployment.rows if deployment.phase == "decode" else deployment.context
    graph = run_passes(
        build(
            config,
            phase=deployment.phase,
            rows=rows,
            tp=deployment.tp,
            shard_of=deployment.shard_of,
            fp8_prefill=deployment.quantization == "fp8",
        )
    )

    def weight_dtype(name: str) -> torch.dtype:
        fp8 = deployment.quantization == "fp8" and graph.weights[name].quantizable
        return torch.float8_e4m3fn if fp8 else torch.bfloat16

    found: dict[tuple[str, str], Choice] = {}
    length = kv_length(deployment.context)
    for op, facts in choices(graph, weight_dtype, torch.bfloat16, length):
        found.setdefault((op, choose.key_string(op, facts)), (op, facts))
    return list(found.values())
