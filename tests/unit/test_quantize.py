"""`python -m engine.quantize`: what it writes is what this engine and transformers load."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.checkpoint.index import INDEX, open_checkpoint
from engine.checkpoint.load import load_rank
from engine.checkpoint.quantize import LINEAR, quantize_checkpoint, quantize_rows_bf16_scale, report
from engine.checkpoint.source import CheckpointSource
from engine.config import EngineConfig
from engine.errors import CheckpointError, EngineError
from engine.quantize import main
from engine.resolve import resolve
from engine.weights import Part
from tests.unit.checkpoint_fixtures import edit_json, save_model, specs_of
from tests.unit.test_checkpoint_load import assert_round_trip


@pytest.fixture(scope="module", params=["qwen2", "llama-tied"])
def pair(request, tmp_path_factory):
    """(source directory, FP8 directory, errors)."""
    kind, _, tied = request.param.partition("-")
    folder = tmp_path_factory.mktemp(request.param)
    source = save_model(folder / "bf16", kind, tied=bool(tied), shard_size="200KB")
    (source / "tokenizer.json").write_text("{}")
    (source / "chat_template.jinja").write_text("{{ x }}")
    errors = quantize_checkpoint(source, folder / "out" / "fp8", shard_bytes=150_000)
    return source, folder / "out" / "fp8", errors


def whole(directory: Path) -> dict[str, torch.Tensor]:
    return {k: v for f in sorted(directory.glob("*.safetensors")) for k, v in load_file(f).items()}


def test_every_linear_layer_and_nothing_else(pair):
    source, out, errors = pair
    before, after = whole(source), whole(out)
    linear = [n for n in before if LINEAR.match(n)]
    assert len(linear) == 2 * 7 == len(errors)
    assert after.keys() == {*before, *(n + "_scale" for n in linear)}
    for name, tensor in before.items():
        if name not in linear:
            assert torch.equal(after[name], tensor)
            continue
        scale = after[name + "_scale"]
        assert scale.dtype == torch.bfloat16 and scale.shape == (len(tensor), 1)
        assert_round_trip(tensor, after[name], scale[:, 0].float())


def test_this_engine_loads_it_bit_for_bit(pair):
    source, out, _ = pair
    checkpoint = CheckpointSource(out)
    specs = checkpoint.index.adapt(specs_of(out, 2))
    assert [s.quantizable for s in specs.values()] == [
        s.quantizable for s in specs_of(source, 2).values()
    ]
    stored = whole(out)
    for rank in range(2):
        loaded = load_rank(
            specs, checkpoint, rank, "cpu", torch.bfloat16, checkpoint.index.quantization
        )
        down = stored["model.layers.0.mlp.down_proj.weight"][:, rank * 100 : rank * 100 + 100]
        assert torch.equal(loaded["0.down"].weight.float(), down.float())
        scale = stored["model.layers.0.mlp.down_proj.weight_scale"]
        assert torch.equal(loaded["0.down"].scale, scale[:, 0].float())


def test_transformers_loads_the_same_values(pair):
    pytest.importorskip(
        "compressed_tensors", reason="transformers reads this format with compressed-tensors only"
    )
    pytest.importorskip("accelerate", reason="compressed-tensors needs accelerate")
    from transformers import AutoModelForCausalLM

    _, out, _ = pair
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    source = CheckpointSource(out)
    with torch.no_grad():
        model(torch.tensor([[1, 2, 3]]))  # it dequantises at the first call
    checked = 0
    for name, module in model.named_modules():
        if name.endswith("_proj"):
            part = Part(f"{name}.weight", tuple(module.weight.shape), None, ())
            assert torch.equal(module.weight.float(), source.read(part, 0, "cpu")), name
            checked += 1
    assert checked == 14


def test_files(pair):
    source, out, _ = pair
    assert (out / "tokenizer.json").read_text() == "{}"
    assert (out / "chat_template.jinja").read_text() == "{{ x }}"
    before = json.loads((source / "config.json").read_text())
    after = json.loads((out / "config.json").read_text())
    assert after.pop("quantization_config")["format"] == "float-quantized"
    assert after == before
    files = sorted(out.glob("*.safetensors"))
    assert len(files) > 2
    assert [f.name for f in files] == [
        f"model-{i:05}-of-{len(files):05}.safetensors" for i in range(1, len(files) + 1)
    ]
    total = json.loads((out / INDEX).read_text())["metadata"]["total_size"]
    assert total == open_checkpoint(out).nbytes
    largest_tensor = max(t.nbytes for t in open_checkpoint(out).tensors.values())
    for file in files:
        assert sum(t.nbytes for t in load_file(file).values()) <= max(150_000, largest_tensor)
    assert [p.name for p in out.parent.iterdir()] == ["fp8"]  # no temporary folder is left


def test_reported_errors_are_the_errors(pair):
    source, out, errors = pair
    before, after = whole(source), whole(out)
    for e in errors:
        w = before[e.name].double()
        difference = after[e.name].double() * after[e.name + "_scale"].double() - w
        assert e.rms == pytest.approx((difference.norm() / w.norm()).item(), rel=1e-4)
        row = w.abs().amax(1)
        assert e.largest == pytest.approx((difference.abs().amax(1) / row).max().item(), rel=1e-4)
        # Uniform error in steps of 2^-3 relative: RMS is near 2^-3 / sqrt(12) / 1.4 = 2.6 %.
        assert 0.015 < e.rms < 0.035
    text = report(errors)
    assert len(text.splitlines()) == 1 + 2 + 1
    assert "14 tensors; worst model.layers." in text


def test_scales_round_up_to_bf16():
    weight = torch.randn(500, 16) * torch.exp2(torch.linspace(-20, 20, 500))[:, None]
    weight[7] = 0
    quantized, scale = quantize_rows_bf16_scale(weight)
    exact = weight.double().abs().amax(1) / 448
    wide = scale[:, 0].double()
    nonzero = exact > 0
    assert (wide[nonzero] >= exact[nonzero] * (1 - 2**-23)).all()
    assert (wide[nonzero] <= exact[nonzero] * (1 + 2**-7)).all()  # one bf16 step
    assert scale[7] == 1 and not quantized[7].float().any()
    assert_round_trip(weight, quantized, scale[:, 0].float())


# Refusals


@pytest.fixture
def source(tmp_path) -> Path:
    return save_model(tmp_path / "source", "llama")


def test_an_existing_destination_is_kept(source, tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "precious").write_text("x")
    with pytest.raises(EngineError, match="exists and is not an empty directory"):
        quantize_checkpoint(source, tmp_path / "there")
    assert (tmp_path / "there" / "precious").read_text() == "x"
    (tmp_path / "empty").mkdir()
    quantize_checkpoint(source, tmp_path / "empty")
    assert open_checkpoint(tmp_path / "empty").scheme


def test_quantised_twice(source, tmp_path):
    quantize_checkpoint(source, tmp_path / "once")
    with pytest.raises(CheckpointError, match=r"is quantised already \(compressed-tensors"):
        quantize_checkpoint(tmp_path / "once", tmp_path / "twice")


def test_nan_leaves_no_destination(source, tmp_path):
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.self_attn.k_proj.weight"][0, 0] = float("nan")
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"NaN .* model\.layers\.1\.self_attn\.k_proj"):
        quantize_checkpoint(source, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("damage", ["missing", "shape"])
def test_what_loading_would_refuse_is_refused_before_the_work(source, tmp_path, damage):
    tensors = load_file(source / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    if damage == "missing":
        del tensors[name]
    else:
        tensors[name] = tensors[name][:-2].clone()
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        quantize_checkpoint(source, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["source"]


def test_other_architectures_are_refused(source, tmp_path):
    edit_json(source / "config.json", architectures=["GPT2LMHeadModel"])
    with pytest.raises(EngineError, match="architecture 'GPT2LMHeadModel' is not supported"):
        quantize_checkpoint(source, tmp_path / "out")


def test_command_line(source, tmp_path, capsys):
    assert main([str(source), str(tmp_path / "out"), "--shard-gb", "0.0002"]) == 0
    output, said = capsys.readouterr()
    assert "14 tensors; worst" in output and f"written: {tmp_path / 'out'}\n" in said
    for arguments, message in (
        (
            [str(tmp_path / "none"), str(tmp_path / "x")],
            f"SRC '{tmp_path}/none': no such directory",
        ),
        (["qwen2.5-7b", str(tmp_path / "x")], "SRC qwen2.5-7b is a preset"),
        ([str(source), str(tmp_path / "x"), "--shard-gb", "0"], "--shard-gb 0.0 is not a number"),
        ([str(source), str(tmp_path / "x"), "--shard-gb", "inf"], "--shard-gb inf is not a number"),
    ):
        assert main(arguments) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and message in error and error.count("\n") == 1


def test_a_destination_that_cannot_be_made(source, capsys, monkeypatch):
    def nothing(*_):
        raise AssertionError("quantised first")

    monkeypatch.setattr("engine.checkpoint.quantize._write_shards", nothing)
    assert main([str(source), "/proc/x"]) == 2
    assert capsys.readouterr().err.startswith("error: cannot write /proc/x: ")


def test_source_is_not_changed(source, tmp_path):
    copy = Path(shutil.copytree(source, tmp_path / "copy"))
    quantize_checkpoint(source, tmp_path / "out")
    for file in copy.iterdir():
        assert (source / file.name).read_bytes() == file.read_bytes()


def test_a_quantised_checkpoint_counts_as_one_everywhere(pair):
    """`resolve` is where every command learns what the weights are; what they do not allow is refused before loading."""
    source, out, _ = pair
    assert resolve(EngineConfig(model=str(out)))[0].quantization == "fp8"
    assert resolve(EngineConfig(model=str(source)))[0].quantization is None
    asked = EngineConfig(model=str(source), prefill_activations="fp8")
    with pytest.raises(EngineError, match="--prefill-activations fp8 needs FP8 weights"):
        resolve(asked)
    resolve(replace(asked, model=str(out)))
