"""Run as `python -m tests.kernels.compile_put_signal` without TRITON_INTERPRET: compiles the put,
poll and consume kernels for sm_90 and prints {name: report} as JSON."""

from __future__ import annotations

import json
import re
from dataclasses import asdict

from engine.kernels import put_signal
from tests.kernels.compile_sm90 import compile_sm90

ADDRESSES = ("source", "target", "header", "credit", "counter", "status", "word")


def forms():
    """(name, kernel, constexprs, warps): what `heuristic` picks for 16 B, 2 KB, 16 KB and more."""
    for nbytes in (16, 2048, 16384 - 16, 1 << 20):
        config = put_signal.heuristic(nbytes)
        shape = dict(BLOCK=config.block, THREADS=32 * config.num_warps)
        single = config.programs == 1
        for pdl in (False, True):
            on = dict(shape, SINGLE=single, PDL=pdl)
            yield f"put/{nbytes}/{int(pdl)}", put_signal.put_kernel, on, config.num_warps
    for pdl in (False, True):
        yield f"consume/{int(pdl)}", put_signal.consume_kernel, dict(PDL=pdl), 1
        yield f"poll/{int(pdl)}", put_signal.poll_kernel, dict(PDL=pdl), 1


def main() -> None:
    found = {}
    for name, fn, constexprs, warps in forms():
        types = {a: "i64" if a in ADDRESSES else "i32" for a in fn.arg_names if a not in constexprs}
        report = compile_sm90(
            fn, types, constexprs, num_warps=warps, num_stages=1, keep_text=True,
            launch_pdl=constexprs["PDL"],
        )  # fmt: skip
        row = asdict(report)
        ptx, sass = row.pop("ptx"), row.pop("sass")
        release = r"st\.release\.sys\.global\.u32"
        row["releases"] = len(re.findall(release, ptx))
        row["payload_stores"] = [
            m.start() for m in re.finditer(r"st\.relaxed\.sys\.global\.v4\.u32", ptx)
        ]
        row["release_at"] = [m.start() for m in re.finditer(release, ptx)]
        row["barriers_at"] = [m.start() for m in re.finditer(r"\bbar(?:rier)?\.sync", ptx)]
        row["acquires"] = len(re.findall(r"ld\.acquire\.sys\.global\.u32", ptx))
        row["tickets"] = re.findall(r"atom\.\S+", ptx)
        row["fences_sys"] = len(re.findall(r"MEMBAR\.\S*SYS", sass))
        row["waits"] = len(re.findall(r"griddepcontrol\.wait", ptx))
        found[name] = row
    print(json.dumps(found))


if __name__ == "__main__":
    main()
