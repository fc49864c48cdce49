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
import datetime
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from engine.bench.rows import driver_version
from engine.config import EngineConfig, preset
from engine.console import Parser, run
from engine.errors import EngineError
from engine.kernels.gemv_config import WIDE_ROWS, with_wide
from engine.runtime.buckets import DECODE_ROWS, LARGEST, prefill_buckets
from engine.tune import choose
from engine.tune.chain import MAX_ERROR, ROUNDS, Chain, Deployment

# What a step reads most of comes first: the neighbours of the ops tuned later are then nearly final.
TUNED = {"decode": ("gemv", "decode_attention"), "prefill": ("gemm", "prefill_attention")}
MIN_GAIN = 0.002  # of the step's time: less is the spread between two timings of one configuration
FINALISTS = 3  # the fastest candidates, timed again in turn with what is in use


def space(op: str, facts: dict[str, Any], sm_count: int, degree: int) -> list[Any]:
    """Candidates for one op and key, some of them made from the present choice. degree: TP, of the shard if it is one."""
    if op == "gemv":
        from engine.tune.gemv_space import candidates as gemv_candidates

        shape = facts["n"], facts["k"], facts["weight_dtype"], facts["rows"]
        return list(gemv_candidates(*shape, sm_count, choose.choose(op, facts)))
    if op == "gemm":
        from engine.tune.gemm_space import candidates as gemm_candidates

        shape = facts["t"], facts["n"], facts["k"], facts["weight_dtype"]
        found = gemm_candidates(*shape, sm_count)
        # Row-parallel: the library cannot send rows to their owners (a share on one card adds them itself).
        if facts["epilogue"] == "two_shot_scatter" or (
            facts["epilogue"] == "residual" and degree > 1
        ):
            found = [config for config in found if config.kernel != "cublas"]
        return found
    if op == "prefill_attention":
        from engine.tune.attention_space import prefill_candidates

        return list(prefill_candidates(facts["head_dim"], facts["kv_dtype"]))
    # Decode attention: one configuration serves every context up to the limit, so a chain at one context would
    # tune it for that one. `bench.attention` scores over contexts; the heuristic is within 10 % of its best.
    return []


def _is_wide(op: str, facts: dict[str, Any]) -> bool:
    """Whether what is tuned is a GEMV's walk for several rows."""
    return op == "gemv" and facts["rows"] >= WIDE_ROWS


def tune(
    chain: Chain, budget: float, found: dict[str, dict[str, dict]], missing: bool = False
) -> None:
    """Tune every op of the chain's graph within `budget` seconds; fills found: {op: {key: cache entry}}. missing: only
    what has no valid entry."""
    started = time.monotonic()
    present = chain.time()
    print(f"{chain.deployment}, {chain.layers} layers: {present * 1e6:.1f} us a step", flush=True)
    for op, facts in _work(chain):
        if missing and not _problem(op, facts):
            continue
        key = choose.key_string(op, facts)
        wide, entry = _is_wide(op, facts), choose.cached(op, facts)
        if wide and entry is None:
            print(f"  {op} {key}: skipped, it has no entry yet (--rows 1 first)", flush=True)
            continue
        configs = space(op, facts, choose.sm_count(), chain.deployment.degree)
        if not configs:
            print(f"  {op} {key}: no candidates, the heuristic serves", flush=True)
            continue
        left = budget - (time.monotonic() - started)
        if left <= 0:
            print(
                f"  {op} {key}: skipped, the budget of {budget:.0f} s is spent (--budget)",
                flush=True,
            )
            continue
        results = chain.try_all(op, facts, configs, 0.0 if wide else MAX_ERROR)
        if not results:
            continue
        kept = choose.choose(op, facts)
        if wide and kept.wide is None:
            kept = with_wide(kept, kept)
        finalists = [kept, *(config for _, config in results if config != kept)][: 1 + FINALISTS]
        times = chain.duel(op, facts, finalists)
        before = present = times[0]
        best = min(range(len(times)), key=times.__getitem__)
        if times[best] < before * (1 - MIN_GAIN):
            present, kept = times[best], finalists[best]
            choose.set_override(op, kept, facts)
        others = sorted((t, str(c)) for t, c in zip(times, finalists) if c != kept)
        gain = (before - present) / chain.uses(op, facts) * 1e6
        record = {
            "step_us": round(present * 1e6, 2),
            "gain_us_per_call": round(gain, 3),
            "runner_up": others[0][1] if others else None,
            "margin": round(others[0][0] / present - 1, 4) if others else None,
            "candidates": len(results),
            "rounds": ROUNDS,
            "tuned_in": str(chain.deployment),
            "driver": driver_version(),
            "date": datetime.date.today().isoformat(),
        }
        found.setdefault(op, {})[key] = _merged(entry or {}, kept, record, wide)
        print(
            f"  {op} {key}: {len(results)} timed, {gain:+.2f} us a call -> {kept}; step {present * 1e6:.1f} us"
            f" ({time.monotonic() - started:.0f} s)",
            flush=True,
        )


