"""Messages of 16-byte chunks, in the kernel and before its launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.errors import EngineError
from engine.kernels.packed import sum_messages
from engine.kernels.sync import SENTINEL_16, canonical_words, load16, push16, wait_messages

CHUNK = 16  # bytes


@triton.jit
def peer_bases(peers, rank, WORLD: tl.constexpr):
    """Base addresses of all ranks' buffers: rank + 1, rank + 2, ..., the own one last.

    Each rank starts at another peer, so that no link has all senders at once.
    """
    bases = ()
    for i in tl.static_range(WORLD):
        bases += (tl.load(peers + (rank + 1 + i) % WORLD),)  # type: ignore[assignment]
    return bases


@triton.jit
def load_partial(address, live):
    """A chunk a lane of the own partial sum (4 int32 tensors), every -0.0 as +0.0."""
    w0, w1, w2, w3 = load16(address, live)
    return canonical_words(w0), canonical_words(w1), canonical_words(w2), canonical_words(w3)


@triton.jit
def arm(address, stride, live, WORLD: tl.constexpr, BLOCK: tl.constexpr):
    """Sentinels into the same chunk of WORLD messages, `stride` bytes apart."""
    armed = tl.full((BLOCK,), SENTINEL_16, tl.int32)
    for r in tl.static_range(WORLD):
        push16(address + r * stride, armed, armed, armed, armed, live)


@triton.jit
def poll_sum(
    address, stride, held, live, status, limit_us, rank, call_site, slot, WORLD: tl.constexpr,
    BLOCK: tl.constexpr, RESIDUAL: tl.constexpr, CLEAR_OWN: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Wait for a chunk a lane of WORLD messages, `stride` bytes apart; re-arm them (CLEAR_OWN);
    their sum + held (RESIDUAL) as 4 int32 tensors."""
    words = wait_messages(address, stride, 0, status, limit_us, rank, call_site, slot, WORLD, 4)
    if CLEAR_OWN:
        tl.debug_barrier()  # every lane has read before any lane re-arms
        arm(address, stride, live, WORLD, BLOCK)
    return sum_messages(words, held, WORLD, RESIDUAL, DTYPE)


def address_of(buffer: torch.Tensor | int) -> int:
    """Base address of a buffer given as a tensor or as an address."""
    return buffer if isinstance(buffer, int) else buffer.data_ptr()


def message_chunks(tensor: torch.Tensor, world: int) -> int:
    """16-byte chunks of a message; EngineError for what the kernels cannot carry."""
    nbytes = tensor.numel() * tensor.element_size()
    if tensor.element_size() != 2 or not tensor.is_contiguous():
        raise EngineError(
            f"all-reduce needs contiguous 16-bit values, not {tensor.dtype} with "
            f"strides {tensor.stride()}"
        )
    if nbytes % CHUNK or tensor.data_ptr() % CHUNK or not nbytes:
        raise EngineError(
            f"all-reduce message of {nbytes} bytes at {tensor.data_ptr():#x}: size and address must "
            "be multiples of 16; choose a hidden size that is a multiple of 8"
        )
    if not 2 <= world <= 8:
        raise EngineError(f"all-reduce over {world} ranks: from 2 to 8 are supported (--tp)")
    return nbytes // CHUNK
