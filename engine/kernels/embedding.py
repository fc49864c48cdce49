"""Embedding lookup: out[i] = table[tokens[i]], or table[tokens[row_slots[i]]] in decode."""

from __future__ import annotations

import torch


def embedding_ref(
    tokens: torch.Tensor, table: torch.Tensor, row_slots: torch.Tensor | None = None
) -> torch.Tensor:
    """tokens int [T] (or slot-indexed [S] with row_slots [R]), table [V, H] -> [T or R, H].

    Padding rows (row_slots -1) read slot 0; token ids are clamped to the table.
    """
    ids = tokens if row_slots is None else tokens[row_slots.clamp(min=0).long()]
    return table[ids.long().clamp(0, table.shape[0] - 1)]
