"""AsyncLLM over the fake executor: streams side by side, abort, cancelling, failures, closing."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import aclosing

import pytest

from engine import AsyncLLM, SamplingParams
from engine.errors import DeviceError, EngineError, RequestError
from tests.unit.fakes import FakeExecutor, expected

VOCAB = 400
LONG = SamplingParams(max_tokens=70, ignore_eos=True)


@pytest.fixture
def make(directory, monkeypatch):
    made = []

    def build(delay=0.0, slots=3):
        def create(config, model):
            return FakeExecutor(slots, 128, vocab=VOCAB, delay=delay)

        monkeypatch.setattr("engine.runtime.create_executor", create)
        made.append(AsyncLLM(directory))
        return made[-1]

    yield build
    for llm in made:
        llm.close()


def until(condition, seconds=10.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "did not happen"
        time.sleep(0.005)


def test_many_requests_at_once(make):
    llm = make()

    async def main():
        prompts = [[i + 1, 5] for i in range(10)]
        params = SamplingParams(max_tokens=9, ignore_eos=True)
        outputs = await asyncio.gather(*(llm.generate(p, params) for p in prompts))
        for prompt, output in zip(prompts, outputs):
            assert output.outputs[0].token_ids == expected(prompt, 9, VOCAB)
        text = [str(d) async for d in llm.stream("hello", params)]
        again = await llm.generate("hello", params)
        assert "".join(text) == again.outputs[0].text

    asyncio.run(main())
    assert llm.llm._executor.deepest > 1 and max(llm.llm._executor.batches) == 3


def test_a_conversation(make):
    async def main(llm):
        output = await llm.generate([{"role": "user", "content": "hello"}], LONG)
        assert output.prompt.endswith("<|im_start|>assistant\n")

    asyncio.run(main(make()))


def test_leaving_cancelling_and_aborting_free_the_slot(make):
    llm = make(delay=0.002, slots=1)

    async def main():
        async with aclosing(llm.stream([1], LONG)) as stream:
            async for _ in stream:
                break
        until(lambda: not llm.llm.scheduler.has_work)
        task = asyncio.create_task(llm.generate([2], LONG))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        until(lambda: not llm.llm.scheduler.has_work)
        task = asyncio.create_task(llm.generate([3], LONG, request_id="mine"))
        await asyncio.sleep(0.05)
        llm.abort("mine")
        output = await task
        assert output.outputs[0].finish_reason == "abort" and output.request_id == "mine"
        got = output.outputs[0].token_ids
        assert got == expected([3], len(got), VOCAB)

    asyncio.run(main())
    assert llm.llm.scheduler.free_slots == 1 and not llm._receivers


def test_errors_reach_their_caller(make):
    llm = make()

    async def main():
        with pytest.raises(RequestError, match="prompt_token_ids"):
            await llm.generate([VOCAB])
        llm.llm._executor.fail_at = 2
        with pytest.raises(DeviceError, match="NaN"):
            await llm.generate([1], LONG)
        llm.llm._executor.fail_at = None
        output = await llm.generate([1], SamplingParams(max_tokens=4, ignore_eos=True))
        assert output.outputs[0].token_ids == expected([1], 4, VOCAB)

    asyncio.run(main())


def test_any_exception_reaches_all_and_later_requests_are_served(make, monkeypatch):
    llm = make(delay=0.002)
    executor = llm.llm._executor
    prefill = executor.prefill

    def broken(slot, ids, *rest):
        if 7 in ids:
            raise RuntimeError("value cannot be converted without overflow")
        return prefill(slot, ids, *rest)

    monkeypatch.setattr(executor, "prefill", broken)
    held, together = threading.Event(), threading.Event()

    def hold() -> None:
        """The engine's thread takes no request until all are there."""
        held.set()
        together.wait(10)

    async def main():
        llm._commands.put(hold)
        await asyncio.to_thread(held.wait, 10)
        tasks = [asyncio.create_task(llm.generate(p, LONG)) for p in ([1], [7], [2])]
        while llm._commands.qsize() < 3:
            await asyncio.sleep(0.001)
        together.set()
        for result in await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10):
            assert isinstance(result, RuntimeError) and "overflow" in str(result)
        output = await asyncio.wait_for(llm.generate([1], LONG), 10)
        assert output.outputs[0].token_ids == expected([1], 70, VOCAB)

        def refuse(request):
            raise KeyError("add")

        with monkeypatch.context() as patch:
            patch.setattr(llm.llm.scheduler, "add", refuse)
            with pytest.raises(KeyError, match="add"):
                await asyncio.wait_for(llm.generate([1], LONG), 10)

    asyncio.run(main())
    assert llm.llm.scheduler.free_slots == 3 and not llm._receivers


def test_a_broken_scheduler_answers_instead_of_hanging(make, monkeypatch):
    llm = make()

    def broken(*_):
        raise AssertionError("no way on")

    monkeypatch.setattr(llm.llm.scheduler, "step", broken)
    monkeypatch.setattr(llm.llm.scheduler, "abort", broken)

    async def main():
        with pytest.raises(AssertionError, match="no way on"):
            await asyncio.wait_for(llm.generate([1], LONG), 10)
        with pytest.raises(EngineError, match=r"stopped after AssertionError.*no way on"):
            await asyncio.wait_for(llm.generate([2], LONG), 10)

    asyncio.run(main())
    monkeypatch.undo()


def test_async_with_closes(make):
    async def main(llm):
        async with llm as same:
            assert same is llm
            await llm.generate([1], LONG)
        with pytest.raises(EngineError, match="is closed"):
            await llm.generate([1], LONG)

    asyncio.run(main(make()))


def test_closing_ends_what_runs(make):
    llm = make(delay=0.005)

    async def main():
        task = asyncio.create_task(llm.generate([1], LONG))
        await asyncio.sleep(0.05)
        await asyncio.to_thread(llm.close)
        with pytest.raises(EngineError, match="closed while"):
            await task
        with pytest.raises(EngineError, match="is closed"):
            await llm.generate([1], LONG)

    asyncio.run(main())
    llm.close()
    assert llm.llm._executor.closed == 1
