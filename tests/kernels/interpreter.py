"""Makes Triton's interpreter round fp32 -> bf16 and e4m3 as the GPU does, and faster.

Triton 3.6 truncates there (`_convert_float` with no rounding mode); `cvt.rn.bf16.f32` rounds to
nearest even, `cvt.rn.satfinite.e4m3x2.f32` too, and saturates. Call `prepare()` before the first kernel module is imported: the conftest does, and so
do the rank processes.
"""

from __future__ import annotations

import os

import numpy as np
import torch


def prepare(cuda: bool) -> None:
    """Choose the interpreter when there is no CUDA device, and mend its bf16 rounding."""
    if not cuda:
        os.environ.setdefault("TRITON_INTERPRET", "1")
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    import triton.language as tl
    from triton.runtime import interpreter

    original = interpreter._convert_float
    if getattr(original, "rounds_to_nearest", False):
        return

    def convert(data, source, target, rounding_mode):
        if source == tl.float32 and target == tl.bfloat16:
            bits = np.ascontiguousarray(data, dtype=np.float32).view(np.uint32)
            rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
            # A NaN must not carry into infinity: keep its top bits and make it quiet.
            result = np.where((bits & 0x7FFFFFFF) > 0x7F800000, (bits >> 16) | 0x40, rounded)
            return result.astype(np.uint16).reshape(data.shape)
        if source == tl.float32 and target == tl.float8e4nv:  # the original truncates subnormals
            value = torch.from_numpy(np.array(data, dtype=np.float32)).clamp(-448, 448)
            return value.to(torch.float8_e4m3fn).view(torch.uint8).numpy().reshape(data.shape)
        if source == tl.float8e4nv and target == tl.float32:  # the original reads NaN as 480
            codes = torch.from_numpy(np.array(data).view(np.uint8))
            return codes.view(torch.float8_e4m3fn).float().numpy().view(np.uint32)
        if source == tl.bfloat16 and target == tl.float32:
            wide = np.ascontiguousarray(data).view(np.uint16).astype(np.uint32) << 16
            return wide.reshape(data.shape)
        return original(data, source, target, rounding_mode)

    convert.rounds_to_nearest = True  # type: ignore[attr-defined]
    interpreter._convert_float = convert

    # A call of one jitted function from another patches triton.language again, which the launch has
    # already done: a third of the interpreter's time.
    def call(self, *args, **kwargs):
        if self.fn.__module__.startswith(
            "triton."
        ):  # tl.zeros, tl.max: their `core` is another module
            interpreter._patch_lang(self.fn)
        return self.rewrite()(*args, **kwargs)

    interpreter.InterpretedFunction.__call__ = call
