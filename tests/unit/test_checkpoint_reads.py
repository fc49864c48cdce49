"""What is under the chunked reader: asynchronous reads and what stands in for them, descriptors, transfers under way."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from engine.checkpoint import aio, read_ahead
from engine.checkpoint.aio import Reads
from engine.checkpoint.read_ahead import Buffer, ReadAhead, Wanted
from engine.checkpoint.safetensors_header import read_header
from engine.checkpoint.staging import Staging
from engine.errors import CheckpointError
from tests.unit.checkpoint_fixtures import shrunk

CPU = torch.device("cpu")
VALUES = torch.randn(99, 12, generator=torch.Generator().manual_seed(0))  # rows of 48 bytes


@pytest.fixture(scope="module")
def info(tmp_path_factory):
    file = tmp_path_factory.mktemp("reads") / "model.safetensors"
    save_file({"a": VALUES}, file)
    return read_header(file)["a"]


@pytest.fixture
def rows(info):
    """Its rows, three by three."""
    return [Wanted(info, 0, {0: (i, i + 3)}) for i in range(0, 99, 3)]


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def check(staging: Staging, wanted: Wanted) -> None:
    [(start, stop)] = wanted.ranges.values()
    assert torch.equal(staging.read(wanted, {0: CPU})[0], VALUES[start:stop])


def test_asynchronous_reads(tmp_path):
    file = tmp_path / "numbers"
    content = os.urandom(1 << 20)
    file.write_bytes(content)
    memory = torch.zeros(1 << 20, dtype=torch.uint8)
    files = [os.open(file, os.O_RDONLY) for _ in range(32)]
    reads, begin = Reads(), memory.data_ptr()
    for count in (1, 32, 7):
        memory.zero_()
        reads.start([(files[i], begin + (i << 15), 1 << 15, i << 15) for i in range(count)])
        assert reads.running
        assert reads.wait() == [1 << 15] * count and not reads.running
        assert memory.numpy().tobytes() == content[: count << 15].ljust(1 << 20, b"\0")
    reads.start([(files[0], begin, 100, (1 << 20) - 10), (files[1], begin + 100, 100, 1 << 20)])
    assert reads.wait() == [10, 0]
    os.close(files[1])
    reads.start([(file, begin, 100, 0) for file in files[:3]])  # one fails, all are waited for
    with pytest.raises(OSError, match="Bad file descriptor"):
        reads.wait()
    assert not reads.running
    for descriptor in {*files} - {files[1]}:
        os.close(descriptor)


def test_a_read_that_is_not_accepted(info):
    """The others run, and are waited for."""
    memory, reads = torch.zeros(96, dtype=torch.uint8), Reads()
    with open(info.file, "rb") as file:
        each = [(file.fileno(), memory.data_ptr() + i * 48, 48, info.offset) for i in range(2)]
        reads.start(each)
        assert reads.wait() == [48, 48]
        memory.zero_()
        reads._controls[0].reqprio = 99
        with pytest.raises(OSError, match="Invalid argument"):
            reads.start(each)
        assert reads.running
        with pytest.raises(OSError, match="Invalid argument"):
            reads.wait()
        assert not reads.running
    assert torch.equal(memory[48:].view(torch.float32), VALUES[0])


def test_a_signal_while_waiting():
    """Ctrl-C: the reads run on, and are waited for again before their memory goes. A read of a pipe waits for a writer."""

    def interrupt(*_):
        raise KeyboardInterrupt

    memory, reads, (out, into) = torch.zeros(4, dtype=torch.uint8), Reads(), os.pipe()
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        reads.start([(out, memory.data_ptr(), 4, 0)])
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(KeyboardInterrupt):
            reads.wait()
        assert reads.running
        os.write(into, b"1234")
        assert reads.wait() == [4] and not reads.running
    finally:
        signal.signal(signal.SIGALRM, before)
        os.close(into)
        os.close(out)
    assert memory.numpy().tobytes() == b"1234"


def test_reads_are_waited_for_some_at_a_time(info):
    """Each failure with those that it belongs to; all of the rest at last."""
    memory, reads = torch.zeros(5 * 48, dtype=torch.uint8), Reads()
    with open(info.file, "rb") as file:
        files = [file.fileno()] * 2 + [-1] + [file.fileno()] * 2
        starts = enumerate(files)
        reads.start([(f, memory[i * 48 :].data_ptr(), 48, info.offset + i * 48) for i, f in starts])
        assert reads.wait(2) == [48, 48]
        assert torch.equal(memory[:96].view(torch.float32).view(2, 12), VALUES[:2])
        assert reads.running and reads.wait(0) == []
        with pytest.raises(OSError, match="Bad file descriptor"):
            reads.wait(1)
        assert reads.running and reads.wait() == [48, 48] and not reads.running
    assert torch.equal(memory[144:].view(torch.float32).view(2, 12), VALUES[3:5])


@pytest.mark.parametrize("piece", [7, 1 << 20])
def test_another_c_library(rows, monkeypatch, piece):
    """And a system that reads as little as it likes at once."""
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, into, at: preadv(file, [into[0][:5]], at))
    monkeypatch.setattr(aio, "_library", lambda: None)
    monkeypatch.setattr(read_ahead, "PIECE_BYTES", piece)
    staging = Staging(100)
    with staging.read_ahead(rows, pinned=False):
        for wanted in rows:
            check(staging, wanted)


def test_reads_take_descriptors_in_turn_and_no_more_than_there_are_threads(info, monkeypatch):
    """Through all chunks of a buffer: reads of one descriptor wait for each other."""
    seen, start = [], Reads.start
    monkeypatch.setattr(
        Reads, "start", lambda self, reads: (seen.extend(reads), start(self, reads))
    )
    monkeypatch.setattr(read_ahead, "PIECE_BYTES", 48)
    monkeypatch.setattr(aio, "THREADS", 3)
    chunks, before = list(Wanted(info, None, {0: (0, 7)}).chunks(96))[:4], descriptors()
    buffer = Buffer(4 * 256, pinned=False)
    buffer.start([(i * 256, chunk) for i, chunk in enumerate(chunks)])
    assert descriptors() == before + 3
    files = [file for file, *_ in seen]
    assert len(set(files[:3])) == 3 and files == (files[:3] * 3)[: len(files)] and len(files) == 8
    for chunk in chunks:
        buffer.finish()
        got = buffer.bytes(0, chunk.nbytes).view(torch.float32).view(-1, 12)
        assert torch.equal(got, VALUES[chunk.row : chunk.end])
    buffer.close()
    assert descriptors() == before


def test_a_forked_child_reads_without_the_threads_of_its_parent(rows):
    """With reads of the parent under way, and before its idle threads end."""
    staging = Staging(48)

    def body():
        for wanted in rows[1:]:
            check(staging, wanted)
        staging._ahead.close()
        check(Staging(100), rows[0])

    with staging.read_ahead(rows, pinned=False):
        check(staging, rows[0])
        child = multiprocessing.get_context("fork").Process(target=body, daemon=True)
        child.start()
        child.join(20)
        assert child.exitcode == 0
        for wanted in rows[1:]:
            check(staging, wanted)


def test_a_buffer_is_started_anew_while_it_is_read_into(info, monkeypatch):
    """As after an error in one of its pieces."""
    monkeypatch.setattr(read_ahead, "PIECE_BYTES", 16)
    first, second, third = Wanted(info, None, {0: (0, 99)}).chunks(33 * 48)
    buffer = Buffer(3 * 33 * 48, pinned=False)
    buffer.start([(0, first), (33 * 48, second)])
    buffer.finish()
    buffer.start([(0, third), (33 * 48, first)])
    buffer.start([(0, first), (33 * 48, third)])
    for want in (VALUES[:33], VALUES[66:]):
        assert buffer.unfinished
        buffer.finish()
        assert torch.equal(buffer.bytes(0, 33 * 48).view(torch.float32).view(33, 12), want)
    assert not buffer.unfinished


def test_transfers_to_every_gpu_are_marked_before_a_buffer_is_given_back(rows, monkeypatch):
    """Else it would be read into while they run. CPU tensors in the place of the GPUs'."""
    devices = {0: torch.device("cuda", 0), 1: torch.device("cuda", 1)}
    marked: list[tuple[Buffer, object]] = []
    given, give = [], ReadAhead.give

    def checked(self, buffer):
        given.append(buffer)
        assert marked[-2:] == [(buffer, "stream of cuda:0"), (buffer, "stream of cuda:1")]
        give(self, buffer)

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    monkeypatch.setattr(Buffer, "mark", lambda *args: marked.append(args))
    monkeypatch.setattr(ReadAhead, "give", checked)
    staging, into = Staging(48), dict.fromkeys(devices, torch.empty(3, 12))
    both = [Wanted(each.info, 0, dict.fromkeys(devices, each.ranges[0])) for each in rows]
    with staging.read_ahead(both, pinned=False):
        for wanted in both:
            staging.read(wanted, devices, into)
    assert len(given) == 99


