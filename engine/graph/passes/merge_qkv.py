"""Three projections of one input become one matrix, and the ops behind them one `rope_append`."""

from __future__ import annotations

from dataclasses import replace

from engine.graph.ir import Graph, Op, Value, make_op
from engine.weights import WeightSpec


def merge_qkv(graph: Graph) -> Graph:
    """{linear q, linear k, linear v, [head_norm q, head_norm k,] rope q, rope k, kv_append} -> {linear qkv,
    rope_append} per layer."""
    weights = dict(graph.weights)
    layers: dict[int, dict[str, Op]] = {}
    for op in graph.ops:
        if op.layer is None:
            continue
        found = layers.setdefault(op.layer, {})
        if op.kind == "linear" and op.attrs["role"] in {"q", "k", "v"}:
            found[op.attrs["role"]] = op
        elif op.kind == "head_norm":
            found[f"{op.attrs['role']}_norm"] = op
        elif op.kind == "kv_append":
            found["append"] = op
        elif op.kind == "attention":
            found["attention"] = op
    ops: list[Op] = []
    for op in graph.ops:
        group = layers.get(op.layer, {}) if op.layer is not None else {}
        if "append" not in group:
            ops.append(op)
        elif op is group["append"]:
            ops += _merged(group, weights)
        elif op.kind in {"rope", "head_norm"} or (
            op.kind == "linear" and op.attrs["role"] in {"q", "k", "v"}
        ):
            continue  # part of the merged pair
        else:
            ops.append(op)
    return replace(graph, ops=tuple(ops), weights=weights)


def _merged(group: dict[str, Op], weights: dict[str, WeightSpec]) -> list[Op]:
    roles = [group[role] for role in ("q", "k", "v")]
    append, layer = group["append"], group["append"].layer
    values: dict[str, Value | None] = {}
    for which in ("w", "bias"):
        inputs = [op.find(which) for op in roles]
        if any(value is None for value in inputs):
            values[which] = None
            continue
        names = [value.name for value in inputs if value is not None]
        name = names[0].replace("q_proj", "qkv_proj")
        specs = [weights.pop(part) for part in names]
        parts = tuple(part for spec in specs for part in spec.parts)
        quantizable = all(spec.quantizable for spec in specs)
        weights[name] = WeightSpec(name, parts, quantizable=quantizable)
        values[which] = Value(name, weights[name].local_shape(), "act", "sharded", "weight")
    rows = roles[0].out.shape[0]
    width = sum(op.out.shape[1] for op in roles)
    qkv = Value(f"l{layer}.qkv", (rows, width), sharding="sharded")
    rope_q = group["attention"].input("q") if "attention" in group else roles[0].out
    linear = make_op(
        "linear",
        qkv,
        "qkv",
        layer,
        {"role": "qkv"},
        x=roles[0].input("x"),
        w=values["w"],
        bias=values["bias"],
    )
    table = Value("cos_sin", (0, append.attrs["head_dim"]), "f32", kind="state")
    attrs = {key: append.attrs[key] for key in ("num_heads", "num_kv_heads", "head_dim")}
    norms: dict[str, Value] = {}
    if "q_norm" in group:
        norms = {role: group[role].input("weight") for role in ("q_norm", "k_norm")}
        attrs["qk_norm_eps"] = group["q_norm"].attrs["eps"]
    rope = make_op(
        "rope_append", rope_q, "qkv", layer, {**attrs, "style": "half"},
        qkv=qkv, k_cache=append.input("k_cache"), v_cache=append.input("v_cache"),
        k_scale=append.find("k_scale"), v_scale=append.find("v_scale"), table=table,
        positions=append.input("positions"), where=append.input("where"), **norms,
    )  # fmt: skip
    return [linear, rope]
