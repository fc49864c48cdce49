"""Loads that end before they are done: read errors, files that change, Ctrl-C."""

from __future__ import annotations

import gc
import multiprocessing
import os
import shutil
import sys
import threading
import time
import weakref
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.checkpoint import load as load_module
from engine.checkpoint.load import load_rank, load_ranks
from engine.checkpoint.read_ahead import Buffer
from engine.checkpoint.source import CheckpointSource, WeightSource
from engine.errors import CheckpointError
from engine.weights import Part, WeightSpec
from tests.unit.checkpoint_fixtures import save_model, specs_of


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("ends"), "qwen2", shard_size="300KB")


def test_a_failing_read_ends_the_load(directory):
    class Failing:
        def read(self, part, rank, device):
            raise CheckpointError(f"no {part.name}")

    with pytest.raises(CheckpointError, match=r"no model\."):
        load_rank(specs_of(directory), Failing(), 0, "cpu", torch.float32)


@pytest.mark.parametrize("what", ["gone", "empty", "short", "folder"])
def test_a_file_that_changes_after_it_was_opened(directory, tmp_path, what):
    copy = tmp_path / "copy"
    shutil.copytree(directory, copy)
    specs, source = specs_of(copy), CheckpointSource(copy)
    file = sorted(copy.glob("*.safetensors"))[-1]
    content = file.read_bytes()
    file.unlink()
    if what == "folder":
        file.mkdir()
    elif what != "gone":
        file.write_bytes(b"" if what == "empty" else content[:-64])
    with pytest.raises(CheckpointError, match="changed while loading"):
        load_rank(specs, source, 0, "cpu", torch.float32)


@pytest.mark.parametrize("what", ["untouched", "replaced", "written"])
def test_a_file_of_the_same_size_after_its_header_was_read(directory, tmp_path, what):
    """The hub's links lead to files elsewhere."""
    copy, blob = tmp_path / "copy", tmp_path / "blob"
    shutil.copytree(directory, copy)
    file = sorted(copy.glob("*.safetensors"))[-1]
    file.rename(blob)
    file.symlink_to(blob)
    specs, source = specs_of(copy), CheckpointSource(copy)
    before = blob.stat().st_mtime_ns
    if what == "replaced":
        other = tmp_path / "other"
        shutil.copy(blob, other)
        os.utime(other, ns=(before + 1, before + 1))
        os.replace(other, blob)
    elif what == "written":
        while blob.stat().st_mtime_ns == before:  # the clock of file systems ticks slowly
            with blob.open("r+b") as f:
                f.seek(-4, os.SEEK_END)
                f.write(b"abcd")
    if what == "untouched":
        assert load_rank(specs, source, 0, "cpu", torch.float32)
        return
    with pytest.raises(CheckpointError) as refused:
        load_rank(specs, source, 0, "cpu", torch.float32)
    assert str(refused.value) == f"{file} changed while loading: start again"


def test_a_file_that_shrinks_while_it_is_read(directory, tmp_path, monkeypatch):
    """Which a mapping would answer with SIGBUS."""
    copy = tmp_path / "copy"
    shutil.copytree(directory, copy)
    specs, source = specs_of(copy), CheckpointSource(copy, chunk_bytes=1 << 10)
    fill, filled = load_module._fill, []

    def then_shrink(*args):
        filled.append(fill(*args))
        for file in copy.glob("*.safetensors") if len(filled) == 2 else ():
            os.truncate(file, 4096)
        return filled[-1]

    monkeypatch.setattr(load_module, "_fill", then_shrink)
    with pytest.raises(CheckpointError, match="changed while loading"):
        load_rank(specs, source, 0, "cpu", torch.float32)


def interrupt_waiting(monkeypatch, interrupt) -> None:
    """When the main thread waits for a future."""
    result = Future.result

    def wait(future, *args):
        main = threading.current_thread() is threading.main_thread()
        return interrupt() if main else result(future, *args)

    monkeypatch.setattr(Future, "result", wait)


@pytest.mark.parametrize("where", ["submit", "result"])
def test_an_interrupted_load_makes_no_further_weight(monkeypatch, where):
    spec = WeightSpec("w", (Part("p", (1,), None, ()),))
    interrupted, seen, count = threading.Event(), [], 40

    class Slow:
        def read(self, part, rank, device):
            interrupted.wait(10)
            seen.append(part)
            time.sleep(0.005)
            return torch.ones(1)

    class Pool(ThreadPoolExecutor):
        def submit(self, *args):
            future = super().submit(*args)
            submitted.append(future)
            if where == "submit" and len(submitted) == count:
                interrupt()
            return future

    def interrupt(*_):
        interrupted.set()
        raise KeyboardInterrupt

    submitted: list[Future] = []
    monkeypatch.setattr(load_module, "ThreadPoolExecutor", Pool)
    if where == "result":
        interrupt_waiting(monkeypatch, interrupt)
    with pytest.raises(KeyboardInterrupt):
        load_rank([spec] * count, Slow(), 0, "cpu", torch.float32)
    assert len(submitted) == count and len(seen) < count / 2


