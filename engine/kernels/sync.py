"""Everything that orders memory or waits: the only file with memory-order, spin and PDL instructions.

Under TRITON_INTERPRET=1 the same names are plain Python over `tl.load` / `tl.store`.
"""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRET = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def gdc_launch_dependents():
    """Let the next kernel of the stream start early (PDL). Promises nothing about memory."""
    if not INTERPRET:
        tl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // $0",
            "=r",
            [],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def gdc_wait():
    """Wait until every kernel before this one has completed and its writes are visible (PDL). Never inside a loop."""
    if not INTERPRET:
        tl.inline_asm_elementwise(
            "griddepcontrol.wait; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def canonical16(value):
    """-0.0 -> +0.0 for a 16-bit float tensor; all other bits unchanged. Every Lamport payload passes through it."""
    bits = value.to(tl.int16, bitcast=True)
    return tl.where(bits == -32768, 0, bits).to(tl.int16).to(value.dtype, bitcast=True)
