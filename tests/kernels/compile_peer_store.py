"""Run as `python -m tests.kernels.compile_peer_store` without TRITON_INTERPRET: compiles a variant of each kind of
bench/peer_store.py for sm_90 and prints {kind: report} as JSON."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import asdict

from triton.experimental.gluon import language as gl

from bench import peer_store_kernels as kernels
from bench.peer_store_ends import EXCHANGES, KINDS, Variant, arguments
from tests.kernels.compile_sm90 import compile_sm90

NUMBERS = ("chunks", "salt", "words", "tiles", "rank")
INSTRUCTIONS = (
    r"\b((?:st|ld)\.[a-z_.:0-9]*(?:global|shared)[a-z_.:0-9]*|cp\.async\.bulk[a-z_.:0-9]*)"
)


def _descriptor() -> str:
    block = [kernels.TILE_ROWS, kernels.TILE_WORDS]
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.int32)
    return f"tensordesc<i32{block},{layout!r}>"


def forms():
    """(name, kernel, constexprs): every kind, and the exchange's kernel in its three forms."""
    for kind in KINDS:
        yield kind, *arguments(Variant(kind, warps=8, depth=2))
    for push, poll in sorted({switches for name in EXCHANGES for switches in EXCHANGES[name]}):
        switches = dict(PUSH=push, POLL=poll, BLOCK=256)
        yield f"exchange/{int(push)}{int(poll)}", kernels.exchange_kernel, switches


def main() -> None:
    found = {}
    for name, fn, constants in forms():
        pointers: dict[str, str] = {}
        if fn is kernels.plain_kernel:
            pointers = {"source": "*i32", "target": "*i32"}
        elif fn is kernels.bulk_kernel:
            pointers = {"source": "*i32", "target": _descriptor()}
        types = {
            a: pointers.get(a, "i32" if a in NUMBERS else "i64")
            for a in fn.arg_names
            if a not in constants
        }
        aligned = [a for a, kind in types.items() if kind == "*i32" or a == "words"]
        report = compile_sm90(
            fn, types, constants, aligned=aligned, num_warps=8, num_stages=1, keep_text=True
        )
        row = asdict(report)
        ptx, sass = row.pop("ptx"), row.pop("sass")
        row["ptx"] = dict(Counter(re.findall(INSTRUCTIONS, ptx)))
        row["sass"] = sorted(set(re.findall(r"\b(?:STG|LDG|UTMASTG)[A-Z0-9_.]*", sass)))
        found[name] = row
    print(json.dumps(found))


if __name__ == "__main__":
    main()
