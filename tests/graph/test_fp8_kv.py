"""FP8 KV in the graph: what it changes, fused == unfused at every TP degree, the cost in accuracy, the kernels."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace

import pytest
import torch

from engine.checkpoint.memory import kv_bytes_per_token
from engine.config import preset, with_layers
from engine.graph.build import build
from engine.graph.dump import dump_graph
from engine.graph.facts import choices
from engine.graph.passes import run_passes
from engine.graph.passes.fuse_epilogue import fuse_epilogue
from engine.graph.verify import GraphError, verify
from engine.kernels.kv_fp8 import read_kv, write_kv
from engine.kernels.quantize_rows import FP8, quantize_rows_ref
from engine.model.costs import op_costs
from engine.tune import choose
from tests.graph.models import Lockstep, save_model
from tests.graph.test_interpret import PROMPT, cases
from tests.graph.test_lower import BUCKET, LENGTH, TINY, Lowered, follow

LAYERS = 2
SHAPES = ("qwen2", "llama", "qwen3")  # biases and groups of 7; 8 KV heads; QK-norm


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}
    for shape in SHAPES:
        made[shape] = tmp_path_factory.mktemp(shape)
        save_model(shape, made[shape])
    return made


def graph(phase, rows, tp=1, model="qwen2.5-7b", fp8_kv=True):
    config = with_layers(preset(model), LAYERS)
    return build(config, phase=phase, rows=rows, tp=tp, fp8_kv=fp8_kv)


# Structure


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_decode_appends_in_a_launch_of_its_own(tp):
    """The price of a scale over a whole head: one launch a layer where RoPE was the GEMV's epilogue."""
    wide, narrow = (run_passes(graph("decode", 1, tp, fp8_kv=fp8)) for fp8 in (False, True))
    assert narrow.fp8_kv and not wide.fp8_kv
    assert len(narrow.ops) == len(wide.ops) + LAYERS
    kinds = Counter(op.kind for op in narrow.ops)
    assert kinds["rope_append"] == LAYERS and not Counter(op.kind for op in wide.ops)["rope_append"]
    for op in narrow.ops:
        if op.kind in {"rope_append", "attention"}:
            assert op.input("k_cache").dtype == op.input("v_cache").dtype == "fp8"
            assert op.input("k_scale").shape == op.input("k_cache").shape[:3]


def test_prefill_and_qk_norm_models_gain_no_launch():
    for phase, rows, model in (("prefill", 512, "qwen2.5-7b"), ("decode", 4, "qwen3-8b")):
        wide, narrow = (
            run_passes(graph(phase, rows, model=model, fp8_kv=fp8)) for fp8 in (False, True)
        )
        assert [op.kind for op in narrow.ops] == [op.kind for op in wide.ops]


def test_verifier_wants_scales_with_fp8_and_no_fused_append():
    unfused = graph("decode", 1)
    verify(unfused)
    op = next(op for op in unfused.ops if op.kind == "kv_append")
    roles = [role for role in op.attrs["roles"] if role != "v_scale"]
    inputs = tuple(op.input(role) for role in roles)
    bad = replace(op, inputs=inputs, attrs={**op.attrs, "roles": tuple(roles)})
    ops = tuple(bad if other is op else other for other in unfused.ops)
    with pytest.raises(GraphError, match="have scales"):
        verify(replace(unfused, ops=ops))
    final = run_passes(unfused)
    linear, append = (next(op for op in final.ops if op.attrs.get("role") == "qkv"),
                      next(op for op in final.ops if op.kind == "rope_append"))  # fmt: skip
    roles = (*linear.attrs["roles"], *append.attrs["roles"][1:])
    fused = replace(
        linear, inputs=linear.inputs + append.inputs[1:], outputs=append.outputs,
        attrs={**append.attrs, **linear.attrs, "roles": roles, "epilogue": "rope_append"},
    )  # fmt: skip
    with pytest.raises(GraphError, match="no whole head"):
        verify(replace(final, ops=tuple(fused if op is linear else op for op in final.ops)))
    assert fuse_epilogue(final).ops == final.ops


