"""What processes have open or mapped: files with their names and sizes, watches, locks, namespaces.

Formats: proc_pid_fd(5), proc_pid_fdinfo(5), proc_pid_maps(5), proc_pid_mountinfo(5).
"""

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import select
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ocihook.linux.descriptors import copy_of

_DELETED = " (deleted)"
_WATCH = re.compile(
    r"^inotify wd:\S+ ino:(?P<ino>\w+) sdev:(?P<device>\w+) .*fhandle-type:(?P<type>\w+) f_handle:(?P<handle>\w+)",
    re.MULTILINE,
)
_LOCK = re.compile(r"^lock:\s+\d+:\s+(?P<kind>\w+)", re.MULTILINE)
_MOUNT_ID = re.compile(r"^mnt_id:\s+(\d+)", re.MULTILINE)
_OCTAL = re.compile(r"\\([0-7]{3})")
_FLAGS = re.compile(r"^flags:\s+([0-7]+)", re.MULTILINE)
_GET_ATTRIBUTES, _IMMUTABLE, _APPEND_ONLY = 0x80086601, 0x10, 0x20  # linux/fs.h: FS_IOC_GETFLAGS, FS_*_FL
_MAPPING = re.compile(r"^(\S+) (\S{4}) \S+ (\w+):(\w+) (\d+) +(/.*|anon_inode:.*)$", re.MULTILINE)
_NS_GET_USERNS = 0xB701  # linux/nsfs.h
_MAX_LINKS = 40  # the kernel's own limit
_libc = ctypes.CDLL(None, use_errno=True)


class OpenFile(NamedTuple):
    """A file that a process has open (`fd`) or mapped (`fd` -1)."""

    pid: int
    fd: int
    name: str  # as /proc shows it, without " (deleted)"; "" if it is too long for that
    is_deleted: bool  # its name was removed
    mode: int
    device: int  # st_rdev of a device, st_dev of anything else
    inode: int
    links: int
    stored_bytes: int  # that it takes on disk; a sparse file less than its length
    info: str = ""  # proc_pid_fdinfo(5), of its own opening if the process has none; "" if it is a socket, or mapped

    @property
    def is_regular(self) -> bool:
        """Return whether it is a plain file."""
        return stat.S_ISREG(self.mode)

    @property
    def is_device(self) -> bool:
        """Return whether it is a character or block device."""
        return stat.S_ISCHR(self.mode) or stat.S_ISBLK(self.mode)

    @property
    def mount_id(self) -> int:
        """Return the id of the mount through which it was opened, -1 if it is unknown."""
        match = _MOUNT_ID.search(self.info)
        return int(match[1]) if match else -1

    @property
    def locks(self) -> list[str]:
        """Return the kinds of locks (FLOCK, POSIX, OFDLCK, LEASE) that are held through it."""
        return _LOCK.findall(self.info)

    @property
    def watches(self) -> "list[Watch]":
        """Return what an inotify descriptor watches."""
        return [
            Watch(
                _device(int(match["device"], 16)),
                int(match["ino"], 16),
                int(match["type"], 16),
                bytes.fromhex(match["handle"]),
            )
            for match in _WATCH.finditer(self.info)
        ]

    @property
    def flags(self) -> int:
        """Return how it was opened (open(2))."""
        match = _FLAGS.search(self.info)
        return int(match[1], 8) if match else 0

    def is_locked_to_writers(self) -> bool:
        """Return whether it is open for writing, and now has an attribute that forbids to open it so (chattr(1))."""
        if self.flags & os.O_ACCMODE == os.O_RDONLY:
            return False
        forbidding = _IMMUTABLE if self.flags & os.O_APPEND else _IMMUTABLE | _APPEND_ONLY
        with contextlib.suppress(OSError):
            fd = copy_of(
                self.pid, self.fd
            )  # to open it would break a lease, and its holder gets a signal that kills it
            try:
                attributes = int.from_bytes(fcntl.ioctl(fd, _GET_ATTRIBUTES, bytes(8))[:4], sys.byteorder)
            finally:
                os.close(fd)
            return bool(attributes & forbidding)
        return False

    def is_at(self, root: str) -> bool:
        """Return whether it is what its name leads to below a directory."""
        try:
            status = os.stat(f"{root}{self.name}", follow_symlinks=False)
        except OSError:
            return False
        return (status.st_dev, status.st_ino) == (self.device, self.inode)


