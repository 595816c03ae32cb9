"""Reads what a process has set for parts of its memory, as far as it takes no longer than that is worth.

The kernel walks all pages of a process for that (some 17 us for each MiB in pages of 4 KiB, proc_pid_smaps(5)). So what
has used its time, or has much memory, is not read.
"""

import contextlib
import os
import re
import time
from collections.abc import Iterable, Iterator
from itertools import pairwise

from ocihook.audit.state import Values

# VmFlags that a program chooses, and what they are called in messages.
FLAGS = {
    "wf": "memory that is empty in children (MADV_WIPEONFORK)",
    "dc": "memory that children do not have (MADV_DONTFORK)",
    "dd": "memory that stays out of core dumps (MADV_DONTDUMP)",
    "lo": "locked memory (mlock)",
    "lf": "memory that is locked when it is used (MLOCK_ONFAULT)",
    "gd": "memory that grows down (MAP_GROWSDOWN)",
    "nr": "memory that is not reserved (MAP_NORESERVE)",
    "sr": "memory that is read in order (MADV_SEQUENTIAL)",
    "rr": "memory that is read in no order (MADV_RANDOM)",
    "hg": "memory in huge pages (MADV_HUGEPAGE)",
    "nh": "memory without huge pages (MADV_NOHUGEPAGE)",
    "mg": "memory whose equal pages are merged (MADV_MERGEABLE)",
    "dp": "memory that may be dropped (MAP_DROPPABLE)",
    "sl": "sealed memory (mseal)",
    "sf": "memory with synchronous page faults (MAP_SYNC)",
    "um": "memory whose missing pages another program provides (userfaultfd)",
    "uw": "memory whose writes another program handles (userfaultfd)",
    "ui": "memory whose minor faults another program handles (userfaultfd)",
}
KEY, NAME, POLICY = "protection key", "memory name", "memory policy"
TASK_POLICY = "NUMA policy"
_HEAD = re.compile(rb"([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ \S+ *(.*)")
_KEY = re.compile(rb"^ProtectionKey:\s+([1-9]\d*)$", re.MULTILINE)
_POLICY = re.compile(rb"^([0-9a-f]+) (prefer \(many\)\S*|weighted interleave\S*|\S+)", re.MULTILINE)
_OF_KERNEL = (b"[vdso]", b"[vvar]", b"[vvar_vclock]", b"[vsyscall]", b"[uprobes]")
_NAMED = re.compile(rb"\[anon(?:_shmem)?:(.*)\]")
_READ_BYTES, _LINE_BYTES = 1 << 16, 64
_MOST_TEXT = 4000  # characters of a value
_USUAL = (b"default", b"local")
_OF_THREAD_S = 12e-6  # to read its stack and the pages that guard it
_THREADS = re.compile(rb"^Threads:\s+(\d+)$", re.MULTILINE)
_RESIDENT = re.compile(rb"^VmRSS:\s+(\d+) kB", re.MULTILINE)


