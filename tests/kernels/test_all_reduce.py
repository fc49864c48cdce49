"""All-reduce kernels: the sums, the special values, the waiting, and the protocol between real
processes.
"""

from __future__ import annotations

import time

import pytest
import torch

import engine.kernels.messages as messages
from engine.errors import EngineError
from engine.kernels.all_reduce import (
    TWO_SHOT_BYTES,
    AllReduceConfig,
    all_reduce,
    all_reduce_ref,
    heuristic,
    poll_residual,
    push,
)
from engine.kernels.flag_all_reduce import FlagWorkspace, flag_all_reduce
from engine.kernels.slots import LamportWorkspace, clear_slot, lamport_slots, peer_table
from tests.kernels.collective_group import (
    assert_same,
    checksum,
    fast_canonical_words,
    fast_sum_messages,
    inputs,
    random_delay,
    run_ranks,
    status_words,
)

SMALL = AllReduceConfig(block=32, num_warps=1, programs=3)  # several programs, each with a loop
NEAR_WRAP = 2**31 - 3  # flag epochs cross the sign of int32 within the test
LIMIT_US = 20_000_000  # a busy CI machine is not a lost peer
DTYPES = (torch.bfloat16, torch.float16)


def poisoned(shape, dtype, device):
    return torch.full(shape, float("nan"), dtype=dtype, device=device)


# ---- the sums, all ranks in one process and one stream, in lockstep


