"""POSIX asynchronous reads (aio.h): the C library's own threads read, and no Python thread waits for another's GIL.

glibc serves one read of a file descriptor at a time, so reads that should overlap need descriptors of their own; it runs
THREADS of them at once. `struct aiocb` below is glibc's on 64-bit Linux, the only C library that torch's CUDA builds are for.
"""

from __future__ import annotations

import ctypes
import errno
import os
from functools import cache

_SIGEV_NONE = 1
# Of the process, from its first read on. More than there are cores are slower than as many: 47 GB/s of plain reads with
# 20 threads on 16 cores, 83 with 16, 76 with 12; and one core is the caller's.
THREADS = max(1, min(16, (os.cpu_count() or 1) * 3 // 4))


class _Control(ctypes.Structure):
    """struct aiocb."""

    _fields_ = (
        ("fildes", ctypes.c_int),
        ("lio_opcode", ctypes.c_int),
        ("reqprio", ctypes.c_int),
        ("buf", ctypes.c_void_p),
        ("nbytes", ctypes.c_size_t),
        ("sigev_value", ctypes.c_void_p),
        ("sigev_signo", ctypes.c_int),
        ("sigev_notify", ctypes.c_int),
        ("sigev_rest", ctypes.c_byte * 48),
        ("next_prio", ctypes.c_void_p),
        ("abs_prio", ctypes.c_int),
        ("policy", ctypes.c_int),
        ("error_code", ctypes.c_int),
        ("return_value", ctypes.c_ssize_t),
        ("offset", ctypes.c_int64),
        ("reserved", ctypes.c_byte * 32),
    )


class _Init(ctypes.Structure):
    """struct aioinit."""

    _fields_ = tuple(
        (name, ctypes.c_int)
        for name in ("threads", "num", "locks", "usedba", "debug", "numusers", "idle_time", "rest")
    )


@cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    if not hasattr(library, "aio_read"):  # before glibc 2.34
        library = ctypes.CDLL("librt.so.1", use_errno=True)
    library.aio_return.restype = ctypes.c_ssize_t
    library.aio_init(ctypes.byref(_Init(threads=THREADS, num=64, idle_time=1)))
    return library


class Read:
    """One read at a time: `start`, then `wait`. Keep it, and the memory that it reads into, until `wait` has returned."""

    def __init__(self) -> None:
        self._control = _Control(sigev_notify=_SIGEV_NONE)
        self._pointer = ctypes.pointer(self._control)
        self._list = (ctypes.POINTER(_Control) * 1)(self._pointer)
        self._running = False

    def start(self, file: int, address: int, nbytes: int, offset: int) -> None:
        """Read nbytes at `offset` of a descriptor to `address`. Raises OSError."""
        assert not self._running
        control = self._control
        control.fildes, control.buf, control.nbytes, control.offset = file, address, nbytes, offset
        if _library().aio_read(self._pointer):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        self._running = True

    def wait(self) -> int:
        """Bytes read: fewer than asked for at the file's end. Raises OSError. A signal's handler runs, and may raise,
        while it waits; `wait` again then."""
        library = _library()
        while (number := library.aio_error(self._pointer)) == errno.EINPROGRESS:
            library.aio_suspend(self._list, 1, None)
        self._running = False
        done: int = library.aio_return(self._pointer)
        if number:
            raise OSError(number, os.strerror(number))
        return done

    @property
    def running(self) -> bool:
        """Started, and not waited for."""
        return self._running
