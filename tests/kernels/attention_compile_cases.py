"""Child process of test_compile_attention.py: compiles every config the heuristics ship for sm_90, prints JSON."""

from __future__ import annotations

import torch

from engine.kernels import decode_attention as decode
from engine.kernels import prefill_attention as prefill
from engine.kernels import rope_append as rope
from engine.kernels.decode_attention_kernel import decode_attention_kernel, kernel_constants
from tests.kernels.attention_cases import (
    QWEN_7B,
    QWEN_72B_TP8,
    SMOLLM2,
    Heads,
)
from tests.kernels.compile_sm90 import SIGNATURE, Report, compile_sm90, to_json

SHAPES = {
    "7b_tp1": QWEN_7B,
    "72b_tp8": QWEN_72B_TP8,
    "smollm2": SMOLLM2,
    "group16": Heads(16, 1, 128),
    "d256": Heads(8, 1, 256),
}
SM_COUNT = 132
FP8 = torch.float8_e4m3fn


def _pointers(dtype: str, names: str) -> dict[str, str]:
    return {f"{name}_ptr": SIGNATURE[dtype] for name in names.split()}


def _shared_signature(dtype: str, fp8: bool, integers: str, scalars: str) -> dict[str, str]:
    """Types of the arguments that both attention kernels have, and of their own int32 arrays and scalars."""
    caches = _pointers("fp8" if fp8 else dtype, "k v")
    scales = _pointers("fp32", "k_scale v_scale") if fp8 else {}
    arrays = {**_pointers(dtype, "q out"), **caches, **scales, **_pointers("int32", integers)}
    return {**arrays, **{name: "i32" for name in scalars.split()}, "qk_scale": "fp32"}


def _compile(fn, signature: dict[str, str], constants: dict, config, counts: str) -> Report:
    """With PDL; pointers and the named `counts` divisible by 16; a 16-bit cache has no scales."""
    absent = {} if "k_scale_ptr" in signature else {"k_scale_ptr": None, "v_scale_ptr": None}
    return compile_sm90(
        fn,
        signature,
        {**constants, **absent},
        aligned=[n for n in signature if n.endswith("_ptr")] + counts.split(),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        keep_text=True,
        launch_pdl=True,
    )


def compile_decode(
    heads: Heads,
    config: decode.DecodeAttentionConfig,
    dtype: str = "bf16",
    *,
    prefetch: bool,
    fp8: bool = False,
) -> Report:
    """Compile as `decode_attention` launches it with PDL; max_model_len a multiple of 16."""
    signature = _shared_signature(dtype, fp8, "positions row_slots tickets", "max_len max_splits")
    constants = kernel_constants(
        config, heads.num_heads // heads.num_kv_heads, heads.head_dim, prefetch=prefetch, pdl=True
    )
    return _compile(
        decode_attention_kernel,
        {**signature, **_pointers("fp32", "partial stats")},
        constants,
        config,
        "max_len",
    )


def compile_prefill(
    heads: Heads,
    config: prefill.PrefillAttentionConfig,
    dtype: str = "bf16",
    *,
    fp8: bool = False,
) -> Report:
    """Compile as `prefill_attention` launches it with PDL."""
    group = heads.num_heads // heads.num_kv_heads
    constants = prefill.kernel_constants(
        config, heads.num_kv_heads, group, heads.head_dim, pdl=True
    )
    return _compile(
        prefill.prefill_attention_kernel,
        _shared_signature(dtype, fp8, "request", "tokens max_len"),
        constants,
        config,
        "tokens max_len",
    )


