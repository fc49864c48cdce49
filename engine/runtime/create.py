"""From an EngineConfig to a running executor: pick devices, check that it fits, load, compile, capture."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from engine.checkpoint.load import Loaded, LoadProgress, find_aliases, load_rank
from engine.checkpoint.memory import MemoryTable, check_fit, weight_bytes
from engine.checkpoint.source import CheckpointSource, DummySource, WeightSource
from engine.config import EngineConfig, ModelConfig
from engine.errors import EngineError
from engine.graph.build import build
from engine.graph.passes import run_passes
from engine.graph.plan import plan
from engine.runtime.buckets import decode_rows, prefill_buckets
from engine.runtime.phases import Phases
from engine.weights import WeightSpec

if TYPE_CHECKING:
    from engine.runtime.cpu import CpuExecutor
    from engine.runtime.gpu import GpuExecutor, GraphKey

log = logging.getLogger("engine")

CPU_CONTEXT = 8192  # default context on the CPU, where nobody waits for more
PROMPT_LOGITS_TOKENS = 256  # positions whose whole-vocabulary logits are held at once
GRAPH_BYTES = 1 << 30  # allowance for captured graphs, module images and the driver's own context


def pick_device(engine: EngineConfig) -> str:
    """ "cpu" or "cuda". Raises EngineError for --device cuda without a usable CUDA device."""
    if engine.device == "cpu" or (engine.device == "auto" and not torch.cuda.is_available()):
        return "cpu"
    if not torch.cuda.is_available():
        raise EngineError("--device cuda: torch sees no CUDA device; use --device cpu")
    return "cuda"


def _dtype(engine: EngineConfig, model: ModelConfig, device: str) -> torch.dtype:
    if engine.dtype != "auto":
        dtype: torch.dtype = getattr(torch, engine.dtype)
    elif device == "cpu":
        # bf16 halves the bytes of a token where the CPU multiplies it natively.
        dtype = torch.bfloat16 if torch.cpu._is_avx512_bf16_supported() else torch.float32
    else:
        dtype = torch.float16 if model.checkpoint_dtype == "float16" else torch.bfloat16
    if device == "cuda" and dtype is torch.float32:
        raise EngineError(
            "--dtype float32 runs on the CPU only; the kernels take bfloat16 or float16"
        )
    return dtype


def _source(engine: EngineConfig, model: ModelConfig, dtype: torch.dtype) -> WeightSource:
    if engine.load_format == "dummy":
        return DummySource(model, engine.seed, dtype)
    from engine.demo import resolve_model

    path: Path = resolve_model(engine.model)
    return CheckpointSource(path)


def _specs(model: ModelConfig, tp: int, shard_of: int | None = None) -> dict[str, WeightSpec]:
    return run_passes(build(model, phase="decode", rows=1, tp=tp, shard_of=shard_of)).weights


def _load(
    engine: EngineConfig,
    specs: dict[str, WeightSpec],
    source: WeightSource,
    devices: Sequence[torch.device],
    dtype: torch.dtype,
) -> list[dict[str, Loaded]]:
    ranks = range(len(devices))
    quantization = engine.quantization
    total = sum(weight_bytes(specs.values(), rank, dtype, quantization) for rank in ranks)
    loaded: list[dict[str, Loaded]] = []
    with LoadProgress(total) as progress:
        for rank, device in enumerate(devices):
            weights = load_rank(specs, source, rank, device, dtype, quantization, progress)
            if device in devices[:rank]:
                _share(weights, loaded[devices.index(device)], specs, rank, quantization)
            loaded.append(weights)
    return loaded


def _share(
    weights: dict[str, Loaded],
    twin: dict[str, Loaded],
    specs: dict[str, WeightSpec],
    rank: int,
    quantization: str | None,
) -> None:
    """Take what is replicated (norms, the embedding table) from another rank of the same device."""
    for name, spec in specs.items():
        if all(part.axis is None for part in spec.parts):
            weights[name] = twin[name]
    for name, (owner, first, last) in find_aliases(specs.values(), rank, quantization).items():
        weights[name] = Loaded(weights[owner].weight[first:last])


def create_cpu_executor(engine: EngineConfig, model: ModelConfig) -> CpuExecutor:
    """Every TP degree runs, ranks in lockstep."""
    from engine.runtime.cpu import CpuExecutor

    tp = engine.tensor_parallel_size
    model.shard(tp)
    if engine.shard_of:
        raise EngineError("--shard-of measures speed on GPUs; it means nothing with --device cpu")
    phases = Phases()
    dtype = _dtype(engine, model, "cpu")
    with phases.phase("check"):
        source = _source(engine, model, dtype)
        specs = _specs(model, tp)
    with phases.phase("load"):
        weights = _load(engine, specs, source, [torch.device("cpu")] * tp, dtype)
    executor = CpuExecutor(
        model, tp, weights, dtype=dtype, num_slots=engine.max_num_seqs,
        max_model_len=engine.max_model_len or min(model.max_position_embeddings, CPU_CONTEXT),
        phases=phases,
    )  # fmt: skip
    log.info("%s", phases.summary())
    return executor


def create_gpu_executor(
    engine: EngineConfig, model: ModelConfig, only: Sequence[GraphKey] | None = None
) -> GpuExecutor:
    """One rank a device; ranks may outnumber devices (virtual ranks: correct, not fast).

    only: compile just these graphs (tuning).
    """
    from engine.runtime.allocate import Sizes, allocate_ranks
    from engine.runtime.gpu import GpuExecutor, compile_graphs
    from engine.tune.choose import set_target

    tp = engine.tensor_parallel_size
    degree = engine.shard_of or tp
    model.shard(degree)
    dtype = _dtype(engine, model, "cuda")
    phases = Phases()
    with phases.phase("check"):
        devices = _devices(engine, tp)
        source = _source(engine, model, dtype)
        buckets = prefill_buckets(engine.max_model_len or model.max_position_embeddings)
        table = _fit(engine, model, devices, dtype, buckets)
        max_model_len = table.need.context
        buckets = prefill_buckets(max_model_len)
        log.info("memory per GPU:\n%s", table)
        properties = torch.cuda.get_device_properties(devices[0])
        set_target(properties.name, properties.multi_processor_count)
    with phases.phase("links"):
        if tp > 1:
            from engine.runtime.links import probe_links, require_peer_access

            require_peer_access(probe_links())
        bandwidth = _copy_bandwidth(devices[0])
    with phases.phase("graph"):
        graphs = compile_graphs(
            model, tp, rows=engine.max_num_seqs, buckets=buckets, shard_of=engine.shard_of,
            prompt_logits_bucket=_prompt_logits_bucket(max_model_len), only=only,
        )  # fmt: skip
        specs = _specs(model, tp, engine.shard_of)
    with phases.phase("load"):
        weights = _load(engine, specs, source, devices, dtype)
    with phases.phase("allocate"):
        sizes = Sizes(
            slots=engine.max_num_seqs, rows=decode_rows(engine.max_num_seqs), tokens=buckets[-1],
            max_model_len=max_model_len,
            arena_bytes=max(plan(graph, dtype.itemsize).arena_bytes for graph in graphs.values()),
        )  # fmt: skip
        ranks = allocate_ranks(model, weights, devices, dtype, sizes, degree)
    facts: dict[str, Any] = {
        "roof": {
            "copy_bandwidth": bandwidth,
            "weight_bytes": weight_bytes_per_token(specs, dtype, engine.quantization),
            "kv_bytes_per_token": table.need.kv_per_token,
        },
        "memory": str(table),
    }
    executor = GpuExecutor(
        model, ranks, graphs, num_slots=engine.max_num_seqs, max_model_len=max_model_len,
        buckets=buckets, phases=phases, eager=engine.enforce_eager,
        # Ranks that share a device also share its stream; there is nothing to overlap safely.
        pdl=len(set(devices)) == tp, facts=facts,
    )  # fmt: skip
    log.info("%s", phases.summary())
    return executor


def weight_bytes_per_token(
    specs: dict[str, WeightSpec], dtype: torch.dtype, quantization: str | None
) -> int:
    """Weight bytes that one decode step reads on the fullest rank: all but the embedding table's rows."""
    names = [name for name in specs if name != "model.embed_tokens.weight"]
    read = [specs[name] for name in names]
    return weight_bytes(read, 0, dtype, quantization)


