"""From an EngineConfig to a running executor: pick devices, check that it fits, load, compile, capture."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from engine.checkpoint.dummy import DummySource
from engine.checkpoint.load import Loaded, LoadProgress, find_aliases, load_ranks
from engine.checkpoint.memory import MemoryTable, check_fit, weight_bytes
from engine.checkpoint.source import CheckpointSource, WeightSource
from engine.config import EngineConfig, ModelConfig
from engine.demo import MODEL_FOLDER
from engine.errors import EngineError
from engine.graph import weight_specs
from engine.graph.build import Logits, build
from engine.graph.ir import Graph
from engine.graph.passes import run_passes
from engine.graph.plan import plan
from engine.runtime.bandwidth import copy_bandwidth
from engine.runtime.buckets import DECODE_ROWS, decode_rows, prefill_buckets, prompt_logits_bucket
from engine.runtime.host_memory import available_bytes, check_host_fit
from engine.runtime.phases import Phases
from engine.weights import WeightSpec

if TYPE_CHECKING:
    from engine.runtime.cpu import CpuExecutor
    from engine.runtime.gpu import GpuExecutor
    from engine.runtime.graphs import GraphKey

log = logging.getLogger("engine")

CPU_CONTEXT = 8192  # default context on the CPU, where nobody waits for more
GRAPH_BYTES = 1 << 30  # allowance for captured graphs, module images and the driver's own context


def pick_device(engine: EngineConfig) -> str:
    """ "cpu" or "cuda". Raises EngineError for --device cuda without a usable CUDA device.

    That auto means the CPU is said, except for the demo model on one rank, which is meant for it.
    """
    if engine.device == "cpu":
        return "cpu"
    if engine.device == "auto" and not torch.cuda.is_available():
        demo = Path(engine.model or MODEL_FOLDER).name == MODEL_FOLDER
        if not demo or engine.tensor_parallel_size > 1:
            log.warning("no CUDA device is visible: running on the CPU, as with --device cpu")
        return "cpu"
    if not torch.cuda.is_available():
        raise EngineError("--device cuda: torch sees no CUDA device; use --device cpu")
    return "cuda"


def _dtype(engine: EngineConfig, model: ModelConfig, device: str) -> torch.dtype:
    """The activation type. auto: the checkpoint's 16-bit type; on a CPU that does not multiply bf16
    natively, bf16 checkpoints run in fp32."""
    if engine.dtype != "auto":
        dtype: torch.dtype = getattr(torch, engine.dtype)
    elif model.checkpoint_dtype == "float16":
        dtype = torch.float16
    elif device == "cuda" or torch.cpu._is_avx512_bf16_supported():
        dtype = torch.bfloat16
    else:
        dtype = torch.float32
    if device == "cuda" and dtype is torch.float32:
        raise EngineError(
            "--dtype float32 runs on the CPU only; the kernels take bfloat16 or float16"
        )
    return dtype


@dataclass(frozen=True)
class _Model:
    """Where the weights come from, and in which form they are held."""

    config: ModelConfig
    source: WeightSource
    dtype: torch.dtype
    quantization: str | None  # asked for, or that of the checkpoint

    def specs(self, tp: int, shard_of: int | None = None) -> dict[str, WeightSpec]:
        """Weight specs at a TP degree, as the checkpoint stores them."""
        return self.adapt(weight_specs(self.config, tp, shard_of))

    def adapt(self, specs: dict[str, WeightSpec]) -> dict[str, WeightSpec]:
        """The specs as the checkpoint stores them: its `ignore` list is not quantised."""
        return (
            self.source.index.adapt(specs) if isinstance(self.source, CheckpointSource) else specs
        )


def _open(engine: EngineConfig, config: ModelConfig, device: str) -> _Model:
    """Open the checkpoint and hold it against the model: every fault of its files is found here."""
    dtype = _dtype(engine, config, device)
    if engine.load_format == "dummy":
        return _Model(config, DummySource(config, engine.seed, dtype), dtype, engine.quantization)
    from engine.demo import resolve_model

    source = CheckpointSource(resolve_model(engine.model))
    model = _Model(config, source, dtype, engine.quantization or source.index.quantization)
    specs = list(model.specs(1).values())
    source.index.check(specs)
    source.check_tied(specs)
    source.check_scales()
    return model


def _load(
    model: _Model, specs: dict[str, WeightSpec], devices: Sequence[torch.device]
) -> list[dict[str, Loaded]]:
    """Each rank's weights, in one pass over the files."""
    quantization = model.quantization
    total = sum(
        weight_bytes(specs.values(), rank, model.dtype, quantization)
        for rank in range(len(devices))
    )
    with LoadProgress(total) as progress:
        loaded = load_ranks(
            specs, model.source, dict(enumerate(devices)), model.dtype, quantization, progress
        )
    for rank, device in enumerate(devices):
        if device in devices[:rank]:
            _share(loaded[rank], loaded[devices.index(device)], specs, rank, quantization)
    return [loaded[rank] for rank in range(len(devices))]


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


