"""Where the time of a decode step goes, by subtraction: the captured step with and without each stage.

    python -m bench.stages qwen2.5-72b:fp8:2 qwen2.5-72b:fp8:2:8

What a stage adds between its neighbours is what leaving it out saves; under programmatic dependent launch
that is less than it takes alone. `roof_us` is its bytes over the copy bandwidth of the same run. What is left
when the sum is taken from the step is overlap won (negative) or waiting that belongs to no stage.
"""

from __future__ import annotations

import argparse
from collections import Counter

from bench.rows import Rows
from engine.graph.capture import Program
from engine.tune.chain import Chain, Deployment


def measure(rows: Rows, deployment: Deployment, layers: int | None) -> None:
    """Rows `stage_added_us` per call of each stage, and the table."""
    chain = Chain(deployment, layers)
    try:
        program = chain.executor.lower(chain.graph)
        whole = chain.time(program)
        bandwidth = chain.executor.stats()["roof"]["copy_bandwidth"]
        kv = (
            2
            * chain.executor.ranks[0].state.k_cache[0][0, :, : deployment.context].nbytes
            * deployment.rows
        )
        line = program.launches[0]
        calls = Counter(launch.op.stage for launch in line)
        facts = dict(model=deployment.model, quantization=deployment.quantization or "none", tp=deployment.tp,
                     shard_of=deployment.shard_of, rows=deployment.rows, context=deployment.context)  # fmt: skip
        print(f"{deployment}, {chain.layers} layers: step {whole * 1e6:.1f} us", flush=True)
        total = 0.0
        for stage, count in calls.items():
            rest = Program(
                [[item for item in ranks if item.op.stage != stage] for ranks in program.launches],
                program.streams,
            )
            added = (whole - chain.time(rest)) / count
            rest.free()
            total += added * count
            moved = sum(launch.bytes for launch in line if launch.op.stage == stage) / count
            moved += kv if stage == "attention" else 0
            roof = moved / bandwidth
            rows.add("stage_added_us", added * 1e6, "us", algorithm=stage, bytes=int(moved),
                     share=roof / added if added > 0 else None, **facts)  # fmt: skip
            print(
                f"  {stage:<11} x{count:<3} adds {added * 1e6:7.2f} us a call, roof {roof * 1e6:7.2f} us"
                f" ({moved / 1e6:.2f} MB)",
                flush=True,
            )
        print(f"  sum {total * 1e6:.1f} us, {total / whole:.3f} of the step", flush=True)
    finally:
        chain.close()


def main() -> None:
    """Deployments as MODEL:QUANTIZATION:TP[:SHARD_OF]."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("deployments", nargs="+")
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--layers", type=int, help="default: 2 GiB worth of weights")
    args = parser.parse_args()
    rows = Rows("stages")
    for text in args.deployments:
        model, quantization, tp, *shard = text.split(":")
        deployment = Deployment(model, None if quantization == "none" else quantization, int(tp),
                                int(shard[0]) if shard else None, args.rows, args.context)  # fmt: skip
        measure(rows, deployment, args.layers)


if __name__ == "__main__":
    main()
