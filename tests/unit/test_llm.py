"""LLM over a fake executor: the API's shape, text, stops, order, streams, errors, closing."""

from __future__ import annotations

import dataclasses
import inspect
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import LLM, SamplingParams
from engine.config import EngineConfig
from engine.errors import EngineError, RequestError
from tests.unit.fakes import FakeExecutor, expected, write_model

VOCAB = 400


@pytest.fixture
def make(directory, monkeypatch):
    """make(text=None, **LLM arguments): an LLM whose executor plays `text`, then EOS for ever."""
    made = []

    def build(text=None, *, script=None, slots=3, delay=0.0, **options):
        def create(config, model):
            executor = FakeExecutor(slots, config.max_model_len or 128, vocab=VOCAB, delay=delay)
            executor.config, executor.model = config, model
            return executor

        monkeypatch.setattr("engine.runtime.create_executor", create)
        llm = LLM(options.pop("model", directory), **options)
        if text is not None:
            script = [*llm.tokenizer.encode(text), *[2] * 128]
        llm._executor.script = script
        made.append(llm)
        return llm

    yield build
    for llm in made:
        llm.close()


def test_arguments_are_the_fields_of_engine_config():
    arguments = dict(inspect.signature(LLM.__init__).parameters)
    for name in ("self", "chat_template"):
        arguments.pop(name)
    assert {n: a.default for n, a in arguments.items()} == {
        f.name: f.default for f in dataclasses.fields(EngineConfig)
    }


def test_generate_returns_the_de_facto_shape(make):
    llm = make("hello world")
    [output] = llm.generate(
        "hi there", SamplingParams(max_tokens=50, logprobs=1, prompt_logprobs=0)
    )
    assert output.finished and output.prompt == "hi there" and output.request_id == "0"
    assert output.prompt_token_ids == llm.tokenizer.encode("hi there")
    [answer] = output.outputs
    assert answer.text == "hello world" and answer.index == 0 and answer.finished()
    assert (answer.finish_reason, answer.stop_reason) == ("stop", None)
    assert answer.token_ids == [*llm.tokenizer.encode("hello world"), 2]
    assert len(answer.logprobs) == len(answer.token_ids)
    first = answer.logprobs[0][answer.token_ids[0]]
    assert first.rank == 1 and first.logprob < 0 and "hello".startswith(first.decoded_token)
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    metrics = output.metrics
    assert metrics.output_tokens == len(answer.token_ids)
    assert 0 <= metrics.queue_s <= metrics.ttft_s <= metrics.total_s


def test_metrics_measure_time(make):
    llm = make(script=[5], delay=0.01)
    [output] = llm.generate([1, 2], SamplingParams(max_tokens=11))
    # Ten tokens after the first, each read taking at least 10 ms.
    assert 20 < output.metrics.decode_tok_s <= 100
    assert output.metrics.ttft_s >= 0.01 and output.metrics.tpot_s >= 0.01


def test_order_is_kept_over_more_prompts_than_slots(make):
    llm = make()
    prompts = [[3 + i] * (1 + i % 4) for i in range(11)]
    params = [SamplingParams(max_tokens=1 + (7 * i) % 9, ignore_eos=True) for i in range(11)]
    outputs = llm.generate(prompts, params)
    for prompt, param, output in zip(prompts, params, outputs):
        assert output.prompt is None and output.prompt_token_ids == prompt
        assert output.outputs[0].token_ids == expected(prompt, param.max_tokens, VOCAB)
        assert output.outputs[0].finish_reason == "length"
    assert [o.request_id for o in outputs] == [str(i) for i in range(11)]


@pytest.mark.parametrize("eos", [0, 1, 2])
def test_every_source_of_eos_ends_the_answer(make, eos):
    llm = make(script=[50, 51, eos, 52])
    [output] = llm.generate([7])
    assert output.outputs[0].token_ids == [50, 51, eos]
    assert output.outputs[0].finish_reason == "stop"
    [output] = llm.generate([7], SamplingParams(ignore_eos=True, max_tokens=4))
    assert output.outputs[0].token_ids == [50, 51, eos, 52]
    ignore = SamplingParams(ignore_eos=True, max_tokens=9, stop_token_ids=[52])
    [output] = llm.generate([7], ignore)
    assert output.outputs[0].token_ids == [50, 51, eos, 52]
    assert output.outputs[0].stop_reason == 52 and output.outputs[0].finish_reason == "stop"


