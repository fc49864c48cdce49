"""The verifier: run after every pass, so that a broken rewrite is found where it happened."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field, replace

from engine.graph.ir import OP_KINDS, SENDS, Graph, Op, Value
from engine.weights import WeightSpec


class GraphError(AssertionError):
    """A pass produced an inconsistent graph: our bug, not the user's."""


@dataclass
class Checked:
    """What has been found right about a graph in the making. A pass leaves most ops as they are, so what is true of
    an op or a weight by itself is looked at once; the line that they form, each time that it changes."""

    ops: dict[int, Op] = field(default_factory=dict)  # by id(); held, so that no id is used again
    weights: dict[str, tuple[WeightSpec, tuple[int, ...]]] = field(default_factory=dict)
    last: Graph | None = None


def verify(graph: Graph, checked: Checked | None = None) -> None:
    """Definition before use, single assignment, known kinds, shapes, sharding, weights. Raises GraphError.

    checked: of the graphs that this one was made from; added to.
    """
    checked = checked or Checked()
    if checked.last is not None and _same(graph, checked.last):
        return
    defined: dict[str, Value] = {}
    used_weights: set[str] = set()
    for i, op in enumerate(graph.ops):
        for value in op.inputs:
            if value.kind == "temp":
                found = defined.get(value.name)
                if found is not value and found != value:
                    raise GraphError(f"{_where(graph, i)}: reads {value} before it is defined")
            elif value.kind == "weight":
                used_weights.add(value.name)
                known, spec = checked.weights.get(value.name), graph.weights.get(value.name)
                if known is None or known[0] is not spec or known[1] != value.shape:
                    checked.weights[value.name] = _check_weight(graph, value, _where(graph, i))
        for value in op.outputs:
            if value.kind == "temp" and value.name in defined:
                raise GraphError(f"{_where(graph, i)}: {value} is defined twice")
            defined[value.name] = value
        if id(op) not in checked.ops:
            _check_alone(op, graph.tp, _where(graph, i))
            checked.ops[id(op)] = op
    if graph.output is not None and defined.get(graph.output.name) != graph.output:
        raise GraphError(f"{graph.model} {graph.phase}: output {graph.output} is never defined")
    if not used_weights <= set(graph.weights):
        raise GraphError(f"weights without a spec: {sorted(used_weights - set(graph.weights))[:5]}")
    checked.last = graph


def _same(graph: Graph, other: Graph) -> bool:
    """Whether a pass had nothing to do: the very same ops, weights and output."""
    return (
        len(graph.ops) == len(other.ops)
        and all(map(operator.is_, graph.ops, other.ops))
        and graph.weights is other.weights
        and graph.output is other.output
    )


def _where(graph: Graph, index: int) -> str:
    op = graph.ops[index]
    return f"{graph.model} {graph.phase} op {index} ({op.kind}, layer {op.layer})"


def _check_weight(graph: Graph, value: Value, where: str) -> tuple[WeightSpec, tuple[int, ...]]:
    spec = graph.weights.get(value.name)
    if spec is None:
        raise GraphError(f"{where}: weight {value} has no spec")
    for rank in range(graph.tp):
        if spec.local_shape(rank) != value.shape:
            raise GraphError(
                f"{where}: {value} is {value.shape}, its spec gives {spec.local_shape(rank)}"
            )
    return spec, value.shape


def _check_alone(op: Op, tp: int, where: str) -> None:
    """What needs no other op."""
    if op.kind not in OP_KINDS:
        raise GraphError(f"{where}: unknown kind")
    if len(op.attrs.get("roles", ())) != len(op.inputs):
        raise GraphError(f"{where}: roles do not match the inputs")
    if op.kind not in _TWO_SHOT and any(value.sharding == "rows" for value in op.inputs):
        raise GraphError(f"{where}: reads rows that other ranks hold")
    _check_op(op, tp, where)
    _check_cache(op, where)


