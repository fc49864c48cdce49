"""us a call of an all-reduce in a CUDA graph, by form and size; what of the links that uses."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from bench.all_reduce_forms import TIMED_FORMS, Form
from bench.all_reduce_group import Group
from bench.all_reduce_kernels import copy_kernel
from engine.kernels.all_reduce import AllReduceConfig

if TYPE_CHECKING:
    from bench.all_reduce import Bench

SIZES = [1 << k for k in (10, 12, 14, 16, 18, 20, 22, 23, 24, 25)]
SHARE_BYTES = (1 << 23, 1 << 25)  # 512 and 2048 tokens of 72B
LINK_BYTES_PER_S = 478e9  # NVLink 4, 18 lanes, each way, as the driver says
COPY_BYTES = 1 << 26
CALLS = 160  # all-reduces of a decode replay (80 layers)


def calls_of(group: Group, device: torch.device, calls: int) -> None:
    """Enqueue `calls` all-reduces of the ranks of one device."""
    for call in range(calls):
        group.call(call, only=device)


def timed(group: Group, replay: Callable[[], None], calls: int, repeats: int = 9) -> list[float]:
    """us a call of each replay, by the slowest device's events."""
    times = []
    for _ in range(repeats):
        events = []
        for device, stream in group.streams.items():
            with torch.cuda.device(device):
                events.append((torch.cuda.Event(enable_timing=True), stream, device))
                events[-1][0].record(stream)
        replay()
        ends = []
        for start, stream, device in events:
            with torch.cuda.device(device):
                end = torch.cuda.Event(enable_timing=True)
                end.record(stream)
                ends.append((start, end))
        group.synchronize()
        times.append(max(s.elapsed_time(e) for s, e in ends) * 1e3 / calls)
    return times


def floor_us(group: Group, calls: int, pdl: bool) -> float:
    """A copy kernel of the same message in the same kind of graph."""

    def body(device: torch.device) -> None:
        member = next(m for m in group.members if m.device == device)
        for _ in range(calls):
            with group.on(device):
                copy_kernel[(max(1, group.n // 1024),)](
                    member.x, member.out, group.n, BLOCK=1024, PDL=pdl, launch_pdl=pdl
                )

    for device in group.streams:
        body(device)
    group.synchronize()
    return statistics.median(timed(group, group.capture(body), calls))


def copy_us(devices: list[torch.device], nbytes: int) -> float:
    """us of a copy of `nbytes` by the copy engines of two devices, both ways at once."""
    from bench.peer_store_ends import COPY_ENGINE, Ends, Variant

    return Ends(devices[:2], nbytes).transfer_us(Variant(COPY_ENGINE), nbytes, 1, 2)


def link_rate(devices: list[torch.device]) -> tuple[float, str]:
    """(bytes/s each way while both ends send, where that is from): copy engines where there are two devices."""
    if len(devices) < 2:
        return LINK_BYTES_PER_S, "as the driver says"
    rate = COPY_BYTES / copy_us(devices, COPY_BYTES) * 1e6
    return rate, f"the copy engines' at {COPY_BYTES >> 20} MB, both ways at once"


def share(form: Form, world: int, nbytes: int, us: float, rate: float) -> float:
    """Of a rank's links, one way: bytes sent / time / rate."""
    return form.sent_bytes(world, nbytes) / (us * 1e-6) / rate


def latency(
    bench: Bench, name: str, world: int, nbytes: int, pdl: bool, config: AllReduceConfig | None = None
) -> float:  # fmt: skip
    """Median us a call; one row."""
    form = TIMED_FORMS[name]
    config = config or form.config(world, nbytes)
    group = Group(name, world, bench.devices, nbytes, pdl=pdl, config=config)
    group.preload()
    value = measured(bench, group)
    part = None
    if nbytes >= 1 << 20 and world <= len(bench.devices):
        part = share(form, world, nbytes, value, bench.link[0])
    if value == value:
        bench.add("all_reduce_us", value, "us", group, name + ("_pdl" if pdl else ""), share=part)
    return value


def measured(bench: Bench, group: Group) -> float:
    """Median us a call in a graph; NaN, and a failed check, if a spin expired. The devices' starts are some us apart,
    which the first call waits for: many calls, also of large messages."""
    calls = CALLS if group.nbytes <= 1 << 16 else 40
    replay = group.capture(lambda device: calls_of(group, device, calls))
    group.reset()
    times = timed(group, replay, calls)
    status = group.status.tolist()
    if status[0]:
        what = f"{group.form} x{group.world} {group.nbytes} B"
        bench.check(False, f"{what}: spin expired, status {status}")
        return float("nan")
    return statistics.median(times)


def latency_table(bench: Bench, world: int, names: list[str], sizes: list[int] = SIZES) -> None:
    """Every form at the sizes that it is for, with and without PDL; size by size, as far as the time goes."""
    times: dict[tuple[str, bool], dict[int, float]] = {
        (name, pdl): {}
        for name in names
        for pdl in (False, True)
        if pdl or not TIMED_FORMS[name].norm  # the engine's, which has PDL there
    }
    for nbytes in sizes:
        if bench.late(f"latency from {nbytes} B"):
            break
        for (name, pdl), found in times.items():
            if TIMED_FORMS[name].fits(nbytes):
                found[nbytes] = latency(bench, name, world, nbytes, pdl)
    rate, source = bench.link
    bench.rows.add(
        "all_reduce_link_gb_s", rate / 1e9, "GB/s", tp=world, bytes=COPY_BYTES, algorithm=source
    )
    bench.say(
        f"us a call, {world} ranks on {len(bench.devices)} devices, {CALLS} in a graph (fewer when large); "
        f"share of {rate / 1e9:.0f} GB/s each way ({source})"
    )
    for line in table(times, world, sizes, rate):
        bench.say(line)
    if world == 2 and len(bench.devices) > 1:  # two ranks send a message's bytes each
        for nbytes in SHARE_BYTES:
            us = copy_us(bench.devices, nbytes)
            name = "copy engines, both ways at once"
            bench.rows.add("all_reduce_copy_us", us, "us", tp=2, bytes=nbytes, algorithm=name)
            bench.say(f"{name}, {nbytes >> 20} MB: {us:.2f} us")


def table(
    times: dict[tuple[str, bool], dict[int, float]], world: int, sizes: list[int], rate: float
) -> list[str]:
    """A line for each form: us by size, then its share of the links at SHARE_BYTES."""
    heads = [f"{n >> 20} MB" if n >= 1 << 20 else f"{n >> 10} KB" for n in sizes]
    shares = [f"of {n >> 20} MB" for n in SHARE_BYTES]
    lines = ["".ljust(34) + "".join(head.rjust(9) for head in heads + shares)]
    for (name, pdl), found in times.items():
        cells = [f"{found[n]:.2f}" if n in found else "-" for n in sizes]
        for n in SHARE_BYTES:
            part = share(TIMED_FORMS[name], world, n, found[n], rate) if n in found else None
            cells.append("-" if part is None else f"{part:.0%}")
        lines.append(
            f"{name}{'+pdl' if pdl else ''}".ljust(34) + "".join(cell.rjust(9) for cell in cells)
        )
    return lines
