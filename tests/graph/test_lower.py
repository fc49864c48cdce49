"""The oracle chain's middle link: the lowered graphs, run launch by launch in Triton's interpreter (or on a
card), equal the interpreter on references; TP = 2 with the real exchange between the ranks' buffers."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from engine.checkpoint.load import load_rank
from engine.checkpoint.source import CheckpointSource
from engine.config import from_dir
from engine.graph.build import build
from engine.graph.capture import carry
from engine.graph.ir import Graph
from engine.graph.lower import lower
from engine.graph.passes import run_passes
from engine.graph.plan import plan
from engine.runtime import nccl
from engine.runtime.allocate import Sizes, allocate_ranks, gemm_workspace_sizes, maxima_pairs
from engine.runtime.exchange import EXCHANGE_SLOTS, graph_exchange
from tests.graph.models import Lockstep, save_model

PROMPT = [5, 17, 99, 3, 42, 42, 7, 150, 11, 8, 64]
BUCKET, LENGTH, SLOTS = 16, 32, 2
TINY = dict(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
            intermediate_size=80, vocab_size=203, num_hidden_layers=2, tie_word_embeddings=False)  # fmt: skip
# fp16 keeps 11 bits: about ten roundings a layer of 2^-12 relative each, over 2 layers, added as a random
# walk: sqrt(20) * 2^-12 = 0.1 % of the logits' RMS; weights rounded to fp16 as much again. Bound: 1 %.
BOUND = 0.01


# head_dim is not hidden / heads.
TINY_QWEN3 = {**TINY, "head_dim": 32}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}
    for shape, overrides in (("qwen2", TINY), ("qwen3", TINY_QWEN3)):
        made[shape] = tmp_path_factory.mktemp(shape)
        save_model(shape, made[shape], overrides=overrides)
    return made


class Lowered:
    """Ranks on one device, launched in lockstep."""

    def __init__(
        self, folder, tp, quantization=None, fp8_prefill=False, algorithms=Graph.algorithms,
        fp8_kv=False,
    ):  # fmt: skip
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.config = config = from_dir(folder)
        graphs = {
            key: run_passes(
                build(config, phase=key[0], rows=key[1], tp=tp, logits=key[2], fp8_prefill=fp8_prefill,
                      algorithms=algorithms, fp8_kv=fp8_kv)
            )
            for key in (("decode", 1, "last"), ("decode", 2, "last"), ("prefill", BUCKET, "last"),
                        ("prefill", BUCKET, "none"))
        }  # fmt: skip
        self.plans = {key: plan(graph, 2) for key, graph in graphs.items()}
        source = CheckpointSource(folder)
        specs = graphs[("decode", 1, "last")].weights
        weights = [
            load_rank(specs, source, rank, device, torch.float16, quantization)
            for rank in range(tp)
        ]
        arena = max(p.arena_bytes for p in self.plans.values())
        sizes = Sizes(
            slots=SLOTS,
            rows=2,
            tokens=BUCKET,
            max_model_len=LENGTH,
            arena_bytes=arena,
            gemm=gemm_workspace_sizes(graphs.values(), lambda n: weights[0][n].weight.dtype),
            maxima=maxima_pairs(graphs.values(), lambda n: weights[0][n].weight.dtype),
            exchange=graph_exchange(graphs.values()),
            fp8_kv=fp8_kv,
        )
        self.ranks = allocate_ranks(config, weights, [device] * tp, torch.float16, sizes, tp)
        self.graphs = graphs
        self.lines = {
            key: [lower(graph, self.plans[key], rank, pdl=False) for rank in self.ranks]
            for key, graph in graphs.items()
        }

    def run(self, key):
        for column in zip(*self.lines[key]):
            if column[0].messages is not None:
                carry(column, [None] * len(column))
                continue
            for launch in column:
                launch.run()

    def prefill(self, slot, ids, start=0, logits="last"):
        for rank in self.ranks:
            rank.prompt.fill_(7)  # padding tokens: real ids that must not matter
            rank.prompt[: len(ids)] = torch.tensor(ids, dtype=torch.int32)
            rank.request.copy_(torch.tensor([slot, start, len(ids)], dtype=torch.int32))
            rank.arena.fill_(0x7F)  # poison: NaN in fp16 and fp32
        self.run(("prefill", BUCKET, logits))

    def decode(self, slots):
        for rank in self.ranks:
            rank.row_slots[: len(slots)] = torch.tensor(slots, dtype=torch.int32)
            rank.arena.fill_(0x7F)
        self.run(("decode", len(slots), "last"))

    def logits(self, key):
        output = self.graphs[key].output
        parts = []
        for rank in self.ranks:
            offset, size = self.plans[key].offsets[output], 4 * output.shape[0] * output.shape[1]
            parts.append(rank.arena[offset : offset + size].view(torch.float32).view(output.shape))
        return torch.cat(parts, -1)[:, : self.config.vocab_size].cpu()

    def ring(self):
        """Rows that have been written so far, in step order."""
        count = int(self.ranks[0].step[0])
        return self.ranks[0].ring[:count].tolist()


def close(got, expected):
    assert got.isfinite().all()
    rms = (got - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    assert rms < BOUND, f"RMS error {rms:.5f}"


def carried_by_copies(buffers, streams):
    """What NCCL does between GPUs (runtime/nccl.py), between tensors of one device."""
    for reader, stream in zip(range(len(buffers)), streams):
        with torch.cuda.stream(stream) if stream else nullcontext():
            for sender in range(len(buffers)):
                buffers[reader][sender].copy_(buffers[sender][sender])


@pytest.mark.parametrize("algorithm,tp", [("two_shot", 4), ("flag", 2), ("nccl", 2)])
def test_every_all_reduce_algorithm(folders, algorithm, tp, monkeypatch):
    """Forced in both phases (two-shot in prefill): the exchange as it is lowered, run in lockstep, equals the
    oracle at TP 1."""
    monkeypatch.setattr(nccl, "all_gather_in_place", carried_by_copies)
    folder = folders["qwen2"]
    ours = Lowered(folder, tp, algorithms=(algorithm,))
    oracle = Lockstep(folder, 1, length=LENGTH)
    ours.prefill(1, PROMPT)
    logits = ours.logits(("prefill", BUCKET, "last"))
    close(logits, oracle.vocab_logits(oracle.prefill(1, PROMPT)))
    follow(ours, oracle, logits, {0: 1})
    for _ in range(2):
        ours.decode([1])
        logits = ours.logits(("decode", 1, "last"))
        close(logits, oracle.vocab_logits(oracle.decode([1])))
        follow(ours, oracle, logits, {0: 1})
    for rank in ours.ranks:
        assert rank.status.tolist() == [0] * 8
    if algorithm == "flag":
        return
    for rank in ours.ranks:  # every word in a slot of separate polls has been read and re-armed
        slots = rank.exchange[: EXCHANGE_SLOTS * rank.exchange_slot_bytes].view(torch.int32)
        assert slots.numel() and bool((slots == -2147450880).all())


@pytest.mark.parametrize(
    "shape,tp,quantization",
    [("qwen2", 1, None), ("qwen2", 1, "fp8"), ("qwen2", 2, None), ("qwen3", 1, None), ("qwen3", 2, "fp8")],
)  # fmt: skip
def test_lowered_graphs_equal_the_oracle(folders, shape, tp, quantization):
    """Prefill in two chunks, then decode alone and beside another slot and beside a padding row."""
    folder = folders[shape]
    ours = Lowered(folder, tp, quantization)
    # Quantised while loading, a row that is split along K gets a scale for each shard: other values than at TP 1.
    oracle = Lockstep(folder, tp if quantization else 1, length=LENGTH, quantization=quantization)
    last = ("prefill", BUCKET, "last")

    ours.prefill(1, PROMPT[:6], logits="none")
    ours.prefill(1, PROMPT[6:], start=6)
    logits = ours.logits(last)
    close(logits, oracle.vocab_logits(oracle.prefill(1, PROMPT)))
    follow(ours, oracle, logits, {0: 1})

    ours.decode([1])
    logits = ours.logits(("decode", 1, "last"))
    close(logits, oracle.vocab_logits(oracle.decode([1])))
    follow(ours, oracle, logits, {0: 1})

    ours.prefill(0, PROMPT[:3])
    logits = ours.logits(last)
    close(logits, oracle.vocab_logits(oracle.prefill(0, PROMPT[:3])))
    follow(ours, oracle, logits, {0: 0})

    ours.decode([1, 0])
    logits = ours.logits(("decode", 2, "last"))
    close(logits, oracle.vocab_logits(oracle.decode([1, 0])))
    follow(ours, oracle, logits, {0: 1, 1: 0})

    before = [rank.state.k_cache[0].clone() for rank in ours.ranks]
    ours.decode([1, -1])
    logits = ours.logits(("decode", 2, "last"))[:1]
    close(logits, oracle.vocab_logits(oracle.decode([1])))
    follow(ours, oracle, logits, {0: 1})
    for rank, cache in zip(ours.ranks, before):
        assert torch.equal(rank.state.k_cache[0][0], cache[0])
        assert rank.state.positions.tolist() == oracle.states[0].positions[:SLOTS].tolist()
        assert rank.status.tolist() == [0] * 8
    assert ours.ring()[-1][1] == -3  # the padding row's mark


def follow(ours, oracle, logits, rows):
    """The ring's newest row is the argmax of the logits; the oracle goes on from the same tokens."""
    newest = ours.ring()[-1]
    for row, slot in rows.items():
        assert newest[row] == int(logits[row].argmax())
        for rank in ours.ranks:
            assert int(rank.state.tokens[slot]) == newest[row]
        for state in oracle.states:
            state.tokens[slot] = newest[row]


@pytest.mark.parametrize("pdl, captured", [(False, True), (True, False), (True, True)])
def test_only_replays_read_positions_ahead_of_their_wait(folders, pdl, captured):
    """Eager steps overlap: the one before may still be writing them."""
    lowered, key = Lowered(folders["qwen2"], 1), ("decode", 2, "last")
    line = lower(lowered.graphs[key], lowered.plans[key], lowered.ranks[0], pdl, captured)
    ahead = {launch.kernel: launch.run.keywords.get("prefetch") for launch in line}
    assert ahead["gemv+RopeAppend"] is ahead["decode_attention"] is (pdl and captured)
