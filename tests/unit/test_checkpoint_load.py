"""Combining, casting, FP8, sharing and the checks of loading."""

from __future__ import annotations

import gc
import sys
import weakref
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from engine.checkpoint import fp8
from engine.checkpoint.dummy import DummySource
from engine.checkpoint.fp8 import FP8_DTYPE, quantize_rows
from engine.checkpoint.load import LoadProgress, load_rank, load_ranks, materialize
from engine.checkpoint.memory import weight_bytes
from engine.checkpoint.source import CheckpointSource, WeightSource
from engine.errors import CheckpointError, EngineError
from engine.weights import Part, WeightSpec
from tests.unit.checkpoint_fixtures import save_model, specs_of
from tests.unit.fakes import Terminal

TP = (1, 2, 4, 8)


@pytest.fixture(scope="module", params=["qwen2", "llama-tied"])
def directory(request, tmp_path_factory) -> Path:
    kind, _, tied = request.param.partition("-")
    return save_model(
        tmp_path_factory.mktemp(request.param), kind, tied=bool(tied), shard_size="300KB"
    )


@pytest.fixture(scope="module")
def whole(directory) -> dict[str, torch.Tensor]:
    return {k: v for f in directory.glob("*.safetensors") for k, v in load_file(f).items()}


class Memory:
    """A WeightSource over tensors in memory."""

    def __init__(self, **tensors: torch.Tensor):
        self.tensors = tensors

    def read(self, part: Part, rank: int, device) -> torch.Tensor:
        return self.tensors[part.name].to(device)


def whole_spec(*tensors: torch.Tensor, combine="concat", quantizable=False):
    """A spec of replicated parts "p0", "p1", ... and the source that holds them."""
    parts = tuple(Part(f"p{i}", tuple(t.shape), None, ()) for i, t in enumerate(tensors))
    spec = WeightSpec("w", parts, combine, quantizable)
    return spec, Memory(**{f"p{i}": t for i, t in enumerate(tensors)})


# Combining


