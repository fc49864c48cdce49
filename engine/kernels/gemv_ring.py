# ruff: noqa: RUF005 - Triton has no starred tuples.
# mypy: disable-error-code="assignment, var-annotated, attr-defined, index"
"""The streaming GEMV (Gluon): a shared-memory ring of weight tiles feeding tensor cores.

Formula and shapes: gemv.py. A persistent program owns a contiguous run of output rows and streams their weights
with cp.async through STAGES tiles of [BLOCK_N rows, BLOCK_K]; the ring is filled BEFORE the wait on the kernel
in front, so on all multiprocessors together up to 26 MB, 6 us of HBM time, arrive while a barrier is still open.

Tensor cores: mma.m16n8k16, 16 weight rows as M and the activation rows as N, so 1 row costs what 8 cost.
e4m3 weights become fp16 by one packed convert (exact); activations become fp16 too, after RMSNorm or after a
power-of-two scale per row that brings the largest to [2^14, 2^15), which keeps bf16's range. 16-bit weights
keep their type. The fragments of a thread are 16 contiguous bytes of a weight row: K is permuted the same way in
both operands (DotOperandLayout's k_width), which a sum over K does not see.

WARPS_K warps share an output row: warp i takes the i-th part of every tile's K (the batch dimension of a 3-D
mma), and their sums are added at the end of the row. Order of a sum: within a warp by K, then over the warps; it
depends on BLOCK_K, WARPS_K and K only, never on R.

Shared memory per program: STAGES x BLOCK_N x BLOCK_K x bytes of the ring + 2 R K bytes of activations
(STAGE_X; without it they are read again for every tile, from L2) + 4 R WARPS_K BLOCK_N of scratch.
"""

from __future__ import annotations

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from engine.kernels.argmax_kernel import LOWEST_KEY, row_noise, store_key
from engine.kernels.gemv_epilogue import (
    maxima_keys,
    push_targets,
    rope_operands,
    rope_rows,
    store_outputs,
    store_push,
    store_rope,
    store_silu,
)
from engine.kernels.gemv_poll import POLL_SCALARS, poll_chunks
from engine.kernels.sync import gdc_launch_dependents, gdc_wait


@gluon.jit
def power_of_two_scale(largest):
    """Largest |x| of a row -> (2^s, 2^-s) with largest * 2^s in [2^14, 2^15): fp16 holds it."""
    exponent = (largest.to(gl.int32, bitcast=True) >> 23) & 0xFF
    scale = gl.minimum(gl.maximum(268 - exponent, 1), 253)
    inverse = 254 - scale
    return (scale << 23).to(gl.float32, bitcast=True), (inverse << 23).to(gl.float32, bitcast=True)


@gluon.jit
def copy_tile(
    stage, w_ptr, offsets, n, k, block, kt, rows, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    K: gl.constexpr, EVEN: gl.constexpr,
):  # fmt: skip
    """Start the copy of tile kt of row block `block`; elements outside the matrix arrive as zeros."""
    source = w_ptr + (block.to(gl.int64) * BLOCK_N * K + kt * BLOCK_K) + offsets
    if EVEN:
        async_copy.async_copy_global_to_shared(stage, source)
    else:
        live = (n + block * BLOCK_N < rows) & (k + kt * BLOCK_K < K)
        async_copy.async_copy_global_to_shared(stage, source, mask=live)


@gluon.jit
def load_x(x_ptr, row, k, R: gl.constexpr, K: gl.constexpr):
    """x[row, k], zero outside."""
    return gl.load(x_ptr + row * K + k, mask=(row < R) & (k < K), other=0.0)


@gluon.jit
def row_factors(
    x_ptr,
    kept,
    row,
    k,
    eps,
    R: gl.constexpr,
    K: gl.constexpr,
    CHUNKS: gl.constexpr,
    NORM: gl.constexpr,
):
    """Per row of x: rstd and 1 (NORM), or the fp16 scale and its inverse. `kept`: chunks already loaded, or ()."""
    CHUNK: gl.constexpr = k.shape[1]
    LAYOUT: gl.constexpr = k.type.layout
    total = gl.zeros([row.shape[0], CHUNK], gl.float32, LAYOUT)
    for c in gl.static_range(CHUNKS):
        if len(kept) > 0:
            v = kept[c].to(gl.float32)
        else:
            v = load_x(x_ptr, row, c * CHUNK + k, R, K).to(gl.float32)
        if NORM:
            total = gl.fma(v, v, total)
        else:
            total = gl.maximum(total, gl.abs(v))
    if NORM:
        factor = gl.rsqrt(gl.sum(total, 1) / K + eps)
        return factor, factor * 0.0 + 1.0
    else:
        return power_of_two_scale(gl.max(total, 1))


