"""How fast a checkpoint goes from files to the GPUs, against a plain read of the same files.

    python -m bench.load --model qwen2.5-72b --tp 2 --dir /tmp/ckpt [--layers 40] [--format fp8|bf16]

Writes a checkpoint of that shape (arbitrary valid values) if the folder has none, then measures a plain read of its
files (threads with a buffer of 8 MB each, which stays in the CPU's caches), what the links to the GPUs take from pinned
memory, the load onto all ranks, and the plain read again. A load can be no faster than the slower of the two: that is what
its share is of. Files that were just written lie in the page cache: the figure is of the loader, not of a disk;
--drop-caches asks the kernel to forget them before each pass. Rows: load_gb_s, load_s, plain_read_gb_s,
link_gb_s.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from bench.deployment import numbers
from bench.rows import Rows
from engine.checkpoint.index import INDEX, open_checkpoint
from engine.checkpoint.load import LoadProgress, load_ranks
from engine.checkpoint.memory import weight_bytes
from engine.checkpoint.quantize import LINEAR, QUANTIZATION_CONFIG
from engine.checkpoint.source import CheckpointSource
from engine.config import ModelConfig, preset, with_layers
from engine.console import Parser, check_above_zero, run
from engine.errors import CheckpointError, EngineError
from engine.graph import weight_specs

BLOCK = 8 << 20  # bytes of one read of the plain reader


def write_checkpoint(config: ModelConfig, directory: Path, form: str, shard_bytes: int) -> None:
    """Valid and finite values, the same pool for every tensor: only sizes matter here."""
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    shapes = {p.name: p.shape for s in weight_specs(config, 1).values() for p in s.parts}
    pool = torch.randint(0, 0x7E, (1 << 20,), dtype=torch.uint8)
    shard: dict[str, torch.Tensor] = {}
    weight_map: dict[str, str] = {}

    def flush() -> None:
        file = f"model-{len(set(weight_map.values())) + 1:05}.safetensors"
        save_file(shard, directory / file)
        weight_map.update(dict.fromkeys(shard, file))
        shard.clear()

    for name, shape in shapes.items():
        count = int(torch.Size(shape).numel())
        if form == "fp8" and LINEAR.match(name):
            tensor = (
                pool.repeat(-(-count // len(pool)))[:count].view(torch.float8_e4m3fn).view(shape)
            )
            shard[name + "_scale"] = torch.full((shape[0], 1), 1e-4, dtype=torch.bfloat16)
        else:
            tensor = torch.full(shape, 0.01, dtype=torch.bfloat16)
        shard[name] = tensor
        if sum(t.nbytes for t in shard.values()) >= shard_bytes:
            flush()
    if shard:
        flush()
    (directory / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    head = {"quantization_config": QUANTIZATION_CONFIG} if form == "fp8" else {}
    (directory / "config.json").write_text(json.dumps(head))


def plain_read(files: list[Path], threads: int) -> float:
    """Seconds to read every byte of the files with `threads` threads, each into one buffer."""
    local = threading.local()
    jobs = [(f, at) for f in files for at in range(0, f.stat().st_size, BLOCK * 8)]

    def read(job: tuple[Path, int]) -> int:
        file, at = job
        if not hasattr(local, "buffer"):
            local.buffer = bytearray(BLOCK)
        done = 0
        descriptor = os.open(file, os.O_RDONLY)
        for offset in range(at, at + BLOCK * 8, BLOCK):
            done += os.preadv(descriptor, [local.buffer], offset)
        os.close(descriptor)
        return done

    begin = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        total = sum(pool.map(read, jobs))
    assert total == sum(f.stat().st_size for f in files)
    return time.perf_counter() - begin


def link_bytes_s(devices: Iterable[torch.device]) -> float:
    """Bytes/s from pinned memory to all of the CUDA devices at once."""
    count, pairs = 32, []
    for device in devices:
        source = torch.empty(64 << 20, dtype=torch.uint8, pin_memory=True)
        pairs.append((source, torch.empty_like(source, device=device)))
    for repeats in (2, count):
        begin = time.perf_counter()
        for _ in range(repeats):
            for source, target in pairs:
                target.copy_(source, non_blocking=True)
        for _, target in pairs:
            torch.cuda.synchronize(target.device)
    return count * sum(source.nbytes for source, _ in pairs) / (time.perf_counter() - begin)


def forget(files: list[Path]) -> None:
    """Drop the files from the page cache."""
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments. EngineError for those that cannot work, before anything is written or read."""
    parser = Parser(prog="python -m bench.load", description=__doc__)
    parser.add_argument("--model", default="qwen2.5-72b", help="a preset")
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--dir", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    parser.add_argument("--format", choices=("fp8", "bf16"), default="fp8", help="of a new folder")
    parser.add_argument("--shard-gb", type=float, default=2.4)
    parser.add_argument("--threads", type=int, default=16, help="of the plain read")
    parser.add_argument(
        "--chunks", type=numbers, default=[], help="MB of a buffer, comma-separated, to try too"
    )
    parser.add_argument("--drop-caches", action="store_true", help="measure the disk")
    options = parser.parse_args(argv)
    config = preset(options.model)
    config.shard(options.tp)
    if options.layers is not None and not 1 <= options.layers <= config.num_layers:
        raise EngineError(f"--layers {options.layers} is not 1 to {config.num_layers}")
    if options.threads < 1:
        raise EngineError(f"--threads {options.threads} is not 1 or more")
    check_above_zero("--shard-gb", options.shard_gb)
    if options.dir.exists() and not options.dir.is_dir():
        raise EngineError(f"--dir {options.dir} is not a folder")
    return options


