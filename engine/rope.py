"""Rotary frequencies: theta_i = theta^(-2i/D), and how context extension stretches them.

* linear (arXiv:2306.15595): theta_i / factor.
* llama3 (Llama 3.1's release): wavelengths over `original / low_freq_factor` are divided by `factor`, those under
  `original / high_freq_factor` are kept, between them the two are blended.
* yarn (YaRN, arXiv:2309.00071, sections 3.2 to 3.4): dimensions with more than `beta_fast` turns within the original
  context are kept, those with fewer than `beta_slow` are divided by `factor`, a linear ramp between; cos and sin are
  multiplied by an attention factor, 0.1 ln(factor) + 1 unless the checkpoint gives another.

fp32 throughout, as transformers computes it, so that long positions round alike.
"""

from __future__ import annotations

import math

import torch

from engine.model_config import ModelConfig, RopeScaling


def rope_frequencies(config: ModelConfig) -> tuple[torch.Tensor, float]:
    """(fp32 [D/2] angle per position of each pair, the factor on cos and sin)."""
    d = config.head_dim
    wavelength = config.rope_theta ** (torch.arange(0, d, 2, dtype=torch.float32) / d)  # / 2 pi
    kept = 1.0 / wavelength
    scaling = config.rope_scaling
    if scaling is None:
        return kept, 1.0
    if scaling.kind == "linear":
        return kept / scaling.factor, 1.0
    if scaling.kind == "llama3":
        return _llama3(kept, scaling), 1.0
    stretched = 1.0 / (scaling.factor * wavelength)
    keep = 1 - _yarn_ramp(d, config.rope_theta, scaling)
    return stretched * (1 - keep) + kept * keep, scaling.attention_factor


def _llama3(kept: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    original, low, high = scaling.original_length, scaling.low_freq_factor, scaling.high_freq_factor
    wavelength = 2 * math.pi / kept
    blend = (original / wavelength - low) / (high - low)
    blended = (1 - blend) * kept / scaling.factor + blend * kept
    result = torch.where(wavelength < original / high, kept, blended)
    return torch.where(wavelength > original / low, kept / scaling.factor, result)


def _yarn_ramp(d: int, theta: float, scaling: RopeScaling) -> torch.Tensor:
    """fp32 [D/2]: 0 where a frequency is kept, 1 where it is divided by the factor."""

    def pair_with(turns: float) -> float:
        """The (fractional) pair that makes so many turns within the original context."""
        return d * math.log(scaling.original_length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = pair_with(scaling.beta_fast), pair_with(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, d - 1)
    if first == last:
        last += 0.001
    return ((torch.arange(d // 2, dtype=torch.float32) - first) / (last - first)).clamp(0, 1)
