"""The scorecard: one call that measures what matters on however many GPUs there are.

    python -m bench.scorecard                     # under 10 minutes; rows in $OUT/scorecard.json
    python -m bench.scorecard --dry-run --gpus 8  # the plan with estimated seconds; needs no GPU

Links; all-reduce by size, algorithm and TP degree; 72B in BF16 and FP8 at every degree that fits: TTFT, decode rate at
two contexts, share of the roof, host synchronisations, stage profile; a soak at the largest degree. Degrees beyond
the GPUs run as virtual ranks (is it right?) and as one rank's share (how fast is a rank?), with a forecast for the
whole node in rows of their own, `predicted_...`, that carry their assumptions.

Every section is a process with a time limit. One that fails or finds no time left is a row `section_failed` with its
reason. Sections that the file holds already are not run again (--again runs all).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.rows import Rows
from bench.scorecard_parts import CONTEXTS, PROMPTS, RUNS, SOAK_PROMPTS, SOAK_TOKENS, TOKENS
from bench.scorecard_summary import DEGREES, FAILED, summary
from engine.config import ModelConfig, preset
from engine.console import Parser, check_above_zero, run
from engine.errors import EngineError
from engine.graph.ir import Phase
from engine.model import gpu_named, predict
from engine.model.calibrate import PRIOR
from engine.model.exchange import predicted

MODEL = "qwen2.5-72b"
GPU_BYTES = 141e9  # of an H200; weights may take WEIGHT_SHARE of it
WEIGHT_SHARE = 0.85
TIME_LIMIT_S = 570.0
SLACK = 1.6  # a section may take this many times its estimate, where there is time
LEAST_S = 15.0  # a section with less than that left is not begun
# Of a start beyond its weights: Python, links, kernels compiled for a degree that no cache holds, capture.
START_S, START_RANK_S, GB_S = 20.0, 1.0, 7.0
VIRTUAL_S, BASELINES_S = 25.0, 30.0
SHOWN = 4000  # characters of a section's output on the terminal; all of it is in $OUT/scorecard.log
PROFILE_STEPS, PROFILE_PREFILLS = 300, 60  # replays of both phases' profiles, bare and marked


@dataclass(frozen=True)
class Section:
    """A process: `python -m` command, on the first `gpus` devices. kind: real, virtual or share."""

    name: str
    kind: str
    gpus: int
    seconds: float  # estimate
    command: tuple[str, ...]


def plan(gpus: int, model_name: str = MODEL) -> list[Section]:
    """Sections for a machine, the most telling first. Pure. EngineError for a model that there is not."""
    model = preset(model_name)
    degrees = [n for n in DEGREES if n in model.valid_tp()]
    largest = max(n for n in degrees if n <= gpus)
    real, shares = [], []
    for degree in degrees[::-1]:
        for quantization in ("fp8", "none"):
            if not fits(model, quantization, degree):
                continue
            if degree <= gpus:
                soak = degree == largest and quantization == "fp8"
                real.append(_engine(model, quantization, degree, None, soak))
            elif degree >= 4:
                shares.append(_engine(model, quantization, largest, degree, False))
    virtual = [
        Section(
            f"virtual-tp{n}", "virtual", gpus, VIRTUAL_S,
            ("bench.scorecard_parts", "virtual", f"{model_name}:none:{n}"),
        )
        for n in degrees if n >= 4 and n > gpus
    ]  # fmt: skip
    probe = Section("links", "real", gpus, 12.0, ("bench.scorecard_parts", "links"))
    first = [s for s in real if s.gpus == largest]
    return [probe, *_all_reduce(gpus), *first, *virtual, *shares, *real[len(first) :]]


def fits(model: ModelConfig, quantization: str, degree: int) -> bool:
    """Whether one rank's weights leave room for the rest."""
    return _weights(model, quantization) / degree <= WEIGHT_SHARE * GPU_BYTES


def _weights(model: ModelConfig, quantization: str) -> float:
    """Bytes; the embedding and lm_head stay at 16 bits."""
    wide = 2 * model.vocab_size * model.hidden_size
    return 2.0 * model.num_parameters if quantization == "none" else model.num_parameters + wide


def _all_reduce(gpus: int) -> list[Section]:
    """The sweep of bench/all_reduce.py at every degree; NCCL and symm_mem beside it where ranks are many."""
    sections = []
    for degree in (8, 4, 2):
        if degree <= gpus:
            seconds = 22.0 + 4.0 * degree
            command = ["--sections", "latency", "--time-limit", f"{seconds:.0f}"]
            if degree > 2:
                command.append("--baselines")
                seconds += BASELINES_S
            sections.append(
                Section(f"all-reduce-tp{degree}", "real", degree, seconds, ("bench.all_reduce", *command))
            )  # fmt: skip
    if gpus < 8:
        command = ["--sections", "virtual", "--calls", "20000", "--time-limit", "25"]
        sections.append(
            Section("all-reduce-virtual", "virtual", gpus, 35.0, ("bench.all_reduce", *command))
        )
    return sections


