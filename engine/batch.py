"""Many prompts from files: JSON Lines or one prompt a line in, JSON Lines out, resumable.

A line of a .jsonl file is an object with one of `prompt` (text), `messages` (a conversation) or
`prompt_token_ids`, optionally `id`, and any fields of SamplingParams. Without `id` a line's is FILE:LINE.
Results come in the order of the prompts, each with its `id`. With --output they are appended to a file;
ids that the file already holds are skipped, so a run that was interrupted goes on where it stopped.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, fields
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from engine.errors import EngineError, RequestError
from engine.sampling import SamplingParams

if TYPE_CHECKING:
    from engine.llm import LLM
    from engine.outputs import RequestOutput

_SOURCES = ("prompt", "messages", "prompt_token_ids")
_SAMPLING = tuple(f.name for f in fields(SamplingParams))

Row = dict[str, Any]


@dataclass(frozen=True)
class Item:
    """One prompt of a batch: `id` names its result, `where` its place for errors."""

    id: str | int
    where: str
    source: str  # one of _SOURCES
    value: Any
    sampling: dict[str, Any]


def read_text(name: str) -> str:
    """A --prompt-file. EngineError if it cannot be read."""
    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise EngineError(f"--prompt-file {name}: {_reason(e)}") from None


def _reason(e: OSError | UnicodeDecodeError) -> str:
    return e.strerror or str(e) if isinstance(e, OSError) else "not UTF-8 text"


def read_items(name: str, by_line: bool) -> list[Item]:
    """Prompts of a file: .jsonl, else one a line (by_line) or the whole text. EngineError names the line."""
    text = read_text(name)
    if not name.endswith(".jsonl"):
        if not by_line:
            return [Item(name, name, "prompt", text, {})]
        lines = [(n, line) for n, line in enumerate(text.split("\n"), 1) if line.strip()]
        return [Item(f"{name}:{n}", f"{name}:{n}", "prompt", line, {}) for n, line in lines]
    # Not splitlines(): JSON strings may hold U+2028 and its like.
    return [
        _item(line, f"{name}:{n}") for n, line in enumerate(text.split("\n"), 1) if line.strip()
    ]


def _item(line: str, where: str) -> Item:
    try:
        row = json.loads(line)
    except ValueError as e:
        raise EngineError(f"{where} is not JSON: {e}") from None
    if not isinstance(row, dict):
        raise EngineError(f"{where} is not a JSON object")
    given = [source for source in _SOURCES if source in row]
    if len(given) != 1:
        raise EngineError(f"{where} needs exactly one of {', '.join(_SOURCES)}; it has {given}")
    unknown = sorted(set(row) - {*_SOURCES, *_SAMPLING, "id"})
    if unknown:
        raise EngineError(f"{where}: unknown field {unknown[0]!r}")
    identity = row.get("id", where)
    if isinstance(identity, bool) or not isinstance(identity, (str, int)):
        raise EngineError(f"{where}: id {identity!r} is neither text nor a whole number")
    value = row[given[0]]
    kind = str if given[0] == "prompt" else list
    if not isinstance(value, kind):
        raise EngineError(f"{where}: {given[0]} is not a {'text' if kind is str else 'list'}")
    return Item(
        identity, where, given[0], value, {n: row[n] for n in _SAMPLING if row.get(n) is not None}
    )


def check_ids(items: Sequence[Item]) -> None:
    """EngineError where two prompts have the same id."""
    seen: dict[str | int, str] = {}
    for item in items:
        if item.id in seen:
            raise EngineError(f"{item.where}: id {item.id!r} is also that of {seen[item.id]}")
        seen[item.id] = item.where


def open_output(name: str) -> tuple[IO[str], set[str | int]]:
    """The file opened for appending, and the ids that it holds. A half-written last line is cut off."""
    path = Path(name)
    done: set[str | int] = set()
    try:
        data = path.read_bytes() if path.exists() else b""
        whole = data[: data.rfind(b"\n") + 1]
        for n, line in enumerate(whole.decode("utf-8").split("\n"), 1):
            if line:
                try:
                    done.add(json.loads(line)["id"])
                except (ValueError, KeyError, TypeError):
                    raise EngineError(f"--output {name}:{n} is not a result of a batch") from None
        stream = path.open("a", encoding="utf-8")
        stream.truncate(len(whole))
    except (OSError, UnicodeDecodeError) as e:
        raise EngineError(f"--output {name}: {_reason(e)}") from None
    return stream, done


def run_batch(
    llm: LLM,
    items: Sequence[Item],
    prepare: Callable[[Item], tuple[dict[str, Any], SamplingParams]],
    as_row: Callable[[RequestOutput], Row],
    stream: IO[str],
    *,
    quiet: bool,
) -> list[RequestOutput]:
    """Answer all items together; write each result once all before it are written. Every item is checked
    before any starts: RequestError names its place."""
    prompts, params = [], []
    for item in items:
        try:
            prompt, one = prepare(item)
            llm.make_request(prompt, one)
        except RequestError as e:
            raise RequestError(f"{item.where}: {e}") from None
        prompts.append(prompt)
        params.append(one)
    outputs: dict[int, RequestOutput] = {}
    written = 0
    bar = None
    if not quiet and sys.stderr.isatty():
        from tqdm import tqdm

        bar = tqdm(total=len(items), desc="requests", unit="req", file=sys.stderr)
    try:
        with closing(llm.stream_many(prompts, params)) as updates:
            for i, delta in updates:
                if delta.output is None:
                    continue
                outputs[i] = delta.output
                if bar is not None:
                    bar.update()
                while written in outputs:
                    row = {"id": items[written].id, **as_row(outputs[written])}
                    stream.write(json.dumps(row, ensure_ascii=False) + "\n")
                    stream.flush()
                    written += 1
    finally:
        if bar is not None:
            bar.close()
    return [outputs[i] for i in range(len(items))]
