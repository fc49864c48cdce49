"""Vocabulary maxima in lm_head's epilogue: the same winners, bit for bit, as the GEMV and `argmax_partial` behind
it; then through the rest of the chain."""

from __future__ import annotations

import pytest
import torch

from engine.errors import EngineError
from engine.kernels import argmax
from engine.kernels.gemv import GemvConfig, gemv, heuristic
from engine.kernels.slots import argmax_workspace, peer_table
from tests.kernels.collective_group import status_words
from tests.kernels.compile_sm90 import run_compile_checks
from tests.kernels.maxima_cases import Problem, problems, winners, wrong

N, K = 120, 64
SIMPLE = GemvConfig("simple", 8, 64, 1)
NAMES = list(problems(N, K))
CARD = (2200, 1024)  # on a card also the ring, which has no interpreter


@pytest.fixture(scope="module")
def results():
    return run_compile_checks("tests.kernels.maxima_cases")


def partial(problem: Problem, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Maxima of stored logits by the kernel of its own."""
    shape = (problem.rows, argmax.argmax_programs(problem.n))
    values = torch.full(shape, 7e37, device=logits.device)
    ids = torch.full(shape, -5, dtype=torch.int32, device=logits.device)
    argmax.argmax_partial(
        logits, problem.temperature, problem.seeds, problem.positions, problem.row_slots, values, ids,
        vocab_size=problem.vocab, id_offset=problem.offset, request=problem.request,
    )  # fmt: skip
    return values, ids


class State:
    """What the end of the chain writes."""

    def __init__(self, problem: Problem):
        device = problem.x.device
        self.tokens = torch.full((8,), -7, dtype=torch.int32, device=device)
        self.positions = problem.positions.clone()
        self.ring = torch.full((4, problem.rows), -1, dtype=torch.int32)
        if device.type == "cuda":
            self.ring = self.ring.pin_memory()
        self.step = torch.zeros(1, dtype=torch.int32, device=device)
        self.outcome = (self.tokens, self.positions, problem.row_slots, self.ring, self.step)

    def all(self) -> list[list[int]]:
        if self.tokens.is_cuda:
            torch.cuda.synchronize()
        return [t.flatten().tolist() for t in (self.tokens, self.positions, self.ring, self.step)]


def check(problem: Problem, config: GemvConfig) -> None:
    """Against the reference; then the state after both chains."""
    assert not wrong(problem, config, gemv)
    fused = problem.maxima(config)
    gemv(problem.x, problem.w, fused, config=config, **problem.extras)
    apart = partial(problem, fused.out)
    states = []
    for found in ((fused.values, fused.ids), apart):
        assert (found[1] >= 0).all()
        states.append(State(problem))
        argmax.argmax_finish(*found, *states[-1].outcome, request=problem.request)
    assert states[0].all() == states[1].all()
    best = [found[0].amax(1) for found in (apart, (fused.values, fused.ids))]
    live = problem.row_slots >= 0
    assert torch.equal(best[0][live].view(torch.int32), best[1][live].view(torch.int32))


@pytest.mark.parametrize("name", NAMES)
def test_winners_are_those_of_argmax_partial(name, device):
    check(problems(N, K, device)[name], SIMPLE)
    if device == "cuda":
        problem = problems(*CARD, device)[name]
        check(problem, heuristic(*CARD, problem.w.dtype))


def test_marks_reach_the_ring(device):
    shown = {}
    for name in ("nan", "3 rows, one of them padding"):
        problem = problems(N, K, device)[name]
        fused = problem.maxima(SIMPLE)
        gemv(problem.x, problem.w, fused, config=SIMPLE, **problem.extras)
        state = State(problem)
        argmax.argmax_finish(fused.values, fused.ids, *state.outcome)
        state.all()
        shown[name] = state.ring[0].tolist()
    assert shown["nan"] == [argmax.RING_NAN]
    assert shown["3 rows, one of them padding"][1] == argmax.RING_PADDING


@pytest.mark.parametrize("parts", [1, 64, 132, 264, 513, 3000])
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_any_number_of_parts(rows, parts, device):
    """Rings have 132 or 264 programs, plain kernels thousands; ties lie far apart, on two ranks."""
    problem = Problem(rows, N, K, device=device)
    values = torch.randn(2, rows, parts, device=device)
    ids = torch.randperm(2 * rows * parts, device=device).to(torch.int32).view(2, rows, parts)
    for row in range(rows):
        values[:, row, [0, parts // 2, parts - 1]] = 99.0 - row
    expected = [winners(values[rank], ids[rank]) for rank in range(2)]
    state = State(problem)
    argmax.argmax_finish(values[0], ids[0], *state.outcome)
    assert state.all()[2][:rows] == expected[0].tolist()

    space = argmax_workspace(2, rows)
    buffers, status = [space.allocate(device) for _ in range(2)], status_words(device)
    table = peer_table(buffers, device)
    states = [State(problem) for _ in range(2)]
    for rank in range(2):
        argmax.argmax_push(values[rank], ids[rank], table, 0, rank=rank, world=2)
    for rank, state in enumerate(states):
        argmax.argmax_poll(
            buffers[rank], 0, 0, *state.outcome, status, rank=rank, world=2, call_site=1
        )
    assert states[0].all()[2][:rows] == torch.minimum(*expected).tolist()
    assert states[0].all()[0] == states[1].all()[0]


def test_outputs_must_fit_the_grid(device):
    problem = Problem(1, N, K, device=device)
    fused = problem.maxima(GemvConfig("simple", 4, 64, 1))
    with pytest.raises(EngineError, match=r"maxima \[1, 30\] .* 15 programs"):
        gemv(problem.x, problem.w, fused, config=SIMPLE)


def test_ring_in_the_emulator(results):
    assert set(results["emulated"]) == set(NAMES)
    assert not {name: text for name, text in results["emulated"].items() if text}


def test_shipped_lm_heads_compile(results):
    """The running maxima live in registers across the loop over K. At 2 rows, 72B at TP = 1, ptxas keeps two programs a
    multiprocessor and spills one word outside of that loop."""
    assert len(results["compiled"]) == 21
    for name, r in results["compiled"].items():
        spilled = r["spill_store_bytes"], r["local_accesses"]
        assert spilled <= ((4, 2) if name == "72b/1 rows=2" else (0, 0)), name
        assert set(r["async_copies"]) == {"128"} and r["registers"] <= 255, name
