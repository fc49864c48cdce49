"""WeightSpecs -> tensors on a device: concat or interleave, cast, FP8, with tied tensors shared.

Each part goes straight into its rows of the final tensors, and FP8 is made part by part: the peak is the final size plus
one tensor (for each thread that makes random weights), beside the buffers of read_ahead.py.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain
from queue import SimpleQueue

import torch
from tqdm import tqdm

from engine.checkpoint.fp8 import FP8_DTYPE, quantize_rows, row_maxima
from engine.checkpoint.source import CheckpointSource, WeightSource, read_pieces
from engine.errors import CheckpointError, EngineError, first_few
from engine.weights import Part, WeightSpec

# A weight's `_extremes`, by rank: looked at at the end, so that loading does not wait for each weight.
_Checks = dict[int, tuple[torch.Tensor, ...]]
Progress = Callable[[int], None]  # called with the bytes of each finished weight, from any thread


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


def materialize(
    spec: WeightSpec,
    source: WeightSource,
    rank: int,
    device: torch.device | str,
    dtype: torch.dtype,
    quantization: str | None = None,
) -> Loaded:
    """One weight of one rank. Raises CheckpointError for a value that is NaN or inf."""
    where = {rank: torch.device(device)}
    loaded = _allocate(spec, rank, where[rank], dtype, quantization)
    held = {rank: loaded}
    _fill(spec, source, held, where)
    _refuse_nonfinite(source, [spec], [held], [{rank: _extremes(loaded)}])
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

    A checkpoint is read ahead, many reads at once, and one thread puts what was read in its place.
    Other weights are made by `threads` threads (default: 1 on CPU, where torch itself uses every core, else 4 a rank, 8
    to 16). A `CheckpointSource` is first checked against the specs. A weight whose rows are rows of another (lm_head of
    tied embeddings) is a view of it. Raises CheckpointError: before any tensor is read, but for a file that changes
    meanwhile, and NaN or inf, found at the end.
    """
    specs = list(specs.values() if isinstance(specs, Mapping) else specs)
    if isinstance(source, CheckpointSource):
        source.index.check(specs)
        source.check_tied(specs)
        source.check_scales()
    where = {rank: torch.device(device) for rank, device in devices.items()}
    aliases = {rank: find_aliases(specs, rank, quantization) for rank in where}
    own = [{rank: where[rank] for rank in where if s.name not in aliases[rank]} for s in specs]
    on_cuda = {device for device in where.values() if device.type == "cuda"}
    streams = [torch.cuda.current_stream(device) for device in on_cuda]
    beside = {device: torch.cuda.Stream(device) for device in on_cuda}
    # A mode of threads, and tensors made in it are filled in it.
    inference = torch.is_inference_mode_enabled()

    # Memory is found while the first weights are read into what was found; None: no more is. Not futures: Ctrl-C inside
    # one's `set_result` leaves who waits for it asleep.
    room: list[SimpleQueue[dict[int, Loaded] | None]] = [SimpleQueue() for _ in specs]

    def load(which: Iterable[int]) -> list[_Checks]:
        found = []
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode(inference))
            for stream in streams:
                stack.enter_context(torch.cuda.stream(stream))
            for i in which:
                weights = room[i].get()
                if weights is None:
                    break
                _fill(specs[i], source, weights, where)
                found.append({r: _extremes(weights[r], beside.get(where[r])) for r in weights})
                if progress is not None:
                    for loaded in weights.values():
                        progress(loaded.nbytes)
        return found

    threads = threads or (min(16, max(8, 4 * len(where))) if on_cuda else 1)
    jobs: list[Iterable[int]] = [[i] for i in range(len(specs))]
    reading: contextlib.AbstractContextManager[Callable[[], None]]
    reading = contextlib.nullcontext(lambda: None)
    if isinstance(source, CheckpointSource):
        reads = (r for spec, of in zip(specs, own) for r in _reads(spec, source, of, quantization))
        # One job: each end of one wakes this thread, which then takes the GIL.
        reading, threads, jobs = source.read_ahead(reads), 1, [range(len(specs))]
    held: list[dict[int, Loaded]] = []
    with reading as stop, ThreadPoolExecutor(threads) as pool:
        try:
            checks = pool.map(load, jobs)
            for spec, of, place in zip(specs, own, room):
                held.append(
                    {r: _allocate(spec, r, device, dtype, quantization) for r, device in of.items()}
                )
                place.put(held[-1])
            found = list(chain.from_iterable(checks))
        except BaseException:
            stop()
            for place in room:
                place.put(None)
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    for device in on_cuda:
        torch.cuda.synchronize(device)
    _refuse_nonfinite(source, specs, held, found)
    ranks = {}
    for rank, alias in aliases.items():
        loaded = {spec.name: of[rank] for spec, of in zip(specs, held) if rank in of}
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
            total=total_bytes, desc=label, unit="GB", unit_scale=1e-9, file=sys.stderr,
            disable=None, bar_format="{desc}: {n:.1f}/{total:.1f} GB |{bar}| {elapsed}",
        )  # fmt: skip

    def __call__(self, nbytes: int) -> None:
        self._bar.update(nbytes)

    def __enter__(self) -> LoadProgress:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()


