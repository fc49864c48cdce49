"""The shape of a model and what each rank of a TP degree holds of it. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from engine.errors import EngineError

TP_DEGREES = tuple(range(1, 9))


@dataclass(frozen=True)
class RopeScaling:
    """How RoPE's frequencies are stretched for long contexts; the formulas are in engine/rope.py."""

    kind: Literal["linear", "llama3", "yarn"]
    factor: float
    original_length: int = 0  # positions of the pre-training (llama3, yarn)
    low_freq_factor: float = 1.0  # llama3: wavelengths over original_length / this are stretched
    high_freq_factor: float = 4.0  # llama3: those under original_length / this are kept
    beta_fast: float = 32.0  # yarn: dimensions with more turns in original_length are kept
    beta_slow: float = 1.0  # yarn: those with fewer turns are stretched
    truncate: bool = True  # yarn: round these two borders to whole dimensions
    attention_factor: float = 1.0  # yarn: cos and sin are multiplied by it


@dataclass(frozen=True)
class ModelConfig:
    """One dense decoder: hidden size H, Q heads, KV heads (GQA), head_dim D, intermediate size I, vocabulary V."""

    name: str
    architecture: str  # one of engine/architectures.py
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rope_theta: float
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool  # biases on q, k, v (Qwen2: yes; never on o_proj)
    qk_norm: bool = False  # RMSNorm over each q and k head in front of RoPE (Qwen3)
    rope_scaling: RopeScaling | None = None
    sliding_window: int | None = None  # keys a token attends to, itself included; None: all
    eos_token_ids: tuple[int, ...] = ()
    checkpoint_dtype: str = "bfloat16"  # what --dtype auto means

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def num_parameters(self) -> int:
        """Parameters of the linear layers, embeddings and norms."""
        h, d = self.hidden_size, self.head_dim
        attn = h * d * (2 * self.num_heads + 2 * self.num_kv_heads)
        layer = attn + 3 * h * self.intermediate_size + 2 * h
        if self.attention_bias:
            layer += d * (self.num_heads + 2 * self.num_kv_heads)
        if self.qk_norm:
            layer += 2 * d
        embeddings = self.vocab_size * h * (1 if self.tie_word_embeddings else 2)
        return self.num_layers * layer + embeddings + h

    def valid_tp(self) -> list[int]:
        """TP degrees 1..8 that this model's heads and intermediate size divide into."""
        return [tp for tp in TP_DEGREES if self._tp_problem(tp) is None]

    def _tp_problem(self, tp: int) -> str | None:
        if tp not in TP_DEGREES:
            return f"a TP degree is 1 to {TP_DEGREES[-1]}"
        if self.num_heads % tp:
            return f"{self.num_heads} attention heads do not divide by {tp}"
        if self.num_kv_heads % tp and tp % self.num_kv_heads:
            return f"{self.num_kv_heads} KV heads neither divide by {tp} nor replicate over it"
        if self.intermediate_size % tp:
            return f"intermediate size {self.intermediate_size} does not divide by {tp}"
        return None

    def shard(self, tp: int) -> ShardShape:
        """Per-rank sizes at TP degree `tp`. Raises EngineError with the valid degrees if it cannot be split."""
        problem = self._tp_problem(tp)
        if problem:
            valid = ", ".join(map(str, self.valid_tp()))
            raise EngineError(
                f"{self.name} cannot run at --tp {tp}: {problem}; valid degrees: {valid}"
            )
        # Each rank's vocabulary shard is the same multiple of 16 rows; rows past the vocabulary are
        # zero weights and can never win the argmax.
        vocab = -(-self.vocab_size // (16 * tp)) * 16
        return ShardShape(
            tp=tp,
            num_heads=self.num_heads // tp,
            num_kv_heads=max(1, self.num_kv_heads // tp),
            intermediate_size=self.intermediate_size // tp,
            vocab_size=vocab,
        )

    def kv_head_of_rank(self, rank: int, tp: int) -> int:
        """First global KV head held by `rank`; a KV head is replicated over tp / num_kv_heads ranks."""
        return rank * self.num_kv_heads // tp

    @property
    def longest_context(self) -> int:
        """The most that --max-model-len can be."""
        return min(
            self.max_position_embeddings, self.sliding_window or self.max_position_embeddings
        )

    def check_context(self, max_model_len: int) -> None:
        """Attention here is always full, which equals sliding-window attention exactly as long as no token
        has more than `sliding_window` keys. Raises EngineError for a longer context."""
        window = self.sliding_window
        if window is not None and max_model_len > window:
            raise EngineError(
                f"{self.name} attends to the last {window} tokens only (sliding window), which is not "
                f"implemented beyond {window} tokens, and the context is {max_model_len}; "
                f"use --max-model-len {window} or less, where full attention is the same"
            )


def read_eos(value: Any, vocab_size: int, where: str) -> tuple[int, ...]:
    """The ids of an `eos_token_id`: null, one id or a list of them. EngineError, with `where` in front, for anything
    else: an id that no token has would let answers run on to the length limit."""
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    whole = all(isinstance(i, int) and not isinstance(i, bool) for i in ids)
    if not ids or not whole or not all(0 <= i < vocab_size for i in ids):
        raise EngineError(
            f"{where}: eos_token_id is {value!r}, neither a token id from 0 to {vocab_size - 1} nor a list of such ids"
        )
    return tuple(ids)


@dataclass(frozen=True)
class ShardShape:
    """What one rank holds."""

    tp: int
    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    vocab_size: int  # padded: tp * vocab_size >= the model's vocabulary
