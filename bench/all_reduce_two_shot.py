"""Shapes of the two-shot all-reduce in one launch: programs and portions by size, checked, beside the four launches."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from bench.all_reduce_forms import HIDDEN, TIMED_FORMS
from bench.all_reduce_group import EPS, Group
from bench.all_reduce_latency import measured, share
from engine.kernels.all_reduce import AllReduceConfig, all_reduce_ref
from engine.kernels.epilogue import shard_rows
from engine.kernels.integers import cdiv
from engine.kernels.norm import rmsnorm
from engine.kernels.quantize_rows import rmsnorm_quantize

if TYPE_CHECKING:
    from bench.all_reduce import Bench

# First what is asked for: 80 % of the links at 8 MB.
SWEPT_BYTES = tuple(n << 20 for n in (8, 16, 32, 2, 1))
PROGRAMS = (66, 132, 264, 528)
PORTIONS = (1, 2, 4)
CHECKED_CALLS = 8


def shapes(world: int, nbytes: int) -> list[AllReduceConfig]:
    """Configurations that differ in what they launch: no more programs than rows of an owner, no more portions than
    rows of a program. (The norm has the number of warps: its order of sums.)"""
    owned = shard_rows(nbytes // (2 * HIDDEN), world)
    found: dict[tuple[int, int], AllReduceConfig] = {}
    for programs in PROGRAMS:
        for portions in PORTIONS:
            grid = min(programs, owned)
            key = grid, min(portions, cdiv(owned, grid))
            found.setdefault(key, AllReduceConfig("two_shot", programs=key[0], portions=key[1]))
    return list(found.values())


def sweep(bench: Bench, world: int) -> None:
    """us, GB/s and share of the links of every shape; the best one with the norm, and in FP8."""
    if world > len(bench.devices):
        bench.check(False, "two_shot: virtual ranks cross no link; it needs one rank a device")
        return
    rate = bench.link[0]
    bench.say(f"two-shot in one launch, PDL, 40 calls in a graph; {rate / 1e9:.0f} GB/s each way")
    for nbytes in SWEPT_BYTES:
        if bench.late(f"two_shot at {nbytes >> 20} MB"):
            return
        split = TIMED_FORMS["two_shot_split"].config(world, nbytes)
        _measure(bench, "two_shot_split", world, nbytes, split)
        times = {c: _measure(bench, "two_shot", world, nbytes, c) for c in shapes(world, nbytes)}
        best = min(times, key=lambda c: (times[c] != times[c], times[c]))
        for form in ("two_shot_norm", "two_shot_norm_fp8"):
            _measure(bench, form, world, nbytes, best)
        part = share(TIMED_FORMS["two_shot"], world, nbytes, times[best], rate)
        bench.say(
            f"{nbytes >> 20} MB: best {times[best]:.2f} us, {part:.0%} of the links, with {best.programs} "
            f"programs of {best.portions} portions"
        )


def same_norm(group: Group) -> bool:
    """One call of random values: whether every rank has the bits of `rmsnorm` or `rmsnorm_quantize` of the sums."""
    rows, first = group.n // group.row, group.members[0].device
    generator = torch.Generator(first).manual_seed(rows)
    with group.on(first):
        *partials, residual = (
            torch.randn(group.n, generator=generator, device=first).bfloat16()
            for _ in range(group.world + 1)
        )
        h = all_reduce_ref(partials, residual).view(rows, group.row)
    group.synchronize()
    for m in group.members:
        with group.on(m.device):
            m.x.copy_(partials[m.rank])
            m.residual.copy_(residual)
    group.synchronize()
    group.call(0)
    group.synchronize()
    same = not group.status[0]
    for m in group.members:
        assert m.end is not None
        with group.on(m.device):
            y = torch.empty_like(m.end.y(rows, group.how.fp8))
            if group.how.fp8:
                scale = torch.empty_like(m.end.scales(rows))
                rmsnorm_quantize(h.to(m.device), m.weight, y, scale, eps=EPS)
                same &= torch.equal(scale, m.end.scales(rows))
            else:
                rmsnorm(h.to(m.device), m.weight, y, eps=EPS)
            found = m.end.y(rows, group.how.fp8)
            same &= torch.equal(y.view(torch.uint8), found.view(torch.uint8))
    return same


def _measure(bench: Bench, form: str, world: int, nbytes: int, config: AllReduceConfig) -> float:
    """Check the bits, then time: us, NaN if it failed."""
    how = TIMED_FORMS[form]
    group = Group(form, world, bench.devices, nbytes, pdl=True, config=config)
    group.preload()
    name = (
        f"{nbytes >> 20:3d} MB {form:18} {config.programs:3d} programs, {config.portions} portions"
    )
    if how.norm:
        if not same_norm(group):
            bench.check(
                False, f"{name}: other bits than the norm of the sums, {group.status.tolist()}"
            )
            return float("nan")
    else:
        group.randomise_delays(0.3, 20_000)
        for call in range(CHECKED_CALLS):
            group.checked_call(call)
        verdict = group.verdict()
        if verdict["wrong"] or not verdict["ranks_equal"] or verdict["status"][0]:
            bench.check(False, f"{name}: {verdict}")
            return float("nan")
    us = measured(bench, group)
    if us != us:
        return us
    part = share(how, world, nbytes, us, bench.link[0])
    speed = how.sent_bytes(world, nbytes) / us / 1e3
    bench.say(f"{name} {us:8.2f} us {speed:6.1f} GB/s {part:5.0%}")
    shape = "" if form == "two_shot_split" else f" {config.programs} x {config.portions}"
    bench.add("two_shot_shape_us", us, "us", group, form + shape, share=part)
    return us
