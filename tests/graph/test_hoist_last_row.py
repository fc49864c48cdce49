"""The sampled row's way up: what has one row after the passes, what keeps all, and that the kernels agree."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from engine.config import PRESETS, preset, with_layers
from engine.graph.build import build
from engine.graph.ir import Graph, Value, make_op
from engine.graph.passes import run_passes
from engine.graph.passes.hoist_last_row import hoist_last_row
from engine.graph.passes.place_all_reduce import place_all_reduce
from engine.graph.verify import GraphError, verify
from engine.kernels.all_reduce import AllReduceConfig
from engine.runtime.exchange import graph_exchange, planned_exchange
from engine.tune.choose import remove_override, set_override
from tests.graph.models import Lockstep, save_model
from tests.graph.test_lower import BUCKET, LENGTH, PROMPT, TINY, Lowered, close, follow

LAYERS, TOKENS = 3, 64


def graph_of(name, tp, logits="last", phase="prefill", rows=TOKENS, **options):
    config = with_layers(preset(name), LAYERS)
    return build(config, phase=phase, rows=rows, tp=tp, logits=logits, **options)


def kinds(ops):
    """Kind, or epilogue of a linear."""
    return [op.attrs.get("epilogue", op.kind) if op.kind == "linear" else op.kind for op in ops]


MODELS = [(name, tp) for name, config in PRESETS.items() for tp in config.valid_tp()]


@pytest.mark.parametrize("name,tp", MODELS)
def test_behind_its_attention_the_last_layer_has_one_row(name, tp):
    final = run_passes(graph_of(name, tp))
    (attention,) = (i for i, op in enumerate(final.ops) if op.kind == "attention" and op.layer == 2)
    behind = final.ops[attention + 1 :]
    gather, *rest = behind
    assert gather.kind == "gather_row" and gather.input("x") == final.ops[attention].out
    for op in rest:
        shapes = [v.shape for v in (*op.inputs, *op.outputs) if v.kind == "temp"]
        assert all(shape[0] == 1 for shape in shapes), op
    one = ["residual", "silu_mul", "residual"]
    if tp > 1:
        one = ["push", "poll_residual", "silu_mul", "push", "poll_residual"]
    assert kinds(rest)[: len(one) + 1] == [*one, "maxima"]
    assert all(
        "norm_eps" in op.attrs for op in rest if op.attrs.get("role") in {"gate_up", "lm_head"}
    )
    # The rest of the graph has all rows: the K and V that the next tokens read.
    whole = [
        v.shape[0] for op in final.ops[: attention + 1] for v in op.outputs if v.kind == "temp"
    ]
    assert Counter(whole) == {TOKENS: len(whole) - 1, 1: 1}  # the residual's last row
    # Of the attention's rows, and of the hidden state's, which a two-shot exchange sends along.
    sent_along = any(op.attrs.get("last") for op in final.ops if op.kind == "two_shot_gather")
    assert Counter(op.kind for op in final.ops)["gather_row"] == 2 - sent_along
    assert sent_along == any(op.kind == "two_shot_gather" for op in final.ops)


@pytest.mark.parametrize("tp", [1, 4])
@pytest.mark.parametrize(
    "phase,logits", [("decode", "last"), ("prefill", "all"), ("prefill", "none")]
)
def test_graphs_that_gather_no_row_stay_as_they_are(phase, logits, tp):
    graph = place_all_reduce(graph_of("qwen2.5-7b", tp, logits, phase, 8))
    assert hoist_last_row(graph) == graph


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_only_the_last_two_exchanges_are_of_one_row(tp):
    final = run_passes(graph_of("qwen2.5-72b", tp, rows=2048))
    rows = {op.attrs["site"]: op.out.shape[0] for op in final.ops if "site" in op.attrs}
    assert rows == {0: 2048, 1: 2048, 2: 2048, 3: 2048, 4: 1, 5: 1}
    assert not any(op.polls for op in final.ops)  # their slots would not rotate (kernels/slots.py)


def line(*ops, output=None):
    """A graph of these ops on %x, which an embedding makes."""
    x, tokens = Value("x", (8, 16)), Value("prompt", (8,), "i32", kind="input")
    ops = (make_op("embedding", x, "s", tokens=tokens), *ops)
    return Graph("prefill", 8, 1, "m", ops, {}, output)


def names(graph):
    return [(op.kind, [v.name for v in op.inputs[: 2 if op.kind == "add" else 1]], op.out.shape[0])
            for op in graph.ops[1:]]  # fmt: skip


def test_by_the_kinds_of_ops_alone():
    """Gathers of one value become one; what is read whole too, or mixes rows, is gathered itself."""
    x, where = Value("x", (8, 16)), Value("request", (3,), "i32", kind="input")

    def value(name, rows=8):
        return Value(name, (rows, 16))

    def add(out, a, b):
        return make_op("add", value(out), "s", x=value(a), residual=value(b))

    def gather(out, of):
        return make_op("gather_row", value(out, 1), "s", x=value(of), where=where)

    use = make_op("add", value("z", 1), "s", x=value("r", 1), residual=value("t", 1))
    twice = line(add("a", "x", "x"), gather("r", "a"), gather("t", "a"), use, output=value("z", 1))
    moved = hoist_last_row(twice)
    verify(moved)
    assert names(moved) == [
        ("gather_row", ["x"], 1), ("add", ["x_row", "x_row"], 1), ("add", ["a", "a"], 1)
    ]  # fmt: skip

    end = make_op("silu_mul", value("z", 1), "s", gate=value("r", 1), up=value("r", 1))
    for first, output, stays in (
        (add("a", "x", "x"), value("a"), 8),  # the output needs all its rows
        (make_op("head_norm", value("a"), "s", x=x, weight=x), value("z", 1), 8),  # not row-wise
    ):
        graph = line(first, gather("r", "a"), end, output=output)
        kept = hoist_last_row(graph)
        assert [op.out.shape[0] for op in kept.ops[1:]] == [stays, 1, 1]
        assert [op.kind for op in kept.ops] == [op.kind for op in graph.ops]
    # b moves; a, which head_norm reads whole, does not.
    whole = make_op("head_norm", value("n"), "s", x=value("a"), weight=x)
    kept = hoist_last_row(
        line(
            add("a", "x", "x"),
            whole,
            add("b", "a", "a"),
            gather("r", "b"),
            end,
            output=value("z", 1),
        )
    )
    assert names(kept) == [
        ("add", ["x", "x"], 8), ("gather_row", ["a"], 1), ("head_norm", ["a"], 8),
        ("add", ["a_row", "a_row"], 1), ("silu_mul", ["b"], 1),
    ]  # fmt: skip


def test_verifier_knows_what_a_row_is():
    graph = run_passes(graph_of("qwen2.5-7b", 2))
    index = next(i for i, op in enumerate(graph.ops) if op.kind == "gather_row")
    for change in ({"shape": (2, 3584)}, {"sharding": "sharded"}, {"dtype": "f32"}):
        row = replace(graph.ops[index].out, **change)
        ops = list(graph.ops)
        ops[index] = replace(ops[index], outputs=(row,))
        with pytest.raises(GraphError, match="a row of replicated"):
            verify(replace(graph, ops=tuple(ops)))


def test_buffers_hold_the_messages_of_one_row():
    """Where long messages take the flag barrier, only the last layer's need slots."""
    key = {"world": 4, "nbytes": TOKENS * 16384}
    set_override("all_reduce", AllReduceConfig("flag"), key)
    try:
        final = run_passes(graph_of("qwen2.5-72b", 4))
        sizes = graph_exchange([final])
        assert sizes.flag is not None and sizes.slot_bytes == 4 * 16384
        assert sizes == planned_exchange(4, 8192, LAYERS, [TOKENS], Graph.algorithms)
    finally:
        remove_override("all_reduce", key)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("qwen2")
    save_model("qwen2", path, overrides=TINY)
    return path