@gluon.jit
def prepare_x(v, factor, g, MATH: gl.constexpr):
    """16-bit activations -> what the tensor cores multiply: times the row's factor and the norm weight."""
    if factor is not None:
        v = v.to(gl.float32) * factor
        if g is not None:
            v = v * g.to(gl.float32)
    return v.to(MATH)


@gluon.jit
def load_fragment(
    x_ptr, norm_ptr, kt, R: gl.constexpr, K: gl.constexpr, RP: gl.constexpr, WARPS_K: gl.constexpr,
    WARP_K: gl.constexpr, FRAGMENT: gl.constexpr,
):  # fmt: skip
    """Tile kt of x and of the norm weight (or x again) from global memory: [WARPS_K, WARP_K, RP], 16-bit."""
    part = gl.arange(0, WARPS_K, gl.SliceLayout(1, gl.SliceLayout(2, FRAGMENT)))
    k = gl.arange(0, WARP_K, gl.SliceLayout(0, gl.SliceLayout(2, FRAGMENT)))
    row = gl.arange(0, RP, gl.SliceLayout(0, gl.SliceLayout(1, FRAGMENT)))[None, :][:, None, :]
    k = (kt * WARPS_K + part[:, None][:, :, None]) * WARP_K + k[None, :][:, :, None]
    x = load_x(x_ptr, row, k, R, K)
    if norm_ptr is not None:
        g = gl.load(norm_ptr + k, mask=k < K, other=0.0)
        return x, g
    else:
        return x, x


