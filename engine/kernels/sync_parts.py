"""`sync.wait_messages` for a thread that needs many words of each message: a consumer's prologue.

All loads of a poll are in flight together, so that words which have arrived cost one round trip to L2, and
only 16-byte words that had not arrived are loaded again: many programs poll the same messages, and the reads
of words long there would delay those still to come. Contract, bound in time and status words: sync.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.sync import _expiry, _missing, _prologue


@triton.constexpr_function
def _parts_asm(parts, world, part_bytes, message_bytes):
    count = parts * world
    base = 4 * count
    words = [[f"${4 * j + i}" for i in range(4)] for j in range(count)]
    asm = _prologue(base + 2) + f".reg .pred q<{count}>;\n"
    for j in range(count):
        last = j % parts == parts - 1  # lanes past the end of the message poll nothing there
        if last:
            asm += f"    setp.ne.u32 q{j}, ${base + 1}, 0;\n"
            asm += "".join(f"    mov.u32 {word}, 0;\n" for word in words[j])
        else:
            asm += f"    setp.eq.u32 q{j}, polls, 0;\n"
    asm += "    POLL:\n"
    for j in range(count):
        offset = j // parts * message_bytes + j % parts * part_bytes
        asm += f"    @q{j} ld.relaxed.sys.global.v4.u32 {{{', '.join(words[j])}}}, [${base}+{offset}];\n"
    for j in range(count):
        asm += "    " + _missing(words[j], True).replace("u32 p,", f"u32 q{j},") + "\n"
    asm += "    mov.pred p, q0;\n"
    asm += "".join(f"    or.pred p, p, q{j};\n" for j in range(1, count))
    asm += "    @!p bra DONE;\n"
    find = "".join(f"    @q{j} mov.u32 peer, {j // parts};\n" for j in reversed(range(count)))
    return asm + _expiry("mov.u32 peer, 0;\n" + find)


@triton.constexpr_function
def _parts_constraints(count):
    return ",".join(["=&r"] * (4 * count)) + ",l,r,l,r,r,r,r,r"


@triton.constexpr_function
def _parts_types(count):
    return (tl.int32,) * (4 * count)


@triton.jit
def wait_parts(
    base, live, status, limit_us, rank, site, slot, PARTS: tl.constexpr, WORLD: tl.constexpr,
    PART_BYTES: tl.constexpr, MESSAGE_BYTES: tl.constexpr,
):  # fmt: skip
    """Spin until 16 bytes at base + r * MESSAGE_BYTES + part * PART_BYTES have arrived, for all WORLD
    messages r and PARTS parts (or until the limit).

    base: int64 addresses [lanes], own memory, multiples of 16; 16-bit payload. live: int32 [lanes], 0 where
    the last part does not exist (its words are 0). Returns WORLD x PARTS x 4 int32 tensors [lanes].
    """
    return tl.inline_asm_elementwise(
        _parts_asm(PARTS, WORLD, PART_BYTES, MESSAGE_BYTES),
        _parts_constraints(PARTS * WORLD),
        [base, live, status, limit_us, rank, site, slot, tl.program_id(0)],
        dtype=_parts_types(PARTS * WORLD),
        is_pure=False,
        pack=1,
    )
