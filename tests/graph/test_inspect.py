"""The compiled form as text. In a process of its own: under TRITON_INTERPRET=1 there are no launches to record."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SHOW = """
from engine.config import preset
from engine.graph import dump_graph
print(dump_graph(preset({model!r}), {tp}, {quantization!r}, tokens=64))
"""


@pytest.mark.parametrize(
    "model,tp,quantization",
    [("qwen2.5-72b", 8, "fp8"), ("qwen2.5-72b", 2, "fp8"), ("qwen2.5-0.5b", 1, None)],
)
def test_dump_shows_kernel_grid_bytes_and_config(model, tp, quantization):
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    code = SHOW.format(model=model, tp=tp, quantization=quantization)
    text = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    ).stdout
    decode, prefill = (part for part in text.split("== ") if part.startswith("launches of rank 0"))
    stages = [line.split()[1] for line in decode.splitlines()[1:] if line.strip()]
    layer = ["qkv", "attention", "o_proj", "all_reduce", "gate_up", "down", "all_reduce"]
    if tp <= 2:  # nothing to sum, or the next GEMV polls the two messages
        layer = [stage for stage in layer if stage != "all_reduce"]
        assert decode.count("+Poll") == (3 if tp == 2 else 0)  # gate_up, layer 1's qkv, lm_head
    assert stages[:1] + stages[1 : 1 + len(layer)] == ["embedding", *layer]
    assert "GemvConfig(kernel='ring'" in decode and "decode_attention_kernel[" in decode
    assert "GemmConfig(" in prefill and "prefill_attention_kernel[" in prefill
    # The last layer's own launches: gathers of attention (of the rank's heads) and hidden state (which a two-shot
    # exchange sends along), 3 GEMVs; lm_head.
    assert prefill.count("gather_row_kernel[") == (2 if tp == 2 else 1)
    assert prefill.count("GemvConfig(") == 4
    if (
        tp == 8
    ):  # gate and up, 2 x 3696 rows of 8192 e4m3 weights and an fp32 scale a row, x and the output
        size = 7392 * 8192 + 7392 * 4 + 2 * 8192 + 2 * 8192 + 2 * 3696
        assert f"{size:,} B" in decode
