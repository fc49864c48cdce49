"""Every way a model directory can be broken gives one clear line, before a tensor is read."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from engine.checkpoint.index import INDEX, open_checkpoint
from engine.checkpoint.load import load_rank
from engine.checkpoint.read_ahead import Buffer
from engine.checkpoint.safetensors_header import read_header
from engine.checkpoint.source import CheckpointSource
from engine.errors import CheckpointError
from tests.unit.checkpoint_fixtures import edit_json, save_model, specs_of


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    return save_model(tmp_path_factory.mktemp("whole"), "qwen2")


@pytest.fixture(scope="module")
def sharded(tmp_path_factory) -> Path:
    directory = save_model(tmp_path_factory.mktemp("sharded"), "qwen2", shard_size="200KB")
    assert len(list(directory.glob("*.safetensors"))) > 3
    return directory


@pytest.fixture
def copy(sharded, tmp_path) -> Path:
    """A sharded directory that a test may break."""
    return Path(shutil.copytree(sharded, tmp_path / "model"))


def shards(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.safetensors"))


def refusal(directory: Path) -> str:
    """The one line that loading this directory ends in; fails if any tensor was read before it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Buffer, "start", lambda *_: pytest.fail("a tensor was read"))
        with pytest.raises(CheckpointError) as e:
            load_rank(specs_of(directory), CheckpointSource(directory), 0, "cpu", torch.float32)
    message = str(e.value)
    assert "\n" not in message
    assert str(directory) in message
    return message


@pytest.mark.parametrize("fixture", ["whole", "sharded"])
def test_headers_agree_with_the_safetensors_library(fixture, request):
    directory = request.getfixturevalue(fixture)
    index = open_checkpoint(directory)
    index.check(specs_of(directory).values())
    seen = 0
    for file in shards(directory):
        with safe_open(file, "pt") as f:
            for name in f.keys():  # noqa: SIM118
                info = index.tensors[name]
                view = f.get_slice(name)
                assert (info.file, info.dtype) == (file, view.get_dtype())
                assert list(info.shape) == view.get_shape()
                seen += 1
    assert seen == len(index.tensors) > 20
    assert index.files == shards(directory)
    assert index.nbytes == sum(t.nbytes for t in load_file_all(directory).values())


def load_file_all(directory: Path) -> dict[str, torch.Tensor]:
    return {k: v for file in shards(directory) for k, v in load_file(file).items()}


def test_missing_shard_is_named(copy):
    gone = shards(copy)[1]
    gone.unlink()
    assert f"1 file named by {INDEX} missing: {gone.name}" in refusal(copy)


def test_all_missing_shards_are_listed_together(copy):
    for file in shards(copy)[:2]:
        file.unlink()
    message = refusal(copy)
    assert "2 files" in message
    assert "model-00001" in message and "model-00002" in message


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_truncated_file(copy, keep):
    file = shards(copy)[1]
    data = file.read_bytes()
    file.write_bytes(data[:keep])
    message = refusal(copy)
    assert f"{file.name} is truncated" in message
    if keep == -1:
        assert f"{len(data) - 1} bytes of {len(data)}" in message


def test_two_truncated_files_are_listed_together(copy):
    for file in shards(copy)[:2]:
        file.write_bytes(file.read_bytes()[:-7])
    assert refusal(copy).count("is truncated") == 2


def test_trailing_bytes(copy):
    file = shards(copy)[0]
    file.write_bytes(file.read_bytes() + b"x")
    assert f"{file.name} is damaged" in refusal(copy)


def test_git_lfs_pointer(copy):
    file = shards(copy)[0]
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")
    assert f"{file.name} is a Git LFS pointer" in refusal(copy)


@pytest.mark.parametrize(
    "header",
    [
        b"not json",
        b"[]",
        b'{"a": 1}',
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0]}}',
        b'{"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}',
    ],
)
def test_damaged_header(copy, header):
    file = shards(copy)[0]
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    assert f"{file.name} is damaged" in refusal(copy)


def test_index_naming_an_absent_tensor(copy):
    index = json.loads((copy / INDEX).read_text())
    index["weight_map"]["model.ghost.weight"] = shards(copy)[0].name
    (copy / INDEX).write_text(json.dumps(index))
    message = refusal(copy)
    assert "disagrees with the files on 1 tensor: model.ghost.weight (not in model-00001" in message


def test_index_naming_the_wrong_file(copy):
    index = json.loads((copy / INDEX).read_text())
    name = "model.norm.weight"
    true = index["weight_map"][name]
    index["weight_map"][name] = next(f.name for f in shards(copy) if f.name != true)
    (copy / INDEX).write_text(json.dumps(index))
    message = refusal(copy)
    assert f"{name} ({index['weight_map'][name]} in the index, {true} in fact)" in message


def test_tensor_that_the_index_does_not_list(copy):
    index = json.loads((copy / INDEX).read_text())
    del index["weight_map"]["model.norm.weight"]
    (copy / INDEX).write_text(json.dumps(index))
    assert "model.norm.weight (in model-000" in refusal(copy)


