"""What bench/scorecard.py runs on the devices, each section in a process of its own.

    python -m bench.scorecard_parts links
    python -m bench.scorecard_parts engine qwen2.5-72b:fp8:2:8 [--soak]
    python -m bench.scorecard_parts virtual qwen2.5-72b:none:8

Rows go to $OUT/scorecard.json as they are measured. A part that fails is a row `part_failed` with its reason, and
the next one runs.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from bench.deployment import facts, parse
from bench.rows import Rows
from engine.config import EngineConfig, ModelConfig, preset, with_layers
from engine.console import Parser, run
from engine.graph.ir import Phase
from engine.model import gpu_named, predict
from engine.roof import roof_share
from engine.runtime.buckets import LARGEST

if TYPE_CHECKING:
    from engine.profiling.session import Session
    from engine.runtime.gpu import GpuExecutor

CONTEXTS = (512, 8192)  # of the decode rate; TTFT is measured there too
PROMPTS = (2048,)  # of TTFT alone
RUNS, TOKENS = 3, 96  # timed requests, after one that warms up, and their answers
SOAK_PROMPTS, SOAK_TOKENS, SOAK_REPEATS = 30, 256, 3  # each prompt three times over the soak
LAYERS = 2  # of the model that virtual ranks run
# Each of 2 x LAYERS sums adds partial sums rounded to bf16, 2^-9 / sqrt(3) of their size, in W parts that are
# larger than their sum at most by sqrt(W); with the hidden state's own rounding 1 % for W = 8. A rank or a layer
# that is missing or summed twice changes the logits by tens of percent.
VIRTUAL_ERROR = 0.03


def attempt(rows: Rows, name: str, body: Callable[[], None], **named: Any) -> None:
    """Run one part; its failure becomes a row."""
    begin = time.perf_counter()
    try:
        body()
    except Exception as e:
        reason = f"{name}: {type(e).__name__}: {' '.join(str(e).split())}"[:400]
        print(f"FAILED {reason}", flush=True)
        rows.add("part_failed", time.perf_counter() - begin, "s", algorithm=reason, **named)


def links(rows: Rows) -> None:
    """The probe's matrix, and what a copy reaches over each link."""
    import torch

    from engine.runtime.bandwidth import event_seconds
    from engine.runtime.links import describe, probe_links

    matrix = probe_links()
    text = describe(matrix)
    print(text, flush=True)
    rows.add("topology", torch.cuda.device_count(), "GPUs", text=text)
    source = torch.empty(1 << 28, dtype=torch.uint8, device="cuda:0")
    for link in matrix.links:
        here = source.to(f"cuda:{link.source}")
        there = torch.empty_like(here, device=f"cuda:{link.target}")
        with torch.cuda.device(link.source):
            times = event_seconds(lambda: there.copy_(here), 6)  # noqa: B023
        rate = here.nbytes / statistics.median(times[1:]) / 1e9
        name = f"copy GPU {link.source} -> GPU {link.target}, {link.kind}"
        roof = gpu_named(matrix.names[0]).link
        rows.add("link_gb_s", rate, "GB/s", algorithm=name, share=rate * 1e9 / roof)


def engine(rows: Rows, text: str, soak: bool) -> None:
    """One deployment: TTFT, decode rate, counters, stages and, if asked for, the soak."""
    from engine.profiling.session import Session, Wanted

    config, model = parse(text), preset(text.split(":")[0])
    wanted = Wanted(input_len=CONTEXTS[0], prompts=(*CONTEXTS[1:], *PROMPTS))
    session = Session(config, model, wanted)
    named = facts(config)
    try:
        for context in CONTEXTS:
            attempt(
                rows, f"decode at {context}", lambda: _decode(rows, session, context), **named  # noqa: B023
            )  # fmt: skip
        for length in PROMPTS:
            attempt(rows, f"TTFT at {length}", lambda: _ttft(rows, session, length), **named)  # noqa: B023
        attempt(rows, "counters", lambda: _counters(rows, session), **named)
        if soak:
            attempt(rows, "soak", lambda: _soak(rows, session), **named)
        for phase in wanted.phases:
            attempt(
                rows, f"profile of {phase}", lambda: _profile(rows, session, phase), **named  # noqa: B023
            )  # fmt: skip
    finally:
        session.close()


