"""Forms of an all-reduce that bench/all_reduce.py launches: their launches, what they send, the sizes they are for."""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.kernels.all_reduce import AllReduceConfig, heuristic

HIDDEN = 8192  # of a row of a two-shot message, where it has as much
FLAG_MOST_BYTES = 1 << 20  # no larger message is one that the flag barrier wins
TWO_SHOT_LEAST_BYTES = 256 << 10  # no smaller one is one that two-shot wins


@dataclass(frozen=True)
class Form:
    """phases: its launches in order; a single one is only for one rank a device. slots: of a Lamport workspace; with
    two, each poll re-arms its own behind it, as the engine's graphs have it: messages of any size may then follow
    each other. norm, fp8: what two-shot sends back, else the sum."""

    algorithm: str
    phases: tuple[str, ...]
    slots: int = 4
    norm: bool = False
    fp8: bool = False

    @property
    def fused(self) -> bool:
        return len(self.phases) == 1

    def fits(self, nbytes: int) -> bool:
        """Whether a message is of a size that the form is for."""
        if self.algorithm == "flag":
            return nbytes <= FLAG_MOST_BYTES
        return self.algorithm != "two_shot" or nbytes >= TWO_SHOT_LEAST_BYTES

    def sent_bytes(self, world: int, nbytes: int) -> float:
        """What crosses a rank's links one way in one call."""
        if self.algorithm != "two_shot":
            return (world - 1) * nbytes
        back = 0.5 if self.fp8 else 1.0  # of 16 bits
        there = self.fused or "scatter" in self.phases
        return (there + back) * (world - 1) / world * nbytes

    def config(self, world: int, nbytes: int) -> AllReduceConfig:
        """The heuristic's, or the one that it has where it takes this algorithm."""
        if self.algorithm == "two_shot" and self.fused:
            return _ONE_LAUNCH
        chosen = heuristic(world, nbytes)
        return chosen if chosen.algorithm == self.algorithm else _ELSEWHERE[self.algorithm]


_ELSEWHERE = {
    "lamport": AllReduceConfig("lamport", 256, 8, 132),
    "flag": AllReduceConfig("flag"),
    "two_shot": AllReduceConfig("two_shot", programs=264),
}
_ONE_LAUNCH = AllReduceConfig("two_shot", programs=132, portions=2)
_TWO_SHOT = Form("two_shot", ("all",))
_SPLIT = replace(_TWO_SHOT, phases=("scatter", "publish", "reduce", "gather"))
# What an exchange costs behind a GEMM that scattered in its epilogue. The flags are right, the sums are those of what
# was scattered before: it is timed and never checked.
_BEHIND_GEMM = replace(_SPLIT, phases=_SPLIT.phases[1:])

FORMS = {  # whose sums are checked
    "lamport": Form("lamport", ("push", "poll")),
    "lamport_own_slot": Form("lamport", ("push", "poll"), slots=2),
    "lamport_fused": Form("lamport", ("all",)),
    "flag": Form("flag", ("both",)),
    "flag_split": Form("flag", ("publish", "reduce")),
    "two_shot": _TWO_SHOT,
    "two_shot_split": _SPLIT,
}
TIMED_FORMS = {  # with the norm, and with it in 8 bits: what the engine launches
    **FORMS,
    "two_shot_norm": replace(_TWO_SHOT, norm=True),
    "two_shot_norm_fp8": replace(_TWO_SHOT, norm=True, fp8=True),
    "two_shot_behind_gemm": _BEHIND_GEMM,
    "two_shot_behind_gemm_norm": replace(_BEHIND_GEMM, norm=True),
    "two_shot_behind_gemm_norm_fp8": replace(_BEHIND_GEMM, norm=True, fp8=True),
}
