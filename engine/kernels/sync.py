"""Everything that orders memory or waits: the only file with memory-order, spin and PDL
instructions.

Two families of waiting, and their contracts.

**Sentinel words (Lamport): the data is its own flag.** A receiver's buffer is armed with a bit
pattern that no payload can have: 0x80008000 a word for 16-bit floats (two -0.0), 0x80000000 a word
for 32-bit ones. The sender replaces every -0.0 by +0.0 (`canonical16`, `canonical_words`) and
stores relaxed at system scope; the receiver polls its own memory, relaxed at system scope, until
no unit holds the pattern.
* Nobody releases and nobody acquires: a unit that differs from the pattern is itself the payload,
  so there is nothing else to be ordered before it. A 16-byte access is NOT one access to the
  memory model, so every unit is checked.
* The unit of a 16-bit message is the HALF, not the 32-bit word. Words arrive whole when they are
  stored whole, but a GEMV epilogue that holds one output a thread stores 2 bytes, and then a word
  with one sentinel half is a half-arrived word. No canonical payload has a half of 0x8000, so "any
  half is 0x8000" is exact for senders of any width (a minimum over signed 16-bit pairs: one
  instruction a word). The unit of a 32-bit message is the 32-bit word.
* Compares are of integers. A float compare that flushes subnormals takes a negative subnormal for
  -0.0 and waits for ever.
* One store per unit and call. A replica that stores the same value again may land after the
  receiver has re-armed the unit, so no thread layout here may replicate a pushing lane: tensors
  have at least 32 x num_warps lanes.
* Reuse: see `engine/kernels/slots.py`, where the rule is derived, and its model in
  tests/unit/test_protocol_model.py.

**Flags: the data is behind a flag.** All threads store, `tl.debug_barrier()`, then one lane a peer
does `release_flag` (st.release.sys: cumulative over the barrier); the receiver's `wait_flags`
(ld.acquire.sys), then `tl.debug_barrier()`, then the loads. Epochs are compared by signed
difference, so 32-bit wrap is harmless.

**Every spin is bounded.** The fast path reads no clock. After `POLLS_BEFORE_CLOCK` polls, and then
each time again, a lane looks at %globaltimer; for each LOOK_NS that it has waited, at the abort
word status[0] too. Past the limit it stores into `status` (int32[8], pinned host memory, one for
all ranks): [1, rank, call site, slot, first missing rank, program, 0, 0], the first four last. Any
non-zero status[0] (the host may set it as well: 2 = interrupted) makes every later spin of every
rank end after its first LOOK_NS. The kernel then ends normally with garbage; whoever reads results
looks at status first, and re-arms all buffers of all ranks before going on.
The abort word must be read seldom: it lies across PCIe, where reads queue up, 0.58 us for each
warp (H200). Read after the first 256 polls (0.1 ms), it held a kernel of 1056 warps for 0.6 ms
where ranks were 0.1 ms apart, which made the waiting rank the late one of the next exchange: 72B
at TP = 2 then took 132 ms for a prompt of 512 tokens in one engine and 41 ms in the next.

**PDL.** `gdc_launch_dependents` promises nothing about memory. `gdc_wait` makes all earlier
kernels' writes visible; it covers the whole chain only if every kernel of the chain waits, before it
reads what they wrote or writes what they read. One does so at its end, with the reasons: the poll of
all_reduce.py.

Under TRITON_INTERPRET=1 the names below that hold PTX are replaced by
`engine/kernels/sync_interpreter.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRET = tl.constexpr(bool(triton.knobs.runtime.interpret))

SENTINEL_16 = tl.constexpr(-2147450880)  # 0x80008000: two halves of -0.0
SENTINEL_32 = tl.constexpr(-2147483648)  # 0x80000000
STATUS_WORDS = 8
ABORT_EXPIRED = 1
ABORT_INTERRUPTED = 2
DEFAULT_LIMIT_US = 2_000_000
POLLS_BEFORE_CLOCK = 256  # about 0.1 ms of local polls
LOOK_NS = 1_000_000  # between two reads of the abort word; a queue of 1000 spins ends in a second


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
    """Wait until every kernel before this one has completed and its writes are visible (PDL).
    Never inside a loop."""
    if not INTERPRET:
        tl.inline_asm_elementwise(
            "griddepcontrol.wait; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def canonical16(value):
    """-0.0 -> +0.0 for a 16-bit float tensor; all other bits unchanged (a Lamport payload)."""
    bits = value.to(tl.int16, bitcast=True)
    return tl.where(bits == -32768, 0, bits).to(tl.int16).to(value.dtype, bitcast=True)


@triton.jit
def canonical_words(word):
    """The same for two 16-bit floats packed in an int32 tensor."""
    low = word & 0xFFFF
    high = word & -65536
    return tl.where(low == 0x8000, 0, low) | tl.where(high == SENTINEL_32, 0, high)


@triton.constexpr_function
def _expiry(find_peer: str) -> str:
    """Cold path, taken every POLLS_BEFORE_CLOCK polls: `find_peer` sets register `peer`. `look` is the time of
    the last read of the abort word.

    Operands are named by the builders below through .reg moves, so the text is the same for all.
    """
    return f"""
    add.u32 polls, polls, 1;
    setp.lt.u32 p, polls, {POLLS_BEFORE_CLOCK};
    @p bra POLL;
    mov.u32 polls, 0;
    mov.u64 now, %globaltimer;
    setp.eq.u64 p, start, 0;
    @p mov.u64 start, now;
    @p mov.u64 look, now;
    sub.u64 waited, now, look;
    setp.lt.u64 p, waited, {LOOK_NS};
    @p bra POLL;
    mov.u64 look, now;
    ld.relaxed.sys.global.u32 peer, [status];
    setp.ne.u32 p, peer, 0;
    @p bra DONE;
    sub.u64 now, now, start;
    setp.lt.u64 p, now, limit;
    @p bra POLL;
    {find_peer}
    st.relaxed.sys.global.v4.u32 [status+16], {{peer, program, 0, 0}};
    fence.acq_rel.sys;
    st.relaxed.sys.global.v4.u32 [status], {{1, rank, site, slot}};
    DONE:
    }}"""


@triton.constexpr_function
def _prologue(first: int) -> str:
    """Registers of a spin; operands first.. are status, limit_us, rank, site, slot, program."""
    return f"""
    {{
    .reg .pred p;
    .reg .b32 polls, peer, rank, site, slot, program, low, word;
    .reg .u64 status, limit, now, start, look, waited;
    mov.u64 status, ${first};
    mul.wide.u32 limit, ${first + 1}, 1000;
    mov.u32 rank, ${first + 2};
    mov.u32 site, ${first + 3};
    mov.u32 slot, ${first + 4};
    mov.u32 program, ${first + 5};
    mov.u32 polls, 0;
    mov.u64 start, 0;
    """


@triton.constexpr_function
def _missing(words: list[str], halves: bool) -> str:
    """p = some unit of `words` still holds the sentinel."""
    kind = "s16x2" if halves else "s32"
    lines = [f"mov.b32 low, {words[0]};"]
    lines += [f"min.{kind} low, low, {word};" for word in words[1:]]
    if halves:
        # Zero half of x = low ^ 0x80008000, by the borrow: (x - 0x00010001) & ~x & 0x80008000.
        lines += [
            "xor.b32 word, low, 0x80008000;",
            "sub.u32 word, word, 0x00010001;",
            "and.b32 word, word, low;",
            "and.b32 word, word, 0x80008000;",
            "setp.ne.u32 p, word, 0;",
        ]
    else:
        lines += ["setp.eq.u32 p, low, 0x80000000;"]
    return "\n    ".join(lines)


@triton.constexpr_function
def _message_asm(world, vector):
    """Poll `world` messages of `vector` words at base + r * stride, all loads of a poll in flight
    together.
    """
    outputs = world * vector
    addresses = ", ".join(f"a{r}" for r in range(world))
    asm = _prologue(outputs + 3) + f".reg .u64 {addresses};\n    mov.u64 a0, ${outputs};\n"
    for r in range(1, world):
        asm += f"    add.u64 a{r}, a{r - 1}, ${outputs + 1};\n"
    asm += "    POLL:\n"
    words = [[f"${r * vector + i}" for i in range(vector)] for r in range(world)]
    for r in range(world):
        asm += f"    ld.relaxed.sys.global.v{vector}.u32 {{{', '.join(words[r])}}}, [a{r}];\n"
    asm += "    " + _missing([word for message in words for word in message], vector == 4)
    asm += "\n    @!p bra DONE;\n"
    find = ""
    for r in reversed(range(world)):
        find += _missing(words[r], vector == 4) + f"\n    @p mov.u32 peer, {r};\n    "
    find += f"add.u32 peer, peer, ${outputs + 2};"
    return asm + _expiry("mov.u32 peer, 0;\n    " + find)


@triton.constexpr_function
def _message_constraints(world, vector):
    return ",".join(["=&r"] * (world * vector)) + ",l,l,r,l,r,r,r,r,r"


@triton.constexpr_function
def _message_types(world, vector):
    return (tl.int32,) * (world * vector)


@triton.jit
def wait_messages(
    base,
    stride,
    first_peer,
    status,
    limit_us,
    rank,
    site,
    slot,
    WORLD: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Spin until the WORLD messages at base + r * stride have arrived (or the limit; see above).

    base: int64 addresses [lanes], own memory, VECTOR x 4 bytes aligned. VECTOR 4: 16-bit payload;
    2: 32-bit payload. first_peer: rank of message 0, for `status`. Returns WORLD x VECTOR int32
    tensors [lanes], message by message.
    """
    return tl.inline_asm_elementwise(
        _message_asm(WORLD, VECTOR),
        _message_constraints(WORLD, VECTOR),
        [base, stride, first_peer, status, limit_us, rank, site, slot, tl.program_id(0)],
        dtype=_message_types(WORLD, VECTOR),
        is_pure=False,
        pack=1,
    )


@triton.constexpr_function
def _flag_asm():
    body = """
    POLL:
    ld.acquire.sys.global.u32 $0, [$1];
    sub.u32 word, $0, $2;
    setp.lt.s32 p, word, 0;
    @!p bra DONE;
    """
    return _prologue(4) + body + _expiry("mov.u32 peer, $3;")


@triton.jit
def wait_flags(address, epoch, peer, status, limit_us, rank, site, slot):
    """Spin until the int32 flag at each address is at or past `epoch` (signed difference).

    Acquire at system scope in every thread that holds a lane: follow it by `tl.debug_barrier()`.
    `peer` (int32 [lanes]) only names the missing rank in `status`. Returns the flags.
    """
    return tl.inline_asm_elementwise(
        _flag_asm(),
        "=&r,l,r,r,l,r,r,r,r,r",
        [address, epoch, peer, status, limit_us, rank, site, slot, tl.program_id(0)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def release_flag(address, value, mask):
    """st.release.sys of an int32 in the lanes where mask holds.

    Put `tl.debug_barrier()` before it: then it releases the whole program's stores. It waits until they have
    arrived; a warp without a lane to release branches around that and goes on.
    """
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.eq.u32 p, $3, 0; @p bra SKIP;"
        " st.release.sys.global.u32 [$1], $2; SKIP: mov.u32 $0, 0; }",
        "=r,l,r,r",
        [address, value, mask.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def push16(address, w0, w1, w2, w3, mask):
    """Relaxed system-scope store of 16 bytes a lane where mask holds."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.u32 p, $6, 0;"
        " @p st.relaxed.sys.global.v4.u32 [$1], {$2, $3, $4, $5}; mov.u32 $0, 0; }",
        "=r,l,r,r,r,r,r",
        [address, w0, w1, w2, w3, mask.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def push8(address, w0, w1, mask):
    """Relaxed system-scope store of 8 bytes a lane where mask holds."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.u32 p, $4, 0;"
        " @p st.relaxed.sys.global.v2.u32 [$1], {$2, $3}; mov.u32 $0, 0; }",
        "=r,l,r,r,r",
        [address, w0, w1, mask.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def load16(address, mask):
    """Four int32 tensors: 16 bytes a lane from memory that an earlier kernel wrote (0 where
    masked).

    Volatile, hence never from a stale first-level cache line: it also reads what a peer released.
    """
    return tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.u32 p, $5, 0;"
        " mov.u32 $0, 0; mov.u32 $1, 0; mov.u32 $2, 0; mov.u32 $3, 0;"
        " @p ld.relaxed.sys.global.v4.u32 {$0, $1, $2, $3}, [$4]; }",
        "=&r,=&r,=&r,=&r,l,r",
        [address, mask.to(tl.int32)],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=False,
        pack=1,
    )


@triton.jit
def globaltimer():
    """Nanoseconds of the device's global timer, int64."""
    return tl.inline_asm_elementwise(
        "mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
    )


if INTERPRET:
    from engine.kernels import sync_interpreter as _twins

    wait_messages = _twins.wait_messages  # type: ignore[assignment]
    wait_flags = _twins.wait_flags  # type: ignore[assignment]
    release_flag = _twins.release_flag  # type: ignore[assignment]
    push16 = _twins.push16  # type: ignore[assignment]
    push8 = _twins.push8  # type: ignore[assignment]
    load16 = _twins.load16  # type: ignore[assignment]
    globaltimer = _twins.globaltimer  # type: ignore[assignment]
