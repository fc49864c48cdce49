"""FP8 KV, append and decode attention, as compiled for sm_90, run in the PTX emulator: the code that no interpreter sees."""

from __future__ import annotations

from tests.kernels.compile_sm90 import run_compile_checks


def test_compiled_fp8_kv() -> None:
    errors = run_compile_checks("tests.kernels.attention_emulated_cases")
    assert len(errors) == 9
    for name, error in errors.items():
        assert error <= 1.0, f"{name}: error is {error:.2f} times the bound"
    assert all(error > 0 for name, error in errors.items() if name.startswith("decode"))
