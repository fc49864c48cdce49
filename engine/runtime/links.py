"""What joins the GPUs of this process: probed at start-up, never assumed.

Per ordered pair: peer access, native atomics, performance rank (CUDA's P2P attributes), NVLink
lanes (nvidia-smi), and a pattern that is written through the peer's address and read back both
ways by kernels. `choose_transport` turns the matrix into one decision for a deployment; `describe`
is the text of `engine info`.

The custom collectives push: a rank writes into its peers' memory and polls only its own. So NVLink
and PCIe peers both work; without peer access only NCCL does, and only with one rank a device.
NVLink multicast is never touched: the project's machines forbid it, and the protocol does not need
it.
"""

from __future__ import annotations

import logging
import re
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch

from engine.errors import EngineError
from engine.kernels.all_reduce import ALGORITHMS

log = logging.getLogger("engine.links")

PROBE_WORDS = 16384  # 64 KB a pattern


@dataclass(frozen=True)
class Link:
    """One ordered pair: `source` reads and writes `target`'s memory. None = not found out."""

    source: int
    target: int
    peer_access: bool
    native_atomics: bool | None = None
    performance_rank: int | None = None  # 0 = the best of the machine
    nvlink_lanes: int | None = None
    verified: bool | None = None  # the pattern survived both ways

    @property
    def kind(self) -> str:
        if not self.peer_access:
            return "none"
        if self.nvlink_lanes:
            return f"NVLink x{self.nvlink_lanes}"
        return "peer" if self.nvlink_lanes is None else "PCIe"

    @property
    def usable(self) -> bool:
        return self.peer_access and self.verified is not False


@dataclass(frozen=True)
class LinkMatrix:
    """All ordered pairs of `devices` (CUDA ordinals). Empty on a machine without CUDA."""

    devices: tuple[int, ...] = ()
    names: tuple[str, ...] = ()
    links: tuple[Link, ...] = ()

    def link(self, source: int, target: int) -> Link:
        for link in self.links:
            if (link.source, link.target) == (source, target):
                return link
        raise EngineError(
            f"GPU {source} -> GPU {target} was not probed: the probe covered {self.devices}"
        )

    def unusable(self, devices: Sequence[int]) -> list[Link]:
        """Pairs of these devices over which the custom collectives cannot work."""
        wanted = set(devices)
        return [k for k in self.links if {k.source, k.target} <= wanted and not k.usable]


@dataclass(frozen=True)
class Transport:
    """name: none (one rank), local (one device), peer, nccl. algorithms: what may be chosen by
    size.
    """

    name: str
    algorithms: tuple[str, ...]
    reason: str
    virtual: bool = False  # more ranks than devices: correct, not fast


def probe_links(devices: Sequence[int] | None = None, *, verify: bool = True) -> LinkMatrix:
    """Probe every ordered pair of `devices` (default: all visible). Empty without CUDA.

    verify: enable peer access and check a pattern both ways with kernels; must happen before
    anything spins on a device (loading a kernel waits for the device).
    """
    if not torch.cuda.is_available():
        return LinkMatrix()
    devices = tuple(range(torch.cuda.device_count())) if devices is None else tuple(devices)
    with ThreadPoolExecutor(1) as pool:
        lanes = pool.submit(_nvlink_lanes, devices)  # nvidia-smi takes as long as the kernels
        links = [_attributes(a, b) for a in devices for b in devices if a != b]
        if verify:
            links = [replace(k, verified=_verify(k)) if k.peer_access else k for k in links]
        found = lanes.result()
    links = [replace(k, nvlink_lanes=found.get((k.source, k.target))) for k in links]
    names = tuple(torch.cuda.get_device_name(d) for d in devices)
    return LinkMatrix(devices, names, tuple(links))


