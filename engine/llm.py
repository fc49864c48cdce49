"""LLM: the public Python API, in the de facto shape (generate, chat, stream)."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.config import EngineConfig
from engine.errors import EngineError, RequestError
from engine.generation_config import sampling_defaults
from engine.outputs import Delta, RequestOutput
from engine.prompts import Prompt, as_batch, check_token_ids, naming, one_each
from engine.request import Request
from engine.resolve import load_tokenizer, resolve
from engine.sampling import MAX_SEED, SamplingParams
from engine.scheduler import Scheduler

if TYPE_CHECKING:
    from engine.text.tokenizer import Tokenizer

Messages = Sequence[Mapping[str, Any]]  # one conversation


class LLM:
    """A model ready to answer. Use it as a context manager, or call close().

    Arguments are the fields of EngineConfig, plus chat_template, a file that replaces the
    checkpoint's. Raises EngineError (CheckpointError) for what cannot be served, before any GPU
    work. Where a call gives no sampling_params, those of `sampling_defaults` apply (none unless
    generation_config is "auto"). One thread at a time (AsyncLLM serves asyncio); several stream() iterators may be open and share decode steps.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        tokenizer: str | Path | None = None,
        tensor_parallel_size: int = 1,
        dtype: str = "auto",
        quantization: str | None = None,
        prefill_activations: str = "auto",
        kv_cache_dtype: str = "auto",
        load_format: str = "auto",
        device: str = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int = 8,
        gpu_memory_utilization: float = 0.9,
        generation_config: str = "none",
        prefix_caching: bool = False,
        seed: int = 0,
        enforce_eager: bool = False,
        lazy_graphs: bool = False,
        virtual_ranks: bool = False,
        all_reduce: str = "auto",
        shard_of: int | None = None,
        chat_template: str | Path | None = None,
    ) -> None:
        self._closed = True  # until there is something to close
        config = EngineConfig(
            model=None if model is None else str(model),
            tokenizer=None if tokenizer is None else str(tokenizer),
            tensor_parallel_size=tensor_parallel_size,
            dtype=dtype,
            quantization=quantization,
            prefill_activations=prefill_activations,
            kv_cache_dtype=kv_cache_dtype,
            load_format=load_format,
            device=device,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            gpu_memory_utilization=gpu_memory_utilization,
            generation_config=generation_config,
            prefix_caching=prefix_caching,
            seed=seed,
            enforce_eager=enforce_eager,
            lazy_graphs=lazy_graphs,
            virtual_ranks=virtual_ranks,
            all_reduce=all_reduce,
            shard_of=shard_of,
        )
        self.config, self.model_config, directory = resolve(config)
        self.tokenizer = load_tokenizer(self.config, directory, chat_template)
        from engine.text.tokenizer import eos_token_ids

        eos = eos_token_ids(directory, self.model_config, self.tokenizer)
        self.eos_token_ids: frozenset[int] = eos
        # Fields of SamplingParams that the checkpoint sets, under generation_config="auto".
        self.sampling_defaults = sampling_defaults(self.config, directory)
        self._before_loading()
        from engine.runtime import create_executor

        self._executor = create_executor(self.config, self.model_config)
        self._closed = False
        self.scheduler = Scheduler(self._executor, prefix_caching=self.config.prefix_caching)
        self._inboxes: dict[Request, deque[Delta]] = {}
        self._in_use = threading.RLock()  # by the thread that is in the scheduler
        self._count = 0

    def _before_loading(self) -> None:
        """For a subclass that knows its prompts: refuse here, when all but the executor is there."""

    @property
    def max_model_len(self) -> int:
        """Most tokens that a prompt and its answer can have together."""
        return self._executor.max_model_len

    def get_tokenizer(self) -> Tokenizer | None:
        return self.tokenizer

    def stats(self) -> dict[str, Any]:
        """The executor's counters, memory, start-up phases and bandwidth roof."""
        if self._closed:
            raise EngineError("this LLM is closed")
        return self._executor.stats()

    # ---- requests

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | None = None,
    ) -> list[RequestOutput]:
        """Answers in the order of the prompts; text is tokenised as it is, without a chat template.

        One SamplingParams serves all prompts, or give one each. use_tqdm None shows a bar on a
        terminal for more than one prompt. Every prompt is checked before any starts: RequestError
        names the prompt's index. DeviceError if the device fails: all running requests end.
        """
        arrival = time.perf_counter()
        batch = as_batch(prompts)
        return self._complete(self._requests(batch, sampling_params, arrival), use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | None = None,
        *,
        tools: list[dict] | None = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answers to one conversation or several, formatted by the checkpoint's chat template.

        A conversation is a list of {"role", "content"}. Without a system message the template's own
        default applies. tools and chat_template_kwargs go to the template.
        """
        arrival = time.perf_counter()
        one_conversation = bool(messages) and isinstance(messages[0], Mapping)
        batch: list[Any] = [messages] if one_conversation or not messages else list(messages)
        params = one_each(sampling_params, len(batch), self._default_params())
        variables = {"add_generation_prompt": add_generation_prompt, **(chat_template_kwargs or {})}
        requests = []
        for i, (conversation, one) in enumerate(zip(batch, params)):
            with naming(i, len(batch)):
                text, ids = self.encode_chat(conversation, tools=tools, **variables)
                requests.append(self._request(ids, one, arrival, text))
        return self._complete(requests, use_tqdm)

    def stream(
        self,
        prompt: Prompt | Messages,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
    ) -> Generator[Delta]:
        """Deltas of one answer as they become certain; str(delta) is text, the last has `.output`.

        `prompt` is a prompt as for generate(), or a conversation as for chat(). The request is checked
        at once and starts with the first next(); closing the iterator aborts it, and so does
        abort(request_id).
        """
        request = self.make_request(prompt, sampling_params, request_id=request_id)
        return (delta for _, delta in self._indexed([request]))

    def make_request(
        self,
        prompt: Prompt | Messages,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
    ) -> Request:
        """A checked request of a prompt or a conversation, not started. RequestError names what is wrong."""
        arrival = time.perf_counter()
        text = None
        if not isinstance(prompt, (str, Mapping)) and prompt and isinstance(prompt[0], Mapping):
            text, prompt = self.encode_chat(prompt)  # type: ignore[arg-type]
        params = self._default_params() if sampling_params is None else sampling_params
        request = self._request(prompt, params, arrival, text)  # type: ignore[arg-type]
        if request_id is not None:
            request.request_id = request_id
        return request

    def abort(self, request_id: str) -> bool:
        """End the running request of this id where it is; its iterator gets a last delta with
        finish_reason "abort". False if none is running."""
        for request in list(self._inboxes):
            if request.request_id == request_id:
                delta = self.scheduler.abort(request)
                if delta is not None:
                    self._inboxes[request].append(delta)
                    return True
        return False

    def stream_many(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        arrival: float | None = None,
    ) -> Generator[tuple[int, Delta]]:
        """(index of the prompt, delta) of several answers made together, as they become certain.

        arrival: time.perf_counter() when the prompts came, if that was before this call (TTFT).
        """
        since = time.perf_counter() if arrival is None else arrival
        return self._indexed(self._requests(prompts, sampling_params, since))

    def encode_chat(
        self, messages: Messages, *, tools: list[dict] | None = None, **variables: Any
    ) -> tuple[str, list[int]]:
        """(prompt text, token ids) of a conversation. RequestError without tokenizer or template."""
        tokenizer = self.need_tokenizer("chat")
        plain = [dict(m) if isinstance(m, Mapping) else m for m in messages]
        return tokenizer.encode_chat(plain, tools=tools, **variables)

    # ---- inside

    def _default_params(self) -> SamplingParams:
        return SamplingParams(**self.sampling_defaults)

    def need_tokenizer(self, what: str) -> Tokenizer:
        """The tokenizer; RequestError if there is none."""
        if self.tokenizer is None:
            raise RequestError(
                f"{what} needs a tokenizer, and {self.model_config.name} has none here: name a "
                "directory that has one with --tokenizer, or give token ids (`generate --input-len N` makes random ones)"
            )
        return self.tokenizer

    def _requests(self, prompts: Sequence[Prompt], params, arrival: float) -> list[Request]:
        """Requests of all prompts, or a RequestError that names the first bad one's index."""
        requests = []
        default = self._default_params()
        for i, (prompt, one) in enumerate(zip(prompts, one_each(params, len(prompts), default))):
            with naming(i, len(prompts)):
                requests.append(self._request(prompt, one, arrival))
        return requests

    def _request(
        self, prompt: Prompt, params: SamplingParams, arrival: float, text: str | None = None
    ) -> Request:
        if self._closed:
            raise EngineError("this LLM is closed")
        if not isinstance(params, SamplingParams):
            raise RequestError(f"sampling_params is {type(params).__name__}, not SamplingParams")
        if isinstance(prompt, Mapping):
            unknown = set(prompt) - {"prompt", "prompt_token_ids"}
            if unknown or not prompt:
                raise RequestError(
                    f"a prompt dict has 'prompt' or 'prompt_token_ids', not {sorted(unknown)}"
                )
            text = prompt.get("prompt")
            prompt = prompt.get("prompt_token_ids", text)
        if isinstance(prompt, str):
            text, prompt = prompt, self.need_tokenizer("a text prompt").encode(prompt)
        ids = check_token_ids(prompt, self.model_config.vocab_size)
        self._count += 1
        seed = params.seed
        if seed is None:  # reproducible for the same sequence of calls, different for each request
            seed = (self.config.seed * 1_000_003 + self._count) & MAX_SEED
        return Request(
            str(self._count - 1),
            ids,
            params,
            max_model_len=self.max_model_len,
            longest=self.model_config.longest_context,
            eos=self.eos_token_ids,
            tokenizer=self.tokenizer,
            prompt=text,
            seed=seed,
            vocab_size=self.model_config.vocab_size,
            arrival=arrival,
        )

    def _complete(self, requests: list[Request], use_tqdm: bool | None) -> list[RequestOutput]:
        bar = _progress_bar(len(requests), use_tqdm)
        outputs: dict[int, RequestOutput] = {}
        try:
            with self._alone(), closing(self._indexed(requests)) as updates:
                for i, delta in updates:
                    if delta.output is not None:
                        outputs[i] = delta.output
                        if bar is not None:
                            bar.update()
        finally:
            if bar is not None:
                bar.close()
        return [outputs[i] for i in range(len(requests))]

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if not self._in_use.acquire(blocking=False):
            raise EngineError(
                "this LLM is being used by another thread; one at a time, or take AsyncLLM"
            )
        try:
            yield
        finally:
            self._in_use.release()

    def _indexed(self, requests: list[Request]) -> Generator[tuple[int, Delta]]:
        index = {request: i for i, request in enumerate(requests)}
        with closing(self._updates(requests)) as updates:
            for request, delta in updates:
                yield index[request], delta

    def _updates(self, requests: list[Request]) -> Generator[tuple[Request, Delta]]:
        """Turn the scheduler until these requests end; ending the iterator early aborts them."""
        inboxes = self._inboxes
        try:
            with self._alone():
                for request in requests:
                    inboxes[request] = deque()
                    self.scheduler.add(request)
            running = list(requests)
            while running:
                if not any(inboxes[r] for r in running):
                    if self._closed:
                        raise EngineError("this LLM was closed while it was generating")
                    with self._alone():
                        # Steps are shared: what belongs to another iterator goes to its inbox.
                        for request, delta in self.scheduler.step():
                            if request in inboxes:
                                inboxes[request].append(delta)
                for request in list(running):
                    while inboxes[request]:
                        delta = inboxes[request].popleft()
                        if delta.output is not None:
                            running.remove(request)
                        yield request, delta
        finally:
            with self._in_use:
                for request in requests:
                    self.scheduler.abort(request)
                    inboxes.pop(request, None)

    def close(self) -> None:
        """End all requests and give the devices back. Safe to call again."""
        if self._closed:
            return
        self._closed = True
        self.scheduler.abort_all()
        self._executor.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _progress_bar(count: int, wanted: bool | None):
    if not (wanted if wanted is not None else count > 1 and sys.stderr.isatty()):
        return None
    from tqdm import tqdm

    return tqdm(total=count, desc="requests", unit="req", file=sys.stderr)
