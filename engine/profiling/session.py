"""A profile on the card: one executor with the graphs of both phases, each measured from a fixed state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from engine.config import EngineConfig, ModelConfig
from engine.errors import EngineError
from engine.graph.ir import Phase
from engine.model.gpus import GPUS, Gpu, gpu_named
from engine.profiling import marks, report, subtract
from engine.profiling.device import BATCHES, REPLAYS, GpuDevice, allocations
from engine.runtime.buckets import LARGEST, chunks, prefill_buckets

if TYPE_CHECKING:
    from engine.runtime.gpu import GpuExecutor
    from engine.runtime.graphs import GraphKey

REQUEST_TOKENS = 32  # answer of the request whose counters are taken


@dataclass(frozen=True)
class Wanted:
    """What to profile: decode of `rows` sequences at `input_len` tokens, prefill of a prompt of that length.

    prompts: lengths that the executor must serve besides."""

    phases: tuple[Phase, ...] = ("decode", "prefill")
    methods: tuple[str, ...] = ("events",)
    rows: int = 1
    input_len: int = 512
    every: int = 8
    prompts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.rows not in (1, 2, 4, 8):
            raise EngineError(f"--rows {self.rows}: decode graphs have 1, 2, 4 or 8 rows")
        if self.input_len < 1 or self.every < 1:
            raise EngineError(f"--input-len {self.input_len} and --every {self.every} start at 1")


class Session:
    """Opens the executor. Close it to give the memory back."""

    def __init__(self, engine: EngineConfig, model: ModelConfig, wanted: Wanted):
        from engine.runtime.create import create_gpu_executor

        self.wanted, self.model, self.engine = wanted, model, engine
        longest = max((wanted.input_len, *wanted.prompts))
        need = longest + max(BATCHES * REPLAYS, REQUEST_TOKENS)
        length = engine.max_model_len or need
        if length < need:
            raise EngineError(
                f"--max-model-len {length} is too short: --input-len {longest} and the "
                f"timed steps take {need}"
            )
        engine = replace(
            engine,
            device="cuda",
            max_num_seqs=wanted.rows,
            max_model_len=length,
            enforce_eager=False,
        )
        buckets = prefill_buckets(length)
        self.bucket = chunks(wanted.input_len, buckets)[0][2]  # of a prompt over LARGEST: its first
        keys: list[GraphKey] = [("decode", 1, "last"), ("decode", wanted.rows, "last")]
        keys.append(("prefill", self.bucket, "last"))
        for prompt in (wanted.input_len, *wanted.prompts):
            *first, last = chunks(prompt, buckets)
            keys += [("prefill", piece[2], "none") for piece in first]
            keys.append(("prefill", last[2], "last"))
        self.executor: GpuExecutor = create_gpu_executor(
            engine, model, only=list(dict.fromkeys(keys))
        )
        self.copy_bandwidth = float(self.executor.stats()["roof"]["copy_bandwidth"])

    def counters(self) -> dict[str, Any]:
        """What one request of REQUEST_TOKENS tokens does beyond replays, after start-up. Taken before any marks."""
        executor = self.executor
        ids = [(i * 7919 + 13) % self.model.vocab_size for i in range(self.wanted.input_len)]
        devices = list(dict.fromkeys(rank.device for rank in executor.ranks))
        executor.read(executor.prefill(0, ids))  # the first request
        before, held = executor.stats()["counters"], allocations(devices)
        executor.read(executor.prefill(0, ids))
        for _ in range(REQUEST_TOKENS - 1):
            executor.read(executor.decode([0]))
        after = executor.stats()["counters"]
        change = {k: after.get(k, 0) - before.get(k, 0) for k in ("host_syncs", "graph_launches")}
        nodes = {
            f"{phase} {rows} {logits}": len(executor.lower(graph).launches[0])
            for (phase, rows, logits), graph in executor.graphs.items()
        }
        return {
            "request": f"{self.wanted.input_len} tokens in, {REQUEST_TOKENS} out",
            **change,
            "allocations": allocations(devices) - held,
            "jit_compiles_after_start": after["jit_compiles"],
            "kernel_nodes_per_rank": nodes,
        }

    def profile(
        self, phase: Phase, say: Callable[[str], None] = lambda _: None
    ) -> list[report.PhaseProfile]:
        """The phase by each method wanted."""
        wanted, decode = self.wanted, phase == "decode"
        rows = wanted.rows if decode else self.bucket
        context = wanted.input_len if decode else min(wanted.input_len, LARGEST)
        device = GpuDevice(
            self.executor, self.executor.graphs[(phase, rows, "last")], rows, context
        )
        program = device.lower()
        roofs = report.stage_roofs(
            self.model, self.engine.tensor_parallel_size, phase=phase, rows=rows,
            context=context if decode else 0, fp8=self._fp8(), shard_of=self.engine.shard_of,
            gpu=self._gpu(), fp8_prefill=self.engine.fp8_prefill("fp8" if self._fp8() else None),
            fp8_kv=self.engine.fp8_kv,
        )  # fmt: skip
        facts: dict[str, Any] = dict(
            phase=phase, rows=rows, context=context, copy_bandwidth=self.copy_bandwidth
        )
        results = []
        try:
            bare = device.step_s(program)
            bare_us = [seconds * 1e6 for seconds in bare]
            say(f"{phase}: bare step {max(bare_us):.1f} us")
            for method in wanted.methods:
                if method == "events":
                    taken = marks.measure(device, program, wanted.every)
                    results.append(report.from_marks(taken, bare_us, roofs, **facts))
                else:
                    added = list(subtract.added_by_stage(device, program, bare))
                    results.append(report.from_added(added, bare_us, roofs, **facts))
        finally:
            program.free()
            self.executor.recover()
        return results

    def _fp8(self) -> bool:
        weights = self.executor.ranks[0].weights.values()
        return any(loaded.scale is not None for loaded in weights)

    def _gpu(self) -> Gpu:
        """The card (an H200 if the model knows none of its name) at the copy bandwidth of this run."""
        try:
            known = gpu_named(self.executor.stats()["device"])
        except EngineError:
            known = GPUS["h200"]
        return replace(known, copy=self.copy_bandwidth)

    def close(self) -> None:
        self.executor.close()


def parse_phases(text: str) -> tuple[Phase, ...]:
    """ "decode,prefill" as a tuple. EngineError for anything else."""
    names: Sequence[str] = text.split(",")
    unknown = [name for name in names if name not in ("decode", "prefill")]
    if unknown:
        raise EngineError(f"--phase {unknown[0]!r}: choose decode, prefill or decode,prefill")
    return tuple(names)  # type: ignore[arg-type]
