"""WeightSpecs -> tensors on a device: concat or interleave, cast, FP8, with tied tensors shared.

Each part goes straight into its rows of the final tensor, and FP8 is made part by part: the peak is
the final size plus one slice per loading thread.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

import torch
from tqdm import tqdm

from engine.checkpoint.source import CheckpointSource, WeightSource
from engine.errors import CheckpointError, EngineError, first_few
from engine.weights import Part, WeightSpec

Quantization = Literal["fp8"]
Progress = Callable[[int], None]  # called with the bytes of each finished weight, from any thread

FP8_DTYPE = torch.float8_e4m3fn
FP8_MAX = 448.0  # largest finite e4m3 value
# Elements whose fp32 copy quantisation holds at a time (256 MB).
_QUANTIZE_CHUNK = 64 << 20


@dataclass(frozen=True)
class Loaded:
    """weight: `spec.local_shape(rank)` in the activation dtype, or float8_e4m3fn with
    scale: fp32 [rows]; the weight's value is weight * scale[:, None]."""

    weight: torch.Tensor
    scale: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of weight and scale."""
        return self.weight.nbytes + (0 if self.scale is None else self.scale.nbytes)


def is_quantized(spec: WeightSpec, quantization: str | None) -> bool:
    """Whether this spec becomes FP8. Raises EngineError for a quantisation that is not known."""
    if quantization not in (None, "fp8"):
        raise EngineError(f"--quantization {quantization!r} is not supported; supported: fp8")
    return quantization == "fp8" and spec.quantizable


def quantize_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[N, K] -> (float8_e4m3fn [N, K], fp32 scale [N]): scale = max|row| / 448, round to nearest
    even.

    A row of zeros gets scale 1. A row with NaN or inf gets a non-finite scale, which loading
    refuses.
    """
    rows = max(1, _QUANTIZE_CHUNK // max(1, weight.shape[1]))
    quantized = torch.empty(weight.shape, dtype=FP8_DTYPE, device=weight.device)
    scale = torch.empty(weight.shape[0], dtype=torch.float32, device=weight.device)
    for first in range(0, weight.shape[0], rows):
        chunk = weight[first : first + rows].float()
        amax = torch.maximum(chunk.amax(1), -chunk.amin(1))  # no |chunk| in memory; NaN passes on
        # Below this a scale would be subnormal and its reciprocal infinite.
        amax = torch.where(amax < FP8_MAX * torch.finfo(torch.float32).tiny, FP8_MAX, amax)
        # A tensor divisor: CUDA multiplies by the reciprocal of a Python one, and the CPU divides.
        scale[first : first + rows] = s = amax / torch.full_like(amax, FP8_MAX)
        # s rounds to nearest, so the largest |w| / s can pass 448 by one fp32 ulp: clamp.
        quantized[first : first + rows] = chunk.div(s[:, None]).clamp_(-FP8_MAX, FP8_MAX)
    return quantized, scale


def materialize(
    spec: WeightSpec,
    source: WeightSource,
    rank: int,
    device: torch.device | str,
    dtype: torch.dtype,
    quantization: str | None = None,
) -> Loaded:
    """One weight of one rank. Raises CheckpointError for a value that is NaN or inf."""
    loaded, check = _materialize(spec, source, rank, torch.device(device), dtype, quantization)
    _refuse_nonfinite({spec.name: check})
    return loaded


def load_rank(
    specs: Mapping[str, WeightSpec] | Iterable[WeightSpec],
    source: WeightSource,
    rank: int,
    device: torch.device | str,
    dtype: torch.dtype,
    quantization: str | None = None,
    progress: Progress | None = None,
    threads: int | None = None,
) -> dict[str, Loaded]:
    """Every weight of one rank by spec name; see `load_ranks`."""
    return load_ranks(
        specs, source, {rank: device}, dtype, quantization, progress=progress, threads=threads
    )[rank]


def load_ranks(
    specs: Mapping[str, WeightSpec] | Iterable[WeightSpec],
    source: WeightSource,
    devices: Mapping[int, torch.device | str],
    dtype: torch.dtype,
    quantization: str | None = None,
    progress: Progress | None = None,
    threads: int | None = None,
) -> dict[int, dict[str, Loaded]]:
    """rank -> spec name -> weight, for the ranks of `devices`, in one pass over the files.

    `threads` threads take the weights in order, all ranks' slices of one before the next (default 4
    a CUDA rank up to 16; 1 on CPU, where torch itself uses every core). A `CheckpointSource` is
    first checked against the specs. A weight whose rows are rows of another (lm_head of tied
    embeddings) is a view of it. Raises CheckpointError: before any tensor is read, but for NaN or
    inf, found at the end.
    """
    specs = list(specs.values() if isinstance(specs, Mapping) else specs)
    if isinstance(source, CheckpointSource):
        source.index.check(specs)
        source.check_tied(specs)
        source.check_scales()
    where = {rank: torch.device(device) for rank, device in devices.items()}
    aliases = {rank: find_aliases(specs, rank, quantization) for rank in where}

    def load(rank: int, spec: WeightSpec) -> tuple[Loaded, torch.Tensor]:
        loaded, check = _materialize(spec, source, rank, where[rank], dtype, quantization)
        if progress is not None:
            progress(loaded.nbytes)
        return loaded, check

    on_cuda = sum(device.type == "cuda" for device in where.values())
    workers = threads or (min(16, 4 * on_cuda) if on_cuda else 1)
    with ThreadPoolExecutor(workers, thread_name_prefix="load") as pool:
        futures = {
            (rank, spec.name): pool.submit(load, rank, spec)
            for spec in specs
            for rank in where
            if spec.name not in aliases[rank]
        }
        try:
            results = {key: future.result() for key, future in futures.items()}
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    ranks = {}
    for rank, alias in aliases.items():
        _refuse_nonfinite({name: check for (r, name), (_, check) in results.items() if r == rank})
        loaded = {name: weight for (r, name), (weight, _) in results.items() if r == rank}
        for name, (owner, first, last) in alias.items():
            loaded[name] = Loaded(loaded[owner].weight[first:last])
        ranks[rank] = {spec.name: loaded[spec.name] for spec in specs}
    return ranks


def find_aliases(
    specs: Iterable[WeightSpec], rank: int, quantization: str | None = None
) -> dict[str, tuple[str, int, int]]:
    """name -> (owner, first row, last row) of each weight that is a run of rows of another weight's
    tensor on this rank: same HF tensor, one part, natural layout, not quantised, not padded."""
    owners: dict[str, tuple[WeightSpec, int, int]] = {}  # HF name -> widest holder so far
    plain: list[tuple[WeightSpec, int, int]] = []
    for spec in specs:
        if len(spec.parts) != 1 or is_quantized(spec, quantization):
            continue
        part = spec.parts[0]
        if part.layout != "natural" or part.axis not in (None, 0):
            continue
        start, stop = (0, part.shape[0]) if part.axis is None else part.ranges[rank]
        plain.append((spec, start, stop))
        held = owners.get(part.name)
        if held is None or stop - start > held[2] - held[1]:
            owners[part.name] = (spec, start, stop)
    aliases = {}
    for spec, start, stop in plain:
        owner, first, last = owners[spec.parts[0].name]
        if owner is not spec and first <= start and stop <= last:
            aliases[spec.name] = (owner.name, start - first, stop - first)
    return aliases


class LoadProgress:
    """A bar in GB on stderr over all ranks; silent when stderr is not a terminal. Context manager;
    call it with the bytes done."""

    def __init__(self, total_bytes: int, label: str = "load"):
        self._bar = tqdm(
            total=round(total_bytes / 1e9, 3), desc=label, unit="GB", file=sys.stderr,
            disable=None, bar_format="{desc}: {n:.1f}/{total:.1f} GB |{bar}| {elapsed}",
        )  # fmt: skip

    def __call__(self, nbytes: int) -> None:
        self._bar.update(nbytes / 1e9)

    def __enter__(self) -> LoadProgress:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()


def _materialize(
    spec: WeightSpec,
    source: WeightSource,
    rank: int,
    device: torch.device,
    dtype: torch.dtype,
    quantization: str | None,
) -> tuple[Loaded, torch.Tensor]:
    """The weight, and a scalar on the device that is finite if (and, short of overflow, only if)
    every value is: checked by the caller, so that loading does not wait for each tensor."""
    quantized = is_quantized(spec, quantization)
    shape = spec.local_shape(rank)
    weight = torch.empty(shape, dtype=FP8_DTYPE if quantized else dtype, device=device)
    scale = torch.empty(shape[0], dtype=torch.float32, device=device) if quantized else None
    rows = _rows_of_parts(spec, rank)
    check = torch.zeros((), device=device)
    for part, where in zip(spec.parts, rows):
        if scale is None:
            weight[where] = source.read(part, rank, device)
            check = check + weight[where].sum(dtype=torch.float32)
            continue
        stored = _stored_fp8(source, part, rank, device)
        weight[where], scale[where] = stored or quantize_rows(source.read(part, rank, device))
        check = check + scale[where].sum()
        del stored  # before the next part is read: one slice at a time
    return Loaded(weight, scale), check


def _stored_fp8(
    source: WeightSource, part: Part, rank: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor] | None:
    return source.read_fp8(part, rank, device) if isinstance(source, CheckpointSource) else None


def _rows_of_parts(spec: WeightSpec, rank: int) -> list[slice]:
    """Rows of the combined weight that each part fills."""
    counts = [_local_rows(part, rank) for part in spec.parts]
    if spec.combine == "interleave":
        assert len(set(counts)) == 1, f"{spec.name}: interleaved parts of {counts} rows"
        return [slice(i, None, len(counts)) for i in range(len(counts))]
    starts = [sum(counts[:i]) for i in range(len(counts))]
    return [slice(s, s + n) for s, n in zip(starts, counts)]


def _local_rows(part: Part, rank: int) -> int:
    if part.axis != 0:
        return part.shape[0]
    start, stop = part.ranges[rank]
    return stop - start


def _refuse_nonfinite(checks: Mapping[str, torch.Tensor]) -> None:
    if not checks:
        return
    finite = torch.stack(list(checks.values())).isfinite().tolist()  # one wait for all
    bad = [name for name, ok in zip(checks, finite) if not ok]
    if bad:
        raise CheckpointError(
            f"NaN or infinite values (or beyond the dtype's range) in {first_few(bad)}"
        )
