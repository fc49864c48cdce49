"""The graph: a straight line of ops over values that carry shape, dtype and sharding.

One graph is one step of one phase (a decode step of R rows, or a prefill bucket of T tokens) as EVERY
rank runs it: shapes are per rank, `sharding` says what the ranks' tensors mean together. Values are in
single-assignment form except `state`, which lives across steps (KV caches, tokens, positions) and is
read and written in program order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from engine.weights import WeightSpec

# rows: every rank has the shape of the whole, and the values of the rows that it owns (kernels/two_shot.py).
Sharding = Literal["replicated", "sharded", "partial", "rows"]
Dtype = Literal["act", "f32", "i32", "fp8"]
Kind = Literal["temp", "weight", "state", "input"]
Phase = Literal["decode", "prefill"]

# Op kinds and what they mean (x, y: temps; w: weight; shapes per rank):
OP_KINDS: dict[str, str] = {
    "embedding": "y[n,H] = table[tokens]",
    "rmsnorm": "y = x / rms(x) * weight",
    "linear": "y[n,N] = x[n,K] @ w[N,K]^T (+ bias); attrs norm_eps: x is RMS-normalised with the "
    "norm weight first; epilogue: store | silu_mul | rope_append | residual | push | two_shot_scatter | maxima (a second "
    "output, that of argmax_partial); with an x_scale [n], x is FP8; with a message, x is the residual: h = "
    "x + the message summed over ranks takes its place and is the last output",
    "quantize_rows": "y, scale[n] = x / scale as FP8, max |x| / 448 of each row",
    "rmsnorm_quantize": "the same of rmsnorm(x)",
    "head_norm": "y = x / rms(x) * weight over each head of q or k (QK-norm)",
    "rope": "rotate q or k by position (style half or pairs)",
    "kv_append": "write k, v at the rows' positions; inputs k_scale, v_scale: quantised, one scale a head vector",
    "rope_append": "split qkv, rotate q and k, append k and v; y = q; inputs q_norm, k_norm: each head of q and k "
    "is RMS-normalised first",
    "attention": "GQA attention of q over the KV cache; causal",
    "silu_mul": "y = silu(gate) * up; one input of interleaved pairs, or two",
    "add": "y = x + residual",
    "all_reduce": "y = sum of x over the ranks",
    "push": "send the partial sum into every rank's slot (one-shot all-reduce, first half)",
    "poll_residual": "y = residual + sum over ranks of the slot (second half)",
    "two_shot_scatter": "send each row of the partial sum to its owner (two-shot all-reduce, first of four)",
    "two_shot_publish": "tell every rank that its rows are there",
    "two_shot_reduce": "h = residual + sum over ranks, of the own rows; its norm, as FP8 with attrs quantize, sent to "
    "every rank; outputs: the message, h",
    "two_shot_gather": "y = the norm of all rows (y and scale[n] if it is FP8); attrs last: and h of row length - 1",
    "flag_publish": "lay the partial sum open to the peers and raise a flag (flag all-reduce, first half)",
    "flag_reduce": "y = residual + sum over ranks, read from the peers behind their flags (second half)",
    "nccl_gather": "NCCL carries every rank's message into every rank's slot, where there is no peer access: "
    "a send reaches the own slot only, and a wait finds all messages there",
    "gather_row": "y[1,H] = x[length - 1]",
    "sample": "token = argmax(logits / T + noise) over all vocabulary shards; updates the state",
    "argmax_partial": "per-program (value, id) maxima of the rank's vocabulary shard",
    "argmax_push": "send the rank's (value, id) to every rank",
    "argmax_poll": "pick the winner of all ranks; write token, position and the host ring",
    "argmax_finish": "the same for one rank, with no exchange",
    "sample_adjust": "scores = logits with penalties and bias (one rank)",
    "sample_push": "the same, sent to every rank",
    "sample_gather": "wait for the scores of all ranks",
    "sample_search": "one hex digit of the rows' top-k or top-p threshold",
    "sample_pick": "per-program (value, id) maxima of the scores that the thresholds keep",
    "sample_settle": "pick the winner; write token, counts and the host ring",
}


# Launches that other ranks depend on, and launches that depend on other ranks.
SENDS = frozenset(
    {"push", "two_shot_scatter", "two_shot_publish", "two_shot_reduce", "flag_publish"}
    | {"nccl_gather"}
    | {"argmax_push", "sample_push"}
)
WAITS = frozenset(
    {"poll_residual", "two_shot_reduce", "two_shot_gather", "flag_reduce"}
    | {"argmax_poll", "sample_gather"}
)


@dataclass(frozen=True)
class Value:
    """A tensor of the graph. `shape` is per rank; `dtype` "act" is the engine's activation type."""

    name: str
    shape: tuple[int, ...]
    dtype: Dtype = "act"
    sharding: Sharding = "replicated"
    kind: Kind = "temp"

    def __hash__(
        self,
    ) -> int:  # names are unique in a graph; hashing every field took a third of the passes' time
        return hash(self.name)

    def __str__(self) -> str:
        return f"%{self.name}" if self.kind == "temp" else self.name