def test_costs_count_a_byte_an_element_and_the_scales():
    config = preset("qwen2.5-72b")

    def kv(fp8_kv, stage):
        ops = op_costs(config, 2, phase="decode", rows=1, context=511, fp8=True, fp8_kv=fp8_kv)
        return sum(count * cost.kv_bytes for name, count, cost in ops if name == stage)

    assert kv(True, "attention") == 512 * kv_bytes_per_token(config, 2, FP8)
    assert kv(True, "qkv") == kv_bytes_per_token(config, 2, FP8)  # the append
    assert kv(True, "attention") / kv(False, "attention") == 132 / 256


def test_tuning_keys_name_the_kv_type_and_16_bit_keys_are_as_they_were():
    def keys(phase, rows, fp8_kv):
        compiled = run_passes(graph(phase, rows, fp8_kv=fp8_kv))
        found = choices(compiled, lambda name: torch.bfloat16, torch.bfloat16, 8192)
        return {choose.key_string(op, facts) for op, facts in found if "attention" in op}

    shape = "num_kv_heads=4,group=7,head_dim=128"
    assert keys("decode", 1, True) == {f"{shape},context=8192,kv_dtype=fp8"}
    assert keys("decode", 1, False) == {f"{shape},context=8192,kv_dtype=bf16"}
    assert keys("prefill", 512, True) == {f"{shape},t=512,kv_dtype=fp8"}
    assert keys("prefill", 512, False) == {f"{shape},t=512"}


def test_the_dump_shows_it():
    text = dump_graph(with_layers(preset("qwen2.5-7b"), 1), 1, fp8_kv=True)
    assert "k_scale=l0.k_scale" in text and "rope_append" in text


# Quantisation


def test_rounding_is_within_a_half_step_and_26_permille_rms():
    torch.manual_seed(1)
    x = torch.randn(4000, 128) * torch.exp2(torch.randint(-12, 13, (4000, 1)).float())
    shape = (4, 1000, 1, 128)
    caches = [torch.zeros(shape, dtype=FP8) for _ in range(2)]
    scales = (torch.zeros(shape[:3]), torch.zeros(shape[:3]))
    everywhere = (slice(None), slice(None), slice(None))
    write_kv(*caches, scales, everywhere, x.view(shape), -x.view(shape))
    for got, want in zip(
        read_kv(*caches, scales, everywhere, torch.float64), (x.view(shape), -x.view(shape))
    ):
        error = (got - want).abs()
        # Half a step of 2^-3, and of 2^-9 * scale below e4m3's normal numbers; fp32's roundings besides.
        bound = want.abs() * (2.0**-4 + 2.0**-22) + scales[0][..., None] * 2.0**-10
        assert (error <= bound).all()
        relative = error.square().sum() / want.double().square().sum()
        assert 0.024 < float(relative.sqrt()) < 0.028


# The interpreter


def same(got, want):
    """fp64 throughout but for logits in fp32: equal to their rounding, as no code may flip."""
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-6)


@pytest.mark.parametrize(
    "shape,tp,fused", [p for p in cases() if p.values[0] in SHAPES and p.values[1:] != (1, False)]
)
def test_every_form_and_tp_degree_equals_the_unfused_graph_of_one_rank(folders, shape, tp, fused):
    """Logits of every prompt position and of decode steps; the caches hold the same codes and scales."""
    want, got = (
        Lockstep(folders[shape], n, fused=form, fp8_kv=True, dtype=torch.float64)
        for n, form in ((1, False), (tp, fused))
    )
    for model in (want, got):
        model.first = model.vocab_logits(model.prefill(1, PROMPT, logits="all"))
        model.output = model.prefill(1, PROMPT)
    same(got.first, want.first)
    for _ in range(4):
        same(got.vocab_logits(got.output), want.vocab_logits(want.output))
        assert torch.equal(got.output.tokens, want.output.tokens)
        want.output, got.output = want.decode([1]), got.decode([1])
    heads = got.config.num_kv_heads
    for layer in range(got.config.num_layers):
        for rank, state in enumerate(got.states):
            own = state.k_cache[layer].shape[1]
            first = got.config.kv_head_of_rank(rank, tp)
            kv = slice(first, first + own)
            assert first + own <= heads
            mine, whole = state.kv_scales[layer], want.states[0].kv_scales[layer]
            for x, y in ((mine[0], whole[0]), (mine[1], whole[1])):
                torch.testing.assert_close(x[1], y[1, kv], rtol=1e-6, atol=0)
            if fused:  # whose K rows are permuted: V is enough
                caches = [(state.v_cache, want.states[0].v_cache)]
            else:
                caches = [
                    (state.v_cache, want.states[0].v_cache),
                    (state.k_cache, want.states[0].k_cache),
                ]
            for x, y in caches:
                assert torch.equal(x[layer][1].view(torch.uint8), y[layer][1, kv].view(torch.uint8))


