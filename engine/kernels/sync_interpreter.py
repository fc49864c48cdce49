"""The names of sync.py that hold PTX, for TRITON_INTERPRET=1: plain loads and stores on host
memory.

Called from interpreted kernels, so arguments are `tl.tensor` (numpy inside) or Python numbers.
Ranks are processes that share memory; x86 keeps stores in order and 4-byte accesses whole, which
is at least as strong as the GPU, so these twins prove the protocol's logic, not its fences. A spin
sleeps between polls: ranks outnumber cores in CI.
"""

from __future__ import annotations

import ctypes
import time

import numpy as np
import triton.language as tl
from triton._C.libtriton import interpreter as memory
from triton.runtime.interpreter import TensorHandle

_HALF = np.int16(-32768)
_WORD = np.int32(-2147483648)


def _array(value) -> np.ndarray:
    return np.asarray(value.handle.data if isinstance(value, tl.tensor) else value)


def _scalar(value) -> int:
    return int(_array(value).reshape(-1)[0])


def _tensor(data: np.ndarray, dtype) -> tl.tensor:
    kind = tl.block_type(dtype, list(data.shape)) if data.ndim else dtype
    return tl.tensor(TensorHandle(np.ascontiguousarray(data), dtype), kind)


def _load(address: np.ndarray, dtype=np.int32) -> np.ndarray:
    pointers = np.ascontiguousarray(address.astype(np.uint64))
    mask = np.ones(pointers.shape, dtype=bool)
    return memory.load(pointers, mask, np.zeros(pointers.shape, dtype=dtype), np.dtype(dtype))


def _store(address: np.ndarray, value: np.ndarray, mask: np.ndarray) -> None:
    pointers = np.ascontiguousarray(address.astype(np.uint64))
    memory.store(
        pointers,
        np.ascontiguousarray(np.broadcast_to(value, pointers.shape).astype(np.int32)),
        np.ascontiguousarray(np.broadcast_to(mask != 0, pointers.shape)),
    )


def _spin(ready, missing_peer, status, limit_us, rank, site, slot) -> None:
    """Poll `ready()` with the bounds of sync.py; on expiry write the status words."""
    words = _scalar(status) + 4 * np.arange(8)
    deadline = time.monotonic() + _scalar(limit_us) * 1e-6
    polls = 0
    while not ready():
        polls += 1
        time.sleep(0 if polls < 4 else 2e-4)
        if polls % 64:
            continue
        if _load(words[:1])[0] != 0:
            return
        if time.monotonic() > deadline:
            program = _scalar(tl.program_id(0))
            detail = [1, _scalar(rank), _scalar(site), _scalar(slot), missing_peer(), program, 0, 0]
            values = np.array(detail, dtype=np.int64)
            _store(words[4:], values[4:], np.ones(4))
            _store(words[:4][::-1], values[:4][::-1], np.ones(4))
            return


def wait_messages(base, stride, first_peer, status, limit_us, rank, site, slot, WORLD, VECTOR):
    offsets = np.arange(WORLD)[:, None] * _scalar(stride) + np.arange(VECTOR) * 4
    address = _array(base).astype(np.int64)[None, None, :] + offsets[:, :, None]
    words = np.empty(0, dtype=np.int32)

    def missing() -> np.ndarray:
        if VECTOR == 4:
            halves = (words & 0xFFFF == 0x8000) | (words >> 16 == _HALF)
            return halves.any(axis=1)  # [WORLD, lanes]
        return (words == _WORD).any(axis=1)

    def ready() -> bool:
        nonlocal words
        words = _load(address)
        return not missing().any()

    def first_missing() -> int:
        message, lane = np.unravel_index(int(missing().argmax()), (WORLD, address.shape[2]))
        peers = np.broadcast_to(_array(first_peer), (address.shape[2],))
        return int(message + peers[lane])

    _spin(ready, first_missing, status, limit_us, rank, site, slot)
    return tuple(_tensor(words[r, i], tl.int32) for r in range(WORLD) for i in range(VECTOR))


def wait_flags(address, epoch, peer, status, limit_us, rank, site, slot):
    flags = np.empty(0)
    peers = np.broadcast_to(_array(peer), _array(address).shape)
    target = _array(epoch).astype(np.int32)

    def late() -> np.ndarray:
        difference = flags.astype(np.int64) - target.astype(np.int64)
        return (difference & 0x80000000) != 0

    def ready() -> bool:
        nonlocal flags
        flags = _load(_array(address))
        return not late().any()

    first = lambda: int(peers.reshape(-1)[late().reshape(-1).argmax()])
    _spin(ready, first, status, limit_us, rank, site, slot)
    return _tensor(flags, tl.int32)


def release_flag(address, value, mask) -> None:
    """One store a flag: the interpreter's own copies 4 bytes twice (as memcpy does), and the second copy may land
    after the receiver has seen the first and re-armed the word."""
    lanes = np.broadcast_arrays(_array(address), _array(value), _array(mask))
    for where, word, on in zip(*(lane.reshape(-1) for lane in lanes)):
        if on:
            ctypes.c_int32.from_address(int(where)).value = int(word)


def push16(address, w0, w1, w2, w3, mask) -> None:
    for i, word in enumerate((w0, w1, w2, w3)):
        _store(_array(address).astype(np.int64) + 4 * i, _array(word), _array(mask))


def push8(address, w0, w1, mask) -> None:
    for i, word in enumerate((w0, w1)):
        _store(_array(address).astype(np.int64) + 4 * i, _array(word), _array(mask))


def load16(address, mask):
    kept = _array(mask) != 0
    lanes = np.where(kept, _array(address).astype(np.int64), 0)
    pointers = np.ascontiguousarray(lanes.astype(np.uint64))
    kept = np.ascontiguousarray(np.broadcast_to(kept, pointers.shape))
    zeros = np.zeros(pointers.shape, dtype=np.int32)
    dtype = np.dtype(np.int32)
    loads = [memory.load(pointers + np.uint64(4 * i), kept, zeros, dtype) for i in range(4)]
    return tuple(_tensor(words, tl.int32) for words in loads)


def globaltimer():
    return _tensor(np.asarray(time.monotonic_ns(), dtype=np.int64), tl.int64)