@pytest.mark.parametrize("tp", TP)
def test_all_ranks_hold_the_whole_model(directory, whole, tp):
    """Undo each spec's sharding and layout row by row: every HF element is where it belongs."""
    specs = specs_of(directory, tp)
    ranks = load_ranks(
        specs, CheckpointSource(directory), {r: "cpu" for r in range(tp)}, torch.float32
    )
    d, group = 16, 7
    pairs = [i + half for i in range(d // 2) for half in (0, d // 2)]
    for layer in range(2):
        p = f"model.layers.{layer}"
        q, k, v = (whole[f"{p}.self_attn.{n}_proj.weight"] for n in "qkv")
        gate, up, down = (whole[f"{p}.mlp.{n}_proj.weight"] for n in ("gate", "up", "down"))
        o = whole[f"{p}.self_attn.o_proj.weight"]
        for rank, got in ranks.items():
            kv_heads = range(rank * 8 // tp, (rank + 1) * 8 // tp)
            q_heads = [h * group + g for h in kv_heads for g in range(group)]
            rows = [q[h * d + i] for h in q_heads for i in pairs]
            rows += [k[h * d + i] for h in kv_heads for i in pairs]
            rows += [v[h * d + i] for h in kv_heads for i in range(d)]
            assert torch.equal(got[f"{layer}.qkv.weight"].weight, torch.stack(rows))
            columns = [h * d + i for h in q_heads for i in range(d)]
            assert torch.equal(got[f"{layer}.o"].weight, o[:, columns])
            inter = range(rank * 200 // tp, (rank + 1) * 200 // tp)
            rows = [t[i] for i in inter for t in (gate, up)]
            assert torch.equal(got[f"{layer}.gate_up"].weight, torch.stack(rows))
            assert torch.equal(got[f"{layer}.down"].weight, down[:, list(inter)])
            assert torch.equal(got["norm"].weight, whole["model.norm.weight"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_cast_is_one_rounding(dtype):
    values = torch.randn(7, 5)
    spec, source = whole_spec(values)
    assert torch.equal(materialize(spec, source, 0, "cpu", dtype).weight, values.to(dtype))


def test_interleave_of_three_parts():
    parts = [torch.full((2, 3), float(i)) for i in range(3)]
    spec, source = whole_spec(*parts, combine="interleave")
    got = materialize(spec, source, 0, "cpu", torch.float32).weight
    assert got[:, 0].tolist() == [0, 1, 2, 0, 1, 2]


@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_threads_and_ranks_in_one_pass_change_nothing(directory, quantization):
    specs, source = specs_of(directory, 2), CheckpointSource(directory)
    together = load_ranks(specs, source, {0: "cpu", 1: "cpu"}, torch.bfloat16, quantization)
    for rank in range(2):
        alone = load_rank(specs, source, rank, "cpu", torch.bfloat16, quantization, threads=1)
        assert list(alone) == list(specs) == list(together[rank])
        for name, loaded in alone.items():
            other = together[rank][name]
            assert torch.equal(loaded.weight.float(), other.weight.float())
            assert (loaded.scale is None) == (other.scale is None)
            if loaded.scale is not None:
                assert torch.equal(loaded.scale, other.scale)


# FP8


def fp8_bound(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """|w - q s| element by element. e4m3 has 3 mantissa bits: nearest rounding errs by at most 2^-4
    of a normal value (>= 2^-6) and by 2^-10 (half of the subnormal step 2^-9) below. The fp32
    division moves w / s by 2^-24 of itself, the clamp at 448 by 2^-23 (the rounding of s): 2^-22
    |w| covers both.
    """
    size, step = weight.abs().double(), scale[:, None].double()
    return torch.maximum(size * 2**-4, step * 2**-10) + size * 2**-22


def assert_round_trip(weight: torch.Tensor, quantized: torch.Tensor, scale: torch.Tensor) -> None:
    assert quantized.dtype == FP8_DTYPE and scale.dtype == torch.float32
    assert scale.isfinite().all() and (scale > 0).all()
    error = (quantized.double() * scale[:, None].double() - weight.double()).abs()
    assert (error <= fp8_bound(weight, scale)).all()


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    rows=st.integers(1, 9),
    cols=st.integers(1, 65),
    exponent=st.integers(-30, 30),
    spread=st.integers(0, 12),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_fp8_round_trip(seed, rows, cols, exponent, spread, dtype):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, cols, generator=generator)
    weight *= torch.exp2(torch.rand(rows, cols, generator=generator) * spread)
    weight = (weight * 2.0 ** (exponent if dtype != torch.float16 else exponent % 3)).to(dtype)
    quantized, scale = quantize_rows(weight)
    assert_round_trip(weight, quantized, scale)
    amax = weight.float().abs().amax(1)
    assert torch.equal(scale[amax > 0], (amax / 448)[amax > 0])
    assert (quantized.float().abs().amax(1)[amax > 0] == 448).all()  # the whole range is used


def test_fp8_rounds_to_nearest_even():
    """Steps of 2 between 16 and 32: 17 and 19 are ties. 448 in the row makes the scale 1."""
    row = torch.tensor([[448.0, 17.0, 19.0, 17.1, -17.0, 0.0, 2.0**-9, 2.0**-10]])
    quantized, scale = quantize_rows(row)
    assert scale.tolist() == [1.0]
    assert quantized.float().tolist() == [[448, 16, 20, 18, -16, 0, 2.0**-9, 0]]


def test_fp8_zero_and_tiny_rows_are_safe():
    weight = torch.randn(4, 8)
    weight[1] = 0
    weight[2] = 1e-44  # subnormal fp32
    weight[3] = 3e-38
    quantized, scale = quantize_rows(weight)
    assert scale[1] == 1.0 and not quantized[1].float().any()
    assert quantized.float().isfinite().all() and scale.isfinite().all() and (scale > 0).all()


def test_fp8_chunks_change_nothing(monkeypatch):
    weight, size = torch.randn(37, 16), fp8._QUANTIZE_CHUNK
    for largest in (None, torch.arange(4.0, 41.0)):
        monkeypatch.setattr(fp8, "_QUANTIZE_CHUNK", size)
        quantized, scale = quantize_rows(weight, largest)
        monkeypatch.setattr(fp8, "_QUANTIZE_CHUNK", 5 * 16)
        again, scale_again = quantize_rows(weight, largest)
        assert torch.equal(quantized.float(), again.float()) and torch.equal(scale, scale_again)


@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_a_rank_without_rows(quantization):
    spec, source = whole_spec(torch.empty(0, 4), quantizable=True)
    assert materialize(spec, source, 0, "cpu", torch.bfloat16, quantization).weight.shape == (0, 4)


def test_quantising_leaves_its_input_alone():
    weight = torch.randn(3, 4)
    kept = weight.clone()
    quantize_rows(weight)
    assert torch.equal(weight, kept)


@pytest.mark.parametrize("combine", ["concat", "interleave"])
def test_fp8_of_combined_parts_is_fp8_of_each(combine):
    parts = [torch.randn(4, 8) * 10**i for i in range(2)]
    spec, source = whole_spec(*parts, combine=combine, quantizable=True)
    got = materialize(spec, source, 0, "cpu", torch.bfloat16, "fp8")
    rows = [slice(0, 4), slice(4, 8)] if combine == "concat" else [slice(0, 8, 2), slice(1, 8, 2)]
    for part, where in zip(parts, rows):
        quantized, scale = quantize_rows(part)
        assert torch.equal(got.weight[where].float(), quantized.float())
        assert torch.equal(got.scale[where], scale)


def test_only_quantizable_weights_become_fp8(directory):
    specs = specs_of(directory)
    loaded = load_rank(specs, CheckpointSource(directory), 0, "cpu", torch.bfloat16, "fp8")
    for name, spec in specs.items():
        assert (loaded[name].scale is not None) == spec.quantizable, name
        assert loaded[name].weight.dtype == (FP8_DTYPE if spec.quantizable else torch.bfloat16)
        if spec.quantizable:
            plain = materialize(spec, CheckpointSource(directory), 0, "cpu", torch.float32)
            assert_round_trip(plain.weight, loaded[name].weight, loaded[name].scale)


def test_unknown_quantization_names_what_is_supported(directory):
    with pytest.raises(EngineError, match="--quantization 'int4' is not supported; supported: fp8"):
        load_rank(specs_of(directory), CheckpointSource(directory), 0, "cpu", torch.float32, "int4")


# Values that are not finite


@pytest.mark.parametrize("quantization", [None, "fp8"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_nonfinite_values_are_refused_by_name(value, quantization):
    bad = torch.randn(4, 4)
    bad[2, 1] = value
    spec, source = whole_spec(torch.randn(4, 4), bad, quantizable=True)
    good = WeightSpec("good", (spec.parts[0],))
    with pytest.raises(CheckpointError, match=r"NaN or infinite values .* in p1$"):
        load_rank([good, spec], source, 0, "cpu", torch.float32, quantization)


def test_values_beyond_fp16_are_refused():
    spec, source = whole_spec(torch.tensor([1.0, 1e5], dtype=torch.bfloat16))
    assert materialize(spec, source, 0, "cpu", torch.bfloat16).weight[1] > 9e4
    with pytest.raises(CheckpointError, match="beyond the dtype's range"):
        materialize(spec, source, 0, "cpu", torch.float16)


# Memory, progress, files


class Watched:
    """Counts the bytes of slices that are alive at once."""

    def __init__(self, source: WeightSource):
        self.source, self.alive, self.peak, self.largest = source, 0, 0, 0

    def read(self, part: Part, rank: int, device) -> torch.Tensor:
        piece = self.source.read(part, rank, device).clone()
        nbytes = piece.nbytes
        self.alive += nbytes
        self.peak, self.largest = max(self.peak, self.alive), max(self.largest, nbytes)
        weakref.finalize(piece, self._free, nbytes)
        return piece

    def _free(self, nbytes: int) -> None:
        self.alive -= nbytes


@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_peak_is_the_final_size_and_one_slice(directory, quantization):
    watched = Watched(CheckpointSource(directory))
    gc.disable()  # reference counts alone must free each slice
    try:
        load_rank(specs_of(directory), watched, 0, "cpu", torch.bfloat16, quantization, threads=1)
    finally:
        gc.enable()
    assert watched.peak == watched.largest
    assert watched.alive == 0


@pytest.mark.parametrize("tp", TP)
@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_progress_adds_up_to_weight_bytes(directory, tp, quantization):
    specs, seen = specs_of(directory, tp), []
    for rank in range(tp):
        seen.clear()
        load_rank(
            specs,
            CheckpointSource(directory),
            rank,
            "cpu",
            torch.float16,
            quantization,
            seen.append,
        )
        assert sum(seen) == weight_bytes(specs.values(), rank, torch.float16, quantization)


def test_progress_bar_is_silent_off_a_terminal(capfd):
    with LoadProgress(2_000_000_000) as bar:
        bar(1_000_000_000)
    assert capfd.readouterr().err == ""


@pytest.mark.filterwarnings("error")  # tqdm's, of more bytes done than there are
def test_progress_bar_ends_where_the_bytes_do(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    with LoadProgress(2_345_123_401) as bar:
        for _ in range(7):
            bar(335_017_628)
        bar(5)
    assert "0.0/2.3 GB" in sys.stderr.getvalue() and "2.3/2.3 GB |####" in sys.stderr.getvalue()


def test_loading_never_writes_to_the_files(directory):
    before = {f: f.read_bytes() for f in directory.iterdir()}
    for quantization in (None, "fp8"):
        load_rank(
            specs_of(directory), CheckpointSource(directory), 0, "cpu", torch.float32, quantization
        )
    assert before == {f: f.read_bytes() for f in directory.iterdir()}


def test_dummy_source_loads_like_a_checkpoint(directory):
    from engine.config import from_dir

    config = from_dir(directory)
    specs = specs_of(directory, 2)
    for rank in range(2):
        loaded = load_rank(specs, DummySource(config), rank, "cpu", torch.bfloat16, "fp8")
        for name, spec in specs.items():
            assert tuple(loaded[name].weight.shape) == spec.local_shape(rank)


def test_large_finite_values_are_not_taken_for_infinite():
    spec, source = whole_spec(torch.full((64, 64), 3e36))
    assert materialize(spec, source, 0, "cpu", torch.bfloat16).weight.isfinite().all()


def test_no_check_hides_another_of_the_same_tensor():
    """Tied weights, each rank with other rows of one tensor: NaN in the rows of one spec alone."""
    values = torch.randn(8, 4)
    values[0, 0] = float("nan")

    class Sliced(Memory):
        def read(self, part: Part, rank: int, device) -> torch.Tensor:
            return super().read(part, rank, device)[slice(*part.ranges[rank])]

    source = Sliced(table=values)
    first, rest = (
        WeightSpec(name, (Part("table", (8, 4), 0, (span,)),))
        for name, span in (("first", (0, 4)), ("rest", (4, 8)))
    )
    for specs in ([first, rest], [rest, first]):
        with pytest.raises(CheckpointError, match=r"in table$"):
            load_rank(specs, source, 0, "cpu", torch.float32)


@pytest.mark.parametrize("tp", [2, 4, 8])
@pytest.mark.parametrize("dummy", [False, True])
def test_fp8_made_while_loading_is_the_same_at_every_degree(directory, tp, dummy):
    """o_proj and down are split over columns: their scales are of whole rows, on every rank."""
    from engine.config import from_dir

    source = DummySource(from_dir(directory)) if dummy else CheckpointSource(directory)
    one = load_rank(specs_of(directory), source, 0, "cpu", torch.bfloat16, "fp8")
    split = specs_of(directory, tp)
    ranks = load_ranks(split, source, dict.fromkeys(range(tp), "cpu"), torch.bfloat16, "fp8")
    columns = {name for name, spec in split.items() if spec.parts[0].axis == 1}
    assert len(columns) == 4  # of two layers
    for name in columns:
        whole = torch.cat([ranks[rank][name].weight.view(torch.uint8) for rank in range(tp)], 1)
        assert torch.equal(whole, one[name].weight.view(torch.uint8))
        for rank in range(tp):
            assert torch.equal(ranks[rank][name].scale, one[name].scale)
        alone = load_rank(split, source, tp - 1, "cpu", torch.bfloat16, "fp8")[name]
        assert torch.equal(alone.scale, one[name].scale)


@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_loading_in_inference_mode(directory, quantization):
    """The mode belongs to a thread, and tensors made in it are filled by others."""
    with torch.inference_mode():
        loaded = load_rank(
            specs_of(directory), CheckpointSource(directory), 0, "cpu", torch.bfloat16,
            quantization, threads=3,
        )  # fmt: skip
    assert all(held.weight.is_inference() for held in loaded.values())
