"""`engine chat`: a conversation in the terminal. Answers on stdout, all else on stderr.

The KV of the conversation so far stays in its slot: only what a turn adds is prefilled. Ctrl-C ends the
answer, not the program; what was said until then stays part of the conversation.
"""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from engine.console import Parser, command, say
from engine.errors import RequestError
from engine.generate import checked_llm
from engine.options import (
    add_engine_options,
    add_sampling_options,
    engine_config,
    refuse_logprobs,
    sampling_params,
)

if TYPE_CHECKING:
    from engine.llm import LLM
    from engine.outputs import RequestOutput
    from engine.sampling import SamplingParams

COMMANDS = """/reset          forget the conversation
/system TEXT    set the system prompt and forget the conversation; without TEXT the template's own
/exit           leave (also Ctrl-D)
/help           this list
A line that ends in \\ goes on in the next one; \"\"\" begins and ends a text of several lines.
Ctrl-C ends an answer; at the prompt it discards the line."""

_EXAMPLES = """examples:
  engine chat
  engine chat Qwen/Qwen2.5-7B-Instruct --tp 2 --temperature 0.7 --top-p 0.8
"""


def parser() -> Parser:
    """The command line."""
    p = Parser(
        prog="engine chat", usage="%(prog)s [MODEL] [options]",
        description=f"Talk to a model.\n\n{COMMANDS}", epilog=_EXAMPLES,
    )  # fmt: skip
    group = p.add_argument_group("chat")
    group.add_argument("--system-prompt", metavar="TEXT", help="replaces the template's own")
    group.add_argument("--chat-template", metavar="FILE", help="replaces the checkpoint's own")
    group.add_argument("--quiet", action="store_true", help="no progress lines on stderr")
    add_sampling_options(p)
    add_engine_options(p)
    return p


class Interrupt:
    """Ctrl-C while an answer runs sets `hit`, so that no step is cut short; a second one raises."""

    def __init__(self) -> None:
        self.answering = self.hit = False

    def __call__(self, number: int, frame: object) -> None:
        if self.answering and not self.hit:
            self.hit = True
            return
        raise KeyboardInterrupt

    @contextmanager
    def answer(self) -> Iterator[None]:
        self.hit, self.answering = False, True
        try:
            yield
        finally:
            self.answering = False


class Session:
    """A conversation with one model: its messages, and a turn of it."""

    def __init__(
        self, llm: LLM, params: SamplingParams, system: str | None, interrupt: Interrupt
    ) -> None:
        self.llm, self.params, self.system, self.interrupt = llm, params, system, interrupt
        self.messages: list[dict[str, str]] = []
        self.reset()

    def reset(self) -> None:
        """Forget all but the system prompt."""
        self.messages = [] if not self.system else [{"role": "system", "content": self.system}]

    def turn(self, text: str) -> RequestOutput | None:
        """Stream the answer to `text` on stdout. None, and no message added, if it cannot be answered."""
        self.messages.append({"role": "user", "content": text})
        shown: list[str] = []
        try:
            with self.interrupt.answer(), closing(
                self.llm.stream(self.messages, self.params, request_id="chat")
            ) as deltas:  # fmt: skip
                output = None
                for delta in deltas:
                    shown.append(delta.text)
                    sys.stdout.write(delta.text)
                    sys.stdout.flush()
                    if delta.output is not None:
                        output = delta.output
                    elif self.interrupt.hit:
                        self.llm.abort("chat")
        except RequestError as e:
            self.messages.pop()
            say(f"error: {e}" + ("; /reset forgets the conversation" if self.messages else ""))
            return None
        except KeyboardInterrupt:
            self.messages.pop()
            raise
        sys.stdout.write("\n")
        sys.stdout.flush()
        self.messages.append({"role": "assistant", "content": "".join(shown)})
        return output


def read_message(prompt: str) -> str:
    """One message, of several lines if they are joined by \\ or enclosed in triple quotes. EOFError at the end."""
    line = input(prompt)
    more = "... " if prompt else ""
    if line.startswith('"""'):
        lines = [line[3:]]
        while not lines[-1].endswith('"""') or (len(lines) == 1 and line == '"""'):
            lines.append(input(more))
        return "\n".join(lines).removesuffix('"""').strip("\n")
    lines = [line]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(input(more))
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Exit code of the command: see engine.console."""
    return command(parser(), _main, argv)


def _main(args: argparse.Namespace) -> int:
    config = replace(engine_config(args), prefix_caching=True)
    params = sampling_params(args)  # a bad value is refused before the model loads
    refuse_logprobs(params, "in engine generate --json only")
    if not hasattr(args, "max_num_seqs"):
        config = replace(config, max_num_seqs=1)

    def check(llm: LLM) -> None:
        llm.encode_chat([{"role": "user", "content": "hi"}])  # refuses a model that cannot chat
        params = sampling_params(args, llm.sampling_defaults)
        params.check_vocabulary(llm.model_config.vocab_size)

    with checked_llm(config, args, check) as llm:
        interrupt = Interrupt()
        session = Session(llm, sampling_params(args, llm.sampling_defaults), args.system_prompt, interrupt)  # fmt: skip
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, interrupt)  # engine.console.run puts the old one back
        _talk(session)
    return 0


def _talk(session: Session) -> None:
    """Read and answer until /exit or the end of the input."""
    terminal = sys.stdin.isatty()
    if terminal:
        with suppress(ImportError):
            import readline  # noqa: F401  (line editing and history in input())
        say("/help lists the commands; Ctrl-D ends")
    while True:
        try:
            text = read_message("> " if terminal else "")
        except KeyboardInterrupt:
            say("")
            continue
        except EOFError:
            if terminal:
                say("")
            return
        command, _, rest = text.strip().partition(" ")
        if not command:
            continue
        if command in ("/exit", "/quit"):
            return
        if command == "/help":
            say(COMMANDS)
        elif command == "/reset":
            session.reset()
            say("the conversation is forgotten")
        elif command == "/system":
            session.system = rest.strip() or None
            session.reset()
            say("system prompt: " + (session.system or "the template's own"))
        elif command.startswith("/") and command[1:].isalpha() and command.islower():
            say(f"no command {command}; /help lists them")
        else:
            try:
                output = session.turn(text)
            except KeyboardInterrupt:  # a second Ctrl-C, in the middle of a step
                say("interrupted")
                continue
            if output is not None:
                say(_line(output))


def _line(output: RequestOutput) -> str:
    metrics = output.metrics
    assert metrics is not None
    parts = [f"{metrics.prompt_tokens} prompt tokens ({metrics.cached_tokens} cached)"]
    parts.append(f"{metrics.output_tokens} generated")
    if metrics.ttft_s is not None:
        parts.append(f"TTFT {metrics.ttft_s * 1e3:.1f} ms")
    if metrics.decode_tok_s is not None:
        parts.append(f"decode {metrics.decode_tok_s:.1f} tok/s")
    if output.outputs[0].finish_reason == "abort":
        parts.append("interrupted")
    return "[" + ", ".join(parts) + "]"


if __name__ == "__main__":
    sys.exit(main())
