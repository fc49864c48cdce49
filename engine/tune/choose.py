"""Which kernel configuration a call gets: a pure function of its shape. Nothing here times
anything.

    override  >  autotune_cache/<gpu>/<op>.json  >  the op's own heuristic

A key is a dict of the call's static facts, e.g. `{"t": 512, "n": 29568, "k": 8192, "weight_dtype":
"fp8"}`; its written form, "t=512,n=29568,k=8192,weight_dtype=fp8", names the entry in the file, so
a person can read and edit the cache. Files are tied to the GPU, its SM count, Triton's major.minor
and a hash of the kernel's source: after a mismatch the whole file is ignored with one log line and
is never overwritten (`engine.tune.cache_file` reads and writes them).

An op module may define `KEY_FIELDS` (names in the order of the written key; default: the parameters
of its `heuristic` without `sm_count`), `UNWRITTEN` (values of such a field that the key leaves
out, so that a field can be added without renaming the entries there are), `SOURCES` (file names beside it that its hash covers;
default: itself) and `NEAREST_FIELD` (an int field, e.g. the prefill bucket: a shape tuned at other
sizes of it takes the next larger tuned size, else the next smaller one, within a factor of two;
every configuration must be valid at every size).
"""

from __future__ import annotations

import importlib
import inspect
import logging
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from engine.errors import EngineError
from engine.tune import cache_file

log = logging.getLogger(__name__)

CACHE_DIR = Path(__file__).resolve().parents[2] / "autotune_cache"
NEAREST_RATIO = 2  # farthest tuned size that stands in for another


@dataclass(frozen=True)
class Op:
    """Where an op keeps its configuration class; `heuristic` is a function of the same module."""

    module: str
    config_class: str

    def load(self) -> Any:
        return importlib.import_module(self.module)


OPS: dict[str, Op] = {
    "gemv": Op("engine.kernels.gemv", "GemvConfig"),
    "gemm": Op("engine.kernels.gemm", "GemmConfig"),
    "decode_attention": Op("engine.kernels.decode_attention", "DecodeAttentionConfig"),
    "prefill_attention": Op("engine.kernels.prefill_attention", "PrefillAttentionConfig"),
    "all_reduce": Op("engine.kernels.all_reduce", "AllReduceConfig"),
}


@dataclass
class _State:
    gpu: str = "nvidia_h200"
    sm_count: int = 132
    cache_dir: Path = CACHE_DIR
    overrides: dict[tuple[str, str | None], Any] = field(default_factory=dict)
    entries: dict[str, dict[str, dict]] = field(default_factory=dict)  # op -> key -> entry
    misses: Counter[str] = field(default_factory=Counter)


_state = _State()


def gpu_slug(name: str) -> str:
    """Directory name of a device: "NVIDIA H200" -> "nvidia_h200"."""
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


def set_target(gpu_name: str, sm_count: int, cache_dir: Path | None = None) -> None:
    """Name the device of all later choices. Forgets loaded files and misses, keeps overrides."""
    _state.gpu = gpu_slug(gpu_name)
    _state.sm_count = sm_count
    _state.cache_dir = cache_dir or CACHE_DIR
    _state.entries.clear()
    _state.misses.clear()


def set_override(op: str, config: Any, key: Mapping[str, Any] | None = None) -> None:
    """Force `config` for one key of `op`, or for all of them when key is None (tests, A/B runs)."""
    _state.overrides[(op, None if key is None else key_string(op, key))] = config


def remove_override(op: str, key: Mapping[str, Any] | None = None) -> None:
    """Undo one `set_override`."""
    _state.overrides.pop((op, None if key is None else key_string(op, key)), None)


def clear_overrides() -> None:
    _state.overrides.clear()


def sm_count() -> int:
    """Multiprocessors of the target."""
    return _state.sm_count


def cached(op: str, key: Mapping[str, Any]) -> dict[str, Any] | None:
    """The cache's entry of this very key, whatever an override says; None if there is none."""
    if op not in _state.entries:
        _state.entries[op] = cache_file.load(_path(op), metadata(op))
    return _state.entries[op].get(key_string(op, key))


def stale(op: str) -> str | None:
    """Why the op's cache file is not used, if there is one and it is not."""
    path = _path(op)
    return cache_file.problem(path, metadata(op)) if path.is_file() else None


def misses() -> dict[str, int]:
    """Choices since `set_target` that fell through to a heuristic: {"gemm: t=512,...": times}."""
    return dict(_state.misses)


