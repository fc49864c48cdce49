"""Ranks for the all-reduce bench: buffers, lockstep launches, random delays and checks on the
devices.

One stream per device; ranks that share a device share it (engine/kernels/all_reduce.py says why).
Works on CPU tensors too, in the interpreter: the bench's own test.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
import triton.language as tl

from engine.kernels.all_reduce import (
    AllReduceConfig,
    all_reduce,
    all_reduce_ref,
    poll_residual,
    push,
)
from engine.kernels.flag_all_reduce import FlagWorkspace, flag_all_reduce
from engine.kernels.slots import LamportWorkspace, peer_table
from engine.kernels.sync import gdc_launch_dependents, gdc_wait, globaltimer
from engine.kernels.two_shot import two_shot, two_shot_workspace

POOL = 16  # distinct inputs; a stale slot holds another one's sum
SPECIAL = (-0.0, 0.0, float("inf"), float("-inf"), float("nan"), 1e-40, -1e-40, 3e38, -3e38)
# Forms and whether they are one launch (only for one rank a device). Own slot: two slots, re-armed behind
# each poll, as the engine's graphs have them; messages of any size may then follow each other.
FORMS = {
    "lamport": False,  # push, poll; four slots
    "lamport_own_slot": False,
    "lamport_fused": True,
    "flag": True,
    "flag_split": False,
    "two_shot": True,
    "two_shot_split": False,  # own slot
}
OWN_SLOT = ("lamport_own_slot", "two_shot_split")
SPLITS = {
    "flag_split": ("publish", "reduce"),
    "two_shot_split": ("scatter", "reduce", "gather"),
    "lamport": ("push", "poll"),
    "lamport_own_slot": ("push", "poll"),
}


# Integers are never specialised: a value of 1 or a multiple of 16 would be another module, loaded
# while a rank may already spin.
@triton.jit(do_not_specialize=["call", "n", "stride"])
def prepare_kernel(
    x, residual, x_pool, residual_pool, delays, step, call, n, stride,
    POOL: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Wait delays[.] ns, then copy pool row (call + step) % POOL to x and residual: n elements of each of the
    device's ranks (second grid axis), whose tensors are `stride` elements apart."""
    member = tl.program_id(1).to(tl.int64)
    x, residual, delays = x + member * stride, residual + member * stride, delays + member * 1024
    x_pool += member * POOL * stride
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    now = tl.load(step)
    row = (call + now) % POOL
    begin = globaltimer()
    wanted = tl.load(delays + (call * 31 + now * 17) % 1024)
    while globaltimer() - begin < wanted:
        pass
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + at, tl.load(x_pool + row.to(tl.int64) * stride + at, mask=at < n), mask=at < n)
    held = tl.load(residual_pool + row.to(tl.int64) * stride + at, mask=at < n)
    tl.store(residual + at, held, mask=at < n)


@triton.jit(do_not_specialize=["call", "n", "stride"])
def compare_kernel(
    out, expected, found, step, call, n, stride, POOL: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr
):  # fmt: skip
    """found[0] += elements that differ from the reference (any NaN equals any NaN); found[1] += a
    hash of all bits, so that equal sums of hashes mean equal bits on all ranks. Poisons `out`. Ranks: as in
    `prepare_kernel`."""
    member = tl.program_id(1).to(tl.int64)
    out, found = out + member * stride, found + 2 * member
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    now = tl.load(step)
    row = ((call + now) % POOL).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    bits = tl.load(out + at, mask=at < n, other=0).to(tl.int32) & 0xFFFF
    wanted = tl.load(expected + row * stride + at, mask=at < n, other=0).to(tl.int32) & 0xFFFF
    nan = ((bits & 0x7FFF) > 0x7F80) & ((wanted & 0x7FFF) > 0x7F80)
    tl.atomic_add(found, tl.sum(((bits != wanted) & ~nan).to(tl.int64), 0))
    mixed = (bits + 1).to(tl.int64) * ((at + 1) * 40503 + call * 7919 + now * 104729)
    tl.atomic_add(found + 1, tl.sum(mixed ^ (mixed >> 7), 0))
    tl.store(out + at, tl.full((BLOCK,), 0x7FC1, tl.int16), mask=at < n)


