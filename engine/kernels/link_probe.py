"""Write a pattern through a peer's address, or compare what lies there: the link probe's two
kernels.

The pattern of word i for (writer w, owner o) is a hash of all three, so that a write that landed in
another buffer, or not at all, shows. 64 KB each way, once at start-up.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 1024


@triton.jit
def _pattern(index, salt):
    return (index * 0x9E3779B1 + salt * 0x85EBCA77) ^ 0x2545F491


@triton.jit(do_not_specialize=["address", "salt"])
def write_pattern_kernel(address, salt, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    target = address.to(tl.int64).to(tl.pointer_type(tl.int32)) + index
    tl.store(target, _pattern(index.to(tl.uint32), salt.to(tl.uint32)).to(tl.int32, bitcast=True))


@triton.jit(do_not_specialize=["address", "salt"])
def compare_pattern_kernel(address, salt, wrong, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    source = address.to(tl.int64).to(tl.pointer_type(tl.int32)) + index
    expected = _pattern(index.to(tl.uint32), salt.to(tl.uint32)).to(tl.int32, bitcast=True)
    found = tl.load(source, volatile=True)
    tl.store(wrong + tl.program_id(0), tl.sum((found != expected).to(tl.int32), 0))


def write_pattern(buffer: torch.Tensor, salt: int) -> None:
    """Fill int32 `buffer` (any device that the current one can reach; a multiple of 1024 words)."""
    write_pattern_kernel[(buffer.numel() // BLOCK,)](buffer.data_ptr(), salt, BLOCK=BLOCK)


def compare_pattern(buffer: torch.Tensor, salt: int, wrong: torch.Tensor) -> None:
    """wrong int32 [numel / 1024], on the current device: words of each block that differ from the
    pattern.
    """
    compare_pattern_kernel[(buffer.numel() // BLOCK,)](buffer.data_ptr(), salt, wrong, BLOCK=BLOCK)