@pytest.mark.parametrize("algorithm", ["lamport", "two_shot", "flag"])
def test_lowered_exchanges_of_many_rows_and_of_one(folder, algorithm):
    """TP 4, in Triton's interpreter or on a card: `algorithm` for a bucket's messages, pushes by GEMVs for the last
    row's; prompts of any length in the bucket, a decode step between."""
    key = {"world": 4, "nbytes": BUCKET * TINY["hidden_size"] * 2}
    set_override("all_reduce", AllReduceConfig(algorithm), key)
    try:
        ours = Lowered(folder, 4)
    finally:
        remove_override("all_reduce", key)
    last = ("prefill", BUCKET, "last")
    kernels = Counter(launch.kernel for launch in ours.lines[last][0])
    assert kernels["gemv+Push"] == 2 and kernels["gather_row"] == 2 - (algorithm == "two_shot")
    assert kernels["two_shot_gather"] == 2 * (algorithm == "two_shot")
    assert kernels["poll_residual"] == (4 if algorithm == "lamport" else 2)
    oracle = Lockstep(folder, 1, length=LENGTH)
    for slot, prompt in ((1, PROMPT), (0, PROMPT[:1]), (1, [*PROMPT, 9, 8, 7, 6, 5])):
        ours.prefill(slot, prompt)
        logits = ours.logits(last)
        close(logits, oracle.vocab_logits(oracle.prefill(slot, prompt)))
        follow(ours, oracle, logits, {0: slot})
        ours.decode([slot])
        logits = ours.logits(("decode", 1, "last"))
        close(logits, oracle.vocab_logits(oracle.decode([slot])))
        follow(ours, oracle, logits, {0: slot})
    for rank in ours.ranks:
        assert rank.status.tolist() == [0] * 8
        # Every word that was sent has been read and re-armed.
        slots = rank.exchange[: 2 * rank.exchange_slot_bytes].view(torch.int32)
        assert bool((slots == -2147450880).all())