class Allowance:
    """Processor time that may be used for the memory of all processes, and memory that one of them may have."""

    def __init__(self, time_s: float, memory_bytes: int) -> None:
        """Begin.

        Args:
            time_s: of the thread that reads; what it has begun then, one page of text, is completed.
            memory_bytes: of one process: the kernel may walk through it in one piece.
        """
        self._left_s, self._memory_kib = time_s, memory_bytes >> 10
        self._until = 0.0

    def has(self, status: bytes) -> bool:
        """Return whether a process with such a proc_pid_status(5) may be read."""
        resident, threads = _RESIDENT.search(status), _THREADS.search(status)
        if resident is None or int(resident[1]) > self._memory_kib:
            return False
        return self._left_s > (int(threads[1]) if threads else 0) * _OF_THREAD_S  # else what is begun is for nothing

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Count the time."""
        began = time.thread_time()
        self._until = began + self._left_s
        try:
            yield
        finally:
            self._left_s -= time.thread_time() - began

    @property
    def is_used(self) -> bool:
        """Return whether no time is left."""
        return time.thread_time() > self._until


def read_task_policy(directory: str) -> str:
    """Return the NUMA policy of a process as the kernel names it, "" for the usual one; that of its first mapping.

    The first mapping is of its program, and it takes no walk to read one line.
    """
    with contextlib.suppress(OSError):
        fd = os.open(f"{directory}/numa_maps", os.O_RDONLY | os.O_CLOEXEC)
        try:
            match = _POLICY.match(os.read(fd, _LINE_BYTES))  # waits: no, a file of /proc answers at once
        finally:
            os.close(fd)
        if match and match[2] not in _USUAL:
            return match[2].decode(errors="replace")
    return ""


def read_mapped(directory: str, status: bytes, allowance: Allowance) -> Values | None:
    """Return what is set for the memory of a process, addresses by the names of rows; None if it was not read.

    Args:
        directory: of the process in /proc.
        status: of it, proc_pid_status(5).
        allowance: for all processes.
    """
    if not allowance.has(status):
        return None
    with allowance.used():
        smaps = _read(f"{directory}/smaps", allowance)
        policies = _read(f"{directory}/numa_maps", allowance) if smaps is not None else None
        return _places(smaps, policies) if smaps is not None else None


def _places(smaps: bytes, policies: bytes | None) -> Values:
    first = _POLICY.match(policies or b"")
    of_task = first[2] if first else b"default"
    places: dict[str, list[tuple[int, int]]] = {}
    ends: dict[int, int] = {}
    for name, start, end in _facts(smaps):
        if name:
            places.setdefault(name, []).append((start, end))
        ends[start] = end
    for at, policy in _POLICY.findall(policies or b""):
        start = int(at, 16)
        if policy not in (*_USUAL, of_task) and start in ends:
            places.setdefault(f"{POLICY} {policy.decode(errors='replace')}", []).append((start, ends[start]))
    return _values(places, is_policy_known=policies is not None)


def _values(places: dict[str, list[tuple[int, int]]], *, is_policy_known: bool) -> dict[str, str]:
    """Return all rows: "" for what no memory has. Keys, names and policies are rows of several values."""
    found: dict[str, str] = dict.fromkeys((*FLAGS, KEY, NAME, *([POLICY] if is_policy_known else [])), "")
    for name in sorted(places):
        spans = _joined(places[name])
        if name in FLAGS:
            found[name] = spans[:_MOST_TEXT]
        else:
            row = next(row for row in (KEY, NAME, POLICY) if name.startswith(row))
            found[row] = f"{found[row]} {name.removeprefix(row).strip()}: {spans}".strip()[:_MOST_TEXT]
    return found


def _facts(smaps: bytes) -> Iterator[tuple[str, int, int]]:
    """Yield for each mapping "" and its addresses, and the name of each row that it has with the same."""
    parts = smaps.split(b"\nVmFlags: ")  # each ends with a mapping, whose flags begin the next one
    has_keys = _KEY.search(smaps) is not None
    known: dict[bytes, list[str]] = {}
    for part, following in pairwise(parts):
        match = _HEAD.fullmatch(part.rpartition(b"\nSize:")[0].rpartition(b"\n")[2])
        if match is None:
            continue
        start, end, name = int(match[1], 16), int(match[2], 16), match[3]
        yield "", start, end
        if name in _OF_KERNEL:
            continue
        if named := _NAMED.fullmatch(name):
            yield f"{NAME} {named[1].decode(errors='replace')}", start, end
        if has_keys and (key := _KEY.search(part)):
            yield f"{KEY} {key[1].decode()}", start, end
        flags = following.partition(b"\n")[0]
        if flags not in known:
            found = flags.decode().split()
            known[flags] = ["dp"] if "dp" in found else [flag for flag in found if flag in FLAGS]
        for flag in known[flags]:
            yield flag, start, end


def _joined(spans: Iterable[tuple[int, int]]) -> str:
    """Return addresses as the kernel writes them, those that follow each other as one."""
    rows: list[tuple[int, int]] = []
    for start, end in spans:
        if rows and rows[-1][1] == start:
            rows[-1] = (rows[-1][0], end)
        else:
            rows.append((start, end))
    return " ".join(f"{start:x}-{end:x}" for start, end in rows)


def parse_spans(text: str) -> list[tuple[int, int]]:
    """Return the addresses of a value; the last one of a value that was cut short is left out."""
    words = text.split()[: -1 if len(text) >= _MOST_TEXT else None]
    return [(int(start, 16), int(end, 16)) for start, _, end in (word.partition("-") for word in words)]


def _read(path: str, allowance: Allowance) -> bytes | None:
    """Return a file of /proc; None if it cannot be read, or takes too long."""
    parts = []
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        while part := os.read(fd, _READ_BYTES):  # waits: no, a file of /proc answers at once
            parts.append(part)
            if allowance.is_used:
                return None
    except OSError:
        return None
    finally:
        os.close(fd)
    return b"".join(parts)
