"""Scales of FP8 weights by themselves: one read for all threads, errors, a file that changes behind it."""

from __future__ import annotations

import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.checkpoint.load import load_rank
from engine.checkpoint.scales import Scales
from engine.checkpoint.source import CheckpointSource
from engine.errors import CheckpointError
from engine.weights import Part
from tests.unit.checkpoint_fixtures import save_model, specs_of, store_fp8

UP = Part("model.layers.1.mlp.up_proj.weight", (200, 112), None, ())
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    made = save_model(tmp_path_factory.mktemp("scales") / "m", "qwen2")
    store_fp8(made, "channel")
    return made


@pytest.fixture
def copy(directory, tmp_path) -> Path:
    return Path(shutil.copytree(directory, tmp_path / "copy"))


def edit(directory: Path, **changes: torch.Tensor | None) -> None:
    file = directory / "model.safetensors"
    tensors = {**load_file(file), **{UP.name + key: value for key, value in changes.items()}}
    save_file({k: v for k, v in tensors.items() if v is not None}, file)


def test_threads_that_ask_first_together_read_once(directory, monkeypatch):
    read, reads = Scales._read, []

    def slow(self):
        reads.append(self)
        time.sleep(0.05)
        return read(self)

    monkeypatch.setattr(Scales, "_read", slow)
    source = CheckpointSource(directory)
    want = load_file(directory / "model.safetensors")[f"{UP.name}_scale"].float()[3:9, 0]
    with ThreadPoolExecutor(8) as pool:
        for got in pool.map(lambda _: source._scales.of_rows(UP, (3, 9), CPU), range(16)):
            assert torch.equal(got, want)
    assert len(reads) == 1


def test_a_bad_scale_is_refused_each_time_and_without_a_check_before(copy):
    edit(copy, _scale=torch.full((200, 1), float("nan")))
    source = CheckpointSource(copy)
    for _ in range(2):
        with pytest.raises(CheckpointError, match=f"not finite: {UP.name}_scale$"):
            source.read(UP, 0, "cpu")


def test_an_fp8_weight_without_a_scale(copy):
    edit(copy, _scale=None)
    with pytest.raises(CheckpointError, match=f"{UP.name} has no scale"):
        CheckpointSource(copy).read(UP, 0, "cpu")


def test_a_file_that_changes_between_the_scales_and_the_weights(copy):
    source = CheckpointSource(copy)
    source.check_scales()
    file = copy / "model.safetensors"
    os.utime(file, ns=(0, file.stat().st_mtime_ns + 1))
    specs = source.index.adapt(specs_of(copy))
    with pytest.raises(CheckpointError, match="changed while loading: start again"):
        load_rank(specs, source, 0, "cpu", torch.bfloat16, "fp8")


@pytest.mark.parametrize("quantization", [None, "fp8"])
@pytest.mark.parametrize("first", [False, True])
def test_scales_of_one_inference_mode_serve_the_other(directory, quantization, first):
    source = CheckpointSource(directory)
    specs = source.index.adapt(specs_of(directory))
    with torch.inference_mode(first):
        source.check_scales()
    with torch.inference_mode(not first):
        got = load_rank(specs, source, 0, "cpu", torch.bfloat16, quantization)
    want = load_rank(specs, CheckpointSource(directory), 0, "cpu", torch.bfloat16, quantization)
    for name, loaded in want.items():
        assert torch.equal(got[name].weight.float(), loaded.weight.float())
        assert got[name].weight.is_inference() is not first


def test_what_is_loaded_does_not_share_memory_with_the_scales(directory):
    """Which serve every load of the source."""
    source = CheckpointSource(directory)
    specs = source.index.adapt(specs_of(directory))
    for _ in range(2):
        down = load_rank(specs, source, 0, "cpu", torch.bfloat16, "fp8")["1.down"]
        want = load_file(directory / "model.safetensors")[
            "model.layers.1.mlp.down_proj.weight_scale"
        ]
        assert torch.equal(down.scale, want.float()[:, 0])
        down.scale.zero_()
