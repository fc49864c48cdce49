"""FP8 checkpoints in each format of the hub: right values at every TP degree, bad scales
refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.checkpoint.fp8 import FP8_DTYPE
from engine.checkpoint.index import open_checkpoint
from engine.checkpoint.load import load_rank, load_ranks
from engine.checkpoint.memory import weight_bytes
from engine.checkpoint.read_ahead import Buffer
from engine.checkpoint.source import CheckpointSource
from engine.errors import CheckpointError
from engine.weights import Part
from tests.unit.checkpoint_fixtures import edit_json, fp8_config, save_model, specs_of, store_fp8
from tests.unit.test_checkpoint_load import Memory, assert_round_trip

KINDS = ("channel", "channel-flat", "tensor", "scalar", "block")
ROW_KINDS = KINDS[:-1]  # scales that the kernels take as they are
TP = (1, 2, 4, 8)


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    return save_model(tmp_path_factory.mktemp("plain"), "qwen2")


@pytest.fixture(scope="module")
def stored(plain, tmp_path_factory) -> dict[str, tuple[Path, dict[str, torch.Tensor]]]:
    """kind -> (directory, fp32 values)."""
    result = {}
    for kind in KINDS:
        directory = Path(shutil.copytree(plain, tmp_path_factory.mktemp("fp8") / kind))
        result[kind] = (directory, store_fp8(directory, kind))
    return result


class Sliced(Memory):
    """A source over whole fp32 tensors, cut with plain indexing: the reference for
    CheckpointSource."""

    def read(self, part: Part, rank: int, device) -> torch.Tensor:
        whole = self.tensors[part.name]
        if part.axis is not None:
            start, stop = part.ranges[rank]
            index = torch.arange(start, stop)
            inside = index < whole.shape[part.axis]
            whole = whole.index_select(part.axis, index.clamp(max=whole.shape[part.axis] - 1))
            whole = whole * inside.view([-1 if i == part.axis else 1 for i in range(whole.dim())])
        if part.layout == "rope_pairs":
            d = part.head_dim
            order = [i + half for i in range(d // 2) for half in (0, d // 2)]
            rows = [h * d + i for h in range(len(whole) // d) for i in order]
            whole = whole[rows]
        return whole


def load(directory: Path, rank: int, tp: int, quantization="fp8", dtype=torch.float32):
    source = CheckpointSource(directory)
    specs = source.index.adapt(specs_of(directory, tp))
    return specs, load_rank(specs, source, rank, "cpu", dtype, quantization)


@pytest.mark.parametrize("tp", TP)
@pytest.mark.parametrize("kind", KINDS)
def test_values_in_16_bits_or_32(stored, kind, tp):
    """quantization=None dequantises: exactly the stored values, also where a shard begins in a
    block."""
    directory, values = stored[kind]
    for rank in range(tp):
        specs, got = load(directory, rank, tp, None)
        want = load_rank(specs, Sliced(**values), rank, "cpu", torch.float32)
        assert all(torch.equal(got[n].weight, want[n].weight) for n in specs)


@pytest.mark.parametrize("tp", TP)
@pytest.mark.parametrize("kind", ROW_KINDS)
def test_row_scales_are_kept_bit_for_bit(stored, kind, tp):
    directory, values = stored[kind]
    for rank in range(tp):
        specs, got = load(directory, rank, tp)
        want = load_rank(specs, Sliced(**values), rank, "cpu", torch.float32)
        for name, spec in specs.items():
            loaded = got[name]
            if not spec.quantizable:
                assert torch.equal(loaded.weight, want[name].weight)
                continue
            assert loaded.weight.dtype == FP8_DTYPE and loaded.scale.dtype == torch.float32
            assert tuple(loaded.scale.shape) == (loaded.weight.shape[0],)
            assert torch.equal(loaded.weight.float() * loaded.scale[:, None], want[name].weight)


@pytest.mark.parametrize("tp", TP)
def test_block_scales_become_row_scales_within_the_fp8_bound(stored, tp):
    directory, values = stored["block"]
    for rank in range(tp):
        specs, got = load(directory, rank, tp)
        want = load_rank(specs, Sliced(**values), rank, "cpu", torch.float32)
        for name, spec in specs.items():
            if spec.quantizable:
                assert_round_trip(want[name].weight, got[name].weight, got[name].scale)


@pytest.mark.parametrize("kind", KINDS)
def test_memory_of_an_fp8_checkpoint(stored, kind):
    directory, _ = stored[kind]
    specs, got = load(directory, 0, 2, dtype=torch.bfloat16)
    index = open_checkpoint(directory)
    assert index.quantization == "fp8"
    total = sum(x.nbytes for x in got.values())
    assert total == weight_bytes(specs.values(), 0, torch.bfloat16, index.quantization)


def test_a_plain_checkpoint_is_not_adapted(plain):
    index = open_checkpoint(plain)
    assert index.quantization is None
    assert index.adapt(specs_of(plain)) == specs_of(plain)


def test_ignored_layers_stay_in_16_bits(plain, tmp_path):
    """down_proj of one layer, and one part of another layer's merged qkv, are not quantised."""
    directory = Path(shutil.copytree(plain, tmp_path / "m"))
    kept = ("model.layers.0.mlp.down_proj", "model.layers.1.self_attn.k_proj")
    values = store_fp8(directory, "channel", keep=kept)
    specs, got = load(directory, 0, 2)
    want = load_rank(specs, Sliced(**values), 0, "cpu", torch.float32)
    for name in ("0.down", "1.qkv.weight"):
        assert not specs[name].quantizable
        assert torch.equal(got[name].weight, want[name].weight)
    assert got["0.qkv.weight"].scale is not None and got["1.down"].scale is not None


