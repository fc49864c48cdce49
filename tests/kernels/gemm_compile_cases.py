"""Child process of test_compile_gemm.py: compiles GEMM configurations for sm_90 and prints one line
of JSON.

Each report carries what Report lacks: TMA loads, and whether ptxas had to serialise the wgmma
instructions.
"""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import asdict, replace

from triton.experimental.gluon import language as gl

from engine.kernels.gemm import GemmConfig, heuristic
from engine.kernels.gemm_async import gemm_async_kernel
from engine.kernels.gemm_kernel import gemm_kernel
from engine.tune import gemm_space
from tests.kernels.compile_sm90 import SIGNATURE, Report, compile_sm90

EPILOGUE = {"store": 0, "residual": 1, "silu_mul": 2, "scatter": 3}
_SIZES = ("T", "N", "K", "x_stride", "w_stride", "out_stride", "res_stride")


def compile_gemm(
    config: GemmConfig, *, fp8: bool, epilogue: str, act: str = "bf16", tma: bool = True
) -> Report:
    """Compile one variant as `gemm` would launch it on aligned tensors; bias with Store only."""
    if config.kernel == "async":
        return _compile_async(config, epilogue, act)
    weight = "fp8e4nv" if fp8 else act
    token = "fp8e4nv" if config.kernel == "w8a8" else act
    pointers = {
        **_outputs(epilogue, act), "bias": SIGNATURE[act],
        "scale": "*fp32", "partials": "*fp32", "tickets": "*i32", **dict.fromkeys(_SIZES, "i32"),
    }  # fmt: skip
    constants = dict(
        BT=config.block_t, BN=config.block_n, BK=config.block_k, GROUP=config.group,
        SWAP=config.swap, SPLIT=config.split_k, TMA=tma, EPILOGUE=EPILOGUE[epilogue],
        HAS_SCALE=fp8, HAS_BIAS=epilogue == "store", PROMOTE=config.promote, PDL=True,
        TAIL=config.tail, WAVE=config.wave,
    )  # fmt: skip
    if config.kernel == "w8a8":
        pointers["x_scale"] = "*fp32"
    else:
        constants["x_scale"] = None
    operands = {
        "x": f"tensordesc<{token}[{config.block_t}, {config.block_k}]>" if tma else f"*{token}",
        "w": f"tensordesc<{weight}[{config.block_n}, {config.block_k}]>" if tma else f"*{weight}",
    }
    return compile_sm90(
        gemm_kernel, operands | pointers, constants,
        aligned=list(pointers) if tma else [*operands, *pointers], num_warps=config.warps,
        num_stages=config.stages, keep_text=True,
    )  # fmt: skip


def _outputs(epilogue: str, act: str) -> dict[str, str]:
    """Types of out and residual, which is Scatter's table."""
    return {"out": SIGNATURE[act], "residual": "*i64" if epilogue == "scatter" else SIGNATURE[act]}


def _compile_async(config: GemmConfig, epilogue: str, act: str) -> Report:
    dtype = {"bf16": gl.bfloat16, "fp16": gl.float16}[act]
    bt, bn, bk = config.block_t, config.block_n, config.block_k
    x_layout = gl.NVMMASharedLayout.get_default_for([bt, bk], dtype)
    w_layout = gl.NVMMASharedLayout.get_default_for([bn, bk], gl.float8e4nv)
    pointers = {
        **_outputs(epilogue, act), "bias": SIGNATURE[act], "scale": "*fp32",
        "partials": "*fp32", "tickets": "*i32",
        **dict.fromkeys(("T", "N", "K", "out_stride", "res_stride"), "i32"),
    }  # fmt: skip
    return compile_sm90(
        gemm_async_kernel,
        {
            "x_desc": f"tensordesc<{act}[{bt}, {bk}],{x_layout!r}>",
            "w_desc": f"tensordesc<fp8e4nv[{bn}, {bk}],{w_layout!r}>",
            **pointers,
        },
        dict(
            BT=bt, BN=bn, BK=bk, GROUP=config.group, STAGES=config.stages, SPLIT=config.split_k,
            EPILOGUE=EPILOGUE[epilogue], HAS_BIAS=epilogue == "store", DTYPE=dtype, PDL=True,
        ),
        aligned=list(pointers), num_warps=config.warps, keep_text=True,
    )  # fmt: skip


def _facts(report: Report) -> dict:
    """Report as a dict, and what it lacks."""
    facts = asdict(report)
    sass, ptx = facts.pop("sass"), facts.pop("ptx")
    facts["tma_loads"] = len(re.findall(r"\bUTMALDG\b", sass))
    facts["waits_in_wgmma"] = len(re.findall(r"\bWARPGROUP\.DEPBAR\b", sass))
    facts["fences"] = len(re.findall(r"\bWARPGROUP\.ARRIVE\b", sass))
    facts["slow_converts"] = len(re.findall(r"\bF2F\.", sass))
    facts["clobbered_fragments"] = _clobbered_fragments(sass)
    facts["pdl"] = ("griddepcontrol.wait" in ptx) + ("griddepcontrol.launch_dependents" in ptx)
    return facts


