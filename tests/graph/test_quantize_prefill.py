"""FP8 x FP8 prefill: which linears take FP8 inputs, what it costs in accuracy, and the kernels' own chain."""

from __future__ import annotations

import sys
from collections import Counter

import pytest
import torch

from engine.config import EngineConfig, preset, with_layers
from engine.errors import EngineError
from engine.graph.build import build
from engine.graph.dump import dump_graph
from engine.graph.passes import run_passes
from engine.graph.plan import plan, value_bytes
from engine.kernels.all_reduce import TWO_SHOT_BYTES
from engine.kernels.norm import rmsnorm_ref
from engine.kernels.quantize_rows import FP8, quantize_rows_ref, rmsnorm_quantize_ref
from engine.kernels.silu import silu_mul_ref
from tests.graph.models import Lockstep, save_model
from tests.graph.test_lower import BUCKET, LENGTH, PROMPT, TINY, Lowered, follow

# Rounding x to e4m3 moves an element by at most half a step: 2^-4 of it. What that does to the logits depends on
# the model (attention amplifies), so the bound is what it does to them when every element of the same inputs is
# moved by a random amount, uniform within +-2^-4 (by 2^-4 / m in truth, with a mantissa m of 1 to 2: 0.72 of it on
# average): as it is for the RMS over all rows, twice that for a single row.
HALF_STEP = 2.0**-4


def prefill_graph(model="qwen2.5-72b", rows=512, tp=1, logits="last", fp8=True):
    config = with_layers(preset(model), 2)
    graph = build(config, phase="prefill", rows=rows, tp=tp, logits=logits, fp8_prefill=fp8)
    return run_passes(graph)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("rows", [64, 512])
def test_each_input_is_quantised_once_and_norms_write_fp8(rows, tp):
    graph = prefill_graph(rows=rows, tp=tp)
    kinds = Counter(op.kind for op in graph.ops)
    # 2 layers, of which the last has one row behind its attention: GEMVs that have the norms. At TP 2 all norms but
    # the first are within two-shot exchanges, where messages are large enough for it.
    within = sum(op.attrs.get("quantize", False) for op in graph.ops)
    split = tp == 2 and rows * 16384 >= TWO_SHOT_BYTES[2]
    assert within == kinds["two_shot_reduce"] == (2 if split else 0)
    assert kinds["rmsnorm_quantize"] == 3 - within and kinds["quantize_rows"] == 2
    assert kinds["rmsnorm"] == 0
    linears = [op for op in graph.ops if op.kind == "linear"]
    fp8 = [op for op in linears if op.input("x").dtype == "fp8"]
    rest = [op.attrs["role"] for op in linears if op not in fp8]
    assert len(fp8) == 5 and rest == ["o_proj", "gate_up", "down", "lm_head"]
    for op in fp8:
        assert op.input("x_scale").shape == (rows,)
    (scale,) = {op.input("x_scale").sharding for op in fp8 if op.attrs["role"] == "down"}
    assert scale == "sharded"  # of the rank's own columns
    sixteen = prefill_graph(rows=rows, tp=tp, fp8=False)
    assert plan(graph, 2).arena_bytes <= 1.5 * plan(sixteen, 2).arena_bytes


def test_short_prompts_decode_and_16_bit_weights_are_left_alone():
    for graph in (
        prefill_graph(rows=48),
        prefill_graph(fp8=False),
        run_passes(build(preset("qwen2.5-7b"), phase="decode", rows=8, tp=1, fp8_prefill=True)),
    ):
        assert not any("quantize" in op.kind for op in graph.ops)
        assert all(value.dtype != "fp8" for op in graph.ops for value in op.inputs)


