"""The CUDA back end: one process, one thread, a graph launch per device and step, no host in the loop."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from engine.config import ModelConfig
from engine.errors import DeviceError, RequestError
from engine.graph.capture import Program, warm
from engine.graph.ir import Graph
from engine.graph.lower import lower
from engine.graph.plan import BufferPlan, plan
from engine.runtime.allocate import RING, reset
from engine.runtime.buckets import chunks, decode_rows
from engine.runtime.controls import fill
from engine.runtime.counters import jit_compiles
from engine.runtime.executor import check_prompt
from engine.runtime.graphs import GraphKey, TailKey
from engine.runtime.phases import Phases
from engine.runtime.rank import Rank
from engine.sampling import GREEDY, Controls, Draw

log = logging.getLogger("engine")

ROW_NAN, ROW_EMPTY = -2, -1  # ring marks: NaN logits; not written yet
STALL_S = 10.0  # no token for this long: look whether the device has failed


class GpuExecutor:
    """Executor over captured graphs. Built by `engine.runtime.create_executor`."""

    max_in_flight = 8

    def __init__(
        self,
        config: ModelConfig,
        ranks: list[Rank],
        graphs: dict[GraphKey, Graph],
        plans: Mapping[GraphKey, BufferPlan],
        *,
        num_slots: int,
        max_model_len: int,
        buckets: Sequence[int],
        phases: Phases,
        eager: bool,
        lazy: bool,
        pdl: bool,
        facts: dict[str, Any],
        tails: Mapping[TailKey, tuple[Graph, BufferPlan]] | None = None,
    ):
        """graphs: (phase, rows, logits) -> finished graph; plans: their buffers. facts: what stats() adds
        (bandwidth, memory). tails: phase, rows -> sampling tail (graph/tail.py); None where no request has
        controls. lazy: prefill graphs are captured when first used."""
        self.config, self.ranks, self.num_slots = config, ranks, num_slots
        self.max_model_len, self.buckets = max_model_len, buckets
        self.graphs, self._pdl, self._phases, self._facts = graphs, pdl, phases, facts
        self._closed = False
        self.counters: Counter[str] = Counter()
        streams: dict[torch.device, torch.cuda.Stream] = {}
        for rank in ranks:
            if rank.device not in streams:
                streams[rank.device] = torch.cuda.Stream(rank.device)
        self.streams = [streams[rank.device] for rank in ranks]
        # Staging in pinned memory. A slot's prompt is not rewritten before its first token was read.
        self._stage_prompt = torch.zeros((num_slots, max_model_len), dtype=torch.int32).pin_memory()
        self._stage_request = torch.zeros((RING * 4, 3), dtype=torch.int32).pin_memory()
        self._stage_rows = torch.full((RING, ranks[0].row_slots.numel()), -1, dtype=torch.int32)
        self._stage_rows = self._stage_rows.pin_memory()
        self._stage_temperature = torch.zeros(num_slots, dtype=torch.float32).pin_memory()
        self._stage_seeds = torch.zeros(num_slots, dtype=torch.int32).pin_memory()
        self._stage_controls = ranks[0].state.controls.cpu().pin_memory()
        vocabulary = (num_slots, len(ranks) * ranks[0].state.counts.shape[1])
        self._stage_counts = torch.zeros(vocabulary, dtype=torch.int32).pin_memory()
        self._stage_bias = torch.zeros(vocabulary, dtype=torch.float32).pin_memory()
        self._controlled: set[int] = set()  # slots whose controls are not neutral
        self._replaced: set[int] = set()  # steps whose tokens the next step, a tail, replaces
        self._ring = ranks[0].ring.numpy()
        self._uploads = self._step = self._read_step = 0
        self._rows_of: dict[int, int] = {}
        self._program_of: dict[int, GraphKey] = {}
        self._decoding: tuple[int, ...] = ()
        self._eager, self._lazy = eager, lazy
        self._compile(plans, tails)

    # Start-up

    def _compile(
        self,
        plans: Mapping[GraphKey, BufferPlan],
        tails: Mapping[TailKey, tuple[Graph, BufferPlan]] | None,
    ) -> None:
        jit_compiles()  # installs the counter
        with self._phases.phase("lower"):
            self._programs = {
                key: self._lower(graph, plans[key]) for key, graph in self.graphs.items()
            }
            self._tails = (
                {} if tails is None else {key: self._lower(*tail) for key, tail in tails.items()}
            )
            programs = [*self._programs.values(), *self._tails.values()]
        with self._phases.phase("compile"):
            kernels = warm(programs, self.streams, self.ranks[0].status)
            reset(self.ranks)
        torch.cuda.empty_cache()
        free = self._free_memory()
        with self._phases.phase("capture"):
            later = {p for key, p in self._programs.items() if self._lazy and key[0] == "prefill"}
            for program in programs if not self._eager else ():
                if program not in later:
                    program.capture()
        self.counters["graph_bytes"] = max(a - b for a, b in zip(free, self._free_memory()))
        self.counters["kernels"] = kernels
        self._compiled = jit_compiles()
        self.counters["graph_nodes"] = sum(
            len(line) for program in programs for line in program.launches
        )

    def _free_memory(self) -> list[int]:
        """Bytes, by device."""
        devices = {rank.device for rank in self.ranks}
        return [torch.cuda.mem_get_info(device)[0] for device in devices]

    def lower(self, graph: Graph) -> Program:
        """Launches of every rank with the configurations chosen now; neither warmed nor captured."""
        return self._lower(graph, plan(graph, self.ranks[0].dtype.itemsize))

    def _lower(self, graph: Graph, buffers: BufferPlan) -> Program:
        captured = not self._eager
        launches = [lower(graph, buffers, rank, self._pdl, captured) for rank in self.ranks]
        return Program(launches, self.streams)

    # Steps

    def prefill(
        self, slot: int, token_ids: Sequence[int], start: int = 0, draw: Draw = GREEDY
    ) -> int:
        check_prompt(slot, len(token_ids), start, self.num_slots, self.max_model_len)
        length = len(token_ids)
        self._stage_prompt[slot, start : start + length] = torch.tensor(
            token_ids, dtype=torch.int32
        )
        self._sampling(slot, draw.temperature, draw.seed)
        self._control(slot, draw.controls)
        pieces = chunks(length, self.buckets)
        for offset, count, bucket in pieces[:-1]:
            self._upload_chunk(slot, start + offset, count)
            self._replay(("prefill", bucket, "none"))
        offset, count, bucket = pieces[-1]
        self._upload_chunk(slot, start + offset, count)
        return self._queue(("prefill", bucket, "last"), rows=1, slots=(slot,))

    def decode(self, slots: Sequence[int]) -> int:
        rows = decode_rows(len(slots))
        if tuple(slots) != self._decoding:
            self._decoding = tuple(slots)
            stage = self._stage_rows[self._step % RING]
            stage.fill_(-1)
            stage[: len(slots)] = torch.tensor(slots, dtype=torch.int32)
            self._upload(lambda rank: rank.row_slots, stage)
        return self._queue(("decode", rows, "last"), rows=len(slots), slots=slots)

    def read(self, step: int) -> list[int]:
        if self._read_step in self._replaced:
            self._take(self._read_step)  # an interrupted wait begins again
            self._replaced.discard(self._read_step - 1)
        return self._take(step)

    def _take(self, step: int) -> list[int]:
        assert step == self._read_step, f"step {step} read out of order; {self._read_step} is next"
        row = self._ring[step % RING, : self._rows_of[step]]
        self._wait(row, step)
        self._read_step += 1
        tokens = row.tolist()
        del self._rows_of[step]
        if ROW_NAN in tokens:
            raise DeviceError(
                f"NaN logits in row {tokens.index(ROW_NAN)} of step {step}: the checkpoint or its "
                "scales are damaged, or activations overflow the 16-bit type (try --dtype bfloat16)"
            )
        return tokens

    def logits(self, step: int) -> torch.Tensor:
        assert step == self._read_step - 1 == self._step - 1, "logits of the last step only"
        return self.step_logits(self.graphs[self._program_of[step]])

    def prompt_logits(self, slot: int, token_ids: Sequence[int]) -> torch.Tensor:
        check_prompt(slot, len(token_ids), 0, self.num_slots, self.max_model_len)
        (bucket,) = {rows for phase, rows, logits in self.graphs if logits == "all"}
        self._stage_prompt[slot, : len(token_ids)] = torch.tensor(token_ids, dtype=torch.int32)
        parts = []
        for start in range(0, len(token_ids), bucket):
            count = min(bucket, len(token_ids) - start)
            self._upload_chunk(slot, start, count)
            self._replay(("prefill", bucket, "all"))
            parts.append(self.step_logits(self.graphs[("prefill", bucket, "all")])[:count])
        return torch.cat(parts)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        devices = {rank.device for rank in self.ranks}
        for device in devices:
            torch.cuda.synchronize(device)
        self._programs.clear()
        self._tails.clear()
        self.graphs.clear()
        self.ranks.clear()
        self.streams.clear()
        torch.cuda.empty_cache()

    def stats(self) -> dict[str, Any]:
        return {
            "device": torch.cuda.get_device_name(self.ranks[0].device),
            "startup_s": self._phases.seconds(),
            "counters": {**self.counters, "jit_compiles": jit_compiles() - self._compiled},
            **self._facts,
        }

    # Pieces

    def _queue(self, key: GraphKey, rows: int, slots: Sequence[int]) -> int:
        step = self._begin(key, rows)
        self._replay(key)
        if self._controlled.isdisjoint(slots):
            return step
        self._replaced.add(step)
        step = self._begin(key, rows)
        self._tails[key[0], key[1] if key[0] == "decode" else 1].replay()
        self.counters["graph_launches"] += 1
        return step

    def _begin(self, key: GraphKey, rows: int) -> int:
        """Number of the next step that writes the ring."""
        step = self._step
        assert step - self._read_step < RING, "more steps in flight than the ring holds"
        self._ring[step % RING] = ROW_EMPTY
        self._rows_of[step] = rows
        self._program_of = {step: key}
        self._step += 1
        return step

    def _replay(self, key: GraphKey) -> None:
        program = self._programs[key]
        if self._lazy and not (self._eager or program.captured):
            program.capture()  # waits for what is queued; every kernel is loaded already
            self.counters["host_syncs"] += 1
        program.replay()
        self.counters["graph_launches"] += 1

    def _upload(self, target: Any, source: torch.Tensor) -> None:
        """Copy pinned host data into a buffer of every rank, in stream order; does not wait."""
        for rank, stream in zip(self.ranks, self.streams):
            with torch.cuda.stream(stream):
                target(rank).copy_(source, non_blocking=True)

    def _upload_chunk(self, slot: int, start: int, count: int) -> None:
        stage = self._stage_request[self._uploads % len(self._stage_request)]
        self._uploads += 1
        stage[:] = torch.tensor((slot, start, count), dtype=torch.int32)
        self._upload(
            lambda rank: rank.prompt[:count], self._stage_prompt[slot, start : start + count]
        )
        self._upload(lambda rank: rank.request, stage)

    def _sampling(self, slot: int, temperature: float, seed: int) -> None:
        if self._stage_temperature[slot] == temperature and self._stage_seeds[slot] == seed:
            return
        self._stage_temperature[slot] = temperature
        self._stage_seeds[slot] = seed
        where = slice(slot, slot + 1)
        self._upload(lambda rank: rank.state.temperature[where], self._stage_temperature[where])
        self._upload(lambda rank: rank.state.seeds[where], self._stage_seeds[where])

    def _control(self, slot: int, controls: Controls | None) -> None:
        """Upload the slot's controls, if they differ from the neutral ones that may be there."""
        if controls is None:
            if slot not in self._controlled:
                return
            self._controlled.remove(slot)
        else:
            if not self._tails:
                raise RequestError("this executor was built without sampling tails")
            self._controlled.add(slot)
        counts, bias = self._stage_counts[slot], self._stage_bias[slot]
        counted, biased = fill(controls, self._stage_controls[slot], counts, bias)
        width = self.ranks[0].state.counts.shape[1]
        for index, (rank, stream) in enumerate(zip(self.ranks, self.streams)):
            shard = slice(index * width, (index + 1) * width)
            with torch.cuda.stream(stream):
                rank.state.controls[slot].copy_(self._stage_controls[slot], non_blocking=True)
                if counted:
                    rank.state.counts[slot].copy_(counts[shard], non_blocking=True)
                if biased:
                    rank.state.bias[slot].copy_(bias[shard], non_blocking=True)

    def _wait(self, row: np.ndarray, step: int) -> None:
        """Poll host memory until every token of the step is there."""
        started = time.monotonic()
        polls = 0
        while (row == ROW_EMPTY).any():
            polls += 1
            if polls % 256:
                continue
            self._check_status()
            if time.monotonic() - started > STALL_S:
                self._check_device(step)
                started = time.monotonic()
            time.sleep(0)

    def _check_status(self) -> None:
        words = self.ranks[0].status.tolist()  # shared by all ranks; layout in kernels/sync.py
        if not words[0]:
            return
        self.recover()
        site = "the sampling exchange" if words[2] < 0 else f"all-reduce {words[2]} of the step"
        raise DeviceError(
            f"rank {words[1]} waited in vain for rank {words[4]} at {site} (slot at byte {words[3]}): a rank "
            "stopped or was delayed past the limit; the exchange has been re-armed and the next "
            "request can run"
        )

    def _check_device(self, step: int) -> None:
        for stream in self.streams:
            try:
                stream.query()
            except RuntimeError as e:
                raise DeviceError(f"{stream.device} failed in step {step}: {e}") from None

    def recover(self) -> None:
        """After an error: drop queued steps, re-arm the exchange, empty the ring. Slots must be prefilled anew."""
        reset(self.ranks)
        self.counters["host_syncs"] += 1
        self._step = self._read_step = 0
        self._rows_of.clear()
        self._replaced.clear()
        self._decoding = ()

    def step_logits(self, graph: Graph) -> torch.Tensor:
        """fp32 [rows, vocabulary] that the last replay of this graph left, gathered on the host.

        Synchronises: the logprobs path and tuning only.
        """
        output = graph.output
        assert output is not None
        self.counters["host_syncs"] += 1
        offset = plan(graph, self.ranks[0].dtype.itemsize).offsets[output]
        parts = []
        for rank, stream in zip(self.ranks, self.streams):
            stream.synchronize()
            size = output.shape[0] * output.shape[1] * 4
            part = rank.arena[offset : offset + size].view(torch.float32).view(output.shape)
            parts.append(part.cpu())
        return torch.cat(parts, dim=-1)[:, : self.config.vocab_size]
