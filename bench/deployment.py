"""Deployments as the scripts here are given them: MODEL:QUANTIZATION:TP[:SHARD_OF], dummy weights."""

from __future__ import annotations

from typing import Any

from engine.config import EngineConfig


def parse(text: str, **options: Any) -> EngineConfig:
    """ "qwen2.5-72b:fp8:2:8" or "qwen2.5-7b:none:1"; options: further fields of EngineConfig."""
    model, quantization, tp, *shard = text.split(":")
    return EngineConfig(
        model=model, tensor_parallel_size=int(tp), load_format="dummy", device="cuda",
        quantization=None if quantization == "none" else quantization,
        shard_of=int(shard[0]) if shard else None, **options,
    )  # fmt: skip


def facts(engine: EngineConfig) -> dict[str, Any]:
    """The fields of a row that name the deployment."""
    return {
        "model": engine.model, "quantization": engine.quantization or "none",
        "kv_cache_dtype": engine.kv_cache_dtype,
        "tp": engine.tensor_parallel_size, "shard_of": engine.shard_of,
    }  # fmt: skip
