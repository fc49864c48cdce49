"""How a GEMV is walked: the config, what follows from it for a shape, and the choice when nothing was tuned.

Pure arithmetic, no kernels. The kernels: gemv_simple.py and gemv_ring.py; the launcher: gemv.py.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

import torch

from engine.errors import EngineError
from engine.kernels.integers import cdiv, next_power_of_2

SHARED_BYTES = (
    227 * 1024
)  # of one multiprocessor, for all its programs (1 KB of it reserved for each)
MAX_STAGES = 12
MIN_RING_BYTES = 96 * 1024  # of one multiprocessor: three times what Little's law asks for
WIDE_ROWS = 3  # from here on a config's `wide` walk, if it has one


@dataclass(frozen=True)
class Walk:
    """What of a ring's config may change with the row count, as no bit depends on it."""

    block_n: int
    stages: int
    programs: int
    programs_per_sm: int


@dataclass(frozen=True)
class GemvConfig:
    """How one weight matrix is walked.

    kernel: "simple" or "ring". block_n x block_k: weights per tile.
    Ring only: stages of the ring; warps_k warps that share an output row's K; at most `programs` programs in
    the grid, programs_per_sm of them on a multiprocessor (they share its 227 KB of shared memory).
    wide: the ring's walk for WIDE_ROWS activation rows and more (None: the same; a dict, as JSON has it, becomes
    a Walk). It cannot name block_k, num_warps or warps_k: they order the sums, and a row gives the same bits alone
    and among others.
    """

    kernel: str = "simple"
    block_n: int = 4
    block_k: int = 1024
    num_warps: int = 4
    stages: int = 0
    programs: int = 0
    warps_k: int = 0
    programs_per_sm: int = 0
    wide: Walk | None = None

    def __post_init__(self) -> None:
        if isinstance(self.wide, dict):
            object.__setattr__(self, "wide", Walk(**self.wide))


def rows_config(config: GemvConfig, rows: int) -> GemvConfig:
    """The config that `rows` activation rows run: `config` itself or its wide walk; it has no `wide`.

    Raises EngineError for a wide walk of another kernel than the ring.
    """
    if config.wide is None:
        return config
    if config.kernel != "ring":
        raise EngineError(
            f"GEMV: a wide walk is the ring's, this config's kernel is {config.kernel}"
        )
    walk = asdict(config.wide) if rows >= WIDE_ROWS else {}
    return replace(config, **walk, wide=None)


def sum_order(config: GemvConfig) -> dict[str, str | int]:
    """What a config's bits depend on, beside K: the fields that its wide walk shares."""
    return {name: getattr(config, name) for name in ("kernel", "block_k", "num_warps", "warps_k")}


def with_wide(config: GemvConfig, walk: GemvConfig) -> GemvConfig:
    """`config` with `walk` for WIDE_ROWS rows and more. Raises EngineError if that would change bits."""
    here, there = sum_order(config), sum_order(walk)
    changed = [
        f"{name} {here[name]} to {there[name]}" for name in here if here[name] != there[name]
    ]
    if changed:
        raise EngineError(
            f"GEMV: a walk for {WIDE_ROWS} rows and more that changes {', '.join(changed)} would change bits"
        )
    wide = Walk(walk.block_n, walk.stages, walk.programs, walk.programs_per_sm)
    return replace(config, wide=wide)


def keep_wide(config: GemvConfig, present: GemvConfig) -> GemvConfig:
    """`config` in the place of `present`: its wide walk stays if both sum in the same order."""
    same = sum_order(config) == sum_order(present)
    return replace(config, wide=present.wide if same else None)


@dataclass(frozen=True)
class RingShape:
    """What follows from a config and a shape. Shared memory in bytes for one program."""

    programs: int
    rows_per_program: int
    stage_x: bool
    stages: int  # at most the config's
    shared_bytes: int


def ring_rows(config: GemvConfig, n: int) -> int:
    """Output rows of a program: whole pairs (gate/up, RoPE, Lamport words), at most two rows of imbalance."""
    return 2 * cdiv(n, 2 * config.programs)


