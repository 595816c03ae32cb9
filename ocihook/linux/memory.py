"""The memory of a process: what is mapped where, and the file through which another process reads and writes it."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

_LINE = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S{4}) [0-9a-f]+ \S+ ([0-9]+) *(.*)")  # proc_pid_maps(5)


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
    return [Mapping(Span(int(r[1], 16), int(r[2], 16)), r[3], int(r[4]), r[5]) for r in rows]


def anonymous_spans(pid: int) -> list[Span]:
    """Return the addresses of a process that are plain private memory."""
    return [mapping.span for mapping in read_mappings(pid) if mapping.is_anonymous]


def subtract(spans: Iterable[Span], others: Iterable[Span]) -> list[Span]:
    """Return the parts of `spans` that are not in `others`; both in order.

    By address and not by mapping, since the kernel joins a new mapping with a neighbour of the same kind.
    """
    taken = list(others)
    rest = []
    for span in spans:
        at = span.start
        for other in taken:
            if other.end <= at:
                continue
            if other.start >= span.end:
                break
            if other.start > at:
                rest.append(Span(at, other.start))
            at = other.end
        if at < span.end:
            rest.append(Span(at, span.end))
    return rest


def memory_path(pid: int) -> Path:
    """Return the file whose offsets are the addresses of a process.

    An open one stays with the memory that it was opened on, whatever becomes of the pid. Measured on 6.18 with 2 MiB
    a call: reads as fast as process_vm_readv(2) or faster, and takes buffers as any file does.
    """
    return Path(f"/proc/{pid}/mem")
