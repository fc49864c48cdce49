"""Link probe: parsing, choice and text, on matrices made by hand."""

from __future__ import annotations

import logging

import pytest
import torch

from engine.errors import EngineError
from engine.runtime.links import (
    Link,
    LinkMatrix,
    choose_transport,
    describe,
    parse_topology,
    probe_links,
)

TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \tNV18\tSYS\tPXB\t0-51\t0
GPU1\tNV18\t X \tNV4\tSYS\t0-51\t0
GPU2\tSYS\tNV4\t X \tPHB\t52-103\t1
NIC0\tPXB\tSYS\tPHB\t X
"""


def matrix(count: int = 2, **facts) -> LinkMatrix:
    facts = {"peer_access": True, "nvlink_lanes": 18, "verified": True, **facts}
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    links = tuple(Link(a, b, **facts) for a, b in pairs)
    return LinkMatrix(tuple(range(count)), ("H200",) * count, links)


def test_topology_matrix():
    found = parse_topology(TOPOLOGY)
    assert found == {
        (0, 1): 18, (0, 2): 0, (1, 0): 18, (1, 2): 4, (2, 0): 0, (2, 1): 4,
    }  # fmt: skip
    assert parse_topology("") == {}


def test_without_cuda():
    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    assert probe_links() == LinkMatrix()
    assert describe() == "no CUDA device"


def test_nvlink_takes_every_algorithm():
    choice = choose_transport(matrix(), (0, 1))
    assert choice.name == "peer" and choice.algorithms == ("lamport", "two_shot", "flag")
    assert not choice.virtual and "NVLink x18" in choice.reason


def test_pcie_only_writes():
    choice = choose_transport(matrix(nvlink_lanes=0), (0, 1))
    assert choice.algorithms == ("lamport", "two_shot")


def test_virtual_ranks():
    assert choose_transport(matrix(), (0, 1, 0, 1)).virtual
    assert choose_transport(matrix(), (0, 0, 0, 0)).name == "local"
    assert choose_transport(LinkMatrix(), (0,)).name == "none"


@pytest.mark.parametrize(
    "facts", [dict(peer_access=False, verified=None), dict(verified=False)], ids=["none", "bad"]
)
def test_fallback_says_so_once(facts, caplog):
    broken = matrix(**facts)
    with caplog.at_level(logging.WARNING, "engine.links"):
        choice = choose_transport(broken, (0, 1))
    assert choice.name == "nccl" and len(caplog.records) == 1
    assert "GPU 0 -> GPU 1" in caplog.text
    with pytest.raises(EngineError, match="lamport was forced, but GPU 0 -> GPU 1"):
        choose_transport(broken, (0, 1), force="lamport")
    with pytest.raises(EngineError, match="lower --tp"):
        choose_transport(broken, (0, 1, 0, 1))


def test_forced_choices():
    assert choose_transport(matrix(), (0, 1), force="nccl").name == "nccl"
    for name in ("lamport", "two_shot", "flag"):
        forced = choose_transport(matrix(), (0, 1), force=name)
        assert forced.name == "peer" and forced.algorithms == (name,)
    with pytest.raises(EngineError, match=r"flag was forced, but .*writes only cross"):
        choose_transport(matrix(nvlink_lanes=0), (0, 1), force="flag")
    with pytest.raises(EngineError, match="one rank a GPU"):
        choose_transport(matrix(), (0, 0), force="nccl")
    with pytest.raises(EngineError, match="choose auto or one of lamport"):
        choose_transport(matrix(), (0, 1), force="mpi")


def test_description():
    text = describe(matrix(native_atomics=True, performance_rank=0))
    assert text.count("NVLink x18 ok") == 2
    assert "native atomics: all pairs" in text and "all-reduce: peer" in text
    assert "BAD" in describe(matrix(verified=False))
    one = LinkMatrix((0,), ("H200",), ())
    assert describe(one) == "GPU 0 (H200): no peers"
    with pytest.raises(EngineError, match="not probed"):
        matrix().link(0, 5)
