"""Predicted time of one all-reduce at any TP degree, from what a link and a launch were measured to cost.

One launch a rank (bench/all_reduce.py's one-launch forms), W ranks, a message of n bytes:

    lamport   launch + flight               + (W - 1) n / rate
    two_shot  launch + 2 flight             + 2 (W - 1) / W n / rate
    flag      launch + flag flight          + (W - 1) n / rate

`launch` is an empty copy kernel in the same kind of graph; `flight` what is left of the measured 16 KB Lamport
all-reduce of two ranks: one remote store until a poller has seen it, its loop, the sum. `rate` is all links of a
GPU, one direction: a switch gives each sender all of it, whoever receives. Split forms (virtual ranks, prefill)
add a launch each. In a decode chain under PDL the push sits in a GEMV's epilogue and the poll's launch overlaps:
what an exchange adds there was measured too (`Constants.barrier_us`), at two ranks.

Not in the model, and hence in the prediction's error: a switch hop that the measured pair may not have had,
the skew of seven senders, the polling of W messages from L2 (256 KB at most in decode: 0.05 us). Nothing of
TP = 4 and 8 is measured here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from engine.errors import EngineError
from engine.kernels.all_reduce import TWO_SHOT_BYTES
from engine.model.calibrate import EXPERIMENTS, constants_for
from engine.model.gpus import GPUS, Gpu

CALIBRATION_BYTES = 16 << 10
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

    def us(self, algorithm: str, world: int, nbytes: int, launches: int = 1) -> float:
        """One all-reduce of `nbytes` over `world` ranks in `launches` launches, us."""
        one_shot = (world - 1) * nbytes
        sent, flights = {
            "lamport": (one_shot, self.flight_us),
            "two_shot": (2 * one_shot / world, 2 * self.flight_us),
            "flag": (one_shot, self.flag_us),
        }[algorithm]
        return launches * self.launch_us + flights + sent / self.rate * 1e6

    def crossover(self, world: int, *, split: bool) -> float | None:
        """Bytes from which two-shot wins, in split forms (a launch more than one-shot's) or in one launch a rank;
        None at two ranks: it sends as much as one-shot."""
        saved = (world - 1) * (1 - 2 / world)  # messages that two-shot does not send
        extra = self.flight_us + (self.launch_us if split else 0)
        return None if saved == 0 else extra * 1e-6 * self.rate / saved


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
    to a decode step under PDL (None for prefill messages). measured: lamport and flag are."""

    name: str
    tp: int
    nbytes: int
    lamport_us: float
    two_shot_us: float
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
            limit = TWO_SHOT_BYTES.get(tp)
            decode = "row" in name
            lines.append(
                Predicted(
                    name, tp, nbytes, costs.us("lamport", tp, nbytes), costs.us("two_shot", tp, nbytes),
                    costs.us("flag", tp, nbytes),
                    adds.barrier_us + (tp - 2) * nbytes / costs.rate * 1e6 if decode else None,
                    "two_shot" if limit is not None and nbytes >= limit else "lamport",
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
        "flag us",
        "adds to decode us",
        "taken",
    )
    text = [
        f"**A prediction, not a measurement**, {gpu.name}, one launch a rank. Calibrated at two ranks and 16 KB "
        f"({costs.source}): launch {costs.launch_us:.2f} us, flight {costs.flight_us:.2f} us, flag flight "
        f"{costs.flag_us:.2f} us; link {costs.rate / 1e9:.0f} GB/s each way as the driver reports it. "
        f"What an exchange adds to a decode step is fitted at two ranks too: "
        f"{constants_for(gpu, None).barrier_us:.2f} us ({constants_for(gpu, None).source}). "
        "Only the figures with a star are measured.",
        "",
        "| " + " | ".join(header) + " |",
        "| " + " | ".join(["---:", "---", *["---:"] * 6]) + " |",
    ]
    for line in lines:
        star = "*" if line.measured else ""
        decode = "" if line.decode_us is None else f"{line.decode_us:.2f}"
        text.append(
            f"| {line.tp} | {line.name} | {line.nbytes:,} | {line.lamport_us:.2f}{star} | "
            f"{line.two_shot_us:.2f} | {line.flag_us:.2f}{star} | {decode} | {line.chosen} |"
        )
    one, split = ([costs.crossover(tp, split=forms) for tp in (4, 8)] for forms in (False, True))
    footer = (
        f"Two-shot is predicted to win from {_at(one)} in this table's form, one launch a rank, and from {_at(split)} "
        "in split forms, three launches against two, which the engine runs. "
        f"`taken` is the heuristic's choice for split forms, two-shot from {_at([TWO_SHOT_BYTES[4], TWO_SHOT_BYTES[8]])}; "
        "a tuned cache comes before it."
    )
    return "\n".join([*text, "", footer])


def _at(sizes: Iterable[float | None]) -> str:
    """Bytes at TP 4 and 8 as text."""
    return " and ".join(f"{at / 1024:.0f} KB at TP={tp}" for tp, at in zip((4, 8), sizes) if at)
