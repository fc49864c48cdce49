"""Deployments as the scripts here are given them: MODEL:QUANTIZATION:TP[:SHARD_OF], dummy weights."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from typing import Any

from engine.config import EngineConfig


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Of a script that measures one deployment after the other."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawTextHelpFormatter)
    made.add_argument(
        "deployments", nargs="+", help="such as qwen2.5-7b:none:1 qwen2.5-72b:fp8:2:8"
    )
    return made


def each(deployments: Iterable[str], measure: Callable[[str], object]) -> None:
    """Measure every one; a broken deployment is a line, and must not cost the card time of the others."""
    for text in deployments:
        try:
            measure(text)
        except Exception as e:
            print(f"{text}: {type(e).__name__}: {e}"[:2000], flush=True)


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
