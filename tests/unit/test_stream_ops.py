"""The trial of streams against simulated hardware queues. The real ones: tests/gpu/test_put_signal.py."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from engine.errors import DeviceError
from engine.runtime import stream_ops
from engine.runtime.stream_ops import GEQ, MemoryOp, independent, independent_streams, stream_batch
from tests.unit import stream_simulator
from tests.unit.stream_simulator import SharedQueues


@pytest.fixture(autouse=True)
def simulated(monkeypatch):
    monkeypatch.setattr(stream_ops, "stream_wait", stream_simulator.wait)
    words = torch.zeros(2, dtype=torch.int32)
    monkeypatch.setattr(stream_ops, "_host_words", lambda: words)
    monkeypatch.setattr(stream_ops, "some_work", lambda stream: stream.add(lambda: True))
    monkeypatch.setattr(stream_ops, "TRIAL_S", 0.02)


def test_a_set_is_tried_together():
    """Four queues: any one stream can be held, three at once as well; the fourth fills the last."""
    hardware = SharedQueues(4)
    work, *held = (hardware.stream() for _ in range(5))
    assert all(independent([stream], work) for stream in held)
    assert independent(held[:3], work)
    assert not independent(held, work)
    assert not any(hardware.queues), "all is released, whatever was found"
    assert independent(held[:3], work)


def test_a_stream_named_twice_is_held_once():
    hardware = SharedQueues(2)
    work, stream = hardware.stream(), hardware.stream()
    assert independent([stream, stream], work)
    assert independent([], work) and not independent([stream, work], work)


def test_streams_that_do_not_run_are_refused():
    """Nothing was held, and yet the work is not over: something else holds the only queue."""
    hardware = SharedQueues(1)
    other, work = hardware.stream(), hardware.stream()
    word = torch.full((1,), -1, dtype=torch.int32)
    stream_simulator.wait(other, word.data_ptr())
    assert not independent([], work)
    word.zero_()
    assert work.query() and other.query()


@pytest.mark.parametrize("queues, found", [(3, True), (2, False), (1, False)])
def test_independent_streams(monkeypatch, queues, found):
    hardware = SharedQueues(queues)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _device: hardware.stream())
    if not found:
        with pytest.raises(DeviceError, match="CUDA_DEVICE_MAX_CONNECTIONS"):
            independent_streams("cpu", "cpu", "cpu")
        return
    streams = independent_streams("cpu", "cpu", "cpu")
    assert len(set(streams)) == 3
    for one in streams:
        assert independent([s for s in streams if s is not one], one)


def test_a_batch_is_what_the_driver_is_given(monkeypatch):
    """In its order; negative words as the unsigned ones that they are."""
    driver = pytest.importorskip("cuda.bindings.driver")
    given = []

    def batch(stream, count, parameters, flags):
        given.append((stream, count, flags))
        for each in parameters:
            waits = each.operation == kinds.CU_STREAM_MEM_OP_WAIT_VALUE_32
            part = each.waitValue if waits else each.writeValue
            assert part.operation == each.operation
            given.append((each.operation.name, int(part.address), int(part.value), part.flags))
        return (codes.pop(0),)

    kinds, errors = driver.CUstreamBatchMemOpType, driver.CUresult
    codes = [errors.CUDA_SUCCESS, errors.CUDA_ERROR_INVALID_VALUE]
    fake = SimpleNamespace(
        CUstreamBatchMemOpType=kinds, CUstreamBatchMemOpParams=driver.CUstreamBatchMemOpParams,
        cuStreamBatchMemOp=batch,
    )  # fmt: skip
    monkeypatch.setattr(stream_ops, "driver", lambda: fake)
    monkeypatch.setattr(torch.cuda, "device", lambda _device: nullcontext())
    stream = SimpleNamespace(device="cuda:0", cuda_stream=7)
    stream_batch(stream, MemoryOp("write", 4096, -(2**31)), MemoryOp("wait", 8192))
    write, wait = "CU_STREAM_MEM_OP_WRITE_VALUE_32", "CU_STREAM_MEM_OP_WAIT_VALUE_32"
    assert given == [(7, 2, 0), (write, 4096, 2**31, 0), (wait, 8192, 0, GEQ)]
    with pytest.raises(DeviceError, match="cuStreamBatchMemOp failed: CUDA_ERROR_INVALID_VALUE"):
        stream_batch(stream, MemoryOp("wait", 8192))
