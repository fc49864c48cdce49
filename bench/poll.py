"""What an all-reduce costs between GEMVs on ONE card: polled by the consumer, polled by a launch, or not there.

    python -m bench.poll --time-limit 120

Writes $OUT/poll.json (rows, see bench/rows.py). A world's messages are all sent by this rank to itself: the push of
o_proj and down_proj stores world copies of the partial sum, one for each rank's place in the slot. So everything
runs but the links: a real message comes about 0.8 us later, which the weights' prefetch covers in both forms.
A layer is o_proj, all-reduce, gate/up, down_proj, all-reduce, qkv (no attention), in one graph of some layers with
cold weights and programmatic launches. Before anything is timed, every hidden state and output of the polled form
must have the bits of the separate one.
  none      o_proj and down_proj add the residual: 4 launches
  separate  push, poll_residual, GEMV: 6 launches
  polled    push, GEMV that polls: 4 launches
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from bench.gemv_workers import Problem, Weight, short, weights
from bench.rows import Rows
from engine.config import preset
from engine.kernels.all_reduce import poll_residual
from engine.kernels.epilogue import Epilogue, Push, Residual
from engine.kernels.gemv import GemvConfig, gemv, heuristic, plan_gemv
from engine.kernels.gemv_poll import MOST_BYTES, Poll
from engine.kernels.slots import LamportWorkspace, lamport_slots
from engine.tune import choose

DEVICE = "cuda"
LAYERS = 4  # of a graph: 8 exchanges; beyond the L2 (60 MB) even for the smallest shard here
FORMS = ("none", "separate", "polled")
ROUNDS, REPLAYS = 9, 12  # the forms take turns, so that a drift of the clocks meets all of them


def tuned(weight: Weight, sm_count: int) -> GemvConfig:
    """The cache's configuration whatever its stamp: the polled kernels are new, the others have the same PTX."""
    file = choose.CACHE_DIR / choose.gpu_slug(torch.cuda.get_device_name(0)) / "gemv.json"
    entries = json.loads(file.read_text())["entries"] if file.exists() else {}
    entry = entries.get(choose.key_string("gemv", weight.key))
    if entry is not None:
        return GemvConfig(**entry["config"])
    return heuristic(weight.n, weight.k, weight.dtype, sm_count)