def test_a_weight_that_stays_in_16_bits_keeps_its_input():
    """A checkpoint's ignore list: one part of a merged matrix in 16 bits keeps the whole in 16 bits."""
    from dataclasses import replace

    graph = build(
        with_layers(preset("qwen2.5-7b"), 3), phase="prefill", rows=256, tp=1, fp8_prefill=True
    )
    name = "model.layers.1.self_attn.k_proj.weight"
    weights = dict(graph.weights) | {name: replace(graph.weights[name], quantizable=False)}
    final = run_passes(replace(graph, weights=weights))
    taken = {
        (op.layer, op.attrs["role"])
        for op in final.ops
        if op.kind == "linear" and op.find("x_scale") is not None
    }
    assert (0, "qkv") in taken and (1, "qkv") not in taken and (1, "gate_up") in taken
    assert Counter(op.kind for op in final.ops)["rmsnorm"] == 1  # in front of that matrix


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("qwen2")
    save_model("qwen2", path, overrides=TINY)
    return path


def rms(x):
    return float(x.square().mean().sqrt())


@pytest.mark.parametrize("tp", [1, 2])
def test_logits_against_full_precision_activations(folder, tp, monkeypatch):
    """The same FP8 weights; the reference multiplies their exact values by fp32 activations. Then a decode
    step on the KV that each prefill left, with activations of full precision."""
    ids = torch.randint(0, 203, (130,), generator=torch.Generator().manual_seed(3)).tolist()

    def logits(fp8_prefill):
        model = Lockstep(folder, tp, length=160, quantization="fp8", fp8_prefill=fp8_prefill)
        prompt = model.vocab_logits(model.prefill(1, ids, logits="all"))
        for state in model.states:
            state.tokens[1], state.positions[1] = 9, len(ids)
        return prompt, model.vocab_logits(model.decode([1]))

    def moved(x):
        return x * (1 + HALF_STEP * (2 * torch.rand_like(x) - 1)), torch.ones(x.shape[0])

    torch.manual_seed(7)
    want, got = logits(False), logits(True)
    interpret = sys.modules["engine.graph.interpret"]
    monkeypatch.setattr(interpret, "quantize_rows_ref", moved)
    monkeypatch.setattr(
        interpret, "rmsnorm_quantize_ref", lambda x, w, eps: moved(rmsnorm_ref(x, w, eps))
    )
    noisy = logits(True)
    for reserve, exact, fp8, noise in zip((1.0, 2.0), want, got, noisy):
        error, bound = rms(fp8 - exact) / rms(exact), reserve * rms(noise - exact) / rms(exact)
        print(f"TP={tp}: relative RMS error {error:.4f}, bound {bound:.4f}")
        assert 0.005 < error < bound  # below: nothing was quantised


def tensor(ours, key, rank, value):
    """A temp of the graph as it lies in the rank's arena; weights by name, with their scale multiplied in."""
    if value.kind == "weight":
        loaded = rank.weights[value.name]
        scale = 1.0 if loaded.scale is None else loaded.scale.double()[:, None]
        return loaded.weight.double() * scale
    dtype = {"act": rank.dtype, "f32": torch.float32, "fp8": FP8}[value.dtype]
    offset = ours.plans[key].offsets[value]
    size = value_bytes(value, rank.dtype.itemsize)
    return rank.arena[offset : offset + size].view(dtype).view(value.shape).clone()


def check_launch(op, given, got, rows):
    """Outputs of one launch against the references on the very inputs that it read; only real rows."""
    if op.kind in {"quantize_rows", "rmsnorm_quantize"}:
        if op.kind == "quantize_rows":
            want = quantize_rows_ref(given["x"])
        else:
            want = rmsnorm_quantize_ref(given["x"], given["weight"], op.attrs["eps"])
        back, exact = (x8.float() * scale[:, None] for x8, scale in (got, want))
        # The norm's sum may round otherwise: one 16-bit step, hence at most one step of e4m3.
        bound = exact.abs() * 2.0**-3 + want[1][:, None] * 2.0**-9
        assert ((back - exact).abs() <= bound)[:rows].all()
        return
    y = given["x"].double() * given["x_scale"].double()[:, None] @ given["w"].t()
    y = y + given["bias"].double() if "bias" in given else y
    epilogue = op.attrs.get("epilogue", "store")
    y = silu_mul_ref(y) if epilogue == "silu_mul" else y
    y = y + given["residual"].double() if epilogue == "residual" else y
    # fp16's rounding; on a card also K / 32 sums of the tensor cores' 2^-13 (kernels/gemm_kernel.py).
    sums = given["x"].shape[1] / 32 * 2.0**-13 if got[0].is_cuda else 1e-5
    error = (got[0].double() - y).abs()[:rows]
    assert (error <= 2.0**-11 * y.abs()[:rows] + 4 * sums * rms(y[:rows]) + 1e-6).all(), op


