"""Reference of sampling, and the definition of its controls: numpy, one row at a time.

A row's token is made in this order (z: the row's logits over the whole vocabulary, fp32):

1. penalties, for ids that the prompt or the answer holds: z = z / repetition if z > 0, else z *
   repetition; for ids of the answer that occur n times: z -= frequency * n, z -= presence
2. logit bias: z += bias
3. temperature 0: the largest z wins. Else weight w = exp((z - max z) / T), and an id is kept if
   a. top-k: z is at least the k-th largest z
   b. top-p: z is at least t, the largest value for which the weight of the ids at or above it is
      at least top_p of the weight of all that top-k kept
   c. min-p: w >= min_p
4. of the kept ids the one with the largest z + T * Gumbel(seed, position, id) wins, the lowest of
   equals: a draw from the softmax over the kept ids.

Ids whose z equals a threshold are all kept, so ties never depend on an order of ids; the most
likely id is always kept. Weights are summed as whole numbers of 2^-40, so that sums are exact and
do not depend on their order, on the grid or on the TP degree; an id of less weight than 2^-40 of
the best one counts for nothing in b.
"""

from __future__ import annotations

import numpy as np
import torch

from engine.kernels.gumbel import gumbel_ref

RING_NAN = -2  # the row's logits hold a NaN

# Columns of the controls' buffer, fp32 [S, CONTROLS].
TOP_K, TOP_P, MIN_P, REPETITION, FREQUENCY, PRESENCE, COUNTED, BIASED = range(8)
CONTROLS = 8
NEUTRAL = (0.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0)  # COUNTED, BIASED: whether those buffers count

WEIGHT_UNIT = 2.0**40


def adjust_ref(
    z: np.ndarray, control: np.ndarray, counts: np.ndarray, bias: np.ndarray
) -> np.ndarray:
    """Steps 1 and 2 for one row, fp32 [V]. counts int32 [V]: 2 * occurrences in the answer + (in the prompt)."""
    if control[COUNTED]:
        seen, occurrences = counts > 0, counts >> 1
        repetition = control[REPETITION]
        z = np.where(seen, np.where(z > 0, z / repetition, z * repetition), z)
        z = z - control[FREQUENCY] * occurrences.astype(np.float32)
        z = z - control[PRESENCE] * (occurrences > 0).astype(np.float32)
    return z + bias if control[BIASED] else z


def kept_ref(z: np.ndarray, temperature: np.float32, control: np.ndarray) -> np.ndarray:
    """Step 3: bool [V], the ids that may be drawn."""
    keep = np.ones(z.shape, dtype=bool)
    if temperature <= 0:
        return keep
    k = int(control[TOP_K])
    if 0 < k < z.size:
        keep &= z >= np.partition(z, z.size - k)[z.size - k]
    top = z.max()
    with np.errstate(invalid="ignore", over="ignore"):
        weight = np.where(z >= top, np.float32(1), np.exp((z - top) / temperature))
    p = control[TOP_P]
    if p < 1:
        units = np.where(keep, (weight * np.float32(WEIGHT_UNIT)).astype(np.int64), 0)
        order = np.argsort(z)[::-1]
        total = np.cumsum(units[order])
        target = max(1, int(np.float64(p) * np.float64(total[-1])))
        keep &= z >= z[order[np.searchsorted(total, target)]]
    return keep & (weight >= control[MIN_P])


def sample_ref(
    shards: list[torch.Tensor],
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    vocab_size: int | None = None,
    controls: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """int64 [R]: the id that the kernels choose; RING_NAN for a row that holds a NaN.

    shards: the ranks' logits [R, V_r] in rank order (their ids follow on); temperature, seeds and
    positions [R]; ids >= vocab_size never win. controls fp32 [R, CONTROLS] or None; counts int32
    and bias fp32 [R, >= V] are read where the controls say so.
    """
    logits = torch.cat([shard.detach().float().cpu() for shard in shards], dim=-1)
    rows, columns = logits.shape
    columns = min(columns, vocab_size or columns)
    chosen = torch.empty(rows, dtype=torch.int64)
    for row in range(rows):
        scores = logits[row, :columns].numpy()
        scale = np.float32(temperature[row].item())
        control = None if controls is None else controls[row].cpu().numpy()
        if control is not None and tuple(control) != NEUTRAL:
            assert counts is not None and bias is not None
            held = [tensor[row, :columns].cpu().numpy() for tensor in (counts, bias)]
            scores = adjust_ref(scores, control, *held)
            if not np.isnan(scores).any():
                scores = np.where(kept_ref(scores, scale, control), scores, np.float32(-np.inf))
        if scale > 0:
            noise = gumbel_ref(int(seeds[row]), int(positions[row]), np.arange(columns))
            scores = scores + scale * noise
        # numpy's argmax takes the first of equals, and the first NaN if there is one.
        best = int(scores.argmax())
        chosen[row] = RING_NAN if np.isnan(scores[best]) else best
    return chosen
