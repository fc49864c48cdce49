"""Which all-reduce a graph gets, by ranks, bytes and links; each is the same sum; what it needs of memory."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext

import pytest
import torch

from engine.config import preset, with_layers
from engine.errors import EngineError
from engine.graph.build import build
from engine.graph.capture import Program
from engine.graph.inspect import meta_launches
from engine.graph.ir import SENDS, WAITS, Graph
from engine.graph.lower import Launch
from engine.graph.passes import run_passes
from engine.graph.tail import sampling_tail
from engine.kernels.all_reduce import AllReduceConfig
from engine.runtime import nccl
from engine.runtime.exchange import (
    EXCHANGE_SLOTS,
    exchange_sizes,
    graph_exchange,
    planned_exchange,
)
from engine.tune.choose import remove_override, set_override
from tests.graph.models import Lockstep, save_model

PROMPT = [5, 17, 99, 3, 42, 42, 7, 150, 11, 8, 64]
STEPS = {
    "lamport": ["push", "poll_residual"],
    "two_shot": ["linear", "two_shot_publish", "two_shot_reduce", "two_shot_gather"],
    "flag": ["flag_publish", "flag_reduce"],
    "nccl": ["push", "nccl_gather", "poll_residual"],
}


def finished(tp, phase, rows, algorithms=Graph.algorithms, model="qwen2.5-72b"):
    config = with_layers(preset(model), 2)
    return run_passes(build(config, phase=phase, rows=rows, tp=tp, algorithms=algorithms))


def exchanges(graph):
    """Kinds of one layer's first all-reduce."""
    return [op.kind for op in graph.ops if op.attrs.get("site") == 0]


@pytest.mark.parametrize(
    "tp,phase,rows,expected",
    [
        (2, "prefill", 64, "lamport"),  # 1 MB
        (2, "prefill", 128, "two_shot"),
        (2, "prefill", 2048, "two_shot"),
        (4, "prefill", 32, "lamport"),
        (4, "prefill", 64, "two_shot"),
        (8, "prefill", 16, "lamport"),
        (8, "prefill", 32, "two_shot"),
        (8, "prefill", 2048, "two_shot"),
        (8, "decode", 1, "lamport"),
        (8, "decode", 8, "lamport"),
    ],
)
def test_choice_by_ranks_and_bytes(tp, phase, rows, expected):
    """72B: a row is 16 KB. What is chosen is what is launched, in its order, twice a layer. A prefill's last
    layer sums one row: its GEMVs push."""
    graph = finished(tp, phase, rows)
    kinds = STEPS[expected]
    if phase == "decode":
        kinds = ["linear", *kinds[1:]]  # the GEMV's epilogue pushes
    assert exchanges(graph) == kinds
    launches = meta_launches(preset("qwen2.5-72b"), graph, None, context=4096, degree=tp)
    names = Counter(launch.kernel for launch in launches if "site" in launch.op.attrs)
    if expected == "two_shot":
        steps = (
            "gemm+Scatter",
            "two_shot_publish",
            "two_shot_gather",
            "gemv+Push",
            "poll_residual",
        )
        # The second one also sends the sampled row's hidden state, which the last layer adds to.
        reduces = {"two_shot_reduce+norm": 1, "two_shot_reduce+norm+last": 1}
        assert names == {name: 2 for name in steps} | reduces
    else:
        assert names["poll_residual"] == 4
    for launch in launches:
        if launch.op.kind in {"push", "poll_residual", "two_shot_reduce", "two_shot_gather"}:
            one = phase == "prefill" and launch.op.layer == 1
            assert launch.config.algorithm == ("lamport" if one else expected)
            facts = {"world": tp, "nbytes": 16384 * (1 if one else rows)}
            assert launch.choice[0] == "all_reduce" and facts.items() <= launch.choice[1].items()


def test_links_and_overrides_decide_before_the_heuristic():
    for name, kinds in STEPS.items():
        assert exchanges(finished(4, "prefill", 64, (name,))) == kinds
    assert exchanges(finished(8, "prefill", 2048, ("lamport",))) == STEPS["lamport"]
    # A decode step has at most 8 rows, none to split: two-shot there is one-shot.
    assert exchanges(finished(8, "decode", 8, ("two_shot",))) == ["linear", "poll_residual"]
    set_override("all_reduce", AllReduceConfig("flag"))
    try:
        assert exchanges(finished(2, "prefill", 64)) == STEPS["flag"]
        pcie = ("lamport", "two_shot")  # the tuned choice is not among what the links allow
        assert exchanges(finished(2, "prefill", 64, pcie)) == STEPS["lamport"]
    finally:
        remove_override("all_reduce")


@pytest.mark.parametrize("algorithm", STEPS)
@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_virtual_ranks_cannot_hang(algorithm, phase):
    """Ranks of one device run op by op, all ranks before the next op. So every wait needs a send of its
    site that is an EARLIER op: then nothing spins in front of what it waits for."""
    graph = finished(8, phase, 8 if phase == "decode" else 64, (algorithm,))
    sent: set[int] = set()
    for op in graph.ops:
        site = op.attrs.get("site")
        if op.kind in WAITS and site is not None:
            assert site in sent
            sent.discard(site)  # the next wait of this site needs another send
        if op.kind in SENDS or op.attrs.get("epilogue") == "push":
            sent.add(site)
    assert sum(op.kind in WAITS for op in graph.ops) >= 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    save_model("llama", folder)
    return folder


