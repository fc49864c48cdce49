"""The CPU back end: the compiled graphs run by the interpreter, any TP degree in lockstep."""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tqdm import tqdm

from engine.checkpoint.load import Loaded
from engine.checkpoint.memory import kv_bytes_per_token
from engine.config import ModelConfig
from engine.errors import RequestError
from engine.graph.build import Logits, build
from engine.graph.interpret import Interpreter, StepInput, StepOutput
from engine.graph.ir import Phase
from engine.graph.passes import run_passes
from engine.graph.passes.quantize_prefill import FP8_MIN_TOKENS
from engine.runtime.buckets import chunks, prefill_buckets, prompt_logits_bucket
from engine.runtime.controls import set_controls
from engine.runtime.executor import check_prompt
from engine.runtime.phases import Phases
from engine.runtime.state import new_state, rope_table
from engine.sampling import GREEDY, Draw

log = logging.getLogger("engine")

BAR_AFTER_S = 1.0  # a prompt that is done before shows no bar


class CpuExecutor:
    """Executor over `engine.graph.interpret`. A queued step is computed at once; reading only hands it out."""

    max_in_flight = (
        0  # a step is computed when it is queued: one queued ahead would delay the reading
    )

    def __init__(
        self,
        config: ModelConfig,
        tp: int,
        weights: Sequence[Mapping[str, Loaded]],
        *,
        dtype: torch.dtype,
        num_slots: int,
        max_model_len: int,
        phases: Phases,
        fused: bool = True,
        fp8_prefill: bool = False,
        fp8_kv: bool = False,
    ):
        """weights: per rank, for the fused graph's specs (or the unfused one's with fused=False).

        fp8_prefill: round activations as FP8 prefill on a GPU does, in prompts that would be FP8 there.
        """
        self.config, self.tp, self.num_slots = config, tp, num_slots
        self.max_model_len, self._weights, self._fused = max_model_len, weights, fused
        self._phases, self._fp8_prefill, self._fp8_kv = phases, fp8_prefill, fp8_kv
        # One position more than the context: the last token's KV is written and never read.
        length = max_model_len + 1
        table = rope_table(config, length, "cpu")
        self._states = [
            new_state(
                config,
                tp,
                slots=num_slots,
                length=length,
                dtype=dtype,
                device="cpu",
                table=table,
                fp8_kv=fp8_kv,
            )
            for _ in range(tp)
        ]
        self._programs: dict[tuple[str, int, str, bool], Interpreter] = {}
        self._queue: deque[tuple[int, StepOutput]] = deque()
        self._last: tuple[int, StepOutput] | None = None
        self._steps = 0
        self._prompted: set[int] = set()  # slots that have had a prompt

    def prefill(
        self, slot: int, token_ids: Sequence[int], start: int = 0, draw: Draw = GREEDY
    ) -> int:
        check_prompt(slot, len(token_ids), start, self.num_slots, self.max_model_len)
        for state in self._states:
            state.temperature[slot] = draw.temperature
            state.seeds[slot] = draw.seed
        set_controls(self._states, slot, draw.controls)
        return self._push(self._prompt_step(slot, token_ids, start, "last"))

    def decode(self, slots: Sequence[int]) -> int:
        full = [s for s in slots if int(self._states[0].positions[s]) >= self.max_model_len]
        if full:
            raise RequestError(f"slot {full[0]} is full at {self.max_model_len} tokens")
        program = self._program("decode", len(slots), "last")
        row_slots = torch.tensor(list(slots), dtype=torch.int32)
        return self._push(program.run(StepInput(row_slots=row_slots)))

    def read(self, step: int) -> list[int]:
        number, output = self._queue.popleft()
        assert number == step, f"step {step} read out of order; {number} is next"
        self._last = (number, output)
        assert output.tokens is not None
        return output.tokens.tolist()

    def logits(self, step: int) -> torch.Tensor:
        assert self._last is not None and self._last[0] == step and not self._queue
        return self._whole(self._last[1])

    def prompt_logits(self, slot: int, token_ids: Sequence[int]) -> torch.Tensor:
        check_prompt(slot, len(token_ids), 0, self.num_slots, self.max_model_len)
        return self._whole(self._prompt_step(slot, token_ids, 0, "all"))

    def recover(self) -> None:
        """Drop queued steps."""
        self._queue.clear()

    def close(self) -> None:
        self._programs.clear()
        self._states, self._weights = [], []

    def stats(self) -> dict[str, Any]:
        dtype = self._states[0].k_cache[0].dtype
        return {
            "device": "cpu",
            "startup_s": self._phases.seconds(),
            "kv_bytes_per_token": kv_bytes_per_token(self.config, self.tp, dtype),
            "roof": None,
        }

    def _prompt_step(
        self, slot: int, token_ids: Sequence[int], start: int, logits: Logits
    ) -> StepOutput:
        prompt = torch.tensor(list(token_ids), dtype=torch.int32)
        request = (slot, start, len(token_ids))
        if logits == "all":
            bucket = prompt_logits_bucket(self.max_model_len)
        else:
            bucket = chunks(len(token_ids), prefill_buckets(self.max_model_len))[0][2]
        fp8 = self._fp8_prefill and bucket >= FP8_MIN_TOKENS
        program = self._program("prefill", 0, logits, fp8)
        self._prompted.add(slot)
        with self._bar(len(token_ids), len(program.graph.ops)) as bar:
            return program.run(StepInput(prompt=prompt, request=request), bar.update)

    def _bar(self, tokens: int, ops: int) -> tqdm:
        """A bar on stderr for a long prompt, where start-up is logged (not in the Python API, nor with --quiet), on
        a terminal, and while no other slot has an answer: it would overwrite what the terminal shows of that.
        """
        shown = log.isEnabledFor(logging.INFO) and len(self._prompted) == 1
        return tqdm(
            total=ops, desc=f"a prefill of {tokens} tokens", delay=BAR_AFTER_S, leave=False, miniters=1,
            file=sys.stderr, disable=None if shown else True,  # None: unless on a terminal
            bar_format="{percentage:3.0f} % of {desc} |{bar}| {elapsed}",
        )  # fmt: skip

    def _push(self, output: StepOutput) -> int:
        self._steps += 1
        self._queue.append((self._steps, output))
        return self._steps

    def _whole(self, output: StepOutput) -> torch.Tensor:
        assert output.logits is not None
        return torch.cat(output.logits, dim=-1)[:, : self.config.vocab_size].float()

    def _program(self, phase: Phase, rows: int, logits: Logits, fp8: bool = False) -> Interpreter:
        """Compiled once per argument tuple. One prefill graph serves every length: see run()."""
        key = (phase, rows, logits, fp8)
        if key not in self._programs:
            size = rows or self.max_model_len
            graph = build(
                self.config, phase=phase, rows=size, tp=self.tp, logits=logits, fp8_prefill=fp8,
                fp8_kv=self._fp8_kv,
            )  # fmt: skip
            graph = run_passes(graph) if self._fused else graph
            self._programs[key] = Interpreter(graph, self._weights, self._states)
        return self._programs[key]
