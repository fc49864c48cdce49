"""Timed points of the attention bench: KV of many layers, one graph over them, checked outputs."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as functional
import triton
import triton.language as tl
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.attention_workers import Shape, rms
from bench.timing import graph_us
from engine.kernels import decode_attention as decode
from engine.kernels import prefill_attention as prefill
from engine.kernels.decode_attention import DecodeAttentionConfig
from engine.kernels.kv_fp8 import KVScales
from engine.kernels.prefill_attention import PrefillAttentionConfig
from engine.kernels.quantize_rows import FP8
from engine.kernels.sync import gdc_launch_dependents, gdc_wait

COLD_BYTES = 160e6  # KV walked over by one replay: more than twice the L2
MAX_LAYERS = 320
DEVICE = "cuda"


@triton.jit
def touch_kernel(source_ptr, q_ptr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """The smallest stand-in for the kernel before attention: copies q."""
    gdc_launch_dependents()
    gdc_wait()
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(q_ptr + offs, tl.load(source_ptr + offs, mask=offs < SIZE), mask=offs < SIZE)


Layer = tuple[torch.Tensor, torch.Tensor, KVScales | None]  # K, V [slots, NKV, length, D], scales


class Pool:
    """Random K and V elements of size 1, bf16 or e4m3 with scales, cut into layers of the shape asked for."""

    def __init__(self, elements: int, fp8: bool):
        dtype = FP8 if fp8 else torch.bfloat16
        self.flat = torch.empty(2, elements, dtype=dtype, device=DEVICE)
        for part in self.flat.view(-1).split(1 << 27):
            values = torch.randn(part.shape, device=DEVICE)
            # What is beyond e4m3's 448 would become NaN.
            part.copy_(values.mul_(128).clamp_(-448, 448) if fp8 else values)
        # As many as heads of 16 elements would have.
        self.scales = (
            torch.rand(2, elements // 16, device=DEVICE).add_(0.5).div_(128) if fp8 else None
        )

    def layers(self, slots: int, shape: Shape, length: int) -> list[Layer]:
        """Layers of `slots` slots of `length` positions, together beyond the L2 where the pool allows it."""
        dims = (slots, shape.num_kv_heads, length, shape.head_dim)
        size = math.prod(dims)
        layer_bytes = slots * length * shape.token_bytes
        count = min(self.flat.shape[1] // size, MAX_LAYERS, 1 + math.ceil(COLD_BYTES / layer_bytes))

        def cut(
            flat: torch.Tensor, i: int, dims: tuple[int, ...]
        ) -> tuple[torch.Tensor, torch.Tensor]:
            n = math.prod(dims)
            k, v = (part[i * n : (i + 1) * n].view(dims) for part in flat)
            return k, v

        return [
            (
                *cut(self.flat, i, dims),
                None if self.scales is None else cut(self.scales, i, dims[:3]),
            )
            for i in range(count)
        ]


class DecodePoint:
    """One (shape, context, rows): every row in its own slot at the same context."""

    def __init__(self, pool: Pool, shape: Shape, context: int, rows: int):
        self.shape, self.context, self.rows = shape, context, rows
        self.layers = pool.layers(rows, shape, context)
        self.positions = torch.full((rows,), context - 1, dtype=torch.int32, device=DEVICE)
        self.row_slots = torch.arange(rows, dtype=torch.int32, device=DEVICE)
        self.source = torch.randn(rows, shape.num_heads * shape.head_dim, device=DEVICE).bfloat16()
        self.q, self.out = self.source.clone(), torch.empty_like(self.source)
        k, v, scales = self.layers[-1]
        self.want = decode.decode_attention_ref(
            self.q[:1], k, v, self.positions, self.row_slots[:1], scales=scales, **shape.kwargs
        )
        self.touch_us = graph_us(self._touches, len(self.layers))
        self.us: dict[DecodeAttentionConfig, float] = {}

    @property
    def kv_bytes(self) -> int:
        return self.rows * self.context * self.shape.token_bytes

    def touch(self) -> None:
        size = self.source.numel()
        touch_kernel[(triton.cdiv(size, 1024),)](
            self.source, self.q, SIZE=size, BLOCK=1024, launch_pdl=True
        )

    def _touches(self) -> None:
        for _ in self.layers:
            self.touch()

    def attend(
        self, layer: int, config: DecodeAttentionConfig, space, pdl: bool, prefetch: bool
    ) -> None:
        k, v, scales = self.layers[layer]
        decode.decode_attention(
            self.q, k, v, self.positions, self.row_slots, self.out, space, **self.shape.kwargs,
            scales=scales, config=config, pdl=pdl, prefetch=prefetch,
        )  # fmt: skip

    def time(
        self, config: DecodeAttentionConfig, *, pdl: bool = True, prefetch: bool = True
    ) -> float:
        """Time attention adds, us; checks that the graph's last output equals an eager, plain launch."""
        s = self.shape
        space = decode.workspace(
            self.rows, s.num_heads, s.num_kv_heads, s.head_dim, config.num_splits, DEVICE
        )

        def body() -> None:
            for layer in range(len(self.layers)):
                if pdl:
                    self.touch()
                self.attend(layer, config, space, pdl, prefetch)

        best = min(self.us.values(), default=1e8)
        us = graph_us(body, len(self.layers), stop_us=3 * (best + self.touch_us))
        after_graph = self.out.clone()
        self.attend(len(self.layers) - 1, config, space, False, False)
        if not torch.equal(self.out, after_graph) or space.tickets.any():
            raise RuntimeError("graph and eager outputs differ")
        error = rms(self.out[:1], self.want)
        if not error < 4e-3:
            raise RuntimeError(f"relative RMS error {error:.1e}")
        return us - self.touch_us if pdl else us

    def sdpa_us(self) -> float:
        """torch's scaled_dot_product_attention, one row only."""
        s = self.shape
        q = self.q[:1].view(1, s.num_heads, 1, s.head_dim)
        layers = self.layers[:40]

        def body() -> None:
            for k, v, _ in layers:
                functional.scaled_dot_product_attention(q, k[:1], v[:1], enable_gqa=True)

        return graph_us(body, len(layers))


