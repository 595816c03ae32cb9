"""Walks and copies trees that others may be changing: follows no link, and keeps holes."""

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from ocihook.errors import UnsupportedError

DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
OVERLAY = ("trusted.overlay.", "user.overlay.")  # prefixes of overlayfs's own attributes
_MAX_DEPTH = 200  # each level takes a descriptor and a call
_COPY_BYTES = 1 << 20
_BLOCK_BYTES = 512  # unit of st_blocks, whatever the file system's block size (stat(2))

Progress = Callable[[int], None]  # called with how many more bytes were copied


class Entry(NamedTuple):
    """One name of a tree."""

    name: str  # from the top; "" for the top itself
    parent: int  # descriptor of the directory that it is in
    own_name: str  # there
    status: os.stat_result

    @property
    def is_directory(self) -> bool:
        """Return whether it is one."""
        return stat.S_ISDIR(self.status.st_mode)

    def open(self) -> contextlib.AbstractContextManager[int]:
        """Open it for reading."""
        return closing(os.open(self.own_name, READ, dir_fd=self.parent))


@contextlib.contextmanager
def closing(fd: int) -> Iterator[int]:
    """Close a descriptor at the end."""
    try:
        yield fd
    finally:
        os.close(fd)


def opened(directory: Path) -> contextlib.AbstractContextManager[int]:
    """Open a directory; links on the way to it are followed."""
    return closing(os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))


@contextlib.contextmanager
def opened_below(top: int, name: str) -> Iterator[int]:
    """Open a directory below another one; no part of its name may be a link."""
    fd = os.dup(top)
    try:
        for part in filter(None, name.split("/")):
            inner = os.open(part, DIRECTORY, dir_fd=fd)
            os.close(fd)
            fd = inner
        yield fd
    finally:
        os.close(fd)


def status_of(parent: int, name: str) -> os.stat_result | None:
    """Return the status of a name in a directory, None if it does not exist."""
    with contextlib.suppress(FileNotFoundError):
        return os.stat(name, dir_fd=parent, follow_symlinks=False)
    return None


def walk(top: int, name: str = "", depth: int = 0) -> Iterator[Entry]:
    """Yield all that is in a directory, itself first, each directory before what is in it; in a fixed order.

    What vanishes meanwhile is left out. No link is followed, whoever may be changing the tree.

    Raises:
        UnsupportedError: if it is too deep.
        OSError: if something cannot be read.
    """
    if depth > _MAX_DEPTH:
        raise UnsupportedError(f"directories lie in one another more than {_MAX_DEPTH} deep: {name[:80]}...")
    yield Entry(name, top, ".", os.stat(top))
    for own_name in sorted(os.listdir(top)):
        inner = f"{name}/{own_name}".lstrip("/")
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            status = os.stat(own_name, dir_fd=top, follow_symlinks=False)
            if not stat.S_ISDIR(status.st_mode):
                yield Entry(inner, top, own_name, status)
                continue
            with closing(os.open(own_name, DIRECTORY, dir_fd=top)) as fd:
                yield from walk(fd, inner, depth + 1)


def tree_bytes(directory: Path) -> int:
    """Return how many bytes of files are in a tree; holes and second names do not count.

    Raises:
        UnsupportedError: if it is too deep.
        OSError: if something cannot be read.
    """
    seen, total = set(), 0
    with opened(directory) as top:
        for entry in walk(top):
            status = entry.status
            if stat.S_ISREG(status.st_mode) and (status.st_dev, status.st_ino) not in seen:
                seen.add((status.st_dev, status.st_ino))
                total += min(status.st_size, status.st_blocks * _BLOCK_BYTES)
    return total


def attribute_names(fd: int) -> list[str]:
    """Return the names of a file's extended attributes; none where its file system does not support them."""
    try:
        return os.listxattr(fd)
    except OSError as error:
        if error.errno == errno.ENOTSUP:
            return []
        raise


def copy(source: int, target: int, *, at: tuple[int, int], size_bytes: int, progress: Progress) -> None:
    """Copy a part of a file into another one; holes stay holes. A file that ends early is not an error.

    Args:
        source: descriptor.
        target: likewise.
        at: where the part begins in each.
        size_bytes: of the part.
        progress: called with the bytes copied.

    Raises:
        OSError: from either.
    """
    position, end, shift = at[0], at[0] + size_bytes, at[1] - at[0]
    while position < end:
        try:
            position = os.lseek(source, position, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # only a hole up to the end
                return
            raise
        until = min(end, os.lseek(source, position, os.SEEK_HOLE))
        while position < until:
            data = os.pread(source, min(_COPY_BYTES, until - position), position)
            if not data:
                return
            written = os.pwrite(target, data, position + shift)
            position += written
            progress(written)
