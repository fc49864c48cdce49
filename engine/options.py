"""Command-line options made from the fields of EngineConfig and SamplingParams."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Mapping
from dataclasses import Field, fields
from pathlib import Path
from typing import Any

from engine.config import EngineConfig, parse_count
from engine.errors import EngineError
from engine.sampling import SamplingParams

_NOT_FLAGS = (
    "seed",
    "logit_bias",
    "bad_words",
)  # --seed is the engine's, and requests derive theirs
# Numbers of tokens, which people write as 32k.
_TOKENS = ("max_model_len", "max_tokens", "min_tokens")


def count(text: str) -> int:
    """Converter of argparse for whole numbers such as 512, 32k or 32K."""
    try:
        return parse_count(text)
    except ValueError as e:
        raise argparse.ArgumentTypeError(str(e)) from None


def whole_number(text: str) -> int:
    """Converter of argparse for whole numbers that count no tokens: a seed of 32k is a slip."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def _add(group: argparse._ArgumentGroup, f: Field) -> None:
    kind = str(f.type)
    names = ["--" + f.name.replace("_", "-"), *f.metadata["flags"]]
    options: dict[str, Any] = {
        "dest": f.name,
        # Absent flags leave no attribute, so the dataclass's own default applies.
        "default": argparse.SUPPRESS,
        "help": _help(f),
    }
    if kind == "bool":
        group.add_argument(*names, action="store_true", **options)
        return
    convert: Callable[[str], Any] = str
    if "int" in kind:
        convert = count if f.name in _TOKENS else whole_number
    elif "float" in kind:
        convert = float
    if "Sequence[int]" in kind:
        options.update(nargs="+")
    elif "Sequence[str]" in kind:
        options.update(action="append")
    choices = f.metadata.get("choices")
    metavar = f.metadata.get("metavar") or (None if choices else _metavar(kind))
    group.add_argument(*names, type=convert, choices=choices, metavar=metavar, **options)


def _metavar(kind: str) -> str:
    return "N" if "int" in kind else "X" if "float" in kind else "TEXT"


def _help(f: Field) -> str:
    text = f.metadata["help"].replace("%", "%%")
    if f.metadata.get("neutral"):
        return f"{text}: not supported yet, only {f.default!r} is accepted"
    if isinstance(f.default, bool) or f.default is None or f.default == ():
        return text
    return f"{text} (default {f.default})"


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """All fields of EngineConfig; the model may also be given first, without --model."""
    group = parser.add_argument_group("engine")
    group.add_argument("model_argument", nargs="?", metavar="MODEL", help="the same as --model")
    for f in fields(EngineConfig):
        _add(group, f)
    group.add_argument(
        "--dummy-weight", action="store_const", const="dummy", dest="load_format",
        default=argparse.SUPPRESS, help="the same as --load-format dummy",
    )  # fmt: skip


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """The fields of SamplingParams that make sense on a command line."""
    group = parser.add_argument_group("sampling")
    for f in fields(SamplingParams):
        if f.name not in _NOT_FLAGS:
            _add(group, f)


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """EngineConfig of parsed arguments. EngineError for a bad value or for two different models."""
    values = _given(args, EngineConfig, ())
    if args.model_argument is not None:
        if len(args.model_argument.split()) > 1 and not Path(args.model_argument).exists():
            raise EngineError(
                f"{args.model_argument!r} is taken as the model, as the positional argument is, and is no "
                "directory; give a prompt with --prompt"
            )
        if values.get("model", args.model_argument) != args.model_argument:
            raise EngineError(
                f"two models: {args.model_argument!r} and --model {values['model']!r}; give one"
            )
        values["model"] = args.model_argument
    return EngineConfig(**values)


def sampling_params(
    args: argparse.Namespace, defaults: Mapping[str, Any] | None = None
) -> SamplingParams:
    """SamplingParams of parsed arguments over `defaults`. RequestError for a bad value."""
    return SamplingParams(**{**(defaults or {}), **_given(args, SamplingParams, _NOT_FLAGS)})


def refuse_logprobs(params: SamplingParams, shown: str) -> None:
    """EngineError if log probabilities are asked for where they are not `shown`."""
    if (params.logprobs, params.prompt_logprobs) != (None, None):
        raise EngineError(f"--logprobs and --prompt-logprobs show {shown}")


def _given(args: argparse.Namespace, kind: type, without: Collection[str]) -> dict[str, Any]:
    names = [f.name for f in fields(kind) if f.name not in without]
    return {name: getattr(args, name) for name in names if hasattr(args, name)}
