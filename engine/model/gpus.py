"""What the performance model knows of a GPU: datasheet figures and what a copy reaches."""

from __future__ import annotations

from dataclasses import dataclass

from engine.errors import EngineError

# A large device-to-device copy, read + write, against the datasheet: 4.29 of 4.80 TB/s on an H200
# (measured 2026-11). Other HBM cards are assumed to reach the same share.
COPY_SHARE = 0.894


@dataclass(frozen=True)
class Gpu:
    """Rates in bytes/s and FLOP/s. `link` is one direction of all NVLinks together."""

    name: str
    hbm: float  # datasheet
    flops: float  # dense BF16 tensor cores, datasheet
    fp8_flops: float  # dense e4m3 x e4m3, datasheet
    link: float
    sm_count: int
    copy: float  # reached by a copy: the roof of "share of the roof"


def _gpu(name: str, hbm: float, flops: float, fp8_flops: float, link: float, sm_count: int) -> Gpu:
    return Gpu(name, hbm, flops, fp8_flops, link, sm_count, COPY_SHARE * hbm)


# Datasheets of the SXM cards; link: 18 NVLink 4 links of 26.6 GB/s each way as the driver reports them.
GPUS = {
    "h100": _gpu("NVIDIA H100", 3.35e12, 989e12, 1979e12, 478e9, 132),
    "h200": _gpu("NVIDIA H200", 4.80e12, 989e12, 1979e12, 478e9, 132),
}


def gpu_named(text: str) -> Gpu:
    """The card whose name occurs in `text` ("NVIDIA H200", "h100"). EngineError lists those known."""
    for key, gpu in GPUS.items():
        if key in text.lower():
            return gpu
    raise EngineError(
        f"no figures for the GPU {text!r}; the performance model knows {', '.join(GPUS)} (--gpu)"
    )
