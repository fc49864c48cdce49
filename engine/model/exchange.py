"""Predicted time of one all-reduce at any TP degree, from what a link and a launch were measured to cost.

W ranks, a message of n bytes of 16-bit values:

    lamport   launches + flight             + (W - 1) n / rate
    two_shot  3 launch + 2 flag flight      + (W - 1) / W n / rate, half of that if y is FP8
    flag      launches + flag flight        + (W - 1) n / rate

`launches`: one in decode (bench/all_reduce.py's one-launch forms), two in prefill. Two-shot is prefill only, and what
is exposed of it: publish, reduce and gather; the other half of its bytes travels while the GEMM runs whose epilogue
scatters them. It has the next norm in it, one-shot has not.

`launch` is an empty copy kernel in the same kind of graph; `flight` what is left of the measured 16 KB Lamport
all-reduce of two ranks: one remote store until a poller has seen it, its loop, the sum; the flag flight the same of
the flag barrier. `rate` is all links of a GPU, one direction: a switch gives each sender all of it, whoever receives.
In a decode chain under PDL the push sits in a GEMV's epilogue and the poll's launch overlaps: what an exchange adds
there was measured too (`Constants.barrier_us`), at two ranks.

Not in the model, and hence in the prediction's error: a switch hop that the measured pair may not have had,
the skew of seven senders, the polling of W messages from L2 (256 KB at most in decode: 0.05 us), the local traffic
of large messages (one-shot re-arms its slots). Nothing of TP = 4 and 8 is measured here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.errors import EngineError
from engine.kernels.all_reduce import TWO_SHOT_BYTES, heuristic
from engine.model.calibrate import EXPERIMENTS, constants_for
from engine.model.gpus import GPUS, Gpu

CALIBRATION_BYTES = 16 << 10
DECODE_LAUNCHES, PREFILL_LAUNCHES = 1, 2  # of one-shot and the flag barrier
TWO_SHOT_LAUNCHES = 3  # beyond the GEMM
# (name, bytes): one row of a decode step, eight rows, a short and a long prefill bucket.
MESSAGES = (
    ("7B, 1 row", 3584 * 2),
    ("72B, 1 row", 8192 * 2),
    ("72B, 8 rows", 8 * 8192 * 2),
    ("72B, 64 tokens", 64 * 8192 * 2),
    ("72B, 512 tokens", 512 * 8192 * 2),
    ("72B, 2048 tokens", 2048 * 8192 * 2),
)


@dataclass(frozen=True)
class LinkCosts:
    """us and bytes/s. `source` says where they come from."""

    launch_us: float
    flight_us: float
    flag_us: float
    rate: float
    source: str

    def us(self, algorithm: str, world: int, nbytes: int, launches: int = DECODE_LAUNCHES) -> float:
        """One all-reduce of `nbytes` by "lamport" or "flag" over `world` ranks, us."""
        flight = {"lamport": self.flight_us, "flag": self.flag_us}[algorithm]
        return launches * self.launch_us + flight + self._sent_us((world - 1) * nbytes)

    def two_shot_us(self, world: int, nbytes: int, *, fp8: bool = False) -> float:
        """What is exposed of a two-shot exchange behind its GEMM, us."""
        sent = (world - 1) / world * nbytes * _y_bytes(fp8)
        return TWO_SHOT_LAUNCHES * self.launch_us + 2 * self.flag_us + self._sent_us(sent)

    def _sent_us(self, nbytes: float) -> float:
        return nbytes / self.rate * 1e6

    def crossover(self, world: int, *, fp8: bool = False) -> float:
        """Bytes from which two-shot wins over one-shot in prefill."""
        saved = (world - 1) * (1 - _y_bytes(fp8) / world)  # messages that two-shot does not send
        extra = self.two_shot_us(world, 0) - self.us("lamport", world, 0, PREFILL_LAUNCHES)
        return extra * 1e-6 * self.rate / saved


def _y_bytes(fp8: bool) -> float:
    """Of those of a 16-bit value."""
    return 0.5 if fp8 else 1.0


def _costs(launch: float, lamport: float, flag: float, gpu: Gpu, source: str) -> LinkCosts:
    """Take the launch and the message's link time out of the measured 16 KB all-reduces of two ranks."""
    rest = launch + CALIBRATION_BYTES / gpu.link * 1e6
    return LinkCosts(launch, lamport - rest, flag - rest, gpu.link, source)


