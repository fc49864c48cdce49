"""The share of the roof: how near a decode step comes to the copy bandwidth of the same run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def roof_share(
    roof: Mapping[str, Any] | None, kv_tokens: float, step_s: float | None
) -> float | None:
    """What a step must read on a GPU (all weights once, and the KV of `kv_tokens` tokens of all rows together) at the
    copy bandwidth, over the step's time. None where no bandwidth was measured, as on the CPU, or no step.

    roof: `stats()["roof"]` of an executor."""
    if not roof or not roof.get("copy_bandwidth") or not step_s:
        return None
    moved = roof["weight_bytes"] + roof["kv_bytes_per_token"] * kv_tokens
    return float(moved / roof["copy_bandwidth"] / step_s)
