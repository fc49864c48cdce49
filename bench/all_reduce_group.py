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

from bench.all_reduce_forms import HIDDEN, TIMED_FORMS
from bench.all_reduce_kernels import advance_kernel, compare_kernel, prepare_kernel
from engine.kernels.all_reduce import (
    AllReduceConfig,
    all_reduce,
    all_reduce_ref,
    poll_residual,
    push,
)
from engine.kernels.flag_all_reduce import FlagWorkspace, flag_all_reduce
from engine.kernels.slots import LamportWorkspace, peer_table
from engine.kernels.two_shot import (
    TwoShotRank,
    TwoShotWorkspace,
    two_shot_gather,
    two_shot_publish,
    two_shot_ranks,
    two_shot_reduce,
    two_shot_scatter,
)
from engine.kernels.two_shot_fused import two_shot_all_reduce

POOL = 16  # distinct inputs; a stale slot holds another one's sum
SPECIAL = (-0.0, 0.0, float("inf"), float("-inf"), float("nan"), 1e-40, -1e-40, 3e38, -3e38)
EPS = 1e-6


@dataclass
class Local:
    """The ranks of one device side by side, so that one launch prepares or checks them all. n = elements of the
    largest message (bf16), m = ranks here. result: where the sums come to lie, `out` or the receive buffers."""

    ranks: list[int]
    x: torch.Tensor  # [m, n]
    residual: torch.Tensor  # [m, n]
    out: torch.Tensor  # [m, n]
    result: torch.Tensor  # [m, n]
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
    weight: torch.Tensor  # [row]
    table: torch.Tensor | None = None  # of all ranks' buffers; two-shot has `end`
    end: TwoShotRank | None = None

    @property
    def peers(self) -> torch.Tensor:
        """`table`. ValueError for a rank of two-shot."""
        if self.table is None:
            raise ValueError(f"rank {self.rank} has no table of the ranks' buffers")
        return self.table


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
    """`world` ranks over `devices` (cycled), all for one form and messages of up to `nbytes`, a multiple of `row`
    elements (0: what the form carries; of two-shot up to HIDDEN)."""

    form: str
    world: int
    devices: list[torch.device]
    nbytes: int
    pdl: bool = False
    config: AllReduceConfig | None = None
    limit_us: int = 2_000_000
    programs: int = 0  # of the flag barrier; 0: by size
    row: int = 0
    members: list[Member] = field(default_factory=list)
    locals: dict[torch.device, Local] = field(default_factory=dict)

    def __post_init__(self) -> None:
        n = self.n = self.nbytes // 2
        cuda = self.devices[0].type == "cuda"
        status = torch.zeros(8, dtype=torch.int32)
        self.status = status.pin_memory() if cuda else status
        self.streams = {d: torch.cuda.Stream(d) for d in self.devices} if cuda else {}
        self.how = TIMED_FORMS[self.form]
        self.space: Any = LamportWorkspace(self.world, 1, n, self.how.slots)
        if self.how.algorithm == "two_shot":
            self.row = self.row or min(HIDDEN, n)
            self.space = TwoShotWorkspace(self.world, n // self.row, self.row)
        elif self.how.algorithm == "flag":
            programs = self.programs or max(8, min(128, n // 1024))
            self.space = FlagWorkspace(self.world, 1, n, programs)
        self.row = self.row or 8  # 16 bytes
        for device in self.devices[: self.world]:
            with self.on(device):
                self._place(device)
        self.members.sort(key=lambda m: m.rank)
        buffers = [m.buffer for m in self.members]
        if self.how.algorithm == "two_shot":
            self.config = self.config or self.how.config(self.world, self.nbytes)
            for member, end in zip(
                self.members, two_shot_ranks(self.space, buffers, torch.bfloat16)
            ):
                member.end = end
        else:
            for member in self.members:
                member.table = peer_table(buffers, member.device)
        self.synchronize()

    def _place(self, device: torch.device) -> None:
        """Tensors of one device's ranks."""
        *partials, residual, expected = _inputs(self.world, self.n)
        self.pool = residual.shape[0]
        ranks = list(range(self.devices.index(device), self.world, len(self.devices)))
        m, n = len(ranks), self.n

        def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        buffers = torch.stack([self.space.allocate(device) for _ in ranks])
        out = result = zeros(m, n)
        if self.how.algorithm == "two_shot":
            first = self.space.y_offset
            result = buffers[:, first : first + 2 * n].view(torch.bfloat16)
        here = self.locals[device] = Local(
            ranks=ranks, x=zeros(m, n), residual=zeros(m, n), out=out, result=result,
            x_pool=torch.stack([partials[r] for r in ranks]).to(device),
            residual_pool=residual.to(device, copy=True), expected=expected.to(device, copy=True),
            delays=zeros(m, 1024, dtype=torch.int64), step=zeros(1, dtype=torch.int32),
            found=zeros(m, 2, dtype=torch.int64),
        )  # fmt: skip
        weight = torch.ones(self.row, dtype=torch.bfloat16, device=device)
        for i, rank in enumerate(ranks):
            self.members.append(
                Member(rank, device, here.x[i], here.residual[i], out[i], buffers[i], weight)
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
        if self.how.algorithm == "two_shot":
            self._two_shot(m, phase, x, held, out, call)
        elif self.how.algorithm == "flag":
            flag_all_reduce(x, m.peers, held, out, self.status, self.space, phase=phase, **wait)
        else:
            slots = self.space.slot_offset(call), self.space.clear_offset(call)
            if phase == "push":
                push(x, m.peers, slots[0], **common)
            elif phase == "poll":
                poll_residual(m.buffer, *slots, held, out, self.status, **wait)
            else:
                all_reduce(x, m.buffer, m.peers, *slots, held, out, self.status, **wait)

    def _two_shot(
        self, m: Member, phase: str, x: torch.Tensor, held: torch.Tensor | None, h: torch.Tensor,
        call: int,
    ) -> None:  # fmt: skip
        assert m.end is not None and self.config is not None
        rows = x.numel() // self.row
        wait: dict[str, Any] = dict(
            call_site=call, config=self.config, pdl=self.pdl, limit_us=self.limit_us
        )
        if phase == "scatter":
            two_shot_scatter(x.view(rows, -1), m.end, pdl=self.pdl)
        elif phase == "publish":
            two_shot_publish(m.end, pdl=self.pdl)
        elif phase in ("reduce", "all"):
            what = (
                m.end, None if held is None else held.view(rows, -1), h.view(rows, -1),
                m.weight if self.how.norm else None, self.status,
            )  # fmt: skip
            wait |= dict(eps=EPS, fp8=self.how.fp8)
            if phase == "reduce":
                two_shot_reduce(*what, **wait)
            else:
                two_shot_all_reduce(x.view(rows, -1), *what, **wait)
        else:
            two_shot_gather(m.end, rows, self.status, **wait)

    def call(
        self, call: int, *, only: torch.device | None = None, size: int | None = None,
        order: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        """Enqueue one all-reduce for every rank (of one device: `only`), phase by phase, in `order` of ranks."""
        members = self.members if order is None else [self.members[r] for r in order]
        for phase in self.how.phases:
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
                    here.result.view(torch.int16), here.expected, here.found, here.step, call, n, self.n,
                    here.result.stride(0), **options,
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
                    for phase in self.how.phases:
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
