"""Writes files that exist completely or not at all, and opens only what is really a file."""

import contextlib
import errno
import fcntl
import os
import stat
from pathlib import Path
from typing import BinaryIO


def replace_file(path: Path, data: bytes, *, mode: int, durable: bool = True) -> None:
    """Put `data` at `path` in one step; with `durable`, it survives a power loss once this returns.

    An interrupted call leaves the old file, and at most a file named `<name>.partial`.
    """
    partial = path.with_name(path.name + ".partial")
    with contextlib.suppress(FileNotFoundError):
        partial.unlink()
    try:
        fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
        with open(fd, "wb") as file:
            os.fchmod(fd, mode)  # whatever the umask is
            file.write(data)
            file.flush()
            if durable:
                os.fsync(fd)
        partial.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        error.filename = str(path)  # the error of a write without space has no name
        raise
    if durable:
        sync_directory(path.parent)


def open_regular(path: Path) -> int:
    """Open `path` for reading and return the descriptor; what others put there can neither redirect nor block us.

    Raises:
        OSError: also if it is a link, a directory, a FIFO or a device.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "Not a regular file", str(path))
    return fd


def open_inside(pid: int, path: str) -> int:
    """Open a file for reading where a process sees it; no part of its path may be a link: it could lead to the node's.

    Raises:
        OSError: as `open_regular` does; also if the process is gone.
    """
    *parents, name = path.strip("/").split("/")
    inner = os.open(f"/proc/{pid}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for parent in parents:
            outer = inner
            inner = os.open(parent, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=outer)
            os.close(outer)
        return open_regular(Path(f"/proc/self/fd/{inner}/{name}"))
    finally:
        os.close(inner)


def create_private(path: Path) -> BinaryIO:
    """Create a new file for writing that only its owner can read, whatever the umask is.

    Raises:
        FileExistsError: if there is one.
    """
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    return open(fd, "wb")


def make_directory(path: Path, *, within: Path) -> None:
    """Make a directory for its owner only, and those above it; then their names survive a power loss.

    Names below `within` are always synced: the process that made them may have been killed before it did.
    """
    if within in path.parent.parents or not path.parent.exists():
        make_directory(path.parent, within=within)
    path.mkdir(mode=0o700, exist_ok=True)
    sync_directory(path.parent)


def sync_file(path: Path) -> None:
    """Make the content of a file survive a power loss."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_directory(directory: Path) -> None:
    """Make the names in `directory` survive a power loss."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def identity(directory: Path) -> list[int]:
    """Return what distinguishes a directory from another one that is later made in its place."""
    status = os.stat(directory)
    return [status.st_dev, status.st_ino]


def same_directory(directory: Path, known: list[int]) -> Path | None:
    """Return a directory, None if it is gone or no longer the one with this identity."""
    with contextlib.suppress(OSError):
        if identity(directory) == known:
            return directory
    return None


def try_lock(fd: int, how: int) -> bool:
    """Lock an open file, as flock(2) does, or report that others hold it."""
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def make_device(pid: int, name: str, device: int) -> bool:
    """Make a character device in /dev as a process sees it, in place of another one; False if it need not be.

    It need not be if it is there already, or /dev is the node's own.

    Raises:
        OSError: if its /dev is not a directory, or cannot be written.
    """
    root = os.open(f"/proc/{pid}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:  # a link of the container's must not lead to the node's own files
        directory = os.open("dev", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=root)
    finally:
        os.close(root)
    try:
        if os.fstat(directory).st_dev == os.stat("/dev").st_dev:
            return False
        with contextlib.suppress(FileNotFoundError):
            status = os.stat(name, dir_fd=directory, follow_symlinks=False)
            if stat.S_ISCHR(status.st_mode) and status.st_rdev == device:
                return False
            os.unlink(name, dir_fd=directory)
        os.mknod(name, stat.S_IFCHR | 0o666, device, dir_fd=directory)
        os.chmod(name, 0o666, dir_fd=directory)  # noqa: S103 - as runtimes make it, whatever the umask is
    finally:
        os.close(directory)
    return True
