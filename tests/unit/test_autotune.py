"""`engine.autotune` where there is no GPU: what a deployment would tune, what its cache lacks."""

from __future__ import annotations

from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
import torch

from engine import autotune
from engine.kernels.gemv_config import WIDE_ROWS, GemvConfig, Walk, heuristic, sum_order
from engine.tune import choose, search
from engine.tune.chain import MAX_ERROR, ROUNDS, Deployment
from engine.tune.keys import graph_keys

FP8_7B = ["--model", "qwen2.5-7b", "--quantization", "fp8"]


@pytest.fixture
def no_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(choose, "CACHE_DIR", tmp_path)
    choose.set_target("NVIDIA H200", 132)
    yield
    choose.clear_overrides()
    choose.set_target("NVIDIA H200", 132)


def test_dry_run_lists_the_graphs_keys(no_cache, capsys):
    """Decode: W8A16 GEMVs and the 16-bit lm_head; prefill: 16-bit activations below 64 tokens, FP8 from there."""
    flags = ["--phase", "decode,prefill", "--tokens", "48,64", "--dry-run"]
    assert autotune.main([*FP8_7B, *flags]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert sum(line.startswith("gemv n=") for line in lines) == 5
    assert any(line.startswith("gemv n=152064,k=3584,weight_dtype=bf16:") for line in lines)
    assert any(line.startswith("gemm t=48,n=37888,k=3584,weight_dtype=fp8:") for line in lines)
    assert any(line.startswith("gemm t=64,n=37888,k=3584,weight_dtype=w8a8:") for line in lines)
    assert all(int(line.split(": ")[1].split()[0]) > 1 for line in lines if "candidates" in line)


def test_check_counts_what_is_missing(no_cache, capsys):
    assert autotune.main([*FP8_7B, "--check"]) == 1
    out = capsys.readouterr().out
    assert "0 of 5 keys tuned" in out and out.count("missing or stale: gemv") == 5


def test_errors_are_one_line(no_cache, capsys):
    assert autotune.main(["--model", "qwen2.5-7b", "--phase", "half"]) == 2
    assert "choose decode, prefill or both" in capsys.readouterr().err
    if not torch.cuda.is_available():
        assert autotune.main(FP8_7B) == 2
        assert "--check and --dry-run work without" in capsys.readouterr().err


def test_both_phases(no_cache, capsys):
    assert autotune.main([*FP8_7B, "--phase", "both", "--dry-run"]) == 0
    both = capsys.readouterr().out
    assert autotune.main([*FP8_7B, "--phase", "decode,prefill", "--dry-run"]) == 0
    assert both == capsys.readouterr().out and "gemv n=" in both and "gemm t=512" in both


@pytest.mark.parametrize("mode", ["--check", "--dry-run"])
@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--rows", "abc"], "--rows 'abc': there are graphs of 1, 2, 4, 8"),
        (["--rows", "99"], "--rows '99'"),
        (["--rows", "1,"], "--rows ''"),
        (["--phase", "prefill", "--tokens", "7"], "--tokens '7': there are graphs of 16, 32"),
        (["--context", "-5"], "--context -5 is not 1 to 32768"),
        (["--context", "99999999"], "--context 99999999 is not 1 to"),
        (["--shard-of", "1"], "shard_of=1 is not one of 2, 4, 8; set --shard-of"),
        (["--shard-of", "8"], "cannot run at --tp 8"),
        (["--tp", "4", "--shard-of", "2"], "--shard-of 2 is below --tp 4"),
        (["--tp", "0"], "tensor_parallel_size=0"),
        (["--budget", "banana"], "--budget 'banana' is not a time above 0"),
        (["--budget=-1s"], "--budget '-1s'"),
        (["--budget", "nan"], "--budget 'nan'"),
    ],
)
def test_numbers_are_checked(no_cache, capsys, args, message, mode):
    assert autotune.main([*FP8_7B, *args, mode]) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith("error: ") and message in err and err.count("\n") == 1


def test_what_help_says_without_torch_is_so():
    assert autotune.WIDE_ROWS == WIDE_ROWS and tuple(search.TUNED) == autotune.PHASES


def test_nothing_to_tune_is_not_all_tuned(no_cache, capsys, monkeypatch):
    monkeypatch.setattr(search, "space", lambda *_: [])
    assert autotune.main([*FP8_7B, "--check"]) == 2
    assert "the graph has nothing to tune" in capsys.readouterr().err


