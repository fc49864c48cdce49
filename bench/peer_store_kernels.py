"""Kernels of bench/peer_store.py: one message to a peer's memory (or from it), no waiting anywhere.

`transfer_kernel`  16 bytes a lane, DEPTH of them loaded, then stored, by instructions of one's choice
`plain_kernel`     the same by tl.load and tl.store
`bulk_kernel`      through shared memory, by TMA stores (cp.async.bulk.tensor), DEPTH tiles in flight
`exchange_kernel`  the traffic of a one-shot all-reduce of two ranks without its waits: pushes and
                   what a poll reads and writes, one kind alone or both in turn

Volatile and gpu-scope stores are probes of the link and nothing else: no protocol may use them across
devices (sync.py).
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from engine.kernels.messages import arm, load_partial
from engine.kernels.packed import sum_messages
from engine.kernels.sync import INTERPRET, load16, push16

MULTIPLIER = tl.constexpr(-1640531535)  # word i of a message is i * MULTIPLIER + salt, in 32 bits
TILE_ROWS, TILE_WORDS = 128, 32  # of `bulk_kernel`: 128 bytes a row, 16 KB


@triton.constexpr_function
def _store_asm(kind):
    return (
        "{ .reg .pred p; setp.ne.u32 p, $6, 0;"
        f" @p st.{kind}.global.v4.u32 [$1], {{$2, $3, $4, $5}}; mov.u32 $0, 0; }}"
    )


@triton.constexpr_function
def _load_asm(kind):
    return (
        "{ .reg .pred p; setp.ne.u32 p, $5, 0;"
        " mov.u32 $0, 0; mov.u32 $1, 0; mov.u32 $2, 0; mov.u32 $3, 0;"
        f" @p ld.{kind}.global.v4.u32 {{$0, $1, $2, $3}}, [$4]; }}"
    )


@triton.jit
def _store16(address, w0, w1, w2, w3, live, KIND: tl.constexpr):
    """16 bytes a lane by st.KIND; relaxed.sys is the engine's own push."""
    if INTERPRET or KIND == "relaxed.sys":
        push16(address, w0, w1, w2, w3, live)
    else:
        tl.inline_asm_elementwise(
            _store_asm(KIND), "=r,l,r,r,r,r,r", [address, w0, w1, w2, w3, live.to(tl.int32)],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def _load16(address, chunk, salt, live, KIND: tl.constexpr):
    """16 bytes a lane by ld.KIND; "registers": the message's words computed, memory not read."""
    if KIND == "registers":
        w0 = chunk * 4 * MULTIPLIER + salt
        w1 = w0 + MULTIPLIER
        w2 = w1 + MULTIPLIER
        return w0, w1, w2, w2 + MULTIPLIER
    elif INTERPRET or KIND == "relaxed.sys":
        return load16(address, live)
    else:
        return tl.inline_asm_elementwise(
            _load_asm(KIND), "=&r,=&r,=&r,=&r,l,r", [address, live.to(tl.int32)],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit(do_not_specialize=["source", "target", "own", "chunks", "salt"])
def transfer_kernel(
    source, target, own,  # int64 addresses
    chunks,  # 16-byte chunks of the message
    salt,
    LOAD: tl.constexpr, STORE: tl.constexpr, OWN: tl.constexpr, LANES: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    """source -> target; OWN: each chunk to `own` as well, in turn. LANES = 32 x num_warps."""
    lanes = tl.arange(0, LANES)
    for tile in range(tl.program_id(0), tl.cdiv(chunks, LANES * DEPTH), tl.num_programs(0)):
        words = ()
        for d in tl.static_range(DEPTH):
            chunk = (tile * DEPTH + d) * LANES + lanes
            w0, w1, w2, w3 = _load16(
                source + chunk.to(tl.int64) * 16, chunk, salt, chunk < chunks, LOAD
            )
            words += (w0, w1, w2, w3)  # type: ignore[assignment]  # Triton unrolls: a tuple may grow
        for d in tl.static_range(DEPTH):
            chunk = (tile * DEPTH + d) * LANES + lanes
            at = chunk.to(tl.int64) * 16
            w0, w1, w2, w3 = words[4 * d], words[4 * d + 1], words[4 * d + 2], words[4 * d + 3]
            _store16(target + at, w0, w1, w2, w3, chunk < chunks, STORE)
            if OWN:
                _store16(own + at, w0, w1, w2, w3, chunk < chunks, STORE)


@triton.jit
def plain_kernel(source, target, words, BLOCK: tl.constexpr):
    """source -> target, int32 tensors of `words` words, BLOCK a program and turn."""
    for block in range(tl.program_id(0), tl.cdiv(words, BLOCK), tl.num_programs(0)):
        at = block * BLOCK + tl.arange(0, BLOCK)
        tl.store(target + at, tl.load(source + at, mask=at < words), mask=at < words)


@gluon.jit
def bulk_kernel(source, target, tiles, DEPTH: gl.constexpr):
    """source (int32 pointer) -> target (descriptor of [., 32] words), `tiles` of 16 KB."""
    ROWS: gl.constexpr = target.block_type.shape[0]
    WORDS: gl.constexpr = target.block_type.shape[1]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [gl.num_warps(), 1], [1, 0])
    stages = gl.allocate_shared_memory(gl.int32, [DEPTH, ROWS, WORDS], target.layout)
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    word = gl.arange(0, WORDS, layout=gl.SliceLayout(0, LAYOUT))
    turn = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        value = gl.load(source + (tile * ROWS + row)[:, None] * WORDS + word[None, :])
        tma.store_wait(DEPTH - 1)  # the tile that lay in this stage has left it
        gl.thread_barrier()
        stage = stages.index(turn % DEPTH)
        stage.store(value)
        fence_async_shared()
        gl.thread_barrier()
        tma.async_copy_shared_to_global(target, [tile * ROWS, 0], stage)
        turn += 1  # noqa: SIM113
    tma.store_wait(0)


@triton.jit(do_not_specialize=["x", "peer", "own", "polled", "residual", "out", "chunks", "rank"])
def exchange_kernel(
    x, peer, own,  # int64 addresses: partial sum, the slots that a push fills
    polled,  # the slot of two messages that a poll reads and re-arms
    residual, out,
    chunks, rank,
    PUSH: tl.constexpr, POLL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A call's traffic of `one_shot_kernel` at two ranks, bf16, own-slot rule, with plain reads where it polls."""
    message = chunks.to(tl.int64) * 16
    for block in range(tl.program_id(0), tl.cdiv(chunks, BLOCK), tl.num_programs(0)):
        chunk = block * BLOCK + tl.arange(0, BLOCK)
        live = chunk < chunks
        at = chunk.to(tl.int64) * 16
        if PUSH:
            w0, w1, w2, w3 = load_partial(x + at, live)
            push16(peer + rank * message + at, w0, w1, w2, w3, live)
            push16(own + rank * message + at, w0, w1, w2, w3, live)
        if POLL:
            held = load16(residual + at, live)
            a0, a1, a2, a3 = load16(polled + at, live)
            b0, b1, b2, b3 = load16(polled + message + at, live)
            tl.debug_barrier()
            arm(polled + at, message, live, 2, BLOCK)
            y = sum_messages((a0, a1, a2, a3, b0, b1, b2, b3), held, 2, True, tl.bfloat16)
            push16(out + at, y[0], y[1], y[2], y[3], live)
