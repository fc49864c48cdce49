"""Run as `python -m tests.kernels.sample_compile_cases` without TRITON_INTERPRET: compiles the kernels
of sampling under controls for sm_90 and prints {name: report} as JSON."""

from __future__ import annotations

import json
import re

from engine.kernels import sample, sample_kernel
from tests.kernels.compile_sm90 import compile_sm90, exchange_facts

FLOATS = ("logits", "scores", "controls", "bias", "temperature", "values")
INTS = ("counts", "row_slots", "request", "peaks", "seeds", "positions", "ids", "tokens", "ring", "step")  # fmt: skip
TYPES = {name: "*fp32" for name in FLOATS} | {name: "*i32" for name in INTS}
TYPES |= {"sums": "*i64", "peers": "*i64", "own": "i64", "status": "i64"}


def forms():
    """(name, kernel, constexprs, warps) of the forms that the engine launches."""
    on = dict(PDL=True)
    for world in (1, 2, 8):
        meta = dict(WORLD=world, BLOCK=sample.ADJUST_COLUMNS, REQUEST=False, **on)
        yield f"adjust/{world}", sample_kernel.adjust_kernel, meta, 4
    yield "gather", sample_kernel.gather_kernel, dict(PAIRS=sample.GATHER_PAIRS, **on), 4
    meta = dict(BLOCK=sample.SEARCH_COLUMNS, REQUEST=False, **on)
    yield "search", sample_kernel.search_kernel, meta, 8
    meta = dict(BLOCK=sample.PICK_COLUMNS, REQUEST=False, **on)
    yield "pick", sample_kernel.pick_kernel, meta, 4
    meta = dict(ROWS=8, PARTS=64, WRITE_RING=True, REQUEST=False, **on)
    yield "settle", sample_kernel.settle_kernel, meta, 1


def main() -> None:
    found = {}
    for name, fn, constexprs, warps in forms():
        types = {n: TYPES.get(n, "i32") for n in fn.arg_names if n not in constexprs}
        aligned = [n for n in types if types[n].startswith("*") or n in ("columns", "total")]
        report = compile_sm90(
            fn, types, constexprs, aligned=aligned, num_warps=warps, num_stages=1, keep_text=True,
            launch_pdl=True,
        )  # fmt: skip
        found[name] = exchange_facts(report, constexprs.get("WORLD", 1), "2")
        found[name]["atomics"] = sorted(set(re.findall(r"atom[.\w:]*|red[.\w:]+", report.ptx)))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