class Chain:
    """The layers of one shard at `rows` rows, and the three ways through them."""

    def __init__(self, model: str, tp: int, fp8: bool, rows: int, sm_count: int):
        self.world, self.rows, self.hidden = tp, rows, preset(model).hidden_size
        kinds = weights(f"{model}/{tp}", ["fp8" if fp8 else "bf16"])
        self.kinds = {w.layer: w for w in kinds if w.layer != "lm_head"}
        self.config = {name: tuned(w, sm_count) for name, w in self.kinds.items()}
        self.w = {name: w.random(LAYERS, DEVICE) for name, w in self.kinds.items()}
        self.problem = {name: Problem(w, rows, DEVICE) for name, w in self.kinds.items()}
        self.start = torch.randn(rows, self.hidden, device=DEVICE).bfloat16()
        self.h = [torch.empty_like(self.start) for _ in range(2)]
        self.status = torch.zeros(8, dtype=torch.int32)
        if DEVICE == "cuda":
            self.status = self.status.pin_memory()
        own_slots = LamportWorkspace(tp, rows, self.hidden, 2)
        rotated = LamportWorkspace(tp, rows, self.hidden, lamport_slots(2 * LAYERS))
        self.space = {"separate": own_slots, "polled": rotated}
        self.buffer = {form: space.allocate(DEVICE) for form, space in self.space.items()}

    @property
    def message_bytes(self) -> int:
        return self.rows * self.hidden * 2

    def launch(self, layer: int, name: str, epilogue: Epilogue, **arguments: Any) -> tuple:
        """The arguments of a GEMV of this chain: positional, by name."""
        problem = self.problem[name]
        x = arguments.pop("x", problem.x)
        return (x, self.w[name][layer], epilogue), dict(
            config=self.config[name], pdl=True, **problem.extras, **arguments
        )

    def exchange(self, form: str, layer: int, half: int) -> list[tuple[Callable, tuple, dict]]:
        """Launches from o_proj to gate/up (half 0), or from down_proj to qkv: h[half] -> h[1 - half]."""
        name, reader = (("o", "gate_up"), ("down", "qkv"))[half]
        x, out = self.h[half], self.h[1 - half]
        consumer = self.problem[reader].epilogue
        if form == "none":
            first = self.launch(layer, name, Residual(x, out))
            return [(gemv, *first), (gemv, *self.launch(layer, reader, consumer, x=out))]
        space, buffer, site = self.space[form], self.buffer[form], 2 * layer + half
        base = buffer.data_ptr()
        table = torch.tensor([base + r * self.message_bytes for r in range(self.world)]).to(DEVICE)
        slot, clear = space.slot_offset(site), space.clear_offset(site)
        send = (gemv, *self.launch(layer, name, Push(table, slot, 0, self.world)))
        if form == "polled":
            poll = Poll(buffer, slot, clear, out, self.status, 0, self.world, site)
            return [send, (gemv, *self.launch(layer, reader, consumer, x=x, poll=poll))]
        wait = dict(rank=0, world=self.world, call_site=site, pdl=True)
        received = (poll_residual, (buffer, slot, clear, x, out, self.status), wait)
        return [send, received, (gemv, *self.launch(layer, reader, consumer, x=out))]

    def line(self, form: str) -> list[tuple[Callable, tuple, dict]]:
        """All launches of a form."""
        halves = [(layer, half) for layer in range(LAYERS) for half in range(2)]
        return [launch for at in halves for launch in self.exchange(form, *at)]

    def run(self, line: list, form: str) -> list[torch.Tensor]:
        """Run once from the start; every hidden state and consumer's output, in order."""
        self.h[0].copy_(self.start)
        for out in (self.h[1], *self.problem["gate_up"].out, *self.problem["qkv"].out):
            out.fill_(float("nan"))
        seen, step = [], len(line) // (2 * LAYERS)
        for i, (function, args, kwargs) in enumerate(line):
            function(*args, **kwargs)
            if i % step == step - 1:
                half = i // step % 2
                consumer = self.problem[("gate_up", "qkv")[half]]
                seen += [self.h[1 - half].clone(), *(out.clone() for out in consumer.out)]
                for out in (self.h[half], *consumer.out):
                    out.fill_(float("nan"))
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        if self.status.any():
            raise RuntimeError(f"{form}: a wait expired: {self.status.tolist()}")
        if not all(bool(t.isfinite().all()) for t in seen if t.dim() == 2):
            raise RuntimeError(f"{form}: not finite")
        return seen

    def check(self, lines: dict[str, list]) -> None:
        """Raises RuntimeError if the two exchanging forms differ in a bit, twice round their slots."""
        for _ in range(2):
            expected, actual = (self.run(lines[form], form) for form in ("separate", "polled"))
            for number, (a, b) in enumerate(zip(actual, expected, strict=True)):
                if not torch.equal(a.view(torch.int16), b.view(torch.int16)):
                    raise RuntimeError(f"output {number} of the polled form has other bits")
        self.run(lines["none"], "none")
        self.h[0].copy_(self.start)


def compile_all(lines: list[list], threads: int = 16) -> None:
    """Compile every GEMV of the lines, each once, in threads (the timed runs load them)."""
    tasks = {}
    for line in lines:
        for function, args, kwargs in line:
            if function is gemv:
                key = (args[1].shape, type(args[2]), "poll" in kwargs)
                tasks.setdefault(key, plan_gemv(*args, **kwargs))

    def build(task: tuple) -> None:
        torch.zeros(1, device=DEVICE)  # gives the thread its CUDA context
        kernel, grid, arguments = task
        kernel.warmup(grid=grid, **arguments)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(build, tasks.values()))


