"""Child process of test_compile_gemv.py: compiles the GEMV configs for sm_90 and prints one line of JSON."""

from __future__ import annotations

import re
from dataclasses import replace

import torch

from engine.kernels.epilogue import Epilogue, Push, Residual, RopeAppend, SiluMul, Store
from engine.kernels.gemv import GemvConfig, heuristic, plan_gemv
from engine.kernels.gemv_config import simple_config
from engine.kernels.gemv_poll import Poll
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
    keep_text: bool = False, world: int = 0, prefetch: bool = True,
) -> Report:  # fmt: skip
    """Compile one variant as `gemv` would launch it, with PDL, in a captured graph unless not `prefetch`; world: it polls
    that many ranks' messages."""
    buffer, status = torch.empty(0, dtype=torch.uint8), torch.empty(8, dtype=torch.int32)
    poll = Poll(buffer, 2**32, 2**33, meta(rows, k), status, 0, world, 5) if world else None
    kernel, _, arguments = plan_gemv(
        meta(rows, k), meta(n, k, dtype=DTYPES[weight]), meta_epilogue(epilogue, rows, n),
        scale=meta(n, dtype=torch.float32) if weight == "fp8" else None, bias=meta(n) if bias else None,
        norm_weight=meta(k) if norm else None, poll=poll, config=config,
        prefetch=prefetch, pdl=True,
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


# 72B at TP=2 and 7B at TP=2 and 4, as tuned on an H200: one program a multiprocessor, and two.
POLLED = [
    # n, k, weight, epilogue, bias, config, (rows, world)
    (5120, 8192, "fp8", "rope", True, ("ring", 64, 512, 8, 6, 132, 4, 1), [(1, 2), (2, 2)]),
    (29568, 8192, "fp8", "silu", False, ("ring", 16, 1024, 8, 6, 264, 8, 2), [(2, 2), (1, 4)]),
    (29568, 8192, "bf16", "silu", False, ("ring", 16, 256, 4, 12, 264, 4, 2), [(1, 2)]),
    (18944, 3584, "fp8", "silu", False, ("ring", 32, 1024, 4, 3, 264, 4, 2), [(1, 2), (4, 2)]),
    (2304, 3584, "bf16", "rope", True, ("ring", 16, 512, 4, 6, 264, 4, 2), [(1, 2), (2, 4)]),
    (1152, 3584, "bf16", "rope", True, ("simple", 8, 512, 4), [(1, 2)]),
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
    n, k, epilogue, norm, bias = SHAPES[0]
    for config in (simple_config(n, k, "fp8"), heuristic(n, k, "fp8")):
        reports[f"{config.kernel} eager {epilogue} rows=1"] = compile_gemv(
            config, n, k, "fp8", 1, epilogue, norm=norm, bias=bias, prefetch=False
        )
    for n, k, weight, epilogue, bias, values, calls in POLLED:
        config = GemvConfig(*values)
        for rows, world in calls:
            name = f"{config.kernel} {weight} {n}x{k} {epilogue} polls {world} rows={rows}"
            report = compile_gemv(
                config,
                n,
                k,
                weight,
                rows,
                epilogue,
                norm=True,
                bias=bias,
                world=world,
                keep_text=True,
            )
            resident = max(1, config.programs_per_sm) * 32 * config.num_warps * report.registers
            # 64 Ki registers; a ring asks for its share of shared memory, so they must suffice for as many.
            loads = re.findall(r"ld\.relaxed\.sys\.global\.(?:v4\.)?u32", report.ptx)
            reports[name] = replace(report, ptx=" ".join(sorted(set(loads))), sass="")
            if config.kernel == "ring" and resident > 65536:
                reports[name] = (
                    f"{report.registers} registers: fewer programs fit than the ring's share"
                )
    print(to_json(reports))


if __name__ == "__main__":
    main()
