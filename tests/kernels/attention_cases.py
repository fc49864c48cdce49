"""Random KV slots with poisoned tails, an independent attention and a derived error bound, for the attention tests."""

from __future__ import annotations

from dataclasses import dataclass

import torch

UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}  # half a unit of the last place, relative


@dataclass(frozen=True)
class Heads:
    """Query heads, KV heads and head_dim of one rank."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def kwargs(self) -> dict[str, int]:
        return dict(
            num_heads=self.num_heads, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim
        )


QWEN_7B = Heads(28, 4, 128)
QWEN_7B_TP4 = Heads(7, 1, 128)
QWEN_72B_TP2 = Heads(32, 4, 128)
QWEN_72B_TP8 = Heads(8, 1, 128)
SMOLLM2 = Heads(9, 3, 64)


def poisoned_cache(
    lengths: list[int], max_len: int, heads: Heads, dtype: torch.dtype, device: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V [S, NKV, max_len, D]: random in [0, lengths[s]), NaN beyond."""
    shape = (len(lengths), heads.num_kv_heads, max_len, heads.head_dim)
    caches = torch.randn(2, *shape).to(dtype)
    for slot, length in enumerate(lengths):
        caches[:, slot, :, length:] = float("nan")
    return caches[0].to(device), caches[1].to(device)


def fp8_cache(
    lengths: list[int], max_len: int, heads: Heads, device: str
) -> tuple[list[torch.Tensor], tuple[torch.Tensor, torch.Tensor], list[torch.Tensor]]:
    """K and V as e4m3 [S, NKV, max_len, D], their scales [S, NKV, max_len], and the fp64 values that they mean.

    Tokens differ in size by up to 2^6, a few elements are e4m3 subnormals; codes and scales are NaN beyond
    lengths[s]. Zero vectors have the scale that the writers give them.
    """
    from engine.kernels.quantize_rows import quantize_rows_ref

    caches, scales, exact = [], [], []
    for x in poisoned_cache(lengths, max_len, heads, torch.float32, "cpu"):
        size = torch.exp2(torch.randint(-6, 1, x.shape[:3]).float())
        size[:, :, 2::11] = 0.0
        codes, scale = quantize_rows_ref(x * size[..., None])
        for slot, length in enumerate(lengths):
            scale[slot, :, length:] = float("nan")
        caches.append(codes.to(device))
        scales.append(scale.to(device))
        exact.append(codes.double() * scale.double()[..., None])
    return caches, (scales[0], scales[1]), exact


def attend_one(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, heads: Heads, scale: float
) -> torch.Tensor:
    """One query row [NQ * D] over keys, values [NKV, n, D], head by head in fp64: nothing shared with the code under test."""
    group = heads.num_heads // heads.num_kv_heads
    rows = []
    for head, query in enumerate(q.double().view(heads.num_heads, heads.head_dim)):
        scores = keys[head // group].double() @ query * scale
        weights = torch.exp(scores - scores.max())
        rows.append(weights @ values[head // group].double() / weights.sum())
    return torch.cat(rows)


def assert_close(
    got: torch.Tensor,
    want: torch.Tensor,
    spread: torch.Tensor,
    dtype: torch.dtype,
    *,
    roundings: float = 1.0,
    floor: float = 2.0**-24,
) -> None:
    """got against fp64 `want`; spread = the same attention over |V|.

    The kernel rounds each softmax weight to 16 bit before the product with V (u * sum p |v|) and the result
    once (u * |out|); 2^-18 of the same for the fp32 rest: scores of magnitude 10 carry 10 * 2^-23 * log2(D).
    roundings: of the products p v together, in units of u; floor: an absolute error besides.
    """
    assert not got.isnan().any()
    unit = UNIT[dtype]
    bound = (roundings * unit + 2.0**-18) * spread + unit * want.abs() + floor
    error = (got.double() - want).abs()
    worst = (error / bound).max().item()
    assert worst <= 1.0, f"error is {worst:.2f} times the bound"
