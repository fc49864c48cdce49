"""Where the time of a decode step goes, by subtraction: the captured step with and without each stage.

    python -m bench.stages qwen2.5-72b:fp8:2 qwen2.5-72b:fp8:2:8

The method is `engine.profiling.subtract`, here on a model of a few layers and with rows written for bench/results.
`roof_us` is a stage's bytes over the copy bandwidth of the same run. What is left when the sum is taken from the
step is overlap won (negative) or waiting that belongs to no stage.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace

from bench.deployment import each, parse, parser, script
from bench.rows import Rows
from engine.kernels import gemv_poll
from engine.model import GPUS
from engine.profiling.report import stage_roofs
from engine.profiling.subtract import added_by_stage
from engine.tune.chain import Chain, Deployment


def measure(rows: Rows, args: argparse.Namespace, text: str) -> None:
    """Rows `stage_added_us` per call of each stage, and the table."""
    engine = parse(text)
    deployment = Deployment(text.split(":")[0], engine.quantization, engine.tensor_parallel_size,
                            engine.shard_of, args.rows, args.context)  # fmt: skip
    chain = Chain(deployment, args.layers)
    try:
        program = chain.executor.lower(chain.graph)
        whole = chain.device.step_s(program)
        bandwidth = chain.executor.stats()["roof"]["copy_bandwidth"]
        roofs = stage_roofs(
            chain.executor.config, deployment.tp, phase="decode", rows=deployment.rows,
            context=deployment.context, fp8=deployment.quantization == "fp8",
            shard_of=deployment.shard_of, gpu=replace(GPUS["h200"], copy=bandwidth),
        )  # fmt: skip
        facts = dict(model=deployment.model, quantization=deployment.quantization or "none", tp=deployment.tp,
                     shard_of=deployment.shard_of, rows=deployment.rows, context=deployment.context)  # fmt: skip
        print(f"{deployment}, {chain.layers} layers: step {max(whole) * 1e6:.1f} us", flush=True)
        total = 0.0
        for stage in added_by_stage(chain.device, program, whole):
            added, roof = max(stage.us) / stage.calls, roofs[stage.stage]
            total += max(stage.us)
            rows.add("stage_added_us", added, "us", algorithm=stage.stage, bytes=roof.bytes // stage.calls,
                     share=roof.us / stage.calls / added if added > 0 else None, **facts)  # fmt: skip
            kept = f"; {stage.kept} bare pushes or polls kept" if stage.kept else ""
            print(
                f"  {stage.stage:<11} x{stage.calls:<3} adds {added:7.2f} us a call, roof "
                f"{roof.us / stage.calls:7.2f} us ({roof.bytes / stage.calls / 1e6:.2f} MB){kept}",
                flush=True,
            )
        print(f"  sum {total:.1f} us, {total / max(whole) * 1e-6:.3f} of the step", flush=True)
    finally:
        chain.close()


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: see bench.deployment."""
    options = parser("stages", __doc__)
    options.add_argument("--rows", type=int, default=1)
    options.add_argument("--context", type=int, default=512)
    options.add_argument("--layers", type=int, help="default: 2 GiB worth of weights")
    options.add_argument("--poll-bytes", type=int, default=gemv_poll.MOST_BYTES,
                        help="messages up to here are polled by the next GEMV (0: by a launch)")  # fmt: skip

    def body(args: argparse.Namespace) -> int:
        gemv_poll.MOST_BYTES = args.poll_bytes
        rows = Rows("stages")
        return each(args.deployments, lambda text: measure(rows, args, text))

    return script(options, body, argv)


if __name__ == "__main__":
    sys.exit(main())
