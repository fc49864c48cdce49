"""The memory table, and advice that must work when it is followed."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache

import pytest
import torch

from engine.checkpoint.dummy import DummySource
from engine.checkpoint.fp8 import FP8_DTYPE
from engine.checkpoint.load import load_rank
from engine.checkpoint.memory import GIB, check_fit, kv_bytes_per_token, weight_bytes
from engine.config import preset
from engine.errors import EngineError
from engine.runtime.state import new_state
from tests.unit.checkpoint_fixtures import specs_for
from tests.unit.test_checkpoint_source import TINY

H200 = 139 * GIB
BIG = preset("qwen2.5-72b")


@cache
def specs(name: str, tp: int) -> tuple:
    return tuple(specs_for(preset(name), tp).values())


def fit(name: str = "qwen2.5-72b", devices: int = 1, **options):
    options = {
        "tp": 1, "quantization": None, "max_model_len": 4096, "num_slots": 1,
        "device_bytes": [H200] * devices, "dtype": torch.bfloat16, **options,
    }  # fmt: skip
    return check_fit(preset(name), lambda tp: specs(name, tp), **options)


def refusal(**options) -> str:
    with pytest.raises(EngineError) as e:
        fit(**options)
    assert "\n" not in str(e.value)
    return str(e.value)


def test_weight_bytes_of_72b():
    """By hand: 72.7 billion parameters in bf16; FP8 halves the layers and adds a scale a row."""
    total = weight_bytes(specs("qwen2.5-72b", 1), 0, torch.bfloat16)
    assert total == 2 * BIG.num_parameters
    assert round(total / GIB, 1) == 135.4
    layers = 80 * (8192 * (64 + 8 + 8) * 128 + 8192 * 8192 + 3 * 8192 * 29568)
    rows = 80 * ((64 + 8 + 8) * 128 + 8192 + 2 * 29568 + 8192)
    assert (
        weight_bytes(specs("qwen2.5-72b", 1), 0, torch.bfloat16, "fp8") == total - layers + 4 * rows
    )


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("quantization", [None, "fp8"])
@pytest.mark.parametrize("tied", [False, True])
def test_weight_bytes_is_what_loading_allocates(tp, quantization, tied):
    config = replace(TINY, tie_word_embeddings=tied)
    rank_specs = specs_for(config, tp)
    for rank in range(tp):
        loaded = load_rank(
            rank_specs, DummySource(config), rank, "cpu", torch.bfloat16, quantization
        )
        storages = {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
            for x in loaded.values()
            for t in (x.weight, x.scale)
            if t is not None
        }
        want = weight_bytes(rank_specs.values(), rank, torch.bfloat16, quantization)
        assert want == sum(storages.values())


@pytest.mark.parametrize("tp, heads", [(1, 8), (2, 4), (8, 1)])
def test_kv_bytes_of_72b(tp, heads):
    assert kv_bytes_per_token(BIG, tp, torch.bfloat16) == 80 * 2 * heads * 128 * 2


def test_fp8_kv_is_a_byte_an_element_and_a_scale_a_head_vector():
    """As allocated, and 0.516 of 16 bits at head_dim 128: nearly twice the context fits."""
    assert kv_bytes_per_token(BIG, 2, FP8_DTYPE) == 80 * 2 * 4 * (128 + 4)
    for tp in (1, 4):
        state = new_state(
            TINY, tp, slots=2, length=32, dtype=torch.bfloat16, device="cpu", fp8_kv=True
        )
        tensors = [*state.k_cache, *state.v_cache, *(x for pair in state.kv_scales for x in pair)]
        assert sum(x.nbytes for x in tensors) == 2 * 32 * kv_bytes_per_token(TINY, tp, FP8_DTYPE)
    wide, narrow = (fit(max_model_len=8192, tp=2, devices=2, fp8_kv=fp8) for fp8 in (False, True))
    assert narrow.need.kv / wide.need.kv == 132 / 256
    assert 1.9 < narrow.largest_context / wide.largest_context < 1.94


def test_fp8_kv_is_suggested_where_it_is_enough():
    asked = dict(max_model_len=131072, num_slots=8, tp=2, devices=2, quantization="fp8")
    assert " or --kv-cache-dtype fp8 or " in refusal(**asked) or "use --kv-cache" in refusal(
        **asked
    )
    assert "--kv-cache-dtype" not in refusal(**{**asked, "num_slots": 64, "fp8_kv": True})


def test_table_adds_up_and_prints():
    table = fit(
        devices=2, tp=2, max_model_len=8192, num_slots=8, workspace_bytes=GIB, graph_bytes=GIB // 2
    )
    need = table.need
    assert need.kv == 80 * 2 * 4 * 128 * 2 * 8192 * 8
    assert need.total == need.weights + need.kv + GIB + GIB // 2 <= table.budget
    text = str(table)
    for line in ("weights", "160 KiB x 8192 tokens x 8 slots", "workspace", "1.00 GiB", "0.50 GiB"):
        assert line in text
    assert f"{need.total / GIB:.2f} GiB" in text
    assert "139.0 GiB at 0.90" in text
    assert "exchange" not in text
    shared = fit(
        devices=2, tp=2, max_model_len=8192, num_slots=8, workspace_bytes=GIB, exchange_bytes=GIB // 4,
        graph_bytes=GIB // 2,
    )  # fmt: skip
    assert shared.need.total == need.total + GIB // 4
    assert shared.largest_context < table.largest_context
    assert re.search(r"exchange between ranks +0\.25 GiB", str(shared))


def test_the_error_of_the_issue():
    message = refusal(devices=2)
    assert "weights 135.4 GiB" in message
    assert "139.0 GiB at 0.90 is 125.1 GiB; use --tp 2 or --quantization fp8" in message


def test_no_tp_is_suggested_beyond_the_devices():
    message = refusal(devices=1)
    assert "--tp 2" not in message
    assert message.endswith("use --quantization fp8")


def test_largest_context_fits_and_one_more_does_not():
    table = fit("qwen2.5-7b", max_model_len=1024, num_slots=4)
    most = table.largest_context
    assert fit("qwen2.5-7b", max_model_len=most, num_slots=4).fits
    assert "--max-model-len" in refusal(name="qwen2.5-7b", max_model_len=most + 1, num_slots=4)


def test_context_is_chosen_when_none_is_given():
    assert fit("qwen2.5-7b", max_model_len=None).need.context == 32768  # the model's own limit
    small = fit("qwen2.5-7b", max_model_len=None, num_slots=8, device_bytes=[20 * GIB])
    context = small.need.context
    assert 256 <= context < 32768 and context % 256 == 0
    with pytest.raises(EngineError):
        fit("qwen2.5-7b", max_model_len=context + 256, num_slots=8, device_bytes=[20 * GIB])


def test_smallest_device_counts():
    with pytest.raises(EngineError, match=r"24\.0 GiB at 0\.90"):
        fit("qwen2.5-32b", tp=2, device_bytes=[H200, 24 * GIB])


def test_hopeless_says_how_many_would_do():
    message = refusal(devices=2, tp=2, device_bytes=[24 * GIB] * 2)
    assert "4 of them would do with fp8" in message
    message = refusal(device_bytes=[GIB])
    assert "no setting of this engine fits" in message


CASES = [
    dict(name=name, devices=devices, tp=tp, quantization=q, max_model_len=context, num_slots=slots, size=size)
    for name in ("qwen2.5-7b", "qwen2.5-32b", "qwen2.5-72b")
    for devices, tp in ((1, 1), (2, 1), (2, 2), (8, 1), (8, 4))
    for q in (None, "fp8")
    for context, slots in ((512, 1), (32768, 8), (131072, 8), (None, 8))
    for size in (16, 24, 80, 139)
]  # fmt: skip


def test_every_suggestion_fits_when_followed():
    """Follow each remedy of each refusal: the deployment then passes the same check."""
    followed = 0
    for case in CASES:
        options = {**case, "device_bytes": [case["size"] * GIB] * case["devices"]}
        del options["size"]
        try:
            fit(**options)
            continue
        except EngineError as e:
            message = str(e)
        advice = re.search(r"; use (.*)$", message)
        if advice is None:
            assert "would do with fp8" in message or "smaller model" in message
            continue
        for remedy in advice[1].split(" or "):
            changed = dict(options)
            for flag, value in re.findall(r"--([a-z-]+) (\w+)", remedy):
                key = {"tp": "tp", "max-num-seqs": "num_slots"}.get(flag, flag.replace("-", "_"))
                if flag == "kv-cache-dtype":
                    changed["fp8_kv"] = value == "fp8"
                else:
                    changed[key] = value if flag == "quantization" else int(value)
            assert changed != options, (message, remedy)
            assert fit(**changed).fits, (message, remedy)
            followed += 1
    assert followed > 100
