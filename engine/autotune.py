"""`python -m engine.autotune`: find each op's fastest configuration for a deployment and write the cache.

The ops and shapes come from the deployment's compiled graph. Each candidate is pruned by what is known
without a GPU, compiled, checked against the configurations in use, and timed in the chain of its neighbours
(`engine.tune.chain`). The fastest are timed again in turn with the configuration in use, as a card at its power
limit drifts by more than they differ; the best of them is kept before the next op is tuned. Models, TP degrees and quantisations
may be lists; a degree above the number of GPUs is tuned as one rank's share of it. Ctrl-C keeps what is done, and
`--missing` goes on from there:

    engine autotune --model qwen2.5-7b,qwen2.5-72b --tp 1,2,4,8 --quantization none,fp8 --phase decode,prefill \
        --tokens 16,512,2048 --missing

A decode GEMV has one configuration for 1 to 8 rows, and in it a second walk for 3 and more (`GemvConfig.wide`; the
same bits). `--rows 1` or 2 tunes the configuration, and its walk for more rows goes if its sums no longer fit;
`--rows 4` or 8 tunes that walk alone, of keys that have an entry, and only logits of the very same bits count.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING

from engine.config import EngineConfig, preset
from engine.console import Parser, run
from engine.errors import EngineError
from engine.runtime.buckets import DECODE_ROWS, LARGEST, prefill_buckets
from engine.tune import choose

# Modules that import torch are imported by `_main` and what it calls: --help is fast, and Ctrl-C for `run` to handle.
if TYPE_CHECKING:
    from engine.tune.chain import Deployment

PHASES = ("decode", "prefill")  # of engine.tune.search.TUNED
WIDE_ROWS = 3  # engine.kernels.gemv_config.WIDE_ROWS


def _parser() -> Parser:
    parser = Parser(prog="engine autotune", description=__doc__)
    parser.add_argument(
        "--model", required=True, help="presets such as qwen2.5-72b, comma-separated"
    )
    parser.add_argument("--tp", default="1", help="GPUs that take part, comma-separated")
    parser.add_argument("--shard-of", type=int, help="tune one rank's shapes of this TP degree")
    parser.add_argument("--quantization", default="none", help="none, fp8 or none,fp8")
    parser.add_argument("--phase", default="decode", help="decode, prefill or both")
    parser.add_argument(
        "--rows", default="1",
        help=f"decode rows to tune at, comma-separated; {WIDE_ROWS} and more: only the GEMVs' walk for so many",
    )  # fmt: skip
    parser.add_argument("--context", type=int, default=512, help="tokens in the KV cache (decode)")
    parser.add_argument("--tokens", default="512", help="prefill buckets to tune, comma-separated")
    parser.add_argument(
        "--budget", default="120s",
        help="time for each deployment, such as 120s; no key is begun after it",
    )  # fmt: skip
    parser.add_argument("--dry-run", action="store_true", help="list ops and candidates only")
    parser.add_argument(
        "--missing", action="store_true", help="only what has no entry, or a stale one"
    )
    parser.add_argument(
        "--check", action="store_true", help="report missing or stale entries and stop"
    )
    return parser


def _deployments(args: argparse.Namespace) -> list[Deployment]:
    """What the flags name. EngineError for a model, a phase or a size that there is not; of several degrees those that
    a model cannot have are left out with a line."""
    from engine.tune.chain import Deployment

    sizes = _sizes("--rows", args.rows, DECODE_ROWS)
    tokens = _sizes("--tokens", args.tokens, prefill_buckets(LARGEST))
    phases = list(PHASES) if args.phase == "both" else args.phase.split(",")
    if not set(phases) <= set(PHASES):
        raise EngineError(f"--phase {args.phase!r}: choose decode, prefill or both")
    quantizations = args.quantization.split(",")
    if not set(quantizations) <= {"none", "fp8"}:
        raise EngineError(f"--quantization {args.quantization!r}: choose none, fp8 or none,fp8")
    degrees = _degrees(args.tp)
    found: list[Deployment] = []
    for model, degree in product(dict.fromkeys(args.model.split(",")), degrees):
        try:
            _check_split(model, degree, args.shard_of, args.context)
        except EngineError as error:
            if len(degrees) == 1:
                raise
            print(f"{model} tp={degree}: left out, {error}", file=sys.stderr)
            continue
        for name, phase in product(quantizations, phases):
            rank = (model, None if name == "none" else name, degree, args.shard_of)
            if phase == "decode":
                found += [Deployment(*rank, rows, args.context) for rows in sizes]
            else:
                found += [Deployment(*rank, 1, t, "prefill") for t in tokens]
    if not found:
        raise EngineError(f"--tp {args.tp}: no model of {args.model} can be split so")
    return found


def _degrees(text: str) -> list[int]:
    try:
        return list(dict.fromkeys(int(item) for item in text.split(",")))
    except ValueError:
        raise EngineError(f"--tp {text!r}: numbers of GPUs, comma-separated, such as 1,2") from None


def _check_split(name: str, tp: int, shard_of: int | None, context: int) -> None:
    """EngineError unless the preset has this split and so many positions."""
    model = preset(name)
    EngineConfig(model=name, tensor_parallel_size=tp, load_format="dummy", shard_of=shard_of)
    if shard_of and shard_of < tp:
        raise EngineError(f"--shard-of {shard_of} is below --tp {tp}")
    model.shard(shard_of or tp)
    most = model.max_position_embeddings
    if not 1 <= context <= most:
        raise EngineError(f"--context {context} is not 1 to {most}, the positions of {model.name}")


def _sizes(flag: str, text: str, allowed: Sequence[int]) -> list[int]:
    """The numbers of a comma-separated list. EngineError for one that no graph has."""
    known = {str(size): size for size in allowed}
    for item in text.split(","):
        if item.strip() not in known:
            raise EngineError(f"{flag} {item!r}: there are graphs of {', '.join(known)}")
    return [known[item.strip()] for item in text.split(",")]


def _seconds(text: str) -> float:
    """Of --budget."""
    try:
        seconds = float(text.removesuffix("s"))
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise EngineError(f"--budget {text!r} is not a time above 0 such as 120s")
    return seconds


def main(argv: list[str] | None = None) -> int:
    """Exit code: see engine.console; 1 also from --check when entries are missing."""
    return run(lambda: _main(argv))


def _main(argv: list[str] | None) -> int:
    args = _parser().parse_args(argv)
    budget = _seconds(args.budget)
    import torch

    from engine.tune import search

    deployments = _deployments(args)
    if args.check:
        return 1 if sum(search.check(d) for d in deployments) else 0
    if args.dry_run:
        for deployment in deployments:
            search.dry_run(deployment, args.missing)
        return 0
    if not torch.cuda.is_available():
        raise EngineError(
            "autotune times kernels and needs a CUDA device; --check and --dry-run work without"
        )
    gpu = torch.cuda.get_device_name(0)
    choose.set_target(gpu, torch.cuda.get_device_properties(0).multi_processor_count)
    for deployment in deployments:
        if args.missing and not search.any_missing(deployment):
            print(f"{deployment}: nothing is missing", flush=True)
            continue
        if deployment.tp > torch.cuda.device_count():
            deployment = replace(deployment, tp=1, shard_of=deployment.degree)
        chain = search.Chain(deployment)
        found: dict[str, dict[str, dict]] = {}
        try:
            search.tune(chain, budget, found, args.missing)
        finally:  # first of all: after Ctrl-C there are only seconds
            search.save(found, gpu)
            chain.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
