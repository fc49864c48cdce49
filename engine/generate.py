"""`python -m engine.generate`: answer prompts from the command line.

Text streams on stdout; everything else, the last line with the speed included, goes to stderr.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Generator
from contextlib import closing, nullcontext
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from engine.batch import (
    Item,
    at,
    check_ids,
    check_requests,
    open_output,
    read_items,
    read_output,
    read_text,
    read_texts,
    request_hashes,
    run_batch,
)
from engine.console import Parser, command, json_line, say
from engine.errors import EngineError, RequestError
from engine.options import (
    add_engine_options,
    add_sampling_options,
    count,
    engine_config,
    refuse_logprobs,
    sampling_params,
)
from engine.prompts import check_token_ids, naming
from engine.request import admit
from engine.roof import roof_share

if TYPE_CHECKING:
    from engine.config import EngineConfig
    from engine.llm import LLM
    from engine.outputs import Delta, RequestOutput
    from engine.sampling import SamplingParams

DEFAULT_MAX_TOKENS = 256

_DESCRIPTION = f"""Answer prompts. Text streams on stdout; all else goes to stderr.
Without --max-tokens an answer ends after {DEFAULT_MAX_TOKENS} tokens at the latest."""

_EXAMPLES = """examples:
  python -m engine.generate --prompt "Why is the sky blue?"
  python -m engine.generate --model Qwen/Qwen2.5-7B-Instruct --tp 2 --prompt - < question.txt
  python -m engine.generate --model qwen2.5-72b --load-format dummy --quantization fp8 --tp 2 \\
      --input-len 512 --max-tokens 256 --ignore-eos
