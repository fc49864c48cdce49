"""Parsed PTX and the global memory of the emulator (ptx_emulator.py)."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

U64 = np.uint64


class Memory:
    """Global memory: the registered tensors, by their real addresses."""

    def __init__(self, tensors: Sequence[torch.Tensor]):
        spans = {}
        for t in tensors:
            storage = t.untyped_storage()
            spans[storage.data_ptr()] = np.frombuffer(
                (ctypes.c_uint8 * storage.nbytes()).from_address(storage.data_ptr()),
                np.uint8,
            )
        self.starts = np.array(sorted(spans), U64)
        self.spans = [spans[int(s)] for s in self.starts]

    def _locate(self, address: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
        if (address % U64(size)).any():
            raise RuntimeError(f"misaligned {size}-byte access")
        which = np.searchsorted(self.starts, address, "right") - 1
        if (which < 0).any():
            raise RuntimeError("access below all tensors")
        offset = (address - self.starts[which]).astype(np.int64)
        ends = np.array([len(s) for s in self.spans])[which]
        if (offset + size > ends).any():
            raise RuntimeError("access outside the tensors")
        return which, offset

    def load(self, address: np.ndarray, size: int) -> np.ndarray:
        """bytes [lanes, size]."""
        which, offset = self._locate(address, size)
        out = np.empty((len(address), size), np.uint8)
        for i in np.unique(which):
            lanes = which == i
            out[lanes] = self.spans[i][offset[lanes, None] + np.arange(size)]
        return out

    def store(self, address: np.ndarray, data: np.ndarray) -> None:
        which, offset = self._locate(address, data.shape[1])
        for i in np.unique(which):
            lanes = which == i
            self.spans[i][offset[lanes, None] + np.arange(data.shape[1])] = data[lanes]


@dataclass
class Instruction:
    """One parsed line: @[!]guard opcode operands."""

    opcode: list[str]
    operands: list[str]
    guard: str = ""
    negated: bool = False


@dataclass
class Program:
    """A parsed kernel: parameter names in order, instructions, label -> index."""

    parameters: list[tuple[str, str]]
    code: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    threads: int = 0


def _split_operands(text: str) -> list[str]:
    """Split at commas outside { } and [ ]."""
    parts, depth, start = [], 0, 0
    for i, c in enumerate(text):
        depth += c in "{["
        depth -= c in "}]"
        if c == "," and not depth:
            parts.append(text[start:i].strip())
            start = i + 1
    return [*parts, text[start:].strip()] if text.strip() else []


def _number_spins(body: str) -> str:
    """Labels of the spins of engine/kernels/sync*.py, unique in their { } only, made unique in the kernel."""
    spins = 0

    def number(match: re.Match[str]) -> str:
        nonlocal spins
        spins += match.group(0) == "POLL:"
        colon = ":" if match.group(0).endswith(":") else ""
        return f"{match.group(1)}_{spins}{colon}"

    return re.sub(r"\b(POLL|DONE)\b:?", number, body)


def parse(ptx: str) -> Program:
    """Parse a module with one kernel, as Triton emits it."""
    ptx = re.sub(r"//[^\n]*", "", ptx)
    head = ptx[ptx.index(".visible .entry") :]
    parameters = re.findall(r"\.param \.(\w+)[^,)]*?(\w+_param_\d+)", head[: head.index("{")])
    program = Program([(name, kind) for kind, name in parameters])
    threads = re.search(r"\.reqntid (\d+)", head)
    program.threads = int(threads.group(1)) if threads else 32
    body = head[head.index("{") + 1 : head.rindex("}")]
    body = body.split("$L__func_end")[0]
    body = re.sub(r"^\s*(\.loc\b.*|\.pragma.*|[{}]\s*)$", "", body, flags=re.M)
    body = re.sub(r"(\$L\w+|\b(?:POLL|DONE)_\d+):", r"\1:;", _number_spins(body))
    for raw in body.split(";"):
        line = " ".join(raw.split()).lstrip("{} ")  # the scope of inline assembly
        if not line or line.startswith("."):
            continue
        if line.endswith(":"):
            program.labels[line[:-1]] = len(program.code)
            continue
        guard = re.match(r"@(!?)(%?[pq]\d*)\s+", line)
        if guard:
            line = line[guard.end() :]
        opcode, _, rest = line.partition(" ")
        opcode = opcode.replace(".relaxed.sys", "")  # blocks run one after the other
        program.code.append(
            Instruction(
                opcode.split("."),
                _split_operands(rest),
                guard.group(2) if guard else "",
                bool(guard and guard.group(1)),
            )
        )
    return program