def _attributes(source: int, target: int) -> Link:
    """What the driver says of one pair."""
    access = torch.cuda.can_device_access_peer(source, target)
    try:
        from cuda.bindings import runtime
    except ImportError:
        return Link(source, target, access)

    def attribute(name: str) -> int | None:
        kind = getattr(runtime.cudaDeviceP2PAttr, name)
        error, value = runtime.cudaDeviceGetP2PAttribute(kind, source, target)
        return int(value) if error == runtime.cudaError_t.cudaSuccess else None

    atomics = attribute("cudaDevP2PAttrNativeAtomicSupported")
    return Link(
        source,
        target,
        access,
        native_atomics=None if atomics is None else bool(atomics),
        performance_rank=attribute("cudaDevP2PAttrPerformanceRank"),
    )


def _nvidia_smi(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ["nvidia-smi", *arguments], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout


def parse_topology(text: str) -> dict[tuple[int, int], int]:
    """(row GPU, column GPU) -> NVLink lanes (0: another path) from the matrix of `nvidia-smi topo
    -m`.
    """
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).split() for line in text.splitlines()]
    header = next((line for line in lines if line and line[0] == "GPU0"), [])
    columns = [int(name[3:]) for name in header if re.fullmatch(r"GPU\d+", name)]
    found = {}
    for line in lines:
        if not line or not re.fullmatch(r"GPU\d+", line[0]) or line is header:
            continue
        row = int(line[0][3:])
        for column, cell in zip(columns, line[1:]):
            if column != row:
                lanes = re.fullmatch(r"NV(\d+)", cell)
                found[row, column] = int(lanes.group(1)) if lanes else 0
    return found


def _nvlink_lanes(devices: Sequence[int]) -> dict[tuple[int, int], int]:
    """Lanes between CUDA ordinals; empty where nvidia-smi is missing or cannot tell."""
    physical = {}
    for line in _nvidia_smi("--query-gpu=index,uuid", "--format=csv,noheader").splitlines():
        index, _, uuid = line.partition(",")
        physical[uuid.strip().removeprefix("GPU-")] = int(index)
    topology = parse_topology(_nvidia_smi("topo", "-m"))
    numbers: dict[int, int] = {}
    for device in devices:
        uuid = str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))
        numbers[device] = physical.get(uuid.removeprefix("GPU-"), -1)
    return {
        (a, b): topology[numbers[a], numbers[b]]
        for a in devices
        for b in devices
        if a != b and (numbers[a], numbers[b]) in topology
    }


