"""What an all-reduce costs between GEMVs on ONE card: polled by the consumer, polled by a launch, or not there.

    python -m bench.poll --time-limit 120

Writes $OUT/poll.json (rows, see bench/rows.py). A world's messages are all sent by this rank to itself: the push of
o_proj and down_proj stores world copies of the partial sum, one for each rank's place in the slot. So everything
runs but the links. "late": it sends one, and a courier kernel on a branch of the graph forwards each piece to the
other places some 300 ns after it has seen it, so that the messages of the others arrive about 1 us behind the own
one, as over NVLink.
A layer is o_proj, all-reduce, gate/up, down_proj, all-reduce, qkv (no attention), in one graph of some layers with
cold weights and programmatic launches. Before anything is timed, every hidden state and output of the polled form
must have the bits of the separate one.
  none         o_proj and down_proj add the residual: 4 launches
  separate     push, poll_residual, GEMV: 6 launches
  polled       push, GEMV that polls: 4 launches
  polled 1/SM  the same where the GEMV that polls has two programs a multiprocessor: with one, the same bits
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Unpack

import torch
import triton
import triton.language as tl

from bench.deployment import choices, decode_rows, script, shapes
from bench.gemv_workers import Problem, Weight, short, weights
from bench.rows import Rows
from engine.config import preset
from engine.console import Parser
from engine.kernels.all_reduce import poll_residual
from engine.kernels.epilogue import GemvEpilogue, Push, Residual
from engine.kernels.gemv import GemvConfig, Options, gemv, heuristic, plan_gemv
from engine.kernels.gemv_config import deepest_ring
from engine.kernels.gemv_poll import MOST_BYTES, Poll
from engine.kernels.slots import LamportWorkspace, lamport_slots
from engine.kernels.sync import DEFAULT_LIMIT_US, push16, wait_messages
from engine.tune import choose

DEVICE = "cuda"
LAYERS = 4  # of a graph: 8 exchanges; beyond the L2 (60 MB) even for the smallest shard here
FORMS = (
    "none",
    "separate",
    "polled",
    "polled 1/SM",
    "separate late",
    "polled late",
    "polled 1/SM late",
)
LATE_NS = 300
PIECE = 128  # 16-byte words that a program of the courier forwards
ROUNDS, REPLAYS = 15, 12  # the forms take turns, so that a drift of the clocks meets all of them


@triton.jit(do_not_specialize=["messages", "status", "limit_us", "site"])
def courier_kernel(
    messages, status, limit_us, site, BYTES: tl.constexpr, WORLD: tl.constexpr, NS: tl.constexpr, PIECE: tl.constexpr
):  # fmt: skip
    """Message 0 of a slot, as its pieces arrive and NS ns later, to the places of the others."""
    word = tl.program_id(0) * PIECE + tl.arange(0, PIECE)
    live = word < BYTES // 16
    at = tl.minimum(word, BYTES // 16 - 1).to(tl.int64) * 16
    w = wait_messages(messages + at, 0, 0, status, limit_us, 0, site, 0, 1, 4)
    if NS > 0:
        tl.inline_asm_elementwise(
            "{ .reg .u64 a, b; .reg .pred p; mov.u64 a, %globaltimer; SPIN: mov.u64 b, %globaltimer;"
            " sub.u64 b, b, a; setp.lt.u64 p, b, $1; @p bra SPIN; mov.u32 $0, 0; }",
            "=r,l", [tl.full((), NS, tl.int64)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    for r in tl.static_range(1, WORLD):
        push16(messages + r * BYTES + at, w[0], w[1], w[2], w[3], live)


@dataclass(frozen=True)
class Courier:
    """Its launch for the slot at address `messages`."""

    messages: int
    status: torch.Tensor
    site: int
    nbytes: int
    world: int

    def __call__(self) -> None:
        courier_kernel[(triton.cdiv(self.nbytes // 16, PIECE),)](
            self.messages, self.status.data_ptr(), DEFAULT_LIMIT_US, self.site, BYTES=self.nbytes,
            WORLD=self.world, NS=LATE_NS, PIECE=PIECE,
        )  # fmt: skip


@dataclass(frozen=True)
class Product:
    """The launch of a GEMV."""

    x: torch.Tensor
    w: torch.Tensor
    epilogue: GemvEpilogue
    options: Options

    def __call__(self) -> None:
        gemv(self.x, self.w, self.epilogue, **self.options)


Line = list[Callable[[], None]]  # launches, in order: Product, Courier and others


def one_program(config: GemvConfig, weight: Weight) -> GemvConfig:
    """The ring of a multiprocessor in one program instead of two: the same order of sums."""
    if config.programs_per_sm != 2:
        return config
    single = replace(config, programs=config.programs // 2, programs_per_sm=1)
    return deepest_ring(single, weight.n, weight.k, weight.dtype) or config


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
        kinds = weights([(model, tp)], ["fp8" if fp8 else "bf16"])
        self.kinds = {w.layer: w for w in kinds if w.layer != "lm_head"}
        self.config = {name: tuned(w, sm_count) for name, w in self.kinds.items()}
        self.w = {name: w.random(LAYERS, DEVICE) for name, w in self.kinds.items()}
        self.problem = {name: Problem(w, rows, DEVICE) for name, w in self.kinds.items()}
        self.start = torch.randn(rows, self.hidden, device=DEVICE).bfloat16()
        self.h = [torch.empty_like(self.start) for _ in range(2)]
        self.status = torch.zeros(8, dtype=torch.int32)
        if DEVICE == "cuda":
            self.status = self.status.pin_memory()
        self.single = {name: one_program(self.config[name], w) for name, w in self.kinds.items()}
        own_slots = LamportWorkspace(tp, rows, self.hidden, 2)
        rotated = LamportWorkspace(tp, rows, self.hidden, lamport_slots(2 * LAYERS))
        self.space = {
            form: rotated if form.startswith("polled") else own_slots for form in FORMS[1:]
        }
        self.buffer = {form: space.allocate(DEVICE) for form, space in self.space.items()}

    @property
    def message_bytes(self) -> int:
        return self.rows * self.hidden * 2

    def product(
        self, layer: int, name: str, epilogue: GemvEpilogue, *, x: torch.Tensor | None = None,
        **options: Unpack[Options],
    ) -> Product:  # fmt: skip
        """A GEMV of this chain."""
        problem = self.problem[name]
        given: Options = {
            "config": self.config[name], "pdl": True, **problem.extras, **options,
        }  # fmt: skip
        return Product(problem.x if x is None else x, self.w[name][layer], epilogue, given)

    def exchange(self, form: str, layer: int, half: int) -> Line:
        """Launches from o_proj to gate/up (half 0), or from down_proj to qkv: h[half] -> h[1 - half]."""
        name, reader = (("o", "gate_up"), ("down", "qkv"))[half]
        x, out = self.h[half], self.h[1 - half]
        consumer = self.problem[reader].epilogue
        if form == "none":
            first = self.product(layer, name, Residual(x, out))
            return [first, self.product(layer, reader, consumer, x=out)]
        space, buffer, site = self.space[form], self.buffer[form], 2 * layer + half
        base, late = buffer.data_ptr(), form.endswith("late")
        places = [base + r * self.message_bytes for r in range(1 if late else self.world)]
        slot, clear = space.slot_offset(site), space.clear_offset(site)
        push = Push(torch.tensor(places).to(DEVICE), slot, 0, len(places))
        launches: Line = [self.product(layer, name, push)]
        if late:
            launches.append(Courier(base + slot, self.status, site, self.message_bytes, self.world))
        if form.startswith("polled"):
            poll = Poll(buffer, slot, clear, out, self.status, 0, self.world, site)
            config = (self.single if "1/SM" in form else self.config)[reader]
            last = self.product(layer, reader, consumer, x=x, poll=poll, config=config)
        else:
            wait = partial(
                poll_residual, buffer, slot, clear, x, out, self.status, rank=0, world=self.world,
                call_site=site, pdl=True,
            )  # fmt: skip
            launches.append(wait)
            last = self.product(layer, reader, consumer, x=out)
        return [*launches, last]

    def line(self, form: str) -> Line:
        """All launches of a form."""
        halves = [(layer, half) for layer in range(LAYERS) for half in range(2)]
        return [launch for at in halves for launch in self.exchange(form, *at)]

    def run(self, line: Line, form: str) -> list[torch.Tensor]:
        """Run once from the start; every hidden state and consumer's output, in order."""
        self.h[0].copy_(self.start)
        for out in (self.h[1], *self.problem["gate_up"].out, *self.problem["qkv"].out):
            out.fill_(float("nan"))
        seen, step = [], len(line) // (2 * LAYERS)
        for i, launch in enumerate(line):
            launch()
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

    def check(self, lines: dict[str, Line]) -> None:
        """Raises RuntimeError if two exchanging forms differ in a bit, twice round their slots."""
        for _ in range(2):
            expected = self.run(lines["separate"], "separate")
            for form in FORMS[2:]:
                found = self.run(lines[form], form)
                for number, (a, b) in enumerate(zip(found, expected, strict=True)):
                    if not torch.equal(a.view(torch.int16), b.view(torch.int16)):
                        raise RuntimeError(f"output {number} of the {form} form has other bits")
        self.run(lines["none"], "none")
        self.h[0].copy_(self.start)


