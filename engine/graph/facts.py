"""Which tuned choice an op needs, and the static facts it is made from. Pure: no GPU, no weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from engine.graph.ir import Graph, Op
from engine.tune.choose import choose

GEMV_MAX_ROWS = 8  # decode GEMV up to here, prefill GEMM beyond

ALGORITHM = {  # the ops of an all-reduce that have a configuration
    "push": "lamport",
    "poll_residual": "lamport",
    "two_shot_reduce": "two_shot",
    "two_shot_gather": "two_shot",
    "flag_publish": "flag",
    "flag_reduce": "flag",
}

Choice = tuple[str, dict[str, Any]]  # op of engine.tune.choose, its key facts


ACT_BYTES = 2  # activations are 16-bit wherever messages cost time


def all_reduce_algorithm(tp: int, rows: int, hidden: int, allowed: Sequence[str]) -> str:
    """What sums [rows, hidden] 16-bit values over `tp` ranks: the tuned choice if the links allow it, else the
    first that they do. Decode steps have no rows to split: there two-shot is one-shot."""
    fit = [name for name in allowed if name != "two_shot" or rows > GEMV_MAX_ROWS] or ["lamport"]
    facts = {"world": tp, "nbytes": rows * hidden * ACT_BYTES}
    chosen: str = choose("all_reduce", facts).algorithm
    return chosen if chosen in fit else fit[0]


def algorithm_of(tp: int, allowed: Sequence[str]) -> Callable[[int, int], str]:
    """`all_reduce_algorithm` by (rows, hidden) for one graph, whose layers all ask the same."""
    return cache(lambda rows, hidden: all_reduce_algorithm(tp, rows, hidden, allowed))


def choice(
    op: Op,
    graph: Graph,
    weight_dtype: Callable[[str], torch.dtype],
    act: torch.dtype,
    kv_length: int,
) -> Choice | None:
    """The choice that configures `op`, or None for ops with nothing to choose.

    weight_dtype: dtype of a weight by name; kv_length: positions a slot's KV has room for.
    """
    if op.kind == "linear":
        (n, k), rows = op.input("w").shape, op.input("x").shape[0]
        facts = {
            "n": n, "k": k, "t": rows, "rows": rows, "tp": graph.tp,
            "weight_dtype": "w8a8" if op.find("x_scale") else weight_dtype(op.input("w").name),
            "epilogue": op.attrs.get("epilogue", "store"),
        }  # fmt: skip
        return ("gemm" if rows > GEMV_MAX_ROWS else "gemv"), facts
    if op.kind == "attention":
        heads = {key: op.attrs[key] for key in ("num_heads", "num_kv_heads", "head_dim")}
        rows = op.input("q").shape[0]
        facts = {
            **heads, "context": kv_length, "rows": rows, "t": rows,
            "kv_dtype": torch.float8_e4m3fn if op.find("k_scale") else act,
            "group": heads["num_heads"] // heads["num_kv_heads"],
        }  # fmt: skip
        return f"{graph.phase}_attention", facts
    if op.kind in ALGORITHM:
        rows, hidden = op.out.shape
        facts = {
            "world": graph.tp,
            "rows": rows,
            "hidden": hidden,
            "nbytes": rows * hidden * act.itemsize,
        }
        return "all_reduce", facts
    return None


def choices(
    graph: Graph, weight_dtype: Callable[[str], torch.dtype], act: torch.dtype, kv_length: int
) -> list[Choice]:
    """Every choice of a graph, in order, repeats included."""
    found = (choice(op, graph, weight_dtype, act, kv_length) for op in graph.ops)
    return [item for item in found if item is not None]
