"""Slot state on the CPU: zero, of the right type, and without memory until it is written to."""

from __future__ import annotations

import resource

import pytest
import torch

from engine.runtime.state import zeros


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int32])
def test_zeros_equal_those_of_torch(dtype):
    ours = zeros((3, 2, 5, 16), dtype, "cpu")
    theirs = torch.zeros((3, 2, 5, 16), dtype=dtype)
    assert ours.dtype == dtype and ours.shape == theirs.shape and ours.stride() == theirs.stride()
    assert torch.equal(ours.float(), theirs.float())
    ours[1, 1, 4] = 2
    assert ours.float().sum() == 2 * 16


def test_zeros_take_no_memory_until_written():
    def faults():
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

    before = faults()
    held = zeros((8, 1 << 20, 16), torch.float32, "cpu")  # 512 MiB: 131072 pages of 4 KiB
    assert faults() - before < 1000
    before = faults()
    held[3, :1024] = 1  # 64 KiB
    assert 0 < faults() - before < 1000
