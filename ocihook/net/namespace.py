"""Network namespaces: known by their inode for as long as they exist, and entered by a thread that ends there.

setns(2) moves the thread that calls it and no other, so what the agent does elsewhere stays where it is.
"""

import contextlib
import ctypes
import itertools
import os
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

T = TypeVar("T")

_CLONE_NEWNET = 1 << 30
_libc = ctypes.CDLL(None, use_errno=True)


class NetNamespace(NamedTuple):
    """A network namespace."""

    path: str  # where it was found: of a process, or where somebody keeps it
    inode: int

    @classmethod
    def at(cls, path: str | Path) -> "NetNamespace":
        """Return the one at a path.

        Raises:
            OSError: if there is none.
        """
        return cls(str(path), os.stat(path).st_ino)

    @classmethod
    def of(cls, pid: int) -> "NetNamespace":
        """Return the one that a process is in; as `at`."""
        return cls.at(f"/proc/{pid}/ns/net")

    @property
    def is_ours(self) -> bool:
        """Return whether this process is in it: for an agent, whether it is the node's."""
        return os.stat("/proc/thread-self/ns/net").st_ino == self.inode

    def open(self) -> int:
        """Return a descriptor of it, wherever it is found.

        Raises:
            FileNotFoundError: if it is gone.
        """
        for path in itertools.chain([self.path], _places(self.inode)):  # searched for only if it is not there
            with contextlib.suppress(OSError):
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                if os.fstat(fd).st_ino == self.inode:
                    return fd
                os.close(fd)
        raise FileNotFoundError(f"network namespace {self.inode} is gone")

    def run(self, work: Callable[[], T]) -> T:
        """Call something in it, in a thread of its own; return its result.

        Raises:
            FileNotFoundError: if the namespace is gone.
            OSError: if it cannot be entered.
        """
        fd = self.open()
        found: list[T] = []
        failed: list[BaseException] = []

        def go() -> None:
            try:
                if _libc.setns(fd, _CLONE_NEWNET) != 0:
                    raise OSError(ctypes.get_errno(), f"network namespace {self.inode} cannot be entered")
                found.append(work())
            except BaseException as error:  # noqa: BLE001 - raised below
                failed.append(error)

        try:
            thread = threading.Thread(target=go)
            thread.start()
            thread.join()  # waits: for system calls
        finally:
            os.close(fd)
        if failed:
            raise failed[0]
        return found[0]


def _places(inode: int) -> Iterator[str]:
    """Yield where a namespace may be found: where it is mounted, then the processes that are in it."""
    mounted = re.compile(rf"^\S+ \S+ \S+ net:\[{inode}\] (\S+) ", re.MULTILINE)
    yield from mounted.findall(Path("/proc/self/mountinfo").read_text())
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.readlink(process / "ns/net") == f"net:[{inode}]":
                yield f"{process}/ns/net"
