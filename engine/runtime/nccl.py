"""NCCL as a carrier of messages, for GPUs that cannot reach each other's memory. One process, one rank a GPU.

The exchange stays the engine's own: a rank sends into its own buffer only, NCCL gathers the messages of all
ranks into every rank's buffer (in place), and the wait finds them there. So every sum has the bits that it
has over peer access, and the residual is added by the same kernel. A rank sends world - 1 messages, as
one-shot does; what NCCL costs is its latency, 15 us and more a call. The gather is no part of a CUDA graph:
a program with it runs in pieces (graph/capture.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.errors import EngineError


def require() -> None:
    """EngineError if this torch has no NCCL."""
    if not hasattr(torch._C, "_nccl_all_gather"):
        raise EngineError(
            f"the GPUs cannot reach each other's memory and torch {torch.__version__} is built without NCCL; "
            "choose GPUs that reach each other (CUDA_VISIBLE_DEVICES), --tp 1, or a torch with NCCL"
        )


def all_gather_in_place(
    buffers: Sequence[torch.Tensor], streams: Sequence[torch.cuda.Stream]
) -> None:
    """buffers[r]: uint8 [world, bytes] on rank r's device, of which row r is filled; afterwards all rows are.

    Queued on streams[r]; nothing waits. The communicators are made in the first call, which waits for the
    devices: during warm-up, when nothing spins.
    """
    sent = [buffer[rank] for rank, buffer in enumerate(buffers)]
    torch.cuda.nccl.all_gather(sent, [buffer.view(-1) for buffer in buffers], streams=streams)