def one_h200(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: "NVIDIA H200")
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: properties)


def test_lists_of_models_and_degrees(no_cache, capsys):
    """7B has 4 KV heads: no TP 8, which is left out of a list and refused alone."""
    flags = ["--tp", "2,8", "--quantization", "none,fp8", "--dry-run"]
    assert autotune.main(["--model", "qwen2.5-7b,qwen2.5-72b", *flags]) == 0
    out, err = capsys.readouterr()
    named = [line for line in out.splitlines() if line.startswith("qwen")]
    assert named == [
        f"{model} {dtype} tp={tp} decode rows=1"
        for model, tp in (("qwen2.5-7b", 2), ("qwen2.5-72b", 2), ("qwen2.5-72b", 8))
        for dtype in ("bf16", "fp8")
    ]
    assert err.startswith("qwen2.5-7b tp=8: left out, ") and err.count("\n") == 1
    for bad, message in (
        (["--tp", "2,x"], "--tp '2,x'"),
        (["--quantization", "int4"], "--quantization 'int4'"),
    ):
        assert autotune.main(["--model", "qwen2.5-72b", *bad, "--dry-run"]) == 2
        assert message in capsys.readouterr().err


def test_check_names_a_stale_all_reduce_cache(no_cache, capsys):
    """The tuner does not write it; that it is ignored must show all the same."""
    entry = {"world=2,nbytes=16384": {"config": {"algorithm": "lamport"}, "us": 2.0}}
    flags = ["--model", "qwen2.5-72b", "--tp", "2", "--check"]
    choose.save_entries("all_reduce", "NVIDIA H200", entry, choose.metadata("all_reduce"))
    autotune.main(flags)
    assert "all_reduce" not in capsys.readouterr().out
    old = {**choose.metadata("all_reduce"), "source_hash": "000000000000"}
    choose.save_entries("all_reduce", "NVIDIA H200", entry, old, replace=True)
    assert autotune.main(flags) == 1
    out = capsys.readouterr().out
    assert "its source_hash is '000000000000'" in out and "bench.all_reduce --sections tune" in out


def test_missing_goes_on_where_a_run_ended(no_cache, monkeypatch):
    """A degree above the GPUs is tuned as a share on one; what has an entry is left alone, and nothing is built for a
    deployment that has all."""

    class Counting:
        def __init__(self, deployment):
            self.deployment, self.layers = deployment, 4
            made.append(deployment)

        def time(self):
            return 1e-3

        def facts(self, op):
            return [facts for name, facts in graph_keys(self.deployment) if name == op]

        def uses(self, op, facts):
            return 4

        def try_all(self, op, facts, configs, most_error):
            tried.append(choose.key_string(op, facts))
            return [(9e-4, configs[0])]

        def duel(self, op, facts, configs):
            return [1e-3] * len(configs)

        def close(self):
            pass

    made, tried = [], []
    monkeypatch.setattr(search, "Chain", Counting)
    one_h200(monkeypatch)
    flags = ["--model", "qwen2.5-72b", "--quantization", "fp8", "--phase", "decode,prefill"]
    flags += ["--tokens", "512", "--missing"]
    assert autotune.main([*flags, "--tp", "2"]) == 0
    whole = len(tried)
    assert [d.phase for d in made] == ["decode", "prefill"] and whole == len(set(tried))
    assert all((d.tp, d.shard_of) == (1, 2) for d in made)
    assert autotune.main([*flags, "--tp", "2"]) == 0
    assert len(made) == 2 and len(tried) == whole
    assert autotune.main([*flags, "--tp", "2,4"]) == 0
    assert [d.shard_of for d in made[2:]] == [4, 4] and not set(tried[:whole]) & set(tried[whole:])


@pytest.mark.parametrize("shape", ["o_proj", "qkv"])
def test_the_library_is_no_candidate_where_rows_go_to_their_owners(shape):
    """o_proj of a share on one card adds the residual itself; between ranks its rows are sent."""
    facts = {"t": 512, "n": 8192, "k": 4096, "weight_dtype": torch.bfloat16}
    for epilogue, degree, library in (
        ("residual", 1, True), ("residual", 2, False), ("two_shot_scatter", 2, False), ("store", 2, True),
    ):  # fmt: skip
        if (epilogue == "store") != (shape == "qkv"):
            continue
        found = search.space("gemm", {**facts, "epilogue": epilogue}, 132, degree)
        assert ("cublas" in {config.kernel for config in found}) == library and len(found) > 3