def test_chunks_prefixes_and_batches_equal_one_prompt_alone(folders):
    """Scales live with the slot: a prompt in chunks, behind a kept prefix, beside other rows and a padding row."""
    folder = folders["qwen2"]

    def fresh():
        return Lockstep(folder, 2, fp8_kv=True, dtype=torch.float64)

    alone = fresh()
    want = alone.prefill(0, PROMPT)
    step = alone.decode([0])

    chunks = fresh()
    chunks.prefill(0, PROMPT[:4], logits="none")
    chunks.prefill(0, PROMPT[4:9], start=4, logits="none")
    same(chunks.vocab_logits(chunks.prefill(0, PROMPT[9:], start=9)), alone.vocab_logits(want))

    reused = fresh()  # another request held the slot: its first six tokens are a common prefix
    reused.prefill(0, [*PROMPT[:6], 9, 8, 7, 6, 5, 4, 3, 2, 1])
    reused.decode([0])
    same(reused.vocab_logits(reused.prefill(0, PROMPT[6:], start=6)), alone.vocab_logits(want))
    same(reused.vocab_logits(reused.decode([0])), alone.vocab_logits(step))

    batch = fresh()
    batch.prefill(2, PROMPT[:3])
    batch.prefill(0, PROMPT)
    before = [x.clone() for x in (*batch.states[1].kv_scales[0], batch.states[1].v_cache[0])]
    together = batch.decode([2, 0, -1])
    same(batch.vocab_logits(together)[1:2], alone.vocab_logits(step))
    after = (*batch.states[1].kv_scales[0], batch.states[1].v_cache[0])
    for old, new in zip(before, after):
        changed = (old.float() != new.float()).flatten(3).any(-1) if old.dim() == 4 else old != new
        where = changed.any(1).nonzero().tolist()
        assert sorted(where) == [[0, len(PROMPT)], [2, 3]]


def rms(x):
    return float(x.square().mean().sqrt())


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_stay_as_near_to_16_bit_kv_as_the_rounding_allows(folders, shape, monkeypatch):
    """Against exact K and V. What e4m3's half step of 2^-4 does to the logits depends on the model, so the bound is
    what it does when each element moves by a random amount, uniform within +-2^-4 (in truth by 2^-4 / m at most,
    with a mantissa m of 1 to 2: 0.72 of that RMS); twice that for the few rows of decode."""
    ids = torch.randint(0, 200, (48,), generator=torch.Generator().manual_seed(5)).tolist()

    def logits(fp8_kv):
        model = Lockstep(folders[shape], 1, fp8_kv=fp8_kv)
        prompt = model.vocab_logits(model.prefill(1, ids, logits="all"))
        steps = []
        for token in (9, 33, 150, 71):
            for state in model.states:
                state.tokens[1] = token
                state.positions[1] = len(ids) + len(steps)
            steps.append(model.vocab_logits(model.decode([1])))
        return prompt, torch.cat(steps)

    exact, fp8 = logits(False), logits(True)
    torch.manual_seed(7)

    def moved(k_cache, v_cache, scales, index, keys, values):
        for cache, x in ((k_cache, keys), (v_cache, values)):
            cache[index] = x * (1 + 2.0**-4 * (2 * torch.rand_like(x) - 1))

    monkeypatch.setattr(sys.modules["engine.graph.interpret"], "write_kv", moved)
    noisy = logits(False)
    for reserve, want, got, noise in zip((1.0, 2.0), exact, fp8, noisy):
        error, bound = rms(got - want) / rms(want), reserve * rms(noise - want) / rms(want)
        print(f"{shape}: relative RMS error {error:.4f}, bound {bound:.4f}")
        assert 0.002 < error < bound  # below: nothing was quantised