def make_checkpoint(options: argparse.Namespace, config: ModelConfig) -> None:
    """Write it. EngineError if the disk has no room, or the folder holds what an interrupted run left."""
    if any(options.dir.glob("*.safetensors")):
        raise EngineError(f"{options.dir} holds shards but no {INDEX}: empty it, or choose another")
    one = weight_specs(config, 1).values()
    need = weight_bytes(one, 0, torch.bfloat16, "fp8" if options.format == "fp8" else None)
    try:
        options.dir.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise EngineError(f"--dir {options.dir}: {e.strerror}") from None
    free = shutil.disk_usage(options.dir).free
    if need > 0.95 * free:
        raise EngineError(
            f"the checkpoint has {need / 1e9:.1f} GB, {options.dir} has {free / 1e9:.1f} GB free: choose another "
            "--dir, or fewer --layers"
        )
    begin = time.perf_counter()
    write_checkpoint(config, options.dir, options.format, int(options.shard_gb * 1e9))
    print(f"written in {time.perf_counter() - begin:.1f} s", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: see engine.console."""
    return run(lambda: measure(parsed(argv)))


def measure(options: argparse.Namespace) -> int:
    """Plain reads, loads, plain reads; the rows."""
    config = preset(options.model)
    if options.layers:
        config = with_layers(config, options.layers)
    held = (options.dir / INDEX).is_file()
    if not held:
        make_checkpoint(options, config)
    index = open_checkpoint(options.dir)
    if held:
        form = index.quantization or "16-bit"
        print(f"{options.dir} holds a checkpoint ({form}): it is loaded as it is", flush=True)
    cuda = torch.cuda.is_available()
    if not cuda:
        print("no CUDA device: this loads onto the CPU; no rows are written", flush=True)
    devices = {
        r: torch.device(f"cuda:{r % torch.cuda.device_count()}" if cuda else "cpu")
        for r in range(options.tp)
    }
    specs = index.adapt(weight_specs(config, options.tp))
    try:
        index.check(list(specs.values()))
    except CheckpointError as e:
        what = f"{config.num_layers} layers of {options.model}"
        raise EngineError(f"--dir holds another checkpoint than {what}: {e}") from None
    if cuda:
        for device in set(devices.values()):  # contexts are not part of loading
            torch.zeros(1, device=device)
    total = sum(
        weight_bytes(specs.values(), r, torch.bfloat16, index.quantization) for r in devices
    )

    def gb_s(body: Callable[[], float]) -> float:
        if options.drop_caches:
            forget(index.files)
        return index.nbytes / body() / 1e9

    def load(chunk_bytes: int | None = None) -> float:
        """Seconds."""
        source = CheckpointSource(index, chunk_bytes)
        begin = time.perf_counter()
        with LoadProgress(total) as progress:
            load_ranks(
                specs, source, devices, torch.bfloat16, index.quantization, progress=progress
            )
        return time.perf_counter() - begin

    def plain() -> float:
        return plain_read(index.files, options.threads)

    reads = [gb_s(plain)]
    link = link_bytes_s(set(devices.values())) / 1e9 if cuda else None
    rate = gb_s(load)
    for megabytes in options.chunks:
        value = gb_s(lambda: load(megabytes << 20))  # noqa: B023
        print(f"buffers of {megabytes} MB: {value:.2f} GB/s", flush=True)
    reads.append(gb_s(plain))
    bounds = {f"plain read, {options.threads} threads": max(reads)}
    if link is not None:
        bounds[f"links of {len(set(devices.values()))} GPU(s)"] = link
    bound = min(bounds, key=bounds.__getitem__)
    print(
        f"{len(index.files)} files, {index.nbytes / 1e9:.1f} GB: loaded in {index.nbytes / rate / 1e9:.2f} s, "
        f"{rate:.2f} GB/s; "
        + "; ".join(f"{name} {value:.2f} GB/s" for name, value in bounds.items())
        + f"; {rate / bounds[bound]:.2f} of the slower"
    )
    if not cuda:
        return 0
    rows, where = Rows("load"), "disk" if options.drop_caches else "page cache"
    facts = {"model": config.name, "quantization": index.quantization or "none", "tp": options.tp}
    what = f"{where}, {config.num_layers} layers, {len(index.files)} files"
    baseline = {"name": bound, "value": round(bounds[bound], 3)}
    rows.add(
        "load_gb_s",
        rate,
        "GB/s",
        share=rate / bounds[bound],
        baseline=baseline,
        algorithm=what,
        **facts,
    )
    rows.add("load_s", index.nbytes / rate / 1e9, "s", algorithm=what, **facts)
    for metric, (name, value) in zip(("plain_read_gb_s", "link_gb_s"), bounds.items()):
        rows.add(metric, value, "GB/s", algorithm=f"{name}, {where}", **facts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
