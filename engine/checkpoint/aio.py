"""POSIX asynchronous reads (aio.h): the C library's own threads read, and no Python thread waits for another's GIL.

glibc serves one read of a file descriptor at a time, so reads that should overlap need descriptors of their own; it runs
THREADS of them at once. `struct aiocb` below is glibc's on 64-bit Linux, the only C library that torch's CUDA builds are for.
With another, and in a forked child of a process that has read (its reading threads stay behind, and a read would wait
for them for ever), `Reads` reads nothing and says so: the caller reads.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Sequence
from functools import cache
from typing import Any

_SIGEV_NONE, _LIO_NOWAIT = 1, 1
_CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
# Of the process, from its first read on. Plain reads want as many as there are cores, but transfers and the caller want
# theirs: of a load on 32 cores onto one and two H200s 45 and 54 GB/s with 10, 44 and 56 with 12, 44 and 52 with 14; with
# 16 cores 12 were slower than 10. Not below 4, as disks want several at once: 1.2 GB/s with 4 on 2 cores, 0.9 with 1.
THREADS = max(4, min(10, _CORES * 3 // 4))


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
def _loaded() -> tuple[ctypes.CDLL | None, int]:
    """glibc's functions, and the process whose they are."""
    library = ctypes.CDLL(None, use_errno=True)
    if not hasattr(library, "gnu_get_libc_version") or ctypes.sizeof(ctypes.c_void_p) != 8:
        return None, os.getpid()
    if not hasattr(library, "aio_read"):  # before glibc 2.34
        library = ctypes.CDLL("librt.so.1", use_errno=True)
    library.aio_init(ctypes.byref(_Init(threads=THREADS, num=64, idle_time=1)))
    return library, os.getpid()


def _library() -> ctypes.CDLL | None:
    library, process = _loaded()
    return library if os.getpid() == process else None


class Reads:
    """Some reads that are started together: `start`, then `wait`. Keep it, and the memory that is read into, until none
    is `running`."""

    def __init__(self) -> None:
        self._controls: list[_Control] = []
        self._pointers: Any = None  # to each of them, as the library takes them
        self._started = self._waited = 0

    def start(self, reads: Sequence[tuple[int, int, int, int]]) -> None:
        """Each: a descriptor, the address to read to, bytes, the offset in the file. Raises OSError; some may be running
        then."""
        assert not self.running
        if len(self._controls) < len(reads):
            missing = len(reads) - len(self._controls)
            self._controls += [_Control(sigev_notify=_SIGEV_NONE) for _ in range(missing)]
            addresses = map(ctypes.addressof, self._controls)
            self._pointers = (ctypes.c_void_p * len(self._controls))(*addresses)
        for control, (file, address, nbytes, offset) in zip(self._controls, reads):
            control.fildes, control.buf, control.nbytes = file, address, nbytes
            control.offset = offset
            control.error_code = 0  # of one that is not accepted: it is not running
        self._started, self._waited = len(reads), 0
        library = _library()
        if library and library.lio_listio(_LIO_NOWAIT, self._pointers, len(reads), None):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

    def wait(self, count: int | None = None) -> list[int]:
        """Bytes that each of the next `count` reads (all that are left), in the order of `start`: fewer than asked for at
        the file's end, none where this does not read. Raises OSError when all of them have ended. A signal's handler runs,
        and may raise, while it waits; `wait` again then."""
        library, first = _library(), self._waited
        last = self._started if count is None else first + count
        assert last <= self._started
        controls = self._controls[first:last]
        if library is None or not controls:
            self._waited = last
            return [0] * len(controls)
        # What the library's functions give, without a call and its lock for each. They are begun in their order, so
        # that most have ended when the last has: one call waits for about all of them.
        failed = 0
        for control in reversed(controls):
            while (number := control.error_code) == errno.EINPROGRESS:
                one = ctypes.c_void_p(ctypes.addressof(control))
                library.aio_suspend(ctypes.byref(one), 1, None)
            failed = number or failed
        # Takes the lock under which the threads said so, once: what they wrote before is seen from here on.
        library.aio_error(ctypes.byref(controls[0]))
        self._waited = last
        if failed:
            raise OSError(failed, os.strerror(failed))
        return [control.return_value for control in controls]

    @property
    def running(self) -> bool:
        """Some are started, and not waited for."""
        return self._waited < self._started
