"""Ranks for the collective tests: several in one process (lockstep), or one process a rank.

Lockstep works on a CPU (interpreter) and on one CUDA device. Processes are for the interpreter
only: they are forked, so shared-memory tensors have the same addresses everywhere.
"""

from __future__ import annotations

import multiprocessing
import random
import time
import traceback
import zlib
from collections.abc import Callable

import torch

from engine.kernels.all_reduce import all_reduce_ref

SPECIAL = (-0.0, 0.0, float("inf"), float("-inf"), float("nan"), 1e-40, -1e-40, 3e38, -3e38, 6e4)


def status_words(device: str) -> torch.Tensor:
    words = torch.zeros(8, dtype=torch.int32)
    return words.pin_memory() if device == "cuda" else words


def inputs(call: int, world: int, shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    """Every rank's partial sum of one call and the residual, the same in every process.

    A third of the values of one rank in four are special: -0.0, subnormals, infinities, NaN.
    """
    generator = torch.Generator().manual_seed(call)
    tensors = []
    for _ in range(world + 1):
        values = torch.randn(shape, generator=generator)
        if call % 4 == 0 or torch.rand((), generator=generator) < 0.25:
            special = torch.tensor(SPECIAL)
            pick = torch.randint(len(SPECIAL), shape, generator=generator)
            replace = torch.rand(shape, generator=generator) < 0.3
            values = torch.where(replace, special[pick], values)
        tensors.append(values.to(dtype))
    return tensors


def assert_same(out: torch.Tensor, reference: torch.Tensor, what: str) -> None:
    """Bitwise, except that any NaN equals any NaN."""
    out, reference = out.cpu(), reference.cpu()
    same = (out.view(torch.int16) == reference.view(torch.int16)) | (
        out.isnan() & reference.isnan()
    )
    if not same.all():
        at = int((~same).flatten().nonzero()[0])
        raise AssertionError(
            f"{what}: element {at} is {out.flatten()[at]}, not {reference.flatten()[at]}"
        )


def _child(rank: int, body: Callable, queue, seed: int) -> None:
    torch.set_num_threads(1)
    random.seed(seed + rank)
    try:
        body(rank)
        queue.put((rank, ""))
    except BaseException:
        queue.put((rank, traceback.format_exc()))


def run_ranks(world: int, body: Callable[[int], None], timeout_s: float = 120.0) -> None:
    """Run body(rank) in `world` forked processes; AssertionError with the first failure's
    traceback.
    """
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    ranks = [
        context.Process(target=_child, args=(r, body, queue, 7), daemon=True) for r in range(world)
    ]
    for process in ranks:
        process.start()
    try:
        deadline = time.monotonic() + timeout_s
        for _ in ranks:
            rank, error = queue.get(timeout=max(0.1, deadline - time.monotonic()))
            assert not error, f"rank {rank} failed:\n{error}"
    finally:
        for process in ranks:
            process.kill()
            process.join()


def random_delay(probability: float = 0.1, longest_s: float = 2e-3) -> None:
    if random.random() < probability:
        time.sleep(random.random() * longest_s)


def checksum(out: torch.Tensor) -> int:
    return zlib.crc32(out.contiguous().view(torch.uint8).numpy().tobytes())


def fast_sum_messages(words, residual, WORLD, RESIDUAL, DTYPE):
    """`packed.sum_messages` in numpy, bit for bit: for long protocol runs in the interpreter."""
    import numpy as np
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    dtype = torch.bfloat16 if tl.bfloat16 == DTYPE else torch.float16

    def message(first: int, tensors) -> torch.Tensor:
        stacked = np.stack([tensors[first + i].handle.data for i in range(4)])
        return torch.from_numpy(stacked).view(dtype)

    partials = [message(4 * r, words) for r in range(WORLD)]
    total = all_reduce_ref(partials, message(0, residual) if RESIDUAL else None)
    packed = total.view(torch.int32).numpy()
    lanes = tl.block_type(tl.int32, [packed.shape[1]])
    return tuple(tl.tensor(TensorHandle(packed[i].copy(), tl.int32), lanes) for i in range(4))


def fast_canonical_words(word):
    """`sync.canonical_words` in numpy."""
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    halves = word.handle.data.copy().view("int16")
    halves[halves == -(2**15)] = 0
    return tl.tensor(TensorHandle(halves.view("int32"), tl.int32), word.type)
