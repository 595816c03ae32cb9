"""Files that are either wholly there or not at all."""

import contextlib
import os
from pathlib import Path


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
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise
    if durable:
        sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Make the names in `directory` survive a power loss."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
