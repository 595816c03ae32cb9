"""Counts what a process moves in its address space (mremap(2)), which soft-dirty bits do not show.

The kernel marks each page that it moves, but not where it moves whole page tables, of 2 MiB on x86-64: another page is
then at an address, and is clean there. Seen with Linux 6.12 and 7.2. So the calls themselves are counted, by a counter
on their tracepoint: perf_event_open(2), include/uapi/linux/perf_event.h. A call of 32 bits passes another tracepoint.
"""

import contextlib
import ctypes
import mmap
import os
import platform
import struct
import sys
from pathlib import Path

from ocihook.linux.patience import Patience
from ocihook.linux.procfs import Process, thread_ids
from ocihook.linux.workers import call_each

_TRACEPOINT_IDS = tuple(
    Path(root) / "events/syscalls/sys_enter_mremap/id" for root in ("/sys/kernel/tracing", "/sys/kernel/debug/tracing")
)
_PERF_EVENT_OPEN = {"x86_64": 298}  # number of the call
_TYPE_TRACEPOINT = 2
_INHERIT, _INHERIT_THREAD = 1 << 1, 1 << 35  # threads that are made later are counted, too, but no other processes
_CLOSE_ON_EXEC = 1 << 3
_ATTRIBUTES = struct.Struct("<IIQQQQQ")  # struct perf_event_attr up to its flags
_ATTRIBUTES_BYTES = 128  # PERF_ATTR_SIZE_VER7, Linux 5.13
_COUNT_BYTES = 8
_ELF_64 = b"\x7fELF\x02"
_MAYMOVE_FIXED = 3
_TEST_S = 10.0  # it takes milliseconds

_libc = ctypes.CDLL(None, use_errno=True)


class MoveCounter:
    """Counts the calls of one process, from now on."""

    def __init__(self, process: Process) -> None:
        """Begin.

        Raises:
            OSError: if this kernel cannot, or the process is gone, or one of 32 bits.
        """
        self._fds: dict[int, int] = {}
        with open(f"/proc/{process.pid}/exe", "rb") as program:
            if program.read(len(_ELF_64)) != _ELF_64:
                raise OSError("it is not a program of 64 bits")
        try:
            # A thread may be made by one that is not counted yet: until none is new, all are.
            while new := set(thread_ids(process.pid)) - self._fds.keys():
                for thread in new:
                    self._fds[thread] = _open_counter(thread)
            if not process.is_alive():
                raise ProcessLookupError(f"process {process.pid} has ended")
        except BaseException:
            self.close()
            raise

    @property
    def count(self) -> int:
        """How many there were."""
        counts = [os.read(fd, _COUNT_BYTES) for fd in self._fds.values() if fd >= 0]  # waits: no, it is a number
        return sum(int.from_bytes(count, sys.byteorder) for count in counts)

    def close(self) -> None:
        """Count no more."""
        for fd in self._fds.values():
            if fd >= 0:
                os.close(fd)
        self._fds.clear()


def works() -> bool:
    """Return whether this kernel counts them, found by a test; False also if that cannot be found out."""
    try:
        [outcome] = call_each(_counts_a_call, [mmap.PAGESIZE], Patience(timeout_s=_TEST_S))
    except OSError:  # no process, no descriptor
        return False
    return outcome is True


def _open_counter(thread: int) -> int:
    """Return the descriptor of a counter of a thread and those that it will make; -1 if it has ended."""
    number = _PERF_EVENT_OPEN.get(platform.machine())
    if number is None:
        raise OSError(f"calls are not counted on {platform.machine()}")
    attributes = _ATTRIBUTES.pack(
        _TYPE_TRACEPOINT, _ATTRIBUTES_BYTES, _tracepoint_id(), 0, 0, 0, _INHERIT | _INHERIT_THREAD
    )
    fd = int(_libc.syscall(number, attributes.ljust(_ATTRIBUTES_BYTES, b"\0"), thread, -1, -1, _CLOSE_ON_EXEC))
    if fd >= 0:
        return fd
    error = ctypes.get_errno()
    if Path(f"/proc/{thread}").exists():
        raise OSError(error, os.strerror(error))
    return -1


def _tracepoint_id() -> int:
    for path in _TRACEPOINT_IDS:
        with contextlib.suppress(FileNotFoundError):
            return int(path.read_text())
    raise FileNotFoundError("the kernel's trace events are not there (tracefs)")


def _counts_a_call(page_bytes: int) -> bool:
    """Have this process move a page."""
    _libc.mmap.restype = _libc.mremap.restype = ctypes.c_void_p
    _libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    _libc.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
    rights, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    place = _libc.mmap(None, 2 * page_bytes, rights, flags, -1, 0)
    myself = Process.find(os.getpid())
    assert myself is not None
    counter = MoveCounter(myself)
    before = counter.count
    target = place + page_bytes
    return before == 0 and bool(
        _libc.mremap(place, page_bytes, page_bytes, _MAYMOVE_FIXED, target) == target and counter.count == 1
    )
