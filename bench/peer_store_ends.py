"""Two ends of a link, and what bench/peer_store.py sends between them: kinds, variants, their launches, checks and times."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from bench.peer_store_kernels import (
    MULTIPLIER,
    TILE_ROWS,
    TILE_WORDS,
    bulk_kernel,
    exchange_kernel,
    plain_kernel,
    transfer_kernel,
)
from engine.runtime.stream_ops import stream_copy

SIZES = tuple(1 << k for k in (20, 22, 24, 26))
EXCHANGE_SIZES = (1 << 22, 1 << 23, 1 << 24)  # the all-reduce bench's sizes that lose
ENGINE_SHAPE = (256, 132)  # block and programs of `heuristic` for large messages; 8 warps
REPLAYS = 5
COPY_ENGINE = "copy_engine"


@dataclass(frozen=True)
class Kind:
    """load, store: instructions of `transfer_kernel` ("" : another kernel). own: the sender's copy as well.
    pull: the kernel runs where the data goes."""

    load: str = ""
    store: str = ""
    own: bool = False
    pull: bool = False
    shapes: tuple[tuple[int, int], ...] = ((8, 1), (8, 4))  # (warps, depth)


_ALL = tuple((warps, depth) for warps in (4, 8) for depth in (1, 2, 4, 8))
_DEEP = tuple((8, depth) for depth in (1, 2, 4, 8))
KINDS = {
    "relaxed.sys": Kind("relaxed.sys", "relaxed.sys", shapes=_ALL),  # the engine's push
    "weak": Kind("relaxed.sys", "weak", shapes=_ALL),
    "tl.store": Kind(),
    "volatile": Kind("relaxed.sys", "volatile"),
    "relaxed.gpu": Kind("relaxed.sys", "relaxed.gpu"),
    "relaxed.sys from registers": Kind("registers", "relaxed.sys"),
    "weak from registers": Kind("registers", "weak"),
    "relaxed.sys + own copy": Kind("relaxed.sys", "relaxed.sys", own=True),
    "weak + own copy": Kind("relaxed.sys", "weak", own=True),
    "TMA store": Kind(shapes=((4, 2), (4, 4), (8, 1), (8, 2), (8, 4))),
    "pull relaxed.sys": Kind("relaxed.sys", "weak", pull=True, shapes=_DEEP),
    "pull weak": Kind("weak", "weak", pull=True, shapes=_DEEP),
    "pull tl.load": Kind(pull=True),
}
EXCHANGES = {
    "push": ((True, False),),
    "poll": ((False, True),),
    "sequence": ((True, False), (False, True)),
    "overlapped": ((True, True),),
}


@dataclass(frozen=True)
class Variant:
    kind: str
    warps: int = 8
    depth: int = 1

    def __str__(self) -> str:
        return f"{self.kind} w{self.warps} d{self.depth}"


def variants() -> list[Variant]:
    return [Variant(name, *shape) for name, kind in KINDS.items() for shape in kind.shapes]


def arguments(variant: Variant) -> tuple[Any, dict[str, Any]]:
    """The kernel of a variant and its compile-time arguments."""
    kind = KINDS[variant.kind]
    if variant.kind == "TMA store":
        return bulk_kernel, dict(DEPTH=variant.depth)
    lanes = 32 * variant.warps
    if not kind.store:
        return plain_kernel, dict(BLOCK=4 * lanes * variant.depth)
    return transfer_kernel, dict(
        LOAD=kind.load, STORE=kind.store, OWN=kind.own, LANES=lanes, DEPTH=variant.depth
    )


def calls_of(nbytes: int) -> int:
    """Launches in a graph: 512 MB, so that the host's 10 us between two devices' graphs do not show."""
    return max(8, min(128, (1 << 29) // nbytes))


def message(words: int, salt: int, device: torch.device) -> torch.Tensor:
    """int32 [words]: what is sent; every word another, and another one from each end."""
    index = torch.arange(words, dtype=torch.int64, device=device)
    word = (index * MULTIPLIER.value + salt) & 0xFFFFFFFF
    return torch.where(word >= 1 << 31, word - (1 << 32), word).to(torch.int32)


class Side:
    """One end. source is here, target (where it is sent) at the other end, and everything else here."""

    def __init__(self, device: torch.device, peer: torch.device, salt: int, nbytes: int) -> None:
        words, exchanged = nbytes // 4, min(nbytes, max(EXCHANGE_SIZES)) // 4
        self.device, self.peer, self.salt = device, peer, salt
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.source = message(words, salt, device)
        self.target = torch.zeros(words, dtype=torch.int32, device=peer)
        self.own = torch.zeros(words, dtype=torch.int32, device=device)
        self.slots = torch.zeros(2, 2 * exchanged, dtype=torch.int32, device=device)
        self.residual = torch.zeros(exchanged, dtype=torch.int32, device=device)
        self.out = torch.zeros(exchanged, dtype=torch.int32, device=device)


class Ends:
    """Both sides, and what is launched between them."""

    def __init__(self, devices: list[torch.device], nbytes: int = max(SIZES)) -> None:
        pairs = zip(devices, devices[::-1])
        self.sides = [Side(a, b, 977 * i + 1, nbytes) for i, (a, b) in enumerate(pairs)]
        self.synchronize()

    def synchronize(self) -> None:
        for side in self.sides:
            if side.stream is not None:
                torch.cuda.synchronize(side.device)

    def runner(self, kind: str, way: int) -> Side:
        """Whose stream moves what side `way` sends."""
        return self.sides[1 - way if kind in KINDS and KINDS[kind].pull else way]

    def launch(self, variant: Variant, way: int, nbytes: int, programs: int) -> None:
        """One message from side `way`, on the current stream, which is that of `runner`."""
        side = self.sides[way]
        source, target = side.source[: nbytes // 4], side.target[: nbytes // 4]
        if variant.kind == COPY_ENGINE:
            assert side.stream is not None
            stream_copy(side.stream, target.data_ptr(), source.data_ptr(), nbytes)
            return
        fn, constants = arguments(variant)
        args: tuple = (
            source.data_ptr(), target.data_ptr(), side.own.data_ptr(), nbytes // 16, side.salt,
        )  # fmt: skip
        if fn is plain_kernel:
            args = source, target, nbytes // 4
        elif fn is bulk_kernel:
            block = [TILE_ROWS, TILE_WORDS]
            layout = gl.NVMMASharedLayout.get_default_for(block, gl.int32)
            rows = target.view(-1, TILE_WORDS)
            args = source, TensorDescriptor.from_tensor(rows, block, layout), nbytes >> 14
        fn[(programs,)](*args, **constants, num_warps=variant.warps)

    def exchange(
        self, name: str, way: int, call: int, nbytes: int, shape: tuple[int, int] = ENGINE_SHAPE
    ) -> None:
        """The traffic of side `way`'s part of all-reduce number `call`, on its current stream."""
        side, peer = self.sides[way], self.sides[1 - way]
        slot, (block, programs) = call % 2, shape
        for push, poll in EXCHANGES[name]:
            read = side.slots[1 - slot if push else slot]
            exchange_kernel[(min(programs, triton.cdiv(nbytes, 16 * block)),)](
                side.source.data_ptr(), peer.slots[slot].data_ptr(), side.slots[slot].data_ptr(),
                read.data_ptr(), side.residual.data_ptr(), side.out.data_ptr(), nbytes // 16, way,
                PUSH=push, POLL=poll, BLOCK=block, num_warps=8,
            )  # fmt: skip

    def run(self, side: Side, function: Callable[..., None], *args: Any) -> None:
        """function(*args) on the side's device and stream."""
        if side.stream is None:
            function(*args)
            return
        with torch.cuda.device(side.device), torch.cuda.stream(side.stream):
            function(*args)

    def wrong(self, variant: Variant, nbytes: int, programs: int) -> int:
        """Words that are not the sender's after one message each way, into poisoned memory."""
        for side in self.sides:
            side.target.fill_(0x5A5A5A5A)
            side.own.fill_(0x5A5A5A5A)
        self.synchronize()
        for way in range(2):
            side = self.runner(variant.kind, way)
            self.run(side, self.launch, variant, way, nbytes, programs)
        self.synchronize()
        found = 0
        for side in self.sides:
            sent = side.source[: nbytes // 4]
            found += int((side.target[: sent.numel()] != sent.to(side.peer)).sum())
            found += int((side.target[sent.numel() :] != 0x5A5A5A5A).sum())
            if variant.kind in KINDS and KINDS[variant.kind].own:
                found += int((side.own[: sent.numel()] != sent).sum())
        return found

    def time(self, kind: str, body: Callable[[int, int], None], calls: int, ways: int) -> float:
        """us of one of `calls` calls of `body(way, call)` for the first `ways` ways at once; the slowest of them."""
        graphs = []
        for way in range(ways):
            side = self.runner(kind, way)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.device(side.device), torch.cuda.graph(graph, stream=side.stream):
                for call in range(calls):
                    body(way, call)
            graphs.append((side, graph))
        times = []
        for _ in range(REPLAYS + 1):
            events = []
            for side, graph in graphs:
                with torch.cuda.device(side.device), torch.cuda.stream(side.stream):
                    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                    start.record()
                    graph.replay()
                    end.record()
                    events.append((start, end))
            self.synchronize()
            times.append(max(start.elapsed_time(end) for start, end in events) * 1e3 / calls)
        return statistics.median(times[1:])

    def transfer_us(self, variant: Variant, nbytes: int, programs: int, ways: int) -> float:
        def body(way: int, call: int) -> None:
            self.launch(variant, way, nbytes, programs)

        return self.time(variant.kind, body, calls_of(nbytes), ways)

    def exchange_us(self, name: str, nbytes: int, shape: tuple[int, int]) -> float:
        def body(way: int, call: int) -> None:
            self.exchange(name, way, call, nbytes, shape)

        return self.time("", body, min(40, calls_of(nbytes)), 2)
