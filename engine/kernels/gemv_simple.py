# ruff: noqa: RUF005 - Triton has no starred tuples.
# mypy: disable-error-code="assignment, var-annotated"
"""The plain GEMV kernel: weights straight into registers, fp32 FMA. Formula, shapes and launcher: gemv.py."""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.argmax_kernel import row_noise, store_key
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
from engine.kernels.gemv_poll import POLL_SCALARS, by_thread, poll_tile
from engine.kernels.sync import gdc_launch_dependents, gdc_wait


@triton.jit
def widen(w):
    """Weights -> fp32. e4m3 goes through fp16: one packed convert, exact."""
    if w.dtype == tl.float8e4nv:
        w = w.to(tl.float16)
    return w.to(tl.float32)


@triton.jit
def add_squares(total, x_ptr, k, K: tl.constexpr):
    """total[BLOCK_K] += x[k]^2, x 16-bit, zero beyond K."""
    x = tl.load(x_ptr + k, mask=k < K, other=0.0).to(tl.float32)
    return tl.fma(x, x, total)


@triton.jit(do_not_specialize=["id_offset", *POLL_SCALARS])
def gemv_kernel(
    x_ptr, w_ptr, scale_ptr, bias_ptr, norm_ptr, out_ptr, residual_ptr,
    temperature_ptr, seeds_ptr, request_ptr, values_ptr, ids_ptr, id_offset,  # of Maxima, or None
    k_cache_ptr, v_cache_ptr, cos_sin_ptr, positions_ptr, row_slots_ptr, table_ptr, push_offset,
    hidden_ptr, messages, rearm, status, limit_us, poll_rank, poll_site, poll_slot,  # see gemv_poll.py
    eps,
    N: tl.constexpr,
    K: tl.constexpr,
    R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EPILOGUE: tl.constexpr,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, VOCAB_SIZE: tl.constexpr,
    MAX_LEN: tl.constexpr,
    WORLD: tl.constexpr,
    POLL: tl.constexpr,
    PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_N output rows of W, all of K, all R activation rows."""
    if PDL and EPILOGUE != "push":
        gdc_launch_dependents()
    EVEN_K: tl.constexpr = K % BLOCK_K == 0
    EVEN_N: tl.constexpr = N % BLOCK_N == 0
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    # x and g are addressed as [BLOCK_N, BLOCK_K] too (the same address for every n): with the shape of the
    # weight tile they get its layout, and no conversion through shared memory is needed in the loop.
    spread = tl.full((BLOCK_N, 1), 0, tl.int32)
    w_ptrs = w_ptr + n.to(tl.int64)[:, None] * K + k[None, :]
    x_ptrs = x_ptr + spread + k[None, :]

    # Weights and constants: before the wait, under the tail of the kernel in front.
    w_mask = (n < N)[:, None] & (k < K)[None, :]
    if EVEN_K and EVEN_N:
        w = tl.load(w_ptrs)
    else:
        w = tl.load(w_ptrs, mask=w_mask, other=0.0)
    factor = tl.full((BLOCK_N,), 1.0, tl.float32)
    if scale_ptr is not None:
        factor = tl.load(scale_ptr + n, mask=n < N, other=0.0)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)
    targets = ()
    if EPILOGUE == "push":
        targets = push_targets(table_ptr, push_offset, WORLD)
    held = ()
    if EPILOGUE == "rope" and PREFETCH:
        for r in tl.static_range(R):
            held = held + (rope_rows(r, positions_ptr, row_slots_ptr, R),)
    if PDL:
        gdc_wait()
        if EPILOGUE == "push":  # a poll may overlap this launch, and no other (all_reduce.py)
            gdc_launch_dependents()
    if EPILOGUE == "rope" and not PREFETCH:
        for r in tl.static_range(R):
            held = held + (rope_rows(r, positions_ptr, row_slots_ptr, R),)

    sums = ()
    squares = ()
    for _ in tl.static_range(R):
        sums = sums + (tl.full((BLOCK_N, BLOCK_K), 0.0, tl.float32),)
        squares = squares + (tl.full((BLOCK_K,), 0.0, tl.float32),)
    for start in range(0, K, BLOCK_K):
        following = start + BLOCK_K + k < K  # the last turn fetches nothing
        if not EVEN_N:
            w_next = tl.load(w_ptrs + start + BLOCK_K, mask=(n < N)[:, None] & following[None, :])
        else:
            w_next = tl.load(w_ptrs + start + BLOCK_K, mask=following[None, :])
        weight = widen(w)
        if norm_ptr is not None:
            g_ptrs = norm_ptr + spread + start + k[None, :]
            if EVEN_K:
                weight *= tl.load(g_ptrs).to(tl.float32)
            else:
                weight *= tl.load(g_ptrs, mask=(start + k < K)[None, :], other=0.0).to(tl.float32)
        new_sums = ()
        new_squares = ()
        for r in tl.static_range(R):
            if POLL:
                poll = (
                    hidden_ptr,
                    messages,
                    rearm,
                    status,
                    limit_us,
                    poll_rank,
                    poll_site,
                    poll_slot,
                )
                h = poll_tile(x_ptr, poll, r, start, R, K, BLOCK_K, POLL).to(tl.float32)
                x = h[None, :]
            elif EVEN_K:
                x = tl.load(x_ptrs + r * K + start).to(tl.float32)
            else:
                mask = (start + k < K)[None, :]
                x = tl.load(x_ptrs + r * K + start, mask=mask, other=0.0).to(tl.float32)
            new_sums = new_sums + (tl.fma(weight, x, sums[r]),)
            square = squares[r]
            if norm_ptr is not None and POLL:
                h = by_thread(h)
                square = tl.fma(h, h, square)
            elif norm_ptr is not None and R <= 4:
                square = add_squares(square, x_ptr + r * K, start + k, K)
            new_squares = new_squares + (square,)
        sums = new_sums
        squares = new_squares
        w = w_next

    for r in tl.static_range(R):
        y = tl.sum(sums[r], 1)
        if norm_ptr is not None:
            square = squares[r]
            if (
                R > 4 and not POLL
            ):  # no registers for these beside eight rows' sums: a second pass, the same order
                for start in range(0, K, BLOCK_K):
                    square = add_squares(square, x_ptr + r * K, start + k, K)
            y *= tl.rsqrt(tl.sum(square, 0) / K + eps)
        y *= factor
        if bias_ptr is not None:
            y += bias
        if EPILOGUE == "store":
            residual = None
            if residual_ptr is not None:
                residual = tl.load(residual_ptr + r * N + n, mask=n < N, other=0.0)
            store_outputs(y, residual, n, r, n < N, out_ptr, N)
        elif EPILOGUE == "maxima":
            store_outputs(y, None, n, r, n < N, out_ptr, N)
            noise = row_noise(
                temperature_ptr, seeds_ptr, positions_ptr, row_slots_ptr, request_ptr, r, True,
                request_ptr is not None,
            )  # fmt: skip
            best = tl.max(maxima_keys(y, noise, n, n < N, id_offset, VOCAB_SIZE), 0)
            store_key(best, values_ptr, ids_ptr, r * tl.num_programs(0) + tl.program_id(0), True)
        else:
            even, odd = tl.split(tl.reshape(y, (BLOCK_N // 2, 2)))
            p = tl.program_id(0) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
            live = p < N // 2
            if EPILOGUE == "silu":
                store_silu(even, odd, p, r, live, out_ptr, N)
            elif EPILOGUE == "push":
                store_push(even, odd, p, r, live, x_ptr, targets, N, WORLD)
            else:
                operands = rope_operands(
                    p, live, held[r], cos_sin_ptr, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM
                )
                store_rope(
                    even, odd, operands, p, r, live, out_ptr, k_cache_ptr, v_cache_ptr, NUM_HEADS,
                    NUM_KV_HEADS, HEAD_DIM, MAX_LEN,
                )  # fmt: skip
