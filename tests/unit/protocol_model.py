"""A model checker for the exchange protocols of engine/kernels: plain Python, no kernels.

A rank runs kernels in order. A kernel is a set of identical programs; program p handles chunk p. A
program is a list of stages; the operations of a stage happen in ANY order, one at a time,
interleaved with all other programs and ranks (that covers stores and clears that become visible
late, up to the end of their kernel). The next kernel starts when the one before has ended, unless
it lacks its wait.

    store(area, peer)   the own message for this call into peer's area; must find the location armed
    read(area, source)  waits until the location is not armed, then must find this call's message;
                        source ALL: one poll that finds all sources' messages there
    clear(area)         arms all sources' locations of this chunk in the own memory
    publish, pull       the own data; a peer's, which must be this call's
    put, get            data into a peer's memory; from the own, which must be this call's
    signal, await       this call's epoch into a peer's flag; waits until the own flag is there

A protocol fails by a stale read, an overwrite of a location that was not re-armed, or a hang.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import NamedTuple

ARMED = -1
ALL = -1


class Op(NamedTuple):
    kind: str  # store, read, clear, publish, pull, put, get, signal, await
    area: int
    peer: int
    call: int
    chunk: int
    size: int = 1  # chunks of the message: source q's chunk c lies at q * size + c of the area
    rank: int = -1  # whose it is, where several share a stream; else the stream's


@dataclass(frozen=True)
class Kernel:
    """programs[p]: the stages of program p, each a tuple of operations.

    Under PDL a kernel is launched when the one before it says so; from then on its gdc_wait alone holds its
    operations back. `overlaps`: how many kernels directly before it may still run: 0 behind a gdc_wait; 1 without
    one, behind a kernel that says so behind its own; 2 without one, behind a kernel that says so at its start.
    It ends when those have ended.
    """

    programs: tuple[tuple[tuple[Op, ...], ...], ...]
    overlaps: int = 0


class Violation(Exception):
    pass


class Machine:
    """All ranks' kernels and memory; `kernels` of each stream, which is a rank's or that of several (`Op.rank`). A
    state is hashable: (per-stream progress, memory). Flags begin at `epoch`."""

    def __init__(
        self, kernels: list[list[Kernel]], bits: int = 32, wrap_aware: bool = True, epoch: int = 0
    ) -> None:
        self.kernels = kernels
        self.world = len(kernels)
        self.modulus = 1 << bits
        self.wrap_aware = wrap_aware
        self.epoch = epoch % self.modulus
        self.keys: dict[tuple, int] = {}
        self.initial_memory: list[int] = []
        for rank, sequence in enumerate(kernels):
            for kernel in sequence:
                for stages in kernel.programs:
                    for stage in stages:
                        for op in stage:
                            for key in self._touched(rank, op):
                                if key not in self.keys:
                                    self.keys[key] = len(self.keys)
                                    self.initial_memory.append(
                                        self.epoch if key[0] == "flag" else ARMED
                                    )

    def _touched(self, rank: int, op: Op) -> list[tuple]:
        rank = rank if op.rank < 0 else op.rank
        if op.kind == "put":  # peer: whose memory; the own place there
            return [("data", op.peer, op.area, rank, op.chunk)]
        if op.kind == "get":  # peer: whose place in the own memory
            return [("data", rank, op.area, op.peer, op.chunk)]
        if op.kind == "store":
            return [("word", op.peer, op.area, rank * op.size + op.chunk)]
        if op.kind == "read":
            sources = range(self.world) if op.peer == ALL else (op.peer,)
            return [("word", rank, op.area, q * op.size + op.chunk) for q in sources]
        if op.kind == "clear":
            return [("word", rank, op.area, q * op.size + op.chunk) for q in range(self.world)]
        if op.kind == "publish":
            return [("data", rank, op.area, op.chunk)]
        if op.kind == "pull":
            return [("data", op.peer, op.area, op.chunk)]
        if op.kind == "signal":
            return [("flag", op.peer, rank, op.chunk)]
        return [("flag", rank, op.peer, op.chunk)]  # await

    def _fresh(self, rank: int, index: int) -> tuple:
        if index >= len(self.kernels[rank]):
            return ()
        return tuple((0, 0) for _ in self.kernels[rank][index].programs)

    def start(self) -> tuple:
        ranks = tuple((0, *(self._fresh(r, k) for k in range(3))) for r in range(self.world))
        return ranks, tuple(self.initial_memory)

    def finished(self, state: tuple) -> bool:
        return all(index >= len(self.kernels[r]) for r, (index, *_) in enumerate(state[0]))

    def moves(self, state: tuple) -> list[tuple[int, int, int, int]]:
        """(rank, kernels ahead, program, operation number) of every enabled operation."""
        ranks, memory = state
        found = []
        for rank, (index, *window) in enumerate(ranks):
            for which, progress in enumerate(window):
                number = index + which
                if number >= len(self.kernels[rank]):
                    break
                if which > self.kernels[rank][number].overlaps:
                    continue
                for program, (stage, done) in enumerate(progress):
                    stages = self.kernels[rank][number].programs[program]
                    if stage == len(stages):
                        continue
                    for i, op in enumerate(stages[stage]):
                        if not done >> i & 1 and self._enabled(rank, op, memory):
                            found.append((rank, which, program, i))
        return found

    def _enabled(self, rank: int, op: Op, memory: tuple) -> bool:
        if op.kind == "read":
            return all(memory[self.keys[key]] != ARMED for key in self._touched(rank, op))
        if op.kind == "await":
            flag = memory[self.keys[self._touched(rank, op)[0]]]
            target = self._epoch(op)
            if self.wrap_aware:
                return (flag - target) % self.modulus < self.modulus // 2
            return flag >= target
        return True

    def _epoch(self, op: Op) -> int:
        return (self.epoch + op.call + 1) % self.modulus

    def step(self, state: tuple, move: tuple[int, int, int, int]) -> tuple:
        ranks, memory = state
        rank, which, program, i = move
        index, *progress = ranks[rank]
        stage, done = progress[which][program]
        stages = self.kernels[rank][index + which].programs[program]
        op = stages[stage][i]
        cells = list(memory)
        touched = [self.keys[key] for key in self._touched(rank, op)]
        if op.kind == "store":
            if cells[touched[0]] != ARMED:
                raise Violation(f"overwrite: rank {rank} call {op.call} into rank {op.peer}")
            cells[touched[0]] = op.call
        elif op.kind in ("read", "pull", "get"):
            for cell in touched:
                if cells[cell] != op.call:
                    raise Violation(
                        f"stale: stream {rank} call {op.call} read call {cells[cell]} in area {op.area}"
                    )
        elif op.kind == "clear":
            for cell in touched:
                cells[cell] = ARMED
        elif op.kind in ("publish", "put"):
            cells[touched[0]] = op.call
        elif op.kind == "signal":
            cells[touched[0]] = self._epoch(op)
        done |= 1 << i
        if done == (1 << len(stages[stage])) - 1:
            stage, done = stage + 1, 0
        changed = list(progress[which])
        changed[program] = (stage, done)
        progress[which] = tuple(changed)
        # A kernel ends when all its programs have; then the next one is the current one.
        while index < len(self.kernels[rank]) and all(
            stage == len(stages)
            for (stage, _), stages in zip(progress[0], self.kernels[rank][index].programs)
        ):
            index += 1
            progress = [*progress[1:], self._fresh(rank, index + 2)]
        new = list(ranks)
        new[rank] = (index, *progress)
        return tuple(new), tuple(cells)


def exhaustive(machine: Machine, limit: int = 400_000) -> str | None:
    """Visit every reachable state; the first violation, or None. RuntimeError past `limit`."""
    first = machine.start()
    seen, stack = {first}, [first]
    while stack:
        state = stack.pop()
        moves = machine.moves(state)
        if not moves and not machine.finished(state):
            return "hang"
        for move in moves:
            try:
                following = machine.step(state, move)
            except Violation as violation:
                return str(violation)
            if following not in seen:
                seen.add(following)
                stack.append(following)
        if len(seen) > limit:
            raise RuntimeError(f"more than {limit} states")
    return None


def randomised(machine: Machine, runs: int, seed: int = 0) -> str | None:
    """Random schedules with ranks that stall and ranks that race: the first violation, or None."""
    for run in range(runs):
        rng = random.Random(seed * 1_000_003 + run)
        state = machine.start()
        favourite, patience = 0, 0
        while not machine.finished(state):
            moves = machine.moves(state)
            if not moves:
                return f"hang (run {run})"
            if patience == 0:
                favourite, patience = rng.randrange(machine.world), rng.choice((1, 4, 16, 64))
            patience -= 1
            preferred = [move for move in moves if move[0] == favourite]
            move = rng.choice(preferred or moves)
            try:
                state = machine.step(state, move)
            except Violation as violation:
                return f"{violation} (run {run})"
    return None


# ---- protocols as kernels


@dataclass(frozen=True)
class Exchange:
    """One exchange: the area it uses, and the areas that its poll re-arms (its own one: after
    reading).
    """

    area: int
    clears: tuple[int, ...]
    chunks: int = 0  # size of the message where it is not the graph's own (0)
    polled: bool = False  # by a consumer in its prologue: every program reads every chunk


def _pushes(exchange: Exchange, call: int, chunk: int, world: int, chunks: int) -> tuple[Op, ...]:
    return tuple(Op("store", exchange.area, q, call, chunk, chunks) for q in range(world))


def _polls(
    exchange: Exchange, call: int, chunk: int, world: int, chunks: int, read_all: bool, fine: bool
) -> tuple[tuple[Op, ...], ...]:
    wanted = range(chunks) if read_all else (chunk,)
    sources = range(world) if fine else (ALL,)
    reads = tuple(Op("read", exchange.area, q, call, c, chunks) for q in sources for c in wanted)
    own = tuple(
        Op("clear", a, 0, call, chunk, chunks) for a in exchange.clears if a == exchange.area
    )
    other = tuple(
        Op("clear", a, 0, call, chunk, chunks) for a in exchange.clears if a != exchange.area
    )
    return (reads + other, own) if own else (reads + other,)


def split_form(
    exchanges: list[Exchange],
    world: int,
    programs: int = 1,
    read_all: bool = False,
    overlaps: int = 1,
    fine: bool = False,
) -> list[list[Kernel]]:
    """push kernel, poll kernel, push kernel, ... `read_all`: every program of the poll reads every
    chunk (a consumer that polls in its prologue). `overlaps`: of the poll; our polls do not wait for the push in
    front. `fine`: the sources of a poll are read one by one."""
    kernels = []
    for call, exchange in enumerate(exchanges):
        size = exchange.chunks or programs
        places = range(size)
        shared = read_all or exchange.polled
        push = tuple((_pushes(exchange, call, c, world, size),) for c in places)
        poll = tuple(_polls(exchange, call, c, world, size, shared, fine) for c in places)
        kernels += [Kernel(push), Kernel(poll, overlaps)]
    return [kernels] * world


def fused_form(
    exchanges: list[Exchange],
    world: int,
    programs: int = 1,
    fine: bool = False,
) -> list[list[Kernel]]:
    """Push and poll in one launch."""
    kernels = []
    for call, exchange in enumerate(exchanges):
        bodies = []
        for c in range(programs):
            push = _pushes(exchange, call, c, world, programs)
            bodies.append((push, *_polls(exchange, call, c, world, programs, False, fine)))
        kernels.append(Kernel(tuple(bodies)))
    return [kernels] * world


def flag_form(
    calls: int, world: int, programs: int = 1, buffers: int = 2, split: bool = False
) -> list[list[Kernel]]:
    """The flag barrier: publish, signal all, await all, pull from all."""
    kernels = []
    for call in range(calls):
        half = call % buffers
        publish, reduce = [], []
        for c in range(programs):
            signals = tuple(Op("signal", 0, q, call, c) for q in range(world))
            waits = tuple(Op("await", 0, q, call, c) for q in range(world))
            pulls = tuple(Op("pull", half, q, call, c) for q in range(world))
            publish.append(((Op("publish", half, 0, call, c),), signals))
            reduce.append((waits, pulls))
        if split:
            kernels += [Kernel(tuple(publish)), Kernel(tuple(reduce))]
        else:
            kernels.append(Kernel(tuple(a + b for a, b in zip(publish, reduce))))
    return [kernels] * world
