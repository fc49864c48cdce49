"""Put with signal: a payload into a peer's slot, then one header word; and the credit back.

For hand-offs between a producer and a consumer (draft to target, pipeline stage, KV transfer):
16 bytes to 64 MB. Time at 478 GB/s each way: 16 KB 34 ns, 1 MB 2.2 us, 64 MB 140 us; below 256 KB
the time is latency: the launch, one fence that waits for the payload's acknowledgements, one store
seen by the waiter (0.8 us).

**Words.** Each slot has a header in the consumer's memory and a credit in the producer's, int32:

    0x80000000          armed: the header says nothing has arrived, the credit says slot taken
    0x40000000 | code   abort: whoever waits goes on, does nothing, and leaves the word as it is
    1 .. 2^30 - 1       sequence number of the put (it wraps to 1): arrived, or free again
    0                   ready, unnumbered: a stream write, whose value is a constant of the graph

Both are waited for by ONE comparison whose operand never changes, so it can be captured: (int32)
(word - 0) >= 0, which is CU_STREAM_WAIT_VALUE_GEQ with 0 and `sync.wait_flags` with epoch 0. Only
an armed word fails it: magnitude, not equality, and the sequence may wrap. (NOR with 0x7fffffff is
the same predicate, ~(word | 0x7fffffff) != 0, but not every device has it.) A replay needs no
reset of its own, because each wait's word is re-armed by the step that the wait guards:

    producer   wait credit >= 0; payload; credit := armed; header := sequence   (put_kernel)
    consumer   wait header >= 0; use the payload; header := armed; credit := sequence  (consume_kernel)

**Ordering contract**, of which nothing may be left out or done twice:
* put: all threads store the payload (relaxed, system scope) and the programs meet at an acquire-
  release ticket, device scope. The last program then re-arms its credit and does ONE st.release.sys
  of the header by one thread, behind a barrier: release is cumulative, so whoever sees the header
  sees the payload of all programs and the armed credit. No stream write follows.
* a copy by the copy engine has no release; there `cuStreamWriteValue32` with its default barrier
  takes that place, and no kernel touches the header (`engine/runtime/stream_signal.py`).
* consume: the header is re-armed BEFORE the credit is released: the next put overwrites a header
  only after it has acquired the credit. The consumer's reads of the payload are in earlier kernels
  or before the barrier here, hence before the credit as well.
* the consumer needs no flush of remote writes after its wait (CU_STREAM_WAIT_VALUE_FLUSH, which an
  H200 refuses): that is for writers who only send in order. Ours has waited for the payload to be
  performed before it sends the header. Kernels behind the wait start with a clean first-level cache.

**Slots.** Each slot is a channel of depth one of its own, right for any pattern of calls as long as
both ends use the slots in the same order; with 3 slots a producer runs up to 3 puts ahead. A fourth
waits for its credit; past the limit it writes nothing and reports (status, sync.py).
tests/unit/test_put_signal_model.py checks the protocol exhaustively, and variants that must fail.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from engine.errors import EngineError
from engine.kernels.split_merge import arrive
from engine.kernels.sync import (
    DEFAULT_LIMIT_US,
    SENTINEL_32,
    gdc_launch_dependents,
    gdc_wait,
    load16,
    push16,
    release_flag,
    wait_flags,
)

SLOTS = 3
ARMED = -(2**31)
ABORT = 2**30
LAST_SEQUENCE = ABORT - 1
UNNUMBERED = 0
ABORT_SEQUENCE = 3  # status[0] and abort code: a header of another put, or none, was consumed
LINE = 32  # words a header: a line of its own, so that a poll shares it with nobody

_ABORT = tl.constexpr(ABORT)
_LAST_SEQUENCE = tl.constexpr(LAST_SEQUENCE)
_EXPIRED = tl.constexpr(ABORT + 1)
_WRONG = tl.constexpr(ABORT + ABORT_SEQUENCE)


@dataclass(frozen=True)
class PutConfig:
    """block: 16-byte chunks a program moves at a time, a power of two and a multiple of 32 x
    num_warps (lanes must not be replicated). programs: most programs of a put."""

    block: int = 1024
    num_warps: int = 8
    programs: int = 132

    def __post_init__(self) -> None:
        if self.block % (32 * self.num_warps) or self.block & (self.block - 1):
            raise EngineError(
                f"put block {self.block} must be a power of two and a multiple of 32 x num_warps = "
                f"{32 * self.num_warps}"
            )


def heuristic(nbytes: int) -> PutConfig:
    """Up to 16 KB one program, whose release needs no ticket; above, 16 KB a program and round."""
    chunks = triton.cdiv(nbytes, 16)
    if chunks >= 1024:
        return PutConfig()
    warps = max(1, min(8, triton.next_power_of_2(chunks) // 32))
    return PutConfig(block=max(32, triton.next_power_of_2(chunks)), num_warps=warps, programs=1)


@dataclass(frozen=True)
class Route:
    """Names for the status words of an expired wait (sync.py): rank, peer and call site."""

    producer: int = 0
    consumer: int = 1
    channel: int = 0


ROUTE = Route()


@dataclass(frozen=True)
class Slot:
    """Addresses of one slot. payload, header, consumed: on the consumer; credit, produced: on the
    producer. produced points to (sequence, ticket), consumed to (sequence,)."""

    index: int
    nbytes: int
    payload: int
    header: int
    credit: int
    produced: int
    consumed: int


class Mailbox:
    """Memory of one channel.

    payload: uint8 [slots, nbytes] on the consumer. headers, credits: int32 [slots + 1, 32] on the
    consumer and on the producer, one word used a line; the last line holds the end's counters.
    """

    def __init__(
        self,
        nbytes: int,
        producer: torch.device | str,
        consumer: torch.device | str,
        slots: int = SLOTS,
    ) -> None:
        if nbytes <= 0 or nbytes % 16:
            raise EngineError(f"put of {nbytes} bytes: the size must be a multiple of 16")
        if slots < 1:
            raise EngineError(f"channel of {slots} slots: at least 1 is needed ({SLOTS} overlap)")
        self.slots = slots
        self.payload = torch.zeros((slots, nbytes), dtype=torch.uint8, device=consumer)
        self.headers = torch.zeros((slots + 1, LINE), dtype=torch.int32, device=consumer)
        self.credits = torch.zeros((slots + 1, LINE), dtype=torch.int32, device=producer)
        self.arm()

    def arm(self, sequence: int = 0) -> None:
        """Nothing sent, every slot free, `sequence` puts counted. Both ends must be idle."""
        for words, value in ((self.headers, ARMED), (self.credits, UNNUMBERED)):
            words[:-1].fill_(value)
            words[-1].zero_()
            words[-1, 0] = sequence

    def slot(self, index: int) -> Slot:
        """Addresses of slot `index` modulo the slot count."""
        index %= self.slots
        offset, counters = 4 * LINE * index, 4 * LINE * self.slots
        return Slot(
            index=index,
            nbytes=self.payload.shape[1],
            payload=self.payload.data_ptr() + index * self.payload.shape[1],
            header=self.headers.data_ptr() + offset,
            credit=self.credits.data_ptr() + offset,
            produced=self.credits.data_ptr() + counters,
            consumed=self.headers.data_ptr() + counters,
        )


@triton.jit
def _pointer(address):
    return address.to(tl.int64).to(tl.pointer_type(tl.int32))


@triton.jit
def _next(sequence):
    return tl.where(sequence >= _LAST_SEQUENCE, 1, sequence + 1)


# Never specialised: a value of 1 would be another module, loaded while something may already spin.
_INTEGERS = (
    *("source", "target", "header", "credit", "counter", "word", "status"),
    *("limit_us", "rank", "peer", "channel", "slot", "chunks"),
)


@triton.jit(do_not_specialize=_INTEGERS)
def put_kernel(
    source, target, header, credit, counter, status,  # int64 addresses
    limit_us, rank, peer, channel, slot,
    chunks,  # 16-byte chunks of the payload
    BLOCK: tl.constexpr, THREADS: tl.constexpr, SINGLE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    thread = tl.arange(0, THREADS)
    nowhere = thread.to(tl.int64) * 0
    # In flight together: the first block of the source, the counter, the credit.
    chunk = program * BLOCK + tl.arange(0, BLOCK)
    at = chunk.to(tl.int64) * 16
    w0, w1, w2, w3 = load16(source + at, chunk < chunks)
    sequence = _next(tl.load(_pointer(counter), volatile=True))
    word = wait_flags(credit + nowhere, 0, peer, status, limit_us, rank, channel, slot)
    # One verdict a program: an abort may arrive between two threads' loads.
    free = tl.max(((word < 0) | (word >= _ABORT)).to(tl.int32), 0) == 0
    if free:
        for _ in range(program, tl.cdiv(chunks, BLOCK), programs):
            push16(target + at, w0, w1, w2, w3, chunk < chunks)
            chunk += programs * BLOCK
            at = chunk.to(tl.int64) * 16
            w0, w1, w2, w3 = load16(source + at, chunk < chunks)
        # A program that was refused never arrives, so the header is only sent for a whole payload.
        last = True
        if not SINGLE:
            last = arrive(_pointer(counter) + 1, programs)
        if last:
            tl.store(_pointer(counter), sequence)
            tl.store(_pointer(credit), SENTINEL_32)
            tl.debug_barrier()  # the release covers every thread's stores
            release_flag(header + nowhere, sequence, thread == 0)


@triton.jit(do_not_specialize=_INTEGERS)
def consume_kernel(
    header, credit, counter, status, rank, peer, channel, slot, PDL: tl.constexpr
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    thread = tl.arange(0, 32)
    nowhere = thread.to(tl.int64) * 0
    word = tl.load(_pointer(header), volatile=True)
    sequence = tl.load(_pointer(counter), volatile=True)
    expected = _next(sequence)
    if (word == expected) | (word == 0):
        tl.store(_pointer(counter), tl.where(word == 0, sequence, expected))
        tl.store(_pointer(header), SENTINEL_32)
        tl.debug_barrier()  # re-armed before the credit, see the top
        release_flag(credit + nowhere, word, thread == 0)
    elif (word & _ABORT) == 0:
        # Armed (consumed without its wait) or another put's number: never accepted, never credited.
        tl.store(_pointer(header), _WRONG)
        if tl.load(_pointer(status), volatile=True) == 0:
            one = thread == 0
            push16(status + 16 + nowhere, peer, 0, expected, word, one)
            push16(status + nowhere, 0, rank, channel, slot, one)
            release_flag(status + nowhere, tl.full((32,), _WRONG - _ABORT, tl.int32), one)


@triton.jit(do_not_specialize=_INTEGERS)
def poll_kernel(word, status, limit_us, rank, peer, channel, slot, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    nowhere = tl.arange(0, 32).to(tl.int64) * 0
    found = wait_flags(word + nowhere, 0, peer, status, limit_us, rank, channel, slot)
    if tl.max(found, 0) < 0:
        tl.store(_pointer(word), _EXPIRED)  # `consume` must not take it for the data


def put(
    source: torch.Tensor,
    slot: Slot,
    status: torch.Tensor,
    route: Route = ROUTE,
    *,
    config: PutConfig | None = None,
    pdl: bool = False,
    limit_us: int = DEFAULT_LIMIT_US,
) -> None:
    """Payload of `source` (contiguous, any dtype, multiple of 16 bytes) into the slot, then its
    header. Launch on the producer. Waits for the slot's credit, at most limit_us, and writes
    nothing without it. EngineError for a source that does not fit."""
    nbytes = check_source(source, slot)
    config = config or heuristic(nbytes)
    chunks = nbytes // 16
    grid = max(1, min(config.programs, triton.cdiv(chunks, config.block)))
    put_kernel[(grid,)](
        source.data_ptr(), slot.payload, slot.header, slot.credit, slot.produced,
        status.data_ptr(), limit_us, route.producer, route.consumer, route.channel, slot.index,
        chunks, BLOCK=config.block, THREADS=32 * config.num_warps, SINGLE=grid == 1, PDL=pdl,
        num_warps=config.num_warps, num_stages=1, launch_pdl=pdl,
    )  # fmt: skip


def consume(
    slot: Slot,
    status: torch.Tensor,
    route: Route = ROUTE,
    *,
    pdl: bool = False,
) -> None:
    """Re-arm the slot's header and give its credit back. Launch on the consumer, after the last
    kernel that reads the payload. A header that is not this put's is reported, not credited."""
    consume_kernel[(1,)](
        slot.header, slot.credit, slot.consumed, status.data_ptr(), route.consumer, route.producer,
        route.channel, slot.index, PDL=pdl, num_warps=1, num_stages=1, launch_pdl=pdl,
    )  # fmt: skip


