"""Child process of test_compile_gemv.py: compiles the GEMV configs for sm_90 and prints one line of JSON."""

from __future__ import annotations

import torch

from engine.kernels.epilogue import Epilogue, Push, Residual, RopeAppend, SiluMul, Store
from engine.kernels.gemv import GemvConfig, heuristic, plan_gemv
from engine.kernels.gemv_config import simple_config
from tests.kernels.compile_sm90 import Report, compile_launch, to_json

DTYPES = {"fp8": torch.float8_e4m3fn, "bf16": torch.bfloat16, "fp16": torch.float16}


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def meta_epilogue(kind: str, rows: int, n: int) -> Epilogue:
    """An epilogue of the given kind on tensors that hold no memory; 128-wide heads, as all of Qwen2.5."""
    if kind == "rope":
        heads = n // 128 - 2
        cache = meta(2, 1, 4096, 128)
        integers = meta(8, dtype=torch.int32)
        angles = meta(4096, 128, dtype=torch.float32)
        q = meta(rows, heads * 128)
        return RopeAppend(q, cache, cache, angles, integers, integers, heads, 1, 128)
    if kind == "push":
        return Push(meta(2, dtype=torch.int64), 0, 0, 2)
    if kind == "silu":
        return SiluMul(meta(rows, n // 2))
    if kind == "residual":
        return Residual(meta(rows, n), meta(rows, n))
    return Store(meta(rows, n, dtype=torch.float32))


def compile_gemv(
    config: GemvConfig, n: int, k: int, weight: str, rows: int, epilogue: str, *, norm: bool, bias: bool,
    keep_text: bool = False,
) -> Report:  # fmt: skip
    """Compile one variant as `gemv` would launch it, with PDL."""
    kernel, _, arguments = plan_gemv(
        meta(rows, k), meta(n, k, dtype=DTYPES[weight]), meta_epilogue(epilogue, rows, n),
        scale=meta(n, dtype=torch.float32) if weight == "fp8" else None, bias=meta(n) if bias else None,
        norm_weight=meta(k) if norm else None, config=config, pdl=True,
    )  # fmt: skip
    return compile_launch(kernel, arguments, keep_text=keep_text)


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
