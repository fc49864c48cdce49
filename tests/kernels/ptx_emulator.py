"""Run the PTX of a compiled kernel on the CPU, thread block by thread block, with NumPy.

Gluon kernels have no interpreter; this is theirs. It executes what ptxas would get: registers are arrays over the
threads of a block, all threads take each instruction together, and branches must be uniform. Global memory is
the real memory of CPU tensors; an access outside the registered ones is an error. cp.async data lands as late
as the program allows (at its wait_group), so a missing wait reads poison; barriers are no-ops, so a missing
barrier is not found. Only the instructions our kernels use: anything else raises NotImplementedError.

PTX ISA 8.7: fragments of mma.m16n8k16 are figures of section 9.7.14.5.8, shfl section 9.7.9.6.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np
import torch

from tests.kernels.ptx_program import U64, Instruction, Memory, Program, parse


def _e4m3_table() -> np.ndarray:
    codes = torch.arange(256, dtype=torch.uint8)
    return codes.view(torch.float8_e4m3fn).to(torch.float16).numpy()


def _to_bf16(value: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(value, np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _from_bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


class Block:
    """One thread block in flight."""

    def __init__(
        self, program: Program, memory: Memory, shared_bytes: int, values: dict, block: int, blocks: int = 1
    ):  # fmt: skip
        self.program, self.memory, self.values = program, memory, values
        self.n = program.threads
        self.block, self.blocks = block, blocks
        # Poison: NaN in every float type.
        self.shared = np.full(shared_bytes, 0xFF, np.uint8)
        self.registers: dict[str, np.ndarray] = {}
        self.pending: list[tuple[np.ndarray, np.ndarray]] = []
        self.groups: list[list[tuple[np.ndarray, np.ndarray]]] = []
        self.table = _e4m3_table()

    # Operands

    def read(self, name: str) -> np.ndarray:
        """Bits of an operand as uint64 [threads]."""
        if name in self.registers:
            return self.registers[name]
        special = {
            "%tid.x": np.arange(self.n, dtype=U64),
            "%ctaid.x": np.full(self.n, self.block, U64),
            "%nctaid.x": np.full(self.n, self.blocks, U64),
            "%laneid": np.arange(self.n, dtype=U64) % U64(32),
            "global_smem": np.zeros(self.n, U64),
        }
        if name in special:
            return special[name]
        if re.fullmatch(r"0[fF][0-9A-Fa-f]{8}", name):
            return np.full(self.n, int(name[2:], 16), U64)
        if re.fullmatch(r"-?\d+|-?0x[0-9A-Fa-f]+", name):
            return np.full(self.n, int(name, 0) & 0xFFFFFFFFFFFFFFFF, U64)
        raise NotImplementedError(f"operand {name!r} (read before it was written?)")

    def typed(self, name: str, kind: str) -> np.ndarray:
        """Operand as the NumPy type of a PTX type suffix."""
        bits = self.read(name)
        size = int(re.sub(r"\D", "", kind.replace("bf16", "16").replace("f16", "16")) or 0) // 8
        if kind == "pred":
            return bits.astype(bool)
        if kind == "f32":
            return bits.astype(np.uint32).view(np.float32)
        if kind == "bf16":
            return _from_bf16(bits.astype(np.uint16))
        if kind == "f16":
            return bits.astype(np.uint16).view(np.float16)
        sign = "i" if kind[0] == "s" else "u"
        return bits.astype(f"u{size}").view(f"{sign}{size}")

    def write(self, name: str, value: np.ndarray, active: np.ndarray | None) -> None:
        """Store bits (any NumPy type) into a register, where active."""
        if value.dtype.kind == "b":
            value = value.astype(U64)
        value = np.ascontiguousarray(value).view(f"u{value.dtype.itemsize}").astype(U64)
        if active is not None and not active.all():
            value = np.where(active, value, self.registers.get(name, np.zeros(self.n, U64)))
        self.registers[name] = value

    def address(self, operand: str) -> np.ndarray:
        match = re.fullmatch(r"\[\s*([\w%$.]+)\s*(?:\+\s*(-?\d+))?\s*\]", operand)
        if not match:
            raise NotImplementedError(f"address {operand!r}")
        return self.read(match.group(1)) + U64(int(match.group(2) or 0) & 0xFFFFFFFFFFFFFFFF)

    # Execution

    def run(self) -> None:
        at = 0
        with np.errstate(all="ignore"):
            while at < len(self.program.code):
                instruction = self.program.code[at]
                active = None
                if instruction.guard:
                    active = self.read(instruction.guard).astype(bool) ^ instruction.negated
                if instruction.opcode[0] == "bra":
                    taken = active is None or bool(active[0])
                    if active is not None and (active != active[0]).any():
                        raise NotImplementedError("divergent branch")
                    at = self.program.labels[instruction.operands[0]] if taken else at + 1
                    continue
                if instruction.opcode[0] == "ret":
                    return
                self.step(instruction, active)
                at += 1

    def step(self, instruction: Instruction, active: np.ndarray | None) -> None:
        op, args = instruction.opcode, instruction.operands
        name = op[0]
        if name in ("bar", "griddepcontrol"):
            return
        if name == "ld" and op[1] == "param":
            value = np.full(self.n, self.values[args[1].strip("[] ")], U64)
            return self.write(args[0], value, None)
        if name in ("ld", "st"):
            return self.load_store(op, args, active)
        if name == "cp":
            return self.cp_async(op, args, active)
        if name == "mma":
            return self.mma(op, args)
        if name == "shfl":
            other = self.read(args[2]).astype(int)
            me = np.arange(self.n)
            lane = {"bfly": me ^ other, "idx": me // 32 * 32 + other % 32}[op[2]]
            return self.write(args[0], self.read(args[1])[lane].astype(np.uint32), active)
        if name == "mov":
            return self.mov(op, args, active)
        if name == "cvt":
            return self.convert(op, args, active)
        self.write(args[0], self.compute(op, args), active)

    def compute(self, op: list[str], args: list[str]) -> np.ndarray:
        """Register-to-register arithmetic: the result, in the destination's type."""
        kind = op[-1]
        name = op[0]
        if name == "setp":
            a, b = (self.typed(x, kind) for x in args[1:3])
            compare: dict[str, Callable] = {
                "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal,
                "gt": np.greater, "ge": np.greater_equal, "nan": lambda a, b: (a != a) | (b != b),
            }  # fmt: skip
            return compare[op[1]](a, b)
        if name == "selp":
            return np.where(
                self.typed(args[3], "pred"), self.typed(args[1], kind), self.typed(args[2], kind)
            )
        if name in ("mul", "mad") and op[1] == "wide":
            wide = "s64" if kind[0] == "s" else "u64"
            a, b = (self.typed(x, kind).astype(wide[0].replace("s", "i") + "8") for x in args[1:3])
            return a * b + (self.typed(args[3], wide) if name == "mad" else 0)
        if op[:2] == ["mul", "hi"]:  # of 32 bits
            wide = {"s32": np.int64, "u32": np.uint64}[kind]
            a, b = (self.typed(x, kind).astype(wide) for x in args[1:3])
            return (a * b >> wide(32)).astype(np.uint32)
        if name == "prmt":  # each byte of the result: one of the eight of the two operands
            both = (self.read(args[1]) & U64(0xFFFFFFFF)) | (self.read(args[2]) << U64(32))
            pick = [int(args[3].rstrip("U"), 0) >> 4 * i & 15 for i in range(4)]
            if max(pick) > 7:
                raise NotImplementedError("prmt with a replicated sign")
            return sum((both >> U64(8 * p) & U64(255)) << U64(8 * i) for i, p in enumerate(pick))
        if kind == "s16x2":  # signed halves of a word
            low, high = (
                [(self.read(x).astype(np.uint32) << up).view(np.int32) >> 16 for x in args[1:3]]
                for up in (np.uint32(16), np.uint32(0))
            )
            if name != "min":
                raise NotImplementedError(".".join(op))
            return (np.minimum(*low) & 0xFFFF) | (np.minimum(*high) << 16)
        if name in ("bfe",):
            return self.bfe(kind, args)
        if name in ("shl", "shr"):
            a = self.typed(args[1], kind)
            amount = self.typed(args[2], "u32")
            bits = a.dtype.itemsize * 8
            count = np.minimum(amount, bits - 1).astype(a.dtype)
            shifted = a << count if name == "shl" else a >> count
            if a.dtype.kind == "i" and name == "shr":
                return shifted
            return np.where(amount >= bits, np.zeros_like(a), shifted)
        values = [self.typed(x, kind) for x in args[1:]]
        a = values[0]
        b = values[1] if len(values) > 1 else a
        if name in ("fma", "mad"):
            if kind == "f32":
                exact = a.astype(np.float64) * b + values[2]
                return exact.astype(np.float32)
            return a * b + values[2]
        unary_binary: dict[str, Callable] = {
            "add": lambda: a + b,
            "sub": lambda: a - b,
            "mul": lambda: a * b,
            "div": lambda: a / b,
            "rem": lambda: np.fmod(a, b),
            "min": lambda: np.fmin(a, b) if a.dtype.kind == "f" else np.minimum(a, b),
            "max": lambda: np.fmax(a, b) if a.dtype.kind == "f" else np.maximum(a, b),
            "and": lambda: a & b,
            "or": lambda: a | b,
            "xor": lambda: a ^ b,
            "not": lambda: ~a,
            "neg": lambda: -a,
            "abs": lambda: np.abs(a),
            "rsqrt": lambda: 1 / np.sqrt(a),
            "ex2": lambda: np.exp2(a),
        }
        if name not in unary_binary:
            raise NotImplementedError(".".join(op))
        result = unary_binary[name]()
        if kind == "bf16":
            return _to_bf16(result)
        return np.asarray(result, a.dtype)

    def bfe(self, kind: str, args: list[str]) -> np.ndarray:
        a = self.typed(args[1], kind)
        start, length = int(args[2], 0), int(args[3], 0)
        bits = a.dtype.itemsize * 8
        up = a.dtype.type(bits - start - length)
        return (a << up) >> a.dtype.type(bits - length)

    def mov(self, op: list[str], args: list[str], active: np.ndarray | None) -> None:
        width = int(re.sub(r"\D", "", op[1]) or 1)
        if args[0].startswith("{"):
            names = [x.strip() for x in args[0].strip("{}").split(",")]
            part = width // len(names)
            bits = self.read(args[1])
            for i, register in enumerate(names):
                value = (bits >> U64(i * part)) & U64((1 << part) - 1)
                self.write(register, value.astype(f"u{part // 8}"), active)
        elif args[1].startswith("{"):
            names = [x.strip() for x in args[1].strip("{}").split(",")]
            part = width // len(names)
            total = np.zeros(self.n, U64)
            for i, register in enumerate(names):
                # LLVM fills halves that are masked off again with a register that nothing writes.
                bits = self.registers.get(register)
                bits = np.full(self.n, 2**64 - 1, U64) if bits is None else bits
                total |= (bits & U64((1 << part) - 1)) << U64(i * part)
            self.write(args[0], total.astype(f"u{width // 8}"), active)
        elif op[1] == "pred":
            self.write(args[0], self.read(args[1]).astype(bool), active)
        else:
            self.write(args[0], self.read(args[1]).astype(f"u{width // 8}"), active)

    def convert(self, op: list[str], args: list[str], active: np.ndarray | None) -> None:
        target, source = op[-2], op[-1]
        if source == "e4m3x2":  # f16x2
            bits = self.read(args[1])
            low = self.table[(bits & U64(0xFF)).astype(int)].view(np.uint16)
            high = self.table[((bits >> U64(8)) & U64(0xFF)).astype(int)].view(np.uint16)
            value = low.astype(np.uint32) | (high.astype(np.uint32) << 16)
        elif target in ("f16x2", "bf16x2"):  # first source operand goes to the upper half
            halves = []
            for x in args[1:3]:
                v = self.typed(x, "f32")
                half = v.astype(np.float16).view(np.uint16) if target == "f16x2" else _to_bf16(v)
                halves.append(half.astype(np.uint32))
            value = halves[1] | (halves[0] << 16)
        elif target == "bf16":
            value = _to_bf16(self.typed(args[1], source))
        elif target in ("f16", "f32"):
            value = self.typed(args[1], source).astype(
                {"f16": np.float16, "f32": np.float32}[target]
            )
        else:
            a = self.typed(args[1], source)
            value = a.astype(("i" if target[0] == "s" else "u") + str(int(target[1:]) // 8))
        self.write(args[0], value, active)

    # Memory

    def load_store(self, op: list[str], args: list[str], active: np.ndarray | None) -> None:
        size = int(re.sub(r"\D", "", op[-1])) // 8
        store = op[0] == "st"
        where, what = (args[0], args[1]) if store else (args[1], args[0])
        names = [x.strip() for x in what.strip("{} ").split(",")]
        lanes = np.flatnonzero(active) if active is not None else np.arange(self.n)
        address = self.address(where)[lanes]
        total = size * len(names)
        if store:
            data = [
                self.read(x)[lanes].astype(f"u{size}").view(np.uint8).reshape(-1, size)
                for x in names
            ]
            self.put(op[1], address, np.concatenate(data, 1))
            return
        raw = self.get(op[1], address, total)
        for i, register in enumerate(names):
            value = np.zeros(self.n, f"u{size}")
            part = np.ascontiguousarray(raw[:, i * size : (i + 1) * size])
            value[lanes] = part.view(f"u{size}").ravel()
            self.write(register, value, active)

    def get(self, space: str, address: np.ndarray, size: int) -> np.ndarray:
        if space == "global":
            return self.memory.load(address, size)
        if (address % U64(size)).any():
            raise RuntimeError(f"misaligned {size}-byte shared access")
        return self.shared[address.astype(np.int64)[:, None] + np.arange(size)]

    def put(self, space: str, address: np.ndarray, data: np.ndarray) -> None:
        if space == "global":
            return self.memory.store(address, data)
        if (address % U64(data.shape[1])).any():
            raise RuntimeError("misaligned shared store")
        self.shared[address.astype(np.int64)[:, None] + np.arange(data.shape[1])] = data

    def cp_async(self, op: list[str], args: list[str], active: np.ndarray | None) -> None:
        if op[2] == "commit_group":
            self.groups.append(self.pending)
            self.pending = []
        elif op[2] == "wait_group":
            keep = int(args[0], 0)
            while len(self.groups) > keep:
                for address, data in self.groups.pop(0):
                    self.put("shared", address, data)
        else:
            size = int(args[2], 0)
            lanes = np.flatnonzero(active) if active is not None else np.arange(self.n)
            data = np.zeros((len(lanes), size), np.uint8)
            real = np.full(len(lanes), size)
            if len(args) > 3:
                real = self.typed(args[3], "u32")[lanes].astype(int)
            if not np.isin(real, (0, size)).all():
                raise NotImplementedError("partial cp.async")
            full = real == size
            data[full] = self.memory.load(self.address(args[1])[lanes][full], size)
            self.pending.append((self.address(args[0])[lanes], data))

    def mma(self, op: list[str], args: list[str]) -> None:
        if op[3] != "m16n8k16" or op[4:6] != ["row", "col"]:
            raise NotImplementedError(".".join(op))
        half = op[-2]

        def registers(text: str) -> list[np.ndarray]:
            return [self.read(x.strip()) for x in text.strip("{} ").split(",")]

        def halves(bits: np.ndarray) -> np.ndarray:
            """[threads, 2] fp32."""
            pair = np.stack([bits & U64(0xFFFF), bits >> U64(16)], 1).astype(np.uint16)
            return _from_bf16(pair) if half == "bf16" else pair.view(np.float16).astype(np.float32)

        warps = self.n // 32
        lane = np.arange(self.n) % 32
        warp = np.arange(self.n) // 32
        group, quad = lane // 4, lane % 4
        a = np.empty((warps, 16, 16), np.float64)
        b = np.empty((warps, 16, 8), np.float64)
        for i, bits in enumerate(registers(args[1])):
            for j in range(2):
                a[warp, group + 8 * (i % 2), 2 * quad + 8 * (i // 2) + j] = halves(bits)[:, j]
        for i, bits in enumerate(registers(args[2])):
            for j in range(2):
                b[warp, 2 * quad + 8 * i + j, group] = halves(bits)[:, j]
        c = np.empty((warps, 16, 8), np.float64)
        for i, bits in enumerate(registers(args[3])):
            c[warp, group + 8 * (i // 2), 2 * quad + i % 2] = bits.astype(np.uint32).view(
                np.float32
            )
        d = (a @ b + c).astype(np.float32)
        for i, register in enumerate(args[0].strip("{} ").split(",")):
            self.write(register.strip(), d[warp, group + 8 * (i // 2), 2 * quad + i % 2], None)


def launch(
    ptx: str, grid: int, shared_bytes: int, arguments: Sequence[int | float | torch.Tensor],
    extra_memory: Sequence[torch.Tensor] = (),
) -> None:  # fmt: skip
    """Run all blocks of a 1-D grid one after the other. `arguments` in parameter order; Triton's two trailing
    scratch pointers are added as 0. `extra_memory`: CPU tensors reached through addresses in memory."""
    program = parse(ptx)
    memory = Memory([*(a for a in arguments if isinstance(a, torch.Tensor)), *extra_memory])
    values = {}
    for (name, kind), argument in zip(program.parameters, [*arguments, 0, 0]):
        if isinstance(argument, torch.Tensor):
            argument = argument.data_ptr()
        if kind == "f32":
            argument = int(np.float32(argument).view(np.uint32))
        values[name] = U64(int(argument) & 0xFFFFFFFFFFFFFFFF)
    for block in range(grid):
        Block(program, memory, shared_bytes, values, block, grid).run()