def link_costs(rows: Iterable[dict[str, Any]] = (), gpu: Gpu = GPUS["h200"]) -> LinkCosts:
    """From rows of bench/all_reduce.py on two GPUs of this kind, if all three are there; else from the first
    experiments: 16 KB at TP=2, a launch of 1.0 us, Lamport 2.30 us, flag barrier 3.82 us."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        real = row["bench"] == "all_reduce" and row["tp"] == 2 and row["gpus"] >= 2
        here = real and gpu.name.lower() in str(row["gpu"]).lower()
        if here and row["metric"] == "all_reduce_us" and row["bytes"] == CALIBRATION_BYTES:
            found[row["algorithm"]] = row
    wanted = ("copy_kernel", "lamport_fused", "flag")
    if all(name in found for name in wanted):
        commit = found["lamport_fused"]["commit"]
        launch, lamport, flag = (found[name]["value"] for name in wanted)
        return _costs(launch, lamport, flag, gpu, f"rows of bench/all_reduce.py at {commit}")
    if gpu.name != GPUS["h200"].name:
        raise EngineError(
            f"no all-reduce of two GPUs was measured on a {gpu.name}; run bench/all_reduce.py there"
        )
    return _costs(1.0, 2.30, 3.82, gpu, EXPERIMENTS)


@dataclass(frozen=True)
class Predicted:
    """One line of the table; times in us. `chosen` is what the heuristic takes, `decode_us` what one exchange adds
    to a decode step under PDL (None for prefill messages), two-shot's are None in decode. measured: lamport and
    flag are."""

    name: str
    tp: int
    nbytes: int
    lamport_us: float
    two_shot_us: float | None
    two_shot_fp8_us: float | None
    flag_us: float
    decode_us: float | None
    chosen: str
    measured: bool


def predicted(
    rows: Sequence[dict[str, Any]] = (), degrees: Sequence[int] = (2, 4, 8), gpu: Gpu = GPUS["h200"]
) -> tuple[LinkCosts, list[Predicted]]:
    """Every message of MESSAGES at every degree."""
    costs = link_costs(rows, gpu)
    adds = constants_for(gpu, None)
    lines = []
    for tp in degrees:
        for name, nbytes in MESSAGES:
            decode = "row" in name
            launches = DECODE_LAUNCHES if decode else PREFILL_LAUNCHES
            wide, narrow = (
                None if decode else costs.two_shot_us(tp, nbytes, fp8=fp8) for fp8 in (False, True)
            )
            adds_us = adds.barrier_us + (tp - 2) * nbytes / costs.rate * 1e6
            lines.append(
                Predicted(
                    name, tp, nbytes, costs.us("lamport", tp, nbytes, launches), wide, narrow,
                    costs.us("flag", tp, nbytes, launches), adds_us if decode else None,
                    heuristic(tp, nbytes).algorithm,
                    measured=tp == 2 and nbytes == CALIBRATION_BYTES,
                )
            )  # fmt: skip
    return costs, lines


def prediction_table(rows: Sequence[dict[str, Any]] = (), gpu: Gpu = GPUS["h200"]) -> str:
    """The table as markdown, marked as what it is."""
    costs, lines = predicted(rows, gpu=gpu)
    header = (
        "TP",
        "message",
        "bytes",
        "lamport us",
        "two-shot us",
        "two-shot FP8 us",
        "flag us",
        "adds to decode us",
        "taken",
    )
    text = [
        f"**A prediction, not a measurement**, {gpu.name}. One-shot and the flag barrier: one launch in decode, two in "
        "prefill. Two-shot: what is exposed behind its GEMM, three launches, two flag flights and the normed rows on "
        "their way back, in 16 or 8 bits; its sums travel under the GEMM. Calibrated at two ranks and 16 KB "
        f"({costs.source}): launch {costs.launch_us:.2f} us, flight {costs.flight_us:.2f} us, flag flight "
        f"{costs.flag_us:.2f} us; link {costs.rate / 1e9:.0f} GB/s each way as the driver reports it. "
        f"What an exchange adds to a decode step is fitted at two ranks too: "
        f"{constants_for(gpu, None).barrier_us:.2f} us ({constants_for(gpu, None).source}). "
        "Only the figures with a star are measured.",
        "",
        "| " + " | ".join(header) + " |",
        "| " + " | ".join(["---:", "---", *["---:"] * 7]) + " |",
    ]
    for line in lines:
        star = "*" if line.measured else ""
        two_shot, fp8, decode = (
            "" if us is None else f"{us:.2f}"
            for us in (line.two_shot_us, line.two_shot_fp8_us, line.decode_us)
        )  # fmt: skip
        text.append(
            f"| {line.tp} | {line.name} | {line.nbytes:,} | {line.lamport_us:.2f}{star} | {two_shot} | {fp8} | "
            f"{line.flag_us:.2f}{star} | {decode} | {line.chosen} |"
        )
    wide, narrow = ({tp: costs.crossover(tp, fp8=fp8) for tp in TWO_SHOT_BYTES} for fp8 in (False, True))  # fmt: skip
    footer = (
        f"Two-shot is predicted to win over one-shot from {_at(wide)}; with FP8, from {_at(narrow)}. "
        f"`taken` is the heuristic's choice, in prefill two-shot from {_at(TWO_SHOT_BYTES)}; "
        "a tuned cache comes before it."
    )
    return "\n".join([*text, "", footer])


def _at(sizes: Mapping[int, float]) -> str:
    """Bytes by TP degree as text."""
    return ", ".join(f"{at / 1024:.0f} KB at TP={tp}" for tp, at in sizes.items())