def _clobbered_fragments(sass: str) -> int:
    """Instructions that write a register which a wgmma still in flight reads its A operand from."""
    code = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([^;]*);", sass, re.M)
    busy: set[int] = set()
    count = 0
    for line in (
        code * 2
    ):  # twice: a loop's second turn sees the wgmma its first turn left in flight
        hgmma = re.match(r"HGMMA\S+ R\d+, R(\d+), gdesc", line)
        written = re.match(r"(?!ST|HGMMA)([A-Z0-9_.]+) R(\d+)", line)
        if hgmma:
            busy |= set(range(int(hgmma.group(1)), int(hgmma.group(1)) + 4))
        elif line.startswith("WARPGROUP.DEPBAR.LE gsb0, 0x0"):
            busy.clear()
        elif written:
            opcode, first = written.group(1), int(written.group(2))
            width = 4 if ".128" in opcode else 2 if ".64" in opcode or "WIDE" in opcode else 1
            count += bool(busy & set(range(first, first + width)))
    return count


def cases() -> dict[str, dict]:
    """What ships: the heuristic's picks, and the search space around one prefill and one short
    prompt."""
    wanted: dict[tuple, dict] = {}
    for fp8 in (False, True):
        kind = "fp8" if fp8 else "bf16"
        for t, n, k in ((16, 1280, 8192), (64, 8192, 3696), (512, 5120, 8192), (2048, 29568, 8192)):
            epilogue = "silu_mul" if n == 29568 else "residual" if n == 8192 else "store"
            space = (
                gemm_space.candidates(t, n, k, kind)
                if (t, n) in ((16, 1280), (2048, 29568))
                else []
            )
            for config in (heuristic(t, n, k, kind), *space):
                if config.kernel != "cublas" and config.tail == 1:
                    wanted[(config, epilogue, fp8, "bf16", True)] = {}
    shapes = {(c.block_t, c.block_n, c.block_k, c.warps, c.stages, c.split_k): c
              for t, n, k in ((2048, 29568, 8192), (512, 4608, 3584))
              for c in (*gemm_space.candidates(t, n, k, "w8a8"), heuristic(t, n, k, "w8a8"))
              if c.tail == 1}  # fmt: skip
    for config in shapes.values():
        for epilogue in ("store", "residual", "silu_mul"):
            wanted[(config, epilogue, True, "bf16", True)] = {}
    # The last wave split over K: 2 parts, the code of up to 4, and 8, which are summed in two turns.
    for kind in ("bf16", "w8a8"):
        tails = [c for c in gemm_space.candidates(512, 37888, 3584, kind) if c.tail > 1]
        for config, epilogue in itertools.product(tails, EPILOGUE):
            wanted[(config, epilogue, kind == "w8a8", "bf16", True)] = {}
        for epilogue in ("residual", "silu_mul"):
            wanted[(replace(tails[0], tail=8), epilogue, kind == "w8a8", "bf16", True)] = {}
    square = GemmConfig("w8a8", block_k=128, warps=8, stages=3)
    wanted[(replace(square, promote=True), "residual", True, "bf16", True)] = {}
    wanted[(square, "silu_mul", True, "fp16", True)] = {}
    wanted[(square, "store", True, "bf16", False)] = {}
    for kind in ("bf16", "fp8", "w8a8"):  # o_proj and down of a prefill at TP > 1
        for t in (512, 2048):
            wanted[(heuristic(t, 8192, 4096, kind), "scatter", kind != "bf16", "bf16", True)] = {}
    wanted[(replace(square, block_n=256), "scatter", True, "bf16", True)] = {}
    wanted[(GemmConfig(stages=4, warps=8, block_t=256), "scatter", False, "bf16", True)] = {}
    swapped = GemmConfig(stages=4, warps=8, block_t=256, swap=True)
    wanted[(swapped, "scatter", False, "bf16", True)] = {}
    base = GemmConfig(stages=3, warps=8)
    wide = GemmConfig(kernel="async", block_t=256, block_n=128, warps=8, stages=4)
    wanted[(wide, "residual", True, "bf16", True)] = {}
    wanted[(wide, "store", True, "fp16", True)] = {}
    wanted[(replace(wide, block_t=128, split_k=3), "store", True, "bf16", True)] = {}
    wanted[(replace(base, split_k=3), "residual", False, "bf16", True)] = {}
    wanted[(base, "residual", False, "fp16", True)] = {}
    wanted[(base, "residual", True, "fp16", True)] = {}
    wanted[(base, "store", False, "bf16", False)] = {}
    return {
        f"{c} {e} {act}{' fp8' if f else ''} tma={tma}": dict(
            _facts(compile_gemm(c, fp8=f, epilogue=e, act=act, tma=tma)),
            fp8=f,
            act=act,
            tma=tma,
            swap=c.swap,
            kernel=c.kernel,
        )
        for c, e, f, act, tma in wanted
    }


if __name__ == "__main__":
    print(json.dumps(cases()))
