"""FP8-weight prefill GEMM with its conversion hidden behind the tensor cores (Gluon).

Formula, shapes and roof: gemm.py. The plain kernel converts a weight tile, stores it to shared
memory, and only then multiplies: the tensor cores idle meanwhile. Here weight rows are the M
operand
and come from registers:

    wait for the TMA of tile k
    read its weights, e4m3 -> 16-bit in registers   (the wgmma of tile k-1 still runs)
    wait for wgmma k-1, start wgmma k
    start the TMA of tile k-1+STAGES into the place of k-1

so a tile costs max(conversion, wgmma) instead of their sum, and weights cross shared memory once,
as bytes. With BN = 128 weight rows and BT = 256 tokens, wgmma m64n256k16 reads 64 bytes of shared
memory a cycle of the 128 there are; the 16-bit shared x shared form would read 80.

Shared memory: STAGES x (2 BT BK + BN BK) bytes; 8 warps hold a 128 x 256 fp32 tile in 128 registers
a thread.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from engine.kernels.gemm_config import GemmConfig, Operands
from engine.kernels.gemm_tile import (
    RESIDUAL,
    SCATTER,
    SILU_MUL,
    add_parts,
    leave_part,
    owners,
    tile_of_program,
    upcast_fp8,
)
from engine.kernels.sync import gdc_launch_dependents, gdc_wait


@gluon.jit
def _issue_weights(
    x_desc, w_desc, ws, bars, first, block, row_n, last, STAGES: gl.constexpr
):  # fmt: skip
    """Arm the stage of K block `block` of first..last-1 and start its weights; nothing from `last`
    on."""
    live = block < last
    slot = (block - first) % STAGES
    bar = bars.index(slot)
    BK: gl.constexpr = w_desc.block_type.shape[1]
    mbarrier.expect(bar, x_desc.block_type.nbytes + w_desc.block_type.nbytes, pred=live)
    tma.async_copy_global_to_shared(w_desc, [row_n, block * BK], bar, ws.index(slot), pred=live)


@gluon.jit
def _issue_tokens(x_desc, xs, bars, first, block, row_t, last, STAGES: gl.constexpr):
    """Start the tokens of K block `block`, whose stage `_issue_weights` has armed."""
    slot = (block - first) % STAGES
    BK: gl.constexpr = x_desc.block_type.shape[1]
    tma.async_copy_global_to_shared(
        x_desc, [row_t, block * BK], bars.index(slot), xs.index(slot), pred=block < last
    )


@gluon.jit
def _step(
    x_desc, w_desc, xs, ws, bars, running, first, block, row_t, row_n, last,
    FRAGMENT: gl.constexpr, DTYPE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Convert the weights of `block` behind the running wgmma, then start the wgmma of `block`;
    returns it."""
    slot = (block - first) % STAGES
    mbarrier.wait(bars.index(slot), ((block - first) // STAGES) & 1)
    weights = upcast_fp8(ws.index(slot).load(FRAGMENT), DTYPE)
    acc = warpgroup_mma_wait(0, deps=[running])
    running = warpgroup_mma(
        weights, xs.index(slot).permute((1, 0)), warpgroup_mma_init(acc), is_async=True
    )
    gl.thread_barrier()  # all warpgroups have waited, so the stage of block - 1 is free
    _issue_weights(x_desc, w_desc, ws, bars, first, block - 1 + STAGES, row_n, last, STAGES)
    _issue_tokens(x_desc, xs, bars, first, block - 1 + STAGES, row_t, last, STAGES)
    return running


@gluon.jit
def _store(
    y, out, residual, first_t, first_n, T, N, out_stride, res_stride, EPILOGUE: gl.constexpr
):  # fmt: skip
    """y fp32 [rows of w, tokens] (+ residual) -> out[t, n], 16 contiguous bytes a thread."""
    ROWS: gl.constexpr = y.shape[0]
    LAYOUT: gl.constexpr = gl.BlockedLayout(
        [8, 1], [min(32, ROWS // 8), max(1, 256 // ROWS)], [1, gl.num_warps()], [0, 1]
    )
    t = first_t + gl.arange(0, y.shape[1], layout=gl.SliceLayout(0, LAYOUT))
    n = first_n + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    inside = (t[None, :] < T) & (n[:, None] < N)
    if EPILOGUE == RESIDUAL:
        place = t[None, :].to(gl.int64) * res_stride + n[:, None]
        old = gl.load(residual + place, mask=inside, other=0.0).to(gl.float32)
        value = (old + gl.convert_layout(y, LAYOUT)).to(out.dtype.element_ty)
    else:
        value = gl.convert_layout(y.to(out.dtype.element_ty), LAYOUT)
    if EPILOGUE == SCATTER:
        t, away = owners(t, T, residual, res_stride)
        out += away[None, :]
    gl.store(out + t[None, :].to(gl.int64) * out_stride + n[:, None], value, mask=inside)


@gluon.jit
def _epilogue(
    acc, out, residual, scale, bias, tile_t, tile_n, T, N, out_stride, res_stride,
    BT: gl.constexpr, BN: gl.constexpr, EPILOGUE: gl.constexpr, HAS_BIAS: gl.constexpr,
    MMA: gl.constexpr,
):  # fmt: skip
    """acc fp32 [BN, BT] -> scale, bias, epilogue, one rounding, store with n contiguous in a
    thread."""
    row = tile_n * BN + gl.arange(0, BN, layout=gl.SliceLayout(1, MMA))
    acc = acc * gl.load(scale + row, mask=row < N, other=0.0)[:, None]
    if HAS_BIAS:
        acc = acc + gl.load(bias + row, mask=row < N, other=0.0).to(gl.float32)[:, None]
    ROWS: gl.constexpr = BN // 2 if EPILOGUE == SILU_MUL else BN
    if EPILOGUE == SILU_MUL:
        # 16 rows (8 pairs) of one token in a thread, so that a pair never leaves it.
        WIDE: gl.constexpr = gl.BlockedLayout(
            [16, 1], [min(32, BN // 16), max(1, 512 // BN)], [1, gl.num_warps()], [0, 1]
        )
        pairs = gl.convert_layout(acc, WIDE).reshape([ROWS, 2, BT]).permute((0, 2, 1))
        gate, up = gl.split(pairs)
        acc = gate / (1.0 + gl.exp(-gate)) * up
        N = N // 2
    first_t = tile_t * BT
    first_n = tile_n * ROWS
    if EPILOGUE == RESIDUAL:  # half the tokens at a time: fewer registers
        left, right = gl.split(acc.reshape([ROWS, 2, BT // 2]).permute((0, 2, 1)))
        second_t = first_t + BT // 2
        _store(left, out, residual, first_t, first_n, T, N, out_stride, res_stride, EPILOGUE)
        _store(right, out, residual, second_t, first_n, T, N, out_stride, res_stride, EPILOGUE)
    else:
        _store(acc, out, residual, first_t, first_n, T, N, out_stride, res_stride, EPILOGUE)


@gluon.jit
def gemm_async_kernel(
    x_desc, w_desc, out, residual, scale, bias, partials, tickets, T, N, K, out_stride, res_stride,
    BT: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, GROUP: gl.constexpr,
    STAGES: gl.constexpr, SPLIT: gl.constexpr, EPILOGUE: gl.constexpr, HAS_BIAS: gl.constexpr,
    DTYPE: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Grid: tiles of T x tiles of N x SPLIT, one dimension."""
    if PDL:
        gdc_launch_dependents()
    tile, part, tile_t, tile_n = tile_of_program(T, N, BT, BN, GROUP)
    row_t = tile_t * BT
    row_n = tile_n * BN
    blocks = (K + BK - 1) // BK
    first = part * blocks // SPLIT
    last = (part + 1) * blocks // SPLIT

    MMA: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, BT, 16]
    )
    FRAGMENT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=MMA, k_width=2)
    xs = gl.allocate_shared_memory(DTYPE, [STAGES, BT, BK], x_desc.layout)
    ws = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, BN, BK], w_desc.layout)
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(bars.index(s), count=1)
    gl.thread_barrier()
    for s in gl.static_range(STAGES):  # weights need not wait for the kernel in front
        _issue_weights(x_desc, w_desc, ws, bars, first, first + s, row_n, last, STAGES)
    if PDL:
        gdc_wait()
    for s in gl.static_range(STAGES):
        _issue_tokens(x_desc, xs, bars, first, first + s, row_t, last, STAGES)

    mbarrier.wait(bars.index(0), 0)
    weights = upcast_fp8(ws.index(0).load(FRAGMENT), DTYPE)
    acc = gl.zeros([BN, BT], gl.float32, MMA)
    running = warpgroup_mma(
        weights, xs.index(0).permute((1, 0)), warpgroup_mma_init(acc), is_async=True
    )
    # Two steps a turn, so that a fragment never lies in the registers that the running wgmma still
    # reads.
    for pair in range((last - first - 1) // 2):
        for odd in gl.static_range(2):
            running = _step(
                x_desc, w_desc, xs, ws, bars, running, first, first + 1 + 2 * pair + odd,
                row_t, row_n, last, FRAGMENT, DTYPE, STAGES,
            )  # fmt: skip
    if (last - first) % 2 == 0:
        running = _step(
            x_desc, w_desc, xs, ws, bars, running, first, last - 1, row_t, row_n, last,
            FRAGMENT, DTYPE, STAGES,
        )  # fmt: skip
    acc = warpgroup_mma_wait(0, deps=[running])
    gl.thread_barrier()
    for s in gl.static_range(STAGES):
        mbarrier.invalidate(bars.index(s))
    if SPLIT == 1:
        _epilogue(
            acc, out, residual, scale, bias, tile_t, tile_n, T, N, out_stride, res_stride,
            BT, BN, EPILOGUE, HAS_BIAS, MMA,
        )  # fmt: skip
    else:
        row = gl.arange(0, BN, layout=gl.SliceLayout(1, MMA))
        column = gl.arange(0, BT, layout=gl.SliceLayout(0, MMA))
        mine = (
            partials + tile.to(gl.int64) * (SPLIT * BT * BN) + row[:, None] * BT + column[None, :]
        )
        if leave_part(mine, acc, part, tickets, tile, BT * BN) == SPLIT - 1:
            total = add_parts(mine, tickets, tile, BT * BN, SPLIT)
            _epilogue(
                total, out, residual, scale, bias, tile_t, tile_n, T, N, out_stride, res_stride,
                BT, BN, EPILOGUE, HAS_BIAS, MMA,
            )  # fmt: skip


_DTYPE = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


def launch(call: Operands, config: GemmConfig, pdl: bool) -> None:
    """x 16-bit, w e4m3, both with 16-byte aligned rows; block_t <= 256, block_n a multiple of 16 x warps.
    config: as `gemm` has settled it for this call."""
    dtype = _DTYPE[call.x.dtype]

    def descriptor(matrix: torch.Tensor, rows: int, kind: gl.dtype) -> TensorDescriptor:
        block = [rows, config.block_k]
        layout = gl.NVMMASharedLayout.get_default_for(block, kind)
        return TensorDescriptor.from_tensor(matrix, block, layout)

    gemm_async_kernel[call.grid(config)](
        descriptor(call.x, config.block_t, dtype), descriptor(call.w, config.block_n, gl.float8e4nv),
        *call.pointers(), *call.sizes, *call.strides()[2:],
        **call.constants(config, pdl), STAGES=config.stages, DTYPE=dtype,
    )  # fmt: skip
