"""Child process of test_gemv_order.py: in which order a GEMV that polls sums, and the same one that does not.

Prints one JSON object: case -> {"plain": sums, "polls": sums, "dealt": shapes}: the fp32 sums of the kernels' TTGIR as
a sorted list of [axis, operand's type with its layout], and the shapes that `by_thread` transposes in the one that
polls. No PTX is made: 86 kernels in 20 s.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from triton import compiler
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from engine.config import preset
from engine.kernels.epilogue import Store
from engine.kernels.gemv import GemvConfig, heuristic, plan_gemv
from engine.kernels.gemv_poll import Poll, polls_in_prologue
from tests.kernels.compile_sm90 import describe_launch
from tests.kernels.gemv_compile_cases import DTYPES, meta

CACHE = Path(__file__).resolve().parents[2] / "autotune_cache" / "nvidia_h200" / "gemv.json"
PRESETS = ("qwen2.5-7b", "qwen2.5-14b", "qwen2.5-32b", "qwen2.5-72b")
Case = tuple[GemvConfig, int, str, int, int]  # K, weight, rows, world


def least(config: GemvConfig) -> GemvConfig:
    """The config with what orders no sum as small as can be."""
    if config.kernel == "simple":
        return replace(config, block_n=2)
    height = 16 * (config.num_warps // config.warps_k)
    return replace(config, block_n=height, stages=3, programs=1, programs_per_sm=1, wide=None)


def shipped() -> dict[str, Case]:
    """Every order of sums that a polled GEMV of a preset has at TP 2 to 8, tuned or the heuristic's, and of small
    models."""
    entries = json.loads(CACHE.read_text())["entries"]
    found = {}

    def add(config: GemvConfig, k: int, weight: str, rows: int, world: int) -> None:
        shape = f"{config.block_k} {config.num_warps} {config.warps_k} {weight} K={k}"
        found[f"{config.kernel} {shape} rows={rows}"] = (least(config), k, weight, rows, world)

    for c in map(preset, PRESETS):
        k = c.hidden_size
        for tp in (2, 4, 8):
            rows = [r for r in (1, 2, 4, 8) if polls_in_prologue(tp, r, k)]
            if c.num_heads % tp or not rows:
                continue
            shard = c.shard(tp)
            qkv = (shard.num_heads + 2 * shard.num_kv_heads) * c.head_dim
            for n in (qkv, 2 * shard.intermediate_size, c.vocab_size // tp):
                for weight in ("bf16", "fp8"):
                    tuned = entries.get(f"n={n},k={k},weight_dtype={weight}")
                    configs = [GemvConfig(**tuned["config"])] if tuned else []
                    for config in [heuristic(n, k, weight), *configs]:
                        for r in rows:
                            add(config, k, weight, r, tp)
    for k in (40, 64, 128, 256, 384, 448):
        for n in (160, 768):  # plain kernel and ring
            for weight in ("bf16", "fp8"):
                add(heuristic(n, k, weight), k, weight, 2, 2)
    add(GemvConfig(block_k=2048), 4096, "bf16", 1, 2)  # 16 values a thread: two loads
    return found


def ttgir(kernel: Any, arguments: dict[str, Any]) -> str:
    """The kernel for sm_90 as far as layouts are decided: `compile_launch` without LLVM and ptxas."""
    signature, constexprs, aligned, options = describe_launch(kernel, arguments)
    types = {name: signature.get(name, "constexpr") for name in kernel.arg_names}
    attrs = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    make = GluonASTSource if kernel.is_gluon() else compiler.ASTSource
    source = make(kernel, types, dict(constexprs), attrs)
    target = GPUTarget("cuda", 90, 32)
    backend = compiler.make_backend(target)
    parsed = backend.parse_options({**options, **source.parse_options()})
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    codegen = backend.get_codegen_implementation(parsed)
    module = source.make_ir(target, parsed, codegen, backend.get_module_map(), context)
    stages: dict[str, Any] = {}
    backend.add_stages(stages, parsed, source.language)
    names = list(stages)
    for name in names[names.index(source.ext) : names.index("ttgir") + 1]:
        module = stages[name](module, {})
    return str(module)


def sums(text: str) -> list[tuple[str, str]]:
    """(axis, operand's type, its layout written out) of every kind of fp32 sum in a module."""
    layouts = dict(re.findall(r"^(#\w+) = (#ttg.*)$", text, re.M))
    reduce = r'"tt.reduce"\(.*?\) <\{axis = (\d) : i32\}> \(\{(.*?)\}\) : \((.*?)\) ->'
    found = set()
    for axis, body, operand in re.findall(reduce, text, re.S):
        if "arith.addf" in body:
            found.add((axis, re.sub(r"#\w+", lambda m: layouts.get(m[0], m[0]), operand)))
    return sorted(found)


def dealt(text: str) -> list[tuple[int, ...]]:
    """(groups, threads, neighbours) of the transpositions in a module, all of which must keep their order."""
    if "allow_reorder" in text:
        raise AssertionError("a sum of a reshaped tensor has any order")
    shapes = re.findall(
        r"tt.trans .*order = array<i32: 0, 2, 1>\} : tensor<(\d+)x(\d+)x(\d+)x", text
    )
    return sorted({tuple(map(int, shape)) for shape in shapes})


def orders(case: Case) -> dict[str, list]:
    config, k, weight, rows, world = case
    buffer, status = torch.empty(0, dtype=torch.uint8), torch.empty(8, dtype=torch.int32)
    poll = Poll(buffer, 2**32, 2**33, meta(rows, k), status, 0, world, 5)
    found: dict[str, list] = {}
    for form, polls in {"plain": None, "polls": poll}.items():
        kernel, _, arguments = plan_gemv(
            meta(rows, k), meta(16, k, dtype=DTYPES[weight]), Store(meta(rows, 16)),
            norm_weight=meta(k), poll=polls, config=config, pdl=True,
        )  # fmt: skip
        text = ttgir(kernel, arguments)
        found[form] = sums(text)
    return {**found, "dealt": dealt(text) if config.kernel == "simple" else []}


if __name__ == "__main__":
    print(json.dumps({name: orders(case) for name, case in shipped().items()}))