def test_ctrl_c_keeps_what_is_done(no_cache, monkeypatch):
    class Interrupted:
        """A chain that is interrupted at its second key."""

        def __init__(self, deployment):
            self.deployment, self.layers, self.tried, self.closed = deployment, 4, [], False
            made.append(self)

        def time(self):
            return 1e-3

        def facts(self, op):
            wide = [{"n": n, "k": 3584, "weight_dtype": "fp8", "rows": 1} for n in (37888, 4608)]
            return wide if op == "gemv" else []

        def uses(self, op, facts):
            return 4

        def try_all(self, op, facts, configs, most_error):
            if self.tried:
                raise KeyboardInterrupt
            self.tried.append(facts["n"])
            return [(9e-4, configs[0]), (9.5e-4, configs[1])]

        def duel(self, op, facts, configs):
            return [1e-3, *[9e-4] * (len(configs) - 1)]

        def close(self):
            self.closed = True

    made = []
    monkeypatch.setattr(search, "Chain", Interrupted)
    one_h200(monkeypatch)
    assert autotune.main(FP8_7B) == 130
    assert made[0].closed and made[0].tried == [37888]
    choose.set_target("NVIDIA H200", 132)
    assert choose.cached("gemv", {"n": 37888, "k": 3584, "weight_dtype": "fp8"}) is not None
    assert choose.cached("gemv", {"n": 4608, "k": 3584, "weight_dtype": "fp8"}) is None


def save_gemvs(wide: bool) -> None:
    """Entries of all of 7B FP8's GEMVs, with a walk for several rows or without."""
    entries = {}
    for op, facts in graph_keys(Deployment("qwen2.5-7b", "fp8", 1)):
        if op == "gemv":
            config = heuristic(facts["n"], facts["k"], facts["weight_dtype"])
            walk = Walk(config.block_n, 3, config.programs, 1) if wide else None
            entries[choose.key_string(op, facts)] = {"config": replace(config, wide=walk)}
    assert len(entries) == 5
    choose.save_entries("gemv", "NVIDIA H200", entries, choose.metadata("gemv"))


def test_check_of_several_rows_asks_for_their_walk(no_cache, capsys):
    save_gemvs(wide=False)
    assert autotune.main([*FP8_7B, "--check", "--rows", "1,2"]) == 0
    assert autotune.main([*FP8_7B, "--check", "--rows", "1,8"]) == 1
    out = capsys.readouterr().out
    assert "rows=8: 0 of 5 keys tuned" in out
    assert out.count("no walk for 3 rows and more: gemv n=") == 5
    save_gemvs(wide=True)
    assert autotune.main([*FP8_7B, "--check", "--rows", "1,4,8"]) == 0


def test_check_of_several_rows_reports_what_has_no_entry_at_all(no_cache, capsys):
    assert autotune.main([*FP8_7B, "--check", "--rows", "8"]) == 1
    assert capsys.readouterr().out.count("missing or stale: gemv") == 5


def test_dry_run_of_several_rows_counts_walks(no_cache, capsys):
    save_gemvs(wide=False)
    assert autotune.main([*FP8_7B, "--dry-run", "--rows", "1,8"]) == 0
    base, wide = capsys.readouterr().out.split("rows=8")
    counts = [
        [int(line.split(": ")[1].split()[0]) for line in text.splitlines() if "candidates" in line]
        for text in (base, wide)
    ]
    assert [len(c) for c in counts] == [5, 5]
    assert all(2 <= few <= 12 < many for many, few in zip(*counts))


KEY = {"n": 29568, "k": 8192, "weight_dtype": "fp8"}
NAME = "n=29568,k=8192,weight_dtype=fp8"
BASE = GemvConfig("ring", 16, 1024, 8, 6, 264, 8, 2)


