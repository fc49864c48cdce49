"""Child process of test_compile_gemv.py: compiles the GEMV configs for sm_90 and prints one line of JSON."""

from __future__ import annotations

from typing import Any

from engine.kernels.gemv import GemvConfig, heuristic, rows_block_n, simple_config
from engine.kernels.gemv_simple import gemv_kernel
from tests.kernels.compile_sm90 import SIGNATURE, Report, compile_sm90, to_json

POINTERS = {
    "out_ptr": "bf16",
    "residual_ptr": "bf16",
    "k_cache_ptr": "bf16",
    "v_cache_ptr": "bf16",
    "cos_sin_ptr": "fp32",
    "positions_ptr": "int32",
    "row_slots_ptr": "int32",
    "table_ptr": "int64",
}
USED = {
    "store": ["out_ptr"],
    "residual": ["out_ptr", "residual_ptr"],
    "silu": ["out_ptr"],
    "rope": [
        "out_ptr",
        "k_cache_ptr",
        "v_cache_ptr",
        "cos_sin_ptr",
        "positions_ptr",
        "row_slots_ptr",
    ],
    "push": ["table_ptr"],
}


def compile_gemv(
    config: GemvConfig,
    n: int,
    k: int,
    weight: str,
    rows: int,
    epilogue: str,
    *,
    norm: bool,
    bias: bool = False,
    pdl: bool = True,
    keep_text: bool = False,
) -> Report:
    """Compile one variant as `gemv` would launch it."""
    types = {"x_ptr": "bf16", "w_ptr": weight}
    if weight == "fp16":
        types["x_ptr"] = "fp16"
    if weight == "fp8":
        types["scale_ptr"] = "fp32"
    if bias:
        types["bias_ptr"] = "bf16"
    if norm:
        types["norm_ptr"] = types["x_ptr"]
    types.update({name: POINTERS[name] for name in USED[epilogue]})
    signature = {name: SIGNATURE[kind] for name, kind in types.items()}
    signature["push_offset"] = "i64"
    signature["eps"] = "fp32"
    heads, kv_heads, dim = 2, 1, n // 4
    constexprs: dict[str, Any] = dict(
        N=n,
        K=k,
        R=rows,
        BLOCK_N=rows_block_n(config, rows),
        BLOCK_K=config.block_k,
        EPILOGUE="store" if epilogue == "residual" else epilogue,
        NUM_HEADS=heads,
        NUM_KV_HEADS=kv_heads,
        HEAD_DIM=dim,
        MAX_LEN=4096,
        WORLD=2,
        PDL=pdl,
    )
    kernel = gemv_kernel
    for name in kernel.arg_names:
        if name not in signature and name not in constexprs:
            constexprs[name] = None  # an operand this variant does not have
    return compile_sm90(
        kernel,
        signature,
        constexprs,
        aligned=list(types),
        num_warps=config.num_warps,
        keep_text=keep_text,
        launch_pdl=pdl,
    )


SHAPES = [
    # n, k, epilogue, norm, bias
    (1280, 8192, "rope", True, True),
    (8192, 1024, "push", False, False),
    (7392, 8192, "silu", True, False),
    (8192, 3696, "residual", False, False),
    (152064, 3584, "store", True, False),
]


def main() -> None:
    """Every shipped config, named kernel/weight/shape/rows."""
    reports: dict[str, Report | str] = {}
    for weight in ("fp8", "bf16"):
        for n, k, epilogue, norm, bias in SHAPES:
            configs = {simple_config(n, k, weight), heuristic(n, k, weight)}
            for config in sorted(configs, key=repr):
                for rows in (1, 8):
                    name = f"{config.kernel} {weight} {n}x{k} {epilogue} rows={rows}"
                    reports[name] = compile_gemv(
                        config, n, k, weight, rows, epilogue, norm=norm, bias=bias
                    )
    print(to_json(reports))


if __name__ == "__main__":
    main()
