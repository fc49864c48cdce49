"""What the scripts here are given, and how they end: deployments as MODEL:QUANTIZATION:TP[:SHARD_OF] (dummy weights),
argparse types of comma-separated lists, exit codes."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from engine.config import EngineConfig, preset
from engine.console import Parser, run
from engine.errors import EngineError

FORM = "MODEL:QUANTIZATION:TP[:SHARD_OF], such as qwen2.5-7b:none:1 or qwen2.5-72b:fp8:2:8"
QUANTIZATIONS = ("none", "fp8")
MAX_ROWS = 8  # of a decode step: engine.kernels.gemv.MAX_ROWS, without the import of torch
NO_GPU = "bench.{} needs a CUDA device; here is none"


def parser(name: str, doc: str | None) -> Parser:
    """Of the script bench/NAME.py, which measures one deployment after the other."""
    made = Parser(prog=f"python -m bench.{name}", description=doc)
    made.add_argument("deployments", nargs="+", help=FORM)
    return made


def add_kv_cache_dtype(options: argparse.ArgumentParser) -> None:
    """The engine's flag, for a script that measures whole engines."""
    options.add_argument("--kv-cache-dtype", choices=("auto", "fp8"), default="auto")


def script(
    options: Parser, body: Callable[[argparse.Namespace], int], argv: Sequence[str] | None = None,
    check: Callable[[argparse.Namespace], object] = lambda args: None,
) -> int:  # fmt: skip
    """Exit code of `body`, as engine.console has them. First of all, before any GPU work, every deployment (where
    `options` is a `parser`) is parsed, `check` raises EngineError for other arguments that cannot work, and a CUDA device
    is asked for: else 2."""

    def checked() -> int:
        args = options.parse_args(argv)
        for text in vars(args).get("deployments", ()):
            _fits(text)
        check(args)
        import torch

        if not torch.cuda.is_available():
            raise EngineError(NO_GPU.format(options.prog.removeprefix("python -m bench.")))
        return body(args)

    return run(checked)


def each(deployments: Iterable[str], measure: Callable[[str], object]) -> int:
    """Measure every one; a broken deployment is a line, and must not cost the card time of the others. Returns the
    exit code: 1 if any was broken."""
    code = 0
    for text in deployments:
        try:
            measure(text)
        except Exception as e:
            print(f"{text}: {type(e).__name__}: {e}"[:2000], flush=True)
            code = 1
    return code


def parse(text: str, **options: Any) -> EngineConfig:
    """ "qwen2.5-72b:fp8:2:8" or "qwen2.5-7b:none:1"; options: further fields of EngineConfig. EngineError if the text has
    another form, or names a preset, a quantization or a number of GPUs that there is not."""

    wrong = partial(_wrong, text)
    parts = text.split(":")
    if not 3 <= len(parts) <= 4:
        raise wrong(f"it has {len(parts)} field(s), not 3 or 4")
    model, quantization, *degrees = parts
    if quantization not in QUANTIZATIONS:
        raise wrong(f"quantization {quantization!r} is not one of {', '.join(QUANTIZATIONS)}")
    try:
        tp, *shard = (int(part) for part in degrees)
    except ValueError:
        raise wrong(f"{':'.join(degrees)!r}: not a whole number of GPUs") from None
    try:
        preset(model)
        made = EngineConfig(
            model=model, tensor_parallel_size=tp, load_format="dummy", device="cuda",
            quantization=None if quantization == "none" else quantization,
            shard_of=shard[0] if shard else None,
        )  # fmt: skip
    except EngineError as e:
        raise wrong(e) from None
    if made.shard_of and made.shard_of < tp:
        raise wrong(f"SHARD_OF {made.shard_of} is below TP {tp}")
    return replace(made, **options)


def _fits(text: str) -> None:
    """EngineError for a wrong text and for a split that the preset cannot have."""
    made = parse(text)
    try:
        preset(text.split(":")[0]).shard(made.shard_of or made.tensor_parallel_size)
    except EngineError as e:
        raise _wrong(text, e) from None


def _wrong(text: str, problem: object) -> EngineError:
    return EngineError(f"deployment {text!r}: {problem}; the form is {FORM}")


def shapes(text: str) -> list[tuple[str, int]]:
    """(preset, TP) of each of "qwen2.5-72b/2,qwen2.5-7b/1": an argparse type, which names what is wrong."""
    found = []
    for item in text.split(","):
        name, slash, degree = item.partition("/")
        try:
            if not slash or not degree.isdecimal():
                raise EngineError("the form is MODEL/TP[,MODEL/TP...], such as qwen2.5-72b/2")
            preset(name).shard(int(degree))
        except EngineError as e:
            raise argparse.ArgumentTypeError(f"{item!r}: {e}") from None
        found.append((name, int(degree)))
    return found


def numbers(text: str) -> list[int]:
    """[1, 8] of "1,8": an argparse type of whole numbers above 0, which names what is wrong."""
    found = []
    for item in text.split(","):
        try:
            found.append(int(item))
        except ValueError:
            found.append(0)
        if found[-1] < 1:
            raise argparse.ArgumentTypeError(
                f"{item!r} is not a whole number above 0; the form is N[,N...], such as 1,8"
            )
    return found


def decode_rows(text: str) -> list[int]:
    """`numbers` of rows that a GEMV takes: an argparse type."""
    found = numbers(text)
    if max(found) > MAX_ROWS:
        raise argparse.ArgumentTypeError(
            f"{max(found)} is not 1 to {MAX_ROWS}, the rows of a decode step"
        )
    return found


def choices(*known: str) -> Callable[[str], list[str]]:
    """An argparse type of lists such as "fp8,bf16" with items of `known`, which names one that is not."""

    def parsed(text: str) -> list[str]:
        found = text.split(",")
        for item in found:
            if item not in known:
                raise argparse.ArgumentTypeError(f"{item!r} is not one of {', '.join(known)}")
        return found

    return parsed


def linear_shapes(name: str, tp: int) -> dict[str, tuple[int, int]]:
    """(N, K) of one rank's linear layers, FP8 where the weights are."""
    config = preset(name)
    shard = config.shard(tp)
    h, d = config.hidden_size, config.head_dim
    return {
        "gate_up": (2 * shard.intermediate_size, h),
        "down": (h, shard.intermediate_size),
        "qkv": ((shard.num_heads + 2 * shard.num_kv_heads) * d, h),
        "o": (h, shard.num_heads * d),
    }


def facts(engine: EngineConfig) -> dict[str, Any]:
    """The fields of a row that name the deployment."""
    return {
        "model": engine.model, "quantization": engine.quantization or "none",
        "kv_cache_dtype": engine.kv_cache_dtype,
        "tp": engine.tensor_parallel_size, "shard_of": engine.shard_of,
    }  # fmt: skip