def test_min_tokens_passes_over_early_ends(make):
    llm = make(script=[50, 2, 51, 2, 52])
    [output] = llm.generate([7], SamplingParams(min_tokens=3))
    assert output.outputs[0].token_ids == [50, 2, 51, 2]
    llm = make("a.b.c.d")
    [output] = llm.generate([7], SamplingParams(min_tokens=3, stop="."))
    assert output.outputs[0].text == "a.b.c" or output.outputs[0].text == "a.b"
    assert len(output.outputs[0].token_ids) >= 3


def test_stop_string_is_cut_and_named(make):
    llm = make("The capital of France is Paris. The quick")
    [output] = llm.generate([7], SamplingParams(stop=["is Par", "zzz"]))
    answer = output.outputs[0]
    assert answer.text == "The capital of France " and answer.stop_reason == "is Par"
    assert answer.finish_reason == "stop"


@settings(max_examples=60, deadline=None)
@given(
    text=st.text(alphabet="ab🎉你\n", max_size=12),
    stop=st.sampled_from(["ab", "🎉b", "\n\n", "你"]),
)
def test_stream_deltas_concatenate_to_the_answer(directory, text, stop):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "engine.runtime.create_executor", lambda c, m: FakeExecutor(2, 128, vocab=VOCAB)
        )
        with LLM(directory) as llm:
            llm._executor.script = [*llm.tokenizer.encode(text), *[2] * 128]
            params = SamplingParams(stop=stop)
            deltas = list(llm.stream([7], params))
            [whole] = llm.generate([7], params)
    want = text.split(stop)[0]
    assert "".join(map(str, deltas)) == whole.outputs[0].text == want
    assert deltas[-1].output.outputs[0].text == want
    assert [t for d in deltas for t in d.token_ids] == whole.outputs[0].token_ids


def test_held_text_is_flushed_at_the_length_limit(make):
    llm = make("hello EN and more")
    ids = llm.tokenizer.encode("hello EN")
    [output] = llm.generate([7], SamplingParams(stop="END", max_tokens=len(ids)))
    assert output.outputs[0].text == "hello EN" and output.outputs[0].finish_reason == "length"


def test_two_streams_share_steps(make):
    llm = make()
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    first, second = llm.stream([3], params), llm.stream([4, 5], params)
    tokens: tuple[list[int], list[int]] = ([], [])
    for a, b in zip(first, second, strict=True):
        tokens[0].extend(a.token_ids)
        tokens[1].extend(b.token_ids)
    assert tokens[0] == expected([3], 12, VOCAB) and tokens[1] == expected([4, 5], 12, VOCAB)
    assert 2 in llm._executor.batches


def test_closing_a_stream_aborts_it(make):
    llm = make(script=[50], slots=1)
    stream = llm.stream([3])
    next(stream)
    stream.close()
    assert llm.scheduler.free_slots == 1 and not llm.scheduler.has_work and not llm._inboxes
    llm._executor.script = None
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    assert llm.generate([9], params)[0].outputs[0].token_ids == expected([9], 5, VOCAB)
    unstarted = llm.stream([3])
    del unstarted
    assert not llm.scheduler.has_work


def test_interrupt_during_generate_leaves_a_usable_engine(make):
    llm = make()
    llm._executor.interrupt_at = 3
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[5], [6]], params)
    assert not llm.scheduler.has_work
    [output] = llm.generate([9], params)
    assert output.outputs[0].token_ids == expected([9], 8, VOCAB)


def test_chat_uses_the_template_once(make):
    llm = make("hello")
    message = {"role": "user", "content": "hi"}
    [output] = llm.chat([message])
    assert output.prompt.startswith("<|im_start|>system\nYou are a test assistant.")
    assert output.prompt_token_ids == llm.tokenizer.encode(output.prompt)
    assert output.outputs[0].text == "hello"
    outputs = llm.chat([[message], [{"role": "system", "content": "S"}, message]], tools=[{"x": 1}])
    assert len(outputs) == 2 and '<tools>[{"x": 1}]</tools>' in outputs[0].prompt
    assert "test assistant" not in outputs[1].prompt
    assert "".join(map(str, llm.stream([message]))) == "hello"


