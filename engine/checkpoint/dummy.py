"""Random weights in place of a checkpoint's, the same for every TP degree and every device."""

from __future__ import annotations

import hashlib
import math
import threading

import torch

from engine.checkpoint.source import apply_layout, local_range, pad
from engine.config import ModelConfig
from engine.weights import Part


class DummySource:
    """Random weights for benchmarks and tests: finite over any depth, quick to make, reproducible.

    Row i of a tensor is a window of one pool of normal numbers, at an offset drawn from (seed,
    name, i): so any slice of any TP degree is exactly the slice of the same whole tensor, CPU and
    CUDA agree, and making a slice costs one gather out of a pool that stays in the L2 cache.
    Scales: a linear has std 1/sqrt(fan in), o_proj and down_proj another 1/sqrt(2 * layers), so
    that the residual stream grows by at most a factor of about sqrt(2) over all layers; norm
    weights are 1 +- 0.05, biases +- 0.05; embeddings 1, or 1/sqrt(hidden) when they are also the
    lm_head.
    """

    POOL = 1 << 20  # distinct windows

    def __init__(self, config: ModelConfig, seed: int = 0, dtype: torch.dtype = torch.bfloat16):
        self.config, self.seed, self.dtype = config, seed, dtype
        width = max(
            config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim
        )
        generator = torch.Generator().manual_seed(seed)
        # A vector (norm, bias) is one window: no longer than the widest row.
        self._normal = torch.randn(self.POOL + width, generator=generator)
        self._pools: dict[tuple[float, float, torch.device], torch.Tensor] = {}
        self._lock = threading.Lock()

    def read(self, part: Part, rank: int, device: torch.device | str) -> torch.Tensor:
        """See WeightSource; dtype is the one given to the constructor."""
        pool = self._pool(*self._mean_std(part), torch.device(device))
        start, stop = local_range(part, rank)
        if len(part.shape) == 1:
            first = int(self._offsets(part.name, 1)[0])
            piece = pool[first + start : first + stop]
        else:
            rows, cols = part.shape
            offsets = self._offsets(part.name, rows)
            if part.axis == 0:
                offsets = offsets[start:stop]
            elif part.axis == 1:
                offsets, cols = offsets + start, stop - start
            windows = pool.unfold(0, cols, 1)  # [POOL + width - cols + 1, cols], a view
            piece = windows.index_select(0, offsets.to(pool.device))
        return pad(apply_layout(piece, part), part, rank)

    def _mean_std(self, part: Part) -> tuple[float, float]:
        name, fan_in = part.name, part.shape[-1]
        if name.endswith("norm.weight"):
            return 1.0, 0.05
        if len(part.shape) == 1:
            return 0.0, 0.05
        if name.endswith("embed_tokens.weight") and not self.config.tie_word_embeddings:
            return 0.0, 1.0
        depth = (
            2 * self.config.num_layers
            if name.endswith(("o_proj.weight", "down_proj.weight"))
            else 1
        )
        return 0.0, 1.0 / math.sqrt(fan_in * depth)

    def _offsets(self, name: str, rows: int) -> torch.Tensor:
        """int64 [rows]: the first pool index of each row of the whole tensor."""
        digest = hashlib.blake2b(f"{self.seed}:{name}".encode(), digest_size=7).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
        return torch.randint(0, self.POOL, (rows,), generator=generator)

    def _pool(self, mean: float, std: float, device: torch.device) -> torch.Tensor:
        key = (mean, std, device)
        with self._lock:
            if key not in self._pools:
                # Rounded to the dtype here and not on the device: the same bits everywhere.
                self._pools[key] = (self._normal * std + mean).to(self.dtype).to(device)
            return self._pools[key]