def _check_op(op: Op, tp: int, where: str) -> None:
    shapes = {role: value.shape for role, value in zip(op.attrs["roles"], op.inputs)}
    if op.kind == "linear":
        rows, k = shapes["x"]
        n, k_weight = shapes["w"]
        epilogue = op.attrs.get("epilogue", "store")
        out = {
            "silu_mul": n // 2,
            "rope_append": op.attrs.get("num_heads", 0) * op.attrs.get("head_dim", 0),
        }.get(epilogue, n)
        _check_outputs(op, where)
        if k != k_weight or op.out.shape != (rows, out):
            raise GraphError(
                f"{where}: x {shapes['x']} @ w {shapes['w']} -> {op.out.shape} ({epilogue})"
            )
        if (op.input("x").dtype == "fp8") != ("x_scale" in shapes):
            raise GraphError(f"{where}: an FP8 x needs x_scale, and only that takes one")
        # A contraction over a sharded axis gives a partial sum, and only that does.
        split_k = op.input("x").sharding == "sharded"
        summed = op.out.sharding == "partial"
        if tp > 1 and split_k != summed:
            raise GraphError(
                f"{where}: x is {op.input('x').sharding}, its result {op.out.sharding}"
            )
    elif op.kind == "argmax_partial":
        _check_maxima(op.input("logits"), op.out, where)
    elif op.kind in _TWO_SHOT:
        _check_two_shot(op, where)
    elif op.kind == "add" or "site" in op.attrs:
        _check_sum(op, where)
    elif op.kind == "all_reduce":
        _check_partial(op.input("x"), where)
    elif op.kind == "gather_row":
        _check_gathered(op.input("x"), op.out, where)
    elif op.kind in {"rmsnorm", "rmsnorm_quantize"}:
        if op.input("x").sharding != "replicated" or shapes["weight"] != shapes["x"][-1:]:
            raise GraphError(f"{where}: a norm needs whole rows: {shapes}")
        if op.kind == "rmsnorm_quantize":
            _check_quantized(op, where)
    elif op.kind == "quantize_rows":
        _check_quantized(op, where)
    elif op.kind == "head_norm":
        if shapes["weight"] != (op.attrs["head_dim"],) or shapes["x"] != op.out.shape:
            raise GraphError(f"{where}: {shapes} -> {op.out.shape}")
    elif op.kind == "rope_append" and "q_norm" in shapes:
        if not shapes["q_norm"] == shapes["k_norm"] == (op.attrs["head_dim"],):
            raise GraphError(f"{where}: a norm over heads of {op.attrs['head_dim']}: {shapes}")
    elif op.kind == "silu_mul" and "x" in shapes and shapes["x"][1] != 2 * op.out.shape[1]:
        raise GraphError(f"{where}: {shapes['x']} -> {op.out.shape}")


_TWO_SHOT = frozenset(
    {"two_shot_scatter", "two_shot_publish", "two_shot_reduce", "two_shot_gather"}
)


def _check_two_shot(op: Op, where: str) -> None:
    """Partial sums in; a hidden state of own rows, and whole rows of its norm, out."""
    _check_partial(op.inputs[0], where)
    shape = op.inputs[0].shape
    if op.kind == "two_shot_reduce":
        residual, h = op.input("residual"), op.outputs[1]
        if residual.sharding not in ("replicated", "rows") or h.sharding != "rows":
            raise GraphError(f"{where}: {residual.sharding} residual, {h.sharding} hidden state")
        if not residual.shape == h.shape == op.out.shape == shape:
            raise GraphError(f"{where}: {shape} + {residual.shape} -> {h.shape}")
        if op.input("weight").shape != shape[1:]:
            raise GraphError(f"{where}: norm weight {op.input('weight').shape} for {shape}")
    elif op.kind == "two_shot_gather":
        last = op.outputs[-1:] if op.attrs.get("last") else ()
        y = op.outputs[: len(op.outputs) - len(last)]
        dtypes = tuple(value.dtype for value in y)
        if dtypes not in (("act",), ("fp8", "f32")) or y[0].shape != shape:
            raise GraphError(f"{where}: {shape} -> {dtypes} {y[0].shape}")
        if any(value.shape != (1, shape[1]) for value in last):
            raise GraphError(f"{where}: the last row is {last[0].shape}")
    elif op.out.sharding != "partial" or op.out.shape != shape:
        raise GraphError(f"{where}: {op.out.sharding} {op.out.shape} of {shape}")


