"""The two-shot exchange by rows as kernels of the model checker (protocol_model.py), in both of its forms."""

from __future__ import annotations

from tests.unit.protocol_model import Kernel, Op

PARTIALS, Y = 0, 1  # areas of the two-shot exchange (engine/kernels/two_shot.py)
PUBLISH = -1  # its flag; those of the reduce's programs count from 0
TWO_SHOT = ("gemm", "publish", "reduce", "gather", "read")


def two_shot_form(
    calls: int, world: int, programs: int = 1, *, order: tuple[str, ...] = TWO_SHOT,
    early: tuple[str, ...] = (), before: str = "", publish_waits: bool = True, store_first: bool = True,
    first: int = 0,
) -> list[list[Kernel]]:  # fmt: skip
    """The two-shot exchange by rows; each rank's rows are `programs` chunks, one a program of the reduce.

    A GEMM puts the partial sums of each owner's rows there (PARTIALS), a launch publishes; the reduce waits for all
    ranks' publishes, reads, puts y of its rows everywhere (Y) and signals by program; the gather waits for all
    programs; then `read`, the launch that reads all of y. Variants: steps left out of `order`; the next call's
    `early` steps in front of this one's `before`; a publish that lacks its wait under PDL; flags that are not ordered
    behind the row's stores (store_first False). first: number of the first call.
    """

    def kernel(name: str, r: int, call: int) -> Kernel:
        ranks, chunks = range(world), range(programs)

        def every(kind: str, area: int, places) -> tuple[Op, ...]:
            return tuple(Op(kind, area, q, call, c, rank=r) for q in ranks for c in places)

        if name == "gemm":
            return Kernel(((every("put", PARTIALS, chunks),),))
        if name == "publish":
            return Kernel(((every("signal", 0, (PUBLISH,)),),), 0 if publish_waits else 2)
        if name == "gather":
            return Kernel(((every("await", 0, chunks),),))
        if name == "read":
            return Kernel(((every("get", Y, chunks),),))
        bodies = []
        for c in chunks:
            waits, reads = every("await", 0, (PUBLISH,)), every("get", PARTIALS, (c,))
            stores, signals = every("put", Y, (c,)), every("signal", 0, (c,))
            last = (stores, signals) if store_first else (stores + signals,)
            bodies.append((waits, reads, *last))
        return Kernel(tuple(bodies))

    steps: list[tuple[str, int]] = []
    for call in range(calls):
        for name in order:
            if name == before and call + 1 < calls:
                steps += [(step, call + 1) for step in early]
            if not call or name not in early:
                steps.append((name, call))
    return [[kernel(name, r, first + call) for name, call in steps] for r in range(world)]


FIRST, SECOND = (
    10,
    500,
)  # flags of the one launch: of program p's portions (10 p + k), and behind its rows of y


def two_shot_fused_form(
    sizes: list[int], world: int, portions: int = 2, programs: int = 1, *, split: tuple[int, ...] = (),
    read_waits: bool = True, last_waits: bool = True, all_portions: bool = True,
    scatter_first: bool = True, sum_first: bool = True,
) -> list[list[Kernel]]:  # fmt: skip
    """The two-shot exchange in one launch (engine/kernels/two_shot_fused.py), and the launch that reads y behind it.

    sizes: of each call, rows that a rank owns; program p has rows p, p + programs, ... of every owner. The last
    portion is released behind the sum of the first row. `split`: calls that go by the four launches on the same
    areas. Variants that break it: a launch lacks its wait for those before it, the readers of y (read_waits), a launch ends without
    its peers' second flags (last_waits), a wait for the first portion only (all_portions), a portion's flag before its rows
    (scatter_first), y of a row before the flags of all ranks (sum_first).
    """

    def program(r: int, call: int, p: int) -> tuple[tuple[Op, ...], ...]:
        ranks, rows = range(world), list(range(p, sizes[call], programs))
        steps = -(-sizes[call] // programs)
        run = -(-steps // portions)
        last = -(-steps // run) - 1

        def every(kind: str, area: int, places) -> tuple[Op, ...]:
            return tuple(Op(kind, area, q, call, c, rank=r) for q in ranks for c in places)

        flags = [every("signal", 0, (FIRST * (p + 1) + k,)) for k in range(last + 1)]
        stages: list[tuple[Op, ...]] = []
        for k in range(last + 1):
            puts = every("put", PARTIALS, rows[k * run : (k + 1) * run])
            early = flags[k] if k < last or not last else ()
            stages += [puts, early] if scatter_first else [puts + early]
        for i, row in enumerate(rows or [None]):
            if i % run == 0 and (all_portions or i == 0):
                stages.append(every("await", 0, (FIRST * (p + 1) + i // run,)))
            places = () if row is None else (row,)
            stages.append(every("get", PARTIALS, places))
            if i == 0 and last:
                stages.append(flags[last])
            if sum_first:
                stages.append(every("put", Y, places))
            else:
                stages.insert(0, every("put", Y, places))
        stages.append(every("signal", 0, (SECOND + p,)))
        if last_waits:
            stages.append(every("await", 0, (SECOND + p,)))
        return tuple(stage for stage in stages if stage)

    def kernels(r: int) -> list[Kernel]:
        line: list[Kernel] = []
        for call, size in enumerate(sizes):
            read = tuple(
                Op("get", Y, q, call, c, rank=r) for q in range(world) for c in range(size)
            )
            if call in split:
                line += two_shot_form(1, world, size, first=call)[r][:-1]
            else:
                bodies = tuple(program(r, call, p) for p in range(min(programs, size)))
                line.append(Kernel(bodies, 0 if read_waits else 2))
            line.append(Kernel(((read,),)))
        return line

    return [kernels(r) for r in range(world)]


def on_streams(
    ranks: list[list[Kernel]], sharing: int, lockstep: bool = True
) -> list[list[Kernel]]:
    """Ranks that name themselves (`Op.rank`), `sharing` of them a device: launch by launch, all ranks of it before
    the next launch; not lockstep: one rank after the other."""
    streams = []
    for first in range(0, len(ranks), sharing):
        here = ranks[first : first + sharing]
        columns = zip(*here) if lockstep else here
        streams.append([kernel for column in columns for kernel in column])
    return streams