def _allocate(
    spec: WeightSpec,
    rank: int,
    device: torch.device,
    dtype: torch.dtype,
    quantization: str | None,
) -> Loaded:
    """Room for one weight of one rank."""
    shape = spec.local_shape(rank)
    if not is_quantized(spec, quantization):
        return Loaded(torch.empty(shape, dtype=dtype, device=device))
    scale = torch.empty(shape[0], dtype=torch.float32, device=device)
    return Loaded(torch.empty(shape, dtype=FP8_DTYPE, device=device), scale)


def _reads(
    spec: WeightSpec,
    source: CheckpointSource,
    devices: dict[int, torch.device],
    quantization: str | None,
) -> Iterator[tuple[Part, dict[int, torch.device]]]:
    """What `_fill` reads for ranks that hold the weight on these devices, in its order."""
    fp8 = is_quantized(spec, quantization)
    for part in spec.parts if devices else ():
        yield part, devices
        if fp8 and not source.keeps_fp8(part) and _cuts_rows(part, devices):
            yield _whole(part), {0: _first(devices)}


def _fill(
    spec: WeightSpec,
    source: WeightSource,
    held: Mapping[int, Loaded],
    devices: Mapping[int, torch.device],
) -> None:
    """Every part into its rows of each rank's weight."""
    rows = {rank: _rows_of_parts(spec, rank) for rank in held}
    where = {rank: devices[rank] for rank in held}
    fp8 = all(loaded.scale is not None for loaded in held.values())
    for i, part in enumerate(spec.parts):
        into = {rank: _rows(loaded, rows[rank][i]) for rank, loaded in held.items()}
        weights = {rank: target.weight for rank, target in into.items()}
        pieces = read_pieces(source, part, where, fp8=fp8, into=weights)
        largest = None
        if fp8 and any(scale is None for _, scale in pieces.values()) and _cuts_rows(part, where):
            # Of whole rows, so that FP8 values are the same at every TP degree.
            largest = row_maxima(source.read(_whole(part), 0, _first(where)))
        for rank, target in into.items():
            _place(target, *pieces.pop(rank), largest)


def _cuts_rows(part: Part, ranks: Iterable[int]) -> bool:
    """Whether a rank has some columns of each row only."""
    return part.axis == 1 and any(part.ranges[rank] != (0, part.shape[1]) for rank in ranks)


def _whole(part: Part) -> Part:
    return replace(part, axis=None, ranges=())


def _first(devices: Mapping[int, torch.device]) -> torch.device:
    return next(iter(devices.values()))


def _rows(loaded: Loaded, rows: slice) -> Loaded:
    return Loaded(loaded.weight[rows], None if loaded.scale is None else loaded.scale[rows])


def _place(
    into: Loaded, value: torch.Tensor, scale: torch.Tensor | None, largest: torch.Tensor | None
) -> None:
    """Put a part into its rows, if it is not there yet, quantised if `into` is and it is not. largest: see
    `quantize_rows`."""
    if into.scale is not None:
        if scale is None:
            value, scale = quantize_rows(
                value, None if largest is None else largest.to(value.device)
            )
        into.scale.copy_(scale)
    if value.data_ptr() != into.weight.data_ptr():
        into.weight.copy_(value)


