"""Loading onto a card gives the same bits as loading on the CPU: files, dummy weights, FP8."""

from __future__ import annotations

import pytest
import torch

from engine.checkpoint.dummy import DummySource
from engine.checkpoint.fp8 import quantize_rows
from engine.checkpoint.load import load_ranks
from engine.checkpoint.source import CheckpointSource
from engine.config import from_dir
from engine.errors import CheckpointError
from engine.weights import Part, WeightSpec
from tests.unit.checkpoint_fixtures import save_model, specs_of, store_fp8

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpu")
    made = {"bf16": save_model(folder / "bf16", "qwen2", shard_size="200KB")}
    for kind in ("channel", "tensor", "block"):
        made[kind] = save_model(folder / kind, "qwen2")
        store_fp8(made[kind], kind)
    return made


def same(cpu, card) -> None:
    assert cpu.keys() == card.keys()
    for name, want in cpu.items():
        got = card[name]
        assert got.weight.device.type == "cuda" and got.weight.dtype == want.weight.dtype
        assert torch.equal(got.weight.cpu().view(torch.uint8), want.weight.view(torch.uint8)), name
        assert (got.scale is None) == (want.scale is None)
        if want.scale is not None:
            assert torch.equal(got.scale.cpu(), want.scale), name


@pytest.mark.parametrize("chunk", [1 << 10, 16 << 20])
@pytest.mark.parametrize("quantization", [None, "fp8"])
@pytest.mark.parametrize("kind", ["bf16", "channel", "tensor", "block"])
def test_checkpoint(directories, kind, quantization, chunk):
    directory, tp = directories[kind], 4
    source = CheckpointSource(directory, chunk)
    specs = source.index.adapt(specs_of(directory, tp))
    devices = {rank: f"cuda:{rank % torch.cuda.device_count()}" for rank in range(tp)}
    card = load_ranks(specs, source, devices, torch.bfloat16, quantization)
    cpu = load_ranks(specs, source, dict.fromkeys(range(tp), "cpu"), torch.bfloat16, quantization)
    for rank in range(tp):
        same(cpu[rank], card[rank])


@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_dummy(directories, quantization):
    directory, tp = directories["bf16"], 2
    source, specs = DummySource(from_dir(directory), 7), specs_of(directory, tp)
    card = load_ranks(specs, source, {0: "cuda", 1: "cuda"}, torch.bfloat16, quantization)
    cpu = load_ranks(specs, source, {0: "cpu", 1: "cpu"}, torch.bfloat16, quantization)
    for rank in range(tp):
        same(cpu[rank], card[rank])


def test_quantisation_is_the_same_on_both():
    weight = torch.randn(300, 515) * torch.exp2(torch.linspace(-30, 30, 300))[:, None]
    for dtype in (torch.float32, torch.bfloat16):
        value = weight.to(dtype)
        cpu, card = quantize_rows(value), quantize_rows(value.cuda())
        assert torch.equal(card[1].cpu(), cpu[1])
        assert torch.equal(card[0].cpu().view(torch.uint8), cpu[0].view(torch.uint8))


class Late:
    """A source whose values reach the device 20 ms after they were asked for."""

    def __init__(self, value: torch.Tensor):
        self.value = value

    def read(self, part, rank, device):
        torch.cuda._sleep(40_000_000)  # cycles
        return self.value.to(device, non_blocking=True)


@pytest.mark.parametrize("last", [1.0, float("nan")])
def test_values_are_looked_at_behind_their_transfers(last):
    """In a stream beside: not what the memory held before, nor too early for the last value."""
    rows, columns = 1024, 4096
    value = torch.ones(rows, columns, dtype=torch.bfloat16).pin_memory()
    value[-1, -1] = last
    torch.cuda.empty_cache()
    held = torch.full((rows, columns), float("nan"), dtype=torch.bfloat16, device="cuda")
    place = held.data_ptr()
    torch.cuda.synchronize()
    del held  # the weight's memory will be this
    specs = [WeightSpec("w", (Part("w", (rows, columns), None, ()),))]
    load = lambda: load_ranks(specs, Late(value), {0: "cuda"}, torch.bfloat16)
    if last == 1.0:
        assert load()[0]["w"].weight.data_ptr() == place
    else:
        with pytest.raises(CheckpointError, match=r"NaN or infinite values .* in w$"):
            load()
