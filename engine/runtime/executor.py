"""What the LLM front drives: queue prefills and decode steps, read tokens. One protocol, two back ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from engine.errors import RequestError
from engine.sampling import GREEDY, Draw


class Executor(Protocol):
    """Steps are queued without waiting and read in the order in which they were queued."""

    num_slots: int
    max_model_len: int
    max_in_flight: int  # steps that may be queued beyond the oldest unread one

    def prefill(
        self, slot: int, token_ids: Sequence[int], start: int = 0, draw: Draw = GREEDY
    ) -> int:
        """Queue a prompt; KV of [0, start) already in the slot is kept. Returns a step handle with one row.

        draw: how this slot's tokens are chosen until its next prefill.
        Raises RequestError if start + len(token_ids) exceeds max_model_len or the prompt is empty.
        """

    def decode(self, slots: Sequence[int]) -> int:
        """Queue one token for each of these prefilled slots. Returns a step handle; row i is slots[i]."""

    def read(self, step: int) -> list[int]:
        """Token ids of a queued step, waiting for them in host memory. Raises DeviceError."""

    def logits(self, step: int) -> torch.Tensor:
        """fp32 CPU [rows, vocab_size] of the step just read, if nothing was queued after it."""

    def prompt_logits(self, slot: int, token_ids: Sequence[int]) -> torch.Tensor:
        """fp32 CPU [len, vocab_size]: row i predicts token i + 1. Fills the slot's KV like prefill."""

    def recover(self) -> None:
        """After an error or a lost handle: drop queued steps. Slots must be prefilled anew."""

    def close(self) -> None:
        """Free everything. Idempotent."""

    def stats(self) -> dict[str, Any]:
        """Start-up phases, memory, counters, and what the share of the roof is computed from."""


def check_prompt(slot: int, length: int, start: int, num_slots: int, max_model_len: int) -> None:
    """The checks both back ends make before any work. Raises RequestError."""
    if length < 1:
        raise RequestError("the prompt has no tokens; give at least one")
    if not 0 <= slot < num_slots:
        raise RequestError(f"slot {slot} is outside 0..{num_slots - 1}; raise --max-num-seqs")
    if start + length > max_model_len:
        raise RequestError(
            f"the prompt's {start + length} tokens exceed the context of {max_model_len}; shorten it"
        )