def _extremes(loaded: Loaded, beside: torch.cuda.Stream | None = None) -> tuple[torch.Tensor, ...]:
    """Scalars that tell whether a matrix has NaN or infinite values (`_is_bad`): no sum that could overflow, no mask as
    large as it. None of a vector or a scale: `_which_are_bad` looks at their values. beside: a stream to find them in,
    while the current one goes on."""
    if not loaded.weight.numel() or loaded.weight.ndim == 1:
        return ()
    if beside is not None:
        beside.wait_stream(torch.cuda.current_stream(beside.device))
        with torch.cuda.stream(beside):
            return _extremes(loaded)
    if loaded.scale is None:
        return loaded.weight.aminmax()
    return loaded.weight.view(torch.int8).amax(), loaded.weight.view(torch.uint8).amax()


def _is_bad(loaded: Loaded, extremes: Sequence[float]) -> bool:
    if loaded.scale is None or not extremes:
        return not all(map(math.isfinite, extremes))
    signed, unsigned = extremes
    return signed == 0x7F or unsigned == 0xFF  # NaN of e4m3


def _rows_of_parts(spec: WeightSpec, rank: int) -> list[slice]:
    """Rows of the combined weight that each part fills."""
    counts = [_row_count(part, rank) for part in spec.parts]
    if spec.combine == "interleave":
        assert len(set(counts)) == 1, f"{spec.name}: interleaved parts of {counts} rows"
        return [slice(i, None, len(counts)) for i in range(len(counts))]
    starts = [sum(counts[:i]) for i in range(len(counts))]
    return [slice(s, s + n) for s, n in zip(starts, counts)]


def _row_count(part: Part, rank: int) -> int:
    if part.axis != 0:
        return part.shape[0]
    start, stop = part.ranges[rank]
    return stop - start


def _refuse_nonfinite(
    source: WeightSource,
    specs: Sequence[WeightSpec],
    held: Sequence[Mapping[int, Loaded]],
    checks: Sequence[_Checks],
) -> None:
    """CheckpointError that names the HF tensors with values that are NaN or infinite."""
    bad: dict[str, None] = {}
    for rank in dict.fromkeys(rank for weights in held for rank in weights):
        here = [i for i, weights in enumerate(held) if rank in weights]
        wrong = _which_are_bad([held[i][rank] for i in here], [checks[i][rank] for i in here])
        for i in (i for i, is_wrong in zip(here, wrong) if is_wrong):
            parts = [_rows(held[i][rank], rows) for rows in _rows_of_parts(specs[i], rank)]
            wrong_parts = _which_are_bad(parts, [_extremes(part) for part in parts])
            bad.update({p.name: None for p, w in zip(specs[i].parts, wrong_parts) if w})
    if bad:
        where = f"{source.index.directory}: " if isinstance(source, CheckpointSource) else ""
        raise CheckpointError(
            f"{where}NaN or infinite values (or beyond the dtype's range) in {first_few(list(bad))}"
        )


def _which_are_bad(
    weights: Sequence[Loaded], extremes: Sequence[tuple[torch.Tensor, ...]]
) -> list[bool]:
    """Of weights on one device. It is waited for some times, not for each weight, unless a vector or a scale is bad: they
    are looked at together, as they are many and small."""
    scalars: dict[torch.dtype, list[torch.Tensor]] = {}
    for scalar in (scalar for each in extremes for scalar in each):
        scalars.setdefault(scalar.dtype, []).append(scalar)
    values = {kind: iter(torch.stack(of).tolist()) for kind, of in scalars.items()}
    vectors = [[v for v in (w.weight, w.scale) if v is not None and v.ndim == 1] for w in weights]
    every = [vector for each in vectors for vector in each]
    finite = not every or bool(torch.cat(every).isfinite().all())
    return [
        _is_bad(weight, [next(values[scalar.dtype]) for scalar in of])
        or not (finite or all(bool(v.isfinite().all()) for v in of_weight))
        for weight, of, of_weight in zip(weights, extremes, vectors)
    ]
