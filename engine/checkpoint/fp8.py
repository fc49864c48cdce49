"""FP8 of 16-bit weights: e4m3 with one scale a row."""

from __future__ import annotations

import torch

FP8_DTYPE = torch.float8_e4m3fn
FP8_MAX = 448.0  # largest finite e4m3 value
# Elements whose fp32 copy quantisation holds at a time (256 MB).
_QUANTIZE_CHUNK = 64 << 20


def quantize_rows(
    weight: torch.Tensor, largest: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """[N, K] -> (float8_e4m3fn [N, K], fp32 scale [N]): scale = max|row| / 448, round to nearest
    even. largest fp32 [N]: max|row| of whole rows, where `weight` holds some of their columns.

    A row of zeros gets scale 1. A row with NaN or inf gets a non-finite scale, which loading
    refuses.
    """
    rows = max(1, _QUANTIZE_CHUNK // max(1, weight.shape[1]))
    quantized = torch.empty(weight.shape, dtype=FP8_DTYPE, device=weight.device)
    scale = torch.empty(weight.shape[0], dtype=torch.float32, device=weight.device)
    for first in range(0, weight.shape[0], rows):
        chunk = weight[first : first + rows].float()
        amax = row_maxima(chunk) if largest is None else largest[first : first + rows]
        # Below this a scale would be subnormal and its reciprocal infinite.
        amax = torch.where(amax < FP8_MAX * torch.finfo(torch.float32).tiny, FP8_MAX, amax)
        # A tensor divisor: CUDA multiplies by the reciprocal of a Python one, and the CPU divides.
        scale[first : first + rows] = s = amax / torch.full_like(amax, FP8_MAX)
        # s rounds to nearest, so the largest |w| / s can pass 448 by one fp32 ulp: clamp.
        quantized[first : first + rows] = chunk.div(s[:, None]).clamp_(-FP8_MAX, FP8_MAX)
    return quantized, scale


def row_maxima(rows: torch.Tensor) -> torch.Tensor:
    """max|row| without |rows| in memory; NaN passes on."""
    return torch.maximum(rows.amax(1), -rows.amin(1)).float()
