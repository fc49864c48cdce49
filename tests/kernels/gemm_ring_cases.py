"""Child process of test_gemm_ring.py: compiles the ring candidates of a 16-token prompt for sm_90 and prints one
line of JSON: name -> Report.

`python -m tests.kernels.gemm_ring_cases all` compiles every candidate (about five minutes) and not one of each kind.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import torch

from engine.config import preset
from engine.kernels.epilogue import GemvEpilogue, Residual, SiluMul, Store
from engine.kernels.gemv import GemvConfig, plan_gemv
from engine.tune import gemm_space
from tests.kernels.compile_sm90 import Report, compile_launch
from tests.kernels.gemv_compile_cases import DTYPES, meta

ROWS = 16
SHARDS = (("qwen2.5-7b", 1), ("qwen2.5-72b", 1), ("qwen2.5-72b", 2))
Layer = tuple[str, int, int]  # epilogue, N, K
Case = tuple[GemvConfig, str, Layer]


def layers() -> Iterator[Layer]:
    """The linears of a prefill; one rank's o_proj and down store a partial sum."""
    for model, tp in SHARDS:
        c, shard = preset(model), preset(model).shard(tp)
        h, d, partial = c.hidden_size, c.head_dim, "residual" if tp == 1 else "store"
        yield "store+bias", (shard.num_heads + 2 * shard.num_kv_heads) * d, h
        yield partial, h, shard.num_heads * d
        yield "silu", 2 * shard.intermediate_size, h
        yield partial, h, shard.intermediate_size


def candidates() -> Iterator[Case]:
    for weight in ("fp8", "bf16"):
        for layer in layers():
            for config in gemm_space.candidates(ROWS, *layer[1:], weight):
                if config.ring:
                    yield config.ring, weight, layer


def one_of_each_kind() -> list[Case]:
    """Of each tile and epilogue the candidate with the longest K: the first pass over x is unrolled over K, and
    more of the ring's constants change no instruction of its loop."""
    kinds: dict[tuple, Case] = {}
    for case in candidates():
        config, weight, (epilogue, _, k) = case
        kind = weight, config.block_n, config.block_k, config.num_warps, epilogue.split("+")[0]
        if kind not in kinds or k > kinds[kind][2][2]:
            kinds[kind] = case
    return list(kinds.values())


def compiled(config: GemvConfig, weight: str, layer: Layer) -> Report:
    """As `gemm` launches it, with PDL."""
    name, n, k = layer
    kind, _, bias = name.partition("+")
    out = meta(ROWS, n // 2 if kind == "silu" else n)
    epilogues: dict[str, GemvEpilogue] = {
        "store": Store(out),
        "residual": Residual(out, out),
        "silu": SiluMul(out),
    }
    kernel, _, arguments = plan_gemv(
        meta(ROWS, k), meta(n, k, dtype=DTYPES[weight]), epilogues[kind],
        scale=meta(n, dtype=torch.float32) if weight == "fp8" else None,
        bias=meta(n) if bias else None, config=config, pdl=True,
    )  # fmt: skip
    return compile_launch(kernel, arguments)


def facts(case: Case) -> dict[str, Any]:
    """The report, and the registers of all programs that share a multiprocessor."""
    config = case[0]
    found = asdict(compiled(*case))
    resident = config.programs_per_sm * 32 * config.num_warps * found["registers"]
    return {**found, "resident": resident}


def main(every: bool) -> None:
    cases = list(candidates()) if every else one_of_each_kind()
    with ThreadPoolExecutor(2) as pool:
        reports = pool.map(facts, cases)
        print(json.dumps({f"{c[1]} {c[2]} {c[0]}": report for c, report in zip(cases, reports)}))


if __name__ == "__main__":
    main("all" in sys.argv[1:])
