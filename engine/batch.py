"""Many prompts from files: JSON Lines or one prompt a line in, JSON Lines out, resumable.

A line of a .jsonl file is an object with one of `prompt` (text), `messages` (a conversation) or
`prompt_token_ids`, optionally `id`, and any fields of SamplingParams. Without `id` a line's is FILE:LINE.
Results come in the order of the prompts, each with its `id` and a `request_hash` of what was asked. With
--output they are appended to a file; ids that the file already holds are skipped, so a run that was interrupted
goes on where it stopped. An interrupt writes every answer that is finished, though an earlier one is not. A file
whose row of an id has another hash, or none (older files), is refused: it answers other questions.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from engine.console import check_output, json_line, say
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


def read_texts(given: Sequence[str]) -> list[str]:
    """The texts of --prompt, `-` being stdin. EngineError for an empty one, which a template would hide."""
    if given.count("-") > 1:
        raise EngineError("--prompt - is given twice, and stdin can be read only once")
    try:
        texts = [sys.stdin.read() if text == "-" else text for text in given]
    except (OSError, UnicodeDecodeError) as e:
        raise EngineError(f"--prompt -: stdin: {_reason(e)}") from None
    for text, what in zip(texts, given):
        if not text:
            raise EngineError("the prompt is empty: " + ("stdin" if what else "--prompt ''"))
    return texts


def read_text(name: str) -> str:
    """A --prompt-file. EngineError if it cannot be read or is empty."""
    try:
        text = Path(name).read_text(encoding="utf-8-sig")  # a byte order mark is no text
    except (OSError, UnicodeDecodeError) as e:
        raise EngineError(f"--prompt-file {name}: {_reason(e)}") from None
    if not text:
        raise EngineError(f"--prompt-file {name} holds no prompts")
    return text


def _reason(e: OSError | UnicodeDecodeError) -> str:
    return e.strerror or str(e) if isinstance(e, OSError) else "not UTF-8 text"


@contextmanager
def at(where: str) -> Iterator[None]:
    """Adds the place to a RequestError."""
    try:
        yield
    except RequestError as e:
        raise RequestError(f"{where}: {e}") from None


def read_items(name: str, by_line: bool, common: SamplingParams) -> list[Item]:
    """Prompts of a file: .jsonl, else one a line (by_line) or the whole text. EngineError names the line, also of
    sampling that cannot be, over `common`."""
    text = read_text(name)
    if not by_line and not name.endswith(".jsonl"):
        return [Item(name, name, "prompt", text, {})]
    # Not splitlines(): JSON strings may hold U+2028 and its like.
    lines = [(f"{name}:{n}", line) for n, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise EngineError(f"--prompt-file {name} holds no prompts")
    if not name.endswith(".jsonl"):
        return [Item(where, where, "prompt", line, {}) for where, line in lines]
    items = [_item(line, where) for where, line in lines]
    for item in items:
        with at(item.where):
            replace(common, **item.sampling)
    return items


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
    if value == "":
        raise EngineError(f"{where}: the prompt is empty")
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


def request_hashes(items: Sequence[Item], common: Any) -> dict[str | int, str]:
    """{id: 16 hex digits of SHA-256 over the prompt, its own sampling and `common`}, by which a row is known again.

    common: what all prompts share (model, sampling of the command line, template), JSON or with a repr.
    """

    def digest(item: Item) -> str:
        text = json.dumps(
            [item.source, item.value, item.sampling, common], sort_keys=True, default=repr
        )
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    return {item.id: digest(item) for item in items}


def read_output(name: str, hashes: Mapping[str | int, str]) -> tuple[set[str | int], int]:
    """The ids that the file holds (none if it is not there), and its length without a half-written last line.

    hashes: of the batch to run, by id. EngineError where the file has another for an id, or none."""
    check_output("--output", name)
    path = Path(name)
    done: set[str | int] = set()
    try:
        data = path.read_bytes() if path.exists() else b""
        whole = data[: data.rfind(b"\n") + 1]
        for n, line in enumerate(whole.decode("utf-8").split("\n"), 1):
            if line:
                try:
                    row = json.loads(line)
                    identity, found = row["id"], row.get("request_hash")
                    done.add(identity)
                except (ValueError, KeyError, TypeError, AttributeError):
                    raise EngineError(f"--output {name}:{n} is not a result of a batch") from None
                if identity in hashes and found != hashes[identity]:
                    why = "has no request_hash (an older file)" if found is None else (
                        "was asked with another prompt, model or sampling")  # fmt: skip
                    raise EngineError(
                        f"--output {name} holds answers to other questions: line {n} (id {identity!r}) {why}; "
                        "use another --output or delete it"
                    )
    except (OSError, UnicodeDecodeError) as e:
        raise EngineError(f"--output {name}: {_reason(e)}") from None
    return done, len(whole)


def open_output(name: str, length: int) -> TextIO:
    """The file opened for appending after its first `length` bytes."""
    try:  # a lone surrogate is escaped, which JSON does alike
        stream = open(name, "a", encoding="utf-8", errors="backslashreplace")  # noqa: SIM115
        stream.truncate(length)
    except OSError as e:
        raise EngineError(f"--output {name}: {_reason(e)}") from None
    return stream


def check_requests(
    llm: LLM,
    items: Sequence[Item],
    prompts: Sequence[dict[str, Any]],
    params: Sequence[SamplingParams],
) -> None:
    """RequestError, with its place, for the first that this LLM cannot serve."""
    for item, prompt, one in zip(items, prompts, params):
        with at(item.where):
            llm.make_request(prompt, one)


def run_batch(
    llm: LLM,
    items: Sequence[Item],
    prompts: Sequence[dict[str, Any]],
    params: Sequence[SamplingParams],
    as_row: Callable[[RequestOutput], Row],
    stream: TextIO,
    hashes: Mapping[str | int, str],
    *,
    held: int | None = None,
    quiet: bool,
) -> list[RequestOutput]:
    """Answer all items together; write each result once all before it are written, and on an interrupt or an
    error every finished one. prompts and params: of each item, checked.

    held: results that the file has already, None if `stream` is no file to go on with."""
    outputs: dict[int, RequestOutput] = {}
    waiting: dict[int, RequestOutput] = {}  # finished, not written
    turn = 0

    def write(i: int) -> None:
        # Taken out first: an interrupt in between costs an answer, which the next run makes, not a second row.
        output = waiting.pop(i)
        row = {"id": items[i].id, "request_hash": hashes[items[i].id], **as_row(output)}
        stream.write(json_line(row, stream) + "\n")
        stream.flush()

    bar = None
    if not quiet and sys.stderr.isatty():
        from tqdm import tqdm

        bar = tqdm(total=len(items), desc="requests", unit="req", file=sys.stderr)
    try:
        with closing(llm.stream_many(prompts, params)) as updates:
            for i, delta in updates:
                if delta.output is None:
                    continue
                outputs[i] = waiting[i] = delta.output
                if bar is not None:
                    bar.update()
                while turn in waiting:
                    turn += 1
                    write(turn - 1)
    except BaseException as e:
        if not isinstance(e, OSError):  # as of a full disk
            for i in sorted(waiting):
                write(i)
        if isinstance(e, (KeyboardInterrupt, SystemExit)) and held is not None:
            done = f"{held + len(outputs)} of {held + len(items)}"
            said = f"interrupted: {done} written to {stream.name}; run the same command again"
            if isinstance(e, KeyboardInterrupt):
                raise KeyboardInterrupt(said) from None  # engine.console.run says it
            say(said)
        raise
    finally:
        if bar is not None:
            bar.close()
    return [outputs[i] for i in range(len(items))]
