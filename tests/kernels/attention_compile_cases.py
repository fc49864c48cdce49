"""Child process of test_compile_attention.py: compiles every config the heuristics ship for sm_90, prints JSON."""

from __future__ import annotations

import torch

from engine.kernels import decode_attention as decode
from engine.kernels import prefill_attention as prefill
from engine.kernels import rope_append as rope
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


def _pointers(dtype: str, names: str) -> dict[str, str]:
    return {f"{name}_ptr": SIGNATURE[dtype] for name in names.split()}


def compile_decode(
    heads: Heads, config: decode.DecodeAttentionConfig, dtype: str = "bf16", *, prefetch: bool
) -> Report:
    """Compile as `decode_attention` launches it with PDL; max_model_len a multiple of 16."""
    group = heads.num_heads // heads.num_kv_heads
    signature = {
        **_pointers(dtype, "q k v out"),
        **_pointers("int32", "positions row_slots tickets"),
        **_pointers("fp32", "partial stats"),
        "max_len": "i32",
        "max_splits": "i32",
        "qk_scale": "fp32",
    }
    return compile_sm90(
        decode.decode_attention_kernel,
        signature,
        decode.kernel_constants(config, group, heads.head_dim, prefetch=prefetch, pdl=True),
        aligned=[n for n in signature if n.endswith("_ptr")] + ["max_len"],
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        keep_text=True,
        launch_pdl=True,
    )


def compile_prefill(
    heads: Heads, config: prefill.PrefillAttentionConfig, dtype: str = "bf16"
) -> Report:
    """Compile as `prefill_attention` launches it with PDL."""
    group = heads.num_heads // heads.num_kv_heads
    signature = {
        **_pointers(dtype, "q k v out"),
        **_pointers("int32", "request"),
        "tokens": "i32",
        "max_len": "i32",
        "qk_scale": "fp32",
    }
    constants = prefill.kernel_constants(
        config, heads.num_kv_heads, group, heads.head_dim, pdl=True
    )
    return compile_sm90(
        prefill.prefill_attention_kernel,
        signature,
        constants,
        aligned=[n for n in signature if n.endswith("_ptr")] + ["tokens", "max_len"],
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        launch_pdl=True,
    )


def compile_rope(heads: Heads, *, norm: bool = False, decode: bool = False) -> Report:
    """Compile as `rope_append` launches it with PDL; tokens and max_len multiples of 16 in prefill."""
    signature = {
        **_pointers("bf16", "qkv q_out k_cache v_cache"),
        **_pointers("fp32", "cos_sin"),
        **_pointers("int32", "where positions" if decode else "where"),
        **(_pointers("bf16", "q_norm k_norm") if norm else {}),
        "eps": "fp32",
        "tokens": "i32",
        "max_len": "i32",
    }
    block_t, block_d = 1 if decode else rope.BLOCK_T, heads.head_dim
    absent = {} if norm else {"q_norm_ptr": None, "k_norm_ptr": None}
    if not decode:
        absent["positions_ptr"] = None
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
            **absent,
        ),
        aligned=[n for n in signature if n.endswith("_ptr")]
        + (["max_len"] if decode else ["tokens", "max_len"]),
        num_warps=rope.rope_warps(block_t, block_d),
        launch_pdl=True,
    )


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
    print(to_json(reports))


if __name__ == "__main__":
    main()
