"""Files kept alive by a mount: a bind mount, even when their own names are removed; or a file system in memory.

The kernel keeps them, not a process: they survive when processes are killed.
"""

import ctypes
import os
import re
from collections.abc import Iterable
from pathlib import Path

_IN_MEMORY = (0x01021994, 0x858458F6)  # linux/magic.h: tmpfs, ramfs
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_BIND, _MNT_DETACH = 2, 4, 8, 4096, 2  # linux/mount.h
_MS_REMOUNT = 32
# Options of one mount, as mountinfo shows them (proc(5), mount(2)).
_FLAGS = {
    "ro": 1,
    "nosuid": _MS_NOSUID,
    "nodev": _MS_NODEV,
    "noexec": _MS_NOEXEC,
    "nosymfollow": 256,
    "noatime": 1024,
    "nodiratime": 2048,
    "relatime": 1 << 21,
}
_RESTRICTIONS = {"ro", "nosuid", "nodev", "noexec", "nosymfollow"}
_OCTAL = re.compile(r"\\([0-7]{3})")  # of mountinfo (proc(5))
_libc = ctypes.CDLL(None, use_errno=True)


def pin_file(source: Path, place: Path) -> None:
    """Mount the file `source` at `place`, which is made. May run again: what was mounted there is unmounted.

    Raises:
        OSError: if this mount namespace does not have the file's mount, or may not mount.
    """
    unmount(place)  # else the next mount would be on the file itself, whose own name could then not be removed
    place.touch(mode=0o600)
    fd = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if _libc.mount(f"/proc/self/fd/{fd}".encode(), os.fsencode(place), None, _MS_BIND, None) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"{source} cannot be mounted at {place}: {os.strerror(number)}")
    finally:
        os.close(fd)


def remount(place: Path, options: Iterable[str]) -> None:
    """Give a mount these options, and no others; its file system, and other mounts of that, stay as they are.

    Raises:
        OSError: if nothing is mounted there, or this process may not change it.
    """
    flags = _MS_REMOUNT | _MS_BIND
    for option in options:
        flags |= _FLAGS.get(option, 0)
    if _libc.mount(None, os.fsencode(place), None, flags, None) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(place))


def restrict_inside(pid: int, place: str, options: Iterable[str]) -> None:
    """Restrict a mount as a process sees it: nothing that its options forbid becomes allowed.

    This process moves to the mount namespace of that one for good.

    Args:
        pid: of the process.
        place: where it is mounted there, as mountinfo writes it; no other is mounted at the same place.
        options: restrictions that are added (mount(2)), others are left out.

    Raises:
        OSError, ValueError: if that is not possible.
    """
    with open(f"/proc/{pid}/mountinfo") as file:
        found = [line.split(" ", 6)[5].split(",") for line in file if line.split(" ", 5)[4] == place]
    if len(found) != 1:
        raise ValueError(f"{len(found)} mounts are at {place}")
    with open(f"/proc/{pid}/ns/mnt") as namespace:
        if _libc.setns(namespace.fileno(), 0) != 0:
            raise OSError(ctypes.get_errno(), "its mount namespace cannot be entered")
    times = {option for option in found[0] if option.endswith("atime")}
    where = Path(_OCTAL.sub(lambda match: chr(int(match[1], 8)), place))
    remount(where, {*found[0], *options} & _RESTRICTIONS | times)


def mount_memory(directory: Path, size_bytes: int) -> None:
    """Mount a file system in memory at a directory, in huge pages where the node allows them (tmpfs(5)).

    Raises:
        OSError: if this process may not mount.
    """
    flags = _MS_NOSUID | _MS_NODEV | _MS_NOEXEC
    for options in (f"size={size_bytes},mode=700,huge=within_size", f"size={size_bytes},mode=700"):
        if _libc.mount(b"ocihook", os.fsencode(directory), b"tmpfs", flags, options.encode()) == 0:
            return
    number = ctypes.get_errno()
    raise OSError(number, f"no memory can be mounted at {directory}: {os.strerror(number)}")


def has_memory_mounted() -> bool:
    """Return whether anything is mounted that `mount_memory` has mounted."""
    with open("/proc/self/mountinfo") as file:  # proc(5): ... - type source options
        return any(" - tmpfs ocihook " in line for line in file)


def is_in_memory(directory: Path) -> bool:
    """Return whether the files of a directory are only in the node's memory.

    Raises:
        OSError: if it cannot be examined.
    """
    status = (ctypes.c_long * 64)()  # struct statfs begins with f_type
    if _libc.statfs(os.fsencode(directory), ctypes.byref(status)) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(directory))
    return status[0] in _IN_MEMORY


def unmount(directory: Path) -> None:
    """Unmount whatever is mounted at a directory, even if files in it are still open. May run any time."""
    while _libc.umount2(os.fsencode(directory), _MNT_DETACH) == 0:
        pass  # one on top of another, from an attempt that was interrupted


def unpin_directory(directory: Path) -> None:
    """Unmount whatever is mounted on the files of a directory and remove it. May run any time."""
    if not directory.exists():
        return
    for path in directory.iterdir():
        unmount(path)
        path.unlink()
    directory.rmdir()


def remove_directory(directory: Path) -> None:
    """Unmount whatever is mounted at a directory and remove it with its files. May run any time."""
    if not directory.exists():
        return
    unmount(directory)
    for path in directory.iterdir():
        path.unlink()
    directory.rmdir()