def test_tensor_in_two_files(copy):
    first, second = shards(copy)[:2]
    save_file(load_file(second) | {(name := min(load_file(first))): torch.ones(3)}, second)
    assert f"1 tensor in two files: {name} ({first.name}, {second.name})" in refusal(copy)


def test_damaged_index(copy):
    (copy / INDEX).write_text("{}")
    assert "is not a safetensors index" in refusal(copy)


def test_index_pointing_out_of_the_directory(copy):
    edit_json(copy / INDEX, weight_map={"a": "../secret.safetensors"})
    assert "names no file of this directory" in refusal(copy)


def test_shards_without_an_index(copy):
    (copy / INDEX).unlink()
    assert f"safetensors files but no {INDEX}" in refusal(copy)


def test_single_file_beside_an_index_that_does_not_name_it(copy):
    save_file({"a": torch.ones(1)}, copy / "model.safetensors")
    assert "remove one of them" in refusal(copy)


def test_no_weights_names_what_is_there(copy):
    for file in [*shards(copy), copy / INDEX]:
        file.unlink()
    (copy / "pytorch_model.bin").write_bytes(b"x")
    assert "found pytorch_model.bin: only safetensors is read" in refusal(copy)


def change(directory: Path, edit) -> None:
    """Rewrite a single-file checkpoint through `edit(tensors)`."""
    tensors = load_file(directory / "model.safetensors")
    edit(tensors)
    save_file(tensors, directory / "model.safetensors")


@pytest.fixture
def single(whole, tmp_path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "model"))


def test_renamed_tensor_is_missing_and_unknown(single):
    def rename(tensors):
        tensors["model.layers.1.mlp.dwn_proj.weight"] = tensors.pop(
            "model.layers.1.mlp.down_proj.weight"
        )

    change(single, rename)
    message = refusal(single)
    assert "1 tensor missing: model.layers.1.mlp.down_proj.weight" in message
    assert "1 tensor unknown to this model: model.layers.1.mlp.dwn_proj.weight" in message


def test_unknown_tensor(single):
    change(single, lambda t: t.update({"model.extra.bias": torch.ones(2)}))
    message = refusal(single)
    assert "unknown to this model: model.extra.bias" in message
    assert "missing" not in message


def test_many_missing_tensors_are_counted_not_all_printed(single):
    change(single, lambda t: [t.pop(n) for n in list(t) if ".layers.1." in n])
    message = refusal(single)
    assert "12 tensors missing" in message
    assert "and 4 more" in message


def test_rotary_inv_freq_is_ignored(single):
    change(
        single, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})
    )
    load_rank(specs_of(single), CheckpointSource(single), 0, "cpu", torch.float32)


def test_missing_lm_head_points_at_tying(single):
    change(single, lambda t: t.pop("lm_head.weight"))
    assert "tie_word_embeddings" in refusal(single)


def test_wrong_shapes_are_listed_together(single):
    edit_json(single / "config.json", intermediate_size=208)
    message = refusal(single)
    assert "wrong shape" in message
    assert "model.layers.0.mlp.gate_proj.weight is [200, 112], config.json asks for [208, 112]" in (
        message
    )
    assert message.count("config.json asks for") == 6


def test_unsupported_dtype(single):
    change(single, lambda t: t.update({"model.norm.weight": t["model.norm.weight"].double()}))
    message = refusal(single)
    assert "unsupported dtype: model.norm.weight is F64; supported: BF16, F16, F32" in message


@pytest.mark.parametrize(
    "quantization, named",
    [
        ({"quant_method": "awq", "bits": 4}, "awq"),
        ({"quant_method": "gptq"}, "gptq"),
        ({"quant_method": "bitsandbytes"}, "bitsandbytes"),
        (
            {"quant_method": "compressed-tensors", "format": "pack-quantized"},
            "compressed-tensors (pack-quantized)",
        ),
    ],
)
def test_quantised_checkpoints_are_named(single, quantization, named):
    edit_json(single / "config.json", quantization_config=quantization)
    message = refusal(single)
    assert f"quantised checkpoint ({named}) is not supported" in message


def test_modelopt_is_named_from_its_own_file(single):
    (single / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "NVFP4"}}')
    assert "quantised checkpoint (modelopt NVFP4)" in refusal(single)


def test_quantised_names_without_a_config_are_named(single):
    change(single, lambda t: t.update({"model.layers.0.mlp.up_proj.qweight": torch.ones(2)}))
    assert "(GPTQ or AWQ, as model.layers.0.mlp.up_proj.qweight shows)" in refusal(single)


def test_header_reader_counts_every_tensor(whole):
    assert set(read_header(whole / "model.safetensors")) == set(load_file_all(whole))


def test_a_model_loads_without_asserts(tmp_path):
    """python -O drops assert statements whole: none may do what the engine needs."""
    save_model(tmp_path)
    code = (
        "from engine import LLM, SamplingParams\n"
        f"with LLM({str(tmp_path)!r}, device='cpu', max_num_seqs=1) as llm:\n"
        "    out = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2, ignore_eos=True))\n"
        "print(__debug__, len(out[0].outputs[0].token_ids))"
    )
    command = [sys.executable, "-O", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout == "False 2\n", done.stderr
