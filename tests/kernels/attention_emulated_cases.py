"""Child process of test_attention_emulated.py: FP8 KV's append and decode attention as compiled for sm_90, their PTX
run on the CPU.

What Triton's interpreter cannot show: widening by inline PTX, V as transposed words of two elements, the layouts of
the tensor cores' operands, cp.async of codes and scales, tickets. Prints JSON: case -> largest |error| over its bound.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import product
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from engine.kernels import decode_attention as decode
from engine.kernels import rope_append as rope
from engine.kernels.decode_attention_kernel import decode_attention_kernel, kernel_constants
from engine.kernels.kv_fp8 import widen_pairs
from engine.kernels.online_softmax import LOG2_E
from tests.kernels.attention_cases import UNIT, Heads, attend_one, fp8_cache
from tests.kernels.compile_sm90 import compile_launch, describe_launch
from tests.kernels.ptx_emulator import U64, Memory, parse
from tests.kernels.ptx_hopper import HopperBlock

CONTEXTS = [1, 64, 65, 130]
MAX_LEN = 144


class GridBlock(HopperBlock):
    """A block of a grid of three dimensions."""

    def __init__(self, *args: Any, index: tuple[int, ...], grid: tuple[int, ...], **kwargs: Any):
        super().__init__(*args, **kwargs)
        pairs = zip("xyz", index, grid)
        self.places = {
            f"%{name}.{axis}": value
            for axis, i, size in pairs
            for name, value in (("ctaid", i), ("nctaid", size))
        }

    def read(self, name: str) -> np.ndarray:
        if name in self.places:
            return np.full(self.n, self.places[name], U64)
        return super().read(name)

    def convert(self, op: list[str], args: list[str], active: np.ndarray | None) -> None:
        if op[-2] != "e4m3x2":
            return super().convert(op, args, active)
        high, low = (torch.from_numpy(self.typed(x, "f32").copy()) for x in args[1:3])
        codes = [x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8) for x in (low, high)]
        word = codes[0].numpy().astype(np.uint16) | codes[1].numpy().astype(np.uint16) << 8
        return self.write(args[0], word, active)


def emulate(kernel: Any, arguments: Mapping[str, Any], grid: tuple[int, ...]) -> None:
    """kernel[grid](**arguments) on CPU tensors, block by block."""
    report = compile_launch(kernel, arguments, keep_text=True)
    signature, *_ = describe_launch(kernel, arguments)
    given = [arguments[name] for name in kernel.arg_names if name in signature]
    bits = [
        a.data_ptr() if isinstance(a, torch.Tensor)
        else int(np.float32(a).view(np.uint32)) if isinstance(a, float) else a
        for a in given
    ]  # fmt: skip
    program = parse(report.ptx)
    values = {
        name: U64(value & 0xFFFFFFFFFFFFFFFF)
        for (name, _), value in zip(program.parameters, [*bits, 0, 0])
    }
    memory = Memory([a for a in given if isinstance(a, torch.Tensor)])
    for index in product(*(range(size) for size in reversed(grid))):
        place = tuple(reversed(index))
        GridBlock(
            program, memory, report.shared_bytes, values, place[0], index=place, grid=grid, maps={},
            early=True,
        ).run()  # fmt: skip


@triton.jit
def pairs_kernel(words_ptr, even_ptr, odd_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    even, odd = widen_pairs(tl.load(words_ptr + i), even_ptr.dtype.element_ty)
    tl.store(even_ptr + i, even)
    tl.store(odd_ptr + i, odd)


def every_code(dtype: torch.dtype) -> float:
    """All 256 codes in both halves of a word, NaN included: 0 or infinity."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes = torch.stack((codes, codes.flip(0)), 1).flatten()
    halves = torch.full((2, 256), float("nan"), dtype=dtype)
    words = codes.view(torch.int16)
    arguments = dict(words_ptr=words, even_ptr=halves[0], odd_ptr=halves[1], N=256, num_warps=4)
    emulate(pairs_kernel, arguments, (1,))
    want = codes.view(torch.float8_e4m3fn).to(dtype).view(-1, 2).t()
    same = (halves == want) | (halves.isnan() & want.isnan())
    return 0.0 if bool(same.all()) else float("inf")


def _worst(got: torch.Tensor, want: torch.Tensor, bound: torch.Tensor) -> float:
    ratio = (got.double() - want).abs() / bound
    return float("inf") if got.isnan().any() else float(ratio.max())


