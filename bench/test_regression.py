"""Kernels on the card against their stored share of the copy bandwidth.

pytest bench/test_regression.py -m gpu --benchmark-enable                      check
pytest bench/test_regression.py -m gpu --benchmark-enable --store-baselines    take new baselines
"""

from __future__ import annotations

import pytest
import torch

from bench import regression
from bench.rows import environment

pytestmark = pytest.mark.gpu

REPLAYS = 8  # queued per round, so that the graph's launch hides behind the one before


@pytest.fixture(scope="module")
def measured(request):
    """Shares of this run; stored at the end if asked for."""
    shares: dict[str, float] = {}
    yield shares
    if shares and request.config.getoption("--store-baselines"):
        facts = {k: v for k, v in environment().items() if k != "command"}
        print(
            f"\n{regression.store_baselines(facts['gpu'], shares, facts)}: {len(shares)} baselines"
        )


@pytest.fixture(scope="module", params=list(regression.REGIMES))
def bench(request):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    opened = regression.Bench(request.param)
    yield request.param, opened
    opened.close()


@pytest.mark.parametrize("stage", regression.STAGES)
def test_share_of_the_copy_bandwidth(bench, stage, benchmark, measured, request):
    name, opened = bench
    key = f"{name} {stage}"
    program = opened.program(stage)
    opened.chain.device.replay(program, 2)

    def step():
        for _ in range(REPLAYS):
            program.replay()
        torch.cuda.synchronize()

    try:
        benchmark.pedantic(step, rounds=20, warmup_rounds=2)
    finally:
        program.free()
    if not benchmark.stats:
        pytest.skip("nothing was timed: give --benchmark-enable")
    seconds = benchmark.stats.stats.median / REPLAYS
    share = regression.share(opened.bytes(stage), seconds, opened.copy_bandwidth)
    baseline = regression.load_baselines(torch.cuda.get_device_name(0)).get(key)
    benchmark.extra_info.update(share=share, baseline=baseline)
    measured[key] = share
    print(f"\n{key}: {share:.3f} of the copy bandwidth, baseline {baseline}")
    if request.config.getoption("--store-baselines"):
        return
    if baseline is None:
        pytest.skip(f"no baseline for {key!r}; take one with --store-baselines")
    failure = regression.Verdict(key, share, baseline).failure()
    assert failure is None, failure