def test_row_padding_of_a_stored_weight(stored):
    directory, values = stored["channel"]
    name = "model.layers.0.mlp.gate_proj.weight"
    part = Part(name, (200, 112), 0, ((192, 208),))
    devices = {0: torch.device("cpu")}
    weight, scale = CheckpointSource(directory).read_ranks(part, devices, fp8=True)[0]
    assert torch.equal(weight[:8].float() * scale[:8, None], values[name][192:])
    assert not weight[8:].float().any() and (scale[8:] == 1).all()


# Broken scales


def refusal(directory: Path, reads: tuple[str, ...] = ()) -> str:
    """The line that loading ends in; only tensors named in `reads` may have been read."""
    original = Buffer.start

    def watched(self, chunks):
        for _, chunk in chunks:
            assert chunk.info.name.endswith(reads), f"{chunk.info.name} was read"
        original(self, chunks)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Buffer, "start", watched)
        with pytest.raises(CheckpointError) as e:
            load(directory, 0, 1)
    assert "\n" not in str(e.value) and str(directory) in str(e.value)
    return str(e.value)


@pytest.fixture
def broken(stored, tmp_path):
    """Copy of a kind with an edit of its tensors."""

    def make(kind: str, edit) -> Path:
        directory = Path(shutil.copytree(stored[kind][0], tmp_path / "broken"))
        tensors = load_file(directory / "model.safetensors")
        edit(tensors)
        save_file(tensors, directory / "model.safetensors")
        return directory

    return make


UP = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize("kind", ["channel", "block"])
def test_missing_scale(broken, kind):
    suffix = "_scale_inv" if kind == "block" else "_scale"
    message = refusal(broken(kind, lambda t: t.pop(UP + suffix)))
    assert f"FP8 scales: {UP} has no weight_scale" in message


@pytest.mark.parametrize("kind", KINDS)
def test_wrong_shape_of_a_scale(broken, kind):
    name = UP + ("_scale_inv" if kind == "block" else "_scale")
    message = refusal(broken(kind, lambda t: t.update({name: torch.ones(7, 2)})))
    assert f"{name} is F32 [7, 2], wanted" in message


def test_integer_scale(broken):
    message = refusal(
        broken("scalar", lambda t: t.update({UP + "_scale": torch.ones(1, dtype=torch.int32)}))
    )
    assert f"{UP}_scale is I32 [1]" in message


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, -1.0])
@pytest.mark.parametrize("kind", KINDS)
def test_bad_value_of_a_scale(broken, kind, value):
    name = UP + ("_scale_inv" if kind == "block" else "_scale")

    def edit(tensors):
        tensors[name] = tensors[name].clone()
        tensors[name].view(-1)[-1] = value

    message = refusal(broken(kind, edit), reads=("_scale", "_scale_inv"))
    assert f"zero, negative or not finite: {name}" in message


def test_scale_of_a_weight_that_is_not_fp8(broken):
    message = refusal(broken("channel", lambda t: t.update({UP: t[UP].bfloat16()})))
    assert f"{UP}_scale belongs to a weight stored as BF16" in message


def test_fp8_norm_is_refused(broken):
    name = "model.norm.weight"
    message = refusal(broken("channel", lambda t: t.update({name: t[name].to(FP8_DTYPE)})))
    assert f"unsupported dtype: {name} is F8_E4M3" in message