def _check_maxima(logits: Value, best: Value, where: str) -> None:
    if logits.dtype != "f32" or best.dtype != "f32" or best.shape != (logits.shape[0], 2):
        raise GraphError(f"{where}: maxima of {logits.dtype} {logits.shape} -> {best.shape}")


def _check_gathered(x: Value, row: Value, where: str) -> None:
    if x.sharding == "partial" or row != replace(x, name=row.name, shape=(1, *x.shape[1:])):
        raise GraphError(f"{where}: a row of {x.sharding} {x.shape} -> {row.sharding} {row.shape}")


def _check_sum(op: Op, where: str) -> None:
    """A residual add, or one step of an all-reduce."""
    if {value.shape for value in op.inputs} != {op.out.shape}:
        raise GraphError(f"{where}: {[value.shape for value in op.inputs]} -> {op.out.shape}")
    residual = op.find("residual")
    if residual is not None and residual.sharding != "replicated":
        raise GraphError(f"{where}: the residual stream is replicated")
    if op.kind != "add":
        _check_partial(op.inputs[0], where)
    expected = "partial" if op.kind in SENDS else "replicated"
    if op.out.sharding != expected:
        raise GraphError(f"{where}: its result is {expected}, not {op.out.sharding}")


def _check_outputs(op: Op, where: str) -> None:
    """Of a linear: its result; the maxima, if it has them; the hidden state, if it polls."""
    maxima = op.attrs.get("epilogue") == "maxima"
    if len(op.outputs) != 1 + maxima + op.polls:
        raise GraphError(f"{where}: {len(op.outputs)} outputs")
    if maxima:
        _check_maxima(op.out, op.outputs[1], where)
    if op.polls:
        _check_polled(op, where)


def _check_polled(op: Op, where: str) -> None:
    """A linear that polls writes the hidden state and sends nothing itself."""
    message, hidden = op.input("message"), op.outputs[-1]
    if not message.shape == hidden.shape == op.input("x").shape:
        raise GraphError(f"{where}: {message.shape} + {op.input('x').shape} -> {hidden.shape}")
    _check_partial(message, where)
    if hidden.sharding != "replicated" or op.input("x").sharding != "replicated":
        raise GraphError(f"{where}: the residual stream is replicated")
    if op.is_send:
        raise GraphError(f"{where}: a launch that waits in its prologue must not send")


def _check_partial(value: Value, where: str) -> None:
    if value.sharding != "partial":
        raise GraphError(f"{where}: {value} is {value.sharding}, not a partial sum")


def _check_cache(op: Op, where: str) -> None:
    roles = op.attrs["roles"]
    if "k_cache" not in roles:
        return
    scaled = [role for role in "kv" if op.input(f"{role}_cache").dtype == "fp8"]
    if scaled != [role for role in "kv" if f"{role}_scale" in roles] or len(scaled) == 1:
        raise GraphError(f"{where}: FP8 caches, and only those, have scales: {sorted(roles)}")
    if scaled and op.kind == "linear":
        raise GraphError(f"{where}: a linear's tile is no whole head, which a scale needs")


def _check_quantized(op: Op, where: str) -> None:
    x8, scale = op.outputs
    x = op.input("x")
    if (x8.shape, x8.dtype, scale.shape, scale.dtype) != (x.shape, "fp8", x.shape[:1], "f32"):
        raise GraphError(
            f"{where}: {x.shape} -> {x8.dtype} {x8.shape}, {scale.dtype} {scale.shape}"
        )
    if not x8.sharding == scale.sharding == x.sharding:
        raise GraphError(f"{where}: {x.sharding} -> {x8.sharding}, {scale.sharding}")