class Watch(NamedTuple):
    """A file or directory that is watched with inotify."""

    device: int  # as the kernel numbers it
    inode: int
    handle_type: int
    handle: bytes


class Mount(NamedTuple):
    """One line of a mountinfo."""

    id: int
    device: str  # MAJOR:MINOR
    root: str  # of the file system, that is mounted
    place: str
    kind: str
    source: str
    options: frozenset[str] = frozenset()  # of the mount, and of its file system


class FileMapping(NamedTuple):
    """A mapping of a file."""

    span: str  # its addresses
    rights: str
    device: str  # MAJOR:MINOR, as of a Mount
    name: str  # as /proc shows it


def file_mappings(maps: str) -> tuple[FileMapping, ...]:
    """Return the mappings of files in a text of proc_pid_maps(5)."""
    return tuple(
        FileMapping(span, rights, f"{int(major, 16)}:{int(minor, 16)}", name)
        for span, rights, major, minor, _, name in _MAPPING.findall(maps)
    )


def open_files(pid: int) -> Iterator[OpenFile]:
    """Yield the files that a process has open; none when it is gone."""
    for fd in _listed(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            file = _file(pid, int(fd), f"/proc/{pid}/fd/{fd}")
            has_info = not stat.S_ISSOCK(file.mode)
            yield file._replace(info=_read(f"/proc/{pid}/fdinfo/{fd}")) if has_info else file


def has_other_end(pid: int, fd: int) -> bool:
    """Return whether any process has the other end of a pipe; False if it cannot be asked."""
    with contextlib.suppress(OSError):
        copy = copy_of(pid, fd)
        try:
            asked = select.poll()
            asked.register(copy, 0)  # without an end there is POLLHUP or POLLERR, which need not be asked for
            return not asked.poll(0)
        finally:
            os.close(copy)
    return False


def used_files(pid: int) -> dict[str, OpenFile]:
    """Return what a process is in and what it runs: `cwd`, `root` and `exe`, without what cannot be read."""
    found = {}
    for kind in ("cwd", "root", "exe"):
        link = f"/proc/{pid}/{kind}"
        with contextlib.suppress(OSError):
            found[kind] = _file(pid, -1, link)._replace(info=_info(link))
    return found


def mapped_mount_id(pid: int, span: str) -> int:
    """Return the id of the mount of a mapped file, by the addresses of the mapping; -1 if it is unknown."""
    with contextlib.suppress(OSError):
        match = _MOUNT_ID.search(_info(f"/proc/{pid}/map_files/{span}"))
        return int(match[1]) if match else -1
    return -1


def _info(link: str) -> str:
    fd = os.open(link, os.O_PATH | os.O_CLOEXEC)
    try:
        return _read(f"/proc/self/fdinfo/{fd}")
    finally:
        os.close(fd)


def describe_file(pid: int, fd: int) -> OpenFile:
    """Return an open descriptor of this process as one of another process that has no number there.

    Raises:
        OSError: if it is not open.
    """
    file = _file(pid, -1, f"/proc/self/fd/{fd}")
    return file if stat.S_ISSOCK(file.mode) else file._replace(info=_read(f"/proc/self/fdinfo/{fd}"))


def mapped_files(pid: int, maps: str) -> Iterator[OpenFile]:
    """Yield the files that a process has mapped whose names were removed, each once; without root, none.

    Args:
        pid: of the process.
        maps: its proc_pid_maps(5).
    """
    seen = set()
    for line in maps.splitlines() if _DELETED in maps else ():
        span, _, _, device, inode, *name = line.split(maxsplit=5)
        if not name or not name[0].endswith(_DELETED) or not name[0].startswith("/") or (device, inode) in seen:
            continue
        seen.add((device, inode))
        with contextlib.suppress(OSError):
            yield _file(pid, -1, f"/proc/{pid}/map_files/{span}")


def _file(pid: int, fd: int, link: str) -> OpenFile:
    name, status = _target(link), os.stat(link)
    is_device = stat.S_ISCHR(status.st_mode) or stat.S_ISBLK(status.st_mode)
    return OpenFile(
        pid=pid,
        fd=fd,
        name=name.removesuffix(_DELETED),
        is_deleted=name.endswith(_DELETED),
        mode=status.st_mode,
        device=status.st_rdev if is_device else status.st_dev,
        inode=status.st_ino,
        links=status.st_nlink,
        stored_bytes=status.st_blocks * 512,
    )


def _target(link: str) -> str:
    """Return what a link of /proc leads to; "" if the kernel cannot write a path so long."""
    try:
        return os.readlink(link)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            return ""
        raise


def _device(number: int) -> int:
    """Return a device number of the kernel's (20 bits of minor) as stat(2) has it."""
    return os.makedev(number >> 20, number & 0xFFFFF)


def can_open_handle(pid: int, watch: Watch) -> bool:
    """Return whether a watched file can be opened by its handle on a mount that the process sees, as CRIU does it."""
    handle = ctypes.create_string_buffer(
        len(watch.handle).to_bytes(4, "little") + watch.handle_type.to_bytes(4, "little") + watch.handle
    )
    device = f"{os.major(watch.device)}:{os.minor(watch.device)}"
    for mount in mounts(pid):
        if mount.device != device:
            continue
        with contextlib.suppress(OSError):
            place = os.open(
                f"/proc/{pid}/root{mount.place}", os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
            )
            fd = _libc.open_by_handle_at(place, handle, os.O_PATH | os.O_CLOEXEC)
            os.close(place)
            if fd >= 0:
                os.close(fd)
                return True
    return False


def mounts(pid: int) -> list[Mount]:
    """Return the mounts that a process sees; [] when it is gone."""
    found = []
    for line in _read(f"/proc/{pid}/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        number, _, device, root, place, of_mount, *_ = before.split(" ")
        kind, source, *of_system = after.split(" ")
        options = frozenset(option for text in (of_mount, *of_system) for option in text.split(","))
        found.append(Mount(int(number), device, _unescape(root), _unescape(place), kind, _unescape(source), options))
    return found


def _unescape(text: str) -> str:
    return _OCTAL.sub(lambda match: chr(int(match[1], 8)), text)


def resolve_inside(pid: int, path: str) -> str:
    """Return where an absolute path leads in the root of a process, its links followed as the process would."""
    return _resolve(f"/proc/{pid}/root", path)


def resolve_below(root: Path, path: str) -> Path:
    """Return where a path leads in another root directory, its links followed as a process there would."""
    return root / _resolve(str(root), path).lstrip("/")


def _resolve(root: str, path: str) -> str:
    left, done, links = path.split("/"), "", 0
    while left:
        name, *left = left
        if name in ("", "."):
            continue
        if name == "..":
            done = done.rpartition("/")[0]
            continue
        try:
            target = os.readlink(f"{root}{done}/{name}")
        except OSError:  # no link
            done = f"{done}/{name}"
            continue
        links += 1
        if links > _MAX_LINKS:
            return path
        left = target.split("/") + left
        done = "" if target.startswith("/") else done
    return done or "/"


def makers_of_namespaces(pid: int) -> dict[str, str]:
    """Return the user namespaces in which a process's namespaces were made, by kind, each as /proc names it."""
    found = {}
    for kind in ("ipc", "mnt", "net", "pid", "uts"):
        with contextlib.suppress(OSError):  # it has exited, or may not be read
            fd = os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC)
            try:
                made_in = fcntl.ioctl(fd, _NS_GET_USERNS)
            finally:
                os.close(fd)
            found[kind] = f"user:[{os.fstat(made_in).st_ino}]"
            os.close(made_in)
    return found


def namespaces(pid: int) -> dict[str, str]:
    """Return the namespaces of a process by kind, each as /proc names it."""
    found = {}
    for kind in ("cgroup", "ipc", "mnt", "net", "pid", "time", "user", "uts"):
        with contextlib.suppress(OSError):
            found[kind] = os.readlink(f"/proc/{pid}/ns/{kind}")
    return found


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="surrogateescape")
    except OSError:
        return ""


def _listed(directory: str) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError:
        return []