def test_sampling_seeds(make):
    llm = make(seed=3)
    sampled = SamplingParams(temperature=1.0, max_tokens=4, ignore_eos=True)
    fixed = dataclasses.replace(sampled, seed=77)
    first, second = (llm.generate([5], sampled)[0].outputs[0].token_ids for _ in range(2))
    assert first != second, "requests without a seed must not repeat each other"
    assert first == make(seed=3).generate([5], sampled)[0].outputs[0].token_ids
    assert first != make(seed=4).generate([5], sampled)[0].outputs[0].token_ids
    again = [llm.generate([5], fixed)[0].outputs[0].token_ids for _ in range(2)]
    assert again[0] == again[1] == expected([5], 4, VOCAB, seed=77)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ("", "prompt is empty"),
        ([[1], []], "prompt 1: .*empty"),
        ([[1], [400]], r"prompt 1: prompt_token_ids\[0\] = 400 is outside the vocabulary of 400"),
        ([3, -1], r"prompt_token_ids\[1\] = -1"),
        ([3, "x"], r"prompt_token_ids\[1\] is 'x'"),
        ([3, True], r"prompt_token_ids\[1\] is True"),
        (None, "prompts is NoneType"),
        ([None], "a prompt is NoneType"),
        (b"hi", "prompts is bytes"),
        ([[1], b"hi"], "prompt 1: a prompt is bytes"),
        ({"prmpt": "x"}, "prmpt"),
        ([1] * 128, r"128 tokens .* context of 128"),
    ],
)
def test_bad_prompts_are_named(make, prompts, message):
    llm = make()
    with pytest.raises(RequestError, match=message):
        llm.generate(prompts)
    assert not llm.scheduler.has_work


def test_bad_params(make):
    llm = make()
    with pytest.raises(RequestError, match="2 prompts, but 1 sampling_params"):
        llm.generate(["a", "b"], [SamplingParams()])
    with pytest.raises(RequestError, match="sampling_params is dict"):
        llm.generate("a", {"temperature": 0})
    with pytest.raises(RequestError, match="not SamplingParams"):
        llm.generate("a", [{"temperature": 0}])
    assert llm.generate([]) == []


def test_prompt_dicts(make):
    llm = make("x")
    outputs = llm.generate([{"prompt_token_ids": [5, 6]}, {"prompt": "hi"}])
    assert outputs[0].prompt_token_ids == [5, 6] and outputs[1].prompt == "hi"


def test_without_tokenizer_ids_work_and_text_is_refused(make):
    llm = make(model="qwen2.5-0.5b", load_format="dummy", max_model_len=64)
    assert llm.tokenizer is None and llm.eos_token_ids == {151645, 151643}
    [output] = llm.generate([1, 2, 3], SamplingParams(max_tokens=4, logprobs=0))
    assert output.outputs[0].text == "" and len(output.outputs[0].token_ids) == 4
    token = output.outputs[0].token_ids[0]
    assert output.outputs[0].logprobs[0][token].decoded_token is None
    with pytest.raises(RequestError, match=r"needs a tokenizer.*--tokenizer"):
        llm.generate("text")
    with pytest.raises(RequestError, match="needs a tokenizer"):
        llm.chat([{"role": "user", "content": "hi"}])
    with pytest.raises(RequestError, match="stop needs a tokenizer"):
        llm.generate([1], SamplingParams(stop="x"))


def test_tokenizer_from_elsewhere(make, directory):
    llm = make("yes", model="qwen2.5-0.5b", load_format="dummy", tokenizer=directory)
    assert llm.generate("hello", SamplingParams(max_tokens=1))[0].prompt == "hello"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel_size": 3}, r"--tp 3: 4 attention heads.*valid degrees: 1, 2, 4"),
        ({"tensor_parallel_size": 9}, r"tensor_parallel_size=9 .*--tensor-parallel-size"),
        ({"max_model_len": 129}, r"--max-model-len 129 is over the 128 positions"),
        ({"max_num_seqs": 0}, r"max_num_seqs=0 .* 1 to 8.*--max-num-seqs"),
        ({"dtype": "int8"}, r"dtype='int8' is not one of auto, bfloat16"),
        ({"quantization": "awq"}, r"quantization='awq' is not one of fp8"),
        ({"gpu_memory_utilization": 1.2}, r"gpu_memory_utilization=1.2"),
        ({"shard_of": 8}, r"shard_of=8 works with load_format='dummy' only"),
        ({"model": "gpt-x", "load_format": "dummy"}, r"no preset 'gpt-x'.*qwen2.5-72b"),
        ({"model": None, "load_format": "dummy"}, r"--load-format dummy needs --model"),
        ({"chat_template": "/absent"}, r"--chat-template /absent: no such file"),
    ],
)
def test_impossible_deployments_are_refused(make, options, message):
    with pytest.raises(EngineError, match=message):
        make(**options)


