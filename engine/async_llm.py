"""AsyncLLM: the engine for asyncio. One thread turns the scheduler; requests come and go from any loop."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from typing import Any

from engine.errors import EngineError
from engine.llm import LLM, Messages
from engine.outputs import Delta, RequestOutput
from engine.prompts import Prompt
from engine.request import Request
from engine.sampling import SamplingParams

Receiver = Callable[[Delta | Exception], None]  # called in the engine's thread


class AsyncLLM:
    """LLM with coroutines; the arguments are those of LLM. Call close(), or use it as a context manager.

    All requests share decode steps. A DeviceError, or any other exception of a step, ends those that run
    (each raises it); if the engine recovers, later ones are served, else they raise too. Every method but close() may be called from any task of any loop.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        self.llm = LLM(*args, **options)
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._receivers: dict[Request, Receiver] = {}
        self._making = threading.Lock()  # tokenizing and numbering requests is not thread-safe
        self._closed = False
        self._broken: Exception | None = None  # what the scheduler did not recover from
        self._thread = threading.Thread(target=self._turn, name="engine", daemon=True)
        self._thread.start()

    async def stream(
        self,
        prompt: Prompt | Messages,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
    ) -> AsyncGenerator[Delta]:
        """Deltas of one answer as they become certain, as LLM.stream; leaving the loop aborts it.

        RequestError, with the field's name, before anything runs. Close the generator (or use
        contextlib.aclosing) to abort at once when leaving early.
        """
        if self._closed:
            raise EngineError("this AsyncLLM is closed")
        with self._making:
            request = self.llm.make_request(prompt, sampling_params, request_id=request_id)
        loop = asyncio.get_running_loop()
        inbox: asyncio.Queue[Delta | Exception] = asyncio.Queue()

        def receive(item: Delta | Exception) -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody waits
                loop.call_soon_threadsafe(inbox.put_nowait, item)

        self._commands.put(lambda: self._add(request, receive))
        try:
            while True:
                item = await inbox.get()
                if isinstance(item, Exception):
                    raise item
                yield item
                if item.output is not None:
                    return
        finally:
            self._commands.put(lambda: self._abort(request))

    async def generate(
        self,
        prompt: Prompt | Messages,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
    ) -> RequestOutput:
        """The whole answer to one prompt or conversation; cancelling the task aborts it."""
        stream = self.stream(prompt, sampling_params, request_id=request_id)
        try:
            async for delta in stream:
                if delta.output is not None:
                    return delta.output
        finally:
            await stream.aclose()
        raise AssertionError("a stream ended without its output")

    def abort(self, request_id: str) -> None:
        """End the running requests of this id; their streams get a last delta with reason "abort"."""

        def body() -> None:
            for request in list(self._receivers):
                if request.request_id == request_id:
                    self._abort(request)

        self._commands.put(body)

    def close(self) -> None:
        """End all requests, join the thread and give the devices back. Safe to call again."""
        if self._closed:
            return
        self._closed = True
        self._commands.put(None)
        self._thread.join()
        self.llm.close()

    def __enter__(self) -> AsyncLLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)

    # In the engine's thread

    def _turn(self) -> None:
        while True:
            try:
                if not self._obey(wait=not self._has_work):
                    self._fail(EngineError("this AsyncLLM was closed while it was generating"))
                    return
                if self._has_work:
                    for request, delta in self.llm.scheduler.step():
                        self._give(request, delta)
            except Exception as e:  # whatever it is, nobody may be left waiting
                self._fail(e)

    @property
    def _has_work(self) -> bool:
        return self._broken is None and self.llm.scheduler.has_work

    def _obey(self, wait: bool) -> bool:
        """Run the commands that have come, waiting for one if told to; False when told to end."""
        while True:
            try:
                command = self._commands.get(block=wait)
            except queue.Empty:
                return True
            if command is None:
                return False
            command()
            wait = False

    def _add(self, request: Request, receive: Receiver) -> None:
        if self._broken is not None:
            receive(EngineError(f"the engine stopped after {self._broken!r}; make a new AsyncLLM"))
            return
        self._receivers[request] = receive
        try:
            self.llm.scheduler.add(request)
        except Exception as e:
            del self._receivers[request]
            receive(e)

    def _abort(self, request: Request) -> None:
        delta = self.llm.scheduler.abort(request)
        if delta is not None:
            self._give(request, delta)

    def _give(self, request: Request, delta: Delta) -> None:
        receive = self._receivers.get(request)
        if receive is not None:
            if delta.output is not None:
                del self._receivers[request]
            receive(delta)

    def _fail(self, error: Exception) -> None:
        receivers, self._receivers = self._receivers, {}
        for request, receive in receivers.items():
            try:
                self.llm.scheduler.abort(request)
            except Exception:
                self._broken = error
            receive(error)
        if self.llm.scheduler.has_work:  # of requests that nobody knows
            self._broken = error