@dataclass(frozen=True)
class Op:
    """One step. `stage` names the row of the profile that its time belongs to."""

    kind: str
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    stage: str
    layer: int | None = None
    attrs: dict[str, Any] = field(default_factory=dict)

    def input(self, role: str) -> Value:
        """The input with a named role (attrs["roles"] lists the roles in input order)."""
        return self.inputs[self.attrs["roles"].index(role)]

    def find(self, role: str) -> Value | None:
        """As `input`, or None if the op has no such input."""
        roles = self.attrs["roles"]
        return self.inputs[roles.index(role)] if role in roles else None

    @property
    def out(self) -> Value:
        """The output; of an op with several, the first."""
        return self.outputs[0]

    @property
    def is_send(self) -> bool:
        """Whether other ranks depend on it: it writes into their memory."""
        return self.kind in SENDS or self.attrs.get("epilogue") in SENDS

    @property
    def polls(self) -> bool:
        """Whether it is a linear that waits for an all-reduce itself: its last output is the hidden state."""
        return self.kind == "linear" and self.find("message") is not None

    @property
    def is_wait(self) -> bool:
        """Whether it depends on other ranks' sends."""
        return self.kind in WAITS or self.polls


def make_op(
    kind: str,
    outputs: tuple[Value, ...] | Value,
    stage: str,
    layer: int | None = None,
    attrs: dict[str, Any] | None = None,
    **inputs: Value | None,
) -> Op:
    """Op with named inputs; those given as None are left out."""
    given = {role: value for role, value in inputs.items() if value is not None}
    outs = outputs if isinstance(outputs, tuple) else (outputs,)
    return Op(
        kind, tuple(given.values()), outs, stage, layer, {**(attrs or {}), "roles": tuple(given)}
    )


@dataclass(frozen=True)
class Graph:
    """One phase of one model at one TP degree. `weights` maps weight values' names to their specs."""

    phase: Phase
    rows: int  # decode rows R, or prefill bucket T
    tp: int
    model: str
    ops: tuple[Op, ...]
    weights: dict[str, WeightSpec]
    output: Value | None  # logits [rows, V] of this rank, None for a prefill chunk without lm_head
    passes: tuple[str, ...] = ()
    fp8_prefill: bool = False  # quantizable weights are FP8, and long prefills may make x FP8 too
    # All-reduce algorithms that the links allow; the tuned choice among them, else the first.
    algorithms: tuple[str, ...] = ("lamport", "two_shot", "flag")

    @property
    def fp8_kv(self) -> bool:
        """Whether the KV cache is e4m3 with scales."""
        return any(op.find("k_scale") is not None for op in self.ops)

    def consumers(self) -> dict[Value, list[int]]:
        """Value -> indices of the ops that read it."""
        uses: dict[Value, list[int]] = {}
        for i, op in enumerate(self.ops):
            for value in op.inputs:
                uses.setdefault(value, []).append(i)
        return uses

    def producers(self) -> dict[Value, int]:
        """Temp -> index of the op that writes it."""
        return {value: i for i, op in enumerate(self.ops) for value in op.outputs}

    def temps(self) -> Iterator[Value]:
        """Every temp in order of definition."""
        for op in self.ops:
            yield from (value for value in op.outputs if value.kind == "temp")


def state(
    name: str, shape: tuple[int, ...], dtype: Dtype, sharding: Sharding = "replicated"
) -> Value:
    """A value that lives across steps."""
    return Value(name, shape, dtype, sharding, "state")


def allowed_algorithms(all_reduce: str) -> tuple[str, ...]:
    """`Graph.algorithms` under --all-reduce, where no links have been probed."""
    return Graph.algorithms if all_reduce == "auto" else (all_reduce,)
