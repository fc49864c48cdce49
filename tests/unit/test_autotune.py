"""`engine.autotune` where there is no GPU: what a deployment would tune, what its cache lacks."""

from __future__ import annotations

import pytest
import torch

from engine import autotune
from engine.tune import choose

FP8_7B = ["--model", "qwen2.5-7b", "--quantization", "fp8"]


@pytest.fixture
def no_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(choose, "CACHE_DIR", tmp_path)
    choose.set_target("NVIDIA H200", 132)
    yield
    choose.set_target("NVIDIA H200", 132)


def test_dry_run_lists_the_graphs_keys(no_cache, capsys):
    """Decode: W8A16 GEMVs and the 16-bit lm_head; prefill: 16-bit activations below 128 tokens, FP8 from there."""
    flags = ["--phase", "decode,prefill", "--tokens", "64,128", "--dry-run"]
    assert autotune.main([*FP8_7B, *flags]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert sum(line.startswith("gemv n=") for line in lines) == 5
    assert any(line.startswith("gemv n=152064,k=3584,weight_dtype=bf16:") for line in lines)
    assert any(line.startswith("gemm t=64,n=37888,k=3584,weight_dtype=fp8:") for line in lines)
    assert any(line.startswith("gemm t=128,n=37888,k=3584,weight_dtype=w8a8:") for line in lines)
    assert all(int(line.split(": ")[1].split()[0]) > 1 for line in lines if "candidates" in line)


def test_check_counts_what_is_missing(no_cache, capsys):
    assert autotune.main([*FP8_7B, "--check"]) == 1
    out = capsys.readouterr().out
    assert "0 of 5 keys tuned" in out and out.count("missing or stale: gemv") == 5


def test_errors_are_one_line(no_cache, capsys):
    assert autotune.main(["--model", "qwen2.5-7b", "--phase", "both"]) == 2
    assert "choose decode, prefill or decode,prefill" in capsys.readouterr().err
    if not torch.cuda.is_available():
        assert autotune.main(FP8_7B) == 2
        assert "--check and --dry-run work without" in capsys.readouterr().err


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

        def try_all(self, op, facts, configs):
            if self.tried:
                raise KeyboardInterrupt
            self.tried.append(facts["n"])
            return [(9e-4, configs[0]), (9.5e-4, configs[1])]

        def close(self):
            self.closed = True

    made = []
    monkeypatch.setattr(autotune, "Chain", Interrupted)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: "NVIDIA H200")
    assert autotune.main(FP8_7B) == 130
    assert made[0].closed and made[0].tried == [37888]
    choose.set_target("NVIDIA H200", 132)
    assert choose.is_cached("gemv", {"n": 37888, "k": 3584, "weight_dtype": "fp8"})
    assert not choose.is_cached("gemv", {"n": 4608, "k": 3584, "weight_dtype": "fp8"})