"""


def parser() -> Parser:
    """The command line; engine and sampling options come from their dataclasses."""
    p = Parser(
        prog="python -m engine.generate", usage="%(prog)s [MODEL] --prompt TEXT [options]",
        description=_DESCRIPTION, epilog=_EXAMPLES,
    )  # fmt: skip
    group = p.add_argument_group("prompt")
    group.add_argument(
        "--prompt", "-p", action="append", metavar="TEXT",
        help="what to answer, `-` reads stdin (repeatable: answered together)",
    )  # fmt: skip
    group.add_argument(
        "--prompt-file", action="append", metavar="FILE",
        help="a prompt from a file (repeatable); .jsonl: one JSON object a line with prompt, messages "
        "or prompt_token_ids, and sampling fields of its own",
    )  # fmt: skip
    group.add_argument(
        "--prompt-lines", action="store_true", help="every line of a --prompt-file is a prompt"
    )
    group.add_argument(
        "--input-len", type=count, metavar="N", help="a prompt of N random token ids instead"
    )
    group.add_argument("--system-prompt", metavar="TEXT", help="replaces the template's own")
    group.add_argument("--chat-template", metavar="FILE", help="replaces the checkpoint's own")
    group.add_argument(
        "--no-chat-template", "--ignore-chat-template", action="store_true",
        help="give the text to the model as it is",
    )  # fmt: skip
    group = p.add_argument_group("output")
    group.add_argument(
        "--json", action="store_true", help="one JSON object per prompt on stdout, no streaming"
    )
    group.add_argument(
        "--output", metavar="FILE",
        help="append results as JSON Lines; prompts whose id the file holds already are skipped",
    )  # fmt: skip
    group.add_argument("--dump-graph", action="store_true",
                       help="print the graph after each compiler pass and exit")  # fmt: skip
    group.add_argument("--quiet", action="store_true", help="no progress lines on stderr")
    add_sampling_options(p)
    add_engine_options(p)
    return p


def main(argv: list[str] | None = None) -> int:
    """Exit code of the command: see engine.console."""
    return command(parser(), _main, argv)


def _main(args: argparse.Namespace) -> int:
    config = engine_config(args)
    params = sampling_params(args)
    if args.dump_graph:
        from engine.resolve import resolve

        config, model, _ = resolve(config)
        from engine.graph import dump_graph
        from engine.graph.ir import allowed_algorithms

        fp8 = config.fp8_prefill(config.quantization, cuda=config.device != "cpu")
        print(
            dump_graph(
                model, config.tensor_parallel_size, config.quantization, fp8_prefill=fp8,
                fp8_kv=config.fp8_kv, shard_of=config.shard_of,
                algorithms=allowed_algorithms(config.all_reduce),
            )
        )  # fmt: skip
        return 0
    if (
        args.output
        or args.prompt_lines
        or any(f.endswith(".jsonl") for f in args.prompt_file or [])
    ):
        return _batch(args, config)
    if not args.json:
        refuse_logprobs(params, "only with --json or --output")
    prompts = _read_prompts(args)
    encoded: list[dict[str, Any]] = []
    encode_s = 0.0

    def encode(llm: LLM) -> None:
        nonlocal encode_s
        begin = time.perf_counter()
        encoded.extend(_encode(llm, args, prompt) for prompt in prompts)
        encode_s = time.perf_counter() - begin
        params = sampling_params(args, llm.sampling_defaults)
        for i, prompt in enumerate(encoded):
            with naming(i, len(encoded)):
                _check(llm, prompt, params)

    with checked_llm(config, args, encode) as llm:
        arrival = time.perf_counter() - encode_s  # TTFT has the encoding in it
        params = sampling_params(args, llm.sampling_defaults)
        limits = [_limited(llm, params, p) for p in encoded]
        with closing(llm.stream_many(encoded, limits, arrival=arrival)) as updates:
            outputs = _show(llm, updates, len(encoded), args)
        stats = llm.stats()
        if args.json:
            for output in outputs:
                print(json_line(_as_json(output, llm, stats), sys.stdout))
        sys.stdout.flush()
        if llm.tokenizer is None and not args.json:
            ids = sum(len(o.outputs[0].token_ids) for o in outputs)
            say(
                f"{ids} token ids generated; without a tokenizer there is no text (--json has them)"
            )
        say(_summary(outputs, stats))
    return 0


def checked_llm(
    config: EngineConfig, args: argparse.Namespace, check: Callable[[LLM], None]
) -> LLM:
    """An LLM; `check` sees it before its weights are loaded, and refuses by raising."""
    from engine.llm import LLM

    class Checked(LLM):
        def _before_loading(self) -> None:
            check(self)

    return Checked(**asdict(config), chat_template=args.chat_template)


def _batch(args: argparse.Namespace, config: EngineConfig) -> int:
    """Prompts of files as JSON Lines in, results as JSON Lines out."""
    common = sampling_params(args)
    if args.input_len is not None or not (args.prompt or args.prompt_file):
        raise EngineError("--output, --prompt-lines and .jsonl files need prompts, not --input-len")
    texts = read_texts(args.prompt or [])
    items = [Item(f"prompt:{n}", f"--prompt {n}", "prompt", t, {}) for n, t in enumerate(texts, 1)]
    for name in args.prompt_file or []:
        items += read_items(name, args.prompt_lines, common)
    check_ids(items)
    template = (args.chat_template, args.no_chat_template, args.system_prompt)
    asked = (config.model, config.quantization, asdict(common), template)
    hashes = request_hashes(items, asked)
    held, length = None, 0
    if args.output:
        done, length = read_output(args.output, hashes)
        total = len(items)
        items = [item for item in items if item.id not in done]
        held = total - len(items)
        if held:
            say(f"{held} of {total} results are in {args.output} already")
        if not items:
            return 0
    prompts: list[dict[str, Any]] = []

    def check(llm: LLM) -> None:
        params = sampling_params(args, llm.sampling_defaults)
        for item in items:
            with at(item.where):
                if item.source == "prompt":
                    prompt = _encode(llm, args, item.value)
                elif item.source == "messages":
                    prompt = _ids(*llm.encode_chat(item.value))
                else:
                    prompt = {"prompt_token_ids": item.value}
                _check(llm, prompt, replace(params, **item.sampling))
                prompts.append(prompt)

    with checked_llm(config, args, check) as llm:
        params = sampling_params(args, llm.sampling_defaults)
        limits = [_limited(llm, replace(params, **i.sampling), p) for i, p in zip(items, prompts)]
        check_requests(llm, items, prompts, limits)
        stats = llm.stats()
        opened = open_output(args.output, length) if args.output else nullcontext(sys.stdout)
        with opened as stream:
            outputs = run_batch(
                llm, items, prompts, limits, lambda o: _as_json(o, llm, stats), stream, hashes,
                held=held, quiet=args.quiet,
            )  # fmt: skip
        say(_summary(outputs, stats))
    return 0


def _check(llm: LLM, prompt: dict[str, Any], params: SamplingParams) -> None:
    """RequestError for what can be known before the weights are loaded; what memory holds is not."""
    vocab = llm.model_config.vocab_size
    ids = check_token_ids(prompt["prompt_token_ids"], vocab)
    limit = llm.config.max_model_len or llm.model_config.max_position_embeddings
    admit(len(ids), params, limit, llm.model_config.longest_context)
    params.check_tokenizer(llm.tokenizer is not None)
    params.check_vocabulary(vocab)
    params.controls((), vocab)


def _limited(llm: LLM, params: SamplingParams, prompt: dict[str, Any]) -> SamplingParams:
    """With the command line's default length where none is given, clipped to the context."""
    if params.max_tokens is not None:
        return params
    room = llm.max_model_len - len(prompt["prompt_token_ids"])  # none: refused later
    return replace(params, max_tokens=max(1, min(room, max(DEFAULT_MAX_TOKENS, params.min_tokens))))


