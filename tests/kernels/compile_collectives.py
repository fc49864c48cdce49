"""Run as `python -m tests.kernels.compile_collectives` without TRITON_INTERPRET: compiles the
shipped forms of the collectives for sm_90 and prints {name: report} as JSON."""

from __future__ import annotations

import json

from engine.kernels import (
    all_reduce,
    argmax,
    flag_all_reduce,
    two_shot,
    two_shot_fused,
    two_shot_row,
)
from tests.kernels.compile_sm90 import Report, compile_sm90, exchange_facts

SCALARS = {
    name: "i32"
    for name in (
        "slot",
        "clear",
        "call_site",
        "rank",
        "limit_us",
        "chunks",
        "data",
        "half_bytes",
        "ring_size",
        "ring_stride",
    )
}
SCALARS |= {name: "i32" for name in ("rows", "parts", "columns", "limit", "id_offset")}
SCALARS |= {name: "i32" for name in ("T", "H", "S", "flags", "epoch_offset", "partials")}
SCALARS |= {name: "i32" for name in ("y_offset", "scales_offset", "last_offset")} | {"eps": "fp32"}
SCALARS |= {name: "i32" for name in ("scattered", "reduced", "epochs")}
ADDRESSES = {"own": "i64", "status": "i64", "peers": "*i64", "far": "*i64"}
HALVES = {name: "*bf16" for name in ("x", "residual", "out", "h", "gain", "message")}
STATE = {"values": "*fp32", "logits": "*fp32", "temperature": "*fp32"}
STATE |= {
    name: "*i32"
    for name in ("ids", "tokens", "positions", "row_slots", "request", "ring", "step", "seeds")
}
TYPES = SCALARS | ADDRESSES | HALVES | STATE


def check(fn, constexprs: dict, num_warps: int, **options) -> Report:
    types = {name: TYPES[name] for name in fn.arg_names if name not in constexprs}
    aligned = [name for name in types if types[name].startswith("*") or name in ("columns", "H")]
    return compile_sm90(
        fn,
        types,
        constexprs,
        aligned=aligned,
        num_warps=num_warps,
        num_stages=1,
        keep_text=True,
        launch_pdl=True,
        **options,
    )


def forms():
    """(name, kernel, constexprs, warps) of the forms that the engine launches."""
    for world in (2, 8):
        block, warps = (128, 4) if world == 2 else (256, 8)
        for name, push, poll in (
            ("push", 1, 0),
            ("poll", 0, 1),
            ("fused", 1, 1),
            ("poll_own", 0, 1),
        ):
            own = name.endswith("_own")  # re-arms what it read, as the engine's two slots need
            on = dict(PUSH=bool(push), POLL=bool(poll), RESIDUAL=bool(poll), CLEAR_OWN=own)
            yield (
                f"lamport/{name}/{world}",
                all_reduce.one_shot_kernel,
                dict(WORLD=world, BLOCK=block, PDL=True, **on),
                warps,
            )
        yield (
            f"flag/both/{world}",
            flag_all_reduce.flag_all_reduce_kernel,
            dict(
                WORLD=world,
                BLOCK=128,
                THREADS=128,
                PUBLISH=True,
                REDUCE=True,
                RESIDUAL=True,
                PDL=True,
            ),
            4,
        )
        yield (
            f"argmax/poll/{world}",
            argmax.argmax_poll_kernel,
            dict(
                WORLD=world,
                WORLDS=world,
                ROWS=max(8, 32 // world),
                WRITE_RING=True,
                REQUEST=False,
                PDL=True,
            ),
            1,
        )
    for world in (2, 8):
        block = dict(WORLD=world, PDL=True, BLOCK=8192)
        yield "two_shot/scatter", two_shot.scatter_kernel, dict(BLOCK=8192, PDL=True), 8
        yield f"two_shot/publish/{world}", two_shot.publish_kernel, dict(WORLD=world, PDL=True), 1
        for name in ("norm", "quantize", "sum"):
            on = dict(NORM=name != "sum", QUANTIZE=name == "quantize", LAST=name != "sum")
            yield (
                f"two_shot/reduce_{name}/{world}",
                two_shot.reduce_kernel,
                dict(**block, THREADS=256, RESIDUAL=True, **on),
                8,
            )
            portions = dict(PORTIONS=2, STRIDE=two_shot.MOST_PORTIONS)
            yield (
                f"two_shot/all_{name}/{world}",
                two_shot_fused.two_shot_kernel,
                dict(**block, THREADS=256, RESIDUAL=True, **portions, **on),
                8,
            )
        lanes = dict(WORLD=world, PDL=True, LANES=512 * world // 2)
        yield f"two_shot/gather/{world}", two_shot.gather_kernel, lanes, two_shot.GATHER_WARPS
    partial = dict(BLOCK=1024, REQUEST=False, PDL=True)
    yield (
        "argmax/push",
        argmax.argmax_push_kernel,
        dict(WORLD=8, PARTS=512, THREADS=128, PDL=True),
        4,
    )
    yield "argmax/partial", argmax.argmax_partial_kernel, partial, 4
    finish = dict(ROWS=8, PARTS=512, REQUEST=False, PDL=True)
    yield "argmax/finish", argmax.argmax_finish_kernel, finish, 8


def main() -> None:
    found = {}
    for name, fn, constexprs, warps in forms():
        options = {}
        if name.startswith(("two_shot/reduce", "two_shot/all")):
            options["maxnreg"] = two_shot_row.MOST_REGISTERS
        report = check(fn, constexprs, warps, **options)
        found[name] = exchange_facts(report, constexprs.get("WORLD", 1))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
