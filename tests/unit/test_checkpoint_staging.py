"""The chunked reader, onto CPU tensors: every chunk boundary, every axis; what is read when, and what an error does."""

from __future__ import annotations

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from engine.checkpoint import read_ahead
from engine.checkpoint.aio import Reads
from engine.checkpoint.read_ahead import BUFFERS, Buffer, ReadAhead, Wanted
from engine.checkpoint.safetensors_header import read_header
from engine.checkpoint.staging import Staging
from engine.errors import CheckpointError
from tests.unit.checkpoint_fixtures import shrunk

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
        # Two devices in turn, which share neither rows that landed nor marks.
        devices = {rank: torch.device("cpu", 0) if rank % 2 else CPU for rank in wanted}
        got = staging.read(Wanted(info, axis, wanted), devices)
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
    devices = dict.fromkeys(wanted, CPU)
    got = Staging(chunk).read(Wanted(info, axis, wanted), devices, into)
    for rank, weight in held.items():
        assert got[rank] is into[rank]
        assert torch.equal(weight[1::2], want[rank]) and weight[::2].isnan().all()


@pytest.fixture
def reads(monkeypatch):
    """(offset, bytes) of each read that was begun."""
    seen, start = [], Reads.start

    def watched(self, reads):
        seen.extend((offset, nbytes) for _, _, nbytes, offset in reads)
        start(self, reads)

    monkeypatch.setattr(Reads, "start", watched)
    return seen


def test_a_byte_is_read_once_for_all_ranks(headers, tensors, reads):
    info = headers["wide"]
    for axis, ranges in (
        (0, [(0, 20), (20, 37)]),
        (1, [(0, 12), (12, 24)]),
        (None, [(0, 37)] * 2),
    ):
        reads.clear()
        wanted = dict(enumerate(ranges))
        devices = dict.fromkeys(wanted, CPU)
        Staging(100).read(Wanted(info, axis, wanted), devices)
        assert sum(count for _, count in reads) == info.nbytes
        assert len({at for at, _ in reads}) == len(reads)


@pytest.mark.parametrize(
    "axis, ranges, rows",
    [
        (0, [(0, 20), (20, 37)], [0, 20, 5, 25, 10, 30, 15, 35]),
        (0, [(20, 37), (0, 20)], [0, 20, 5, 25, 10, 30, 15, 35]),
        (0, [(0, 20), (0, 20), (20, 37), (20, 37)], [0, 20, 5, 25, 10, 30, 15, 35]),
        (0, [(0, 12), (12, 24), (24, 37)], [0, 15, 30, 5, 20, 35, 10, 25]),
        (1, [(0, 12), (12, 24)], [0, 5, 10, 15, 20, 25, 30, 35]),
        (None, [(0, 37)] * 2, [0, 5, 10, 15, 20, 25, 30, 35]),
    ],
)
def test_rows_of_several_ranks_come_in_turn(headers, axis, ranges, rows):
    chunks = Wanted(headers["wide"], axis, dict(enumerate(ranges))).chunks(5 * 48)
    assert [chunk.row for chunk in chunks] == rows


@pytest.mark.parametrize("chunk, gap", [(48, 0), (480, 16), (1 << 20, 26)])
def test_rows_that_no_rank_needs_are_not_read(headers, chunk, gap):
    """Before the first, behind the last, and whole chunks between them; a row of "wide" is 48 bytes."""
    wanted = Wanted(headers["wide"], 0, {0: (30, 36), 1: (2, 4), 2: (37, 37)})
    chunks = list(wanted.chunks(chunk))
    assert (chunks[0].row, chunks[-1].end) == (2, 36)
    assert sum(each.nbytes for each in chunks) == (2 + gap + 6) * 48


def test_threads_do_not_share_buffers(headers, tensors):
    staging = Staging(100)
    info = headers["wide"]

    def read(row: int) -> bool:
        wanted = Wanted(info, 0, {3: (row, row + 3)})
        got = staging.read(wanted, {3: CPU})
        return torch.equal(got[3], tensors["wide"][row : row + 3])

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(read, list(range(34)) * 20))


def test_file_that_shrinks_while_loading(tmp_path):
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(64)}, file)
    info = shrunk(read_header(file)["a"], 8)
    with pytest.raises(CheckpointError, match="ends inside a: it changed while loading"):
        Staging().read(Wanted(info, None, {0: (0, 64)}), {0: CPU})