def _read_prompts(args: argparse.Namespace) -> list[str | None]:
    """Texts in the order given, --prompt before --prompt-file; or None alone, for --input-len."""
    if args.input_len is None:
        if not args.prompt and not args.prompt_file:
            raise EngineError("no prompt: give --prompt TEXT, --prompt - for stdin, or --input-len N")  # fmt: skip
        return [*read_texts(args.prompt or []), *map(read_text, args.prompt_file or [])]
    if args.prompt or args.prompt_file:
        raise EngineError("--input-len is instead of --prompt and --prompt-file: give one of them")
    if args.input_len < 1:
        raise EngineError(f"--input-len {args.input_len} is not a whole number >= 1")
    return [None]


def _encode(llm: LLM, args: argparse.Namespace, prompt: str | None) -> dict[str, Any]:
    """The prompt in the API's dict form, with the chat template applied unless told otherwise."""
    if prompt is None:
        source = random.Random(llm.config.seed)
        vocab = llm.model_config.vocab_size
        return {"prompt_token_ids": [source.randrange(vocab) for _ in range(args.input_len)]}
    tokenizer = llm.need_tokenizer("a text prompt")
    if args.no_chat_template or tokenizer.template is None:
        if args.system_prompt is not None:
            raise RequestError("--system-prompt needs a chat template, and none is in use here")
        if not args.no_chat_template:
            say("this checkpoint has no chat template: the prompt goes in as it is")
        return _ids(prompt, tokenizer.encode(prompt))
    messages = [{"role": "user", "content": prompt}]
    if args.system_prompt is not None:
        messages.insert(0, {"role": "system", "content": args.system_prompt})
    return _ids(*llm.encode_chat(messages))


def _ids(text: str, ids: list[int]) -> dict[str, Any]:
    return {"prompt": text, "prompt_token_ids": ids}


