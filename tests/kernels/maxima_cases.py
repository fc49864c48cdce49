"""lm_head with maxima in its epilogue: problems, and what is true of them. test_maxima.py runs them through the
interpreter or the card; as a child process this module compiles the ring for sm_90 and runs its PTX in the
emulator: {"compiled": name -> Report, "emulated": name -> what is wrong, or ""} as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from engine.kernels.epilogue import Maxima, Store
from engine.kernels.gemv import GemvConfig, gemv_programs, heuristic, plan_gemv
from engine.kernels.sample_ref import RING_NAN, sample_ref

INT, FLOAT = torch.int32, torch.float32
SLOTS = 8
CACHE = Path(__file__).parents[2] / "autotune_cache/nvidia_h200/gemv.json"
VOCAB = 152064  # of 7B and 72B


class Problem:
    """x, W and the slots' state; `logits` [R, N] makes W such that y is exactly these (bf16 values, R <= K)."""

    def __init__(
        self, rows: int, n: int, k: int, *, device: str = "cpu", logits: torch.Tensor | None = None,
        offset: int = 0, vocab: int = 1 << 20, sampled: bool = False, norm: bool = False,
        dtype: torch.dtype = torch.bfloat16, padding: bool = False, request: bool = False,
    ):  # fmt: skip
        self.rows, self.n, self.k = rows, n, k
        self.offset, self.vocab = offset, vocab
        self.x = torch.randn(rows, k, device=device).to(torch.bfloat16)
        self.w = (torch.randn(n, k, device=device) * k**-0.5).to(dtype)
        self.extras: dict[str, Any] = {"scale": None, "norm_weight": None, "eps": 1e-6}
        if logits is not None:
            self.x = torch.eye(rows, k, device=device).to(torch.bfloat16)
            self.w = torch.zeros(n, k, device=device, dtype=dtype)
            self.w[:, :rows] = logits.T.to(dtype)
        elif dtype != torch.bfloat16:
            self.extras["scale"] = torch.rand(n, device=device) + 0.5
        if norm:
            self.extras["norm_weight"] = (torch.rand(k, device=device) + 0.5).to(torch.bfloat16)
        temperature = [0.0, 0.7, 1.0, 0.0, 2.5, 0.1, 0.0, 1.3] if sampled else [0.0] * SLOTS
        self.temperature = torch.tensor(temperature, dtype=FLOAT, device=device)
        self.seeds = torch.tensor([5, -1, 2**31 - 1, -(2**31), 9, 9, 77, 0]).to(device, INT)
        self.positions = (torch.arange(SLOTS, device=device) * 10).to(INT)
        self.row_slots = torch.tensor([1, 3, 0, 2, 4, 6, 7, 5][:rows]).to(device, INT)
        if padding:
            self.row_slots[1] = -1
        self.request = torch.tensor([4, 100, 28]).to(device, INT) if request else None

    def store(self) -> Store:
        return Store(torch.full((self.rows, self.n), float("nan"), device=self.x.device))

    def maxima(self, config: GemvConfig) -> Maxima:
        """Poisoned outputs for a launch with this config."""
        parts = gemv_programs(config, self.n, self.k, self.rows, self.w.dtype)
        shape, device = (self.rows, parts), self.x.device
        return Maxima(
            self.store().out, torch.full(shape, 7e37, device=device),
            torch.full(shape, -5, dtype=INT, device=device), self.temperature, self.seeds,
            self.positions, self.row_slots, self.vocab, self.offset, self.request,
        )  # fmt: skip

    def expected(self, logits: torch.Tensor) -> torch.Tensor:
        """int64 [R]: the ids that `sample_ref` chooses among logits [R, N] and nothing in front of them."""
        slots, positions = self.row_slots.clamp(min=0).long(), self.positions
        where = positions[slots]
        if self.request is not None:
            slots, where = self.request[:1].long(), self.request[1:].sum(0, keepdim=True) - 1
        front = torch.full((self.rows, self.offset), float("-inf"))
        shards = [front, logits.cpu()]
        state = (self.temperature[slots].cpu(), self.seeds[slots].cpu(), where.cpu())
        return sample_ref(shards, *state, self.vocab)


