"""The link probe's kernels on one device: the right pattern passes, any other word shows."""

from __future__ import annotations

import torch

from engine.kernels.link_probe import BLOCK, compare_pattern, write_pattern


def test_pattern_and_its_faults(device):
    buffer = torch.zeros(4 * BLOCK, dtype=torch.int32, device=device)
    wrong = torch.full((4,), -1, dtype=torch.int32, device=device)
    compare_pattern(buffer, 3, wrong)
    assert int(wrong.sum()) >= 4 * BLOCK - 4, "an unwritten buffer must not pass"
    write_pattern(buffer, 3)
    assert buffer.unique().numel() == buffer.numel()
    compare_pattern(buffer, 3, wrong)
    assert wrong.tolist() == [0, 0, 0, 0]
    compare_pattern(buffer, 4, wrong)
    assert min(wrong.tolist()) > BLOCK // 2, "another pair's pattern must not pass"
    buffer[2 * BLOCK + 17] ^= 1
    compare_pattern(buffer, 3, wrong)
    assert wrong.tolist() == [0, 0, 1, 0]
