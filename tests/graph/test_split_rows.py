"""The residual stream split by rows: which exchanges, that nobody else reads them, and that the sums stay the same."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch

from engine.config import preset, with_layers
from engine.graph.build import build
from engine.graph.interpret import Interpreter, StepInput
from engine.graph.ir import Value, make_op
from engine.graph.passes import PASSES, run_passes
from engine.graph.passes.split_rows import split_rows
from engine.graph.verify import GraphError, verify
from engine.kernels.epilogue import shard_rows
from tests.graph.models import Lockstep, save_model
from tests.graph.test_lower import BUCKET, LENGTH, PROMPT, TINY, Lowered, close, follow

STEPS = ["two_shot_scatter", "two_shot_publish", "two_shot_reduce", "two_shot_gather"]


def kinds_of(graph, site):
    return [
        op.attrs["epilogue"] if op.kind == "linear" else op.kind
        for op in graph.ops
        if op.attrs.get("site") == site
    ]


def built(tp=4, logits="all", rows=64, algorithms=("two_shot",)):
    config = with_layers(preset("qwen2.5-7b"), 3)
    return build(
        config, phase="prefill", rows=rows, tp=tp, logits=logits, algorithms=algorithms
    )  # fmt: skip


def before_split(**options):
    """The graph that the pass is given."""
    return passed(built(**options), PASSES[: PASSES.index(split_rows)])


def passed(graph, passes):
    for transform in passes:
        graph = transform(graph)
        verify(graph)
    return graph


@pytest.mark.parametrize("logits", ["all", "none", "last"])
def test_every_exchange_of_many_rows_is_split(logits):
    final = run_passes(built(logits=logits))
    many = {op.attrs["site"] for op in final.ops if "site" in op.attrs and op.out.shape[0] > 1}
    assert many == set(range({"all": 6, "none": 4, "last": 4}[logits]))
    assert all(kinds_of(final, site) == STEPS for site in many)
    # Between them no rank holds a whole hidden state, and no norm is left but the first.
    hidden = [op.outputs[1] for op in final.ops if op.kind == "two_shot_reduce"]
    assert all(value.sharding == "rows" for value in hidden)
    assert [op.layer for op in final.ops if op.kind == "rmsnorm"] == [0]
    residuals = [op.input("residual") for op in final.ops if op.kind == "two_shot_reduce"]
    assert residuals[0].sharding == "replicated" and residuals[1:] == hidden[:-1]
    lasts = [op.attrs["site"] for op in final.ops if op.kind == "two_shot_gather" and op.attrs.get("last")]  # fmt: skip
    assert lasts == ([3] if logits == "last" else [])


def with_reader(graph, site):
    """One more op that needs the whole hidden state behind exchange `site`; and where the exchange begins."""
    reduces = [op for op in graph.ops if op.kind == "all_reduce"]
    index = next(i for i, op in enumerate(graph.ops) if reduces[site].out in op.inputs)
    h = graph.ops[index].out
    reader = make_op("silu_mul", replace(h, name="reader"), "s", gate=h, up=h)
    ops = [*graph.ops[: index + 1], reader, *graph.ops[index + 1 :]]
    return replace(graph, ops=tuple(ops))


@pytest.mark.parametrize("site", [0, 2, 5])
def test_one_that_does_not_qualify_takes_along_those_whose_rows_it_needs(site):
    """Its residual is the hidden state of the one before, and so on; those behind it start from a whole one."""
    graph = split_rows(with_reader(before_split(), site))
    verify(graph)
    reduces = [op for op in graph.ops if op.kind == "all_reduce"]
    assert len(reduces) == site + 1
    split = [op for op in graph.ops if op.kind == "two_shot_reduce"]
    assert [op.attrs["site"] for op in split] == list(range(site + 1, 6))
    for i, op in enumerate(split):
        assert op.input("residual").sharding == ("rows" if i else "replicated")


def test_where_two_shot_is_not_the_choice_nothing_is_split():
    for algorithms in (("lamport",), ("lamport", "two_shot")):  # 64 rows of 7 KB: too few for it
        graph = before_split(rows=64, algorithms=algorithms)
        assert split_rows(graph) == graph
    few = before_split(rows=8)
    assert split_rows(few) == few


def test_the_verifier_refuses_readers_of_rows():
    graph = split_rows(before_split(logits="last"))
    h = next(op.outputs[1] for op in graph.ops if op.kind == "two_shot_reduce")
    where = Value("request", (3,), "i32", kind="input")
    readers = (
        make_op("silu_mul", replace(h, name="y", sharding="replicated"), "s", gate=h, up=h),
        make_op("gather_row", replace(h, name="y", shape=(1, h.shape[1])), "s", x=h, where=where),
        make_op("add", replace(h, name="y"), "s", x=h, residual=h),
    )
    for reader in readers:
        with pytest.raises(GraphError, match="reads rows that other ranks hold"):
            verify(replace(graph, ops=(*graph.ops, reader)))


def test_the_verifier_knows_the_steps():
    graph = split_rows(before_split(logits="last"))
    places = {op.kind: i for i, op in enumerate(graph.ops) if op.kind in STEPS}  # the last of each

    def broken(kind, match, **change):
        ops = list(graph.ops)
        ops[places[kind]] = replace(ops[places[kind]], **change)
        with pytest.raises(GraphError, match=match):
            verify(replace(graph, ops=tuple(ops)))

    reduce, gather = (graph.ops[places[kind]] for kind in STEPS[2:])
    whole = replace(reduce.outputs[1], sharding="replicated")
    broken("two_shot_reduce", "replicated hidden state", outputs=(reduce.out, whole))
    narrow = replace(gather.out, shape=(8, 8))
    broken("two_shot_gather", r"\(8, 8\)", outputs=(narrow, *gather.outputs[1:]))
    assert gather.attrs["last"]
    broken(
        "two_shot_gather", "the last row is", outputs=(gather.out, replace(gather.out, name="z"))
    )
    sent = graph.ops[places["two_shot_scatter"]].out
    broken("two_shot_scatter", "replicated", outputs=(replace(sent, sharding="replicated"),))


# ---- in the interpreter


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    save_model("llama", folder)
    return folder


def splits(model, rows, logits="all"):
    return sum(op.kind == "two_shot_reduce" for op in model.graph("prefill", rows, logits).ops)


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_fused_equals_unfused(folder, tp):
    """11 rows: 6, 3 or 2 a rank, at TP 8 none for the last two. Tolerance: tests/graph/test_interpret.py; against
    one-shot, whose sums have the same order, none."""
    ours = Lockstep(folder, tp, algorithms=("two_shot",))
    plain = Lockstep(folder, tp, fused=False)
    one_shot = Lockstep(folder, tp, algorithms=("lamport",))
    assert splits(ours, 64) == 6 and splits(plain, 64) == splits(one_shot, 64) == 0
    for logits in ("all", "last"):
        got, expected, same = (m.prefill(1, PROMPT, logits=logits) for m in (ours, plain, one_shot))
        whole = ours.vocab_logits(got)
        assert whole.shape[0] == (len(PROMPT) if logits == "all" else 1) and whole.isfinite().all()
        torch.testing.assert_close(whole, plain.vocab_logits(expected), atol=2e-4, rtol=2e-4)
        assert torch.equal(whole, one_shot.vocab_logits(same))
    got, expected = (m.decode([1]) for m in (ours, plain))  # on the KV that they left
    torch.testing.assert_close(
        ours.vocab_logits(got), plain.vocab_logits(expected), atol=2e-4, rtol=2e-4
    )


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_fp8_on_the_way_is_the_fp8_of_the_norms(folder, tp):
    """Quantised by the owner of a row or by its reader: the same values. 130 tokens: enough for FP8."""
    ids = torch.randint(0, 317, (130,), generator=torch.Generator().manual_seed(3)).tolist()

    def model(algorithm, fp8_prefill=True):
        return Lockstep(
            folder, tp, length=160, quantization="fp8", fp8_prefill=fp8_prefill, algorithms=(algorithm,),
        )  # fmt: skip

    ours, one_shot, sixteen = model("two_shot"), model("lamport"), model("two_shot", False)
    graph = ours.graph("prefill", 130, "all")
    within = [op for op in graph.ops if op.kind == "two_shot_reduce" and op.attrs.get("quantize")]
    assert len(within) == 5  # of 6: lm_head stays at 16 bits
    got, same, exact = (
        m.vocab_logits(m.prefill(1, ids, logits="all")) for m in (ours, one_shot, sixteen)
    )
    assert torch.equal(got, same)
    error = (got - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    assert 0.005 < error < 0.3, "nothing was quantised, or more than that is wrong"


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_the_oracle_holds_nan_where_a_rank_owns_nothing(folder, tp):
    """So what reads a row that its rank does not hold is seen in the logits."""
    ours = Lockstep(folder, tp, algorithms=("two_shot",))
    seen = []

    class Watched(Interpreter):
        def _two_shot_reduce(self, op, rank):
            y, h = super()._two_shot_reduce(op, rank)
            shard = shard_rows(len(h), tp)
            own = torch.zeros(len(h), dtype=torch.bool)
            own[rank * shard : (rank + 1) * shard] = True
            for value in (y, h):
                assert value[own].isfinite().all() and value[~own].isnan().all()
            seen.append(int(own.sum()))
            return y, h

    step = StepInput(prompt=torch.tensor(PROMPT, dtype=torch.int32), request=(1, 0, len(PROMPT)))
    graph = ours.graph("prefill", 64, "all")
    output = Watched(graph, ours.weights, ours.states).run(step)
    assert len(seen) == 6 * tp and sum(seen) == 6 * len(PROMPT)
    assert all(part.isfinite().all() for part in output.logits)
    # A reader of such a value (no verifier in between): NaN in the logits.
    index = next(i for i, op in enumerate(graph.ops) if op.kind == "linear" and op.layer == 1)
    h = next(op.outputs[1] for op in graph.ops if op.kind == "two_shot_reduce")
    linear = graph.ops[index]
    ops = list(graph.ops)
    ops[index] = replace(linear, inputs=(h, *linear.inputs[1:]))
    output = Interpreter(replace(graph, ops=tuple(ops)), ours.weights, ours.states).run(step)
    assert all(part.isnan().any() for part in output.logits)


@pytest.mark.parametrize("site", [1, 3])
def test_mixed_graphs_are_the_same_sum(folder, site):
    """Whole hidden states up to an exchange that something else reads, rows behind it."""
    ours = Lockstep(folder, 4, algorithms=("two_shot",))
    graph = build(
        ours.config, phase="prefill", rows=64, tp=4, logits="all", algorithms=("two_shot",)
    )  # fmt: skip
    at = PASSES.index(split_rows)
    mixed = passed(with_reader(passed(graph, PASSES[:at]), site), PASSES[at:])
    step = StepInput(prompt=torch.tensor(PROMPT, dtype=torch.int32), request=(1, 0, len(PROMPT)))
    expected = ours.vocab_logits(ours.run(ours.graph("prefill", 64, "all"), step))
    assert sum(op.kind == "two_shot_reduce" for op in mixed.ops) == 5 - site
    assert torch.equal(ours.vocab_logits(ours.run(mixed, step)), expected)


# ---- lowered: Triton's interpreter or a card


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen2")
    save_model("qwen2", folder, overrides=TINY)
    return folder


@pytest.mark.parametrize("fp8", [False, True])
def test_lowered_bits_are_those_of_one_shot(tiny, fp8, monkeypatch):
    """TP 2, in two chunks, then a decode step: the residual stream split by rows leaves the same logits and KV."""
    monkeypatch.setattr(
        sys.modules["engine.graph.passes.quantize_prefill"], "FP8_MIN_TOKENS", BUCKET
    )
    options = dict(quantization="fp8", fp8_prefill=True) if fp8 else {}
    ours, one_shot = (
        Lowered(tiny, 2, algorithms=(name,), **options) for name in ("two_shot", "lamport")
    )
    names = {launch.kernel for launch in ours.lines[("prefill", BUCKET, "last")][0]}
    assert f"two_shot_reduce+{'quantize' if fp8 else 'norm'}" in names
    oracle = None if fp8 else Lockstep(tiny, 1, length=LENGTH)
    last = ("prefill", BUCKET, "last")
    for model in (ours, one_shot):
        model.prefill(1, PROMPT[:6], logits="none")
        model.prefill(1, PROMPT[6:], start=6)
    assert torch.equal(ours.logits(last), one_shot.logits(last))
    if oracle is not None:
        close(ours.logits(last), oracle.vocab_logits(oracle.prefill(1, PROMPT)))
        follow(ours, oracle, ours.logits(last), {0: 1})
    for rank, other in zip(ours.ranks, one_shot.ranks):
        for mine, theirs in zip(rank.state.k_cache, other.state.k_cache):
            assert torch.equal(mine[1, :, : len(PROMPT)], theirs[1, :, : len(PROMPT)])
        assert rank.status.tolist() == [0] * 8
    for model in (ours, one_shot):
        model.decode([1])
    assert torch.equal(ours.logits(("decode", 1, "last")), one_shot.logits(("decode", 1, "last")))