class OneKey:
    """A chain of one GEMV; `best` picks the index of the candidate that gains 10 %."""

    def __init__(self, rows, best):
        self.deployment, self.layers = Deployment("qwen2.5-72b", "fp8", 1, 2, rows), 4
        self.best, self.tried, self.duels = best, [], []
        self.slower: dict = {}  # what a second look finds

    def time(self):
        return 1e-3

    def facts(self, op):
        return [{**KEY, "rows": self.deployment.rows}] if op == "gemv" else []

    def uses(self, op, facts):
        return 4

    def try_all(self, op, facts, configs, most_error):
        self.tried.append((list(configs), most_error))
        chosen = self.best(configs)
        self.times = {c: 9e-4 if i == chosen else 1e-3 + i * 1e-6 for i, c in enumerate(configs)}
        return sorted(((t, c) for c, t in self.times.items()), key=lambda pair: pair[0])

    def duel(self, op, facts, configs):
        self.duels.append(list(configs))
        return [self.slower.get(c, self.times.get(c, 1e-3)) for c in configs]


def tuned(rows, best=lambda configs: None):
    """(the chain, the entry in the file) after tuning KEY at `rows`."""
    chain, found = OneKey(rows, best), {}
    choose.clear_overrides()
    search.tune(chain, 60.0, found)
    search.save(found, "NVIDIA H200")
    choose.clear_overrides()
    return chain, choose.cached("gemv", KEY)


def save_base(config):
    entry = {"config": config, "step_us": 850.12, "tuned_in": "rows=1"}
    choose.save_entries("gemv", "NVIDIA H200", {NAME: entry}, choose.metadata("gemv"))


def test_a_winner_must_win_beside_what_is_in_use(no_cache):
    """The first timings of candidates are seconds apart, and the card drifts."""
    save_base(BASE)
    chain, found = OneKey(1, lambda configs: 3), {}
    first = search.space("gemv", {**KEY, "rows": 1}, 132, 2)[3]
    chain.slower = {first: 1.1e-3, BASE: 1e-3}
    choose.clear_overrides()
    search.tune(chain, 60.0, found)
    ((present, *rivals),) = chain.duels
    assert present == BASE and rivals[0] == first and len(rivals) == search.FINALISTS
    entry = found["gemv"][NAME]
    assert entry["config"] == BASE and entry["gain_us_per_call"] == 0 and entry["step_us"] == 1000.0
    assert entry["runner_up"] in map(str, rivals)
    assert entry["rounds"] == ROUNDS and "driver" in entry


@pytest.mark.parametrize("rows", [4, 8])
def test_several_rows_tune_their_walk_alone(no_cache, rows):
    save_base(BASE)
    chain, entry = tuned(rows, lambda configs: 2)
    ((configs, most_error),) = chain.tried
    assert most_error == 0.0  # the same bits, or it is none
    assert all(replace(c, wide=None) == BASE and c.wide for c in configs)
    assert choose.choose("gemv", KEY) == configs[2] != configs[0]
    assert (entry["step_us"], entry["tuned_in"]) == (850.12, "rows=1")  # of one row: as it was
    assert entry["wide"]["step_us"] == 900.0 and f"rows={rows}" in entry["wide"]["tuned_in"]
    # Nothing gains on it: it stays.
    assert tuned(rows)[1]["config"] == asdict(configs[2])


def test_several_rows_may_keep_the_one_row_walk_and_are_tuned_then(no_cache):
    save_base(BASE)
    _, entry = tuned(8)
    walk = {"block_n": 16, "stages": 6, "programs": 264, "programs_per_sm": 2}
    assert entry["config"] == {**asdict(BASE), "wide": walk}


def test_several_rows_wait_for_an_entry(no_cache, capsys):
    chain, entry = tuned(8)
    assert entry is None and not chain.tried
    assert "skipped, it has no entry yet (--rows 1 first)" in capsys.readouterr().out


@pytest.mark.parametrize("same_sums", [True, False])
def test_one_row_keeps_a_walk_that_still_fits(no_cache, same_sums):
    wide = Walk(32, 4, 132, 1)
    save_base(replace(BASE, wide=wide))
    tuned(8)

    def best(configs):
        same = (sum_order(c) == sum_order(BASE) and c.block_n == 16 for c in configs)
        return list(same).index(same_sums)

    chain, entry = tuned(1, best)
    assert chain.tried[0][1] == MAX_ERROR
    config = choose.choose("gemv", KEY)
    assert (sum_order(config) == sum_order(BASE)) == same_sums
    assert config.wide == (wide if same_sums else None)
    assert ("wide" in entry) == same_sums and entry["step_us"] == 900.0
