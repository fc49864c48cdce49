"""Continuous batching at small scale: requests join and leave the decode batch between steps.

The device feeds its own tokens back, so steps can be queued before their tokens are known. The host
runs up to `executor.max_in_flight` steps ahead of the oldest unread one and reads tokens in order;
tokens that arrive for a request after its end are dropped. A slot is reused at once: the prefill
that takes it over is queued behind the steps that still belong to its last owner.

With prefix caching a free slot's KV is kept until the slot is taken over, and a request takes the free
slot that shares the longest prefix with its prompt; only the rest is computed.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.errors import DeviceError, EngineError
from engine.outputs import Delta, Logprob, top_logprobs
from engine.request import Request
from engine.sampling import Draw

if TYPE_CHECKING:
    from engine.runtime.executor import Executor

_LOGPROB_ROWS = 128  # prompt positions ranked at a time: fp64 [128, 152064] is 156 MB


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two sequences begin with alike."""
    count = 0
    for x, y in zip(a, b):
        if x != y:
            break
        count += 1
    return count


@dataclass(frozen=True)
class _Step:
    """A queued step: its handle and the request of each row."""

    handle: int
    rows: tuple[Request, ...]


class Scheduler:
    """Requests in, (request, delta) pairs out. Single-threaded: one caller turns step()."""

    def __init__(self, executor: Executor, *, prefix_caching: bool = False) -> None:
        self._executor = executor
        self._prefix_caching = prefix_caching
        self._kept: dict[int, list[int]] = {}  # free slot -> the tokens whose KV it holds
        self._failed: list[tuple[Request, Delta]] = []  # ended before they ran, not yet reported
        self._waiting: deque[Request] = deque()
        self._running: dict[int, Request] = {}  # slot -> request
        self._free = list(range(executor.num_slots))  # heap: the lowest slot first
        # Slots of requests that were aborted before their first token was read: the prompt may
        # still be on its way to the device from the slot's staging memory.
        self._parked: dict[Request, int] = {}
        self._steps: deque[_Step] = deque()  # queued and unread, oldest first
        self._unsure = False  # a step may have been queued whose handle was lost
        self._failure: DeviceError | None = None  # set if the device could not be recovered

    @property
    def has_work(self) -> bool:
        """True while a request waits or runs."""
        return bool(self._waiting or self._running)

    @property
    def free_slots(self) -> int:
        """Slots that no request holds."""
        return len(self._free) + len(self._parked)

    def add(self, request: Request) -> None:
        """Queue a request; it starts when a slot is free, in the order of add()."""
        if self._failure is not None:
            raise DeviceError(f"the engine stopped after a device failure: {self._failure}")
        if self._unsure and not self.has_work:
            self._recover()
        self._waiting.append(request)

    def step(self) -> list[tuple[Request, Delta]]:
        """Queue what may be queued, read the oldest step, and return what its tokens made certain.

        A DeviceError ends every request; the engine can serve new ones if the device recovers.
        """
        try:
            self._launch()
            if not self._steps:
                return self._take_failed()
            step = self._steps[0]
            tokens = self._executor.read(step.handle)
            self._steps.popleft()
            entries = self._logprobs(step, tokens)
        except DeviceError as e:
            self.abort_all()
            try:
                self._recover()
            except Exception:  # whatever a lost device raises
                self._failure = e
            raise
        except BaseException:  # Ctrl-C, perhaps between queueing a step and noting its handle
            self._unsure = True
            raise
        updates = self._take_failed()
        for request, token, entry in zip(step.rows, tokens, entries, strict=True):
            if request.finished:
                if request in self._parked:
                    heapq.heappush(self._free, self._parked.pop(request))
                continue
            try:
                delta = request.accept(token, entry)
            except Exception as e:
                delta = request.fail(e)
            updates.append((request, delta))
            if request.finished:
                self._release(request)
        return updates

    def abort(self, request: Request) -> Delta | None:
        """End a request wherever it is; None if it had ended. Its queued tokens will be dropped."""
        if request.finished:
            return None
        delta = request.abort()
        if request.slot is not None:
            self._release(request)
        elif request in self._waiting:
            self._waiting.remove(request)
        return delta

    def abort_all(self) -> None:
        for request in [*self._running.values(), *self._waiting]:
            self.abort(request)

    def _take_failed(self) -> list[tuple[Request, Delta]]:
        failed, self._failed = self._failed, []
        return failed

    def _recover(self) -> None:
        """Forget all queued steps, here and on the device. Only while no request runs."""
        self._steps.clear()
        self._kept.clear()
        self._executor.recover()
        for slot in self._parked.values():
            heapq.heappush(self._free, slot)
        self._parked.clear()
        self._unsure = False

    def _release(self, request: Request) -> None:
        assert request.slot is not None
        del self._running[request.slot]
        if self._prefix_caching and not self._unsure:
            # The last token's KV would be written by the step behind it.
            self._kept[request.slot] = request.prompt_token_ids + request.token_ids[:-1]
        if request.token_ids:
            heapq.heappush(self._free, request.slot)
        else:
            self._parked[request] = request.slot
        request.slot = None

    def _launch(self) -> None:
        """Fill the queue: prefills of waiting requests first, then decode steps of all that run."""
        while len(self._steps) <= self._ahead():
            if self._waiting and self._free:
                self._prefill(self._waiting.popleft())
                continue
            # A request whose last token is queued already takes no part, so no step runs past
            # max_tokens, nor past the context.
            slots = [s for s, r in sorted(self._running.items()) if r.queued < r.max_tokens]
            if not slots:
                return
            handle = self._executor.decode(slots)
            rows = tuple(self._running[s] for s in slots)
            for request in rows:
                request.queued += 1
            self._steps.append(_Step(handle, rows))

    def _ahead(self) -> int:
        """Steps that may be queued beyond the oldest unread one.

        None while a request needs logits: they are those of the last step that ran.
        """
        next_up = [self._waiting[0]] if self._waiting and self._free else []
        if any(r.params.needs_logits for r in [*self._running.values(), *next_up]):
            return 0
        return self._executor.max_in_flight

    def _prefill(self, request: Request) -> None:
        slot, start = self._choose_slot(request)
        self._kept.pop(slot, None)
        request.slot, request.cached_tokens = slot, start
        self._running[slot] = request
        request.launched()
        params, ids = request.params, request.prompt_token_ids
        try:
            if params.prompt_logprobs is not None:
                request.prompt_logprobs = self._prompt_logprobs(request, slot)
            draw = Draw(params.temperature, request.seed, request.controls)
            handle = self._executor.prefill(slot, ids[start:], start, draw)
        except EngineError as e:  # refused before any work
            del self._running[slot]
            request.slot = None
            heapq.heappush(self._free, slot)
            self._failed.append((request, request.fail(e)))
            return
        request.queued = 1
        self._steps.append(_Step(handle, (request,)))

    def _choose_slot(self, request: Request) -> tuple[int, int]:
        """A free slot, taken, and how many tokens of the prompt its KV already holds: the slot with most;
        of equals one that holds nothing, then the lowest."""
        prompt = request.prompt_token_ids
        limit = len(prompt) - 1  # the last token's logits are wanted
        if request.params.prompt_logprobs is not None:
            limit = 0

        def shared(slot: int) -> int:
            return min(limit, common_prefix(prompt, self._kept.get(slot, ())))

        slot = max(self._free, key=lambda s: (shared(s), s not in self._kept, -s))
        start = shared(slot)
        self._free.remove(slot)
        heapq.heapify(self._free)
        return slot, start

    def _prompt_logprobs(self, request: Request, slot: int) -> list[dict[int, Logprob] | None]:
        ids = request.prompt_token_ids
        k = request.params.prompt_logprobs
        assert k is not None
        entries: list[dict[int, Logprob] | None] = [None]  # nothing predicts the first token
        if len(ids) > 1:
            logits = self._executor.prompt_logits(slot, ids)  # [len, vocab]
            for i in range(0, len(ids) - 1, _LOGPROB_ROWS):
                chosen = ids[i + 1 : i + 1 + _LOGPROB_ROWS]
                rows = logits[i : i + len(chosen)]
                entries += top_logprobs(rows, chosen, k, request.decode_token)
        return entries

    def _logprobs(self, step: _Step, tokens: list[int]) -> list[dict[int, Logprob] | None]:
        """One entry per row; None for rows that did not ask."""
        entries: list[dict[int, Logprob] | None] = [None] * len(tokens)
        wanted = [
            i for i, r in enumerate(step.rows) if r.params.logprobs is not None and not r.finished
        ]
        if wanted:
            logits = self._executor.logits(step.handle)  # [rows, vocab]
            for i in wanted:
                request = step.rows[i]
                k = request.params.logprobs or 0
                row = logits[i : i + 1]
                entries[i] = top_logprobs(row, [tokens[i]], k, request.decode_token)[0]
        return entries
