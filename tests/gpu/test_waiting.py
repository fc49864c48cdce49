"""What waiting costs on the card: a poll ends with its last message, however long that took to come."""

from __future__ import annotations

import statistics

import pytest
import torch

from engine.kernels.all_reduce import poll_residual, push
from engine.kernels.slots import LamportWorkspace, peer_table
from engine.runtime.stream_ops import independent_streams

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

WORLD, ROWS, HIDDEN = 2, 512, 8192
CYCLES = 600_000  # about 0.3 ms at an H200's clock


def test_a_late_message_costs_its_lateness():
    """1056 warps poll while their rank waits 0.3 ms for its peer. Reading the abort word, which lies across PCIe, in
    each of them took another 0.6 ms (sync.py)."""
    device = torch.device("cuda")
    workspace = LamportWorkspace(WORLD, ROWS, HIDDEN, 3)
    buffer = workspace.allocate(device)
    table = peer_table([buffer, buffer], device)
    status = torch.zeros(8, dtype=torch.int32, pin_memory=True)
    x = torch.randn(ROWS, HIDDEN, device=device, dtype=torch.bfloat16)
    out = torch.empty_like(x)
    waiting, sending = independent_streams(device, device)

    def exchange(call: int, cycles: int) -> float:
        """us from the poll's start to its end, less those of the sender's delay and push."""
        slot, clear = workspace.slot_offset(call), workspace.clear_offset(call)
        times = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(2)]
        with torch.cuda.stream(waiting):
            times[0][0].record()
            poll_residual(
                buffer, slot, clear, None, out, status, rank=0, world=WORLD, call_site=call
            )
            times[0][1].record()
        with torch.cuda.stream(sending):
            times[1][0].record()
            torch.cuda._sleep(cycles)
            for rank in range(WORLD):
                push(x, table, slot, rank=rank, world=WORLD)
            times[1][1].record()
        torch.cuda.synchronize()
        poll, send = (start.elapsed_time(end) * 1e3 for start, end in times)
        return poll - send

    # Load every kernel before one may wait: loading waits for the device.
    torch.cuda._sleep(1)
    for rank in range(WORLD):
        push(x, table, workspace.slot_offset(0), rank=rank, world=WORLD)
    poll_residual(buffer, workspace.slot_offset(0), workspace.clear_offset(0), None, out, status,
                  rank=0, world=WORLD, call_site=0)  # fmt: skip
    torch.cuda.synchronize()
    beyond = statistics.median(exchange(call, CYCLES) for call in range(1, 10))
    assert torch.equal(out, x + x)
    assert beyond < 150, f"the poll ended {beyond:.0f} us after the push that it waited for"
    assert status.tolist() == [0] * 8
