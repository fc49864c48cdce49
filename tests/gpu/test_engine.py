"""The whole engine on the card against the interpreter: kernels, graphs, exchange, step loop."""

from __future__ import annotations

import time

import pytest
import torch

from bench.latency import generate
from engine.config import EngineConfig, from_dir
from engine.errors import DeviceError
from engine.kernels import gemv_poll
from engine.runtime import create_executor, links, nccl
from tests.graph.models import SHAPES, Lockstep, save_model
from tests.graph.test_lower import carried_by_copies

pytestmark = pytest.mark.gpu

PROMPTS = [
    [5, 17, 99, 3, 42, 42, 7, 150, 11, 8, 64],
    [3, 1, 4],
    [(i * 31 + 7) % 300 for i in range(70)],
    [200, 100, 50, 25, 12, 6, 3, 1],
]
# Structure as in tests/graph, sizes that the kernels take (16-byte rows, head_dim 64 and 128).
GPU_SHAPES = {
    "qwen2": dict(SHAPES["qwen2"], hidden_size=448, head_dim=64, intermediate_size=1064, vocab_size=331,
                  num_hidden_layers=3),
    "llama": dict(SHAPES["llama"], hidden_size=384, head_dim=64, intermediate_size=1040, vocab_size=317),
    "qwen2-gqa8": dict(SHAPES["qwen2-gqa8"], hidden_size=256, head_dim=128, intermediate_size=688,
                       vocab_size=1003),
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}
    for shape, kwargs in GPU_SHAPES.items():
        folder = tmp_path_factory.mktemp(shape)
        save_model(shape, folder, overrides=kwargs)
        made[shape] = folder
    return made


def start(folder, tp=1, **kwargs):
    defaults = dict(device="cuda", max_num_seqs=4, max_model_len=128, dtype="bfloat16")
    config = EngineConfig(model=str(folder), tensor_parallel_size=tp, **{**defaults, **kwargs})
    return create_executor(config, from_dir(folder))


def rms_error(got, expected):
    assert got.isfinite().all() and got.shape == expected.shape
    return float((got - expected).square().mean().sqrt() / expected.square().mean().sqrt())


def bound(folder, dtype="bfloat16", quantization=None):
    """Three times the error of the references run in the same 16-bit type against fp32, prefill alone: the
    kernels keep fp32 between prologue, sum and epilogue, but round the attention's probabilities for the
    tensor cores, and decode steps add the rounding of the KV and of the tokens before."""
    errors = []
    for slot, prompt in enumerate(PROMPTS):
        low = Lockstep(
            folder, 1, length=256, slots=4, dtype=getattr(torch, dtype), quantization=quantization
        )
        high = Lockstep(folder, 1, length=256, slots=4, quantization=quantization)
        errors.append(rms_error(low.vocab_logits(low.prefill(slot, prompt)).float(),
                                high.vocab_logits(high.prefill(slot, prompt))))  # fmt: skip
    assert max(errors) < 0.1
    return 3 * max(errors)


def check_against_oracle(folder, executor, dtype="bfloat16", steps=6):
    """Teacher-forced: the oracle (fp32, TP=1) follows the executor's tokens; logits agree at every step."""
    limit = bound(folder, dtype)
    oracle = Lockstep(folder, 1, length=256, slots=len(PROMPTS))
    for slot, prompt in enumerate(PROMPTS):
        output = oracle.prefill(slot, prompt)
        token = executor.read(step := executor.prefill(slot, prompt))
        compare(executor.logits(step)[0], oracle.vocab_logits(output)[0], token[0], limit)
        for state in oracle.states:
            state.tokens[slot] = token[0]
    slots = list(range(len(PROMPTS)))
    for _ in range(steps):
        tokens = executor.read(step := executor.decode(slots))
        output = oracle.decode(slots)
        logits = executor.logits(step)
        for slot in slots:
            compare(logits[slot], oracle.vocab_logits(output)[slot], tokens[slot], limit)
            for state in oracle.states:
                state.tokens[slot] = tokens[slot]


def compare(logits, expected, token, limit):
    error = rms_error(logits, expected)
    assert error < limit, f"RMS error {error:.4f}, bound {limit:.4f}"
    assert token == int(logits.argmax()), "the sampled id is the argmax of the logits it came from"


@pytest.mark.parametrize("shape", list(GPU_SHAPES))
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_one_gpu(folders, shape, dtype):
    executor = start(folders[shape], dtype=dtype)
    try:
        check_against_oracle(folders[shape], executor, dtype)
    finally:
        executor.close()


@pytest.mark.multigpu
@pytest.mark.parametrize("shape", list(GPU_SHAPES))
def test_two_gpus(folders, shape):
    executor = start(folders[shape], tp=2)
    try:
        check_against_oracle(folders[shape], executor)
        same_state_on_all_ranks(executor)
    finally:
        executor.close()


