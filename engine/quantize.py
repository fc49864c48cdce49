"""`python -m engine.quantize SRC DST`: a BF16/FP16/FP32 checkpoint -> an FP8 one, as
compressed-tensors.

Every linear layer of the decoder becomes float8_e4m3fn [N, K] with one scale a row (`weight_scale`
[N, 1], format "float-quantized", dynamic per-token activations); embeddings, norms, biases and
lm_head stay. This engine and transformers (with the compressed-tensors package) load the result to
the same weights: scales are bf16, the type transformers holds them in, rounded up, so that no value
passes 448.
"""

from __future__ import annotations

import sys
from pathlib import Path

from engine.console import Parser, check_above_zero, run, say
from engine.errors import EngineError
from engine.presets import PRESETS


def main(argv: list[str] | None = None) -> int:
    """Prints the error of each layer. Exit code of the command: see engine.console."""
    return run(lambda: _main(argv))


def _main(argv: list[str] | None) -> int:
    parser = Parser(prog="python -m engine.quantize", description=__doc__)
    parser.add_argument(
        "source", metavar="SRC", help="model directory or hub id (BF16, FP16, FP32)"
    )
    parser.add_argument("destination", metavar="DST", type=Path, help="directory to write")
    parser.add_argument(
        "--shard-gb",
        type=float,
        default=5.0,
        help="largest file, in GB, unless one tensor is larger (default 5)",
    )
    args = parser.parse_args(argv)
    check_above_zero("--shard-gb", args.shard_gb)
    if args.source in PRESETS and not Path(args.source).is_dir():
        raise EngineError(
            f"SRC {args.source} is a preset, a shape without weights: give a model directory or a hub id"
        )
    # torch comes with them, in a second or two: not before --help, and inside `run`, which handles Ctrl-C.
    from engine.checkpoint.quantize import quantize_checkpoint, report
    from engine.demo import resolve_model

    errors = quantize_checkpoint(
        resolve_model(args.source, "SRC"), args.destination, int(args.shard_gb * 1e9)
    )
    say(f"written: {args.destination}")  # before the report, which a full stdout may refuse
    print(report(errors))
    return 0


if __name__ == "__main__":
    sys.exit(main())