def compile_all(lines: Iterable[Line], threads: int = 16) -> None:
    """Compile every GEMV of the lines, each once, in threads (the timed runs load them)."""
    distinct: dict[tuple[object, ...], Product] = {}
    for line in lines:
        for p in line:
            if isinstance(p, Product):
                kind = type(p.epilogue), getattr(p.epilogue, "world", 0), "poll" in p.options
                distinct.setdefault((p.w.shape, *kind, p.options["config"]), p)

    def build(p: Product) -> None:
        torch.zeros(1, device=DEVICE)  # gives the thread its CUDA context
        kernel, grid, arguments = plan_gemv(p.x, p.w, p.epilogue, **p.options)
        kernel.warmup(grid=grid, **arguments)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(build, distinct.values()))


def enqueue(line: Line) -> None:
    """All launches, each courier on a branch from what its sender comes behind (it waits for the message itself)."""
    main, branch = torch.cuda.current_stream(), torch.cuda.Stream()
    for launch, following in zip(line, [*line[1:], None]):
        if isinstance(following, Courier):
            branch.wait_stream(main)
            with torch.cuda.stream(branch):
                following()
        if not isinstance(launch, Courier):
            launch()
    if any(isinstance(launch, Courier) for launch in line):
        main.wait_stream(branch)