def _merged(
    entry: dict[str, Any], config: Any, record: dict[str, Any], wide: bool
) -> dict[str, Any]:
    """The cache entry after a tuning of `config` or of its wide walk: what was found of the other stays."""
    if wide:
        return {**entry, "config": config, "wide": record}
    kept = {"wide": entry["wide"]} if "wide" in entry and config.wide else {}
    return {"config": config, **record, **kept}


def _work(chain: Chain) -> Iterator[tuple[str, dict[str, Any]]]:
    for op in TUNED[chain.deployment.phase]:
        facts = chain.facts(op)

        def weight(f: dict[str, Any], op: str = op) -> int:
            return int(f.get("n", 0) * f.get("k", 0) * chain.uses(op, f))

        yield from ((op, f) for f in sorted(facts, key=weight, reverse=True))


def save(found: dict[str, dict[str, dict]], gpu: str) -> None:
    """Merge into autotune_cache/<gpu>/; a file made for other kernels is replaced."""
    for op, entries in found.items():
        meta = choose.metadata(op)
        try:
            path = choose.save_entries(op, gpu, entries, meta)
        except EngineError:
            path = choose.save_entries(op, gpu, entries, meta, replace=True)
        print(f"{path}: {len(entries)} entries of {op}", flush=True)


def _tunable(deployment: Deployment) -> list[tuple[str, dict[str, Any], list[Any]]]:
    """(op, key facts, candidates) of what the deployment's graph lets tune. Needs no GPU."""
    from engine.tune.keys import graph_keys

    keys = [(op, facts) for op, facts in graph_keys(deployment) if op in TUNED[deployment.phase]]
    sm_count, degree = choose.sm_count(), deployment.degree
    found = [(op, facts, space(op, facts, sm_count, degree)) for op, facts in keys]
    return [(op, facts, configs) for op, facts, configs in found if configs]


def check(deployment: Deployment) -> int:
    """Print which keys of the deployment's graph have no valid entry; returns how many. EngineError if the graph
    has no key to tune: nothing was checked."""
    keys = _tunable(deployment)
    if not keys:
        raise EngineError(f"{deployment}: the graph has nothing to tune")
    problems = [(_problem(op, facts), op, choose.key_string(op, facts)) for op, facts, _ in keys]
    if deployment.tp > 1 and (stale := choose.stale("all_reduce")):
        problems.append((stale, "all_reduce", "python -m bench.all_reduce --sections tune"))
    lines = [f"  {problem}: {op} {key}" for problem, op, key in problems if problem]
    print(f"{deployment}: {len(problems) - len(lines)} of {len(problems)} keys tuned")
    print("".join(f"{line}\n" for line in lines), end="")
    return len(lines)


def _problem(op: str, facts: dict[str, Any]) -> str | None:
    entry = choose.cached(op, facts)
    if entry is None:
        return "missing or stale"
    walk = not _is_wide(op, facts) or entry["config"].get("wide")
    return None if walk else f"no walk for {WIDE_ROWS} rows and more"


def dry_run(deployment: Deployment, missing: bool = False) -> None:
    """Print each key of the deployment's graph (missing: without a valid entry) and how many candidates it has."""
    print(deployment)
    for op, facts, configs in _tunable(deployment):
        if missing and not _problem(op, facts):
            continue
        print(f"  {op} {choose.key_string(op, facts)}: {len(configs)} candidates")


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
    sizes = _sizes("--rows", args.rows, DECODE_ROWS)
    tokens = _sizes("--tokens", args.tokens, prefill_buckets(LARGEST))
    phases = list(TUNED) if args.phase == "both" else args.phase.split(",")
    if not set(phases) <= set(TUNED):
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
    budget, deployments = _seconds(args.budget), _deployments(args)
    if args.check:
        return 1 if sum(check(d) for d in deployments) else 0
    if args.dry_run:
        for deployment in deployments:
            dry_run(deployment, args.missing)
        return 0
    import torch

    if not torch.cuda.is_available():
        raise EngineError(
            "autotune times kernels and needs a CUDA device; --check and --dry-run work without"
        )
    gpu = torch.cuda.get_device_name(0)
    choose.set_target(gpu, torch.cuda.get_device_properties(0).multi_processor_count)
    for deployment in deployments:
        if args.missing and not any(_problem(op, facts) for op, facts, _ in _tunable(deployment)):
            print(f"{deployment}: nothing is missing", flush=True)
            continue
        if deployment.tp > torch.cuda.device_count():
            deployment = replace(deployment, tp=1, shard_of=deployment.degree)
        chain = Chain(deployment)
        found: dict[str, dict[str, dict]] = {}
        try:
            tune(chain, budget, found, args.missing)
        finally:  # first of all: after Ctrl-C there are only seconds
            save(found, gpu)
            chain.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
