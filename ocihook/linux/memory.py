"""The memory of a process: what is mapped where, and the file through which another process reads and writes it."""

import contextlib
import ctypes
import errno
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from ocihook.linux.procfs import Process, descendants, status_fields
from ocihook.linux.workers import WorkerDied, run_forked

_LINE = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S{4}) ([0-9a-f]+) \S+ ([0-9]+) *(.*)")  # proc_pid_maps(5)
_OF_TMPFS = ("/dev/zero (deleted)", "/memfd:", "/dev/shm/")  # noqa: S108 - as maps has it
_MEMINFO = Path("/proc/meminfo")
_OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")
_PAGE_BYTES = 4096
_HUGE_PAGE_BYTES = 2 << 20  # of x86-64, and of aarch64 with pages of 4 KiB
_PREFAULT_BYTES = 64 << 20  # what a worker takes at a time
_FAULT_AROUND_BYTES = 64 << 10  # as Linux has it by default

_libc = ctypes.CDLL(None, use_errno=True)
for _function in (_libc.process_vm_readv, _libc.process_vm_writev):
    _function.argtypes = [
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_ulong,
        ctypes.c_void_p,
        ctypes.c_ulong,
        ctypes.c_ulong,
    ]
    _function.restype = ctypes.c_ssize_t


def available_bytes() -> int:
    """Return how much memory the node has left for new work; 0 if the kernel does not report it."""
    return _meminfo_bytes("MemAvailable")


def free_swap_bytes() -> int:
    """Return how much swap of the node is free; 0 if there is none."""
    return _meminfo_bytes("SwapFree")


def commit_headroom_bytes() -> int | None:
    """Return how much more memory processes may ask for; None if it need not be there (vm.overcommit_memory)."""
    if _OVERCOMMIT.read_text().strip() != "2":
        return None
    return _meminfo_bytes("CommitLimit") - _meminfo_bytes("Committed_AS")


def _meminfo_bytes(name: str) -> int:
    for line in _MEMINFO.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    return 0


def resident_bytes(init_pid: int) -> int:
    """Return how much memory without a file a process and its descendants have; what they share counts twice."""
    pages = 0
    for pid in descendants(init_pid):
        with contextlib.suppress(OSError, IndexError):  # it has just ended
            _, resident, of_files, *_ = Path(f"/proc/{pid}/statm").read_text().split()
            pages += int(resident) - int(of_files)
    return pages * _PAGE_BYTES


