"""Loading in chunks of every size: the same bits, nothing read that was not announced. tests/gpu/test_checkpoint.py has the
transfers to GPUs and their order."""

from __future__ import annotations

import pytest
import torch

from engine.checkpoint.load import load_ranks
from engine.checkpoint.source import CheckpointSource
from engine.errors import CheckpointError
from tests.unit.checkpoint_fixtures import save_model, specs_of, store_fp8

FORMATS = ("fp32", "bf16", "channel", "tensor", "block")


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    folder = tmp_path_factory.mktemp("staged")
    made = {"fp32": save_model(folder / "fp32", "qwen2", shard_size="200KB")}
    for kind in FORMATS[1:]:
        made[kind] = save_model(folder / kind, "qwen2")
        if kind == "bf16":
            cast(made[kind])
        else:
            store_fp8(made[kind], kind)
    return made


def cast(directory) -> None:
    """Its tensors as BF16, which is read straight into BF16 weights."""
    from safetensors.torch import load_file, save_file

    file = directory / "model.safetensors"
    tensors = {name: value.bfloat16() for name, value in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("quantization", [None, "fp8"])
@pytest.mark.parametrize("kind", FORMATS)
def test_same_bits_in_chunks_of_any_size(directories, kind, quantization, tp):
    directory, devices = directories[kind], dict.fromkeys(range(tp), "cpu")
    specs = CheckpointSource(directory).index.adapt(specs_of(directory, tp))
    want = load_ranks(specs, CheckpointSource(directory), devices, torch.bfloat16, quantization)
    for chunk in (1, 1 << 10):
        source = CheckpointSource(directory, chunk)
        read_ahead = source.read_ahead

        def announced(parts, source=source, read_ahead=read_ahead):
            # Whatever is read was announced, in the same order: the placing thread reads nothing itself.
            source._staging._read_now = None
            return read_ahead(parts)

        source.read_ahead = announced
        got = load_ranks(specs, source, devices, torch.bfloat16, quantization)
        for rank, weights in want.items():
            assert list(got[rank]) == list(weights)
            for name, loaded in weights.items():
                other = got[rank][name]
                same = torch.equal(loaded.weight.view(torch.uint8), other.weight.view(torch.uint8))
                assert same and loaded.weight.dtype == other.weight.dtype, (rank, name)
                assert (loaded.scale is None) == (other.scale is None)
                assert loaded.scale is None or torch.equal(loaded.scale, other.scale), (rank, name)


@pytest.mark.parametrize("value", [0x7F, 0xFF])
def test_nan_of_an_fp8_weight_is_found_where_it_was_read(directories, monkeypatch, value):
    directory = directories["channel"]
    name = "model.layers.1.mlp.gate_proj.weight"  # every other row of gate_up
    specs = CheckpointSource(directory).index.adapt(specs_of(directory, 2))
    source = CheckpointSource(directory)
    read = source._staging.read

    def spoiled(wanted, *args):
        out = read(wanted, *args)
        if wanted.info.name == name:
            out[1].view(torch.uint8)[3, 4] = value
        return out

    monkeypatch.setattr(source._staging, "read", spoiled)
    with pytest.raises(CheckpointError, match=f"NaN or infinite values .* in {name}$"):
        load_ranks(specs, source, {0: "cpu", 1: "cpu"}, torch.bfloat16, "fp8")
