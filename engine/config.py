"""Model and engine configuration: frozen dataclasses, read from HF `config.json` or from presets."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from engine.errors import EngineError

TP_DEGREES = tuple(range(1, 9))

# Keys of config.json that change the maths and that we do not implement: present and active is an error.
_UNSUPPORTED_KEYS = (
    "alibi",
    "partial_rotary_factor",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "num_local_experts",
    "num_experts",
)


@dataclass(frozen=True)
class ModelConfig:
    """One dense decoder: hidden size H, Q heads, KV heads (GQA), head_dim D, intermediate size I, vocabulary V."""

    name: str
    architecture: str  # "Qwen2ForCausalLM" or "LlamaForCausalLM"
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
        if tp > self.num_kv_heads and self.group % (self.num_heads // tp):
            return f"{self.num_heads // tp} query heads per rank straddle groups of {self.group}"
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


@dataclass(frozen=True)
class ShardShape:
    """What one rank holds."""

    tp: int
    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    vocab_size: int  # padded: tp * vocab_size >= the model's vocabulary


_ARCHITECTURES = {"Qwen2ForCausalLM": "qwen2", "LlamaForCausalLM": "llama"}


def from_hf(config: dict, name: str) -> ModelConfig:
    """ModelConfig from the dict of an HF `config.json`. Raises EngineError for what we do not implement."""
    archs = config.get("architectures") or []
    arch = (
        archs[0]
        if archs
        else {v: k for k, v in _ARCHITECTURES.items()}.get(config.get("model_type", ""), "")
    )
    if arch not in _ARCHITECTURES:
        known = ", ".join(_ARCHITECTURES)
        raise EngineError(
            f"{name}: architecture {arch or config.get('model_type')!r} is not supported; supported: {known}"
        )
    missing = [
        k
        for k in (
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "intermediate_size",
            "vocab_size",
        )
        if k not in config
    ]
    if missing:
        raise EngineError(f"{name}: config.json lacks {', '.join(missing)}")
    if config.get("hidden_act", "silu") != "silu":
        raise EngineError(
            f"{name}: hidden_act {config['hidden_act']!r} is not supported; supported: silu"
        )
    active = [k for k in _UNSUPPORTED_KEYS if config.get(k)]
    if active:
        raise EngineError(
            f"{name}: config.json sets {', '.join(active)}, which this engine does not implement"
        )
    if config.get("use_sliding_window") or (
        arch == "LlamaForCausalLM" and config.get("sliding_window")
    ):
        raise EngineError(
            f"{name}: sliding-window attention is active in config.json and is not implemented"
        )
    if config.get("mlp_bias"):
        raise EngineError(f"{name}: mlp_bias is not implemented")
    if arch == "LlamaForCausalLM" and config.get("attention_bias"):
        raise EngineError(
            f"{name}: Llama with attention_bias (a bias on o_proj too) is not implemented"
        )
    # transformers 5 writes rope_parameters; older files rope_theta and rope_scaling.
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type != "default":
        raise EngineError(
            f"{name}: rope scaling {rope_type!r} is not supported; supported: default"
        )
    heads = config["num_attention_heads"]
    eos = config.get("eos_token_id")
    result = ModelConfig(
        name=name,
        architecture=arch,
        hidden_size=config["hidden_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        intermediate_size=config["intermediate_size"],
        vocab_size=config["vocab_size"],
        rope_theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
        rms_norm_eps=config.get("rms_norm_eps", 1e-6),
        max_position_embeddings=config.get("max_position_embeddings", 2048),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        attention_bias=arch == "Qwen2ForCausalLM",
        checkpoint_dtype=str(config.get("dtype") or config.get("torch_dtype") or "bfloat16"),
        eos_token_ids=tuple(eos) if isinstance(eos, list) else (eos,) if eos is not None else (),
    )
    if result.num_heads % result.num_kv_heads:
        raise EngineError(
            f"{name}: {heads} attention heads are not a multiple of {result.num_kv_heads} KV heads"
        )
    if result.head_dim % 16 or result.head_dim > 256:
        raise EngineError(f"{name}: head_dim {result.head_dim} is not a multiple of 16 up to 256")
    return result


def from_dir(path: str | Path) -> ModelConfig:
    """ModelConfig of a local HF model directory."""
    file = Path(path) / "config.json"
    if not file.is_file():
        raise EngineError(
            f"{path}: no config.json; --model takes a Hugging Face model directory or hub id"
        )
    try:
        return from_hf(json.loads(file.read_text()), name=Path(path).name)
    except json.JSONDecodeError as e:
        raise EngineError(f"{file} is not valid JSON: {e}") from None


def _qwen(
    name: str, h: int, layers: int, heads: int, kv: int, inter: int, vocab: int, tied: bool
) -> ModelConfig:
    return ModelConfig(
        name=name,
        architecture="Qwen2ForCausalLM",
        hidden_size=h,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv,
        head_dim=h // heads,
        intermediate_size=inter,
        vocab_size=vocab,
        rope_theta=1e6,
        rms_norm_eps=1e-6,
        max_position_embeddings=32768,
        tie_word_embeddings=tied,
        attention_bias=True,
        eos_token_ids=(151645, 151643),
    )


PRESETS: dict[str, ModelConfig] = {
    c.name: c
    for c in (
        _qwen("qwen2.5-0.5b", 896, 24, 14, 2, 4864, 151936, True),
        _qwen("qwen2.5-1.5b", 1536, 28, 12, 2, 8960, 151936, True),
        _qwen("qwen2.5-3b", 2048, 36, 16, 2, 11008, 151936, True),
        _qwen("qwen2.5-7b", 3584, 28, 28, 4, 18944, 152064, False),
        _qwen("qwen2.5-14b", 5120, 48, 40, 8, 13824, 152064, False),
        _qwen("qwen2.5-32b", 5120, 64, 40, 8, 27648, 152064, False),
        _qwen("qwen2.5-72b", 8192, 80, 64, 8, 29568, 152064, False),
    )
}


def preset(name: str) -> ModelConfig:
    """A named Qwen2.5 shape for `--load-format dummy`."""
    key = name.lower().removeprefix("qwen/").removesuffix("-instruct")
    if key not in PRESETS:
        raise EngineError(
            f"no preset {name!r} for --load-format dummy; presets: {', '.join(PRESETS)}"
        )
    return PRESETS[key]


def with_layers(config: ModelConfig, layers: int) -> ModelConfig:
    """The same shape with another depth (tests and benchmarks)."""
    return replace(config, num_layers=layers)


DTYPES = {  # accepted spelling -> torch dtype name; "auto" is the checkpoint's (bf16 as fp32 on CPUs without it)
    "auto": "auto",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "float16": "float16",
    "fp16": "float16",
    "half": "float16",
    "float32": "float32",
    "float": "float32",
    "fp32": "float32",
}


def parse_count(text: str | int) -> int:
    """A whole number as people write it: 32768, 32k (1000), 32K (1024), 1.5M. Raises EngineError."""
    text = str(text).strip()
    scale = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
    unit = scale.get(text[-1:], 1)
    try:
        value = float(text[:-1]) * unit if unit > 1 else int(text)
    except ValueError:
        raise EngineError(f"{text!r} is not a whole number such as 32768, 32k or 32K") from None
    if value != int(value):
        raise EngineError(f"{text!r} is {value}, not a whole number")
    return int(value)


def _option(default, help: str, *, flags: tuple[str, ...] = (), **extra):
    """A field from which the command lines are generated: help text, further spellings of the flag."""
    return field(default=default, metadata={"help": help, "flags": flags, **extra})


@dataclass(frozen=True)
class EngineConfig:
    """How one engine is deployed. Raises EngineError for a value that can never work, naming field and flag."""

    model: str | None = _option(
        None,
        "Hugging Face model directory or hub id; a preset such as qwen2.5-7b with --load-format "
        "dummy; default: the demo model",
        flags=("--model-path", "-m"),
    )
    tokenizer: str | None = _option(
        None, "directory of the tokenizer, if not the model's", flags=("--tokenizer-path",)
    )
    tensor_parallel_size: int = _option(
        1, "GPUs that one model is split over", flags=("-tp", "--tp", "--tp-size", "--tp_size")
    )
    dtype: str = _option(
        "auto", "type of weights and activations", choices=tuple(DTYPES), metavar="DTYPE"
    )
    quantization: str | None = _option(
        None,
        "fp8: e4m3 weights with one scale per output channel, 16-bit activations",
        flags=("-q", "--model-format"),
        choices=("fp8",),
    )
    load_format: str = _option(
        "auto",
        "dummy: seeded random weights made on the device",
        choices=("auto", "safetensors", "dummy"),
    )
    device: str = _option("auto", "auto takes CUDA if it is there", choices=("auto", "cpu", "cuda"))
    max_model_len: int | None = _option(
        None,
        "longest prompt + answer in tokens; default: the model's own limit or what memory holds",
        flags=(
            "--context-length",
            "--session-len",
            "--max_seq_len",
            "--max-seq-len-override",
            "-c",
        ),
        metavar="N|32k",
    )
    max_num_seqs: int = _option(
        8,
        "requests in flight at once (KV slots), 1 to 8",
        flags=("--max-running-requests", "--max_batch_size"),
    )
    # The share is of TOTAL memory. Flags of other engines that mean a share of FREE memory are
    # not accepted as aliases.
    gpu_memory_utilization: float = _option(
        0.9,
        "share of each GPU's total memory that the engine may use",
        flags=("--mem-fraction-static", "--memory-ratio"),
    )
    seed: int = _option(
        0, "seed of dummy weights and of sampling without its own seed", flags=("--random-seed",)
    )
    enforce_eager: bool = _option(
        False,
        "launch kernels one by one instead of CUDA graphs (for debugging)",
        flags=("--disable-cuda-graph",),
    )
    virtual_ranks: bool = _option(
        False, "allow more ranks than GPUs: several share one (correct, not fast)"
    )
    shard_of: int | None = _option(
        None,
        "give each rank the shard shapes of this TP degree (benchmarks on fewer GPUs; dummy only)",
        choices=(2, 4, 8),
    )

    def __post_init__(self) -> None:
        def refuse(name: str, value: object, what: str) -> None:
            flag = "--" + name.replace("_", "-")
            raise EngineError(f"{name}={value!r} {what}; set {flag}")

        for name, low, high in (
            ("tensor_parallel_size", TP_DEGREES[0], TP_DEGREES[-1]),
            ("max_num_seqs", 1, 8),
            ("max_model_len", 1, 2**31 - 1),
            ("seed", 0, 2**31 - 1),
        ):
            value = getattr(self, name)
            if value is None and name == "max_model_len":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                refuse(name, value, f"is not a whole number from {low} to {high}")
        for f in fields(self):
            value, choices = getattr(self, f.name), f.metadata.get("choices")
            if choices and value not in choices and not (value is None and f.default is None):
                refuse(f.name, value, f"is not one of {', '.join(map(str, choices))}")
        share = self.gpu_memory_utilization
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share <= 1:
            refuse("gpu_memory_utilization", share, "is not a share in (0, 1]")
        if self.shard_of and self.load_format != "dummy":
            refuse("shard_of", self.shard_of, "works with load_format='dummy' only")
        object.__setattr__(self, "dtype", DTYPES[self.dtype])