def _engine(
    model: ModelConfig, quantization: str, tp: int, shard_of: int | None, soak: bool
) -> Section:
    name = f"{quantization if quantization == 'fp8' else 'bf16'}-tp{shard_of or tp}"
    text = f"{model.name}:{quantization}:{tp}" + (f":{shard_of}" if shard_of else "")
    command = ("bench.scorecard_parts", "engine", text, *(["--soak"] if soak else []))
    seconds = _engine_seconds(model, quantization, tp, shard_of, soak)
    kind = "share" if shard_of else "real"
    return Section(name + ("-share" if shard_of else ""), kind, tp, seconds, command)


def _engine_seconds(
    model: ModelConfig, quantization: str, tp: int, shard_of: int | None, soak: bool
) -> float:
    """From the performance model's steps. Dummy weights are made at 16 bits and then quantised."""
    kind = "fp8" if quantization == "fp8" else None

    def step_s(phase: Phase, rows: int, context: int) -> float:
        p = predict(model, tp, phase=phase, quantization=kind, rows=rows, context=context,
                    shard_of=shard_of, constants=PRIOR[kind], fp8_prefill=kind == "fp8")  # fmt: skip
        return p.total_us * 1e-6

    def prompt_s(length: int) -> float:
        return step_s("prefill", length, 0)

    total = START_S + START_RANK_S * tp
    total += _weights(model, "none") / (shard_of or tp) / (GB_S * 1e9)
    for context in CONTEXTS:
        total += (RUNS + 1) * (prompt_s(context) + TOKENS * step_s("decode", 1, context))
    total += sum((RUNS + 1) * prompt_s(length) for length in PROMPTS)
    step, first = step_s("decode", 1, CONTEXTS[0]), prompt_s(CONTEXTS[0])
    total += PROFILE_STEPS * step + PROFILE_PREFILLS * first
    if soak:
        total += (SOAK_PROMPTS + 1) * (first + SOAK_TOKENS * step)
    return total


def describe(sections: Sequence[Section], time_limit: float) -> str:
    """The plan as a table with the time at which each section would end."""
    lines = [f"{'section':<20}{'kind':<9}{'GPUs':>5}{'est. s':>8}{'ends':>7}  command"]
    end = 0.0
    for s in sections:
        end += s.seconds
        late = "  (beyond the limit)" if end > time_limit else ""
        lines.append(f"{s.name:<20}{s.kind:<9}{s.gpus:>5}{s.seconds:>8.0f}{end:>7.0f}  "
                     f"python -m {' '.join(s.command)}{late}")  # fmt: skip
    return "\n".join([*lines, f"{end:.0f} s in all, limit {time_limit:.0f} s"])


class Scorecard:
    """Runs sections and collects their rows in one file, each with the name of its section."""

    def __init__(self, out: Path, *, again: bool = False):
        self.rows = Rows("scorecard", str(out))
        self.log = out / "scorecard.log"
        held = []
        if self.rows.path.is_file() and not again:
            held = json.loads(self.rows.path.read_text())
        failed = {row["section"] for row in held if row["metric"] in FAILED}
        self.rows.rows += [row for row in held if row["section"] not in failed]
        self.done = {row["section"] for row in self.rows.rows if row["metric"] == "section_s"}

    def run(self, section: Section, left_s: float) -> None:
        """One section, within min(SLACK x estimate + LEAST_S, left_s); its rows, or the reason why not."""
        if section.name in self.done:
            print(f"== {section.name}: held already", flush=True)
            return
        limit = min(SLACK * section.seconds + LEAST_S, left_s)
        if limit < LEAST_S:
            self._fail(section, 0.0, f"no time: {left_s:.0f} of {section.seconds:.0f} s are left")
            return
        print(
            f"== {section.name} ({section.kind}, {section.gpus} GPU(s), limit {limit:.0f} s)",
            flush=True,
        )
        begin = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            text, reason = _run(section, Path(folder), limit)
            for file in sorted(Path(folder).glob("*.json")):  # as far as it came
                for row in json.loads(file.read_text()):
                    self.rows.rows.append({**row, "bench": "scorecard", "section": section.name})
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("a") as log:
            log.write(f"== {section.name}\n{text}\n")
        print(text[-SHOWN:].rstrip(), flush=True)
        seconds = time.monotonic() - begin
        if reason:
            self._fail(section, seconds, reason)
        else:
            self.rows.add("section_s", seconds, "s", algorithm=section.name, section=section.name)

    def _fail(self, section: Section, seconds: float, reason: str) -> None:
        print(f"== {section.name} FAILED: {reason}", flush=True)
        text = f"{section.name}: {reason}"[:500]
        self.rows.add("section_failed", seconds, "s", algorithm=text, section=section.name)