def test_close_is_idempotent_and_final(make):
    llm = make("hello")
    with llm as inside:
        stream = inside.stream([3])
        next(stream)
    assert llm._executor.closed == 1
    llm.close()
    assert llm._executor.closed == 1
    with pytest.raises(EngineError, match="this LLM is closed"):
        llm.stats()
    with pytest.raises(EngineError, match="closed while it was generating"):
        list(stream)
    with pytest.raises(EngineError, match="closed"):
        llm.generate("x")


def test_a_failed_construction_can_be_closed(directory, monkeypatch):
    def create(config, model):
        raise EngineError("no room")

    monkeypatch.setattr("engine.runtime.create_executor", create)
    with pytest.raises(EngineError, match="no room"):
        LLM(directory)


def test_a_second_thread_at_once_is_refused_and_the_first_goes_on(make):
    llm = make(delay=0.002)
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    stream = llm.stream([9], params)
    next(stream)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(llm.generate, [1, 2], params)
        while len(llm._inboxes) < 2 and not first.done():
            time.sleep(0.001)
        with pytest.raises(EngineError, match=r"used by another thread.*AsyncLLM"):
            llm.generate([3], params)
        [output] = first.result()
    assert output.outputs[0].token_ids == expected([1, 2], 60, VOCAB)
    tokens = [t for delta in stream for t in delta.token_ids]
    assert tokens == expected([9], 60, VOCAB)[-len(tokens) :]
    [output] = llm.generate([3], params)  # one after the other is fine
    assert output.outputs[0].token_ids == expected([3], 60, VOCAB)
    assert llm.scheduler.free_slots == 3


def test_abort_by_id(make):
    llm = make("hello world")
    stream = llm.stream("x", SamplingParams(max_tokens=50, ignore_eos=True), request_id="mine")
    next(stream)
    assert llm.abort("mine") and not llm.abort("mine") and not llm.abort("other")
    *_, last = stream
    assert last.finish_reason == "abort" and last.output.request_id == "mine"
    assert llm.scheduler.free_slots == 3


def test_bias_outside_the_vocabulary_is_named(make):
    with pytest.raises(RequestError, match=r"logit_bias\[400\] is outside the vocabulary of 400"):
        make().generate("x", SamplingParams(logit_bias={400: 1.0}))


def test_a_refused_prefill_fails_alone(make):
    llm = make(slots=2)
    llm._executor.refuse = 77
    good, bad = llm.generate([[1, 2], [77]], SamplingParams(max_tokens=5, ignore_eos=True))
    assert good.outputs[0].token_ids == expected([1, 2], 5, VOCAB) and good.error is None
    assert bad.outputs[0].finish_reason == "error" and bad.error == "token 77 is refused"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('{"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}',
         dict(temperature=0.7, top_p=0.8, top_k=20, repetition_penalty=1.05)),
        ('{"do_sample": true, "top_k": 5}', dict(temperature=1.0, top_k=5)),
        ('{"do_sample": false, "temperature": 0.6, "repetition_penalty": 1.1}',
         dict(repetition_penalty=1.1)),
        ("{}", {}),
    ],
)  # fmt: skip
def test_generation_config_is_used_only_when_asked_for(make, tmp_path, caplog, text, found):
    folder = write_model(tmp_path / "model")
    (folder / "generation_config.json").write_text(text)
    with caplog.at_level("INFO", "engine"):
        assert make(model=folder).sampling_defaults == {}
        assert "generation_config" not in caplog.text
        llm = make(model=folder, generation_config="auto")
    assert llm.sampling_defaults == found
    assert "sampling defaults of generation_config.json: " in caplog.text
    llm.generate("x", use_tqdm=False)
    assert llm._executor.params[0][0] == found.get("temperature", 0)
    llm.generate("x", SamplingParams(max_tokens=3), use_tqdm=False)  # given: exactly these
    assert llm._executor.params[0][0] == 0


def test_a_damaged_generation_config_is_named(make, tmp_path):
    folder = write_model(tmp_path / "model")
    (folder / "generation_config.json").write_text('{"temperature": 1, "top_p": 7}')
    with pytest.raises(EngineError, match=r"generation_config.json: top_p=7 .* none ignores"):
        make(model=folder, generation_config="auto")
