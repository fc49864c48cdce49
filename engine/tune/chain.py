"""Time a configuration where it will run: in the decode step's graph, between its neighbours, cold in L2.

A configuration that wins alone can lose in the chain (it may hold the multiprocessors that the next kernel's
prologue wants). So a candidate is lowered into the whole step of a model of a few layers (enough bytes that
nothing stays in L2), captured, replayed and compared by time per step; its logits are compared with those
of the configurations in use.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from tqdm import tqdm

from engine.config import EngineConfig, preset, with_layers
from engine.graph.capture import Program
from engine.graph.ir import Graph, Phase
from engine.kernels.sync import ABORT_INTERRUPTED
from engine.profiling.device import REPLAYS, GpuDevice
from engine.tune import choose

if TYPE_CHECKING:
    from engine.runtime.gpu import GpuExecutor
    from engine.runtime.graphs import GraphKey

CHAIN_BYTES = 2 << 30  # weights of the shortened model: 30 times an H200's L2
ROUNDS = 5  # of the last comparison
MAX_ERROR = 0.05  # RMS of a candidate's logits against the present ones; rounding gives about 0.01


@dataclass(frozen=True)
class Deployment:
    """What is tuned: one rank's shapes follow from it. shard_of as in EngineConfig.

    phase decode: `rows` sequences at `context` tokens each; prefill: a prompt of `context` tokens (a bucket).
    """

    model: str
    quantization: str | None
    tp: int
    shard_of: int | None = None
    rows: int = 1
    context: int = 512
    phase: Phase = "decode"

    @property
    def degree(self) -> int:
        """TP degree whose shapes a rank has."""
        return self.shard_of or self.tp

    def __str__(self) -> str:
        shard = f" shard of {self.shard_of}" if self.shard_of else ""
        size = f"rows={self.rows}" if self.phase == "decode" else f"tokens={self.context}"
        return f"{self.model} {self.quantization or 'bf16'} tp={self.tp}{shard} {self.phase} {size}"


class Chain:
    """A short decode chain on the card. Close it to give the memory back."""

    def __init__(self, deployment: Deployment, layers: int | None = None):
        from engine.runtime.create import create_gpu_executor

        self.deployment = deployment
        whole = preset(deployment.model)
        per_layer = (whole.num_parameters // whole.num_layers) // deployment.degree
        if deployment.quantization is None:
            per_layer *= 2
        self.layers = layers or min(whole.num_layers, max(4, -(-CHAIN_BYTES // per_layer)))
        engine = EngineConfig(
            model=deployment.model, tensor_parallel_size=deployment.tp, load_format="dummy",
            quantization=deployment.quantization, device="cuda", max_num_seqs=deployment.rows,
            max_model_len=deployment.context + 4 * REPLAYS, shard_of=deployment.shard_of,
        )  # fmt: skip
        model = with_layers(whole, self.layers)
        rows = deployment.rows if deployment.phase == "decode" else deployment.context
        self.key: GraphKey = (deployment.phase, rows, "last")
        self.executor: GpuExecutor = create_gpu_executor(engine, model, only=[self.key])
        self.graph: Graph = self.executor.graphs[self.key]
        self.device = GpuDevice(self.executor, self.graph, deployment.rows, deployment.context)
        self._expected: torch.Tensor | None = None

    def facts(self, op: str) -> list[dict[str, Any]]:
        """Distinct key facts of `op` in this chain, in order of first use ({field: value})."""
        seen: dict[str, dict[str, Any]] = {}
        program = self.executor.lower(self.graph)
        for launch in program.launches[0]:
            if launch.choice is not None and launch.choice[0] == op:
                seen.setdefault(choose.key_string(op, launch.choice[1]), launch.choice[1])
        return list(seen.values())

    def uses(self, op: str, facts: Mapping[str, Any]) -> int:
        """Launches of one step that this key configures."""
        key = choose.key_string(op, facts)
        launches = self.executor.lower(self.graph).launches[0]
        chosen = [launch.choice for launch in launches if launch.choice is not None]
        return sum(name == op and choose.key_string(op, f) == key for name, f in chosen)

    def try_all(
        self,
        op: str,
        facts: Mapping[str, Any],
        configs: Iterable[Any],
        most_error: float = MAX_ERROR,
    ) -> list[tuple[float, Any]]:
        """(seconds per step, config) of each candidate that compiles and computes the same, fastest first.

        most_error: RMS of its logits' differences over that of the present ones; 0: bit for bit.
        """
        programs = self._compiled(op, facts, configs)
        self._expected = self._logits(self._program(self.graph))
        results = []
        bar = {"desc": op, "unit": "config", "file": sys.stderr, "leave": False, "disable": None}
        for config, program in tqdm(programs, **bar):
            if config is None:
                continue
            try:
                program.capture()
                error = self._error(self._logits(program))
                if error > most_error:
                    print(f"  {config}: logits differ by {error:.3g}, dropped", flush=True)
                    continue
                results.append((self.time(program), config))
            except RuntimeError as e:
                print(f"  {config}: {e}"[:160], flush=True)
            finally:
                program.free()
        return sorted(results, key=lambda pair: pair[0])

    def duel(self, op: str, facts: Mapping[str, Any], configs: Sequence[Any]) -> list[float]:
        """Seconds per step of each of a few configurations: the median over rounds in which each is timed once.

        A large GEMM runs at the power limit, where the clock follows what ran in the seconds before: two timings a
        few seconds apart can differ by 2 %, two in one round hardly.
        """
        programs = [self._lowered(op, facts, config) for config in configs]
        try:
            for program in programs:
                program.capture()
            rounds = [[self.time(program) for program in programs] for _ in range(ROUNDS)]
        finally:
            for program in programs:
                program.free()
        return [statistics.median(column) for column in zip(*rounds)]

    def time(self, program: Program | None = None) -> float:
        """Seconds per step, median of batches of replays, slowest rank."""
        return max(self.device.step_s(program or self._program(self.graph)))

    def close(self) -> None:
        self.executor.close()

    # Inside

    def _program(self, graph: Graph) -> Program:
        return self.executor.lower(graph)

    def _lowered(self, op: str, facts: Mapping[str, Any], config: Any) -> Program:
        """The chain's graph with `config` for one key."""
        choose.set_override(op, config, facts)
        try:
            return self.executor.lower(self.graph)
        finally:
            choose.remove_override(op, facts)

    def _compiled(
        self, op: str, facts: Mapping[str, Any], configs: Iterable[Any]
    ) -> list[tuple[Any, Program]]:
        """Lower and warm every candidate, compiling in parallel; those that fail are reported and left out."""
        programs = [(config, self._lowered(op, facts, config)) for config in configs]

        def build(item: tuple[Any, Program]) -> tuple[Any, Program]:
            config, program = item
            try:
                for line, stream in zip(program.launches, program.streams):
                    torch.zeros(1, device=stream.device)  # gives the thread its CUDA context
                    done: set[str] = set()
                    for launch in line:
                        if launch.config != config or launch.key in done:
                            continue
                        done.add(launch.key)
                        with torch.cuda.device(stream.device), torch.cuda.stream(stream):
                            launch.run()
                return config, program
            except (
                Exception
            ) as e:  # a configuration that does not compile is a result, not a failure
                print(f"  {config}: {type(e).__name__}: {e}"[:160], flush=True)
                return None, program

        # A GEMV that polls finds no messages here; `rewind` takes the word back.
        self.executor.ranks[0].status[0] = ABORT_INTERRUPTED
        with ThreadPoolExecutor(16, thread_name_prefix="tune") as pool:
            built = list(pool.map(build, programs))
        self.device.rewind()
        return built

    def _logits(self, program: Program) -> torch.Tensor:
        for rank in self.executor.ranks:
            rank.arena.fill_(0x7F)  # NaN: what a candidate leaves unwritten is found
        self.device.replay(program, 1)
        return self.executor.step_logits(self.graph)

    def _error(self, logits: torch.Tensor) -> float:
        expected = self._expected
        assert expected is not None
        if not bool(logits.isfinite().all()):
            return float("inf")
        return float((logits - expected).square().mean().sqrt() / expected.square().mean().sqrt())