def _for_cpu(weights: dict[str, Loaded], dtype: torch.dtype) -> dict[str, Loaded]:
    """FP8 weights as `dtype` (the CPU converts e4m3 far too slowly to do it at every token), and lm_head in
    fp32, so that logits are fp32 as on the GPU. Takes each weight out of `weights`, so that both forms of one
    matrix at most are held at a time."""
    result = {}
    for name in list(weights):
        loaded = weights.pop(name)
        if loaded.scale is not None:
            loaded = Loaded(loaded.weight.float().mul_(loaded.scale[:, None]).to(dtype))
        result[name] = loaded
    result["lm_head.weight"] = Loaded(result["lm_head.weight"].weight.float())
    return result


def create_cpu_executor(engine: EngineConfig, config: ModelConfig) -> CpuExecutor:
    """Every TP degree runs, ranks in lockstep."""
    from engine.runtime.cpu import CpuExecutor

    tp = engine.tensor_parallel_size
    config.shard(tp)
    if engine.all_reduce != "auto":
        raise EngineError(
            f"--all-reduce {engine.all_reduce} works on CUDA devices; on the CPU ranks read each other"
        )
    if engine.shard_of:
        raise EngineError("--shard-of measures speed on GPUs; it means nothing with --device cpu")
    phases = Phases()
    with phases.phase("check"):
        max_model_len = engine.max_model_len or min(config.max_position_embeddings, CPU_CONTEXT)
        config.check_context(max_model_len)
        model = _open(engine, config, "cpu")
        check_host_fit(
            config, model.specs(tp).values(), tp=tp, dtype=model.dtype, quantization=model.quantization,
            max_model_len=max_model_len, fp8_kv=engine.fp8_kv, available=available_bytes(),
        )  # fmt: skip
    with phases.phase("load"):
        weights = _load(model, model.specs(tp), [torch.device("cpu")] * tp)
        weights = [_for_cpu(rank, model.dtype) for rank in weights]
    with phases.phase("allocate"):
        executor = CpuExecutor(
            config, tp, weights, dtype=model.dtype, num_slots=engine.max_num_seqs,
            max_model_len=max_model_len, phases=phases,
            fp8_prefill=engine.fp8_prefill(model.quantization, cuda=False), fp8_kv=engine.fp8_kv,
        )  # fmt: skip
    log.info("%s", phases.summary())
    return executor


def create_gpu_executor(
    engine: EngineConfig, config: ModelConfig, only: Sequence[GraphKey] | None = None
) -> GpuExecutor:
    """One rank a device; ranks may outnumber devices (virtual ranks: correct, not fast).

    only: compile just these graphs (tuning).
    """
    from engine.runtime import nccl
    from engine.runtime.allocate import Sizes, allocate_ranks, gemm_workspace_sizes, maxima_pairs
    from engine.runtime.exchange import graph_exchange
    from engine.runtime.gpu import GpuExecutor
    from engine.runtime.graphs import compile_graphs, compile_tails
    from engine.runtime.jit import hash_compiler, settle_keys
    from engine.runtime.links import choose_transport, probe_links
    from engine.tune.choose import set_target

    tp = engine.tensor_parallel_size
    degree = engine.shard_of or tp
    config.shard(degree)
    phases = Phases()
    with phases.phase("check"):
        threading.Thread(target=hash_compiler, name="hash", daemon=True).start()
        settle_keys()
        devices = _devices(engine, tp)
        model = _open(engine, config, "cuda")
        dtype = model.dtype
        buckets = prefill_buckets(engine.max_model_len or config.max_position_embeddings)
        properties = torch.cuda.get_device_properties(devices[0])
        set_target(properties.name, properties.multi_processor_count)
    with phases.phase("links"):
        algorithms = Graph.algorithms
        if tp > 1:
            indices = [device.index for device in devices]
            force = None if engine.all_reduce == "auto" else engine.all_reduce
            transport = choose_transport(probe_links(sorted(set(indices))), indices, force)
            algorithms = transport.algorithms
            if transport.name == "nccl":
                nccl.require()
            log.info("all-reduce: %s (%s)", "/".join(algorithms), transport.reason)
    with phases.phase("check"):
        table = _fit(engine, model, devices, buckets, algorithms)
        max_model_len = table.need.context
        config.check_context(max_model_len)
        buckets = prefill_buckets(max_model_len)
        log.info("memory per GPU:\n%s", table)
        bandwidth = copy_bandwidth(devices[0])
    with phases.phase("graph"):
        graphs = compile_graphs(
            config, tp, rows=engine.max_num_seqs, buckets=buckets, shard_of=engine.shard_of,
            prompt_logits_bucket=prompt_logits_bucket(max_model_len), only=only,
            fp8_prefill=engine.fp8_prefill(model.quantization), fp8_kv=engine.fp8_kv,
            algorithms=algorithms, chunks=max_model_len > buckets[-1], adapt=model.adapt,
        )  # fmt: skip
        tails = compile_tails(
            config, tp, rows=engine.max_num_seqs, shard_of=engine.shard_of, algorithms=algorithms
        )
        plans = {key: plan(graph, dtype.itemsize) for key, graph in graphs.items()}
        specs = model.specs(tp, engine.shard_of)
    with phases.phase("load"):
        weights = _load(model, specs, devices)
    with phases.phase("allocate"):
        sizes = Sizes(
            slots=engine.max_num_seqs, rows=decode_rows(engine.max_num_seqs), tokens=buckets[-1],
            max_model_len=max_model_len,
            arena_bytes=max(buffers.arena_bytes for buffers in plans.values()),
            gemm=gemm_workspace_sizes(
                graphs.values(), lambda name: weights[0][name].weight.dtype, tuning=only is not None
            ),
            exchange=graph_exchange(graphs.values()), fp8_kv=engine.fp8_kv,
            maxima=maxima_pairs(
                graphs.values(), lambda name: weights[0][name].weight.dtype, tuning=only is not None
            ),
        )  # fmt: skip
        ranks = allocate_ranks(config, weights, devices, dtype, sizes, degree)
    facts: dict[str, Any] = {
        "roof": {
            "copy_bandwidth": bandwidth,
            "weight_bytes": weight_bytes_per_token(specs, dtype, model.quantization),
            "kv_bytes_per_token": table.need.kv_per_token,
        },
        "memory": str(table),
    }
    executor = GpuExecutor(
        config, ranks, graphs, plans, num_slots=engine.max_num_seqs, max_model_len=max_model_len,
        buckets=buckets, phases=phases, eager=engine.enforce_eager, lazy=engine.lazy_graphs,
        # Ranks that share a device also share its stream; there is nothing to overlap safely.
        pdl=len(set(devices)) == tp, facts=facts, tails=tails if only is None else None,
    )  # fmt: skip
    log.info("%s", phases.summary())
    counters = executor.counters
    log.info(
        "graphs: %d launches, %.2f GiB of device memory",
        counters["graph_nodes"], counters["graph_bytes"] / 2**30,
    )  # fmt: skip
    return executor