def _timed(session: Session, length: int, tokens: int) -> tuple[float, float]:
    """Median (TTFT, time per later token) of requests with `length` tokens in, seconds."""
    from bench.latency import generate
    from engine.bench.timing import random_prompts

    [ids] = random_prompts(1, length, session.model.vocab_size)
    runs = [generate(session.executor, ids, tokens) for _ in range(RUNS + 1)][1:]
    return statistics.median(run[1] for run in runs), statistics.median(run[2] for run in runs)


def _decode(rows: Rows, session: Session, context: int) -> None:
    first, later = _timed(session, context, TOKENS)
    mean = context + TOKENS // 2
    share = roof_share(session.executor.stats()["roof"], mean, later)
    add(rows, session.engine, session.model, "ttft_ms", first * 1e3, "ms", context)
    add(
        rows, session.engine, session.model, "decode_tok_s", 1 / later, "tok/s", context,
        share=share, mean_context=mean,
    )  # fmt: skip


def _ttft(rows: Rows, session: Session, length: int) -> None:
    first, _ = _timed(session, length, 2)
    add(rows, session.engine, session.model, "ttft_ms", first * 1e3, "ms", length)


def _counters(rows: Rows, session: Session) -> None:
    counters = session.counters()
    print(counters, flush=True)
    for metric, key in (
        ("host_syncs_per_request", "host_syncs"), ("allocations_per_request", "allocations"),
        ("jit_compiles_after_start", "jit_compiles_after_start"),
    ):  # fmt: skip
        rows.add(metric, counters[key], "calls", context=CONTEXTS[0], **facts(session.engine))


def _profile(rows: Rows, session: Session, phase: Phase) -> None:
    from engine.profiling.report import table

    for profile in session.profile(phase):
        print(table(profile), flush=True)
        for stage in profile.stages:
            rows.add(
                "stage_us", stage.us, "us", algorithm=f"{phase} {stage.stage}", rows=profile.rows,
                context=CONTEXTS[0], share=stage.share, **facts(session.engine),
            )  # fmt: skip


