"""How an engine is deployed (`EngineConfig`); the model's own configuration is re-exported from its files."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields
from pathlib import Path

from engine.architectures import from_dir, from_hf
from engine.errors import EngineError
from engine.model_config import TP_DEGREES, ModelConfig, RopeScaling, ShardShape
from engine.presets import PRESETS, preset, with_layers

__all__ = [
    "DTYPES",
    "PRESETS",
    "TP_DEGREES",
    "EngineConfig",
    "ModelConfig",
    "RopeScaling",
    "ShardShape",
    "from_dir",
    "from_hf",
    "parse_count",
    "preset",
    "with_layers",
]

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
        whole = int(value)
    except (ValueError, OverflowError):  # the latter: an infinity
        raise EngineError(f"{text!r} is not a whole number such as 32768, 32k or 32K") from None
    if value != whole:
        raise EngineError(f"{text!r} is {value}, not a whole number")
    return whole


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
        "fp8: e4m3 weights with one scale per output channel; activations see --prefill-activations",
        flags=("-q", "--model-format"),
        choices=("fp8",),
    )
    prefill_activations: str = _option(
        "auto",
        "what prefill multiplies FP8 weights by, from 49 tokens on (buckets of 64): fp8 with one scale a token, or 16bit "
        "(slower, nearer to BF16); auto: fp8 on GPUs; decode always has 16-bit activations",
        choices=("auto", "fp8", "16bit"),
    )
    kv_cache_dtype: str = _option(
        "auto",
        "fp8: e4m3 K and V with one scale for each token and KV head, made from that token's own values (half "
        "the KV bytes, no calibration; rounds K and V by 2.6 % RMS); auto: the activations' type",
        choices=("auto", "fp8"),
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
    generation_config: str = _option(
        "none",
        "auto: sampling defaults from the checkpoint's generation_config.json; none: greedy",
        choices=("auto", "none"),
    )
    prefix_caching: bool = _option(
        False,
        "start a prompt behind the longest prefix that a free slot still holds (bits may then depend "
        "on what ran before)",
        flags=("--enable-prefix-caching",),
    )
    seed: int = _option(
        0, "seed of dummy weights and of sampling without its own seed", flags=("--random-seed",)
    )
    enforce_eager: bool = _option(
        False,
        "launch kernels one by one instead of CUDA graphs (for debugging)",
        flags=("--disable-cuda-graph",),
    )
    lazy_graphs: bool = _option(
        False,
        "capture the CUDA graph of a prefill bucket when it is first used: faster start, slower first prompt "
        "of each length",
    )
    virtual_ranks: bool = _option(
        False, "allow more ranks than GPUs: several share one (correct, not fast)"
    )
    all_reduce: str = _option(
        "auto",
        "algorithm that sums over ranks; auto: by ranks, message size and links, NCCL where GPUs cannot "
        "reach each other's memory; two_shot: prefill only, decode takes lamport",
        choices=("auto", "lamport", "two_shot", "flag", "nccl"),
    )
    shard_of: int | None = _option(
        None,
        "give each rank the shard shapes of this TP degree (benchmarks on fewer GPUs; dummy only)",
        choices=(2, 4, 8),
    )

    def __post_init__(self) -> None:
        def refuse(name: str, value: object, what: str) -> None:
            flag = "--" + name.replace("_", "-")
            valid = self._valid_degrees() if name == "tensor_parallel_size" else ""
            raise EngineError(f"{name}={value!r} {what}; set {flag}{valid}")

        for name in ("model", "tokenizer"):
            value = getattr(self, name)
            if value is not None and not value.strip():
                refuse(name, value, "is an empty name")
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

    def _valid_degrees(self) -> str:
        """The end of a message: the model's TP degrees, if its shape can be had without fetching anything."""
        from engine.demo import MODEL_FOLDER, cache_dir

        name = self.model or str(cache_dir() / MODEL_FOLDER)
        try:
            if self.load_format == "dummy" and not os.path.isdir(name):
                model = preset(name)
            else:
                model = from_dir(Path(name).expanduser())
        except EngineError:  # told where the model is opened
            return ""
        return f"; valid degrees of {model.name}: {', '.join(map(str, model.valid_tp()))}"

    @property
    def fp8_kv(self) -> bool:
        """Whether the KV cache is e4m3 with scales."""
        return self.kv_cache_dtype == "fp8"

    def fp8_prefill(self, weights: str | None, *, cuda: bool = True) -> bool:
        """Whether long prefills multiply FP8 by FP8; weights: their quantisation, the checkpoint's or --quantization.

        Raises EngineError where it is asked for and the weights are not FP8.
        """
        if self.prefill_activations == "fp8" and weights != "fp8":
            raise EngineError("--prefill-activations fp8 needs FP8 weights; set --quantization fp8")
        if self.prefill_activations == "auto":
            return cuda and weights == "fp8"
        return self.prefill_activations == "fp8"
