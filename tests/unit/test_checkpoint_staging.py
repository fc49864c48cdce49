"""The chunked reader of the CUDA path, run on CPU buffers: every chunk boundary, every axis."""

from __future__ import annotations

import os
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


def same(got: torch.Tensor, want: torch.Tensor) -> bool:
    assert got.is_contiguous() and got.dtype == want.dtype and got.shape == want.shape
    return torch.equal(got.view(torch.uint8), want.contiguous().view(torch.uint8))


@pytest.mark.parametrize("chunk", [1, 48, 100, 48 * 7, 1 << 20])  # a row of "wide" is 48 bytes
@pytest.mark.parametrize(
    "name, axis, ranges",
    [
        ("wide", None, [(0, 37)]),
        ("wide", None, [(0, 37), (0, 37)]),
        ("wide", 0, [(5, 30)]),
        ("wide", 0, [(36, 37)]),
        ("wide", 0, [(37, 37)]),
        ("wide", 0, [(0, 10), (10, 20), (20, 30), (30, 37)]),
        ("wide", 0, [(0, 20), (0, 20), (20, 37), (20, 37)]),  # KV heads fewer than ranks
        ("wide", 0, [(30, 37), (2, 4), (37, 37)]),  # a gap, any order, an empty rank
        ("wide", 1, [(0, 24)]),
        ("wide", 1, [(7, 19)]),
        ("wide", 1, [(23, 24)]),
        ("wide", 1, [(0, 8), (8, 16), (16, 24), (24, 24)]),
        ("flat", None, [(0, 101)]),
        ("flat", 0, [(3, 100)]),
        ("flat", 0, [(0, 50), (50, 101)]),
        ("fp8", 1, [(4, 8)]),
        ("fp8", 1, [(0, 8), (8, 16)]),
    ],
)
def test_every_slice_and_chunk(headers, tensors, name, axis, ranges, chunk):
    staging = Staging(chunk)
    info = headers[name]
    for _ in range(2):  # the second time with used buffers
        wanted = dict(enumerate(ranges))
        devices = dict.fromkeys(wanted, CPU)
        got = staging.read(info, TORCH_DTYPES[info.dtype], axis, wanted, devices)
        assert list(got) == list(wanted)
        for rank, (start, stop) in wanted.items():
            whole = tensors[name]
            want = whole if axis is None else whole.narrow(axis, start, stop - start)
            assert same(got[rank], want), rank


@pytest.mark.parametrize("chunk", [48, 100, 1 << 20])
@pytest.mark.parametrize("axis, ranges", [(0, [(0, 20), (20, 37)]), (1, [(0, 8), (8, 24)])])
def test_rows_of_an_interleaved_weight_are_filled_in_place(headers, tensors, axis, ranges, chunk):
    info, whole = headers["wide"], tensors["wide"]
    wanted = dict(enumerate(ranges))
    want = {r: whole.narrow(axis, a, b - a) for r, (a, b) in wanted.items()}
    held = {
        r: torch.full((2 * len(w), w.shape[1]), float("nan")).bfloat16() for r, w in want.items()
    }
    into = {rank: weight[1::2] for rank, weight in held.items()}
    got = Staging(chunk).read(info, torch.bfloat16, axis, wanted, dict.fromkeys(wanted, CPU), into)
    for rank, weight in held.items():
        assert got[rank] is into[rank]
        assert torch.equal(weight[1::2], want[rank]) and weight[::2].isnan().all()


def test_a_byte_is_read_once_for_all_ranks(headers, tensors, monkeypatch):
    read = []
    preadv = os.preadv
    monkeypatch.setattr(
        os, "preadv", lambda f, views, at: read.append((at, preadv(f, views, at))) or read[-1][1]
    )
    info = headers["wide"]
    for axis, ranges in (
        (0, [(0, 20), (20, 37)]),
        (1, [(0, 12), (12, 24)]),
        (None, [(0, 37)] * 2),
    ):
        read.clear()
        wanted = dict(enumerate(ranges))
        Staging(100).read(info, torch.bfloat16, axis, wanted, dict.fromkeys(wanted, CPU))
        assert sum(count for _, count in read) == info.nbytes
        assert len({at for at, _ in read}) == len(read)


def test_threads_do_not_share_buffers(headers, tensors):
    staging = Staging(100)
    info = headers["wide"]

    def read(row: int) -> bool:
        got = staging.read(info, torch.bfloat16, 0, {3: (row, row + 3)}, {3: CPU})
        return torch.equal(got[3], tensors["wide"][row : row + 3])

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(read, list(range(34)) * 20))


def test_file_that_shrinks_while_loading(tmp_path):
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(64)}, file)
    info = read_header(file)["a"]
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match="ends inside a: it changed while loading"):
        Staging().read(info, torch.float32, None, {0: (0, 64)}, {0: CPU})
