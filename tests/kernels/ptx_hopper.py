"""ptx_emulator with Hopper's asynchronous parts: TMA loads, mbarriers, wgmma.

The hardware may do an asynchronous step at any time between its start and its wait, and the
extremes find most faults: wgmma reads its shared-memory operands as LATE as it may (at wait_group;
its accumulators are NaN until then), TMA data lands early (when issued: a stage still in use is
destroyed) or late (at the barrier's wait: poison is read before). A kernel must be right under
both. Waiting on a barrier nobody armed is reported, not a hang.

PTX ISA 8.7: tensor-map swizzles 5.5.6, wgmma descriptors and fragments 9.7.15.5, stmatrix
9.7.14.5.16, prmt 9.7.8.7.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tests.kernels.ptx_emulator import U64, Block, Instruction, Memory, _from_bf16, _to_bf16, parse


@dataclass(frozen=True)
class TensorMap:
    """A TMA descriptor argument: a row-major matrix, box of `rows` x `swizzle` bytes."""

    matrix: torch.Tensor
    rows: int
    swizzle: int  # bytes: 32, 64 or 128


@dataclass
class Barrier:
    parity: int = 0
    expected: int | None = None
    landed: int = 0
    late: list | None = None


def _swizzled(address: np.ndarray, swizzle: int) -> np.ndarray:
    """XOR of the 16-byte chunk number with the 128-byte line number, over swizzle / 16 chunks."""
    return address ^ (((address >> 7) & (swizzle // 16 - 1)) << 4)


class HopperBlock(Block):
    """One thread block; early: TMA data lands when it is issued; lazy: wgmma runs at its wait, else
    at its commit."""

    def __init__(self, *args, maps: dict[int, TensorMap], early: bool, lazy: bool = True):
        super().__init__(*args)
        self.maps, self.early, self.lazy = maps, early, lazy
        self.barriers: dict[int, Barrier] = {}
        self.open: list[Instruction] = []  # wgmma since the last commit
        self.committed: list[list[Instruction]] = []
        self.sums: dict[
            tuple, np.ndarray
        ] = {}  # accumulators of unfinished wgmma: [threads, registers]

    def read(self, name: str) -> np.ndarray:
        if name in self.values:  # the address of a by-value parameter: a tensor map
            return np.full(self.n, self.values[name], U64)
        return super().read(name.removesuffix("U") if name.startswith("0x") else name)

    def step(self, instruction: Instruction, active: np.ndarray | None) -> None:
        op, args = instruction.opcode, instruction.operands
        name = op[0]
        if name in ("fence", "membar"):
            return
        if name == "cvta":
            return self.write(args[0], self.read(args[1]), active)
        if name == "elect":
            register, predicate = args[0].split("|")
            self.write(register, np.zeros(self.n, np.uint32), None)
            return self.write(predicate, np.arange(self.n) % 32 == 0, None)
        if name == "mbarrier":
            return self.mbarrier(op, args, active)
        if name == "cp" and op[2] == "bulk":
            return self.tma(args, active)
        if name == "wgmma":
            return self.wgmma(instruction)
        if name == "stmatrix":
            return self.stmatrix(op, args)
        if name == "ldmatrix":
            return self.ldmatrix(op, args)
        if name == "atom":
            return self.atomic_add(args, active)
        if name == "ld" and op[1] == "global" and op[2] == "cg":
            op = [*op[:2], *op[3:]]
        super().step(Instruction(op, args, instruction.guard, instruction.negated), active)

    def compute(self, op: list[str], args: list[str]) -> np.ndarray:
        if op[0] == "prmt":
            return self.prmt(*(self.read(a).astype(np.uint32) for a in args[1:4]))
        if op[0] == "mul" and op[-1] == "bf16x2":
            a, b = (self.read(x).astype(np.uint32) for x in args[1:3])
            halves = [
                _to_bf16(
                    _from_bf16((a >> s).astype(np.uint16)) * _from_bf16((b >> s).astype(np.uint16))
                )
                for s in (0, 16)
            ]
            return halves[0].astype(np.uint32) | (halves[1].astype(np.uint32) << 16)
        if op[0] == "mul" and op[1] == "hi":
            a, b = (self.typed(x, op[-1]) for x in args[1:3])
            wide = a.astype(np.int64 if op[-1] == "s32" else U64) * b
            return (wide >> wide.dtype.type(32)).astype(a.dtype)
        if op[0] in ("div", "rem") and op[-1] in ("s32", "u32"):
            a, b = (self.typed(x, op[-1]).astype(np.int64) for x in args[1:3])
            quotient = (np.abs(a) // np.abs(b)) * np.sign(a) * np.sign(b)
            return (quotient if op[0] == "div" else a - quotient * b).astype(np.int32)
        return super().compute(op, args)

    @staticmethod
    def prmt(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
        both = a.astype(U64) | (b.astype(U64) << U64(32))
        out = np.zeros(len(a), np.uint32)
        for i in range(4):
            nibble = (selector >> (4 * i)) & 15
            byte = ((both >> (8 * (nibble & 7)).astype(U64)) & U64(255)).astype(np.uint32)
            sign = np.where(byte & 0x80, np.uint32(255), np.uint32(0))
            out |= np.where(nibble & 8, sign, byte) << np.uint32(8 * i)
        return out

    # Barriers and TMA

    def _one(self, operand: str, active: np.ndarray | None) -> int | None:
        """Address of an operation that one thread of the block performs; None if no thread does."""
        lanes = np.arange(self.n) if active is None else np.flatnonzero(active)
        if not len(lanes):
            return None
        if len(lanes) > 1:
            raise RuntimeError(f"{len(lanes)} threads do what one should")
        return int(self.address(operand)[lanes[0]])

    def mbarrier(self, op: list[str], args: list[str], active: np.ndarray | None) -> None:
        if op[1] == "wait":  # from `launch`: the try_wait loop
            where, phase = int(self.address(args[0])[0]), int(self.read(args[1])[0])
            bar = self.barriers[where]
            if bar.parity != phase:
                return  # that phase is over
            for land in bar.late or []:
                land()
            if bar.expected is None or bar.landed != bar.expected:
                raise RuntimeError(f"dead wait: {bar.landed} of {bar.expected} bytes arrive")
            self.barriers[where] = Barrier(parity=1 - phase)
            return
        where_one = self._one(args[1] if op[1] == "arrive" else args[0], active)
        if where_one is None:
            return
        if op[1] == "init":
            self.barriers[where_one] = Barrier(late=[])
        elif op[1] == "inval":
            bar = self.barriers.pop(where_one)
            if bar.expected is not None:
                raise RuntimeError("barrier destroyed while loads are under way")
        elif op[1] == "arrive" and op[2] == "expect_tx":
            bar = self.barriers[where_one]
            if bar.expected is not None:
                raise RuntimeError("barrier armed twice in one phase")
            bar.expected, bar.late = int(args[2]), bar.late or []
        else:
            raise NotImplementedError(".".join(op))

    def tma(self, args: list[str], active: np.ndarray | None) -> None:
        """A box for every active lane: a tile wider than its swizzle pattern is several boxes, one
        a warp."""
        for lane in np.arange(self.n) if active is None else np.flatnonzero(active):
            self.copy_box(args, int(lane))

    def copy_box(self, args: list[str], lane: int) -> None:
        destination = int(self.address(args[0])[lane])
        handle, coordinates = args[1].strip("[] ").split(",", 1)
        tensor_map = self.maps[int(self.read(handle.strip())[lane])]
        column, row = (
            int(self.read(c.strip())[lane].astype(np.uint32).view(np.int32))
            for c in coordinates.strip(" {}").split(",")
        )
        item = tensor_map.matrix.element_size()
        width = tensor_map.swizzle // item
        box = torch.zeros(tensor_map.rows, width, dtype=tensor_map.matrix.dtype)
        part = tensor_map.matrix[row : row + tensor_map.rows, column : column + width]
        box[: part.shape[0], : part.shape[1]] = part
        data = box.view(torch.uint8).numpy().copy()
        if destination % (8 * tensor_map.swizzle):
            raise RuntimeError("TMA destination not aligned to its swizzle pattern")
        places = np.arange(data.size).reshape(data.shape) + destination
        bar = self.barriers[int(self.address(args[2])[lane])]
        assert bar.late is not None and bar.expected is not None

        def land() -> None:
            self.shared[_swizzled(places, tensor_map.swizzle)] = data
            bar.landed += data.size

        if self.early:
            land()
        else:
            bar.late.append(land)

    # Tensor cores

    def wgmma(self, instruction: Instruction) -> None:
        op = instruction.opcode
        if op[1] == "fence":
            return
        if op[1] == "commit_group":
            self.committed.append(self.open)
            self.open = []
            if not self.lazy:
                self.finish(0)
        elif op[1] == "wait_group":
            self.finish(int(instruction.operands[0]))
        else:
            names = self.names(instruction.operands[0])
            if names not in self.sums:
                zero = np.zeros((self.n, len(names)), np.float32)
                if self.scale_d(instruction)[0]:
                    zero = np.stack([self.typed(r, "f32") for r in names], 1)
                self.sums[names] = zero
            for register in names:
                self.write(register, np.full(self.n, np.nan, np.float32), None)
            # Descriptors and the predicate are scalars read now; shared memory and fragments are
            # read at the wait.
            registers = [
                a if a.startswith("{") else self.read(a).copy() for a in instruction.operands[1:3]
            ]
            operands: list = [instruction.operands[0], *registers, self.scale_d(instruction)]
            kept = Instruction(op, operands)
            if any(int(x, 0) for x in instruction.operands[6:]):
                raise NotImplementedError("transposed shared operand")
            self.open.append(kept)

    def finish(self, keep: int) -> None:
        """Run committed groups until `keep` are left; hand out accumulators nothing works on any
        more."""
        while len(self.committed) > keep:
            for pending in self.committed.pop(0):
                self.multiply(pending)
        busy = {self.names(i.operands[0]) for group in self.committed for i in group}
        for names in [n for n in self.sums if n not in busy]:
            for i, register in enumerate(names):
                self.write(register, self.sums[names][:, i], None)
            del self.sums[names]

    @staticmethod
    def names(text: str) -> tuple[str, ...]:
        return tuple(x.strip() for x in text.strip("{} ").split(","))

    def scale_d(self, instruction: Instruction) -> np.ndarray:
        return self.read(instruction.operands[3]).astype(bool)

    def multiply(self, instruction: Instruction) -> None:
        """D = A B (+ D), m64nNk16 of 16-bit or m64nNk32 of e4m3 operands, for every warpgroup."""
        kind = instruction.opcode[6]
        sizes = re.fullmatch(rf"m64n(\d+)k{32 if kind == 'e4m3' else 16}", instruction.opcode[4])
        if not sizes or instruction.opcode[5] != "f32":
            raise NotImplementedError(".".join(instruction.opcode))
        n = int(sizes.group(1))
        names = self.names(instruction.operands[0])
        a_operand, b_operand, keep = instruction.operands[1:]
        lane, warp = np.arange(128) % 32, np.arange(128) // 32
        for first in range(0, self.n, 128):
            b = self.from_shared(int(b_operand[first]), n, kind)  # [n, 16]
            if isinstance(a_operand, str):
                a = np.empty((64, 16), np.float64)
                for i, register in enumerate(self.names(a_operand)):
                    bits = self.read(register)[first : first + 128]
                    pair = np.stack([bits & U64(0xFFFF), bits >> U64(16)], 1).astype(np.uint16)
                    for j in range(2):
                        row = 16 * warp + lane // 4 + 8 * (i % 2)
                        a[row, 2 * (lane % 4) + 8 * (i // 2) + j] = _floats(pair[:, j], kind)
            else:
                a = self.from_shared(int(a_operand[first]), 64, kind)
            product = a @ b.T
            row = 16 * warp + lane // 4
            total = self.sums[names][first : first + 128]
            for i in range(len(names)):
                part = product[row + 8 * (i // 2 % 2), 8 * (i // 4) + 2 * (lane % 4) + i % 2]
                total[:, i] = part + (total[:, i] if keep[first] else 0)

    def from_shared(self, descriptor: int, rows: int, kind: str) -> np.ndarray:
        """[rows, 32 bytes of K] fp64 of a K-major operand."""
        start = (descriptor & 0x3FFF) << 4
        stride = ((descriptor >> 32) & 0x3FFF) << 4
        swizzle = {1: 128, 2: 64, 3: 32}[descriptor >> 62]
        r = np.arange(rows)[:, None]
        line = start + r // 8 * stride + r % 8 * swizzle
        if kind == "e4m3":
            codes = self.shared[_swizzled(line + np.arange(32)[None, :], swizzle)]
            return torch.from_numpy(codes).view(torch.float8_e4m3fn).double().numpy()
        where = _swizzled(line + 2 * np.arange(16)[None, :], swizzle)
        bits = self.shared[where].astype(np.uint16) | (
            self.shared[where + 1].astype(np.uint16) << 8
        )
        return _floats(bits, kind).astype(np.float64)

    # Matrices and atomics

    def _matrix_rows(self, operand: str, count: int) -> np.ndarray:
        """[warps, matrix, row] addresses, from lanes 8 i + row."""
        return (
            self.address(operand)
            .astype(np.int64)
            .reshape(-1, 32)[:, : 8 * count]
            .reshape(-1, count, 8)
        )

    def stmatrix(self, op: list[str], args: list[str]) -> None:
        names = self.names(args[1])
        rows = self._matrix_rows(args[0], len(names))
        for i, register in enumerate(names):
            bits = self.read(register).astype(np.uint32).reshape(-1, 32)
            halves = np.stack([bits & 0xFFFF, bits >> 16], -1).reshape(
                -1, 8, 8
            )  # [warp, lane/4, 2(lane%4)+j]
            matrix = halves.transpose(0, 2, 1) if "trans" in op else halves
            where = rows[:, i, :, None] + 2 * np.arange(8)
            self.shared[where] = matrix & 0xFF
            self.shared[where + 1] = matrix >> 8

    def ldmatrix(self, op: list[str], args: list[str]) -> None:
        names = self.names(args[0])
        rows = self._matrix_rows(args[1], len(names))
        for i, register in enumerate(names):
            where = rows[:, i, :, None] + 2 * np.arange(8)
            matrix = self.shared[where].astype(np.uint32) | (
                self.shared[where + 1].astype(np.uint32) << 8
            )
            if "trans" in op:
                matrix = matrix.transpose(0, 2, 1)
            pair = matrix.reshape(-1, 32, 2)
            self.write(
                register, (pair[..., 0] | (pair[..., 1] << 16)).ravel().astype(np.uint32), None
            )

    def atomic_add(self, args: list[str], active: np.ndarray | None) -> None:
        old = np.zeros(self.n, np.uint32)
        for lane in np.arange(self.n) if active is None else np.flatnonzero(active):
            where = self.address(args[1])[lane : lane + 1]
            value = self.memory.load(where, 4).view(np.uint32)[:, 0]
            old[lane] = value[0]
            total = value + self.read(args[2])[lane : lane + 1].astype(np.uint32)
            self.memory.store(where, total.astype(np.uint32).view(np.uint8).reshape(1, 4))
        self.write(args[0], old, active)


def _floats(bits: np.ndarray, kind: str) -> np.ndarray:
    return _from_bf16(bits) if kind == "bf16" else bits.view(np.float16).astype(np.float32)


_WAIT_LOOP = re.compile(
    r"\{\s*\.reg \.pred complete;\s*waitLoop:\s*"
    r"mbarrier\.try_wait\.parity\.shared\.b64 complete, ([^;]+);"
    r"\s*@!complete bra\.uni waitLoop;\s*\}"
)


def launch(
    ptx: str,
    grid: int,
    shared_bytes: int,
    arguments: Sequence[int | torch.Tensor | TensorMap],
    *,
    early: bool,
    lazy: bool = True,
) -> None:
    """Run all blocks of a 1-D grid in turn; a TensorMap takes the five parameters Triton makes of a
    descriptor."""
    program = parse(_WAIT_LOOP.sub(r"mbarrier.wait \1;", ptx))
    tensors = [a for a in arguments if isinstance(a, torch.Tensor)]
    flat: list[int] = []
    maps: dict[int, TensorMap] = {}
    for argument in arguments:
        if isinstance(argument, TensorMap):
            handle = 0x7D5C_0000_0000 + 64 * len(maps)
            maps[handle] = argument
            flat += [handle, *argument.matrix.shape, *argument.matrix.stride()]
        else:
            flat.append(argument.data_ptr() if isinstance(argument, torch.Tensor) else argument)
    values = {
        name: U64(value & 0xFFFFFFFFFFFFFFFF)
        for (name, _), value in zip(program.parameters, [*flat, 0, 0])
    }
    for block in range(grid):
        HopperBlock(
            program, Memory(tensors), shared_bytes, values, block, maps=maps, early=early, lazy=lazy
        ).run()