def forecast_all_reduce(rows: Rows, gpus: int) -> None:
    """Rows of what engine/model/exchange.py predicts for the degrees beyond the GPUs, from the two-rank rows here."""
    here = [{**row, "bench": "all_reduce"} for row in rows.rows if row["metric"] == "all_reduce_us"]
    name = rows.rows[0]["gpu"] if rows.rows else ""
    costs, lines = predicted(here, [n for n in (4, 8) if n > gpus], gpu_named(name))
    for line in lines:
        for algorithm in ("lamport", "two_shot", "two_shot_fp8", "flag"):
            us = getattr(line, f"{algorithm}_us")
            if us is None:  # two-shot is for prefill
                continue
            rows.add(
                "predicted_all_reduce_us", us, "us", tp=line.tp,
                bytes=line.nbytes, algorithm=f"PREDICTION {algorithm}", section="forecast",
                assumptions=(
                    f"launch {costs.launch_us:.2f} us, flight {costs.flight_us:.2f} us at two ranks "
                    f"({costs.source}), links {costs.rate / 1e9:.0f} GB/s each way, no skew, no switch hop"
                ),
            )  # fmt: skip


def _run(section: Section, folder: Path, limit: float) -> tuple[str, str | None]:
    """(what the command said, None or why it failed). What it started ends with it."""
    command = [sys.executable, "-m", *section.command]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(i) for i in range(section.gpus)]
    devices = ",".join(names[: section.gpus])
    env = {**os.environ, "OUT": str(folder), "CUDA_VISIBLE_DEVICES": devices}
    with (folder / "log").open("w+") as log:
        child = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=env, start_new_session=True
        )
        try:
            code = child.wait(limit)
            why = f"exit code {code}"
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            code, why = None, f"out of time after {limit:.0f} s"
        except BaseException:  # Ctrl-C
            os.killpg(child.pid, signal.SIGKILL)
            raise
        log.seek(0)
        text = log.read()
    last = " | ".join(line for line in text.strip().splitlines()[-3:] if line.strip())[-300:]
    return text, None if code == 0 else f"{why}: {last}"


def main(argv: list[str] | None = None) -> int:
    """Exit code: see engine.console."""
    return run(lambda: _main(argv))


def _main(argv: list[str] | None) -> int:
    parser = Parser(prog="python -m bench.scorecard", description=__doc__)
    parser.add_argument("--dry-run", action="store_true", help="print the plan; needs no GPU")
    parser.add_argument("--gpus", type=int, help="plan for so many (default: those here)")
    parser.add_argument("--time-limit", type=float, default=TIME_LIMIT_S, help="seconds (570)")
    parser.add_argument("--sections", help="names of the plan, comma-separated (default: all)")
    parser.add_argument("--model", default=MODEL, help=f"a preset (default {MODEL})")
    parser.add_argument("--again", action="store_true", help="measure what the file holds already")
    args = parser.parse_args(argv)
    check_above_zero("--time-limit", args.time_limit)
    begin = time.monotonic()
    here = 0
    if not args.dry_run or args.gpus is None:
        import torch

        here = torch.cuda.device_count()
    gpus = here if args.gpus is None else args.gpus
    if args.gpus is not None and args.gpus < 1:
        raise EngineError(f"--gpus {args.gpus} is not 1 or more")
    if gpus > max(DEGREES):
        raise EngineError(f"--gpus {gpus}: the engine runs on at most {max(DEGREES)}")
    if not gpus or (not args.dry_run and gpus > here):
        raise EngineError(f"{here} CUDA device(s) here; --dry-run --gpus N prints a plan for N")
    sections = plan(gpus, args.model)
    if args.sections:
        names = args.sections.split(",")
        unknown = set(names) - {s.name for s in sections}
        if unknown:
            there = ", ".join(s.name for s in sections)
            raise EngineError(f"no section {', '.join(sorted(unknown))}; there are {there}")
        sections = [s for s in sections if s.name in names]
    print(describe(sections, args.time_limit), flush=True)
    if args.dry_run:
        return 0
    card = Scorecard(Path(os.environ.get("OUT", "out")), again=args.again)
    for section in sections:
        card.run(section, args.time_limit - (time.monotonic() - begin))
    card.rows.rows[:] = [row for row in card.rows.rows if row["section"] != "forecast"]
    try:
        forecast_all_reduce(card.rows, gpus)
    except EngineError as e:  # a GPU that the model does not know
        print(f"no forecast of the all-reduce: {e}")
    print(summary(card.rows.rows))
    print(f"rows: {card.rows.path}; {time.monotonic() - begin:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