def _soak(rows: Rows, session: Session) -> None:
    """The field report's failure: ids that change, a rate that decays over prompts."""
    from bench.latency import generate
    from engine.bench.timing import random_prompts

    executor, named = session.executor, facts(session.engine)
    prompts = random_prompts(SOAK_PROMPTS // SOAK_REPEATS, CONTEXTS[0], session.model.vocab_size)
    generate(executor, prompts[0], SOAK_TOKENS)
    seen: dict[int, list[int]] = {}
    stable, times = 0, []
    for i in range(SOAK_PROMPTS):
        which = i % len(prompts)
        ids, _, later = generate(executor, prompts[which], SOAK_TOKENS)
        stable += ids == seen.setdefault(which, ids)
        times.append(later)
    tenth = max(1, SOAK_PROMPTS // 10)
    ratio = statistics.median(times[-tenth:]) / statistics.median(times[:tenth])
    name = f"{SOAK_PROMPTS} prompts x {SOAK_TOKENS} tokens"
    print(f"soak: {stable} of {SOAK_PROMPTS} answers stable, last / first tenth {ratio:.4f}")
    rows.add("soak_ids_stable", stable / SOAK_PROMPTS, "share", algorithm=name, **named)
    rows.add("soak_last_over_first", ratio, "ratio", algorithm=name, **named)
    rows.add("soak_ranks_equal", int(_ranks_equal(executor)), "bool", algorithm=name, **named)


def _ranks_equal(executor: GpuExecutor) -> bool:
    """Whether all ranks hold the same tokens and positions and no spin has expired."""
    import torch

    for device in {rank.device for rank in executor.ranks}:
        torch.cuda.synchronize(device)
    first = executor.ranks[0].state
    return all(
        torch.equal(rank.state.tokens.cpu(), first.tokens.cpu())
        and torch.equal(rank.state.positions.cpu(), first.positions.cpu())
        and not any(rank.status.tolist())
        for rank in executor.ranks
    )


def add(
    rows: Rows, config: EngineConfig, model: ModelConfig, metric: str, value: float, unit: str, context: int, *,
    share: float | None = None, mean_context: int = 0,
) -> None:  # fmt: skip
    """A measured row and, where one rank's share of a larger degree was measured, the forecast for the whole node.

    metric: decode_tok_s (at mean_context on average) or ttft_ms of `context` tokens."""
    rows.add(metric, value, unit, context=context, share=share, **facts(config))
    degree, decode = config.shard_of, metric == "decode_tok_s"
    if degree is None or (not decode and context > LARGEST):  # chunks of a prompt are not modelled
        return
    common: dict[str, Any] = dict(
        phase="decode" if decode else "prefill", quantization=config.quantization,
        rows=1 if decode else context, context=mean_context if decode else 0,
        fp8_prefill=config.fp8_prefill(config.quantization),
    )  # fmt: skip
    whole = predict(model, degree, **common)
    part = predict(model, config.tensor_parallel_size, shard_of=degree, **common)
    more_us = whole.total_us - part.total_us
    forecast = 1 / (1 / value + more_us * 1e-6) if decode else value + more_us * 1e-3
    alone = whole.tok_s if decode else (whole.total_us + whole.constants.host_us) * 1e-3
    waits = sum(stage.cost.barriers for stage in whole.stages)
    rows.add(
        f"predicted_{metric}", forecast, unit, context=context,
        algorithm=f"PREDICTION from one rank's share on {config.tensor_parallel_size} GPU(s)",
        baseline={"name": "the model alone", "value": float(f"{alone:.5g}")},
        assumptions=(
            f"the measured step of one rank's share ({value:.4g} {unit}), plus {more_us:.0f} us by which the "
            f"performance model's {waits} waits among {degree} ranks exceed those among "
            f"{config.tensor_parallel_size} (constants: {whole.constants.source}); every rank as fast as this one, "
            f"links as on this node's model ({whole.gpu.link / 1e9:.0f} GB/s each way)"
        ),
        **{**facts(config), "tp": degree, "shard_of": None},
    )  # fmt: skip


def virtual(rows: Rows, text: str) -> None:
    """A small model of the real shapes on virtual ranks against one rank: the protocol's bits, not its speed."""
    import torch

    from engine.runtime.create import create_gpu_executor

    name, quantization, tp = text.split(":")
    model = with_layers(preset(name), LAYERS)
    prompt = [(i * 7919 + 13) % model.vocab_size for i in range(40)]
    results: list[tuple[list[int], list[torch.Tensor]]] = []
    equal = True
    for degree in (1, int(tp)):
        config = parse(f"{name}:{quantization}:{degree}", max_num_seqs=1, max_model_len=128,
                       virtual_ranks=degree > 1)  # fmt: skip
        executor = create_gpu_executor(config, model)
        try:
            ids, logits, step = [], [], executor.prefill(0, prompt)
            for _ in range(8):
                ids += executor.read(step)
                logits.append(executor.logits(step)[0])
                step = executor.decode([0])
            executor.read(step)
            equal = equal and _ranks_equal(executor)
        finally:
            executor.close()
        results.append((ids, logits))
    (ids, want), (others, got) = results
    same = next((i for i, (a, b) in enumerate(zip(ids, others)) if a != b), len(ids) - 1) + 1
    error = max(
        ((b - a).norm() / a.norm()).item() for a, b in zip(want[:same], got[:same], strict=True)
    )
    print(f"virtual x{tp}: {same} steps compared, logits {error:.2e}, ranks equal {equal}")
    named = dict(model=name, quantization=quantization, tp=int(tp), context=len(prompt),
                 algorithm=f"virtual ranks, {LAYERS} layers")  # fmt: skip
    rows.add("virtual_logits_error", error, "ratio", **named)
    rows.add("virtual_ranks_equal", int(equal), "bool", **named)
    if not error < VIRTUAL_ERROR or not equal:
        raise AssertionError(f"logits error {error:.2e} (bound {VIRTUAL_ERROR}), ranks equal {equal}")  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: see engine.console."""
    return run(lambda: _main(argv))


def _main(argv: Sequence[str] | None) -> int:
    parser = Parser(prog="python -m bench.scorecard_parts", description=__doc__)
    parser.add_argument("part", choices=("links", "engine", "virtual"))
    parser.add_argument(
        "deployment", nargs="?", default="", help="MODEL:QUANTIZATION:TP[:SHARD_OF]"
    )
    parser.add_argument("--soak", action="store_true")
    args = parser.parse_args(argv)
    rows = Rows("scorecard")
    if args.part == "links":
        attempt(rows, "links", lambda: links(rows))
    elif args.part == "virtual":
        attempt(rows, "virtual", lambda: virtual(rows, args.deployment))
    else:
        engine(rows, args.deployment, args.soak)
    return 0


if __name__ == "__main__":
    sys.exit(main())
