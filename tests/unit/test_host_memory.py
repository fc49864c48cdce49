"""The CPU back end's memory check, and what it says of running there at all."""

from __future__ import annotations

import weakref
from dataclasses import replace

import pytest
import torch

from engine.checkpoint.load import Loaded
from engine.config import EngineConfig, preset
from engine.errors import EngineError
from engine.runtime import create, host_memory

GIB = 1 << 30


def test_the_smaller_of_machine_and_container_counts(tmp_path):
    assert host_memory.available_bytes(tmp_path) is None
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 90 kB\nMemAvailable: 50 kB\n")
    assert host_memory.available_bytes(tmp_path) == 50 * 1024
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.stat").write_text("anon 1000\nfile 700\n")
    for limit, expected in (("max", 50 * 1024), ("9000", 8000), ("500", 0)):
        (group / "memory.max").write_text(limit + "\n")
        assert host_memory.available_bytes(tmp_path) == expected


def test_a_model_that_cannot_fit_is_refused_before_loading(monkeypatch):
    def load(*_):
        raise AssertionError("loaded")

    monkeypatch.setattr(create, "_load", load)
    monkeypatch.setattr(create, "available_bytes", lambda: 22 * GIB)
    engine = EngineConfig("qwen2.5-72b", load_format="dummy", device="cpu", dtype="bfloat16")
    # 72.7e9 parameters of 2 bytes are 135.4 GiB, lm_head in fp32 4.6; KV 320 KiB x 8192 tokens 2.5.
    message = r"needs 142.6 GiB .*weights 140.1 GiB.* 2.5 GiB\) and 22.0 GiB are .* smaller model"
    with pytest.raises(EngineError, match=message):
        create.create_cpu_executor(engine, preset(engine.model))
    fp8 = replace(engine, quantization="fp8")
    message = r"needs 142.6 GiB .*weights 140.1 GiB in bfloat16, also with --quantization fp8, KV"
    with pytest.raises(EngineError, match=message):
        create.create_cpu_executor(fp8, preset(engine.model))
    small = replace(engine, model="qwen2.5-0.5b")
    with pytest.raises(AssertionError, match="loaded"):
        create.create_cpu_executor(small, preset(small.model))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_fp8_weights_are_expanded_one_by_one(dtype):
    """Both forms of all of them together would need half as much again."""
    alive: list[int] = []

    class Watched(dict):
        def pop(self, name):
            alive.append(sum(ref() is not None for ref in stored))
            return super().pop(name)

    whole = {f"w{i}": torch.randn(8, 16).to(torch.float8_e4m3fn) for i in range(4)}
    weights = Watched({name: Loaded(w, torch.rand(8)) for name, w in whole.items()})
    weights["lm_head.weight"] = Loaded(torch.randn(4, 16).to(dtype))
    want = {n: (w.float() * weights[n].scale[:, None]).to(dtype) for n, w in whole.items()}
    stored = [weakref.ref(loaded.weight) for loaded in weights.values() if loaded.scale is not None]
    whole.clear()
    got = create._for_cpu(weights, dtype)
    assert alive == [4, 3, 2, 1, 0]
    assert list(got) == [*want, "lm_head.weight"]
    assert got["lm_head.weight"].weight.dtype is torch.float32
    for name, weight in want.items():
        assert got[name].scale is None and torch.equal(got[name].weight, weight)


def test_the_advice_makes_it_fit():
    config = preset("qwen2.5-0.5b")
    specs = create._open(
        EngineConfig("qwen2.5-0.5b", load_format="dummy"), config, "cpu"
    ).specs(1)  # fmt: skip

    def check(gib, dtype=torch.float32, context=32768):
        host_memory.check_host_fit(
            config, specs.values(), tp=1, dtype=dtype, quantization=None, max_model_len=context,
            fp8_kv=False, available=int(gib * GIB),
        )  # fmt: skip

    check(3.0)
    # fp32: 1.84 GiB of weights, 24 KiB of KV a token.
    with pytest.raises(EngineError, match=r"use --max-model-len \d+ or less") as refused:
        check(2.0)
    context = int(str(refused.value).split("--max-model-len ")[1].split()[0])
    check(2.0, context=context)
    with pytest.raises(EngineError):
        check(2.0, context=context + 1)
    with pytest.raises(EngineError, match="--dtype bfloat16"):
        check(1.6, context=16)
    check(1.6, torch.bfloat16, context=16)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
@pytest.mark.parametrize(
    ("options", "lines"),
    [
        ({"model": "org/m"}, 1),
        ({"model": "org/m", "device": "cpu"}, 0),
        ({"model": "/cache/smollm2-135m-instruct-1"}, 0),
        ({"model": "/cache/smollm2-135m-instruct-1", "tensor_parallel_size": 3}, 1),
    ],
)
def test_falling_back_to_the_cpu_is_said_once(options, lines, caplog):
    assert create.pick_device(EngineConfig(**options)) == "cpu"
    assert [r.levelname for r in caplog.records] == ["WARNING"] * lines
    assert all(
        "no CUDA device" in r.message and "--device cpu" in r.message for r in caplog.records
    )
