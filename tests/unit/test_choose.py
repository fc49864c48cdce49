"""Choice of kernel configurations: order of sources, cache files that must not be used, atomic
writes."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from engine.errors import EngineError
from engine.tune import cache_file, choose

KEY = {"n": 29568, "k": 8192, "dtype": torch.float8_e4m3fn, "rows": 1}
WRITTEN = "n=29568,k=8192,dtype=fp8"


@dataclass(frozen=True)
class FakeConfig:
    block: int = 1
    name: str = "heuristic"


def _heuristic(n, k, dtype, rows, sm_count, spare=3):
    return FakeConfig(block=sm_count + rows)


@pytest.fixture
def op(tmp_path, monkeypatch):
    """An op "fake" whose kernel file lies in tmp_path; the cache directory is tmp_path/cache."""
    source = tmp_path / "fake.py"
    source.write_text("x = 1\n")
    module = SimpleNamespace(
        __file__=str(source),
        FakeConfig=FakeConfig,
        heuristic=_heuristic,
        KEY_FIELDS=("n", "k", "dtype"),
    )
    fake = choose.Op("fake_module", "FakeConfig")
    monkeypatch.setattr(choose.Op, "load", lambda self: module)
    monkeypatch.setitem(choose.OPS, "fake", fake)
    before = choose._state
    monkeypatch.setattr(choose, "_state", choose._State())
    choose.set_target("NVIDIA H200", 132, tmp_path / "cache")
    yield SimpleNamespace(source=source, file=tmp_path / "cache" / "nvidia_h200" / "fake.json")
    assert choose._state is not before


def _save(**config) -> None:
    entry = {"config": FakeConfig(**config), "us": 12.5, "runner_up": None, "date": "2026-01-01"}
    choose.save_entries("fake", "NVIDIA H200", {WRITTEN: entry}, choose.metadata("fake"))


def test_key_is_readable_and_leaves_out_what_is_not_a_key_field(op) -> None:
    assert choose.key_string("fake", KEY) == WRITTEN
    assert choose.key_string("fake", {**KEY, "rows": 8, "tp": 2}) == WRITTEN


def test_key_fields_default_to_the_heuristics_parameters() -> None:
    assert choose.key_string("gemm", {"t": 16, "n": 8, "k": 4, "weight_dtype": torch.bfloat16}) == (
        "t=16,n=8,k=4,weight_dtype=bf16"
    )


def test_heuristic_is_the_last_resort_and_counts_as_a_miss(op) -> None:
    assert choose.choose("fake", KEY) == FakeConfig(block=133)
    choose.choose("fake", KEY)
    assert choose.misses() == {f"fake: {WRITTEN}": 2}


def test_cache_beats_the_heuristic_and_override_beats_the_cache(op) -> None:
    _save(block=7, name="cached")
    assert choose.choose("fake", KEY) == FakeConfig(7, "cached")
    assert choose.choose("fake", {**KEY, "n": 5}).name == "heuristic"
    choose.set_override("fake", FakeConfig(9, "all"))
    assert choose.choose("fake", KEY).name == "all"
    choose.set_override("fake", FakeConfig(9, "this"), KEY)
    assert choose.choose("fake", KEY).name == "this"
    assert choose.choose("fake", {**KEY, "n": 5}).name == "all"
    choose.clear_overrides()
    assert choose.choose("fake", KEY).name == "cached"
    assert choose.misses() == {"fake: n=5,k=8192,dtype=fp8": 1}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("schema", 0),
        ("gpu", "nvidia_h100"),
        ("sm_count", 114),
        ("triton", "3.5"),
        ("source_hash", "0"),
    ],
)
def test_a_file_made_for_something_else_is_ignored_with_one_line(op, caplog, field, value) -> None:
    _save(block=7, name="cached")
    content = json.loads(op.file.read_text())
    content["_metadata"][field] = value
    op.file.write_text(json.dumps(content))
    before = op.file.read_bytes()
    choose.set_target("NVIDIA H200", 132, op.file.parents[1])
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert choose.choose("fake", KEY).name == "heuristic"
    assert len(caplog.records) == 1 and field in caplog.text and str(op.file) in caplog.text
    with pytest.raises(EngineError, match=field):
        _save(block=8, name="new")
    assert op.file.read_bytes() == before


def test_torch_version_does_not_matter(op) -> None:
    _save(block=7, name="cached")
    content = json.loads(op.file.read_text())
    content["_metadata"]["torch"] = "1.0"
    op.file.write_text(json.dumps(content))
    choose.set_target("NVIDIA H200", 132, op.file.parents[1])
    assert choose.choose("fake", KEY).name == "cached"


@pytest.mark.parametrize("text", ["{", "[]", '{"entries": {}}', '{"_metadata": {}, "entries": 1}'])
def test_a_broken_file_is_ignored_and_kept(op, caplog, text) -> None:
    op.file.parent.mkdir(parents=True)
    op.file.write_text(text)
    assert choose.choose("fake", KEY).name == "heuristic"
    assert len(caplog.records) == 1
    with pytest.raises(EngineError, match="cannot be read"):
        _save(block=8)
    assert op.file.read_text() == text


def test_an_entry_of_another_shape_is_a_miss(op, caplog) -> None:
    entry = {"config": {"blok": 3}, "us": 1.0}
    choose.save_entries("fake", "NVIDIA H200", {WRITTEN: entry}, choose.metadata("fake"))
    assert choose.choose("fake", KEY).name == "heuristic"
    assert "blok" in caplog.text and choose.misses()


def test_saving_merges_and_leaves_no_temporary_file(op) -> None:
    _save(block=7, name="old")
    meta = choose.metadata("fake")
    other = {"n=1,k=2,dtype=bf16": {"config": {"block": 3, "name": "other"}, "us": 1.0}}
    choose.save_entries("fake", "NVIDIA H200", other, meta)
    _save(block=8, name="newer")
    assert choose.choose("fake", KEY).name == "newer"
    assert choose.choose("fake", {"n": 1, "k": 2, "dtype": "bf16", "rows": 1}).name == "other"
    assert [p.name for p in op.file.parent.iterdir()] == ["fake.json"]
    assert json.loads(op.file.read_text())["_metadata"] == meta


def test_replace_drops_stale_entries(op) -> None:
    _save(block=7)
    op.source.write_text("x = 2\n")
    entries = {"n=1,k=2,dtype=bf16": {"config": {"block": 3}, "us": 1.0}}
    choose.save_entries("fake", "NVIDIA H200", entries, choose.metadata("fake"), replace=True)
    assert list(json.loads(op.file.read_text())["entries"]) == list(entries)


def test_a_failed_write_leaves_the_old_file(op) -> None:
    _save(block=7)
    before = op.file.read_bytes()
    with pytest.raises(TypeError):
        entry = {"config": {"block": object()}, "us": 1.0}
        choose.save_entries("fake", "NVIDIA H200", {"x": entry}, choose.metadata("fake"))
    assert op.file.read_bytes() == before
    assert [p.name for p in op.file.parent.iterdir()] == ["fake.json"]


def test_nearest_size_of_the_same_shape(op, monkeypatch) -> None:
    monkeypatch.setattr(choose.OPS["fake"].load(), "NEAREST_FIELD", "n", raising=False)
    entries = {
        f"n={n},k={k},dtype=fp8": {"config": {"block": n, "name": f"k{k}"}, "us": 1.0}
        for n, k in ((16, 5), (64, 5), (512, 5), (100, 7))
    }
    choose.save_entries("fake", "NVIDIA H200", entries, choose.metadata("fake"))

    def pick(n: int, k: int) -> FakeConfig:
        return choose.choose("fake", {"n": n, "k": k, "dtype": "fp8", "rows": 1})

    near = {8: 16, 16: 16, 17: 16, 32: 64, 64: 64, 100: 64, 256: 512, 512: 512, 1024: 512}
    assert {n: pick(n, 5).block for n in near} == near
    assert pick(99, 7) == FakeConfig(100, "k7")
    assert choose.misses() == {}
    far = ((7, 5), (129, 5), (255, 5), (1025, 5), (64, 6))  # beyond a factor of two; another shape
    assert [pick(*facts).name for facts in far] == ["heuristic"] * 5
    assert len(choose.misses()) == 5


def test_missing_facts_and_unknown_ops_are_named(op) -> None:
    with pytest.raises(EngineError, match="lacks k, dtype"):
        choose.choose("fake", {"n": 1})
    with pytest.raises(EngineError, match="needs rows"):
        choose.choose("fake", {"n": 1, "k": 2, "dtype": "fp8"})
    with pytest.raises(EngineError, match=r"unknown op 'gem'.*gemm"):
        choose.choose("gem", {})


BASE = 'def f(x):\n    """Doc."""\n    # why\n    return f"{x} # not a comment"  # trailing\n'


def test_source_hash_ignores_comments_docstrings_and_blanks(tmp_path) -> None:
    def digest(text: str) -> str:
        file = tmp_path / "kernel.py"
        file.write_text(text)
        return cache_file.source_hash([file])

    same = 'def f(x):\n    """Älter,\n    longer."""\n\n    return f"{x} # not a comment"\n'
    assert digest(same) == digest(BASE)
    assert digest(BASE.replace("# not", "# now")) != digest(BASE)
    assert digest(BASE.replace("return f", "return  f")) == digest(BASE)
    assert digest(BASE.replace("def f(x)", "def f(y)")) != digest(BASE)
    assert digest("def f(): ...\n") != digest("def g(): ...\n")
    assert len(digest(BASE)) == 12


def test_gemm_hash_covers_its_device_code() -> None:
    from engine.kernels import gemm

    assert choose.source_hash("gemm") == cache_file.source_hash(
        [choose.CACHE_DIR.parent / "engine" / "kernels" / n for n in gemm.SOURCES]
    )


@pytest.mark.parametrize("file", sorted(choose.CACHE_DIR.glob("*/*.json")), ids=lambda f: f.stem)
def test_shipped_caches_fit_the_kernels_they_were_tuned_for(file, monkeypatch) -> None:
    """A kernel edited after tuning silently loses its table: tune again, or delete the file."""
    monkeypatch.setattr(choose, "_state", choose._State())
    content = json.loads(file.read_text())
    gpu, sm_count = content["_metadata"]["gpu"], content["_metadata"]["sm_count"]
    assert gpu == file.parent.name
    choose.set_target(gpu, sm_count)
    assert cache_file.mismatch(content["_metadata"], choose.metadata(file.stem)) is None
    config_class = getattr(choose.OPS[file.stem].load(), choose.OPS[file.stem].config_class)
    for entry in content["entries"].values():
        config_class(**entry["config"])
