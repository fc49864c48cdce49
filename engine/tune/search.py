"""What `python -m engine.autotune` does for one deployment: its keys, their candidates, which of them are kept."""

from __future__ import annotations

import datetime
import time
from collections.abc import Iterator
from typing import Any

from engine.bench.rows import driver_version
from engine.errors import EngineError
from engine.kernels.gemv_config import WIDE_ROWS, with_wide
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


def any_missing(deployment: Deployment) -> bool:
    """Whether a key of the deployment's graph has no valid entry."""
    return any(_problem(op, facts) for op, facts, _ in _tunable(deployment))


def dry_run(deployment: Deployment, missing: bool = False) -> None:
    """Print each key of the deployment's graph (missing: without a valid entry) and how many candidates it has."""
    print(deployment)
    for op, facts, configs in _tunable(deployment):
        if missing and not _problem(op, facts):
            continue
        print(f"  {op} {choose.key_string(op, facts)}: {len(configs)} candidates")