def test_an_interrupted_load_ends_inside_a_weight(tmp_path, monkeypatch):
    save_file({"p": torch.ones(400, 8)}, tmp_path / "model.safetensors")
    source = CheckpointSource(tmp_path, chunk_bytes=32)  # a row
    finish, finished, begun = Buffer.finish, [], threading.Event()

    def slow(self):
        finish(self)
        finished.append(self)
        begun.set()
        time.sleep(0.005)

    def interrupt(*_):
        assert begun.wait(10)
        raise KeyboardInterrupt

    monkeypatch.setattr(Buffer, "finish", slow)
    interrupt_waiting(monkeypatch, interrupt)
    spec = WeightSpec("w", (Part("p", (400, 8), None, ()),))
    with pytest.raises(KeyboardInterrupt):
        load_rank([spec], source, 0, "cpu", torch.float32)
    assert 0 < len(finished) < 200


def test_no_memory_for_a_weight_ends_the_load(directory, monkeypatch):
    """While the weights before it are read."""
    allocate, made = load_module._allocate, []

    def third_fails(spec, *args):
        made.append(spec)
        if len(made) == 3:
            raise torch.OutOfMemoryError("no room")
        return allocate(spec, *args)

    monkeypatch.setattr(load_module, "_allocate", third_fails)
    before = threading.active_count()
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        load_rank(specs_of(directory), CheckpointSource(directory), 0, "cpu", torch.float32)
    assert len(made) == 3 and threading.active_count() == before


def test_an_interrupt_at_any_point_while_memory_is_found_ends_the_load():
    """Also just before, while and just after the other thread is told of it, which else waits for ever."""
    specs = [WeightSpec(f"w{i}", (Part("p", (1,), None, ()),)) for i in range(3)]

    class Ones:
        def read(self, part, rank, device):
            return torch.ones(1)

    def ends_at(step: int) -> bool:
        """Whether the load has that many steps."""
        steps, finding = 0, False

        def trace(frame, *_):
            nonlocal steps, finding
            finding = finding or frame.f_code is load_module._allocate.__code__
            if finding and frame.f_code.co_name.startswith("result"):  # of what was loaded
                sys.settrace(None)
            elif finding:
                steps += 1
                if steps == step:
                    sys.settrace(None)
                    raise KeyboardInterrupt
            return trace

        sys.settrace(trace)
        try:
            load_rank(specs, Ones(), 0, "cpu", torch.float32)
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(None)
        return False

    def body():
        step = 1
        while ends_at(step):
            step += 1
        assert step > 3 * len(specs)

    child = multiprocessing.get_context("fork").Process(target=body, daemon=True)
    child.start()
    child.join(20)
    child.kill()
    assert child.exitcode == 0


@pytest.mark.parametrize("end", ["done", "short", "nan", "source", "progress", "memory"])
def test_weights_go_with_what_the_load_gave(directory, tmp_path, monkeypatch, end):
    """Or with its error: no cycle keeps a device's memory, the files or the buffers until garbage is collected."""
    copy, allocate = tmp_path / "copy", load_module._allocate
    held: list[weakref.ref] = []
    shutil.copytree(directory, copy)
    source: WeightSource = CheckpointSource(copy, chunk_bytes=1 << 10)
    specs, file = specs_of(copy), max(copy.glob("*.safetensors"))
    if end == "short":
        os.truncate(file, file.stat().st_size - 8)
    elif end == "nan":
        tensors = {name: tensor * float("nan") for name, tensor in load_file(file).items()}
        save_file(tensors, file, metadata={"format": "pt"})
        source = CheckpointSource(copy)

    class Failing:
        def read(self, part, rank, device):
            raise CheckpointError("no such part")

    def watched(*args):
        if end == "memory" and len(held) == 3:
            raise torch.OutOfMemoryError
        loaded = allocate(*args)
        held.append(weakref.ref(loaded.weight))
        return loaded

    def progress(_):
        if end == "progress":
            raise ValueError

    monkeypatch.setattr(load_module, "_allocate", watched)
    before = threading.active_count()
    gc.disable()  # reference counts alone must free them
    try:
        load_rank(
            specs, Failing() if end == "source" else source, 0, "cpu", torch.float32, None, progress
        )
        ended = "done"
    except (CheckpointError, ValueError, torch.OutOfMemoryError) as e:
        ended = str(e)
    finally:
        left = [each() for each in held if each() is not None]
        gc.enable()
    assert held and (ended == "done") == (end == "done") and not left
    assert threading.active_count() == before


@pytest.mark.parametrize("quantization", [None, "fp8"])
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
@pytest.mark.parametrize(
    "names",
    [
        ["model.norm.weight"],
        ["model.layers.1.self_attn.k_proj.bias"],  # in the middle of a vector, in pairs
        ["model.layers.0.mlp.up_proj.weight"],  # every other row
        ["model.layers.0.mlp.down_proj.weight"],  # columns of the last rank
        ["lm_head.weight"],  # before the padding
        ["model.layers.1.input_layernorm.weight", "model.layers.0.self_attn.q_proj.weight"],
    ],
)
def test_the_tensors_with_bad_values_are_named_and_no_other(
    directory, tmp_path, names, value, quantization
):
    shutil.copytree(directory, tmp_path / "copy")
    for file in (tmp_path / "copy").glob("*.safetensors"):
        tensors = load_file(file)
        for name in tensors.keys() & {*names}:
            tensors[name].view(-1)[-1] = value
        save_file(tensors, file)
    devices = dict.fromkeys(range(4), "cpu")
    source = CheckpointSource(tmp_path / "copy")
    with pytest.raises(CheckpointError, match=rf"dtype's range\) in {', '.join(names)}$"):
        load_ranks(specs_of(directory, 4), source, devices, torch.bfloat16, quantization)