def wanted_rows(headers, count):
    """Rows of "wide" (48 bytes each) and all of "flat", again and again."""
    each = [Wanted(headers["wide"], 0, {0: (i % 30, i % 30 + 7), 1: (3, 9)}) for i in range(count)]
    return [
        w
        for pair in zip(each, [Wanted(headers["flat"], None, {0: (0, 101)})] * count)
        for w in pair
    ]


def check(staging, wanted, tensors):
    got = staging.read(wanted, dict.fromkeys(wanted.ranges, CPU))
    for rank, (start, stop) in wanted.ranges.items():
        assert same(got[rank], tensors[wanted.info.name][start:stop])


def test_a_row_may_be_longer_than_the_buffer_so_far(headers, tensors):
    staging = Staging(1)
    for name in ("flat", "fp8", "wide", "fp8"):
        check(staging, Wanted(headers[name], None, {0: (0, len(tensors[name]))}), tensors)


@pytest.mark.parametrize("chunk, piece", [(1, 1), (100, 48), (1 << 20, 7), (1 << 20, 1 << 20)])
def test_read_ahead_gives_the_same_and_reads_nothing_twice(
    headers, tensors, reads, monkeypatch, chunk, piece
):
    monkeypatch.setattr(read_ahead, "PIECE_BYTES", piece)
    staging, order = Staging(chunk), wanted_rows(headers, 20)
    with staging.read_ahead(order, pinned=False):
        for wanted in order:
            check(staging, wanted, tensors)
    chunks = [each for wanted in order for each in wanted.chunks(chunk)]
    assert len(reads) == sum(-(-each.nbytes // piece) for each in chunks)
    assert sum(nbytes for _, nbytes in reads) == sum(each.nbytes for each in chunks)


def test_what_was_not_announced_is_read_all_the_same(headers, tensors):
    staging, order = Staging(100), wanted_rows(headers, 20)
    with staging.read_ahead(order[2:], pinned=False):
        for wanted in order:
            check(staging, wanted, tensors)
    check(staging, order[0], tensors)


def test_no_more_is_read_ahead_than_there_are_buffers(headers, tensors, reads):
    order = [Wanted(headers["wide"], 0, {0: (i, i + 1)}) for i in range(30)]
    staging = Staging(48)
    with staging.read_ahead(order, pinned=False):
        for i, wanted in enumerate(order):
            check(staging, wanted, tensors)
            assert i + 1 <= len(reads) <= i + 1 + BUFFERS
        assert len(reads) == 30


def test_stopping_ends_the_next_chunk(headers, tensors):
    staging, order = Staging(48), wanted_rows(headers, 4)
    with staging.read_ahead(order, pinned=False) as stop:
        check(staging, order[0], tensors)
        stop()
        with pytest.raises(CheckpointError, match="loading was stopped"):
            check(staging, order[1], tensors)


class Transfer:
    """An event behind a transfer that ends when it is waited for."""

    def __init__(self):
        self.waits = 0

    def query(self):
        return self.waits > 0

    def synchronize(self):
        self.waits += 1


def test_a_buffer_on_its_way_is_waited_for_only_when_it_is_needed(headers):
    chunks = list(Wanted(headers["wide"], None, {0: (0, 37)}).chunks(48))
    ahead, given = ReadAhead(chunks, 48, pinned=False), []
    for i in range(len(chunks)):
        buffer = ahead.take()
        given.append(Transfer())
        buffer._sent = {CPU: given[-1]}
        ahead.give(buffer)
        # No transfer ends by itself here. The first reads use new buffers; a later one needs the oldest transfer's.
        waits = [transfer.waits for transfer in given]
        assert sum(waits) <= max(0, i + 2 - BUFFERS) and waits == sorted(waits, reverse=True)
    assert {transfer.waits for transfer in given} <= {0, 1}
    assert sum(transfer.waits for transfer in given) == len(chunks) - BUFFERS


def test_a_buffer_is_busy_until_it_is_on_every_device():
    buffer, first, second = Buffer(1, pinned=False), Transfer(), Transfer()
    buffer._sent = {torch.device("cuda", i): each for i, each in enumerate((first, second))}
    for each in (first, second):
        assert buffer.busy
        each.synchronize()
    assert not buffer.busy


def test_an_ended_transfer_is_not_asked_for_again():
    buffer, events = Buffer(48, pinned=False), [Once(), Transfer()]
    buffer._sent = {torch.device("cuda", i): each for i, each in enumerate(events)}
    assert buffer.busy and buffer.busy
    events[1].synchronize()
    assert not buffer.busy and not buffer.busy


class Once(Transfer):
    """It has ended, and is asked once."""

    def query(self):
        assert not self.waits
        self.waits += 1
        return True


@pytest.mark.parametrize("room, fills", [(48, 42), (303, 40), (304, 22), (2048, 6), (1 << 20, 2)])
def test_chunks_of_one_file_share_a_buffer(headers, tmp_path, room, fills):
    """In their order, at places that do not meet."""
    save_file({"b": torch.arange(30.0)}, tmp_path / "b")
    other = read_header(tmp_path / "b")["b"]
    wanted = [Wanted(headers["wide"], None, {0: (0, 37)}), Wanted(other, None, {0: (0, 30)})]
    chunks = [chunk for each in wanted for chunk in each.chunks(24)]
    ahead, starts, buffers = ReadAhead(chunks, room, pinned=False), [], set()
    for chunk in chunks:
        assert ahead.is_next(chunk)
        buffer = ahead.take()
        buffers.add(buffer)
        if buffer.at == 0:
            starts.append(chunk)
        want = Path(chunk.info.file).read_bytes()[chunk.offset :][: chunk.nbytes]
        assert buffer.bytes(0, chunk.nbytes).numpy().tobytes() == want
        assert buffer.at + chunk.nbytes <= max(room, 48)
        ahead.give(buffer)
    ahead.close()
    assert len(starts) == fills and len(buffers) == min(fills, BUFFERS)


def test_leaving_early_waits_for_what_is_being_read(headers, tensors):
    staging, order = Staging(48), wanted_rows(headers, 40)
    for taken in (0, 1, 25):
        with pytest.raises(KeyboardInterrupt), staging.read_ahead(order, pinned=False):
            for wanted in order[:taken]:
                check(staging, wanted, tensors)
            buffers = weakref.WeakSet(staging._ahead._reading)
            begun = [buffer._reads for buffer in buffers]
            raise KeyboardInterrupt
        assert begun or not taken
        assert not any(reads.running for reads in begun)
        gc.collect()
        assert not buffers
    check(staging, order[-1], tensors)


@pytest.mark.parametrize("piece, room", [(1, 4), (4, 4), (3, 1 << 20)])  # alone in a buffer, or not
def test_an_error_comes_in_its_turn_and_stays(tmp_path, monkeypatch, piece, room):
    monkeypatch.setattr(read_ahead, "PIECE_BYTES", piece)
    order = []
    for name in "ab":
        save_file({name: torch.arange(64.0)}, tmp_path / name)
        info = read_header(tmp_path / name)[name]
        info = shrunk(info, 4) if name == "a" else info
        order += [Wanted(info, 0, {0: (i, i + 1)}) for i in range(64)]
    staging = Staging(room)
    with staging.read_ahead(order, pinned=False):
        for i in range(63):
            assert staging.read(order[i], {0: CPU})[0] == i
        for _ in range(2):  # not what was read of b
            with pytest.raises(CheckpointError, match="ends inside a: it changed while loading"):
                staging.read(order[63], {0: CPU})


@pytest.mark.parametrize("room", [256, 1 << 20])
def test_an_error_names_the_tensor_that_it_is_in(tmp_path, room):
    """Not the first or the last of those that share a buffer."""
    file = tmp_path / "model.safetensors"
    save_file({name: torch.arange(64.0) for name in "abc"}, file)
    header = read_header(file)
    last = max("abc", key=lambda name: header[name].offset)
    identity = shrunk(header[last], 4).identity
    header = {name: replace(info, identity=identity) for name, info in header.items()}
    first, third = sorted({*"abc"} - {last})
    order = [Wanted(header[name], None, {0: (0, 64)}) for name in (first, last, third)]
    staging = Staging(room)
    with staging.read_ahead(order, pinned=False):
        staging.read(order[0], {0: CPU})
        with pytest.raises(CheckpointError, match=f"ends inside {last}: it changed"):
            staging.read(order[1], {0: CPU})


def test_a_file_that_is_gone_is_an_error_in_its_turn(tmp_path):
    infos = []
    for name in "ab":
        save_file({name: torch.arange(8.0)}, tmp_path / name)
        infos.append(read_header(tmp_path / name)[name])
    (tmp_path / "b").unlink()
    order = [Wanted(info, None, {0: (0, 8)}) for info in infos]
    staging = Staging(8)
    with staging.read_ahead(order, pinned=False):
        assert torch.equal(staging.read(order[0], {0: CPU})[0], torch.arange(8.0))
        for _ in range(2):
            with pytest.raises(CheckpointError, match="No such file or directory: it changed"):
                staging.read(order[1], {0: CPU})
