"""The graph as text for a person: one line an op, after each pass; layers that look alike are folded."""

from __future__ import annotations

import re

import triton

from engine.config import ModelConfig
from engine.graph.build import build
from engine.graph.ir import Graph, Op, Value
from engine.graph.passes import run_passes
from engine.graph.plan import plan

DUMP_CONTEXT = 4096  # KV positions that the launches of the dump are configured for


def format_value(value: Value) -> str:
    """name:dtype[shape], with a mark for what is not replicated."""
    mark = {"replicated": "", "sharded": " sharded", "partial": " partial", "rows": " rows"}[
        value.sharding
    ]
    return f"{value}:{value.dtype}[{','.join(map(str, value.shape))}]{mark}"


def format_op(op: Op) -> str:
    """`out = kind(role=input, ...) {attrs}  @stage`."""
    outs = ", ".join(format_value(value) for value in op.outputs) or "-"
    ins = ", ".join(f"{role}={value}" for role, value in zip(op.attrs["roles"], op.inputs))
    attrs = {key: value for key, value in op.attrs.items() if key not in {"roles", "role"}}
    text = " ".join(
        f"{key}={value:g}" if isinstance(value, float) else f"{key}={value}"
        for key, value in attrs.items()
    )
    return f"{outs} = {op.kind}({ins})" + (f" {{{text}}}" if text else "") + f"  @{op.stage}"


def format_graph(graph: Graph) -> str:
    """All ops; of consecutive layers that differ only in their number the first is printed."""
    lines = [
        f"graph {graph.model} {graph.phase} rows={graph.rows} tp={graph.tp}: {len(graph.ops)} ops, "
        f"{len(graph.weights)} weights"
    ]
    blocks: list[tuple[int | None, list[str]]] = []
    for op in graph.ops:
        if not blocks or blocks[-1][0] != op.layer:
            blocks.append((op.layer, []))
        blocks[-1][1].append(format_op(op))
    previous: list[str] | None = None
    first = folded = None
    for layer, text in [*blocks, (None, [])]:
        shape = [_anonymous(line) for line in text]
        if layer is not None and shape == previous:
            folded = layer
            continue
        if folded is not None:
            lines.append(f"  layers {first}..{folded}: as above")
        first, folded = (None if layer is None else layer + 1), None
        previous = shape if layer is not None and layer > 0 else None
        if text:
            lines.append("  step" if layer is None else f"  layer {layer}")
            lines += [f"    {line}" for line in text]
    return "\n".join(lines)


def _anonymous(line: str) -> str:
    line = re.sub(r"layers\.\d+\.", "layers.N.", line)
    line = re.sub(r"site=\d+", "site=N", line)
    return re.sub(r"\bl\d+\.", "lN.", line)


def dump_graph(
    config: ModelConfig,
    tp: int,
    quantization: str | None = None,
    rows: int = 1,
    tokens: int = 512,
    fp8_prefill: bool = False,
    fp8_kv: bool = False,
    shard_of: int | None = None,
    algorithms: tuple[str, ...] = Graph.algorithms,
) -> str:
    """The IR of the decode step and of a prefill bucket after each pass, the buffer plan, and the launches
    of the compiled form: layer, stage, launcher, bytes, kernel[grid]xthreads, configuration."""
    from engine.graph.inspect import format_launches, meta_launches

    out: list[str] = []
    before = ""
    for phase, count in (("decode", rows), ("prefill", tokens)):

        def observe(name: str, graph: Graph) -> None:
            nonlocal before
            text = format_graph(graph)
            out.append(f"== after {name}\n{'as before' if text == before else text}")
            before = text

        unfused = build(
            config, phase=phase, rows=count, tp=tp, fp8_prefill=fp8_prefill, fp8_kv=fp8_kv,  # type: ignore[arg-type]
            shard_of=shard_of, algorithms=algorithms,
        )  # fmt: skip
        final = run_passes(unfused, observe)
        buffers = plan(final, act_bytes=2)
        out.append(
            f"== plan: {len(buffers.offsets)} buffers in an arena of {buffers.arena_bytes:,} bytes a rank"
            f" (weights: {'FP8 e4m3 + fp32 scales' if quantization == 'fp8' else '16-bit'})"
        )
        if triton.knobs.runtime.interpret:
            out.append("== launches: not shown under TRITON_INTERPRET=1, where kernels are Python")
            continue
        degree = shard_of or tp
        launches = meta_launches(config, final, quantization, context=DUMP_CONTEXT, degree=degree)
        out.append(f"== launches of rank 0 ({len(launches)})\n{format_launches(launches)}")
    return "\n\n".join(out)
