"""Child process of test_gemm_fp8.py: compiles the row quantisation for sm_90 and prints one line of JSON."""

from __future__ import annotations

from typing import Any

import torch

from engine.kernels.quantize_rows import FP8, _warps, quantize_rows_kernel, rmsnorm_quantize_kernel
from tests.kernels.compile_sm90 import Report, compile_sm90, describe_launch, to_json


def _compile(kernel: Any, arguments: dict[str, Any]) -> Report:
    """As launched: sizes that are multiples of 16 count as such."""
    signature, constexprs, aligned, options = describe_launch(kernel, arguments)
    aligned += [n for n, v in arguments.items() if signature.get(n) == "i32" and v % 16 == 0]
    return compile_sm90(kernel, signature, constexprs, aligned=aligned, keep_text=True, **options)


def cases() -> dict[str, Report | str]:
    reports: dict[str, Report | str] = {}
    for k in (3584, 8192, 18944, 29568):
        block = 1 << (k - 1).bit_length()

        def on(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device="meta")

        out = {"x8": on(4, k, dtype=FP8), "scale": on(4, dtype=torch.float32), "x8_stride": k}
        shared = {**out, "x": on(4, k), "x_stride": k, "BLOCK": block, "PDL": True}
        reports[f"quantize_rows {k}"] = _compile(
            quantize_rows_kernel, {**shared, "K": k, "num_warps": _warps(block)}
        )
        if k <= 8192:
            reports[f"rmsnorm_quantize {k}"] = _compile(
                rmsnorm_quantize_kernel,
                {**shared, "weight": on(k), "H": k, "eps": 1e-6, "num_warps": min(8, block // 512)},
            )
    return reports


if __name__ == "__main__":
    print(to_json(cases()))
