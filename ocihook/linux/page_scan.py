"""Which pages of a process's own memory are there: the ones that CRIU dumps.

By the ioctl PAGEMAP_SCAN of /proc/PID/pagemap (since Linux 6.7: Documentation/admin-guide/mm/pagemap.rst), with the
mask that CRIU itself uses (criu/pagemap-cache.c): present or swapped, neither a zero page nor a file's. Guard pages, as
threads have below their stacks (MADV_GUARD_INSTALL, since Linux 6.13), cannot be read, and newer kernels say so.
"""

import contextlib
import ctypes
import errno
import fcntl
import os
import struct
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from ocihook.linux.memory import Mapping, Span, read_mappings

_PAGEMAP_SCAN = 0xC0606610
# include/uapi/linux/fs.h: PAGE_IS_...
_FILE, _PRESENT, _SWAPPED, _ZERO, _SOFT_DIRTY, _GUARD = 1 << 2, 1 << 3, 1 << 4, 1 << 5, 1 << 7, 1 << 8
_ARGUMENT = struct.Struct("<12Q")  # struct pm_scan_arg
_WALK_END = struct.Struct("<32xQ")  # of that, where it has come to
_RUN_NUMBERS = 3  # struct page_region: start, end, categories
_RUNS_AT_ONCE = 4096
# What the kernel brings by itself; whatever a process has of huge pages of hugetlbfs or of devices is up to CRIU.
_NOT_MEMORY = ("[vvar", "[vsyscall]", "/anon_hugepage", "/dev/")
PLAIN_FILES = ("/dev/shm/", "/dev/zero")  # noqa: S108 - of names below /dev, those that the kernel shows of memory
_VDSO = "[vdso]"  # CRIU dumps it whole


def anonymous_bytes(pid: int) -> int:
    """Return how much private memory without a file a process has, swapped or not; 0 if it is gone."""
    size = 0
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(("RssAnon:", "VmSwap:")):
                size += int(line.split()[1]) << 10
    except OSError:
        return 0
    return size


def private_spans(pid: int) -> list[Span]:
    """Return where a process has private readable memory, in order: all that `scan_private` could find is in there."""
    return list(_joined(mapping.span for mapping in read_mappings(pid) if _is_private(mapping)))


def scan_private(pid: int) -> list[Span]:
    """Return the runs of pages that CRIU dumps of a process's private readable memory, in order.

    While it runs, some of what it maps and drops meanwhile may be missing, or be there and gone.

    Raises:
        OSError: if it is gone, or the kernel has no PAGEMAP_SCAN.
    """
    return _scan_all(pid, 0)


def scan_dirty(pid: int) -> list[Span]:
    """Return the runs of those that are written to, or mapped, since soft-dirty bits were cleared; always the vDSO.

    Raises:
        OSError: if it is gone, or PAGEMAP_SCAN of the kernel does not know of them.
    """
    return _scan_all(pid, _SOFT_DIRTY)


def has_guard_pages(pid: int) -> bool:
    """Return whether a process has guard pages in private memory; False if this kernel does not show them."""
    if not _unwanted() & _GUARD:
        return False
    with contextlib.suppress(OSError):  # it has exited
        fd = os.open(f"/proc/{pid}/pagemap", os.O_RDONLY | os.O_CLOEXEC)
        try:
            return any(_has_guard(fd, span) for span in private_spans(pid))
        finally:
            os.close(fd)
    return False


def _has_guard(fd: int, span: Span) -> bool:
    found = (ctypes.c_uint64 * _RUN_NUMBERS)()
    where = (span.start, span.end, 0, ctypes.addressof(found), 1, 0)
    argument = bytearray(_ARGUMENT.pack(_ARGUMENT.size, 0, *where, 0, _GUARD, 0, _GUARD))
    return bool(fcntl.ioctl(fd, _PAGEMAP_SCAN, argument))


def _scan_all(pid: int, categories: int) -> list[Span]:
    fd = os.open(f"/proc/{pid}/pagemap", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return list(_joined(run for mapping in read_mappings(pid) for run in _scan(fd, mapping, categories)))
    finally:
        os.close(fd)


def _scan(fd: int, mapping: Mapping, categories: int) -> Iterable[Span]:
    if not _is_private(mapping):
        return ()
    return [mapping.span] if mapping.name == _VDSO else _runs(fd, mapping.span, categories)


def _is_private(mapping: Mapping) -> bool:
    is_memory = not mapping.name.startswith(_NOT_MEMORY) or mapping.name.startswith(PLAIN_FILES)
    return mapping.mode[0] == "r" and mapping.mode[3] == "p" and is_memory


@cache
def _unwanted() -> int:
    """Return the categories of pages that are left out, of those that this kernel knows."""
    fd = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
    unwanted = _ZERO | _FILE | _GUARD
    try:
        fcntl.ioctl(fd, _PAGEMAP_SCAN, _ARGUMENT.pack(_ARGUMENT.size, *[0] * 7, unwanted, unwanted, 0, _PRESENT))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        unwanted = _ZERO | _FILE
    finally:
        os.close(fd)
    return unwanted


def _runs(fd: int, span: Span, categories: int) -> Iterator[Span]:
    found = (ctypes.c_uint64 * (_RUN_NUMBERS * _RUNS_AT_ONCE))()
    at, unwanted = span.start, _unwanted()
    while at < span.end:
        argument = bytearray(
            _ARGUMENT.pack(
                _ARGUMENT.size,
                0,  # flags
                at,
                span.end,
                0,  # walk_end: set by the kernel
                ctypes.addressof(found),
                _RUNS_AT_ONCE,
                0,  # max_pages: any number
                unwanted,  # category_inverted
                unwanted | categories,  # category_mask
                _PRESENT | _SWAPPED,  # category_anyof_mask
                _PRESENT | _SWAPPED,  # return_mask
            )
        )
        count = fcntl.ioctl(fd, _PAGEMAP_SCAN, argument)
        for number in range(0, _RUN_NUMBERS * count, _RUN_NUMBERS):
            yield Span(found[number], found[number + 1])
        at = _WALK_END.unpack_from(argument)[0]


def _joined(runs: Iterable[Span]) -> Iterator[Span]:
    last = Span(0, 0)
    for run in runs:
        if last.end == run.start:
            last = Span(last.start, run.end)
            continue
        if last.size_bytes:
            yield last
        last = run
    if last.size_bytes:
        yield last