@pytest.mark.multigpu
def test_nccl(folders):
    """The carrier where there is no peer access, forced where there is: pieces of a graph, NCCL between them."""
    executor = start(folders["llama"], tp=2, all_reduce="nccl")
    try:
        check_against_oracle(folders["llama"], executor)
        same_state_on_all_ranks(executor)
    finally:
        executor.close()


def test_pieces_between_carried_messages(folders, monkeypatch):
    """The same pieces on one device, copies in NCCL's place."""
    transport = links.Transport("nccl", ("nccl",), "a test", virtual=True)
    monkeypatch.setattr(links, "choose_transport", lambda *_: transport)
    monkeypatch.setattr(nccl, "all_gather_in_place", carried_by_copies)
    test_virtual_ranks(folders, 2, "auto")


@pytest.mark.parametrize(
    "tp,all_reduce",
    [(2, "auto"), (4, "auto"), (8, "auto"), (4, "two_shot"), (8, "two_shot"), (2, "flag"), (4, "flag")],
)  # fmt: skip
def test_virtual_ranks(folders, tp, all_reduce):
    """More ranks than devices: the whole protocol at TP = 4 and 8 on whatever is here."""
    executor = start(folders["llama"], tp=tp, virtual_ranks=True, all_reduce=all_reduce)
    try:
        check_against_oracle(folders["llama"], executor)
        same_state_on_all_ranks(executor)
    finally:
        executor.close()


@pytest.mark.parametrize("tp", [2, 4])
def test_polls_in_prologues_do_not_change_a_bit(folders, monkeypatch, tp):
    """GEMVs that poll for all row counts, for up to two rows, for none: the same logits, alone and among others."""
    row = tp * 2 * GPU_SHAPES["llama"]["hidden_size"]
    found, polled = {}, {}
    for most in (gemv_poll.MOST_BYTES, 2 * row, 0):
        monkeypatch.setattr(gemv_poll, "MOST_BYTES", most)
        executor = start(folders["llama"], tp=tp, virtual_ranks=tp > torch.cuda.device_count())
        graphs = {key: graph for key, graph in executor.graphs.items() if key[0] == "decode"}
        polled[most] = [any(op.polls for op in graphs[key].ops) for key in sorted(graphs)]
        logits = found.setdefault(most, [])
        try:
            for slot, prompt in enumerate(PROMPTS):
                executor.read(executor.prefill(slot, prompt))
            for slots in ([3], [3], [0, 1, 3, 2], [3, 0], [3], [2, 3, 1], [0, 3]):
                executor.read(step := executor.decode(slots))
                logits.append(executor.logits(step)[: len(slots)])
            same_state_on_all_ranks(executor)
        finally:
            executor.close()
    assert list(polled.values()) == [[True] * 3, [True, True, False], [False] * 3]
    whole, *others = found.values()
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(whole, other, strict=True))


def same_state_on_all_ranks(executor):
    for device in {rank.device for rank in executor.ranks}:
        torch.cuda.synchronize(device)
    first = executor.ranks[0].state
    for rank in executor.ranks[1:]:
        assert torch.equal(rank.state.tokens.cpu(), first.tokens.cpu())
        assert torch.equal(rank.state.positions.cpu(), first.positions.cpu())
        assert rank.status.tolist() == [0] * 8


def test_fp8_follows_its_own_weights(folders):
    """FP8 weights: logits equal the oracle run on the dequantised weights, within the bf16 bound."""
    folder = folders["qwen2"]
    executor = start(folder, quantization="fp8", prefill_activations="16bit")
    oracle = Lockstep(folder, 1, length=256, quantization="fp8")
    try:
        executor.read(step := executor.prefill(0, PROMPTS[2]))
        expected = oracle.vocab_logits(oracle.prefill(0, PROMPTS[2]))[0]
        limit = bound(folder, quantization="fp8")
        assert rms_error(executor.logits(step)[0], expected) < limit
    finally:
        executor.close()


def run(executor, slot, prompt, count):
    """Greedy ids with steps queued ahead, as the scheduler does."""
    return generate(executor, prompt, count, slot)[0]


def test_queued_ahead_graphs_equal_eager_steps(folders):
    graphs = start(folders["qwen2"])
    eager = start(folders["qwen2"], enforce_eager=True)
    try:
        for slot, prompt in enumerate(PROMPTS):
            expected = run(eager, slot, prompt, 20)
            assert run(graphs, slot, prompt, 20) == expected
            assert len(set(expected)) > 2
    finally:
        graphs.close()
        eager.close()