def own_bytes(pid: int) -> int:
    """Return how much memory of a process's own CRIU would write: without a file, in memory or swapped out.

    Memory shared through tmpfs counts by its file, and pages of zeros that were never written do not count.

    Raises:
        OSError: if it has exited, or may not be read.
    """
    lines = (line.split() for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
    sizes = {name: int(size) << 10 for name, size, *_ in lines}
    return sum(sizes.get(name, 0) for name in ("Anonymous:", "Swap:", "Private_Hugetlb:"))


class Span(NamedTuple):
    """Addresses from `start` up to, not including, `end`."""

    start: int
    end: int

    @property
    def size_bytes(self) -> int:
        """Its length."""
        return self.end - self.start


class Mapping(NamedTuple):
    """One line of /proc/PID/maps."""

    span: Span
    mode: str  # as there: rwxp, s instead of p where shared
    inode: int  # 0: anonymous
    name: str
    offset: int = 0  # in the file, of its first byte

    @property
    def is_anonymous(self) -> bool:
        """Private, writable, and neither a file nor something that the kernel has a name for (heap, stack)."""
        return self.mode == "rw-p" and self.inode == 0 and not self.name


def read_mappings(pid: int) -> list[Mapping]:
    """Return what a process has mapped, in the order of addresses; [] when it is gone."""
    try:
        text = Path(f"/proc/{pid}/maps").read_text(errors="surrogateescape")
    except OSError:
        return []
    rows = filter(None, map(_LINE.fullmatch, text.splitlines()))
    return list(map(_mapping, rows))


def _mapping(row: re.Match[str]) -> Mapping:
    return Mapping(Span(int(row[1], 16), int(row[2], 16)), row[3], int(row[5]), row[6], int(row[4], 16))


class DetailedMapping(NamedTuple):
    """A mapping, with what is in it."""

    mapping: Mapping
    anonymous_bytes: int  # of its own, and not of a file
    flags: frozenset[str]  # what the kernel calls VmFlags


def read_detailed_mappings(pid: int) -> list[DetailedMapping]:
    """Return what a process has mapped and what is in it, in the order of addresses (proc_pid_smaps(5)).

    Raises:
        OSError: if it is gone, or may not be read.
    """
    found: list[DetailedMapping] = []
    mapping, size = None, 0
    for line in Path(f"/proc/{pid}/smaps").read_text(errors="surrogateescape").splitlines():
        name, _, value = line.partition(":")
        if row := _LINE.fullmatch(line):
            mapping = _mapping(row)
        elif name in ("Anonymous", "Swap"):
            size = (size if name == "Swap" else 0) + (int(value.split()[0]) << 10)
        elif name == "VmFlags" and mapping is not None:
            found.append(DetailedMapping(mapping, size, frozenset(value.split())))
    return found


def huge_spans(pid: int) -> list[Span]:
    """Return where a process has private pages of hugetlbfs.

    Raises:
        OSError: if it is gone, or may not be read.
    """
    if status_fields(pid).get("HugetlbPages", "0").split()[0] == "0":  # spares the walk through all its pages
        return []
    found = read_detailed_mappings(pid)
    return [one.mapping.span for one in found if "ht" in one.flags and one.mapping.mode[3] == "p"]


def anonymous_spans(pid: int) -> list[Span]:
    """Return the addresses of a process that are plain private memory."""
    return [mapping.span for mapping in read_mappings(pid) if mapping.is_anonymous]


def shared_spans(pid: int) -> list[Span]:
    """Return where a process has memory that is shared (tmpfs), without holes: what is there costs no memory to map.

    Raises:
        OSError: if it is gone, or its mappings may not be opened.
    """
    found: list[Span] = []
    for mapping in read_mappings(pid):
        if mapping.mode == "rw-s" and mapping.name.startswith(_OF_TMPFS):
            start, end = mapping.span
            fd = os.open(f"/proc/{pid}/map_files/{start:x}-{end:x}", os.O_RDONLY | os.O_CLOEXEC)
            try:
                first = mapping.offset
                content = _content(fd, first, first + mapping.span.size_bytes)
                found += [Span(start + low - first, start + high - first) for low, high in content]
            finally:
                os.close(fd)
    return found


def _content(fd: int, at: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield the parts of a file between two offsets that are no holes."""
    while at < end:
        try:
            low = os.lseek(fd, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # holes to its end
                return
            raise
        high = min(end, os.lseek(fd, low, os.SEEK_HOLE))
        if low < end:
            yield low, high
        at = high


def common_spans(pids: Iterable[int]) -> list[Span]:
    """Return the addresses, in order and apart, at which more than one process has private memory.

    What processes share since a fork is among it, but for what one of them has moved. Of single pages the kernel does
    not say so reliably: bit 56 of proc_pid_pagemap(5) is that of the first of a huge page. One that ends has none.
    """
    edges: list[tuple[int, int]] = []
    for pid in pids:
        with contextlib.suppress(OSError):
            spans = [mapping.span for mapping in read_mappings(pid) if mapping.mode[3] == "p"]
            edges += [edge for span in spans for edge in ((span.start, 1), (span.end, -1))]
    found: list[Span] = []
    depth = start = 0
    for address, step in sorted(edges):  # where one ends and another begins, the end comes first
        if (depth, step) == (1, 1):
            start = address
        elif (depth, step) == (2, -1) and start < address:
            found.append(Span(start, address))
        depth += step
    return found


def subtract(spans: Iterable[Span], others: Iterable[Span]) -> list[Span]:
    """Return the parts of `spans` that are not in `others`; both in order.

    By address and not by mapping, since the kernel joins a new mapping with a neighbour of the same kind.
    """
    taken = list(others)
    rest, first = [], 0
    for span in spans:
        while first < len(taken) and taken[first].end <= span.start:
            first += 1
        at, number = span.start, first
        while number < len(taken) and taken[number].start < span.end:
            if taken[number].start > at:
                rest.append(Span(at, taken[number].start))
            at = max(at, taken[number].end)
            number += 1
        if at < span.end:
            rest.append(Span(at, span.end))
    return rest


def memory_path(pid: int) -> Path:
    """Return the file whose offsets are the addresses of a process. For much memory, `ProcessMemory` is faster."""
    return Path(f"/proc/{pid}/mem")


class ProcessMemory:
    """Another process's memory, to be read and written by many processes at once.

    By process_vm_readv(2) and process_vm_writev(2): /proc/PID/mem takes the lock of the whole address space for each
    page, and 16 readers of one process were seen to spend most of their time on it. Not so what processes share since a
    fork: for process_vm_readv(2) the kernel makes the one that is read a copy of each such page (gup_must_unshare() in
    mm/internal.h, since Linux 5.19), for which there may be no room.
    """

    def __init__(self, process: Process) -> None:
        """Check that it is still there.

        Raises:
            ProcessLookupError: if it is not.
        """
        if not process.is_alive():  # its pid may have been reused
            raise ProcessLookupError(errno.ESRCH, f"Process {process.pid} has ended")
        self._pid = process.pid
        self._file = -1

    def read_into(self, view: memoryview, address: int) -> int:
        """Fill `view`, which must be writable, from an address; return how many bytes there were."""
        return read_memory(self._pid, view, address)

    def read_shared_into(self, view: memoryview, address: int) -> int:
        """Do the same where another process may have the same pages since a fork: they stay shared."""
        if self._file < 0:
            self._file = os.open(memory_path(self._pid), os.O_RDONLY | os.O_CLOEXEC)
        return os.preadv(self._file, [view], address)

    def write(self, buffers: Sequence[bytes | memoryview], address: int) -> int:
        """Write buffers, up to IOV_MAX of them, one after the other from an address on; return the bytes written."""
        return write_memory(self._pid, buffers, address)

    def fault_in(self, address: int, size_bytes: int) -> None:
        """Have the kernel allocate missing pages, up to 4 MiB; existing ones stay as they are, whoever writes to them.

        The kernel prepares pages for a write before it reads the source, and copies only what it could read: here
        nothing, since the source is address 0.

        Raises:
            OSError: if there is no such process. Missing addresses, or a lack of memory, are not reported.
        """
        local, remote = (ctypes.c_size_t * 2)(0, size_bytes), (ctypes.c_size_t * 2)(address, size_bytes)
        try:
            _done(_libc.process_vm_writev(self._pid, local, 1, remote, 1, 0))
        except OSError as error:
            if error.errno != errno.EFAULT:
                raise

    def close(self) -> None:
        """Close what was opened."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def read_memory(pid: int, view: memoryview, address: int) -> int:
    """Fill a writable `view` from an address of a process, as `ProcessMemory` does; `pid` may be that of a thread."""
    local = (ctypes.c_size_t * 2)(ctypes.addressof(ctypes.c_char.from_buffer(view)), len(view))
    remote = (ctypes.c_size_t * 2)(address, len(view))
    return _done(_libc.process_vm_readv(pid, local, 1, remote, 1, 0))


def write_memory(pid: int, buffers: Sequence[bytes | memoryview], address: int) -> int:
    """Write buffers to an address of a process, as `ProcessMemory` does; `pid` may be that of a thread."""
    pairs = [number for buffer in buffers for number in (_address(buffer), len(buffer))]  # struct iovec
    local = (ctypes.c_size_t * len(pairs))(*pairs)
    remote = (ctypes.c_size_t * 2)(address, sum(map(len, buffers)))
    return _done(_libc.process_vm_writev(pid, local, len(buffers), remote, 1, 0))


def _done(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def prefault(process: Process, span: Span, *, workers: int) -> None:
    """Have the kernel zero a new mapping of another process on all cores, not only on the one that uses it.

    Nothing is written: the mapping may be used before this has ended, or has been killed. What cannot be filled stays
    as it is: its user gets the error.

    Args:
        process: whose mapping it is.
        span: its addresses.
        workers: how many processes share the work.
    """

    def worker(_number: int, tasks: Iterator[int]) -> Iterator[None]:
        memory = ProcessMemory(process)
        for task in tasks:
            start = span.start + task * _PREFAULT_BYTES
            for at in range(start, min(start + _PREFAULT_BYTES, span.end), _HUGE_PAGE_BYTES):
                memory.fault_in(at, min(_HUGE_PAGE_BYTES, span.end - at))
            yield

    tasks = -(-span.size_bytes // _PREFAULT_BYTES)
    with contextlib.suppress(OSError, WorkerDied):  # no memory, no process
        for _ in run_forked(worker, tasks=tasks, workers=workers):
            pass


def map_present(process: Process, span: Span, *, workers: int) -> None:
    """Put pages of shared memory that are there into a process's page tables, on all cores.

    A read of one byte has the kernel map the pages around it that are there, too (do_fault_around() in mm/memory.c).

    Args:
        process: whose mapping it is.
        span: its addresses, without holes.
        workers: how many processes share the work.
    """

    def worker(_number: int, tasks: Iterator[int]) -> Iterator[None]:
        for task in tasks:
            start = span.start + task * _PREFAULT_BYTES
            _read_bytes(process.pid, range(start, min(start + _PREFAULT_BYTES, span.end), _FAULT_AROUND_BYTES))
            yield

    tasks = -(-span.size_bytes // _PREFAULT_BYTES)
    with contextlib.suppress(OSError, WorkerDied):
        for _ in run_forked(worker, tasks=tasks, workers=workers):
            pass


def _read_bytes(pid: int, addresses: Sequence[int]) -> None:
    """Read a byte at each of some addresses of a process, up to IOV_MAX."""
    count = len(addresses)
    buffer = ctypes.create_string_buffer(count)
    local = (ctypes.c_size_t * 2)(ctypes.addressof(buffer), count)
    remote = (ctypes.c_size_t * (2 * count))(*[number for address in addresses for number in (address, 1)])
    _done(_libc.process_vm_readv(pid, local, 1, remote, count, 0))


class CopyBuffer:
    """A buffer for copying much data.

    It begins in the middle of a page. Processors copy up to twice as slowly between two addresses with nearly the same
    offset in their pages (4K aliasing). Images and mappings are page-aligned, and malloc's large blocks begin 16 bytes
    after the start of a page.
    """

    def __init__(self, size_bytes: int) -> None:
        self.data = bytearray(size_bytes + _PAGE_BYTES)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self.data))
        self.start = (_PAGE_BYTES // 2 - address) % _PAGE_BYTES  # of `view` in `data`
        self.view = memoryview(self.data)[self.start : self.start + size_bytes]

    def has(self, content: bytes | memoryview, at: int) -> bool:
        """Return whether there is this content from a place in `view` on."""
        return self.data.startswith(content, self.start + at)


class _Buffer(ctypes.Structure):
    """Py_buffer, of the stable ABI since Python 3.11; the names of its fields are of no use here."""

    _fields_ = [("buf", ctypes.c_void_p), ("rest", ctypes.c_void_p * 11)]  # type: ignore[mutable-override]


def _address(buffer: bytes | memoryview) -> int:
    if isinstance(buffer, bytes):
        return ctypes.cast(ctypes.c_char_p(buffer), ctypes.c_void_p).value or 0
    if not buffer.readonly:
        return ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    found = _Buffer()  # ctypes itself gives addresses of writable memory only
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(buffer), ctypes.byref(found), 0)
    try:
        return int(found.buf or 0)
    finally:
        ctypes.pythonapi.PyBuffer_Release(ctypes.byref(found))