def _verify(link: Link) -> bool:
    """Source writes the target's memory, target checks; target writes its own, source checks by
    reading.
    """
    from engine.kernels.link_probe import BLOCK, compare_pattern, write_pattern

    source, target = torch.device("cuda", link.source), torch.device("cuda", link.target)
    # One copy makes torch enable peer access; from then on kernels of source reach target's memory.
    torch.zeros(8, device=source).to(target)
    buffer = torch.zeros(PROBE_WORDS, dtype=torch.int32, device=target)
    wrong = {
        device: torch.full((PROBE_WORDS // BLOCK,), -1, dtype=torch.int32, device=device)
        for device in (source, target)
    }
    salt = 1 + 64 * link.source + link.target
    try:
        for writer, reader, shift in ((source, target, 0), (target, source, 4096)):
            torch.cuda.synchronize(target)
            with torch.cuda.device(writer):
                write_pattern(buffer, salt + shift)
                torch.cuda.synchronize(writer)
            with torch.cuda.device(reader):
                compare_pattern(buffer, salt + shift, wrong[reader])
                torch.cuda.synchronize(reader)
    except RuntimeError as error:
        log.warning("GPU %d -> GPU %d: peer access failed: %s", link.source, link.target, error)
        return False
    return all(int(count.abs().sum()) == 0 for count in wrong.values())


def _complaint(link: Link, count: int) -> str:
    what = "no peer access" if not link.peer_access else "peer access that does not carry data"
    return f"GPU {link.source} -> GPU {link.target} has {what} ({count} such pairs)"


def choose_transport(
    matrix: LinkMatrix, rank_devices: Sequence[int], force: str | None = None
) -> Transport:
    """How the ranks on `rank_devices` (CUDA ordinals, one a rank, repeats allowed) exchange
    messages.

    force: None, or the one algorithm to use. EngineError if it is impossible here; one log line when
    falling back to NCCL.
    """
    if force not in (None, *ALGORITHMS):
        raise EngineError(f"--all-reduce {force}: choose auto or one of {', '.join(ALGORITHMS)}")
    devices = sorted(set(rank_devices))
    virtual = len(devices) < len(rank_devices)
    if len(rank_devices) == 1:
        return Transport("none", (), "one rank: nothing to exchange")
    bad = matrix.unusable(devices)
    if force == "nccl" or (bad and force is None):
        if virtual:
            cause = "; " + _complaint(bad[0], len(bad)) if bad else ""
            raise EngineError(
                f"{len(rank_devices)} ranks on {len(devices)} GPUs need the custom collectives "
                f"(NCCL takes one rank a GPU{cause}); lower --tp or choose GPUs that reach each other "
                "(CUDA_VISIBLE_DEVICES)"
            )
        reason = "forced" if force else _complaint(bad[0], len(bad))
        if not force:
            log.warning("all-reduce falls back to NCCL: %s", reason)
        return Transport("nccl", ("nccl",), reason)
    if bad:
        raise EngineError(f"--all-reduce {force} was forced, but {_complaint(bad[0], len(bad))}")
    transport = _custom(matrix, devices, virtual)
    if force is None:
        return transport
    if force not in transport.algorithms:
        raise EngineError(f"--all-reduce {force} was forced, but {transport.reason}")
    return replace(transport, algorithms=(force,))


def _custom(matrix: LinkMatrix, devices: Sequence[int], virtual: bool) -> Transport:
    """What the custom collectives may do among devices that reach each other."""
    split = ("lamport", "two_shot")
    if len(devices) == 1:
        return Transport("local", (*split, "flag"), "all ranks share one GPU", virtual)
    kinds = {matrix.link(a, b).kind for a in devices for b in devices if a != b}
    reason = "peer access over " + ", ".join(sorted(kinds))
    if any(kind.startswith("PCIe") for kind in kinds):
        # The flag barrier pulls, and reads over PCIe cost a round trip: only writes cross it.
        return Transport("peer", split, reason + ": writes only cross the link", virtual)
    return Transport("peer", (*split, "flag"), reason, virtual)


def describe(matrix: LinkMatrix | None = None, transport: Transport | None = None) -> str:
    """The matrix as text, one row a GPU, and what was chosen and why (default: all GPUs, one rank
    each).
    """
    matrix = probe_links() if matrix is None else matrix
    if not matrix.devices:
        return "no CUDA device"
    if len(matrix.devices) == 1:
        return f"GPU {matrix.devices[0]} ({matrix.names[0]}): no peers"
    width = max(len(k.kind) for k in matrix.links) + 4
    lines = ["to:    " + "".join(f"GPU {d}".ljust(width) for d in matrix.devices)]
    for source in matrix.devices:
        cells = []
        for target in matrix.devices:
            text = "-"
            if source != target:
                link = matrix.link(source, target)
                mark = {True: " ok", False: " BAD", None: ""}[link.verified]
                text = link.kind + mark
            cells.append(text.ljust(width))
        lines.append(f"GPU {source}  " + "".join(cells).rstrip())
    atomics = [k.native_atomics for k in matrix.links]
    ranks = sorted({k.performance_rank for k in matrix.links if k.performance_rank is not None})
    told = "unknown" if None in atomics else ("all pairs" if all(atomics) else "not all pairs")
    lines.append(f"native atomics: {told}; performance ranks: {ranks or 'unknown'}")
    transport = transport or choose_transport(matrix, matrix.devices)
    lines.append(f"all-reduce: {transport.name} ({transport.reason})")
    return "\n".join(lines)
