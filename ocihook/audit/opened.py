"""Reads what the descriptors of processes are, each open file once."""

import contextlib
import os
import re
import zlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

from ocihook.audit.state import Values
from ocihook.linux.descriptors import copy_descriptor
from ocihook.linux.file_state import read_copy, read_info
from ocihook.linux.socket_options import peer_ids, read_options
from ocihook.linux.task_state import is_same_open_file, listed, read_file

# Of descriptors: what does not change by itself.
_DETAILS = {
    "[eventfd]": re.compile(r"^(eventfd-semaphore):\s+([0-9]+)", re.MULTILINE),
    "inotify": re.compile(r"^inotify wd:(\w+) .*? mask:(\w+)", re.MULTILINE),
    "[fanotify]": re.compile(r"^fanotify \w+:.*?(mflags:\w+) (mask:\w+ ignored_mask:\w+)", re.MULTILINE),
    "[signalfd]": re.compile(r"^(sigmask):\s+(\w+)", re.MULTILINE),
    "[timerfd]": re.compile(r"^(clockid|it_interval):\s+([^\n]+)", re.MULTILINE),
    "[eventpoll]": re.compile(r"^tfd:\s+(\d+) events:\s+(\w+) data:\s+(\w+)", re.MULTILINE),
}
_COUNT = re.compile(r"^eventfd-count:\s+(\w+)", re.MULTILINE)
_TICKS_WHEN_OFF = re.compile(r"^ticks: (\d+)\n(?:.*\n)*?it_value: \(0, 0\)\nit_interval: \(0, 0\)", re.MULTILINE)
_MEMFD, _TERMINAL = "/memfd:", re.compile(r"(/dev/pts)?/[0-9]+")
# To close a copy of another file may write it back, or wait for a server that is stopped (NFS, FUSE).
_COPIED = ("socket", "pipe", "memfd")
_MOST_TEXT = 4000  # characters of a value
_MOST_INFO_BYTES = 1 << 16  # of a fdinfo, that is read at once
_MOST_FILES = 1000  # that are looked at beyond their kind; a socket takes some 40 us

Owner = Callable[[tuple[int, int]], str]


class _Met(NamedTuple):
    """A descriptor that was met, and what another one of the same open file is."""

    pid: int
    fd: int
    again: Values


class OpenFiles:
    """Reads the descriptors of processes of one container."""

    def __init__(self, owner: Owner, proc: str, *, with_options: bool = True) -> None:
        """Prepare to read.

        Args:
            owner: returns user and group as the container's first process sees them.
            proc: where /proc is.
            with_options: whether options of sockets are read, some fifty calls for each.
        """
        self._owner, self._proc, self._with_options = owner, proc, with_options
        self._known: dict[object, Values] = {}
        self._met: dict[object, _Met] = {}  # by number, and by what they are called in /proc
        self._left = _MOST_FILES
        self.unread = 0  # descriptors of which only the kind is known

    def of(self, pid: int, key: str) -> dict[str, Values]:
        """Return what the descriptors of a process are, by their numbers."""
        found: dict[str, Values] = {}
        copies = _Copies(pid)
        for fd in sorted(map(int, listed(f"{self._proc}/{pid}/fd"))):
            with contextlib.suppress(OSError):  # it was closed meanwhile
                found[str(fd)] = self._inherited(pid, fd) or self._file(pid, fd, key, copies)
        copies.close()
        return found

    def _inherited(self, pid: int, fd: int) -> Values | None:
        """Return what a descriptor is that another process has with the same number; None if it is another file."""
        met = self._met.get(fd)
        return met.again if met is not None and is_same_open_file(pid, fd, met.pid, met.fd) else None

    def _file(self, pid: int, fd: int, key: str, copies: "_Copies") -> Values:
        """Return what a descriptor is; of an open file that was met before, only with which descriptor."""
        link = os.readlink(f"{self._proc}/{pid}/fd/{fd}")
        kind, _, name = link.partition(":")
        kind = name if kind == "anon_inode" else kind if kind in ("socket", "pipe") else "file"
        own = _Met(pid, fd, {"kind": kind, "same": f"{key}:{fd}"})
        self._met.setdefault(fd, own)
        met = self._met.setdefault(link, own)
        # Whatever opens a socket, it is the same one.
        if met is not own and (kind == "socket" or is_same_open_file(pid, fd, met.pid, met.fd)):
            return met.again
        if self._left:
            self._left -= 1
            values = self._read(pid, fd, kind, copies, link)
        else:
            self.unread += 1
            values = {"kind": kind}
        return self._known.setdefault(tuple(values.items()), values)

    def _read(self, pid: int, fd: int, kind: str, copies: "_Copies", link: str) -> dict[str, str]:
        info = read_file(f"{self._proc}/{pid}/fdinfo/{fd}").decode(errors="replace")
        found = read_info(info, is_terminal=bool(_TERMINAL.fullmatch(link)))
        values = {"kind": kind} | {name: _fit(text) for name, text in found.items()} | _details(kind, info)
        copied = "memfd" if link.startswith(_MEMFD) else kind
        if copied in _COPIED:
            with contextlib.suppress(OSError), copies.copy(fd) as copy:  # it may be no one's to copy
                values |= read_copy(copy, copied)
                values |= self._socket(copy) if copied == "socket" else {}
        return values

    def _socket(self, copy: int) -> dict[str, str]:
        values, peer = read_options(copy) if self._with_options else {}, peer_ids(copy)
        return values | {"peer": self._owner(peer)} if peer else values


class _Copies:
    """Copies the descriptors of one process."""

    def __init__(self, pid: int) -> None:
        self._pid, self._pidfd = pid, -1

    @contextlib.contextmanager
    def copy(self, fd: int) -> Iterator[int]:
        if self._pidfd < 0:
            self._pidfd = os.pidfd_open(self._pid)
        copy = copy_descriptor(self._pidfd, fd)
        try:
            yield copy
        finally:
            os.close(copy)

    def close(self) -> None:
        if self._pidfd >= 0:
            os.close(self._pidfd)


def _details(kind: str, info: str) -> dict[str, str]:
    """Return what the kernel says of an anonymous file beyond its kind (proc_pid_fdinfo(5))."""
    wanted = _DETAILS.get(kind)
    if wanted is None or len(info) >= _MOST_INFO_BYTES:  # cut short; its order is not that of numbers
        return {}
    found = {kind: _fit(" ".join(sorted(":".join(match) for match in wanted.findall(info))))}
    if match := _COUNT.search(info):
        found["count"] = str(int(match[1], 16))
    if match := _TICKS_WHEN_OFF.search(info):
        found["ticks"] = match[1]
    return found


def _fit(text: str) -> str:
    """Return a value; of one that is too long the beginning and a checksum."""
    return text if len(text) <= _MOST_TEXT else f"{text[: _MOST_TEXT - 20]} ... {zlib.crc32(text.encode()):08x}"