def test_columns_are_marked_where_their_rows_land(rows, monkeypatch):
    """A rank's columns are cut on its device, out of rows that travel there. CPU tensors in the place of the GPUs'."""
    devices = {rank: torch.device("cuda", rank // 2) for rank in range(3)}
    marked = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: device.index)
    monkeypatch.setattr(Buffer, "mark", lambda _buffer, stream: marked.append(stream))
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, device=None, **of: empty(*shape, **of))
    spans = dict(enumerate([(0, 6), (6, 8), (8, 12)]))
    into = {rank: torch.empty(99, stop - start) for rank, (start, stop) in spans.items()}
    staging, wanted = Staging(48 * 33), Wanted(rows[0].info, 1, spans)
    with staging.read_ahead([wanted], pinned=False):
        staging.read(wanted, devices, into)
    assert marked == [0, 1] * 3
    assert torch.equal(torch.cat([*into.values()], 1), VALUES)


class Event:
    """Of a transfer that goes on."""

    records = 0

    def record(self, stream):
        self.stream = stream
        self.records += 1

    def query(self):
        return False

    def synchronize(self):
        pass


@pytest.mark.parametrize("chunk", [48, 1 << 20])
def test_only_transfers_that_were_made_are_waited_for(rows, monkeypatch, chunk):
    """Of all chunks that share a buffer. CPU tensors in the place of the GPUs'."""
    devices = {0: torch.device("cuda", 0), 1: torch.device("cuda", 1)}
    streams = {device: SimpleNamespace(device=device) for device in devices.values()}
    given, give = [], ReadAhead.give

    def checked(self, buffer):
        given.append([event.stream for event in buffer._sent.values()])
        assert buffer.busy
        give(self, buffer)

    monkeypatch.setattr(torch.cuda, "current_stream", streams.get)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(ReadAhead, "give", checked)
    into, first, second = dict.fromkeys(devices, torch.empty(3, 12)), *streams.values()
    each = [Wanted(rows[0].info, 0, {0: (i, i + 3), 1: (i + 3, i + 6)}) for i in (0, 6, 12)]
    staging = Staging(chunk)
    with staging.read_ahead(each, pinned=False):
        for wanted in each:
            staging.read(wanted, devices, into)
    if chunk == 48:  # a row
        assert given == [[first], [second]] * 9
    else:
        assert given == [[first, second]] * 3


