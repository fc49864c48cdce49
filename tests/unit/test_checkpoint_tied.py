"""Tied embeddings: lm_head as a view of the table, and checkpoints that carry one all the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.checkpoint.fp8 import FP8_DTYPE
from engine.checkpoint.load import find_aliases, load_rank
from engine.checkpoint.memory import weight_bytes
from engine.checkpoint.source import CheckpointSource
from engine.errors import CheckpointError
from tests.unit.checkpoint_fixtures import edit_json, save_model, specs_of

TP = (1, 2, 4, 8)


@pytest.fixture
def tied(tmp_path) -> Path:
    return save_model(tmp_path / "tied", "llama", tied=True, vocab_size=256)


@pytest.mark.parametrize("tp", TP)
def test_tied_lm_head_is_a_view_of_the_embedding(tied, tp):
    specs = specs_of(tied, tp)
    for rank in range(tp):
        loaded = load_rank(specs, CheckpointSource(tied), rank, "cpu", torch.bfloat16)
        table, head = loaded["embed"].weight, loaded["lm_head"].weight
        assert torch.equal(head, table[rank * 256 // tp : (rank + 1) * 256 // tp])
        assert head.untyped_storage().data_ptr() == table.untyped_storage().data_ptr()
        total = sum(x.nbytes for n, x in loaded.items() if n != "lm_head")
        assert total == weight_bytes(specs.values(), rank, torch.bfloat16)


def test_padded_tied_lm_head_is_a_copy_with_zeros(tmp_path):
    directory = save_model(tmp_path / "m", "llama", tied=True, vocab_size=203)
    specs = specs_of(directory, 2)
    assert find_aliases(specs.values(), 0) == {"lm_head": ("embed", 0, 112)}
    assert find_aliases(specs.values(), 1) == {}
    loaded = load_rank(specs, CheckpointSource(directory), 1, "cpu", torch.float32)
    head = loaded["lm_head"].weight
    assert torch.equal(head[:91], loaded["embed"].weight[112:])
    assert not head[91:].any() and len(head) == 112


def test_quantised_head_is_not_a_view(tied):
    specs = specs_of(tied)
    specs["lm_head"] = replace(specs["lm_head"], quantizable=True)
    loaded = load_rank(specs, CheckpointSource(tied), 0, "cpu", torch.bfloat16, "fp8")
    assert loaded["lm_head"].weight.dtype == FP8_DTYPE
    assert loaded["embed"].weight.dtype == torch.bfloat16


def add_head(directory: Path, change: float, first_row: int = 0) -> None:
    tensors = load_file(directory / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["lm_head.weight"][first_row:] += change
    save_file(tensors, directory / "model.safetensors")


def test_superfluous_lm_head_that_equals_the_embedding_is_fine(tied):
    add_head(tied, 0)
    load_rank(specs_of(tied), CheckpointSource(tied), 0, "cpu", torch.float32)


def test_superfluous_lm_head_that_differs_is_refused(tied):
    add_head(tied, 1)
    with pytest.raises(CheckpointError, match=r"ties the embeddings, but lm_head\.weight is not"):
        load_rank(specs_of(tied), CheckpointSource(tied), 0, "cpu", torch.float32)
    edit_json(tied / "config.json", tie_word_embeddings=False)  # what the message says
    loaded = load_rank(specs_of(tied), CheckpointSource(tied), 0, "cpu", torch.float32)
    assert torch.equal(loaded["lm_head"].weight, loaded["embed"].weight + 1)


def test_superfluous_lm_head_that_differs_at_its_end_is_refused(tied):
    add_head(tied, 1, first_row=250)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is not"):
        load_rank(specs_of(tied), CheckpointSource(tied), 0, "cpu", torch.float32)