# The kernels


@pytest.mark.parametrize("tp", [1, 2])
def test_lowered_kernels_equal_the_oracle(tmp_path, tp):
    """Triton's interpreter or the card: nearer to the oracle than e4m3 itself is to exact KV; the first
    layer's caches hold the oracle's values to one step of e4m3."""
    save_model("qwen2", tmp_path, overrides=TINY)
    ours = Lowered(tmp_path, tp, fp8_kv=True)
    oracle, exact = (Lockstep(tmp_path, tp, length=LENGTH, fp8_kv=fp8) for fp8 in (True, False))
    assert all(rank.state.k_cache[0].dtype == FP8 for rank in ours.ranks)
    last = ("prefill", BUCKET, "last")

    def check(key, want, full, rows=1):
        got = ours.logits(key)[:rows]
        assert got.isfinite().all()
        ours_error, own = rms(got - want), rms(want - full)
        print(f"{key}: kernels {ours_error / rms(want):.4f}, e4m3 {own / rms(want):.4f}")
        assert ours_error < own and ours_error < 0.05 * rms(want)
        return got

    ours.prefill(1, PROMPT[:6], logits="none")
    ours.prefill(1, PROMPT[6:], start=6)
    want, full = (m.vocab_logits(m.prefill(1, PROMPT)) for m in (oracle, exact))
    follow(ours, oracle, check(last, want, full), {0: 1})
    exact.states[0].tokens[1] = oracle.states[0].tokens[1]

    written = (slice(1, 2), slice(None), slice(len(PROMPT)))
    for rank, state in zip(
        ours.ranks, oracle.states
    ):  # layer 0: behind it lies noise of e4m3 as well
        mine, theirs = (
            read_kv(s.k_cache[0], s.v_cache[0], s.kv_scales[0], written, torch.float32)
            for s in (rank.state, state)
        )
        for x, y, scale in zip(mine, theirs, state.kv_scales[0]):
            # A step of e4m3 where fp16's noise, of the head vector's size, crosses a boundary.
            noise = 448 * scale[written][..., None] * 2.0**-8
            assert ((x.cpu() - y).abs() <= y.abs() * 2.0**-3 + noise).all()

    ours.prefill(0, PROMPT[:3])
    for model in (oracle, exact):
        model.prefill(0, PROMPT[:3])
    newest = ours.ring()[-1][0]
    for states in (oracle.states, exact.states):
        for state in states:
            state.tokens[0] = newest
            state.tokens[1] = ours.ranks[0].state.tokens[1]
    ours.decode([1, 0])
    want, full = (m.vocab_logits(m.decode([1, 0])) for m in (oracle, exact))
    follow(ours, oracle, check(("decode", 2, "last"), want, full, rows=2), {0: 1, 1: 0})

    before = [rank.state.kv_scales[0][0].clone() for rank in ours.ranks]
    ours.decode([1, -1])
    for rank, scales in zip(ours.ranks, before):  # the padding row wrote nothing
        assert torch.equal(rank.state.kv_scales[0][0][0], scales[0])
        assert rank.status.tolist() == [0] * 8


def test_quantise_rows_of_heads_is_the_reference_of_the_append():
    """One definition: the interpreter's append is `quantize_rows_ref` over the last dimension."""
    x = torch.randn(3, 2, 16)
    caches = [torch.zeros(4, 2, 8, 16, dtype=FP8) for _ in range(2)]
    scales = (torch.zeros(4, 2, 8), torch.zeros(4, 2, 8))
    slots, at = torch.tensor([0, 2, 3]), torch.tensor([5, 0, 7])
    write_kv(*caches, scales, (slots, slice(None), at), x, 2 * x)
    for row, (slot, position) in enumerate(zip(slots.tolist(), at.tolist())):
        codes, scale = quantize_rows_ref(x[row])
        assert torch.equal(caches[0][slot, :, position].float(), codes.float())
        assert torch.equal(caches[1][slot, :, position].float(), codes.float())
        assert torch.equal(scales[0][slot, :, position], scale)
        assert torch.equal(scales[1][slot, :, position], 2 * scale)
    assert (scales[0] != 0).sum() == 6