def test_nan_in_an_fp8_weight(broken):
    def edit(tensors):
        tensors[UP] = tensors[UP].clone()
        tensors[UP].view(torch.uint8)[3, 4] = 0xFF

    directory = broken("channel", edit)
    with pytest.raises(CheckpointError, match=f"^{directory}: NaN or infinite values .* in {UP}$"):
        load(directory, 0, 1)


def test_scales_of_activations_and_cache_are_read_past(broken):
    def edit(tensors):
        tensors["model.layers.0.mlp.up_proj.input_scale"] = torch.ones(1)
        tensors["model.layers.0.self_attn.k_scale"] = torch.ones(1)
        tensors["model.layers.0.self_attn.k_proj.k_scale"] = torch.ones(1)

    load(broken("scalar", edit), 0, 1)


def test_unknown_names_are_still_found(broken):
    message = refusal(broken("channel", lambda t: t.update({"model.other_scale": torch.ones(1)})))
    assert "unknown to this model: model.other_scale" in message


# Schemes


CHANNEL = fp8_config("channel")


def with_weights(**changes) -> dict:
    config = json.loads(json.dumps(CHANNEL))
    config["config_groups"]["group_0"]["weights"].update(changes)
    return config


@pytest.mark.parametrize(
    "quantization, named",
    [
        (with_weights(type="int"), "compressed-tensors (float-quantized)"),
        (with_weights(num_bits=4), "compressed-tensors (float-quantized)"),
        (with_weights(strategy="group"), "with strategies ['group']"),
        ({**CHANNEL, "format": "nvfp4-pack-quantized"}, "nvfp4-pack-quantized"),
        ({**fp8_config("block"), "fmt": "e5m2"}, "fp8 e5m2"),
        ({**fp8_config("block"), "weight_block_size": [1, 128]}, "blocks of [1, 128]"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "modelopt NVFP4"),
        ({"quant_method": "fbgemm_fp8"}, "fbgemm_fp8"),
        ({"bits": 4}, "unnamed"),
    ],
)
def test_schemes_that_are_not_read_are_named(stored, tmp_path, quantization, named):
    directory = Path(shutil.copytree(stored["channel"][0], tmp_path / "m"))
    edit_json(directory / "config.json", quantization_config=quantization)
    message = refusal(directory)
    assert "quantised checkpoint (" in message and "is not supported" in message
    assert named in message


def test_fp8_without_a_config_is_refused(stored, tmp_path):
    directory = Path(shutil.copytree(stored["channel"][0], tmp_path / "m"))
    edit_json(directory / "config.json", quantization_config=None)
    assert "without a quantization_config" in refusal(directory)


def test_modelopt_file_of_its_own(stored, tmp_path):
    directory = Path(shutil.copytree(stored["scalar"][0], tmp_path / "m"))
    edit_json(directory / "config.json", quantization_config=None)
    config = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}
    (directory / "hf_quant_config.json").write_text(json.dumps(config))
    _, got = load(directory, 0, 1)
    assert got["0.down"].weight.dtype == FP8_DTYPE


def test_block_values_equal_transformers_dequantisation(plain, tmp_path):
    """transformers' own reader of block FP8 (dequantize=True: no GPU) sees the same values."""
    pytest.importorskip(
        "accelerate", reason="transformers reads FP8 only with accelerate installed"
    )
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config

    directory = Path(shutil.copytree(plain, tmp_path / "m"))
    # Its reader wants shapes that are multiples of the block
    store_fp8(directory, "block", block=8)
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32,
        quantization_config=FineGrainedFP8Config(weight_block_size=(8, 8), dequantize=True),
    )  # fmt: skip
    source = CheckpointSource(directory)
    checked = 0
    for name, value in model.state_dict().items():
        if source.index.is_fp8(name):
            got = source.read(Part(name, tuple(value.shape), None, ()), 0, "cpu")
            assert torch.equal(got, value.float()), name
            checked += 1
    assert checked == 14


@pytest.mark.parametrize("kind", KINDS)
def test_each_tensor_is_read_once(stored, monkeypatch, kind):
    """Also the scales, which are looked at ahead of the weights."""
    start, names = Buffer.start, []

    def watched(self, chunks):
        names.extend(chunk.info.name for _, chunk in chunks)
        start(self, chunks)

    monkeypatch.setattr(Buffer, "start", watched)
    directory = stored[kind][0]
    source = CheckpointSource(directory)
    source.check_scales()
    scales = [name for name in source.index.tensors if "_scale" in name]
    assert sorted(names) == sorted(scales) and scales
    devices = dict.fromkeys(range(2), "cpu")
    specs = source.index.adapt(specs_of(directory, 2))
    load_ranks(specs, source, devices, torch.bfloat16, None if kind == "block" else "fp8")
    assert sorted(names) == sorted(source.index.tensors)
