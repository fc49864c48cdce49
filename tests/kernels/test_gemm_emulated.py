"""The GEMM's compiled code without a GPU: TMA, barriers, wgmma and FP8 conversion run by
ptx_hopper.py."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.kernels.compile_sm90 import run_compile_checks


def test_compiled_gemm_agrees_with_the_reference_whenever_data_lands() -> None:
    """One rounding to the output type: RMS 2^-9 / sqrt(3) * 1.5 = 1.7e-3 for bf16, 2.1e-4 for
    fp16."""
    errors = run_compile_checks("tests.kernels.gemm_emulated_cases")
    assert len(errors) == 42
    for name, error in errors.items():
        assert error < (3e-4 if "fp16" in name else 2.2e-3), (name, error)


@pytest.mark.parametrize("swizzle", [32, 64, 128])
def test_emulated_swizzle_is_a_permutation_within_its_pattern(swizzle: int) -> None:
    from tests.kernels.ptx_hopper import _swizzled

    address = np.arange(8 * swizzle)
    assert np.array_equal(np.sort(_swizzled(address, swizzle)), address)
    assert not np.array_equal(_swizzled(address, swizzle), address)


def test_every_finite_e4m3_value_becomes_the_same_bf16() -> None:
    """The four-instruction conversion, instruction by instruction, on all 254 finite codes."""
    from engine.kernels.gemm_tile import E4M3_TO_BF16
    from tests.kernels.ptx_emulator import Memory, parse
    from tests.kernels.ptx_hopper import HopperBlock

    codes = torch.tensor([c for c in range(256) if c & 0x7F != 0x7F] + [0, 0], dtype=torch.uint8)
    asm = E4M3_TO_BF16.value.replace("$0", "%r0").replace("$1", "%r1").replace("$2", "%r2")
    ptx = f".visible .entry k() .reqntid {len(codes) // 4} {{ {asm} ret; $L__func_end0: }}"
    block = HopperBlock(parse(ptx), Memory([]), 16, {}, 0, maps={}, early=True)
    block.registers["%r2"] = codes.view(torch.int32).numpy().view(np.uint32).astype(np.uint64)
    block.run()
    words = np.stack([block.registers["%r0"], block.registers["%r1"]], 1).astype(np.uint32)
    got = torch.from_numpy(words.view(np.int32)).view(torch.bfloat16).reshape(-1)
    want = codes.view(torch.float8_e4m3fn).to(torch.bfloat16)
    assert torch.equal(got.view(torch.int16), want.view(torch.int16))  # also the sign of zero
