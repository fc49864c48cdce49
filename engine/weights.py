"""What each rank holds of each weight: the contract between the graph (which asks) and the checkpoint (which reads).

A `WeightSpec` is explicit data: the HF tensors it is made of, the range each rank takes, and how the
parts are laid out. The graph's passes rewrite specs (merge, interleave); the checkpoint materialises them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Layout = Literal["natural", "rope_pairs"]
Combine = Literal["concat", "interleave"]


@dataclass(frozen=True)
class Part:
    """One HF tensor's contribution to a weight.

    `ranges[rank] = (start, stop)` along `axis` of the HF tensor; `axis=None` means replicated whole.
    A stop beyond the tensor's end is filled with zeros (vocabulary padding).
    `rope_pairs`: within each head of `head_dim` rows, row i and row i + head_dim/2 become neighbours
    (new order 0, d/2, 1, d/2+1, ...), so that RoPE rotates adjacent pairs inside one GEMV tile.
    """

    name: str
    shape: tuple[int, ...]  # of the whole HF tensor
    axis: int | None
    ranges: tuple[tuple[int, int], ...]
    layout: Layout = "natural"
    head_dim: int = 0


@dataclass(frozen=True)
class WeightSpec:
    """One weight as a kernel sees it. Combined along dim 0: `concat` stacks the parts,
    `interleave` alternates their rows (part 0 row 0, part 1 row 0, part 0 row 1, ...)."""

    name: str
    parts: tuple[Part, ...]
    combine: Combine = "concat"
    quantizable: bool = (
        False  # a linear layer's matrix: FP8 e4m3 with one fp32 scale per output row if asked
    )

    def local_shape(self, rank: int = 0) -> tuple[int, ...]:
        """Shape on `rank` after sharding and combining."""
        rows = 0
        tail: tuple[int, ...] = ()
        for part in self.parts:
            shape = list(part.shape)
            if part.axis is not None:
                start, stop = part.ranges[rank]
                shape[part.axis] = stop - start
            rows += shape[0]
            tail = tuple(shape[1:])
        return (rows, *tail)
