"""Files kept alive by a bind mount: they can be read at its place whatever becomes of their own names.

The kernel keeps them, not a process: nothing that is killed takes them along.
"""

import ctypes
import os
from pathlib import Path

_MS_BIND, _MNT_DETACH = 4096, 2  # linux/mount.h
_libc = ctypes.CDLL(None, use_errno=True)


def pin_file(source: Path, place: Path) -> None:
    """Mount the file `source` at `place`, which is made.

    Raises:
        OSError: if this mount namespace does not have the file's mount, or may not mount.
    """
    place.touch(mode=0o600)
    fd = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if _libc.mount(f"/proc/self/fd/{fd}".encode(), os.fsencode(place), None, _MS_BIND, None) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"{source} cannot be mounted at {place}: {os.strerror(number)}")
    finally:
        os.close(fd)


def unpin_directory(directory: Path) -> None:
    """Unmount whatever is mounted on the files of a directory and remove it. May run any time."""
    if not directory.exists():
        return
    for path in directory.iterdir():
        while _libc.umount2(os.fsencode(path), _MNT_DETACH) == 0:
            pass  # one on top of another, from an attempt that was interrupted
        path.unlink()
    directory.rmdir()