@triton.jit
def advance_kernel(step, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    tl.store(step, tl.load(step) + 1)


@triton.jit(do_not_specialize=["n"])
def copy_kernel(x, out, n, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """The launch floor: a copy of one message."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n), mask=at < n)


@dataclass
class Local:
    """The ranks of one device side by side, so that one launch prepares or checks them all. n = elements of the
    largest message (bf16), m = ranks here."""

    ranks: list[int]
    x: torch.Tensor  # [m, n]
    residual: torch.Tensor  # [m, n]
    out: torch.Tensor  # [m, n]
    x_pool: torch.Tensor  # [m, POOL, n]
    residual_pool: torch.Tensor  # [POOL, n]
    expected: torch.Tensor  # [POOL, n] int16
    delays: torch.Tensor  # [m, 1024] int64, ns
    step: torch.Tensor  # [1] int32
    found: torch.Tensor  # [m, 2] int64: wrong elements, hash of all bits


@dataclass
class Member:
    """One rank: its rows of its device's tensors, and its receive buffer."""

    rank: int
    device: torch.device
    x: torch.Tensor  # [n]
    residual: torch.Tensor  # [n]
    out: torch.Tensor  # [n]
    buffer: torch.Tensor
    table: Any = None


@functools.lru_cache(maxsize=4)
def _inputs(world: int, n: int) -> list[torch.Tensor]:
    """Partial sums of each rank, the residual (bf16), the expected sums (int16), each [pool, n]."""
    generator = torch.Generator().manual_seed(world * 1000 + n)
    pool = POOL if n <= 1 << 17 else 1  # large messages are timed, and checked on one input
    inputs = []
    for r in range(world + 1):
        values = torch.randn(pool, n, generator=generator)
        if r % 2 == 0:  # special values in half of the ranks
            pick = torch.randint(len(SPECIAL), (pool, n), generator=generator)
            special = torch.rand(pool, n, generator=generator) < 0.02
            values = torch.where(special, torch.tensor(SPECIAL)[pick], values)
        inputs.append(values.bfloat16())
    return [*inputs, all_reduce_ref(inputs[:-1], inputs[-1]).view(torch.int16)]


@dataclass
class Group:
    """`world` ranks over `devices` (cycled), all for one form and messages of up to `nbytes`."""

    form: str
    world: int
    devices: list[torch.device]
    nbytes: int
    pdl: bool = False
    config: AllReduceConfig | None = None
    limit_us: int = 2_000_000
    programs: int = 0  # of the flag barrier; 0: by size
    members: list[Member] = field(default_factory=list)
    locals: dict[torch.device, Local] = field(default_factory=dict)

    def __post_init__(self) -> None:
        n = self.n = self.nbytes // 2
        cuda = self.devices[0].type == "cuda"
        status = torch.zeros(8, dtype=torch.int32)
        self.status = status.pin_memory() if cuda else status
        self.streams = {d: torch.cuda.Stream(d) for d in self.devices} if cuda else {}
        slots = 2 if self.form in OWN_SLOT else 4
        if self.form.startswith("lamport"):
            self.space: Any = LamportWorkspace(self.world, 1, n, slots)
        elif self.form.startswith("two_shot"):
            self.space = two_shot_workspace(self.world, 1, n, slots)
        else:
            programs = self.programs or max(8, min(128, n // 1024))
            self.space = FlagWorkspace(self.world, 1, n, programs)
        for device in self.devices[: self.world]:
            with self.on(device):
                self._place(device)
        self.members.sort(key=lambda m: m.rank)
        for member in self.members:
            member.table = peer_table([m.buffer for m in self.members], member.device)
        self.synchronize()

    def _place(self, device: torch.device) -> None:
        """Tensors of one device's ranks."""
        *partials, residual, expected = _inputs(self.world, self.n)
        self.pool = residual.shape[0]
        ranks = list(range(self.devices.index(device), self.world, len(self.devices)))
        m, n = len(ranks), self.n

        def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        here = self.locals[device] = Local(
            ranks=ranks, x=zeros(m, n), residual=zeros(m, n), out=zeros(m, n),
            x_pool=torch.stack([partials[r] for r in ranks]).to(device),
            residual_pool=residual.to(device, copy=True), expected=expected.to(device, copy=True),
            delays=zeros(m, 1024, dtype=torch.int64), step=zeros(1, dtype=torch.int32),
            found=zeros(m, 2, dtype=torch.int64),
        )  # fmt: skip
        for i, rank in enumerate(ranks):
            buffer = self.space.allocate(device)
            self.members.append(
                Member(rank, device, here.x[i], here.residual[i], here.out[i], buffer)
            )

    @contextlib.contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        if device.type != "cuda":
            yield
            return
        with torch.cuda.device(device), torch.cuda.stream(self.streams[device]):
            yield

    def synchronize(self) -> None:
        for device in self.streams:
            torch.cuda.synchronize(device)

    def phases(self) -> tuple[str, ...]:
        return SPLITS.get(self.form, ("all",))

    def launch(
        self, m: Member, call: int, phase: str, *, residual: bool = True, size: int | None = None
    ) -> None:
        """One phase of one rank's call; size: elements, if not the largest message."""
        part = slice(size)
        x, out, held = m.x[part], m.out[part], m.residual[part] if residual else None
        common: dict[str, Any] = dict(
            rank=m.rank, world=self.world, config=self.config, pdl=self.pdl
        )
        wait = dict(common, call_site=call, limit_us=self.limit_us)
        if self.form.startswith("flag"):
            names = {"all": "both"}
            flag_all_reduce(
                x,
                m.table,
                held,
                out,
                self.status,
                self.space,
                phase=names.get(phase, phase),
                **wait,
            )
            return
        slots = self.space.slot_offset(call), self.space.clear_offset(call)
        if phase == "push":
            push(x, m.table, slots[0], **common)
        elif phase == "poll":
            poll_residual(m.buffer, *slots, held, out, self.status, **wait)
        else:
            run: Callable = all_reduce if self.form.startswith("lamport") else two_shot
            extra = {} if run is all_reduce else {"phase": phase}
            run(x, m.buffer, m.table, *slots, held, out, self.status, **wait, **extra)

    def call(
        self, call: int, *, only: torch.device | None = None, size: int | None = None,
        order: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        """Enqueue one all-reduce for every rank (of one device: `only`), phase by phase, in `order` of ranks."""
        members = self.members if order is None else [self.members[r] for r in order]
        for phase in self.phases():
            for m in members:
                if only in (None, m.device):
                    with self.on(m.device):
                        self.launch(m, call, phase, size=size)

    def checked_call(
        self, call: int, only: torch.device | None = None, size: int | None = None,
        order: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        """Random delay, new inputs, all-reduce, comparison."""
        n = size or self.n
        options: dict[str, Any] = dict(
            POOL=self.pool, BLOCK=1024, PDL=self.pdl, launch_pdl=self.pdl
        )
        local = {d: here for d, here in self.locals.items() if only in (None, d)}
        for device, here in local.items():
            with self.on(device):
                prepare_kernel[(triton.cdiv(n, 1024), len(here.ranks))](
                    here.x, here.residual, here.x_pool, here.residual_pool, here.delays, here.step,
                    call, n, self.n, **options,
                )  # fmt: skip
        self.call(call, only=only, size=size, order=order)
        for device, here in local.items():
            with self.on(device):
                compare_kernel[(triton.cdiv(n, 1024), len(here.ranks))](
                    here.out.view(torch.int16), here.expected, here.found, here.step, call, n, self.n,
                    **options,
                )  # fmt: skip

    def advance(self, only: torch.device | None = None) -> None:
        """End of a replay: the next one uses other inputs and delays."""
        for device, here in self.locals.items():
            if only in (None, device):
                with self.on(device):
                    advance_kernel[(1,)](here.step, PDL=self.pdl, launch_pdl=self.pdl)

    def randomise_delays(self, probability: float, longest_ns: int) -> None:
        for device, here in self.locals.items():
            with self.on(device):
                shape = here.delays.shape
                hit = torch.rand(shape) < probability
                here.delays.copy_((torch.rand(shape) * longest_ns * hit).long())
        self.synchronize()

    def preload(self) -> None:
        """Load every kernel on every device while nothing can spin for long: with the abort word
        set, each spin ends by itself. (Loading a module waits for its device.)"""
        self.status.fill_(2)
        for m in self.members:
            with self.on(m.device):
                for call in range(2):
                    for phase in self.phases():
                        for residual in (True, False):
                            self.launch(m, call, phase, residual=residual)
            self.synchronize()
        for device in self.locals:
            self.checked_call(0, device)
            self.advance(device)
            self.synchronize()
        self.reset()

    def reset(self) -> None:
        """Everything as at the start; all devices idle before and after."""
        self.synchronize()
        for m in self.members:
            with self.on(m.device):
                self.space.reset(m.buffer)
        for device, here in self.locals.items():
            with self.on(device):
                here.step.zero_()
                here.found.zero_()
        self.status.zero_()
        self.synchronize()

    def capture(self, body: Callable[[torch.device], None]) -> Callable[[], None]:
        """One CUDA graph a device, made one after another; the result launches all of them. On the CPU it runs
        the body."""
        if not self.streams:
            return lambda: body(self.devices[0])
        graphs = []
        for device, stream in self.streams.items():
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.device(device), torch.cuda.graph(graph, stream=stream):
                body(device)
            graphs.append((device, graph))

        def replay() -> None:
            for device, graph in graphs:
                with self.on(device):
                    graph.replay()

        return replay

    def verdict(self) -> dict[str, Any]:
        """After the devices are idle: wrong elements, equality of the ranks' bits, the status."""
        self.synchronize()
        found = [rank for here in self.locals.values() for rank in here.found.tolist()]
        return {
            "wrong": sum(f[0] for f in found),
            "ranks_equal": len({f[1] for f in found}) == 1,
            "status": self.status.tolist(),
        }