@gluon.jit
def pair_index(
    first, rows, LAYOUT: gl.constexpr, BLOCK_N: gl.constexpr, RP: gl.constexpr, R: gl.constexpr
):
    """(pair, row, live) of the [BLOCK_N / 2, RP] tensors of a block of outputs first .. first + rows."""
    n = 2 * gl.arange(0, BLOCK_N // 2, gl.SliceLayout(1, LAYOUT))[:, None]
    row = gl.arange(0, RP, gl.SliceLayout(0, LAYOUT))[None, :]
    return (first + n) // 2, row, (n < rows) & (row < R)


@gluon.jit
def split_pairs(y):
    """[BLOCK_N, RP] -> the even and the odd outputs, [BLOCK_N / 2, RP] each."""
    BLOCK_N: gl.constexpr = y.shape[0]
    RP: gl.constexpr = y.shape[1]
    return gl.split(gl.permute(gl.reshape(y, [BLOCK_N // 2, 2, RP]), [0, 2, 1]))


@gluon.jit(do_not_specialize=["k_tiles", "push_offset", "id_offset", *POLL_SCALARS])
def gemv_ring_kernel(
    x_ptr, w_ptr, scale_ptr, bias_ptr, norm_ptr, out_ptr, residual_ptr,
    temperature_ptr, seeds_ptr, request_ptr, values_ptr, ids_ptr, id_offset,  # of Maxima, or None
    k_cache_ptr, v_cache_ptr, cos_sin_ptr, positions_ptr, row_slots_ptr, table_ptr, push_offset,
    hidden_ptr, messages, rearm, status, limit_us, poll_rank, poll_site, poll_slot,  # see gemv_poll.py
    eps,
    k_tiles,  # cdiv(K, BLOCK_K), at run time so that the loop over K is not unrolled
    N: gl.constexpr,
    K: gl.constexpr,
    R: gl.constexpr,
    ROWS_PER_PROGRAM: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    WARPS_K: gl.constexpr,
    STAGE_X: gl.constexpr,
    EPILOGUE: gl.constexpr,
    NUM_HEADS: gl.constexpr, NUM_KV_HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, VOCAB_SIZE: gl.constexpr,
    MAX_LEN: gl.constexpr,
    WORLD: gl.constexpr,
    POLL: gl.constexpr,
    PREFETCH: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """One program: ROWS_PER_PROGRAM output rows, all of K, all R activation rows."""
    if PDL and EPILOGUE != "push":
        gdc_launch_dependents()
    WARPS: gl.constexpr = gl.num_warps()
    WARPS_N: gl.constexpr = WARPS // WARPS_K
    RP: gl.constexpr = triton.next_power_of_2(R)
    FP8: gl.constexpr = w_ptr.dtype.element_ty == gl.float8e4nv
    BYTES: gl.constexpr = 1 if FP8 else 2
    VECTOR: gl.constexpr = 16 // BYTES
    MATH: gl.constexpr = gl.float16 if FP8 else w_ptr.dtype.element_ty
    WARP_K: gl.constexpr = BLOCK_K // WARPS_K  # K of one warp in a tile
    EVEN: gl.constexpr = (
        K % BLOCK_K == 0 and N % ROWS_PER_PROGRAM == 0 and ROWS_PER_PROGRAM % BLOCK_N == 0
    )

    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS_K, WARPS_N, 1], [1, 16, 8])
    W_FRAGMENT: gl.constexpr = gl.DotOperandLayout(0, MMA, VECTOR)
    X_FRAGMENT: gl.constexpr = gl.DotOperandLayout(1, MMA, VECTOR)
    # A fragment load takes 64 bytes of each row; two neighbouring rows in different halves of the 32 banks.
    RING: gl.constexpr = gl.SwizzledSharedLayout(64 // BYTES, 1, 2, [2, 1, 0])
    # Copies: 16 bytes a thread, lanes along a row first, over the parts of all warps, then over rows.
    LANES_K: gl.constexpr = WARP_K // VECTOR if WARP_K // VECTOR < 32 else 32
    LANES_P: gl.constexpr = WARPS_K if WARPS_K < 32 // LANES_K else 32 // LANES_K
    COPY_P: gl.constexpr = WARPS_K // LANES_P
    COPY: gl.constexpr = gl.BlockedLayout(
        [1, 1, VECTOR],
        [LANES_P, 32 // LANES_K // LANES_P, LANES_K],
        [COPY_P, WARPS // COPY_P, 1],
        [2, 1, 0],
    )

    pid = gl.program_id(0)
    first = pid * ROWS_PER_PROGRAM
    rows = gl.minimum(ROWS_PER_PROGRAM, N - first)
    blocks = gl.cdiv(rows, BLOCK_N)
    total = blocks * k_tiles
    w_ptr += first.to(gl.int64) * K
    part = gl.arange(0, WARPS_K, gl.SliceLayout(1, gl.SliceLayout(2, COPY)))[:, None][:, :, None]
    n = gl.arange(0, BLOCK_N, gl.SliceLayout(0, gl.SliceLayout(2, COPY)))[None, :][:, :, None]
    k = gl.arange(0, WARP_K, gl.SliceLayout(0, gl.SliceLayout(1, COPY)))[None, :][:, None, :]
    k = part * WARP_K + k
    offsets = n * K + k

    # Weights and constants, before the wait.
    ring = gl.allocate_shared_memory(
        w_ptr.dtype.element_ty, [STAGES, WARPS_K, BLOCK_N, WARP_K], RING
    )
    next_block = first * 0
    next_k = first * 0
    for s in gl.static_range(STAGES - 1):
        if s < total:
            copy_tile(
                ring.index(s),
                w_ptr,
                offsets,
                n,
                k,
                next_block,
                next_k,
                rows,
                BLOCK_N,
                BLOCK_K,
                K,
                EVEN,
            )
        async_copy.commit_group()
        next_k += 1
        next_block = gl.where(next_k == k_tiles, next_block + 1, next_block)
        next_k = gl.where(next_k == k_tiles, 0, next_k)

    # Activations: [RP, X_CHUNK] at a time, a thread holds 8 of each row, so that the order of the sum of
    # squares is the same for every RP.
    X_TILES: gl.constexpr = WARPS * 256 // BLOCK_K if WARPS * 256 > BLOCK_K else 1
    X_CHUNK: gl.constexpr = X_TILES * BLOCK_K
    CHUNKS: gl.constexpr = (K + X_CHUNK - 1) // X_CHUNK
    X_LOAD: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [1, WARPS], [1, 0])
    NORM: gl.constexpr = norm_ptr is not None
    SCALED: gl.constexpr = FP8 and not NORM and x_ptr.dtype.element_ty != gl.float16
    xr = gl.arange(0, RP, gl.SliceLayout(1, X_LOAD))[:, None]
    xk = gl.arange(0, X_CHUNK, gl.SliceLayout(0, X_LOAD))[None, :]
    gs = ()
    if NORM and STAGE_X:
        for c in gl.static_range(CHUNKS):
            at = c * X_CHUNK + xk
            gs = gs + (gl.load(norm_ptr + at, mask=at < K, other=0.0),)
    # Epilogue tensors are [BLOCK_N, RP]: neighbouring outputs in one thread, then over lanes.
    COLS: gl.constexpr = RP if RP < WARPS else WARPS
    OUT: gl.constexpr = gl.BlockedLayout([2, 1], [32, 1], [WARPS // COLS, COLS], [0, 1])
    out_n = gl.arange(0, BLOCK_N, gl.SliceLayout(1, OUT))
    if scale_ptr is not None:
        scale = gl.load(scale_ptr + first + out_n, mask=out_n < rows, other=0.0)
    if bias_ptr is not None:
        bias = gl.load(bias_ptr + first + out_n, mask=out_n < rows, other=0.0)
    PAIRS: gl.constexpr = split_pairs(gl.zeros([BLOCK_N, RP], gl.float32, OUT))[0].type.layout
    pair_row = gl.arange(0, RP, gl.SliceLayout(0, PAIRS))[None, :]
    if EPILOGUE == "push":
        targets = push_targets(table_ptr, push_offset, WORLD)
    if EPILOGUE == "rope" and PREFETCH:
        held = rope_rows(pair_row, positions_ptr, row_slots_ptr, R)
    if PDL:
        gdc_wait()
        if EPILOGUE == "push":  # a poll may overlap this launch, and no other (all_reduce.py)
            gdc_launch_dependents()
    if EPILOGUE == "rope" and not PREFETCH:
        held = rope_rows(pair_row, positions_ptr, row_slots_ptr, R)

    # Keep what the first pass loads for the second one while it is at most 32 registers.
    kept = ()
    if POLL:
        poll = (hidden_ptr, messages, rearm, status, limit_us, poll_rank, poll_site, poll_slot)
        kept = poll_chunks(
            x_ptr, poll, R, K, RP, X_CHUNK, POLL, gl.cdiv(N, ROWS_PER_PROGRAM), X_LOAD
        )
    elif STAGE_X and RP * CHUNKS * X_CHUNK <= WARPS * 32 * 64:
        for c in gl.static_range(CHUNKS):
            kept = kept + (load_x(x_ptr, xr, c * X_CHUNK + xk, R, K),)
    factor = None
    if NORM or SCALED:
        factor, inverse = row_factors(x_ptr, kept, xr, xk, eps, R, K, CHUNKS, NORM)
        inverse = gl.convert_layout(inverse, gl.SliceLayout(0, OUT))[None, :]
    if STAGE_X:
        # Fragments of 16 e4m3 weights face 32 bytes of x: the other half of them goes to the other banks.
        X_SHARED: gl.constexpr = gl.SwizzledSharedLayout(8 if FP8 else 32, 1, 2, [2, 1, 0])
        staged = gl.allocate_shared_memory(MATH, [CHUNKS * X_TILES, WARPS_K, RP, WARP_K], X_SHARED)
        by_chunk = staged._reinterpret(MATH, [CHUNKS, X_TILES * WARPS_K, RP, WARP_K], X_SHARED)
        column = None
        if NORM or SCALED:
            column = factor[:, None]
        for c in gl.static_range(CHUNKS):
            if len(kept) > 0:
                v = kept[c]
            else:
                v = load_x(x_ptr, xr, c * X_CHUNK + xk, R, K)
            if NORM:
                v = prepare_x(v, column, gs[c], MATH)
            else:
                v = prepare_x(v, column, None, MATH)
            v = gl.reshape(v, [RP, X_TILES * WARPS_K, WARP_K])
            by_chunk.index(c).store(gl.permute(v, [1, 0, 2]))

    else:
        # One tile ahead in registers.
        next_x, next_g = load_fragment(x_ptr, norm_ptr, 0, R, K, RP, WARPS_K, WARP_K, X_FRAGMENT)
        column = None
        if NORM or SCALED:
            column = gl.convert_layout(factor, gl.SliceLayout(0, gl.SliceLayout(1, X_FRAGMENT)))
            column = column[None, :][:, None, :]

    if EPILOGUE == "maxima":
        out_r = gl.arange(0, RP, gl.SliceLayout(0, OUT))[None, :]
        noise = row_noise(
            temperature_ptr, seeds_ptr, positions_ptr, row_slots_ptr, request_ptr, out_r, out_r < R,
            request_ptr is not None,
        )  # fmt: skip
        best = gl.full([BLOCK_N // 2, RP], LOWEST_KEY, gl.int64, PAIRS)  # of all blocks so far
    slot = first * 0
    last_slot = slot + (STAGES - 1)
    for block in range(blocks):
        block_first = first + block * BLOCK_N
        block_rows = rows - block * BLOCK_N
        # What the epilogue reads is on its way during the sum over K.
        if EPILOGUE == "store" or EPILOGUE == "maxima":
            out_r = gl.arange(0, RP, gl.SliceLayout(0, OUT))[None, :]
            live = (out_n[:, None] < block_rows) & (out_r < R)
            index = block_first + out_n[:, None]
            residual = None
            if residual_ptr is not None:
                residual = gl.load(residual_ptr + out_r * N + index, mask=live, other=0.0)
        else:
            pair, row, live = pair_index(block_first, block_rows, PAIRS, BLOCK_N, RP, R)
            if EPILOGUE == "rope":
                operands = rope_operands(
                    pair, live, held, cos_sin_ptr, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM
                )
        acc = gl.zeros([WARPS_K, BLOCK_N, RP], gl.float32, MMA)
        for kt in range(k_tiles):
            if not STAGE_X:
                if NORM:
                    x = prepare_x(next_x, column, next_g, MATH)
                else:
                    x = prepare_x(next_x, column, None, MATH)
                following_k = gl.where(kt + 1 == k_tiles, 0, kt + 1)
                next_x, next_g = load_fragment(
                    x_ptr, norm_ptr, following_k, R, K, RP, WARPS_K, WARP_K, X_FRAGMENT
                )
            async_copy.wait_group(STAGES - 2)
            if STAGE_X:
                x = staged.index(kt).permute([0, 2, 1]).load(X_FRAGMENT)
            w = ring.index(slot).load(W_FRAGMENT)
            if next_block < blocks:
                copy_tile(
                    ring.index(last_slot), w_ptr, offsets, n, k, next_block, next_k, rows,
                    BLOCK_N, BLOCK_K, K, EVEN,
                )  # fmt: skip
            async_copy.commit_group()
            next_k += 1
            next_block = gl.where(next_k == k_tiles, next_block + 1, next_block)
            next_k = gl.where(next_k == k_tiles, 0, next_k)
            last_slot = slot
            slot = gl.where(slot == STAGES - 1, 0, slot + 1)
            acc = mma_v2(w.to(MATH), x, acc)

        y = gl.convert_layout(gl.sum(acc, 0), OUT)
        if SCALED:
            y = y * inverse
        # Scales and biases of the next block are fetched under its K loop.
        following = out_n + (block + 1) * BLOCK_N
        if scale_ptr is not None:
            y = y * scale[:, None]
            scale = gl.load(scale_ptr + first + following, mask=following < rows, other=0.0)
        if bias_ptr is not None:
            y = y + bias[:, None].to(gl.float32)
            bias = gl.load(bias_ptr + first + following, mask=following < rows, other=0.0)
        if EPILOGUE == "store":
            store_outputs(y, residual, index, out_r, live, out_ptr, N)
        elif EPILOGUE == "maxima":
            store_outputs(y, None, index, out_r, live, out_ptr, N)
            even, odd = split_pairs(maxima_keys(y, noise, index, live, id_offset, VOCAB_SIZE))
            best = gl.maximum(best, gl.maximum(even, odd))
        else:
            even, odd = split_pairs(y)
            if EPILOGUE == "silu":
                store_silu(even, odd, pair, row, live, out_ptr, N)
            elif EPILOGUE == "push":
                store_push(even, odd, pair, row, live, x_ptr, targets, N, WORLD)
            else:
                store_rope(
                    even, odd, operands, pair, row, live, out_ptr, k_cache_ptr, v_cache_ptr, NUM_HEADS,
                    NUM_KV_HEADS, HEAD_DIM, MAX_LEN,
                )  # fmt: skip
    if EPILOGUE == "maxima":
        row = gl.arange(0, RP, gl.SliceLayout(0, PAIRS))
        at = row * gl.cdiv(N, ROWS_PER_PROGRAM) + pid
        store_key(gl.max(best, 0), values_ptr, ids_ptr, at, row < R)