@pytest.mark.parametrize("algorithm", STEPS)
def test_every_algorithm_is_the_same_sum(folder, algorithm):
    """fp32 interpreter, TP 4, against TP 1 (tolerance: tests/graph/test_interpret.py)."""
    ours, whole = Lockstep(folder, 4, algorithms=(algorithm,)), Lockstep(folder, 1)
    for step in ("prefill", "decode", "decode"):
        got, expected = (
            m.prefill(1, PROMPT) if step == "prefill" else m.decode([1]) for m in (ours, whole)
        )
        assert got.tokens.tolist() == expected.tokens.tolist()
        torch.testing.assert_close(
            ours.vocab_logits(got), whole.vocab_logits(expected), atol=2e-4, rtol=2e-4
        )


def test_two_shot_oracle_needs_every_owner(folder, monkeypatch):
    """The oracle's middle step holds the own shard only: an owner that is left out must show."""
    from engine.graph.interpret import Interpreter

    whole = Lockstep(folder, 1)
    expected = whole.vocab_logits(whole.prefill(1, PROMPT))
    honest = Interpreter._two_shot_reduce
    monkeypatch.setattr(
        Interpreter,
        "_two_shot_reduce",
        lambda self, op, rank: tuple(part * (rank != 2) for part in honest(self, op, rank)),
    )
    ours = Lockstep(folder, 4, algorithms=("two_shot",))
    assert not torch.allclose(ours.vocab_logits(ours.prefill(1, PROMPT)), expected, atol=1e-2)


def test_nccl_carries_the_samplers_messages_too():
    graph, _ = sampling_tail(
        preset("qwen2.5-7b"), phase="decode", rows=2, tp=2, algorithms=("nccl",)
    )
    kinds = [op.kind for op in graph.ops]
    assert kinds[:3] == ["sample_push", "nccl_gather", "sample_gather"]
    step = [op.kind for op in finished(2, "decode", 1, ("nccl",)).ops]
    assert step[-3:] == ["argmax_push", "nccl_gather", "argmax_poll"]
    plain, _ = sampling_tail(preset("qwen2.5-7b"), phase="decode", rows=2, tp=2)
    assert "nccl_gather" not in {op.kind for op in plain.ops}


def test_a_program_is_captured_in_pieces_between_carried_messages(monkeypatch):
    """Columns 2 and 5 of six are NCCL's: a graph before, between and never an empty one behind."""
    ran = []

    class Piece:
        def __init__(self, columns):
            self.columns = columns

        def replay(self):
            ran.append(list(self.columns))

    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(
        Program, "_capture_columns", lambda self, columns: [("stream", Piece(columns))]
    )
    monkeypatch.setattr(
        nccl, "all_gather_in_place", lambda buffers, streams: ran.append([int(b) for b in buffers])
    )

    def line(rank):
        def item(i):
            messages = torch.tensor(100 * i + rank) if i in (2, 5) else None
            return Launch(None, "", None, 0, "", lambda: ran.append((i, rank)), None, messages)

        return [item(i) for i in range(6)]

    program = Program([line(0), line(1)], ["stream", "stream"])
    program.run_eager()
    both = [(i, rank) for i in (0, 1) for rank in (0, 1)]
    assert ran == [*both, [200, 201], (3, 0), (3, 1), (4, 0), (4, 1), [500, 501]]
    ran.clear()
    program.capture()
    assert program.captured
    program.replay()
    assert ran == [[0, 1], [200, 201], [3, 4], [500, 501]]
    program.free()
    assert not program.captured


def test_torch_without_nccl_is_said_before_any_work():
    if hasattr(torch._C, "_nccl_all_gather"):
        nccl.require()
    else:
        with pytest.raises(EngineError, match="built without NCCL"):
            nccl.require()


def test_buffers_follow_the_algorithm():
    rows, hidden, message = 2048, 8192, 2048 * 16384
    one_shot, two_shot, nccl_sizes = (
        exchange_sizes(8, [(name, rows, hidden), (name, 1, hidden)]) for name in ("lamport", "two_shot", "nccl")
    )  # fmt: skip
    assert one_shot.nbytes == EXCHANGE_SLOTS * 8 * message
    # Partial sums of the own rows from every rank, y; flags, scales and one row. One area of each.
    assert two_shot.slot_bytes == 0 and 0 < two_shot.nbytes - 2 * message < 144 << 10
    flag = exchange_sizes(8, [("flag", rows, hidden), ("flag", 1, hidden)])
    assert flag.slot_bytes == 0 and flag.nbytes - 2 * message == flag.flag.data_offset < 4096
    assert nccl_sizes.nccl and not two_shot.nccl
    # What the memory table reserves is what the graphs take.
    rows = (1, 8, 64, 2048)
    for tp in (2, 4, 8):
        graphs = [finished(tp, "decode" if n <= 8 else "prefill", n) for n in rows]
        assert graph_exchange(graphs) == planned_exchange(tp, 8192, 2, rows, Graph.algorithms)
    assert planned_exchange(1, 8192, 2, rows, Graph.algorithms).nbytes == 0
