"""GEMV problems of the card run, and the check of every variant in worker processes (workers.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch

from bench.deployment import linear_shapes
from bench.workers import run_workers, serve, task_file
from engine.config import preset
from engine.kernels.epilogue import GemvEpilogue, Push, Residual, RopeAppend, SiluMul, Store
from engine.kernels.gemv import GemvConfig, Linear, gemv, gemv_ref

MAX_LEN = 256  # of the KV cache behind the RoPE epilogue


@dataclass(frozen=True)
class Weight:
    """One linear layer of one rank. layer: qkv, o, gate_up, down, lm_head."""

    model: str
    tp: int
    layer: str
    n: int
    k: int
    fp8: bool

    @property
    def bytes(self) -> int:
        return self.n * self.k * (1 if self.fp8 else 2)

    @property
    def dtype(self) -> torch.dtype:
        return torch.float8_e4m3fn if self.fp8 else torch.bfloat16

    @property
    def norm(self) -> bool:
        return self.layer in ("qkv", "gate_up", "lm_head")

    @property
    def key(self) -> dict:
        return {"n": self.n, "k": self.k, "weight_dtype": self.dtype}

    def random(self, copies: int, device: str) -> list[torch.Tensor]:
        """Weights of standard deviation about 0.02 (bf16) or 1 (e4m3, with scales of 0.02)."""
        size = self.n * self.k
        flat = torch.empty(copies * size, dtype=self.dtype, device=device)
        for part in flat.split(1 << 26):
            values = torch.randn(part.numel(), device=device)
            part.copy_(values if self.fp8 else values * 0.02)
        return [flat[i * size : (i + 1) * size].view(self.n, self.k) for i in range(copies)]


def weights(models: Sequence[tuple[str, int]], dtypes: Sequence[str]) -> list[Weight]:
    """The linear layers of each (preset, TP). lm_head is bf16 only."""
    found = []
    for name, tp in models:
        for dtype in dtypes:
            found += [
                Weight(name, tp, layer, n, k, dtype == "fp8")
                for layer, (n, k) in linear_shapes(name, tp).items()
            ]
        vocab, hidden = preset(name).shard(tp).vocab_size, preset(name).hidden_size
        found.append(Weight(name, tp, "lm_head", vocab, hidden, False))
    return found


class Problem:
    """Activations, outputs and the call of one weight at `rows` rows, with the epilogue that the graph uses."""

    def __init__(self, weight: Weight, rows: int, device: str):
        self.weight, self.rows, self.device = weight, rows, device
        n, k = weight.n, weight.k
        generator = torch.Generator(device).manual_seed(n + k)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device=device, generator=generator)

        self.x = random(8, k).bfloat16()[:rows].contiguous()
        self.extras = Linear(
            scale=(random(n).abs() + 0.5) * 0.02 if weight.fp8 else None,
            bias=random(n).bfloat16() if weight.layer == "qkv" else None,
            norm_weight=(random(k) * 0.1 + 1).bfloat16() if weight.norm else None,
            eps=1e-6,
        )
        self.residual = (
            random(8, n).bfloat16()[:rows].contiguous() if weight.layer in ("o", "down") else None
        )
        self.out: list[torch.Tensor] = []
        self.epilogue = self._epilogue()

    def _epilogue(self) -> GemvEpilogue:
        w, rows, device = self.weight, self.rows, self.device
        if w.layer == "qkv":
            shard = preset(w.model).shard(w.tp)
            heads, kv_heads, d = shard.num_heads, shard.num_kv_heads, preset(w.model).head_dim
            angle = torch.arange(MAX_LEN * d, device=device).view(MAX_LEN, d) * 0.37
            cos_sin = torch.where(torch.arange(d, device=device) % 2 == 0, angle.cos(), angle.sin())
            k_cache, v_cache = (
                torch.zeros(8, kv_heads, MAX_LEN, d, dtype=torch.bfloat16, device=device)
                for _ in range(2)
            )
            q = torch.empty(rows, heads * d, dtype=torch.bfloat16, device=device)
            positions = torch.arange(8, dtype=torch.int32, device=device) * 11 + 3
            slots = torch.arange(rows, dtype=torch.int32, device=device)
            self.out = [q, k_cache, v_cache]
            return RopeAppend(q, k_cache, v_cache, cos_sin, positions, slots, heads, kv_heads, d)
        if w.layer == "gate_up":
            self.out = [torch.empty(rows, w.n // 2, dtype=torch.bfloat16, device=device)]
            return SiluMul(self.out[0])
        if w.layer == "lm_head":
            self.out = [torch.empty(rows, w.n, device=device)]
            return Store(self.out[0])
        if w.tp == 1:
            self.out = [torch.empty(rows, w.n, dtype=torch.bfloat16, device=device)]
            residual = torch.zeros_like(self.out[0]) if self.residual is None else self.residual
            return Residual(residual, self.out[0])
        self.out = [torch.empty(rows, w.n, dtype=torch.bfloat16, device=device) for _ in range(2)]
        # Rank 1 of 2, both receive buffers here: the message starts one message before `out`.
        table = torch.tensor([o.data_ptr() - 2 * rows * w.n for o in self.out], device=device)
        return Push(table, 0, 1, 2)

    def call(self, config: GemvConfig, w: torch.Tensor, pdl: bool = True) -> None:
        gemv(self.x, w, self.epilogue, config=config, pdl=pdl, **self.extras)

    def error(self, config: GemvConfig, w: torch.Tensor) -> float:
        """Largest |error| over its bound 2^-7 |y| + 0.05 RMS(y); inf if anything was left unwritten.

        The bound: one rounding of x * rstd * g (2^-9, random signs: 0.001 RMS, six sigma, times 4 in the
        product of gate and up), and the output's rounding.
        """
        expected = gemv_ref(self.x, w, self.epilogue, **self.extras)
        caches = []
        if isinstance(
            self.epilogue, RopeAppend
        ):  # the reference has filled the caches: take them over
            caches = [cache.clone() for cache in self.out[1:]]
        for out in self.out:
            out.fill_(float("nan") if out.dim() == 2 else 0)
        self.call(config, w, pdl=False)
        outputs = self.out if isinstance(self.epilogue, Push) else self.out[:1]
        pairs = [(out, expected) for out in outputs] + list(zip(self.out[1:], caches))
        worst = 0.0
        for out, want in pairs:
            want = want.float()
            bound = want.abs() * 2.0**-7 + 0.05 * want.square().mean().sqrt()
            ratio = ((out.float() - want).abs() / bound).max().item()
            worst = max(worst, ratio if ratio == ratio else float("inf"))
        return worst


def check(task: dict, w: torch.Tensor, device: str) -> float:
    """One variant: its error, and for several rows that a row alone has the same bits."""
    weight, config = Weight(**task["weight"]), GemvConfig(**task["config"])
    problem = Problem(weight, task["rows"], device)
    error = problem.error(config, w)
    for row in (0, task["rows"] - 1) if task["rows"] > 1 else ():
        alone = Problem(weight, 1, device)
        alone.x.copy_(problem.x[row : row + 1])
        if alone.residual is not None and problem.residual is not None:
            alone.residual.copy_(problem.residual[row : row + 1])
        if isinstance(alone.epilogue, RopeAppend):
            alone.epilogue.row_slots.fill_(row)
        alone.out[0].fill_(float("nan"))
        alone.call(config, w, pdl=False)
        if not torch.equal(alone.out[0][0], problem.out[0][row]):
            raise ValueError(f"row {row} alone has other bits than among {task['rows']}")
    return error


def describe(task: dict) -> str:
    w = task["weight"]
    dtype = "fp8" if w["fp8"] else "bf16"
    return f"{w['layer']} {w['n']}x{w['k']} {dtype} rows={task['rows']} {short(task['config'])}"


def short(config: GemvConfig | dict) -> str:
    """ring 64x512 w8/4 s6 1/SM: block_n x block_k, warps / warps_k, stages, programs per multiprocessor."""
    c = config if isinstance(config, dict) else asdict(config)
    text = f"{c['kernel']} {c['block_n']}x{c['block_k']} w{c['num_warps']}"
    if c["kernel"] == "ring":
        text += f"/{c['warps_k']} s{c['stages']} {c['programs_per_sm']}/SM"
    return text


def check_all(tasks: Sequence[dict], processes: int, limit_s: float) -> set[int]:
    """Indices of the tasks whose kernel is right. After limit_s seconds what is left counts as bad."""
    size = -(-len(tasks) // max(1, processes))
    return run_workers(
        "bench.gemv_workers", tasks,
        [range(i, min(i + size, len(tasks))) for i in range(0, len(tasks), size)], limit_s,
        describe=lambda index: describe(tasks[index]), bound=lambda _: 1.0,
    )  # fmt: skip


def _checker() -> Callable[[dict], float]:
    """`check` that keeps the weight from task to task: neighbours share it."""
    held: dict = {"weight": None, "values": None}

    def run(task: dict) -> float:
        if task["weight"] != held["weight"]:
            held["values"] = None  # freed before the next is made
            held["values"] = Weight(**task["weight"]).random(1, "cuda")[0]
            held["weight"] = task["weight"]
        return check(task, held["values"], "cuda")

    return run


if __name__ == "__main__":
    serve(task_file("bench.gemv"), _checker())