def ring_shape(
    config: GemvConfig,
    n: int,
    k: int,
    rows: int,
    x_dtype: torch.dtype,
    w_dtype: torch.dtype,
    polls: bool = False,
) -> RingShape:
    """Partition of N over the programs, and whether x fits in shared memory beside the ring.

    polls: x is staged whatever the ring loses by it, as it comes from messages (gemv_poll.py).

    Raises EngineError when the config does not fit the shape, the tensor-core tiles or shared memory.
    """
    size = w_dtype.itemsize
    block_n, block_k, stages = config.block_n, config.block_k, config.stages
    num_warps, warps_k = config.num_warps, config.warps_k
    if (k * size) % 16 or k % 8:
        raise EngineError(f"ring GEMV: K = {k} rows are not a multiple of 16 bytes; use simple")
    if size == 2 and x_dtype != w_dtype:
        raise EngineError(f"ring GEMV: x is {x_dtype} and W {w_dtype}; 16-bit types must be equal")
    warps_n = num_warps // max(1, warps_k)
    power = block_n & (block_n - 1) == 0
    if warps_n * warps_k != num_warps or block_n % (16 * warps_n) or not power:
        raise EngineError(
            f"ring GEMV: block_n {block_n} must be a power of two and a multiple of 16 x {num_warps}/{warps_k} warps"
        )
    if block_k % warps_k or (block_k // warps_k * size) % 128 or stages < 2:
        raise EngineError(
            f"ring GEMV: block_k {block_k} over {warps_k} warps must be multiples of 128 bytes, stages >= 2"
        )
    rows_per_program = ring_rows(config, n)
    padded_rows = next_power_of_2(rows)
    tile = block_n * block_k * size
    scratch = 4 * padded_rows * warps_k * block_n
    chunk = max(num_warps * 256, block_k)
    staged = 2 * padded_rows * cdiv(k, chunk) * chunk
    per_sm = config.programs_per_sm
    budget = SHARED_BYTES // per_sm - (1024 if per_sm > 1 else 0)
    if stages * tile + scratch > budget:
        raise EngineError(
            f"ring GEMV: {stages} stages of {block_n} x {block_k} take {stages * tile + scratch} bytes of "
            f"shared memory; a program has {budget}"
        )
    # Several rows of x: a shallower ring that leaves room for them, as long as enough stays in flight. Neither
    # changes the order of a sum.
    shallow = min(stages, (budget - scratch - staged) // tile)
    stage_x = shallow == stages or (shallow >= 3 and shallow * tile * per_sm >= MIN_RING_BYTES)
    if polls and shallow < 2:
        raise EngineError(
            f"ring GEMV: {rows} rows of {k} activations do not fit beside 2 stages of {tile} bytes"
        )
    stage_x = stage_x or polls
    stages = shallow if stage_x else stages
    shared = stages * tile + scratch + (staged if stage_x else 0)
    programs = cdiv(n, rows_per_program)
    return RingShape(programs, rows_per_program, stage_x, stages, shared)


def weight_name(dtype: torch.dtype | str) -> str:
    """ "fp8", "bf16" or "fp16". Raises EngineError for any other dtype."""
    names = {torch.float8_e4m3fn: "fp8", torch.bfloat16: "bf16", torch.float16: "fp16"}
    if isinstance(dtype, str) and dtype in names.values():
        return dtype
    if dtype not in names:
        raise EngineError(f"GEMV weights are bf16, fp16 or float8_e4m3fn, not {dtype}")
    return names[dtype]


def simple_config(n: int, k: int, weight_dtype: torch.dtype | str) -> GemvConfig:
    """A config of the plain kernel for any shape: 16 bytes a load, no more block than the shape has."""
    vector = 16 if weight_name(weight_dtype) == "fp8" else 8
    block_k = min(512, max(vector * 4, next_power_of_2(k)))
    return GemvConfig("simple", 8 if n >= 8 else 2, block_k, 4 if block_k >= 256 else 1)


def rows_block_n(config: GemvConfig, rows: int) -> int:
    """block_n of the plain kernel at `rows` rows: halved until the accumulators fit in 128 registers.

    The order of a sum over K does not depend on block_n, so the bits do not either.
    """
    block_n = config.block_n
    while block_n > 2 and block_n * config.block_k * rows > 128 * 32 * config.num_warps:
        block_n //= 2
    return block_n


def deepest_ring(config: GemvConfig, n: int, k: int, w_dtype: torch.dtype) -> GemvConfig | None:
    """`config` with as many stages as shared memory holds beside one staged row, and at all for 8 rows."""
    x_dtype = torch.bfloat16 if w_dtype.itemsize == 1 else w_dtype
    for stages in range(MAX_STAGES, 2, -1):
        deep = replace(config, stages=stages)
        try:
            ring_shape(deep, n, k, 8, x_dtype, w_dtype)
            shape = ring_shape(deep, n, k, 1, x_dtype, w_dtype)
        except EngineError:
            continue
        if shape.stage_x and shape.stages == stages:
            return deep
    return None


def heuristic(n: int, k: int, weight_dtype: torch.dtype | str, sm_count: int = 132) -> GemvConfig:
    """Config for an [n, k] weight when nothing was tuned, the same for every row count. Pure.

    One program a multiprocessor; 16 to 32 KB a tile and a ring of about 200 KB. Few rows a program (short
    shards) mean that all warps share K; many rows let two groups of warps split the rows as well.
    """
    name = weight_name(weight_dtype)
    size = 1 if name == "fp8" else 2
    w_dtype = {"fp8": torch.float8_e4m3fn, "bf16": torch.bfloat16, "fp16": torch.float16}[name]
    rows = 2 * cdiv(n, 2 * sm_count)
    block_n = 16 if rows <= 16 else 32 if rows <= 32 else 64
    bytes_k = 512 if block_n == 64 else 1024
    bytes_k = min(bytes_k, 1 << ((k * size).bit_length() - 1))
    warps_k = min(4 if block_n == 64 else 8, bytes_k // 128)
    if n >= 2 * sm_count and warps_k:
        warps = warps_k * min(block_n // 16, 8 // warps_k)
        ring = GemvConfig("ring", block_n, bytes_k // size, warps, 2, sm_count, warps_k, 1)
        return deepest_ring(ring, n, k, w_dtype) or simple_config(n, k, name)
    return simple_config(n, k, name)