def winners(values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """int64 [R] of [R, P]: RING_NAN, or the lowest id that has the largest value."""
    chosen = []
    for value, token in zip(values.cpu(), ids.cpu()):
        nan = bool(value.isnan().any())
        chosen.append(RING_NAN if nan else int(token[value == value.max()].min()))
    return torch.tensor(chosen)


def wrong(problem: Problem, config: GemvConfig, run: Callable[..., None]) -> str:
    """What is wrong with `run` (as `gemv`): "" if logits are those of Store, bit for bit, and every live row's
    winner is the reference's."""
    plain, fused = problem.store(), problem.maxima(config)
    run(problem.x, problem.w, plain, config=config, **problem.extras)
    run(problem.x, problem.w, fused, config=config, **problem.extras)
    if not torch.equal(fused.out.view(INT), plain.out.view(INT)):
        return "other logits than Store"
    live = problem.row_slots.cpu() >= 0
    got, want = winners(fused.values, fused.ids)[live], problem.expected(plain.out)[live]
    return "" if torch.equal(got, want) else f"chose {got.tolist()}, not {want.tolist()}"


def tied(rows: int, n: int, places: list[int], value: float = 3.0) -> torch.Tensor:
    """Logits of -1 with equal maxima at `places`."""
    logits = torch.full((rows, n), -1.0)
    logits[:, places] = value
    return logits


def spiked(n: int, place: int, value: float, rest: float = 0.5) -> torch.Tensor:
    """One row of `rest` but for one value."""
    logits = torch.full((1, n), rest)
    logits[0, place] = value
    return logits


def zeros(n: int, k: int, device: str = "cpu") -> Problem:
    """Greatest logits are zeros, the first of them -0.0: by a factor of -1 on a sum of +0.0."""
    problem = Problem(1, n, k, logits=tied(1, n, [n // 3, n - 2], 0.0), device=device)
    problem.extras["scale"] = torch.ones(n, device=device)
    problem.extras["scale"][n // 3] = -1.0
    return problem


def problems(n: int, k: int, device: str = "cpu") -> dict[str, Problem]:
    """Problems of N outputs; N >= 40."""

    def exact(logits: torch.Tensor, **options: Any) -> Problem:
        return Problem(len(logits), n, k, logits=logits, device=device, **options)

    def random(rows: int, **options: Any) -> Problem:
        return Problem(rows, n, k, device=device, **options)

    nan, inf = float("nan"), float("inf")
    return {
        "greedy": random(1, norm=True),
        "8 rows, sampled": random(8, sampled=True, norm=True, offset=3 * n),
        "3 rows, one of them padding": random(3, sampled=True, padding=True),
        "fp8": random(2, sampled=True, dtype=torch.float8_e4m3fn, offset=n),
        "prefill": random(1, sampled=True, request=True),
        "padded vocabulary": exact(tied(2, n, [n // 2 - 1, n // 2]), vocab=n + n // 2, offset=n),
        "padding is largest": exact(spiked(n, n - 2, 99.0), vocab=n - 5),
        "ties": exact(tied(4, n, [n - 1, n - 20, 17, 18])),
        "ties of whole blocks": exact(torch.zeros(2, n), offset=64),
        "nothing but -inf": exact(torch.full((1, n), -inf)),
        "one above -inf": exact(spiked(n, n - 3, -3e38, -inf)),
        "inf": exact(spiked(n, 33, inf)),
        "nan": exact(spiked(n, 21, nan)),
        "nan in the padding": exact(spiked(n, n - 1, nan), vocab=n - 4),
        "-0.0 ties with +0.0": zeros(n, k, device),
    }


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def lm_heads():
    """(name, config, N, K) of the lm_heads of 7B and 72B, as tuned or else by the heuristic."""
    entries = json.loads(CACHE.read_text())["entries"]
    for model, k, degrees in (("7b", 3584, (1, 2, 4)), ("72b", 8192, (1, 2, 4, 8))):
        for tp in degrees:
            n = VOCAB // tp
            entry = entries.get(f"n={n},k={k},weight_dtype=bf16")
            config = GemvConfig(**entry["config"]) if entry else heuristic(n, k, "bf16")
            yield f"{model}/{tp}", config, n, k


def main() -> None:
    from tests.kernels.compile_sm90 import compile_launch
    from tests.kernels.gemv_emulated_cases import emulate, ring

    torch.manual_seed(11)
    configs = (ring(16, 256, 4, 4, 4, 3), ring(32, 128, 3, 4, 2, 2))
    emulated = {}
    for i, (name, problem) in enumerate(problems(86, 512).items()):
        config = ring(16, 512, 4, 4, 4, 3) if name == "fp8" else configs[i % 2]
        emulated[name] = wrong(problem, config, emulate)
    compiled = {}
    for name, config, n, k in lm_heads():
        for rows in (1, 2, 8):
            parts = gemv_programs(config, n, k, rows, torch.bfloat16)
            slots = meta(8, dtype=INT)
            epilogue = Maxima(
                meta(rows, n, dtype=FLOAT), meta(rows, parts, dtype=FLOAT), meta(rows, parts, dtype=INT),
                meta(8, dtype=FLOAT), slots, slots, slots, VOCAB, 0,
            )  # fmt: skip
            kernel, _, arguments = plan_gemv(
                meta(rows, k), meta(n, k), epilogue, norm_weight=meta(k), config=config, pdl=True
            )
            compiled[f"{name} rows={rows}"] = asdict(compile_launch(kernel, arguments))
    print(json.dumps({"emulated": emulated, "compiled": compiled}))


if __name__ == "__main__":
    main()
