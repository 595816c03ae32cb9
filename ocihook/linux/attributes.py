"""Extended attributes and ACLs of files in a file system of another process (xattr(7)), which tar leaves out.

A container's names may be links to anywhere: every step goes from a directory that is open, and follows none.
"""

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ocihook.linux.mounts import is_in_memory

_OF_NODE = ("security.selinux", "security.ima", "security.evm", "trusted.overlay.")  # made by the node itself
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Attributes(NamedTuple):
    """Those of one file."""

    path: str  # as the process has it
    text: str  # NAME=HEXADECIMAL of each, by their names; "" for none


def read_attributes(pid: int, place: str, proc: str = "/proc") -> Iterator[Attributes]:
    """Yield the attributes of each file of one file system, in the order in which the kernel lists them.

    Args:
        pid: of the process.
        place: where it is mounted, as the process sees it.
        proc: where /proc is.
    """
    with contextlib.suppress(OSError), _opened(pid, place, proc) as fd:
        device = os.fstat(fd).st_dev
        yield Attributes(place, _text(f"/proc/self/fd/{fd}", is_link=True))
        yield from _below(fd, place.rstrip("/"), device)


def _below(directory: int, path: str, device: int) -> Iterator[Attributes]:
    for name in os.listdir(directory):
        with contextlib.suppress(OSError):  # it is gone
            status = os.stat(name, dir_fd=directory, follow_symlinks=False)
            if status.st_dev != device or not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
                continue
            yield Attributes(f"{path}/{name}", _text(f"/proc/self/fd/{directory}/{name}"))
            if stat.S_ISDIR(status.st_mode):
                inner = os.open(name, _DIRECTORY, dir_fd=directory)
                try:
                    yield from _below(inner, f"{path}/{name}", device)
                finally:
                    os.close(inner)


def _text(path: str, *, is_link: bool = False) -> str:
    found = sorted(name for name in os.listxattr(path, follow_symlinks=is_link) if not name.startswith(_OF_NODE))
    return " ".join(f"{name}={os.getxattr(path, name, follow_symlinks=is_link).hex()}" for name in found)


def set_attributes(pid: int, path: str, text: str) -> None:
    """Give a file the attributes that `read_attributes` has named; it is in memory, and none are the node's.

    Raises:
        OSError, ValueError: if it is not there, or cannot have them.
    """
    parent, _, name = path.rstrip("/").rpartition("/")
    with _opened(pid, parent, "/proc") as directory:
        fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
        try:
            _set(Path(f"/proc/self/fd/{fd}"), text)
        finally:
            os.close(fd)


def _set(file: Path, text: str) -> None:
    if not is_in_memory(file):
        raise ValueError("its file system is not in memory")
    for attribute in text.split():
        key, _, value = attribute.partition("=")
        if key.startswith(_OF_NODE):
            raise ValueError(f"{key} is the node's")
        os.setxattr(file, key, bytes.fromhex(value))


@contextlib.contextmanager
def _opened(pid: int, path: str, proc: str) -> Iterator[int]:
    """Open a directory of a process, no part of whose path is a link."""
    fd = os.open(f"{proc}/{pid}/root", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in filter(None, path.split("/")):
            inner = os.open(part, _DIRECTORY, dir_fd=fd)
            os.close(fd)
            fd = inner
        yield fd
    finally:
        os.close(fd)