def _prompt_logits_bucket(max_model_len: int) -> int:
    return min(PROMPT_LOGITS_TOKENS, max(16, ceil(max_model_len / 16) * 16))


def _devices(engine: EngineConfig, tp: int) -> list[torch.device]:
    present = torch.cuda.device_count()
    if tp > present and not engine.virtual_ranks:
        raise EngineError(
            f"--tp {tp} needs {tp} GPUs and {present} are visible; use --tp {present}, or "
            "--virtual-ranks to run several ranks on a GPU (correct, not fast)"
        )
    return [torch.device("cuda", rank % present) for rank in range(tp)]


def _fit(
    engine: EngineConfig,
    model: ModelConfig,
    devices: list[torch.device],
    dtype: torch.dtype,
    buckets: Sequence[int],
) -> MemoryTable:
    """Memory table of the deployment; raises EngineError when it does not fit."""
    tp = len(devices)
    shared = max(devices.count(device) for device in devices)
    totals = [
        torch.cuda.get_device_properties(device).total_memory // shared
        for device in range(torch.cuda.device_count())
    ]
    workspace = 0
    for rows, logits in ((buckets[-1], "last"), (_prompt_logits_bucket(buckets[-1]), "all")):
        graph = run_passes(
            build(model, phase="prefill", rows=rows, tp=tp, logits=logits, shard_of=engine.shard_of)  # type: ignore[arg-type]
        )
        workspace = max(workspace, plan(graph, dtype.itemsize).arena_bytes)
    if tp > 1:  # two exchange slots of one message per rank
        workspace += 2 * tp * buckets[-1] * model.hidden_size * dtype.itemsize
    # The table of a deployment measured with --shard-of is that of the degree whose shard it holds.
    degree = engine.shard_of or tp
    return check_fit(
        model, lambda n: _specs(model, n).values(), tp=degree, dtype=dtype,
        quantization=engine.quantization, max_model_len=engine.max_model_len,
        num_slots=engine.max_num_seqs, device_bytes=totals * (degree if engine.shard_of else 1),
        utilization=engine.gpu_memory_utilization, workspace_bytes=workspace, graph_bytes=GRAPH_BYTES,
    )  # fmt: skip


def _copy_bandwidth(device: torch.device) -> float:
    """Bytes per second of a large device-to-device copy, read + write: the roof of this very card.

    4 GiB, or what is free: smaller copies show 4 % less. About 30 ms.
    """
    free, _ = torch.cuda.mem_get_info(device)
    size = min(4 << 30, free // 3)
    with torch.cuda.device(device):
        a = torch.empty(size, dtype=torch.uint8, device=device).fill_(1)
        b = torch.empty_like(a)
        times = []
        for _ in range(8):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            b.copy_(a)
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e-3)
        del a, b
        torch.cuda.empty_cache()
    return 2 * size / sorted(times[2:])[3]
