"""`python -m engine.profile`: where the time of a decode step and of a prefill goes, stage by stage.

Stages are those of the compiled graph. Two methods: `events` records time stamps inside the captured graphs, at the
stage boundaries of every Nth layer; `subtract` times the step with and without each stage, which keeps
programmatic dependent launch. Without a GPU it prints the performance model's prediction instead.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.config import EngineConfig, ModelConfig, with_layers
from engine.console import Parser, check_output, command, say
from engine.errors import EngineError
from engine.options import add_engine_options, count, engine_config

if TYPE_CHECKING:
    from engine.profiling.report import PhaseProfile

_EXAMPLES = """examples:
  python -m engine.profile --model qwen2.5-72b --load-format dummy --quantization fp8 --tp 2 \\
      --json profile.json --trace profile.trace.json --png profile.png
  python -m engine.profile --model qwen2.5-72b --load-format dummy -q fp8 --tp 8 --device cpu   # prediction
"""


def parser() -> Parser:
    """The command line."""
    p = Parser(prog="python -m engine.profile", description=__doc__, epilog=_EXAMPLES)
    group = p.add_argument_group("profile")
    group.add_argument(
        "--phase", default="decode,prefill", help="decode, prefill or both (default)"
    )
    group.add_argument(
        "--method", choices=("events", "subtract", "both"), default="events",
        help="events in the graph (default), the step with and without each stage, or both",
    )  # fmt: skip
    group.add_argument("--input-len", type=count, default=512, metavar="N",
                       help="tokens of the prompt, and in the KV cache at decode (default 512)")  # fmt: skip
    group.add_argument("--rows", "--batch-size", type=count, default=1, metavar="N",
                       help="sequences of a decode step (default 1)")  # fmt: skip
    group.add_argument(
        "--every", type=count, default=8, metavar="N",
        help="events: mark one layer in N (default 8; 1 marks all and costs the overlap of all)",
    )  # fmt: skip
    group.add_argument("--layers", type=count, metavar="N", help="a model of N layers only")
    group.add_argument(
        "--gpu", default="h200", help="of the prediction without a GPU (default h200)"
    )
    group.add_argument("--json", metavar="FILE", help="everything, as JSON")
    group.add_argument("--trace", metavar="FILE", help="timeline for ui.perfetto.dev")
    group.add_argument("--png", metavar="FILE", help="stacked bars (needs matplotlib)")
    group.add_argument("--from", dest="stored", metavar="FILE",
                       help="run nothing: the table, --trace and --png of a profile that --json wrote; other "
                            "flags do nothing then")  # fmt: skip
    group.add_argument("--quiet", action="store_true", help="no progress lines on stderr")
    add_engine_options(p)
    return p


def main(argv: list[str] | None = None) -> int:
    """Exit code of the command: see engine.console."""
    return command(parser(), _main, argv)


def _main(args: argparse.Namespace) -> int:
    from engine.llm import resolve
    from engine.profiling.session import Wanted, parse_phases

    methods = ("events", "subtract") if args.method == "both" else (args.method,)
    wanted = Wanted(parse_phases(args.phase), methods, args.rows, args.input_len, args.every)
    if args.png and Path(args.png).suffix not in ("", ".png"):
        raise EngineError(f"--png {args.png}: the name of a picture ends in .png")
    for flag in ("json", "trace", "png"):
        name = getattr(args, flag)
        if name and args.stored and Path(name).resolve() == Path(args.stored).resolve():
            raise EngineError(f"--{flag} {name} would overwrite what --from reads")
        check_output(f"--{flag}", name)
    if args.png:  # said before minutes of work, not after
        from engine.profiling.plots import pyplot

        pyplot("--png")
    if args.stored is not None:
        return _stored(args)
    config, model, _ = resolve(engine_config(args))
    if args.input_len > model.max_position_embeddings:
        raise EngineError(
            f"--input-len {args.input_len} is above the {model.max_position_embeddings} positions of {model.name}"
        )
    if args.layers is not None:
        if not 1 <= args.layers <= model.num_layers:
            raise EngineError(
                f"--layers {args.layers} is not 1 to {model.num_layers}, those of {model.name}"
            )
        model = with_layers(model, args.layers)
    from engine.runtime.create import pick_device

    if pick_device(config) == "cpu":
        say(
            f"no CUDA device in use: this is the performance model's prediction for {args.gpu} (--gpu)"
        )
        profiles, facts = _predicted(config, model, wanted, args.gpu)
    else:
        profiles, facts = _measured(config, model, wanted)
    print("\n\n".join(_tables(profiles, args.input_len)))
    _write(args, config, model, profiles, facts)
    return 0


def _measured(
    config: EngineConfig, model: ModelConfig, wanted: Any
) -> tuple[list[PhaseProfile], dict[str, Any]]:
    from engine.profiling.session import Session

    session = Session(config, model, wanted)
    try:
        counters = session.counters()
        print(f"copy bandwidth {session.copy_bandwidth / 1e12:.2f} TB/s; {_counters(counters)}\n")
        profiles = [p for phase in wanted.phases for p in session.profile(phase, say)]
        return profiles, {"counters": counters, "startup_s": session.executor.stats()["startup_s"]}
    finally:
        session.close()


def _predicted(
    config: EngineConfig, model: ModelConfig, wanted: Any, gpu: str
) -> tuple[list[PhaseProfile], dict[str, Any]]:
    from engine.graph.ir import allowed_algorithms
    from engine.model import gpu_named, predict
    from engine.profiling.report import from_prediction
    from engine.runtime.buckets import chunks, prefill_buckets

    profiles, source = [], ""
    for phase in wanted.phases:
        decode = phase == "decode"
        rows = chunks(wanted.input_len, prefill_buckets(wanted.input_len))[0][2]
        context = wanted.input_len if decode else 0
        p = predict(
            model, config.tensor_parallel_size, phase=phase, quantization=config.quantization,
            rows=wanted.rows if decode else rows, context=context, gpu=gpu_named(gpu),
            shard_of=config.shard_of, fp8_prefill=config.fp8_prefill(config.quantization),
            fp8_kv=config.fp8_kv, algorithms=allowed_algorithms(config.all_reduce),
        )  # fmt: skip
        profiles.append(from_prediction(p, context))
        source = p.constants.source
    print(f"constants from {source}\n")
    return profiles, {"constants": source}


def _tables(profiles: Sequence[PhaseProfile], input_len: int) -> list[str]:
    from engine.profiling.report import table

    return [table(p) + _first_chunk(p, input_len) for p in profiles]


def _first_chunk(profile: PhaseProfile, input_len: int) -> str:
    """A note where the prefill is not that of the whole prompt."""
    if profile.phase != "prefill" or input_len <= profile.rows:
        return ""
    return f"\n  note: the first chunk, of {profile.rows} tokens, of a prompt of {input_len}"


def _counters(counters: dict[str, Any]) -> str:
    nodes = ", ".join(f"{name}: {n}" for name, n in counters["kernel_nodes_per_rank"].items())
    return (
        f"a request ({counters['request']}): {counters['graph_launches']} graph launches, "
        f"{counters['host_syncs']} host synchronisations, {counters['allocations']} allocations; JIT compiles "
        f"after start-up: {counters['jit_compiles_after_start']}; kernels a graph: {nodes}"
    )


def _stored(args: argparse.Namespace) -> int:
    """The tables and pictures of a file of --json."""
    from engine.profiling.report import from_json

    if args.json:
        raise EngineError("--from reads what --json wrote, and writes no other")
    try:
        content = json.loads(Path(args.stored).read_text())
        profiles = [from_json(phase) for phase in content["phases"]]
        tables = _tables(profiles, int(content.get("input_len", 0)))
        title = f"{_title(content)}, {content.get('gpu', '')}, {content.get('date', '')}"
        if not tables:
            raise ValueError("it has no phases")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as e:
        raise EngineError(
            f"--from {args.stored}: not a profile that --json wrote ({type(e).__name__}: {e})"
        ) from None
    print("\n\n".join([title, *tables]))
    _pictures(args, content, profiles)
    return 0


def _title(content: dict[str, Any]) -> str:
    weights = content["quantization"].replace("none", "16-bit")
    title = f"{content['model']} {weights} TP={content['tp']}"
    return title + (f" (shards of {content['shard_of']})" if content["shard_of"] else "")


def _write(
    args: argparse.Namespace, config: EngineConfig, model: ModelConfig,
    profiles: Sequence[PhaseProfile], facts: dict[str, Any],
) -> None:  # fmt: skip
    from engine.bench.rows import environment
    from engine.profiling.report import as_json

    content = {
        "model": model.name, "layers": model.num_layers, "quantization": config.quantization or "none",
        "tp": config.tensor_parallel_size, "shard_of": config.shard_of, "input_len": args.input_len, **facts,
        "phases": [as_json(p) for p in profiles], **environment(),
    }  # fmt: skip
    if args.json:
        Path(args.json).write_text(json.dumps(content, indent=1) + "\n")
    _pictures(args, content, profiles)


def _pictures(
    args: argparse.Namespace, content: dict[str, Any], profiles: Sequence[PhaseProfile]
) -> None:
    """What --trace and --png ask for."""
    from engine.profiling import plots

    if args.trace:
        Path(args.trace).write_text(json.dumps(plots.trace(profiles)) + "\n")
    if args.png:
        plots.draw(profiles, _title(content), args.png)


if __name__ == "__main__":
    sys.exit(main())
