"""The decode GEMV against its reference, in the interpreter here and on the card there."""

from __future__ import annotations

import pytest
import torch

from engine.errors import EngineError
from engine.kernels.epilogue import Push, Residual, RopeAppend, SiluMul, Store
from engine.kernels.gemv import KEY_FIELDS, GemvConfig, gemv, gemv_ref, heuristic
from engine.kernels.gemv_config import rows_block_n, simple_config, weight_name

FP8 = torch.float8_e4m3fn
POISON = float("nan")
SENTINEL = -32768  # 0x8000: the bits of -0.0, what an unwritten Lamport half-word holds


class Case:
    """Random operands of one linear layer. W rows have unit variance after the scale."""

    def __init__(self, rows, n, k, dtype, weight, device, *, norm=False, bias=False):
        self.x = torch.randn(rows, k, device=device).to(dtype)
        w = torch.randn(n, k, device=device)
        self.scale = None
        if weight == FP8:
            self.scale = torch.rand(n, device=device) + 0.5
        self.w = w.to(weight)
        self.norm = (torch.rand(k, device=device) + 0.5).to(dtype) if norm else None
        self.bias = torch.randn(n, device=device).to(dtype) if bias else None
        self.dtype, self.device, self.rows, self.n, self.k = dtype, device, rows, n, k

    def extras(self):
        return dict(scale=self.scale, bias=self.bias, norm_weight=self.norm, eps=1e-5)

    def run(self, epilogue, config=None, **options):
        gemv(self.x, self.w, epilogue, config=config, **self.extras(), **options)

    def expect(self, epilogue):
        return gemv_ref(self.x, self.w, epilogue, **self.extras())

    def poison(self, *shape, dtype=None):
        return torch.full(shape, POISON, device=self.device, dtype=dtype or self.dtype)

    def atol(self):
        """|y| is about sqrt(K) and up to 6 times that; fp32 sums of K terms in any order differ by less than
        K * 2^-24 * sqrt(K) (worst case, K <= 4096: 2^-12 sqrt(K)). Times the scale <= 1.5, the norm <= 1.5."""
        return 3 * self.k**0.5 * max(self.k, 256) * 2.0**-24


def rounding(dtype):
    """Half an ulp, relative, of one rounding to `dtype`; doubled, as both sides round."""
    return {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10, torch.float32: 2.0**-22}[dtype]


def assert_close(actual, expected, case):
    assert torch.isfinite(actual.float()).all()
    # fp16 and bf16 results that straddle a rounding boundary differ by one ulp.
    torch.testing.assert_close(
        actual, expected, rtol=rounding(expected.dtype), atol=case.atol(), check_dtype=True
    )


WEIGHTS = [
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.bfloat16, FP8),
    (torch.float16, FP8),
]
# N and K of whole blocks, K shards that are no multiple of a block, and tiny odd ones.
SHAPES = [(32, 2048), (24, 3696), (7, 112), (5, 40), (2, 16)]


@pytest.mark.parametrize("dtype, weight", WEIGHTS, ids=str)
@pytest.mark.parametrize("n, k", SHAPES, ids=str)
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_store(rows, n, k, dtype, weight, device):
    case = Case(rows, n, k, dtype, weight, device)
    epilogue = Store(case.poison(rows, n))
    case.run(epilogue)
    assert_close(epilogue.out, case.expect(epilogue), case)


@pytest.mark.parametrize("dtype, weight", WEIGHTS[1:3], ids=str)
@pytest.mark.parametrize("rows", [1, 8])
def test_fp32_logits_with_norm_and_bias(rows, dtype, weight, device):
    case = Case(rows, 30, 1040, dtype, weight, device, norm=True, bias=True)
    case.x *= 37.0  # far from unit RMS: a missing rstd cannot hide
    epilogue = Store(case.poison(rows, 30, dtype=torch.float32))
    case.run(epilogue)
    assert_close(epilogue.out, case.expect(epilogue), case)


@pytest.mark.parametrize("alias", [False, True])
@pytest.mark.parametrize("rows", [1, 5])
def test_residual(rows, alias, device):
    case = Case(rows, 18, 528, torch.bfloat16, FP8, device, norm=True)
    residual = torch.randn(rows, 18, device=device).to(torch.bfloat16) * 30
    out = residual if alias else case.poison(rows, 18)
    epilogue = Residual(residual, out)
    expected = case.expect(epilogue)
    case.run(epilogue)
    assert_close(out, expected, case)


@pytest.mark.parametrize("dtype, weight", WEIGHTS[::2], ids=str)
@pytest.mark.parametrize("rows", [1, 8])
def test_silu_mul(rows, dtype, weight, device):
    case = Case(rows, 22, 256, dtype, weight, device, norm=True)
    case.w = (case.w.float() / 16).to(weight)  # gate around 1: the curved part of the sigmoid
    epilogue = SiluMul(case.poison(rows, 11))
    case.run(epilogue)
    assert_close(epilogue.out, case.expect(epilogue), case)


