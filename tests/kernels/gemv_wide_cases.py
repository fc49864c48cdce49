"""Child process of test_gemv_wide.py: GEMVs with a walk of their own for several rows. Prints one JSON object.

"bits": a case -> what differs ("" if nothing): rows of 1, 2, 4 and 8 under a config and each of its wide walks,
emulated from the PTX for sm_90, against the same rows of all 8 under the config's own walk.
"compiled": a wide candidate of a tuned shape, at 8 rows -> its Report.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import Any

import torch

from engine.kernels.epilogue import RopeAppend, SiluMul, Store
from engine.kernels.gemv_config import GemvConfig, ring_shape, rows_config, with_wide
from engine.tune.gemv_space import wide_candidates
from tests.kernels.gemv_compile_cases import DTYPES, compile_gemv
from tests.kernels.gemv_emulated_cases import BF16, FP8, Operands, emulate, poison, ring
from tests.kernels.maxima_cases import CACHE, Problem, winners

ROWS = 8
Rows = Callable[[slice, GemvConfig], tuple[torch.Tensor, ...]]  # outputs of some rows, row first


def store(n: int, k: int, weight: torch.dtype, *, norm: bool) -> Rows:
    o = Operands(ROWS, n, k, weight, norm=norm, bias=True)

    def run(rows: slice, config: GemvConfig) -> tuple[torch.Tensor, ...]:
        x = o.x[rows].clone()
        e = Store(poison(len(x), n, dtype=torch.float32))
        emulate(x, o.w, e, config, **o.extras)
        return (e.out,)

    return run


def silu(n: int, k: int, weight: torch.dtype) -> Rows:
    o = Operands(ROWS, n, k, weight, norm=True)
    o.w = (o.w.float() / 16).to(weight)

    def run(rows: slice, config: GemvConfig) -> tuple[torch.Tensor, ...]:
        x = o.x[rows].clone()
        e = SiluMul(poison(len(x), n // 2))
        emulate(x, o.w, e, config, **o.extras)
        return (e.out,)

    return run


def rope(k: int, weight: torch.dtype) -> Rows:
    heads, kv_heads, dim, length = 3, 1, 16, 12
    o = Operands(ROWS, (heads + 2 * kv_heads) * dim, k, weight, norm=True, bias=True)
    angle = torch.rand(length, dim // 2) * 6.28
    cos_sin = torch.stack((angle.cos(), angle.sin()), -1).flatten(1).contiguous()
    positions = torch.randperm(length)[:ROWS].int()
    all_slots = torch.randperm(ROWS).int()

    def run(rows: slice, config: GemvConfig) -> tuple[torch.Tensor, ...]:
        x, slots = o.x[rows].clone(), all_slots[rows].clone()
        caches = [poison(ROWS, kv_heads, length, dim) for _ in range(2)]
        q = poison(len(x), heads * dim)
        e = RopeAppend(q, *caches, cos_sin, positions, slots, heads, kv_heads, dim)
        emulate(x, o.w, e, config, **o.extras)
        where = slots.long()
        return (q, *(cache[where, :, positions[where].long()] for cache in caches))

    return run


def maxima(n: int, k: int, weight: torch.dtype) -> Rows:
    """Logits, ids of their maxima and the maxima; which program found one depends on the walk."""
    problem = Problem(ROWS, n, k, sampled=True, norm=True, dtype=weight, offset=n)

    def run(rows: slice, config: GemvConfig) -> tuple[torch.Tensor, ...]:
        part = copy.copy(problem)
        part.x, part.row_slots = problem.x[rows].clone(), problem.row_slots[rows].clone()
        part.rows = len(part.x)
        e = part.maxima(config)
        emulate(part.x, part.w, e, config, **part.extras)
        return e.out, winners(e.values, e.ids), e.values.amax(1)

    return run


def differing(rows: Rows, base: GemvConfig, walks: list[GemvConfig]) -> str:
    """The first rows whose bits differ from those of all 8 under `base`, in words; "" if none do."""
    whole = rows(slice(0, ROWS), base)
    if not all(bool(part.float().isfinite().all()) for part in whole):
        return "not finite"
    calls = [(base, slice(5, 6)), (base, slice(2, 4))]
    for walk in walks:
        calls += [(with_wide(base, walk), some) for some in (slice(3, 7), slice(0, ROWS))]
    for config, some in calls:
        for part, all_rows in zip(rows(some, config), whole):
            if not torch.equal(part, all_rows[some]):
                return f"rows {some.start} to {some.stop} of {config}"
    return ""


def bits() -> dict[str, str]:
    """Walks of other tiles, depths and partitions; `programs_per_sm` of 6 leaves no room for x beside the ring."""
    torch.manual_seed(13)
    fp8, bf16 = ring(16, 512, 3, 4, 4, 5), ring(16, 256, 4, 4, 4, 5)
    two_groups = ring(32, 512, 3, 4, 2, 2)  # of warps: 2 x 16 rows a tile

    def walks(base: GemvConfig, *changes: tuple[int, int, int, int]) -> list[GemvConfig]:
        names = ("block_n", "stages", "programs", "programs_per_sm")
        return [replace(base, **dict(zip(names, values))) for values in changes]

    cases: dict[str, tuple[Rows, GemvConfig, list[GemvConfig]]] = {
        "store fp8 norm": (
            store(72, 1040, FP8, norm=True), fp8, walks(fp8, (32, 3, 2, 1), (64, 2, 1, 1), (16, 2, 3, 6))
        ),
        "store fp8 scaled": (
            store(72, 1024, FP8, norm=False), two_groups, walks(two_groups, (64, 3, 1, 1), (32, 2, 3, 5))
        ),
        "silu bf16": (silu(70, 520, BF16), bf16, walks(bf16, (64, 2, 2, 1), (32, 2, 3, 6))),
        "rope fp8": (rope(1024, FP8), fp8, walks(fp8, (32, 4, 3, 1), (16, 2, 5, 6))),
        "maxima bf16": (maxima(86, 512, BF16), bf16, walks(bf16, (32, 3, 2, 1), (16, 2, 3, 10))),
    }  # fmt: skip
    found = {name: differing(*case) for name, case in cases.items()}
    # The comparison sees another order: fewer warps on a row, or tiles of another K.
    rows = store(16, 1040, FP8, norm=True)
    one = rows(slice(0, ROWS), fp8)[0]
    for name, change in (("warps", {"warps_k": 2, "block_n": 32}), ("k", {"block_k": 1024})):
        same = torch.equal(one, rows(slice(0, ROWS), replace(fp8, **change))[0])
        found[f"control: {name}"] = "" if not same else "the same bits"
    walks_of_one = cases["store fp8 norm"][2]
    staged = {ring_shape(walk, 72, 1040, ROWS, BF16, FP8).stage_x for walk in walks_of_one}
    found["control: staged and not"] = "" if staged == {True, False} else str(staged)
    return found


SHAPES = [  # 72B at TP=2, 7B at TP=1
    # n, k, epilogue, norm, bias
    (5120, 8192, "rope", True, True),
    (29568, 8192, "silu", True, False),
    (8192, 4096, "push", False, False),
    (8192, 14784, "push", False, False),
    (76032, 8192, "store", True, False),
    (4608, 3584, "rope", True, True),
    (3584, 3584, "residual", False, False),
    (37888, 3584, "silu", True, False),
    (3584, 18944, "residual", False, False),
    (152064, 3584, "store", True, False),
]


def tallest() -> Iterator[tuple[str, GemvConfig, tuple[Any, ...]]]:
    """Of each tuned weight's wide candidates, its own walk apart, the tallest tile with x staged and without."""
    entries = json.loads(CACHE.read_text())["entries"]
    for n, k, epilogue, norm, bias in SHAPES:
        for weight in ("fp8", "bf16"):
            entry = entries.get(f"n={n},k={k},weight_dtype={weight}")
            if entry is None:
                continue
            base = replace(GemvConfig(**entry["config"]), wide=None)
            chosen: dict[bool, GemvConfig] = {}
            for config in wide_candidates(base, n, k, weight)[1:]:
                walk = rows_config(config, ROWS)
                staged = ring_shape(walk, n, k, ROWS, BF16, DTYPES[weight]).stage_x
                held = chosen.get(staged)
                if held is None or walk.block_n > rows_config(held, ROWS).block_n:
                    chosen[staged] = config
            for staged, config in chosen.items():
                name = f"{weight} {n}x{k} {epilogue} block_n={rows_config(config, ROWS).block_n} staged={staged}"
                yield name, config, (n, k, weight, ROWS, epilogue, norm, bias)


def compiled() -> dict[str, dict[str, Any]]:
    reports = {}
    for name, config, (n, k, weight, rows, epilogue, norm, bias) in tallest():
        report = compile_gemv(config, n, k, weight, rows, epilogue, norm=norm, bias=bias)
        reports[name] = asdict(report)
    return reports


def main(parts: list[str]) -> None:
    both = {"bits": bits, "compiled": compiled}
    print(json.dumps({name: both[name]() for name in parts or both}))


if __name__ == "__main__":
    main(sys.argv[1:])
