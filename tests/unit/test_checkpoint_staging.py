"""The chunked reader of the CUDA path, run on CPU buffers: every chunk boundary, every axis."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors.torch import save_file

from engine.checkpoint.safetensors_header import read_header
from engine.checkpoint.source import TORCH_DTYPES
from engine.checkpoint.staging import Staging
from engine.errors import CheckpointError

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def tensors():
    generator = torch.Generator().manual_seed(0)
    return {
        "wide": torch.randn(37, 24, generator=generator).bfloat16(),
        "flat": torch.randn(101, generator=generator),
        "fp8": torch.randn(20, 16, generator=generator).to(torch.float8_e4m3fn),
    }


@pytest.fixture(scope="module")
def headers(tensors, tmp_path_factory):
    file = tmp_path_factory.mktemp("staging") / "model.safetensors"
    save_file(tensors, file)
    return read_header(file)


@pytest.mark.parametrize("chunk", [1, 48, 100, 48 * 7, 1 << 20])  # a row of "wide" is 48 bytes
@pytest.mark.parametrize(
    "name, axis, start, stop",
    [
        ("wide", None, 0, 37),
        ("wide", 0, 5, 30),
        ("wide", 0, 36, 37),
        ("wide", 0, 37, 37),
        ("wide", 1, 0, 24),
        ("wide", 1, 7, 19),
        ("wide", 1, 23, 24),
        ("flat", None, 0, 101),
        ("flat", 0, 3, 100),
        ("fp8", 1, 4, 8),
    ],
)
def test_every_slice_and_chunk(headers, tensors, name, axis, start, stop, chunk):
    staging = Staging(chunk)
    info = headers[name]
    for _ in range(2):  # the second time with used buffers
        got = staging.read(info, TORCH_DTYPES[info.dtype], axis, start, stop, CPU)
        want = tensors[name] if axis is None else tensors[name].narrow(axis, start, stop - start)
        assert got.is_contiguous() and got.dtype == want.dtype
        assert torch.equal(got.view(torch.uint8), want.contiguous().view(torch.uint8))


def test_threads_do_not_share_buffers(headers, tensors):
    staging = Staging(100)
    info = headers["wide"]

    def read(row: int) -> bool:
        got = staging.read(info, torch.bfloat16, 0, row, row + 3, CPU)
        return torch.equal(got, tensors["wide"][row : row + 3])

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(read, list(range(34)) * 20))


def test_file_that_shrinks_while_loading(tmp_path):
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(64)}, file)
    info = read_header(file)["a"]
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match="ends inside a: it changed while loading"):
        Staging().read(info, torch.float32, None, 0, 64, CPU)