def rope_case(case, slots, length, heads, kv_heads, dim):
    device, dtype = case.device, case.dtype
    angle = torch.rand(length, dim // 2, device=device) * 6.28
    cos_sin = torch.stack((angle.cos(), angle.sin()), -1).flatten(1).contiguous()
    cache = torch.full((slots, kv_heads, length, dim), 7.0, device=device, dtype=dtype)
    positions = torch.randperm(length, device=device)[:slots].to(torch.int32)
    row_slots = torch.randperm(slots, device=device)[: case.rows].to(torch.int32)
    return RopeAppend(
        case.poison(case.rows, heads * dim),
        cache,
        cache.clone(),
        cos_sin,
        positions,
        row_slots,
        heads,
        kv_heads,
        dim,
    )


@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize(
    "rows, heads, kv_heads, dim", [(1, 2, 1, 16), (4, 3, 2, 16), (8, 2, 2, 32)]
)
def test_rope_append(rows, heads, kv_heads, dim, prefetch, device):
    n = (heads + 2 * kv_heads) * dim
    case = Case(rows, n, 144, torch.bfloat16, FP8, device, norm=True, bias=True)
    epilogue = rope_case(case, slots=9, length=12, heads=heads, kv_heads=kv_heads, dim=dim)
    if rows > 1:
        epilogue.row_slots[rows // 2] = -1
    reference = RopeAppend(**{**vars(epilogue), "k_cache": epilogue.k_cache.clone()})
    reference = RopeAppend(**{**vars(reference), "v_cache": epilogue.v_cache.clone()})
    expected = case.expect(reference)
    case.run(epilogue, prefetch=prefetch)
    real = epilogue.row_slots >= 0
    assert_close(epilogue.q_out[real], expected[real], case)
    assert torch.isfinite(epilogue.q_out).all()  # padding rows: any finite value
    # The whole cache: the written lines match, and nothing else changed.
    assert_close(epilogue.k_cache, reference.k_cache, case)
    assert_close(epilogue.v_cache, reference.v_cache, case)
    touched = (epilogue.k_cache != 7).any(-1).sum().item()
    assert touched == int(real.sum()) * kv_heads


@pytest.mark.parametrize("rows, rank, world", [(1, 0, 2), (3, 1, 2), (8, 2, 3)])
def test_push(rows, rank, world, device):
    n = 14
    case = Case(rows, n, 256, torch.bfloat16, FP8, device)
    case.w[3] = 0.0
    case.w[5] = (
        case.w[5].float().mul(0).neg().to(FP8)
    )  # -0.0 weights: sums of -0.0 must arrive as +0.0
    case.x[0] = case.x[0].abs()
    slot = 64
    message = rows * n
    half_words = slot // 2 + world * message + 16
    buffers = [
        torch.full((half_words,), SENTINEL, dtype=torch.int16, device=device) for _ in range(world)
    ]
    table = torch.tensor([b.data_ptr() for b in buffers], dtype=torch.int64, device=device)
    epilogue = Push(table, slot, rank, world)
    case.run(epilogue)
    expected = case.expect(epilogue)
    first = slot // 2 + rank * message
    for buffer in buffers:
        got = buffer[first : first + message].view(torch.bfloat16).view(rows, n)
        assert_close(got, expected, case)
        assert (got.view(torch.int16) != SENTINEL).all()
        untouched = torch.cat((buffer[:first], buffer[first + message :]))
        assert (untouched == SENTINEL).all()


@pytest.mark.parametrize("dtype, weight", [WEIGHTS[0], WEIGHTS[2]], ids=str)
def test_rows_do_not_change_bits(dtype, weight, device):
    """Row r alone, among 3 and among 8 gives the same bits, with every part of the kernel on."""
    case = Case(8, 12, 1072, dtype, weight, device, norm=True, bias=True)
    full = Store(case.poison(8, 12, dtype=torch.float32))
    case.run(full)
    for rows in (1, 3):
        for first in (0, 2, 5):
            x = case.x[first : first + rows].contiguous()
            out = case.poison(rows, 12, dtype=torch.float32)
            gemv(x, case.w, Store(out), **case.extras())
            assert torch.equal(out, full.out[first : first + rows])


@pytest.mark.parametrize("block_n, block_k, warps", [(2, 256, 1), (8, 512, 4), (16, 128, 2)])
def test_configs_agree(block_n, block_k, warps, device):
    case = Case(3, 20, 1072, torch.bfloat16, torch.bfloat16, device, norm=True)
    epilogue = SiluMul(case.poison(3, 10))
    case.run(epilogue, GemvConfig("simple", block_n, block_k, warps))
    assert_close(epilogue.out, case.expect(epilogue), case)


def test_large_activations(device):
    """bf16 activations beyond fp16's 65504 stay finite and right with FP8 weights."""
    case = Case(2, 16, 512, torch.bfloat16, FP8, device)
    case.x[0, 7] = 3.0e5
    case.x[1] *= 1e-4
    epilogue = Store(case.poison(2, 16, dtype=torch.float32))
    case.run(epilogue)
    expected = case.expect(epilogue)
    # bf16 operands are exact in either arithmetic: only fp32 sums differ.
    scale = expected.abs().amax(1, keepdim=True)
    assert ((epilogue.out - expected).abs() <= scale * 512 * 2.0**-22).all()


def test_bad_calls(device):
    case = Case(1, 7, 32, torch.bfloat16, torch.bfloat16, device)
    with pytest.raises(EngineError, match="odd"):
        case.run(SiluMul(case.poison(1, 3)))
    with pytest.raises(EngineError, match="1 to 8 rows"):
        gemv(case.x.expand(9, 32), case.w, Store(case.poison(9, 7)))
    with pytest.raises(EngineError, match="their K differ"):
        gemv(case.x[:, :16], case.w, Store(case.poison(1, 7)))
    with pytest.raises(EngineError, match="float8_e4m3fn"):
        weight_name(torch.float32)


def test_key_has_no_rows():
    """choose() must hand all row counts of a weight the same config: it decides the order of the sums."""
    assert "rows" not in KEY_FIELDS
    for weight in ("fp8", torch.bfloat16):
        for n, k in [(29568, 8192), (8192, 3696), (152064, 3584), (1024, 512), (6, 40)]:
            assert isinstance(heuristic(n, k, weight), GemvConfig)
            for rows in range(1, 9):
                assert rows_block_n(simple_config(n, k, weight), rows) >= 2