def test_a_row_does_not_depend_on_its_neighbours(folders):
    """Bitwise: the same sequence alone and among others gives the same logits."""
    executor = start(folders["llama"])
    try:
        alone = []
        executor.read(executor.prefill(3, PROMPTS[0]))
        for _ in range(4):
            executor.read(step := executor.decode([3]))
            alone.append(executor.logits(step)[0])
        for slot, prompt in enumerate(PROMPTS[1:]):
            executor.read(executor.prefill(slot, prompt))
        executor.read(executor.prefill(3, PROMPTS[0]))
        for expected in alone:
            executor.read(step := executor.decode([0, 1, 3, 2]))
            assert torch.equal(executor.logits(step)[2], expected)
    finally:
        executor.close()


def test_nothing_is_allocated_or_compiled_after_start(folders):
    executor = start(folders["qwen2"])
    try:

        def counts():
            stats = torch.cuda.memory_stats()
            return stats["allocation.all.allocated"], executor.stats()["counters"].get(
                "jit_compiles", 0
            )

        before = counts()
        run(executor, 0, PROMPTS[2], 12)
        run(executor, 1, PROMPTS[0], 12)
        assert counts() == before
        assert executor.stats()["counters"].get("host_syncs", 0) == 0
    finally:
        executor.close()


def test_prompt_logits_and_chunks(folders):
    """Logits of every prompt position; a prompt longer than the largest bucket runs in chunks."""
    folder = folders["qwen2"]
    executor = start(folder)
    oracle = Lockstep(folder, 1, length=256)
    try:
        got = executor.prompt_logits(0, PROMPTS[2])
        expected = oracle.vocab_logits(oracle.prefill(0, PROMPTS[2], logits="all"))
        limit = bound(folder)
        assert rms_error(got, expected) < limit
        executor.buckets = (16, 32)
        whole = oracle.vocab_logits(oracle.prefill(1, PROMPTS[2]))[0]
        executor._programs[("prefill", 32, "none")] = executor.lower(
            chunk := executor_graph(folder, 32, "none")
        )
        executor.graphs[("prefill", 32, "none")] = chunk
        executor.read(step := executor.prefill(1, PROMPTS[2]))
        assert rms_error(executor.logits(step)[0], whole) < limit
    finally:
        executor.close()


def executor_graph(folder, rows, logits):
    from engine.graph.build import build
    from engine.graph.passes import run_passes

    return run_passes(build(from_dir(folder), phase="prefill", rows=rows, tp=1, logits=logits))


@pytest.mark.multigpu
def test_a_missing_rank_is_an_error_and_the_next_request_works(folders):
    """One rank's graph is not launched: the other's spin expires, says so, and the engine serves on."""
    executor = start(folders["llama"], tp=2)
    try:
        expected = run(executor, 0, PROMPTS[0], 8)
        program = executor._programs[("decode", 1, "last")]
        (captured,) = whole = program._pieces
        program._pieces = [captured[:1]]
        executor.read(executor.prefill(0, PROMPTS[0]))
        with pytest.raises(DeviceError, match=r"rank 0 waited in vain for rank 1"):
            executor.read(executor.decode([0]))
        program._pieces = whole
        assert run(executor, 0, PROMPTS[0], 8) == expected
    finally:
        executor.close()


@pytest.mark.multigpu
def test_soak_same_ids_and_no_decay(folders):
    """The report's failure: throughput that decays over prompts. 30 prompts; ids equal to the first run's,
    the last no slower than 2 % over the first (after one warm-up prompt). The best of five of each: a step of this
    small model is a launch by the host, whose other work shows in a median (8.6 ms after 6.3 once)."""
    executor = start(folders["qwen2-gqa8"], tp=2)
    try:
        expected = run(executor, 0, PROMPTS[0], 100)
        seconds = []
        for _ in range(30):
            begin = time.perf_counter()
            assert run(executor, 0, PROMPTS[0], 100) == expected
            seconds.append(time.perf_counter() - begin)
        assert min(seconds[-5:]) < 1.02 * min(seconds[:5]) + 1e-3
    finally:
        executor.close()


def test_lazy_graphs_give_the_same_ids(folders):
    """Captured at the first prompt of their bucket, once; nothing is compiled then."""
    ids = {}
    for lazy in (False, True):
        executor = start(folders["qwen2"], lazy_graphs=lazy)
        try:
            ids[lazy] = [run(executor, 0, prompt, 8) for prompt in (*PROMPTS[:2], PROMPTS[0])]
            captured = [key for key, p in executor._programs.items() if p.captured]
            prefill = [key for key in captured if key[0] == "prefill"]
            assert len(prefill) <= 2 if lazy else len(prefill) > 5
            assert executor.stats()["counters"]["jit_compiles"] == 0
            assert executor.stats()["counters"].get("host_syncs", 0) == (
                len(prefill) if lazy else 0
            )
        finally:
            executor.close()
    assert ids[True] == ids[False]