@pytest.mark.parametrize("tp", [1, 2])
def test_lowered_kernels_equal_the_oracle(folder, tp, monkeypatch):
    """In Triton's interpreter or on the card, with the threshold at this test's bucket: each launch alone, since
    the model amplifies the 16-bit noise that moves a value across e4m3's rounding boundary; then the logits,
    which must stay as near to the oracle's as e4m3 itself does (test above: 15 %)."""
    monkeypatch.setattr(
        sys.modules["engine.graph.passes.quantize_prefill"], "FP8_MIN_TOKENS", BUCKET
    )
    ours = Lowered(folder, tp, "fp8", fp8_prefill=True)
    oracle = Lockstep(folder, tp, length=LENGTH, quantization="fp8", fp8_prefill=True)
    key = ("prefill", BUCKET, "last")
    kernels = Counter(launch.kernel for launch in ours.lines[key][0])
    assert (kernels["rmsnorm_quantize"], kernels["quantize_rows"]) == (3, 2)
    for rank in ours.ranks:
        rank.prompt.fill_(7)
        rank.prompt[: len(PROMPT)] = torch.tensor(PROMPT, dtype=torch.int32)
        rank.request.copy_(torch.tensor([1, 0, len(PROMPT)], dtype=torch.int32))
        rank.arena.fill_(0x7F)
    checked = 0
    for column in zip(*ours.lines[key]):
        op = column[0].op
        ours_now = "quantize" in op.kind or op.find("x_scale") is not None
        if ours_now:
            given = [
                {role: tensor(ours, key, rank, op.input(role)) for role in op.attrs["roles"]}
                for rank in ours.ranks
            ]
        for launch in column:
            launch.run()
        if ours_now:
            assert "quantize" in op.kind or column[0].config.kernel == "w8a8"
            for rank, inputs in zip(ours.ranks, given):
                got = [tensor(ours, key, rank, value) for value in op.outputs]
                check_launch(op, inputs, got, len(PROMPT))
            checked += 1
    assert checked == 10  # 4 linears and 4 quantisations, of the last layer qkv's alone
    logits = ours.logits(key)
    want = oracle.vocab_logits(oracle.prefill(1, PROMPT))
    assert logits.isfinite().all() and rms(logits - want) < 0.15 * rms(want)
    follow(ours, oracle, logits, {0: 1})


def test_when_prefill_is_fp8():
    """auto: with FP8 weights, on GPUs only (the CPU has nothing to win)."""
    auto, asked, refused = (
        EngineConfig(prefill_activations=choice) for choice in ("auto", "fp8", "16bit")
    )
    assert auto.fp8_prefill("fp8") and not auto.fp8_prefill("fp8", cuda=False)
    assert asked.fp8_prefill("fp8", cuda=False) and not refused.fp8_prefill("fp8")
    assert not auto.fp8_prefill(None)
    with pytest.raises(EngineError, match="set --quantization fp8"):
        asked.fp8_prefill(None)
    text = dump_graph(with_layers(preset("qwen2.5-7b"), 1), 1, "fp8")
    assert "quantize" not in text.replace("after quantize_prefill", "")
    asked = dump_graph(with_layers(preset("qwen2.5-7b"), 2), 1, "fp8", fp8_prefill=True)
    assert "rmsnorm_quantize(" in asked and "quantize_rows(" in asked