def decode_error(
    heads: Heads, config: decode.DecodeAttentionConfig, dtype: torch.dtype, prefetch: bool
) -> float:
    """One row a context and a padding row; the bound of attention_cases.assert_close."""
    torch.manual_seed(3)
    group, d = heads.num_heads // heads.num_kv_heads, heads.head_dim
    (k, v), scales, exact = fp8_cache(CONTEXTS, MAX_LEN, heads, "cpu")
    slots = [3, -1, 0, 2, 1]
    q = torch.randn(len(slots), heads.num_heads * d).to(dtype)
    out = torch.full_like(q, float("nan"))
    space = decode.workspace(
        len(slots), heads.num_heads, heads.num_kv_heads, d, config.num_splits, "cpu"
    )
    arguments = dict(
        q_ptr=q, k_ptr=k, v_ptr=v, k_scale_ptr=scales[0], v_scale_ptr=scales[1],
        positions_ptr=torch.tensor(CONTEXTS, dtype=torch.int32) - 1,
        row_slots_ptr=torch.tensor(slots, dtype=torch.int32), out_ptr=out,
        partial_ptr=space.partial, stats_ptr=space.stats, tickets_ptr=space.tickets,
        max_len=MAX_LEN, max_splits=config.num_splits, qk_scale=d**-0.5 * LOG2_E,
        **kernel_constants(config, group, d, prefetch=prefetch, pdl=True),
        num_warps=config.num_warps, num_stages=config.num_stages, launch_pdl=True,
    )  # fmt: skip
    emulate(decode_attention_kernel, arguments, (config.num_splits, heads.num_kv_heads, len(slots)))
    if space.tickets.any() or out[1].any():
        return float("inf")
    worst = 0.0
    for row, slot in enumerate(slots):
        if slot < 0:
            continue
        n, unit = CONTEXTS[slot], UNIT[dtype]
        keys, values = (x[slot, :, :n] for x in exact)
        want = attend_one(q[row], keys, values, heads, d**-0.5)
        spread = attend_one(q[row], keys, values.abs(), heads, d**-0.5)
        bound = (unit + 2.0**-18) * spread + unit * want.abs() + n * 2.0**-25
        worst = max(worst, _worst(out[row], want, bound))
    return worst


def append_error(heads: Heads, *, decode: bool, norm: bool) -> float:
    """Codes and scales of an append against the reference's: 0 where all but two of a thousand codes are equal
    (RoPE's fused multiply-adds round otherwise) and no scale is off by more than a 16-bit step, else infinity."""
    torch.manual_seed(5)
    nq, nkv, d = heads.num_heads, heads.num_kv_heads, heads.head_dim
    tokens = 3 if decode else 20
    qkv = torch.randn(tokens, (nq + 2 * nkv) * d).bfloat16()
    angle = torch.rand(MAX_LEN, d // 2) * 6
    table = torch.stack((angle.cos(), angle.sin()), -1).flatten(1)
    gains = (1 + 0.1 * torch.randn(2, d)).bfloat16()
    qk_norm = rope.QKNorm(gains[0], gains[1], 1e-6) if norm else None
    rows = rope.DecodeRows(
        torch.tensor([70, 5], dtype=torch.int32), torch.tensor([1, -1, 0], dtype=torch.int32)
    )
    place = () if decode else (1, 37, 17)
    found = []
    for emulated in (True, False):
        caches = torch.full((2, 2, nkv, MAX_LEN, d), 0x7F, dtype=torch.uint8).view(
            torch.float8_e4m3fn
        )
        scales = torch.full((2, 2, nkv, MAX_LEN), float("nan"))
        if emulated:
            block_t = 1 if decode else rope.BLOCK_T
            arguments = dict(
                qkv_ptr=qkv, q_out_ptr=torch.empty(tokens, nq * d, dtype=torch.bfloat16),
                k_cache_ptr=caches[0], v_cache_ptr=caches[1], k_scale_ptr=scales[0], v_scale_ptr=scales[1],
                cos_sin_ptr=table,
                where_ptr=rows.row_slots if decode else torch.tensor(place, dtype=torch.int32),
                positions_ptr=rows.positions if decode else None,
                q_norm_ptr=gains[0] if norm else None, k_norm_ptr=gains[1] if norm else None,
                eps=1e-6, tokens=tokens, max_len=MAX_LEN, NUM_HEADS=nq, NUM_KV_HEADS=nkv, HEAD_DIM=d,
                BLOCK_T=block_t, BLOCK_D=d, DECODE=decode, NORM=norm, PDL=True,
                num_warps=rope.rope_warps(block_t, d), launch_pdl=True,
            )  # fmt: skip
            emulate(rope.rope_append_kernel, arguments, (-(-tokens // block_t), nq + 2 * nkv, 1))
        else:
            rope.rope_append_ref(
                qkv, caches[0], caches[1], table, *place, rows=rows if decode else None, norm=qk_norm,
                scales=(scales[0], scales[1]),
            )  # fmt: skip
        found.append((caches.view(torch.uint8), scales))
    (codes, scales), (want_codes, want_scales) = found
    torch.testing.assert_close(scales, want_scales, rtol=2.0**-7, atol=0, equal_nan=True)
    different = (codes != want_codes).float().mean() * codes.numel() / (want_codes != 0x7F).sum()
    return 0.0 if different < 2e-3 else float("inf")


def main() -> None:
    bf16, fp16 = torch.bfloat16, torch.float16
    config = decode.DecodeAttentionConfig
    errors = {f"every code as {dtype}": every_code(dtype) for dtype in (bf16, fp16)}
    # One program; three chunks and a merge; the heuristic's 8 warps. 130 keys: two loop tiles of 64, one masked.
    errors["decode, a program"] = decode_error(
        Heads(8, 1, 128), config(1, 64, 4, 4), bf16, prefetch=True
    )
    errors["decode, chunks"] = decode_error(
        Heads(7, 1, 64), config(3, 64, 4, 3, flat_blocks=1), fp16, prefetch=False
    )
    errors["decode, 8 warps"] = decode_error(
        Heads(10, 2, 128), config(2, 128, 8, 3), bf16, prefetch=True
    )
    for in_decode, norm in product((False, True), (False, True)):
        errors[f"append, decode={in_decode} norm={norm}"] = append_error(
            Heads(2, 1, 128), decode=in_decode, norm=norm
        )
    print(json.dumps(errors))


if __name__ == "__main__":
    main()