@pytest.mark.parametrize("world", [2, 3, 4, 8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_push_and_poll(world, dtype, device):
    shape = (3, 264)  # 99 chunks: four blocks of 32, the last with 3 lanes
    workspace = LamportWorkspace(world, *shape, slots=3)
    buffers = [workspace.allocate(device) for _ in range(world)]
    table = peer_table(buffers, device)
    status = status_words(device)
    for call in range(4):  # wraps round the three slots
        *partials, residual = (t.to(device) for t in inputs(call, world, shape, dtype))
        outs = [poisoned(shape, dtype, device) for _ in range(world)]
        if call == 1:  # in place
            outs = [residual.clone() for _ in range(world)]
        slot, clear = workspace.slot_offset(call), workspace.clear_offset(call)
        for r in range(world):
            push(partials[r], table, slot, rank=r, world=world, config=SMALL)
        for r in range(world):
            given = None if call == 2 else (outs[r] if call == 1 else residual)
            poll_residual(
                buffers[r],
                slot,
                clear,
                given,
                outs[r],
                status,
                rank=r,
                world=world,
                call_site=call,
                config=SMALL,
            )
        reference = all_reduce_ref(partials, None if call == 2 else residual)
        for r in range(world):
            assert_same(outs[r], reference, f"rank {r} call {call}")
            assert torch.equal(outs[r].view(torch.int16), outs[0].view(torch.int16))
    assert status[0] == 0
    # Only the two slots of the last two calls may hold data: the next one is armed.
    armed = buffers[0][workspace.slot_offset(4) :][: workspace.slot_bytes].view(torch.int16)
    assert bool((armed == -(2**15)).all())


@pytest.mark.parametrize("world", [2, 4, 8])
def test_flag_phases(world, device):
    """The split form, as virtual ranks launch it: all ranks publish before any reduces."""
    dtype = DTYPES[world == 4]
    shape = (1, 72) if world == 8 else (3, 264)  # 9 chunks on 8 ranks: some own nothing
    status = status_words(device)
    workspace = FlagWorkspace(world, *shape, programs=2)
    buffers = [workspace.allocate(device, NEAR_WRAP) for _ in range(world)]
    table = peer_table(buffers, device)
    for call in range(5):
        *partials, residual = (t.to(device) for t in inputs(call, world, shape, dtype))
        outs = [residual.clone() for _ in range(world)]
        for phase in ("publish", "reduce"):
            for r in range(world):
                flag_all_reduce(
                    partials[r], table, outs[r], outs[r], status, workspace, rank=r, world=world,
                    call_site=call, phase=phase, config=SMALL,
                )  # fmt: skip
        reference = all_reduce_ref(partials, residual)
        for r in range(world):
            assert_same(outs[r], reference, f"rank {r} call {call}")
            assert torch.equal(outs[r].view(torch.int16), outs[0].view(torch.int16))
    assert status[0] == 0


def test_reference_rounds_once():
    """256 + 1 + 1 in bf16 (8 significant bits): 258 is exact, two roundings would give 256."""
    parts = [torch.tensor([v]).bfloat16() for v in (256.0, 1.0, 1.0)]
    assert all_reduce_ref(parts).item() == 258.0
    assert all_reduce_ref(parts[:2], parts[2]).item() == 258.0
    # Rank order matters in fp32: (1e30 - 1e30) + 1 is 1, 1e30 + (-1e30 + 1) would be 0.
    big = [torch.tensor([v]).bfloat16() for v in (1e30, -1e30, 1.0)]
    assert all_reduce_ref(big).item() == 1.0
    assert all_reduce_ref([big[2], big[0], big[1]]).item() == 0.0
    negative = torch.tensor([-0.0]).bfloat16()
    assert all_reduce_ref([negative, negative]).view(torch.int16).item() == 0


def test_fast_arithmetic_of_the_long_runs_is_the_kernels_own(device, monkeypatch):
    if device != "cpu":
        pytest.skip("replaces the arithmetic in the interpreter only")
    monkeypatch.setattr(messages, "sum_messages", fast_sum_messages)
    monkeypatch.setattr(messages, "canonical_words", fast_canonical_words)
    test_push_and_poll(4, torch.bfloat16, device)
    test_push_and_poll(2, torch.float16, device)


# ---- waiting


def lone_call(device, world=2):
    shape = (1, 64)
    workspace = LamportWorkspace(world, *shape, slots=3)
    buffer = workspace.allocate(device)
    return workspace, buffer, status_words(device), poisoned(shape, torch.bfloat16, device)


def poll_once(workspace, buffer, status, out, limit_us=30_000, rank=0, call=1):
    poll_residual(
        buffer,
        workspace.slot_offset(call),
        workspace.clear_offset(call),
        None,
        out,
        status,
        rank=rank,
        world=workspace.world,
        call_site=40 + call,
        config=AllReduceConfig(block=32, num_warps=1),
        limit_us=limit_us,
    )
    if out.device.type == "cuda":
        torch.cuda.synchronize()


def test_expired_spin_reports_aborts_and_recovers(device):
    workspace, buffer, status, out = lone_call(device)
    table = peer_table([buffer, buffer], device)
    x = torch.ones(1, 64, dtype=torch.bfloat16, device=device)
    slot = workspace.slot_offset(1)
    push(x, table, slot, rank=0, world=2, config=SMALL)  # rank 1 never pushes
    poll_once(workspace, buffer, status, out)
    assert status[:5].tolist() == [1, 0, 41, slot, 1]
    # After an abort a spin ends at once, whatever its limit.
    start = time.monotonic()
    poll_once(workspace, buffer, status, out, limit_us=60_000_000, call=2)
    assert time.monotonic() - start < 5
    assert status[:5].tolist() == [1, 0, 41, slot, 1], "the first report stays"
    workspace.reset(buffer)
    status.zero_()
    for r in range(2):
        push(x, table, slot, rank=r, world=2, config=SMALL)
    poll_once(workspace, buffer, status, out)
    assert status[0] == 0 and bool((out == 2).all())


def test_half_arrived_word_is_not_taken(device):
    """A producer that stores 2 bytes a thread may fill one half of a word first (sync.py)."""
    workspace, buffer, status, out = lone_call(device)
    slot = buffer[workspace.slot_offset(1) :][: workspace.slot_bytes].view(torch.int16)
    slot.fill_(0x3F80)
    slot[64 + 11] = -(2**15)  # one value of rank 1 is missing
    poll_once(workspace, buffer, status, out)
    assert status[:5].tolist() == [1, 0, 41, workspace.slot_offset(1), 1]


def test_flag_expiry_names_the_peer(device):
    workspace = FlagWorkspace(2, 1, 64, programs=1)
    buffers = [workspace.allocate(device) for _ in range(2)]
    table = peer_table(buffers, device)
    status = status_words(device)
    x = torch.ones(1, 64, dtype=torch.bfloat16, device=device)
    flag_all_reduce(
        x, table, None, torch.empty_like(x), status, workspace, rank=0, world=2, call_site=5,
        limit_us=30_000,
    )  # fmt: skip
    if device == "cuda":
        torch.cuda.synchronize()
    assert status[0] == 1 and status[2] == 5 and status[4] == 1


# ---- arithmetic of the slots and the choice


def test_slot_counts():
    assert [lamport_slots(2 * layers) for layers in (1, 2, 3, 5, 7, 28, 64, 80)] == [
        2, 4, 3, 5, 7, 4, 4, 4,
    ]  # fmt: skip
    for calls in range(2, 200):
        slots = lamport_slots(calls)
        assert calls % slots == 0 and (slots >= 3 or calls == 2)
    for few in (0, 1):
        with pytest.raises(EngineError, match="at least 2"):
            lamport_slots(few)
    assert clear_slot(0, 2) == 0 and clear_slot(3, 4) == 1


def test_heuristic_and_limits():
    for world, first in TWO_SHOT_BYTES.items():
        assert heuristic(world, first - 16384).algorithm == "lamport"
        assert heuristic(world, first).algorithm == "two_shot"
        assert heuristic(world, 8 * 16384).algorithm == "lamport", "8 rows of 72B"
    with pytest.raises(EngineError, match="multiple of 8"):
        LamportWorkspace(2, 1, 12, 3)
    with pytest.raises(EngineError, match="prefill bucket"):
        LamportWorkspace(8, 65536, 8192, 3)
    with pytest.raises(EngineError, match="block"):
        AllReduceConfig(block=64, num_warps=4)
    with pytest.raises(EngineError, match="16-bit"):
        push(torch.zeros(1, 64), torch.zeros(2, dtype=torch.int64), 0, rank=0, world=2)


# ---- ranks as processes over shared memory (interpreter)

# Launches of a call. Split forms are the engine's: two slots, re-armed behind each poll, and messages of
# different sizes after each other, as graphs of different buckets have them.
LAUNCHES = {
    "lamport": ("all",),
    "lamport_split": ("push", "poll"),
    "flag": ("both",),
    "flag_split": ("publish", "reduce"),
}


def launch(algorithm, phase, x, buffer, table, space, residual, out, status, **common):
    """One launch of one rank."""
    if algorithm.startswith("flag"):
        flag_all_reduce(x, table, residual, out, status, space, phase=phase, **common)
        return
    call = common["call_site"]
    offsets = space.slot_offset(call), space.clear_offset(call)
    if phase == "push":
        where = {key: common[key] for key in ("rank", "world", "config")}
        push(x, table, offsets[0], **where)
    elif phase == "poll":
        poll_residual(buffer, *offsets, residual, out, status, **common)
    else:
        all_reduce(x, buffer, table, *offsets, residual, out, status, **common)


@pytest.mark.parametrize(
    ("algorithm", "world", "calls"),
    [
        ("lamport", 2, 1000),
        ("lamport", 4, 120),
        ("lamport", 8, 120),
        ("lamport_split", 4, 60),
        ("flag", 2, 60),
        ("flag", 4, 30),
        ("flag_split", 8, 16),
    ],
)
def test_processes(algorithm, world, calls, device, monkeypatch):
    if device != "cpu":
        pytest.skip(
            "ranks are processes only in the interpreter; bench/all_reduce.py does it on cards"
        )
    if calls >= 40:  # the arithmetic is slow in the interpreter, and proved by the tests above
        monkeypatch.setattr(messages, "sum_messages", fast_sum_messages)
        monkeypatch.setattr(messages, "canonical_words", fast_canonical_words)
    split = len(LAUNCHES[algorithm]) > 1
    shapes = [(1, 64), (1, 24), (1, 8), (1, 48)] if split else [(1, 64)]
    slots = 2 if split else lamport_slots(calls)
    config = AllReduceConfig(block=32, num_warps=1, programs=1)
    if algorithm.startswith("flag"):
        workspace = FlagWorkspace(world, *shapes[0], programs=1)
        buffers = [workspace.allocate("cpu", NEAR_WRAP).share_memory_() for _ in range(world)]
    else:
        workspace = LamportWorkspace(world, *shapes[0], slots=slots)
        buffers = [workspace.allocate("cpu").share_memory_() for _ in range(world)]
    table = peer_table(buffers, "cpu")
    status = torch.zeros(8, dtype=torch.int32).share_memory_()
    sums = torch.zeros(world, calls, dtype=torch.int64).share_memory_()
    tensors = [
        inputs(call, world, shapes[call % len(shapes)], DTYPES[call % 2])
        for call in range(min(calls, 64))
    ]
    references = [all_reduce_ref(partials, residual) for *partials, residual in tensors]

    def body(rank: int) -> None:
        for call in range(calls):
            *partials, residual = tensors[call % len(tensors)]
            out = poisoned(residual.shape, residual.dtype, "cpu")
            common = dict(rank=rank, world=world, call_site=call, config=config, limit_us=LIMIT_US)
            for phase in LAUNCHES[algorithm]:
                random_delay()
                launch(
                    algorithm, phase, partials[rank], buffers[rank], table, workspace, residual, out,
                    status, **common,
                )  # fmt: skip
            assert status[0] == 0, status.tolist()
            assert_same(out, references[call % len(tensors)], f"rank {rank} call {call}")
            sums[rank, call] = checksum(out)

    run_ranks(world, body)
    assert bool((sums == sums[0]).all()), "ranks hold different bits"
    assert sums[0].unique().numel() >= len(tensors) // 2
