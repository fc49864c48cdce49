"""Compile a @triton.jit or @gluon.jit kernel for the H200 (sm_90a) with no GPU and say what came out.

Needs real JIT functions, so it cannot run under TRITON_INTERPRET=1. `run_compile_checks` starts a child
process without the variable and returns what it prints as JSON: pytest files call that.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

SIGNATURE = {
    "bf16": "*bf16",
    "fp16": "*fp16",
    "fp32": "*fp32",
    "fp8": "*fp8e4nv",
    "int32": "*i32",
    "int64": "*i64",
}


@dataclass(frozen=True)
class Report:
    """What ptxas, PTX and SASS say of one compiled kernel. Sizes in bytes, counts in instructions."""

    registers: int
    spill_store_bytes: int
    spill_load_bytes: int
    local_bytes: int  # stack frame: spills and dynamically indexed arrays
    shared_bytes: int
    global_loads: dict[str, int] = field(default_factory=dict)  # SASS width "32".."128" -> count
    global_stores: dict[str, int] = field(default_factory=dict)
    async_copies: dict[str, int] = field(default_factory=dict)  # LDGSTS width -> count
    shared_loads: dict[str, int] = field(default_factory=dict)
    local_accesses: int = 0
    tensor_core: dict[str, int] = field(
        default_factory=dict
    )  # HMMA / HGMMA / IMMA / QGMMA -> count
    barriers: int = 0
    instructions: int = 0
    loads_ahead: int = 0  # of global memory, before griddepcontrol.wait
    # In the order of SASS: "signal" (dependents may start), "wait" (for the kernel before), "load" (of global memory;
    # several in a row are one).
    dependencies: str = ""
    ptx: str = ""
    sass: str = ""


def _widths(sass: str, opcode: str) -> dict[str, int]:
    """Count SASS instructions of one opcode by access width in bits (no suffix is 32)."""
    counts: Counter[str] = Counter()
    for match in re.finditer(rf"\b{opcode}(\.[A-Z0-9_.]+)?\b", sass):
        parts = (match.group(1) or "").split(".")
        width = next((p for p in parts if p in ("U8", "S8", "U16", "S16", "64", "128")), "32")
        counts[width.lstrip("US")] += 1
    return dict(counts)


def _dependencies(sass: str) -> str:
    words = {"PREEXIT": "signal", "ACQBULK": "wait", "LDG": "load", "LD": "load", "LDGSTS": "load"}
    found = (words[name] for name in re.findall(r"\b(PREEXIT|ACQBULK|LDGSTS|LDG|LD)\b", sass))
    return " ".join(word for word, _ in groupby(found))


def _tool(name: str) -> str:
    from triton import knobs

    return getattr(knobs.nvidia, name).path


def describe_launch(
    fn: Any, arguments: Mapping[str, Any]
) -> tuple[dict[str, str], dict[str, Any], list[str], dict[str, Any]]:
    """(signature, constexprs, aligned, options) of `fn[grid](**arguments)`. Tensors may be on any device,
    "meta" included, and count as 16-byte aligned; None becomes a constant; ints that fit are i32."""
    types = {
        "bfloat16": "*bf16", "float16": "*fp16", "float32": "*fp32", "float8_e4m3fn": "*fp8e4nv",
        "int32": "*i32", "int64": "*i64", "int16": "*i16", "uint8": "*u8",
    }  # fmt: skip
    signature, constexprs, aligned, options = {}, {}, [], {}
    constants = {p.name for p in fn.params if p.is_constexpr}
    for name, value in arguments.items():
        if name not in fn.arg_names:
            options[name] = value
        elif name in constants or value is None:
            constexprs[name] = value
        elif hasattr(value, "dtype"):
            signature[name] = types[str(value.dtype).removeprefix("torch.")]
            aligned.append(name)
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
    return signature, constexprs, aligned, options


def compile_launch(fn: Any, arguments: Mapping[str, Any], *, keep_text: bool = False) -> Report:
    """Compile what `fn[grid](**arguments)` would run on an H200."""
    signature, constexprs, aligned, options = describe_launch(fn, arguments)
    return compile_sm90(fn, signature, constexprs, aligned=aligned, keep_text=keep_text, **options)


def compile_sm90(
    fn: Any,
    signature: Mapping[str, str],
    constexprs: Mapping[str, Any],
    *,
    aligned: Sequence[str] = (),
    num_warps: int = 4,
    num_stages: int = 3,
    keep_text: bool = False,
    **options: Any,
) -> Report:
    """Compile `fn` for sm_90a.

    signature: argument name -> Triton type ("*bf16", "i32", ...) of every run-time argument, in any order;
    constexprs: every other argument. aligned: run-time arguments that are divisible by 16 at launch.
    Raises what the compiler raises.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    full = {n: signature.get(n, "constexpr") for n in fn.arg_names}
    missing = [n for n, t in full.items() if t == "constexpr" and n not in constexprs]
    if missing:
        raise ValueError(f"{fn.__name__}: no type or value for {missing}")
    attrs = {(fn.arg_names.index(n),): [["tt.divisibility", 16]] for n in aligned}
    source = (GluonASTSource if fn.is_gluon() else triton.compiler.ASTSource)(
        fn, full, dict(constexprs), attrs
    )
    target = GPUTarget("cuda", 90, 32)
    built = triton.compile(
        source, target=target, options=dict(num_warps=num_warps, num_stages=num_stages, **options)
    )
    ptx = built.asm["ptx"]
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(built.asm["cubin"])
        sass = subprocess.run(
            [_tool("cuobjdump"), "-sass", str(cubin)], capture_output=True, text=True, check=True
        ).stdout
        (Path(folder) / "kernel.ptx").write_text(ptx)
        log = subprocess.run(
            [_tool("ptxas"), "-v", "--gpu-name=sm_90a", "kernel.ptx", "-o", "again.cubin"],
            capture_output=True,
            text=True,
            check=True,
            cwd=folder,
        ).stderr

    def number(pattern: str) -> int:
        found = re.search(pattern, log)
        return int(found.group(1)) if found else 0

    ahead, _, _ = ptx.partition("griddepcontrol.wait")
    tensor_core = Counter(re.findall(r"\b(HMMA|HGMMA|IMMA|IGMMA|QGMMA)\b", sass))
    return Report(
        registers=number(r"Used (\d+) registers"),
        spill_store_bytes=number(r"(\d+) bytes spill stores"),
        spill_load_bytes=number(r"(\d+) bytes spill loads"),
        local_bytes=number(r"(\d+) bytes stack frame"),
        shared_bytes=built.metadata.shared,
        global_loads=_widths(sass, "LDG"),
        global_stores=_widths(sass, "STG"),
        async_copies=_widths(sass, "LDGSTS"),
        shared_loads=_widths(sass, "LDS"),
        local_accesses=len(re.findall(r"\b(?:LDL|STL)\b", sass)),
        tensor_core=dict(tensor_core),
        barriers=len(re.findall(r"\bBAR\.SYNC", sass)),
        instructions=len(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/", sass, re.M)),
        loads_ahead=len(re.findall(r"\bld\.global", ahead)),
        dependencies=_dependencies(sass),
        ptx=ptx if keep_text else "",
        sass=sass if keep_text else "",
    )


def exchange_facts(report: Report, world: int, vector: str = "[24]") -> dict[str, Any]:
    """The report without its texts, and how often the kernel polls, pushes and waits for the one before it.

    vector: 32-bit words of the polls and pushes that count, as a pattern."""
    facts = asdict(report)
    ptx, sass = facts.pop("ptx"), facts.pop("sass")
    facts["world"] = world
    facts["polls"] = len(re.findall(rf"ld\.relaxed\.sys\.global\.v{vector}\.u32", ptx))
    facts["pushes"] = len(re.findall(rf"st\.relaxed\.sys\.global\.v{vector}\.u32", ptx))
    facts["releases"] = len(re.findall(r"st\.release\.sys", ptx))
    facts["fences"] = len(re.findall(r"MEMBAR\S*\.SYS", sass))
    facts["fences_of_some"] = len(
        re.findall(r"@!?U?P\d\s+MEMBAR\S*\.SYS", sass)
    )  # under a predicate
    facts["waits"] = len(re.findall(r"griddepcontrol\.wait", ptx))
    return facts


def run_compile_checks(module: str, timeout_s: float = 280.0) -> dict[str, Any]:
    """Run `python -m module` without TRITON_INTERPRET and return the JSON object it prints last.

    Raises RuntimeError with the child's standard error when it fails.
    """
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    root = Path(__file__).resolve().parents[2]
    env["PYTHONPATH"] = str(root)
    child = subprocess.run(
        [sys.executable, "-m", module],
        capture_output=True,
        text=True,
        env=env,
        cwd=root,
        timeout=timeout_s,
    )
    if child.returncode:
        raise RuntimeError(f"python -m {module} failed:\n{child.stderr[-4000:]}")
    return json.loads(child.stdout.strip().splitlines()[-1])


def to_json(reports: Mapping[str, Report | str]) -> str:
    """One line of JSON: name -> the report as a dict, or the error text of a config that failed."""
    return json.dumps({k: v if isinstance(v, str) else asdict(v) for k, v in reports.items()})