def _show(
    llm: LLM, updates: Generator[tuple[int, Delta]], count: int, args: argparse.Namespace
) -> list[RequestOutput]:
    """Print the answers in order as they come; those that run ahead of their turn are kept back."""
    outputs: dict[int, RequestOutput] = {}
    kept = [""] * count
    turn = 0
    stream = llm.tokenizer is not None and not args.json
    begun = False  # whether the answer whose turn it is has shown anything
    try:
        for i, delta in updates:
            kept[i] += delta.text
            if delta.output is not None:
                outputs[i] = delta.output
            while stream and turn < count and (kept[turn] or turn in outputs):
                if not begun and count > 1:
                    say(f"[{turn + 1}/{count}]")
                begun = True
                sys.stdout.write(kept[turn])
                kept[turn] = ""
                if turn not in outputs:
                    break
                sys.stdout.write("\n")
                turn, begun = turn + 1, False
            if stream and delta.text:
                sys.stdout.flush()
    except KeyboardInterrupt:
        if begun:
            sys.stdout.write("\n")
            sys.stdout.flush()
        raise
    return [outputs[i] for i in range(count)]


def answer_share(output: RequestOutput, stats: dict[str, Any]) -> float | None:
    """Share of the roof of one answer, at its mean context."""
    metrics = output.metrics
    if metrics is None:
        return None
    context = metrics.prompt_tokens + metrics.output_tokens / 2
    return roof_share(stats.get("roof"), context, metrics.tpot_s)


def _summary(outputs: list[RequestOutput], stats: dict[str, Any]) -> str:
    """The last line: prompt tokens, TTFT, decode rate and share of the bandwidth roof."""
    metrics = [o.metrics for o in outputs if o.metrics is not None]
    prompt_tokens = sum(m.prompt_tokens for m in metrics)
    output_tokens = sum(m.output_tokens for m in metrics)
    ttft = sorted(m.ttft_s for m in metrics if m.ttft_s is not None)
    failed = [o.error for o in outputs if o.error is not None]
    parts = [f"{prompt_tokens} prompt tokens", f"{output_tokens} generated"]
    if len(outputs) == 1:
        if ttft:
            parts.append(f"TTFT {ttft[0] * 1e3:.1f} ms")
        rate = metrics[0].decode_tok_s
        if rate is not None:
            parts.append(f"decode {rate:.1f} tok/s")
        share = answer_share(outputs[0], stats)
        if share is not None:
            parts.append(f"{share:.0%} of the bandwidth roof")
    else:
        parts.insert(0, f"{len(outputs)} prompts")
        if ttft:
            parts.append(f"median TTFT {ttft[len(ttft) // 2] * 1e3:.1f} ms")
        total = max(m.total_s for m in metrics)
        parts.append(f"{output_tokens / total:.1f} tok/s together")
    if failed:
        parts.append(f"{len(failed)} failed: {failed[0]}")
    return ", ".join(parts)


def _as_json(output: RequestOutput, llm: LLM, stats: dict[str, Any]) -> dict[str, Any]:
    [answer] = output.outputs
    metrics = output.metrics
    assert metrics is not None
    result: dict[str, Any] = {
        "model": llm.model_config.name,
        "tensor_parallel_size": llm.config.tensor_parallel_size,
        "quantization": llm.config.quantization,
        "device": stats.get("device"),
        "prompt": output.prompt,
        "prompt_token_ids": output.prompt_token_ids,
        "text": answer.text,
        "token_ids": answer.token_ids,
        "finish_reason": answer.finish_reason,
        "stop_reason": answer.stop_reason,
        **({} if output.error is None else {"error": output.error}),
        "metrics": {
            **asdict(metrics),
            "decode_tok_s": metrics.decode_tok_s,
            "roof_share": answer_share(output, stats),
            "startup_s": stats.get("startup_s"),
        },
    }
    for name, entries in (
        ("logprobs", answer.logprobs),
        ("prompt_logprobs", output.prompt_logprobs),
    ):
        if entries is not None:
            result[name] = [
                e if e is None else {str(t): asdict(p) for t, p in e.items()} for e in entries
            ]
    return result


if __name__ == "__main__":
    sys.exit(main())