def test_a_buffer_is_marked_behind_the_last_of_its_chunks(monkeypatch):
    """What the first of them recorded ends too early."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    buffer, stream = Buffer(1, pinned=False), SimpleNamespace(device=torch.device("cuda", 0))
    for count in (1, 2, 3):
        buffer.mark(stream)
        assert [event.records for event in buffer._sent.values()] == [count]


def test_an_interrupted_wait_loses_no_chunk(rows, monkeypatch):
    """`take` again gives the chunk that it was waiting for."""
    chunks = [chunk for each in rows for chunk in each.chunks(48)]
    ahead, wait = ReadAhead(chunks, 1 << 10, pinned=False), Reads.wait

    def interrupt(*_):
        raise KeyboardInterrupt

    for chunk in chunks:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(Reads, "wait", interrupt)
            ahead.take()
        assert Reads.wait is wait and ahead.is_next(chunk)
        buffer = ahead.take()
        assert torch.equal(buffer.bytes(0, 48).view(torch.float32), VALUES[chunk.row])
        ahead.give(buffer)
    ahead.close()


def test_leaving_closes_the_files_though_an_error_is_held(tmp_path):
    """A traceback keeps the buffers alive, and a future its exception."""
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.arange(64.0)}, file)
    wanted = Wanted(shrunk(read_header(file)["a"], 8), None, {0: (0, 64)})
    staging, before = Staging(4), descriptors()
    with (
        pytest.raises(CheckpointError, match="ends inside a") as held,
        staging.read_ahead([wanted], pinned=False),
    ):
        staging.read(wanted, {0: CPU})
    assert held.value.__traceback__ and descriptors() == before


def test_a_source_takes_its_file_along(rows):
    before, staging = descriptors(), Staging()
    check(staging, rows[0])
    assert descriptors() == before + 1
    del staging
    assert descriptors() == before


def test_too_few_descriptors_are_named(info, monkeypatch):
    monkeypatch.setattr(read_ahead, "PIECE_BYTES", 16)
    monkeypatch.setattr(aio, "THREADS", 100)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors() + 40, limits[1]))
    try:
        with pytest.raises(CheckpointError, match=r"Too many open files: raise `ulimit -n`$"):
            Staging().read(Wanted(info, None, {0: (0, 99)}), {0: CPU})
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