def times(lines: dict[str, list]) -> dict[str, float]:
    """us of a layer of each form, median of rounds in which they take turns."""
    graphs = {}
    for form, line in lines.items():
        graphs[form] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[form]):
            for function, args, kwargs in line:
                function(*args, **kwargs)
    found: dict[str, list[float]] = {form: [] for form in lines}
    for _ in range(ROUNDS):
        for form, graph in graphs.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            graph.replay()
            begin.record()
            for _ in range(REPLAYS):
                graph.replay()
            end.record()
            end.synchronize()
            found[form].append(begin.elapsed_time(end) * 1e3 / REPLAYS / LAYERS)
    return {form: statistics.median(values) for form, values in found.items()}


def measure(rows: Rows, model: str, tp: int, fp8: bool, count: int, sm_count: int) -> None:
    """Check and time one shard; a row a form, and what an exchange adds."""
    chain = Chain(model, tp, fp8, count, sm_count)
    lines = {form: chain.line(form) for form in FORMS}
    compile_all(list(lines.values()))
    chain.check(lines)
    us = times(lines)
    if chain.status.any():
        raise RuntimeError(f"a wait expired: {chain.status.tolist()}")
    dtype = "fp8" if fp8 else "none"
    facts = dict(model=model, tp=tp, rows=count, quantization=dtype, bytes=tp * chain.message_bytes)
    text = f"{model}/{tp} {'fp8' if fp8 else 'bf16'} rows={count} {tp * chain.message_bytes >> 10:4} KB"
    for form in FORMS:
        rows.add("layer_us", us[form], "us", algorithm=form, **facts)
        text += f" | {form} {us[form]:8.2f}"
    for form in FORMS[1:]:
        added = (us[form] - us["none"]) / 2
        rows.add("exchange_us", added, "us", algorithm=form, **facts)
        text += f" | {form} adds {added:6.2f} us"
    print(f"{text} | bits equal", flush=True)
    print(
        "   ",
        ", ".join(f"{name} {short(chain.config[name])}" for name in ("gate_up", "qkv")),
        flush=True,
    )


def main() -> None:
    """Shards as MODEL/TP; one that fails is reported and the rest goes on."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--models", default="qwen2.5-72b/2,qwen2.5-7b/2,qwen2.5-72b/4,qwen2.5-72b/8"
    )
    parser.add_argument("--dtypes", default="fp8,bf16")
    parser.add_argument("--rows", default="1")
    parser.add_argument("--time-limit", type=float, default=120.0, help="seconds")
    args = parser.parse_args()
    begin = time.perf_counter()
    properties = torch.cuda.get_device_properties(0)
    choose.set_target(properties.name, properties.multi_processor_count)
    rows, failed = Rows("poll"), 0
    print(f"us a layer; GEMVs poll by themselves up to {MOST_BYTES >> 10} KB of messages")
    for count in args.rows.split(","):
        for dtype in args.dtypes.split(","):
            for item in args.models.split(","):
                model, tp = item.split("/")
                if args.time_limit - (time.perf_counter() - begin) < 12:
                    print(f"time limit: {item} {dtype} rows={count} left out", flush=True)
                    continue
                try:
                    measure(
                        rows,
                        model,
                        int(tp),
                        dtype == "fp8",
                        int(count),
                        properties.multi_processor_count,
                    )
                except Exception as e:
                    failed += 1
                    print(
                        f"{item} {dtype} rows={count}: {type(e).__name__}: {str(e)[:200]}",
                        flush=True,
                    )
                    if "CUDA error" in str(e):
                        sys.exit(1)
                torch.cuda.empty_cache()
    print(
        json.dumps(
            {
                "rows": len(rows.rows),
                "failed": failed,
                "seconds": round(time.perf_counter() - begin, 1),
            }
        )
    )
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