def choose(op: str, key: Mapping[str, Any]) -> Any:
    """The configuration (the op's frozen dataclass) for one call shape.

    key: the op's KEY_FIELDS, plus anything else its heuristic takes by name; extra facts are
    ignored. Values are ints, strings or torch dtypes. Raises EngineError for an unknown op or a
    missing fact.
    """
    written = key_string(op, key)
    for name in (written, None):
        if (op, name) in _state.overrides:
            return _state.overrides[(op, name)]
    if op not in _state.entries:
        _state.entries[op] = cache_file.load(_path(op), metadata(op))
    module = _op(op).load()
    written = _nearest(_state.entries[op], written, getattr(module, "NEAREST_FIELD", None))
    entry = _state.entries[op].get(written)
    if entry is not None:
        try:
            return getattr(module, _op(op).config_class)(**entry["config"])
        except (KeyError, TypeError) as e:
            log.warning("%s: entry %s does not fit %s: %s", _path(op), written, op, e)
            del _state.entries[op][written]
    _state.misses[f"{op}: {written}"] += 1
    return _heuristic(module.heuristic, op, key)


def key_string(op: str, key: Mapping[str, Any]) -> str:
    """Written form of a key: KEY_FIELDS in order, "n=29568,k=8192,weight_dtype=fp8"."""
    fields = key_fields(op)
    missing = [f for f in fields if f not in key]
    if missing:
        raise EngineError(f"choose({op!r}): the key lacks {', '.join(missing)}")
    unwritten = getattr(_op(op).load(), "UNWRITTEN", {})
    written = ((f, _written(key[f])) for f in fields)
    return ",".join(f"{f}={text}" for f, text in written if text not in unwritten.get(f, ()))


def key_fields(op: str) -> tuple[str, ...]:
    """Names that make up the op's cache key."""
    module = _op(op).load()
    if hasattr(module, "KEY_FIELDS"):
        return tuple(module.KEY_FIELDS)
    return tuple(p for p in inspect.signature(module.heuristic).parameters if p != "sm_count")


def source_hash(op: str) -> str:
    """Short hash of the op's kernel files; comments, docstrings and formatting do not count."""
    module = _op(op).load()
    own = Path(module.__file__)
    names = getattr(module, "SOURCES", (own.name,))
    return cache_file.source_hash([own.with_name(n) for n in names])


def metadata(op: str) -> dict[str, Any]:
    """What a cache file for the present target and kernel source must carry."""
    return cache_file.metadata(_state.gpu, _state.sm_count, source_hash(op))


def save_entries(
    op: str, gpu: str, entries: Mapping[str, dict], meta: dict[str, Any], *, replace: bool = False
) -> Path:
    """Merge tuned entries into `<cache dir>/<gpu>/<op>.json`, atomically; returns the path.

    entries: written key -> {"config": dict or config dataclass, "us": float, "runner_up": ...,
    "date": ...}. Raises EngineError if the file there has other metadata, unless `replace` (then
    its entries are dropped).
    """
    plain = {
        k: {**e, "config": e["config"] if isinstance(e["config"], dict) else asdict(e["config"])}
        for k, e in entries.items()
    }
    path = _state.cache_dir / gpu_slug(gpu) / f"{op}.json"
    cache_file.save(path, plain, meta, replace=replace)
    _state.entries.pop(op, None)
    return path


def _op(op: str) -> Op:
    if op not in OPS:
        raise EngineError(f"choose: unknown op {op!r}; ops: {', '.join(OPS)}")
    return OPS[op]


def _path(op: str) -> Path:
    return _state.cache_dir / _state.gpu / f"{op}.json"


def _written(value: Any) -> str:
    """torch dtypes by their short names; everything else as it prints."""
    text = str(value).removeprefix("torch.")
    return {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float8_e4m3fn": "fp8"}.get(
        text, text
    )


def _nearest(entries: Mapping[str, dict], written: str, name: str | None) -> str:
    """`written` itself if it is tuned or nothing near it is; else the entry next to it along field
    `name`, the larger one first, at most NEAREST_RATIO away: a tile made for 512 tokens at 16 ran
    five times slower than the heuristic's (7B FP8 on an H200)."""
    if name is None or written in entries:
        return written
    pattern = re.compile(rf"(^|,){name}=(\d+)(?=,|$)")

    def parts(key: str) -> tuple[str, int]:
        match = pattern.search(key)
        return (pattern.sub("", key), int(match.group(2))) if match else (key, 0)

    rest, size = parts(written)
    tuned = sorted((parts(key)[1], key) for key in entries if parts(key)[0] == rest)
    larger = [key for other, key in tuned if size <= other <= size * NEAREST_RATIO]
    smaller = [key for other, key in tuned if size > other >= size / NEAREST_RATIO]
    return larger[0] if larger else smaller[-1] if smaller else written


def _heuristic(function: Any, op: str, key: Mapping[str, Any]) -> Any:
    facts = {"sm_count": _state.sm_count, **key}
    arguments = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if name in facts:
            arguments[name] = facts[name]
        elif parameter.default is inspect.Parameter.empty:
            raise EngineError(f"choose({op!r}): its heuristic needs {name}, which the key lacks")
    return function(**arguments)