def weight_bytes_per_token(
    specs: dict[str, WeightSpec], dtype: torch.dtype, quantization: str | None
) -> int:
    """Weight bytes that one decode step reads on the fullest rank: all but the embedding table's rows."""
    names = [name for name in specs if name != "model.embed_tokens.weight"]
    read = [specs[name] for name in names]
    return weight_bytes(read, 0, dtype, quantization)


def _devices(engine: EngineConfig, tp: int) -> list[torch.device]:
    present = torch.cuda.device_count()
    if tp > present and not engine.virtual_ranks:
        raise EngineError(
            f"--tp {tp} needs {tp} GPUs and {present} are visible; use --tp {present}, or "
            "--virtual-ranks to run several ranks on a GPU (correct, not fast)"
        )
    return [torch.device("cuda", rank % present) for rank in range(tp)]


def _fit(
    engine: EngineConfig, model: _Model, devices: list[torch.device], buckets: Sequence[int],
    algorithms: tuple[str, ...],
) -> MemoryTable:  # fmt: skip
    """Memory table of the deployment; raises EngineError when it does not fit."""
    config, dtype, tp = model.config, model.dtype, len(devices)
    shared = max(devices.count(device) for device in devices)
    totals = [
        torch.cuda.get_device_properties(device).total_memory // shared
        for device in range(torch.cuda.device_count())
    ]
    workspace = 0
    wanted: list[tuple[int, Logits]] = [
        (buckets[-1], "last"), (prompt_logits_bucket(buckets[-1]), "all")
    ]  # fmt: skip
    for rows, logits in wanted:
        unfused = build(
            config, phase="prefill", rows=rows, tp=tp, logits=logits, shard_of=engine.shard_of,
            fp8_prefill=engine.fp8_prefill(model.quantization),
        )  # fmt: skip
        workspace = max(workspace, plan(run_passes(unfused), dtype.itemsize).arena_bytes)
    from engine.runtime.exchange import planned_exchange

    counts = (*DECODE_ROWS, *buckets)  # rows of a step's messages
    exchange = planned_exchange(tp, config.hidden_size, config.num_layers, counts, algorithms)
    # Sampling: counts and bias a slot, scores of R rows and their exchange.
    vocabulary = config.shard(engine.shard_of or tp).vocab_size
    workspace += (
        8 * engine.max_num_seqs * vocabulary
        + 8 * decode_rows(engine.max_num_seqs) * tp * vocabulary
    )
    # The table of a deployment measured with --shard-of is that of the degree whose shard it holds.
    degree = engine.shard_of or tp
    return check_fit(
        config, lambda n: model.specs(n).values(), tp=degree, dtype=dtype,
        quantization=model.quantization, max_model_len=engine.max_model_len,
        num_slots=engine.max_num_seqs, device_bytes=totals * (degree if engine.shard_of else 1),
        utilization=engine.gpu_memory_utilization, workspace_bytes=workspace,
        exchange_bytes=exchange.nbytes, graph_bytes=GRAPH_BYTES, fp8_kv=engine.fp8_kv,
    )  # fmt: skip