class PrefillPoint:
    """One (shape, T): a full chunk, in a slot of at least 8192 positions; `prefix`: how many are left in front of it."""

    def __init__(self, pool: Pool, shape: Shape, tokens: int):
        self.shape, self.tokens = shape, tokens
        length = max(8192, tokens)
        self.prefix = length - tokens
        self.layers = pool.layers(1, shape, length)[:4]
        self.q = torch.randn(tokens, shape.num_heads * shape.head_dim, device=DEVICE).bfloat16()
        self.out = torch.empty_like(self.q)

    def time(self, config: PrefillAttentionConfig, start: int) -> float:
        request = torch.tensor([0, start, self.tokens], dtype=torch.int32, device=DEVICE)

        def body() -> None:
            for k, v, scales in self.layers:
                prefill.prefill_attention(
                    self.q,
                    k,
                    v,
                    request,
                    self.out,
                    **self.shape.kwargs,
                    scales=scales,
                    config=config,
                )

        return graph_us(body, len(self.layers))

    def sdpa_us(self, backend: SDPBackend) -> float:
        """torch's scaled_dot_product_attention on the same chunk at start 0."""
        t, s = self.tokens, self.shape
        heads = self.q.view(1, t, s.num_heads, s.head_dim).transpose(1, 2)

        def body() -> None:
            for k, v, _ in self.layers:
                functional.scaled_dot_product_attention(
                    heads, k[:, :, :t], v[:, :, :t], is_causal=True, enable_gqa=True
                )

        with sdpa_kernel(backend):
            return graph_us(body, len(self.layers))

    def tflops(self, us: float, start: int) -> float:
        """Of the unmasked (query, key) pairs: 4 D FLOPs each."""
        t = self.tokens
        return (
            4
            * (t * start + t * (t + 1) / 2)
            * self.shape.num_heads
            * self.shape.head_dim
            / us
            / 1e6
        )
