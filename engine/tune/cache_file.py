"""One autotune cache file: {"_metadata": {...}, "entries": {written key: {"config", "us", ...}}}.

Metadata that must match before a file is used: schema, gpu, sm_count, Triton's major.minor,
source_hash. `torch` is written for the record only. A file that does not match is left alone.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import io
import json
import logging
import os
import tempfile
import tokenize
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from engine.errors import EngineError

log = logging.getLogger(__name__)

SCHEMA = 1
MUST_MATCH = ("schema", "gpu", "sm_count", "triton", "source_hash")


def metadata(gpu: str, sm_count: int, source: str) -> dict[str, Any]:
    """The `_metadata` of a file written now."""
    return {
        "schema": SCHEMA,
        "gpu": gpu,
        "sm_count": sm_count,
        "triton": ".".join(_version("triton").split(".")[:2]),
        "torch": _version("torch"),
        "source_hash": source,
    }


def load(path: Path, expected: dict[str, Any]) -> dict[str, dict]:
    """Entries of the file, or {} if it is absent, broken or made for something else (one log
    line)."""
    if not path.is_file():
        return {}
    content = _read(path)
    why = _misfit(content, expected)
    if content is not None and why:
        # The collective's thresholds need two GPUs and a bench of their own.
        renew = (
            "engine.autotune" if path.stem != "all_reduce" else "bench.all_reduce --sections tune"
        )
        log.warning("%s is ignored: %s; run `python -m %s` to renew it", path, why, renew)
    return {} if content is None or why else content["entries"]


def save(
    path: Path, entries: dict[str, dict], meta: dict[str, Any], *, replace: bool = False
) -> None:
    """Merge `entries` into the file through a temporary file and a rename, so no reader sees half
    of it.

    Raises EngineError if the file there is unreadable or has other metadata and `replace` is False.
    """
    merged: dict[str, dict] = {}
    if path.is_file() and not replace:
        content = _read(path)
        if why := _misfit(content, meta):
            raise EngineError(f"{path} will not be overwritten: {why}; move it away")
        assert content is not None
        merged.update(content["entries"])
    merged.update(entries)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
    try:
        with os.fdopen(handle, "w") as f:
            json.dump({"_metadata": meta, "entries": dict(sorted(merged.items()))}, f, indent=1)
            f.write("\n")
        os.chmod(temporary, 0o644)  # mkstemp makes it private
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def problem(path: Path, expected: dict[str, Any]) -> str | None:
    """Why the file's entries do not serve, or None."""
    return _misfit(_read(path), expected)


def _misfit(content: dict[str, Any] | None, expected: dict[str, Any]) -> str | None:
    return "it cannot be read" if content is None else mismatch(content["_metadata"], expected)


def mismatch(found: dict[str, Any], expected: dict[str, Any]) -> str | None:
    """The first metadata field that differs, in words, or None."""
    for name in MUST_MATCH:
        if found.get(name) != expected[name]:
            return f"its {name} is {found.get(name)!r}, here it is {expected[name]!r}"
    return None


def source_hash(files: Iterable[Path]) -> str:
    """First 12 hex digits of sha256 over the code of `files` in order, without comments, docstrings
    or blanks."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(_code(file.read_text()).encode())
    return digest.hexdigest()[:12]


def _code(source: str) -> str:
    """The source with comments, docstrings and all white space removed.

    Works on positions, not on token text: how f-strings are tokenised changed with Python 3.12.
    """
    lines = source.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    drop: list[tuple[int, int]] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            begin = starts[token.start[0] - 1] + token.start[1]
            drop.append((begin, begin + len(token.string)))
    for node in ast.walk(ast.parse(source)):
        if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            continue
        if (
            isinstance(node.value.value, str)
            and not lines[node.lineno - 1][: node.col_offset].strip()
        ):
            # A docstring that opens its line: whole lines go, as ast columns count UTF-8 bytes.
            drop.append((starts[node.lineno - 1], starts[node.end_lineno or node.lineno]))
    kept, position = [], 0
    for begin, end in sorted(drop):
        kept.append(source[position:begin] if begin > position else "")
        position = max(position, end)
    kept.append(source[position:])
    return "".join("".join(kept).split())


def _read(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text())
        if isinstance(content["_metadata"], dict) and isinstance(content["entries"], dict):
            return content
        problem = "it is not an autotune cache"
    except (OSError, ValueError, KeyError, TypeError) as e:
        problem = repr(e)
    log.warning("%s is ignored: %s", path, problem)
    return None


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"
