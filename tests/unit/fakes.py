"""Stand-ins for the front's tests: an executor that checks its caller, and small tokenizers."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from engine.sampling import GREEDY

VOCAB = 97


def next_token(history: Sequence[int], vocab: int = VOCAB, seed: int = 0) -> int:
    """A deterministic function of everything the slot has seen, so that a mixed-up slot shows."""
    state = 17 + seed
    for token in history:
        state = (state * 1103515245 + token * 12345 + 6789) % 2147483647
    return state % vocab


def expected(prompt: Sequence[int], count: int, vocab: int = VOCAB, seed: int = 0) -> list[int]:
    """The first `count` tokens that a request must get whatever runs beside it."""
    history = list(prompt)
    for _ in range(count):
        history.append(next_token(history, vocab, seed))
    return history[len(prompt) :]


class Terminal(io.StringIO):
    """What is written to it, as to a terminal."""

    def isatty(self):
        return True


class FakeExecutor:
    """Runs steps when they are queued, and raises AssertionError on any breach of the contract."""

    def __init__(
        self,
        num_slots: int = 3,
        max_model_len: int = 64,
        max_in_flight: int = 4,
        vocab: int = VOCAB,
        delay: float = 0.0,
        script: Sequence[int] | None = None,  # tokens to give instead, by answer position
    ) -> None:
        self.num_slots = num_slots
        self.max_model_len = max_model_len
        self.max_in_flight = max_in_flight
        self.vocab = vocab
        self.delay = delay
        self.script = script
        self.history: dict[int, list[int]] = {}
        self.prompt_len: dict[int, int] = {}
        self.params: dict[int, tuple[float, int]] = {}
        self.results: list[list[int]] = []
        self.rows: list[torch.Tensor] = []
        self.next_read = 0
        self.deepest = 0
        self.batches: list[int] = []
        self.prefilled_by: dict[int, int] = {}  # slot -> step
        self.closed = 0
        self.dead = False
        self.lose_handle_at: int | None = None  # the step interrupted as it is queued, once
        self.fail_at: int | None = None  # the read that raises
        self.refuse: int | None = None  # a prompt with this token is refused
        self.cached = 0  # prompt tokens not prefilled again
        self.interrupt_at: int | None = None  # the read that is interrupted, once

    def _token(self, slot: int) -> int:
        history = self.history[slot]
        assert len(history) <= self.max_model_len, "a step past the context"
        done = len(history) - self.prompt_len[slot]
        if self.script is not None:
            return self.script[done % len(self.script)]
        return next_token(history, self.vocab, self.params[slot][1])

    def _logits(self, history: Sequence[int], token: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(next_token(history, 10**6))
        row = torch.randn(self.vocab, generator=generator)
        row[token] = 5.0  # the arg-max
        return row

    def _queue(self, slots: Sequence[int]) -> int:
        tokens, rows = [], []
        for slot in slots:
            token = self._token(slot)
            rows.append(self._logits(self.history[slot], token))
            self.history[slot].append(token)
            tokens.append(token)
        self.results.append(tokens)
        self.rows.append(torch.stack(rows))
        if self.lose_handle_at == len(self.results) - 1:
            self.lose_handle_at = None
            raise KeyboardInterrupt
        self.deepest = max(self.deepest, len(self.results) - self.next_read)
        assert len(self.results) - self.next_read <= self.max_in_flight + 1, "too far ahead"
        return len(self.results) - 1

    def prefill(self, slot, token_ids, start=0, draw=GREEDY):
        assert 0 <= slot < self.num_slots and len(token_ids) > 0
        if self.refuse and self.refuse in token_ids:
            from engine.errors import RequestError

            raise RequestError(f"token {self.refuse} is refused")
        kept = self.history.get(slot, [])[:start]
        # The last token that a slot produced was never processed: its KV is not there.
        assert start == 0 or start < len(self.history[slot]), "KV that the slot does not hold"
        self.cached += start
        # The slot's staging memory is in use until its last prefill has run.
        assert self.prefilled_by.get(slot, -1) < self.next_read, "the slot's prefill is unread"
        self.prefilled_by[slot] = len(self.results)
        self.history[slot] = [*kept, *token_ids]
        self.prompt_len[slot] = len(self.history[slot])
        self.params[slot] = (draw.temperature, draw.seed if draw.temperature else 0)
        return self._queue([slot])

    def decode(self, slots):
        assert slots and list(slots) == sorted(set(slots)) and set(slots) <= set(self.history)
        self.batches.append(len(slots))
        return self._queue(slots)

    def read(self, step):
        assert step == self.next_read, "steps must be read in order, once each"
        if self.delay:
            time.sleep(self.delay)
        if self.interrupt_at == step:
            self.interrupt_at = None
            raise KeyboardInterrupt
        if self.fail_at == step:
            from engine.errors import DeviceError

            raise DeviceError("rank 1: NaN logits")
        self.next_read += 1
        return self.results[step]

    def logits(self, step):
        assert step == len(self.results) - 1 == self.next_read - 1, "a later step was queued"
        return self.rows[step]

    def prompt_logits(self, slot, token_ids):
        assert self.next_read == len(self.results), "steps are in flight"
        ids = list(token_ids)
        following = [*ids[1:], 0]
        return torch.stack([self._logits(ids[: i + 1], following[i]) for i in range(len(ids))])

    def recover(self):
        if self.dead:
            raise RuntimeError("CUDA error: unspecified launch failure")
        self.next_read = len(self.results)
        self.history.clear()

    def close(self):
        self.closed += 1

    def stats(self):
        return {"roof": {"bytes_per_token": 4_000_000, "copy_bandwidth": None}}


CORPUS = [
    "The quick brown fox jumps over the lazy dog. The capital of France is Paris.",
    "hello world, hello there; def main(): return 42\n\tprint('hi')\n",
    "你好、世界。今天天气很好。日本語のテキスト。",
    "emoji 👩‍👩‍👧 🎉🎉 and combining é ñ",
]

CHATML = (
    "{% if messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a test assistant.<|im_end|>\n' }}{% endif %}"
    "{% if tools %}{{ '<tools>' + (tools | tojson) + '</tools>\n' }}{% endif %}"
    "{% for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write_byte_level(path: Path, *, vocab_size: int = 400, **config) -> Path:
    """A directory with a byte-level BPE tokenizer (as Qwen's) and a ChatML template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.enable_truncation(5)  # trainers leave such settings behind; they must not apply
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": {"content": "<|im_end|>", "__type": "AddedToken"},
        "chat_template": CHATML,
        **config,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


def write_sentencepiece(path: Path, **config) -> Path:
    """A directory with a SentencePiece-like BPE with byte fallback (as Llama 2's)."""
    from tokenizers import Tokenizer, decoders, models, normalizers, processors

    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    tokens += ["▁", "a", "b", "é", "▁a", "ab", "▁ab"]
    vocab = {t: i for i, t in enumerate(tokens)}
    merges = [("▁", "a"), ("a", "b"), ("▁a", "b")]
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>")
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        **config,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


def imported_by(code: str, *modules: str) -> list[str]:
    """Which of these modules a fresh process has imported once it has run `code`."""
    code += f"\nimport sys; print('imported', *[m for m in {modules} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[-1].split()[1:]


def write_model(path: Path, *, positions: int = 128, **tokenizer_config) -> Path:
    """A directory that looks like a checkpoint to everything but the weight loader."""
    write_byte_level(path, **tokenizer_config)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
        "vocab_size": 400,
        "max_position_embeddings": positions,
        "eos_token_id": 0,
    }
    (path / "config.json").write_text(json.dumps(config))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2]}))
    return path
