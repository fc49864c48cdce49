"""lm_head and the choice of a token on the card: GEMV + argmax_partial + argmax_finish against the GEMV whose epilogue
keeps the maxima + argmax_finish.

    python -m bench.argmax --time-limit 60

First bits: the same logits, and the same tokens over many greedy and sampled rows. Then times: both chains under
programmatic launches, several steps in one graph, weights beyond the L2, alternating; medians. TP = 2 is one
rank's shard (the second one's), without the exchange, which both share. FP8 weights are for the record: the engine
keeps lm_head in 16 bits. Rows (bench/rows.py) go to $OUT (default ./out).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch

from bench.deployment import decode_rows, script
from bench.rows import Rows
from bench.timing import graph_us
from engine.config import preset
from engine.console import Parser
from engine.kernels.argmax import argmax_finish, argmax_partial, argmax_programs
from engine.kernels.epilogue import Maxima, Store
from engine.kernels.gemv import GemvConfig, gemv, gemv_programs, heuristic
from engine.tune import choose

DEVICE = "cuda"
SHAPES = (("qwen2.5-7b", 1), ("qwen2.5-72b", 1), ("qwen2.5-7b", 2), ("qwen2.5-72b", 2))
STEPS = 4  # of one graph
TRIALS = 24  # steps whose tokens are compared
SLOTS = 8
INT = torch.int32


def tuned(n: int, k: int, dtype: torch.dtype) -> GemvConfig:
    """The cache's entry for this weight, whatever sources it was tuned with; else the heuristic's choice."""
    path = choose.CACHE_DIR / choose.gpu_slug(torch.cuda.get_device_name()) / "gemv.json"
    entries = json.loads(path.read_text())["entries"] if path.exists() else {}
    entry = entries.get(choose.key_string("gemv", {"n": n, "k": k, "weight_dtype": dtype}))
    return GemvConfig(**entry["config"]) if entry else heuristic(n, k, dtype)


@dataclass
class End:
    """Where one chain's tokens go."""

    rows: int
    tokens: torch.Tensor = field(init=False)
    positions: torch.Tensor = field(init=False)
    ring: torch.Tensor = field(init=False)
    step: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.tokens = torch.zeros(SLOTS, dtype=INT, device=DEVICE)
        self.positions = (torch.arange(SLOTS, device=DEVICE) * 100).to(INT)
        self.ring = torch.full((4, self.rows), -1, dtype=INT).pin_memory()
        self.step = torch.zeros(1, dtype=INT, device=DEVICE)


class Head:
    """lm_head of one rank at `rows` rows, and both chains behind it."""

    def __init__(self, w: torch.Tensor, scale: torch.Tensor | None, rows: int, tp: int):
        self.w, self.rows = w, rows
        n, k = w.shape
        self.config = tuned(n, k, w.dtype)
        self.vocab, self.offset = n * tp - 100, n * (tp - 1)  # the last shard ends in padding
        self.x = torch.randn(rows, k, device=DEVICE).bfloat16()
        norm = (torch.randn(k, device=DEVICE) * 0.1 + 1).bfloat16()
        self.extras: dict[str, Any] = dict(scale=scale, norm_weight=norm, eps=1e-6, pdl=True)
        self.temperature = torch.zeros(SLOTS, device=DEVICE)
        self.seeds = torch.randint(0, 2**31 - 1, (SLOTS,), device=DEVICE).to(INT)
        self.row_slots = torch.randperm(SLOTS, device=DEVICE)[:rows].to(INT)
        self.ends = {"apart": End(rows), "fused": End(rows)}
        self.logits = {
            name: torch.full((rows, n), float("nan"), device=DEVICE) for name in self.ends
        }
        parts = {
            "apart": argmax_programs(n),
            "fused": gemv_programs(self.config, n, k, rows, w.dtype),
        }
        self.best = {
            name: (
                torch.zeros(rows, p, device=DEVICE),
                torch.zeros(rows, p, dtype=INT, device=DEVICE),
            )
            for name, p in parts.items()
        }

    def run(self, name: str) -> None:
        """One step of a chain, under programmatic launches."""
        end, logits, best = self.ends[name], self.logits[name], self.best[name]
        state = (self.temperature, self.seeds, end.positions, self.row_slots)
        limits: dict[str, Any] = {"vocab_size": self.vocab, "id_offset": self.offset}
        if name == "apart":
            gemv(self.x, self.w, Store(logits), config=self.config, **self.extras)
            argmax_partial(logits, *state, *best, **limits, pdl=True)
        else:
            epilogue = Maxima(logits, *best, *state, **limits)
            gemv(self.x, self.w, epilogue, config=self.config, **self.extras)
        argmax_finish(
            *best, end.tokens, end.positions, self.row_slots, end.ring, end.step, pdl=True
        )

    def compile(self) -> None:
        """In a thread of its own: the kernels of both chains. Forgets what they did."""
        torch.zeros(1, device=DEVICE)  # gives the thread its context
        for name in self.ends:
            self.run(name)
        torch.cuda.synchronize()
        self.ends = {name: End(self.rows) for name in self.ends}

    def different(self) -> int:
        """Tokens that differ between the chains, of TRIALS steps; raises where logits or states do."""
        count = 0
        for trial in range(TRIALS):
            self.x.normal_()
            warm = torch.rand(SLOTS, device=DEVICE) * 1.5
            self.temperature.copy_(
                warm * (torch.rand(SLOTS, device=DEVICE) < 0.7) * (trial % 4 > 0)
            )
            for name in self.ends:
                self.run(name)
            torch.cuda.synchronize()
            apart, fused = self.ends["apart"], self.ends["fused"]
            if not torch.equal(*(t.view(INT) for t in self.logits.values())):
                raise AssertionError("the logits differ")
            row = trial % 4
            if bool((fused.ring[row] < self.offset).any() or (fused.ring[row] >= self.vocab).any()):
                raise AssertionError(f"{fused.ring[row].tolist()} is outside of the shard")
            count += int((apart.ring[row] != fused.ring[row]).sum())
            if not torch.equal(apart.positions, fused.positions):
                raise AssertionError("the positions differ")
        return count

    def time(self, name: str) -> float:
        """us a step."""

        def body() -> None:
            for _ in range(STEPS):
                self.run(name)

        return graph_us(body, STEPS)