def poll(
    slot: Slot,
    status: torch.Tensor,
    route: Route = ROUTE,
    *,
    pdl: bool = False,
    limit_us: int = DEFAULT_LIMIT_US,
) -> None:
    """Wait for the slot's header in a kernel (one warp), where a stream cannot. Launch on the
    consumer. On expiry: status, and an abort word in the header."""
    poll_kernel[(1,)](
        slot.header, status.data_ptr(), limit_us, route.consumer, route.producer, route.channel,
        slot.index, PDL=pdl, num_warps=1, num_stages=1, launch_pdl=pdl,
    )  # fmt: skip


def check_source(source: torch.Tensor, slot: Slot) -> int:
    """Bytes of a put; EngineError for what cannot be sent."""
    nbytes = source.numel() * source.element_size()
    if not source.is_contiguous() or source.data_ptr() % 16:
        raise EngineError(
            f"put from {source.data_ptr():#x} with strides {source.stride()}: the source must be "
            "contiguous and 16-byte aligned"
        )
    if nbytes % 16 or not 0 < nbytes <= slot.nbytes:
        raise EngineError(
            f"put of {nbytes} bytes: a multiple of 16 up to the channel's {slot.nbytes} is needed"
        )
    return nbytes


def put_ref(box: Mailbox, source: torch.Tensor, index: int) -> bool:
    """What `put` does to the channel's memory, on CPU tensors; False where it would wait."""
    index %= box.slots
    if not 0 <= int(box.credits[index, 0]) < ABORT:
        return False
    data = source.contiguous().view(torch.uint8).flatten()
    box.payload[index, : data.numel()] = data
    sequence = int(box.credits[-1, 0]) % LAST_SEQUENCE + 1
    box.credits[-1, 0] = sequence
    box.credits[index, 0] = ARMED
    box.headers[index, 0] = sequence
    return True


def consume_ref(box: Mailbox, index: int) -> bool:
    """What `consume` does, on CPU tensors; False where it refuses (and leaves an abort word)."""
    index %= box.slots
    word, sequence = int(box.headers[index, 0]), int(box.headers[-1, 0])
    if word not in (UNNUMBERED, sequence % LAST_SEQUENCE + 1):
        if not word & ABORT:
            box.headers[index, 0] = ABORT + ABORT_SEQUENCE
        return False
    box.headers[-1, 0] = word or sequence
    box.headers[index, 0] = ARMED
    box.credits[index, 0] = word
    return True