def times(lines: dict[str, Line]) -> dict[str, float]:
    """us of a layer of each form, median of rounds in which they take turns."""
    graphs = {}
    for form, line in lines.items():
        graphs[form] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[form]):
            enqueue(line)
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
    compile_all(lines.values())
    chain.check(lines)
    us = times(lines)
    if chain.status.any():
        raise RuntimeError(f"a wait expired: {chain.status.tolist()}")
    dtype = "fp8" if fp8 else "none"
    facts = dict(model=model, tp=tp, rows=count, quantization=dtype, bytes=tp * chain.message_bytes)
    configs = ", ".join(f"{name} {short(chain.config[name])}" for name in ("gate_up", "qkv"))
    print(
        f"{model}/{tp} {'fp8' if fp8 else 'bf16'} rows={count}, {tp * chain.message_bytes >> 10} KB of messages, "
        f"bits equal; layer without {us['none']:.2f} us; {configs}"
    )
    for form in FORMS:
        rows.add("layer_us", us[form], "us", algorithm=form, **facts)
        if form != "none":
            added = (us[form] - us["none"]) / 2
            rows.add("exchange_us", added, "us", algorithm=form, **facts)
            print(
                f"    {form:16} layer {us[form]:8.2f} us, an exchange adds {added:6.2f} us",
                flush=True,
            )


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: see bench.deployment; 1 if a shard failed."""
    parser = Parser(prog="python -m bench.poll", description=__doc__)
    parser.add_argument(
        "--models", type=shapes, default="qwen2.5-72b/2,qwen2.5-7b/2,qwen2.5-72b/4,qwen2.5-72b/8"
    )
    parser.add_argument(
        "--dtypes",
        type=choices("fp8", "bf16"),
        default="fp8,bf16",
        help="of the weights, comma-separated: fp8, bf16",
    )
    parser.add_argument("--rows", type=decode_rows, default="1", help="of decode, comma-separated")
    parser.add_argument("--time-limit", type=float, default=120.0, help="seconds")
    return script(parser, measure_all, argv)


def measure_all(args: argparse.Namespace) -> int:
    """Every shard; one that fails is reported and the rest goes on. The exit code."""
    begin = time.perf_counter()
    properties = torch.cuda.get_device_properties(0)
    choose.set_target(properties.name, properties.multi_processor_count)
    rows, failed = Rows("poll"), 0
    print(f"us a layer; GEMVs poll by themselves up to {MOST_BYTES >> 10} KB of messages")
    for count in args.rows:
        for dtype in args.dtypes:
            for model, tp in args.models:
                item = f"{model}/{tp}"
                if args.time_limit - (time.perf_counter() - begin) < 12:
                    print(f"time limit: {item} {dtype} rows={count} left out", flush=True)
                    continue
                try:
                    measure(
                        rows,
                        model,
                        tp,
                        dtype == "fp8",
                        count,
                        properties.multi_processor_count,
                    )
                except Exception as e:
                    failed += 1
                    print(
                        f"{item} {dtype} rows={count}: {type(e).__name__}: {str(e)[:200]}",
                        flush=True,
                    )
                    if "CUDA error" in str(e):
                        return 1
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
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