def compile_rope(
    heads: Heads, *, norm: bool = False, decode: bool = False, fp8: bool = False
) -> Report:
    """Compile as `rope_append` launches it with PDL; tokens and max_len multiples of 16 in prefill."""
    signature = {
        **_pointers("bf16", "qkv q_out"),
        **_pointers("fp8" if fp8 else "bf16", "k_cache v_cache"),
        **_pointers("fp32", "cos_sin k_scale v_scale" if fp8 else "cos_sin"),
        **_pointers("int32", "where positions" if decode else "where"),
        **(_pointers("bf16", "q_norm k_norm") if norm else {}),
        "eps": "fp32",
        "tokens": "i32",
        "max_len": "i32",
    }
    block_t, block_d = 1 if decode else rope.BLOCK_T, heads.head_dim
    optional = ("positions_ptr", "q_norm_ptr", "k_norm_ptr", "k_scale_ptr", "v_scale_ptr")
    return compile_sm90(
        rope.rope_append_kernel,
        signature,
        dict(
            NUM_HEADS=heads.num_heads,
            NUM_KV_HEADS=heads.num_kv_heads,
            HEAD_DIM=heads.head_dim,
            BLOCK_T=block_t,
            BLOCK_D=block_d,
            DECODE=decode,
            NORM=norm,
            PDL=True,
            **{name: None for name in optional if name not in signature},
        ),
        aligned=[n for n in signature if n.endswith("_ptr")]
        + (["max_len"] if decode else ["tokens", "max_len"]),
        num_warps=rope.rope_warps(block_t, block_d),
        launch_pdl=True,
    )


def fp8_reports() -> dict[str, Report]:
    """The heuristics' configs over e4m3 caches: up to 8k one decode program a multiprocessor, at 128k two."""
    reports: dict[str, Report] = {}
    for name, heads in SHAPES.items():
        group, kv_heads = heads.num_heads // heads.num_kv_heads, heads.num_kv_heads
        for context in (8192, 131072) if name == "7b_tp1" else (8192,):
            config = decode.heuristic(kv_heads, context, 1, SM_COUNT, FP8, heads.head_dim)
            for prefetch in (False, True) if name == "7b_tp1" else (True,):
                key = f"fp8 decode {name} {context} prefetch={prefetch}"
                reports[key] = compile_decode(heads, config, prefetch=prefetch, fp8=True)
        for t in (64, 8192) if name == "7b_tp1" else (8192,):
            tiles = prefill.heuristic(kv_heads, group, heads.head_dim, t, SM_COUNT, FP8)
            key = f"fp8 prefill {name} {tiles.block_m}x{tiles.block_n}"
            reports[key] = compile_prefill(heads, tiles, fp8=True)
    config = decode.heuristic(1, 131072, 1, SM_COUNT, FP8)
    reports["fp8 decode fp16"] = compile_decode(
        QWEN_72B_TP8, config, "fp16", prefetch=True, fp8=True
    )
    for in_decode in (False, True):
        key = f"fp8 rope decode={in_decode}"
        reports[key] = compile_rope(QWEN_7B, decode=in_decode, fp8=True)
    return reports


def main() -> None:
    """The heuristics' configs; num_splits is the grid, not a constant, so one context each is enough."""
    reports: dict[str, Report | str] = {}
    for name, heads in SHAPES.items():
        group, kv_heads = heads.num_heads // heads.num_kv_heads, heads.num_kv_heads
        config = decode.heuristic(kv_heads, 8192, 1, SM_COUNT, torch.bfloat16, heads.head_dim)
        for prefetch in (False, True) if name == "7b_tp1" else (True,):
            key = f"decode {name} prefetch={prefetch}"
            reports[key] = compile_decode(heads, config, prefetch=prefetch)
        buckets = (64, 8192) if name in ("7b_tp1", "smollm2") else (2048,)
        for t in buckets:
            tiles = prefill.heuristic(kv_heads, group, heads.head_dim, t, SM_COUNT)
            key = f"prefill {name} {tiles.block_m}x{tiles.block_n}"
            reports[key] = compile_prefill(heads, tiles)
    for name in ("7b_tp1", "smollm2"):
        reports[f"rope {name}"] = compile_rope(SHAPES[name])
    for in_decode in (False, True):  # Qwen3-8B, TP 1
        key = f"norm rope decode={in_decode}"
        reports[key] = compile_rope(Heads(32, 8, 128), norm=True, decode=in_decode)
    reports["decode fp16"] = compile_decode(
        QWEN_72B_TP8,
        decode.heuristic(1, 131072, 1, SM_COUNT, torch.float16),
        "fp16",
        prefetch=True,
    )
    print(to_json(reports | fp8_reports()))


if __name__ == "__main__":
    main()