def heads(model: str, tp: int, rows: list[int]) -> list[Head]:
    """Compiled heads of one shape: BF16 and FP8 weights, each at every row count."""
    config = preset(model)
    n, k = config.shard(tp).vocab_size, config.hidden_size
    wide = torch.empty(n, k, dtype=torch.bfloat16, device=DEVICE).normal_(std=0.02)
    narrow = torch.empty(n, k, dtype=torch.float8_e4m3fn, device=DEVICE)
    for part, source in zip(narrow.split(1 << 14), wide.split(1 << 14)):
        part.copy_(source.float() * 50)
    scale = torch.rand(n, device=DEVICE) * 0.02 + 0.01
    made = [Head(w, s, count, tp) for w, s in ((wide, None), (narrow, scale)) for count in rows]
    with ThreadPoolExecutor(len(made)) as pool:
        list(pool.map(Head.compile, made))
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: see bench.deployment; 1 if tokens differ."""
    parser = Parser(prog="python -m bench.argmax", description=__doc__)
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds")
    parser.add_argument(
        "--rows", type=decode_rows, default="1,8", help="of decode, comma-separated"
    )
    return script(parser, measure_all, argv)


def measure_all(args: argparse.Namespace) -> int:
    """Every shape; the exit code."""
    deadline = time.perf_counter() + args.time_limit
    rows, bad = Rows("argmax"), 0
    print(
        "model/tp dtype rows programs | tokens that differ | apart us, fused us, saved", flush=True
    )
    for model, tp in SHAPES:
        for head in heads(model, tp, args.rows):
            if time.perf_counter() > deadline - 2:
                print("time limit: the rest is left out")
                return int(bad > 0)
            different = head.different()
            bad += different
            head.temperature.zero_()
            times = [(head.time("apart"), head.time("fused")) for _ in range(3)]
            apart, fused = (statistics.median(column) for column in zip(*times))
            kind = "bf16" if head.w.itemsize == 2 else "fp8"
            programs = head.best["fused"][0].shape[1]
            print(f"{model[8:]:>4}/{tp} {kind:>5} {head.rows} {programs:>6} | {different} of "
                  f"{TRIALS * head.rows} | {apart:8.2f} {fused:8.2f} {apart - fused:6.2f}", flush=True)  # fmt: skip
            rows.add(
                "lm_head_and_token_us", fused, "us", model=model, tp=tp, rows=head.rows,
                quantization="none" if kind == "bf16" else kind, bytes=head.w.nbytes,
                algorithm="maxima in the epilogue",
                baseline={"name": "GEMV + argmax_partial", "value": float(f"{apart:.5g}")},
            )  # fmt: skip
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
