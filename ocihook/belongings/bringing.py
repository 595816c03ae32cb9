"""Applies the changes in a tar (saving.py) to other trees, and reverts them.

The inverse of changes is changes, too. So before any are applied, their inverse is written in the same form.
"""

import contextlib
import errno
import os
import re
import shutil
import stat
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, NamedTuple

from ocihook.belongings.filesystems import ROOTFS
from ocihook.belongings.saving import BROUGHT, LABELS, OPAQUE, XATTR, Writer
from ocihook.belongings.tree import (
    DIRECTORY,
    OVERLAY,
    Entry,
    Progress,
    attribute_names,
    closing,
    copy,
    opened,
    opened_below,
    status_of,
)
from ocihook.errors import IntegrityError, UnsupportedError, printable
from ocihook.linux.files import sync_file
from ocihook.tar import READ_ERRORS, Tar

INVERSE_NAME = "before.tar"  # in the directory of an undo
_TIME = re.compile(r"(-?[0-9]{1,10})(?:\.([0-9]*))?")  # seconds since 1970, in all that 34 bits of an inode hold
_MAX_U32 = (1 << 32) - 2  # -1 means "leave as it is" (chown(2))
_MAX_MAJOR, _MAX_MINOR = (1 << 12) - 1, (1 << 20) - 1  # linux/kdev_t.h
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class Change(NamedTuple):
    """What one name below a directory is to be."""

    info: tarfile.TarInfo
    prefix: str  # what its name in the tar begins with
    top: int  # descriptor of the directory
    name: str  # below it; "" for itself
    content: int  # descriptor of the tar

    @property
    def is_gone(self) -> bool:
        """Return whether the name is to be removed."""
        return self.info.ischr() and not self.info.devmajor and not self.info.devminor

    @property
    def is_opaque(self) -> bool:
        """Return whether it is a directory whose earlier content is removed."""
        return self.info.isdir() and OPAQUE in self.info.pax_headers


def read_members(path: Path) -> Iterator[tuple[tarfile.TarInfo, int]]:
    """Yield the members of a tar, each with a descriptor of the tar: its content begins at `offset_data`.

    Raises:
        IntegrityError: if it is damaged.
        OSError: if it cannot be read.
    """
    with path.open("rb") as file, path.open("rb") as content:  # which is seeked in
        try:
            tar = Tar(file, is_stream=False)
            while (info := tar.next()) is not None:
                yield info, content.fileno()
        except READ_ERRORS as error:
            raise IntegrityError(f"{path} is damaged: {error}") from error


def check_members(path: Path) -> None:
    """Check that a tar can be brought: its bounds, and each member's headers; contents are not read.

    Raises:
        IntegrityError: if it cannot.
        OSError: if it cannot be read.
    """
    for info, _ in read_members(path):
        _check(info)


def bring(path: Path, places: Mapping[str, Path], progress: Progress) -> None:
    """Apply the changes in a tar. May run again after any interruption.

    Args:
        path: of the tar.
        places: directories, by the prefix of the names that go there; other names are left out.
        progress: called with the bytes written.

    Raises:
        IntegrityError: if the tar is damaged.
        UnsupportedError: if a link is where a directory must be.
        OSError: from the file system, a full one included.
    """
    times: list[tuple[int, str, int]] = []  # of directories: set last, since writing into them changes theirs
    with _opened_all(places) as tops:
        for change in _changes(path, tops):
            _bring(change, progress)
            if change.info.isdir():
                times.append((change.top, change.name, _mtime_ns(change.info)))
        for top, name, mtime_ns in reversed(times):
            with contextlib.suppress(FileNotFoundError), opened_below(top, name) as fd:
                os.utime(fd, ns=(mtime_ns, mtime_ns))


def write_inverse(path: Path, places: Mapping[str, Path], file: IO[bytes], progress: Progress) -> None:
    """Write the inverse of the changes in a tar, which have not been applied yet.

    Args:
        path: of the tar.
        places: as for `bring`.
        file: to write to.
        progress: called with the bytes written.

    Raises:
        IntegrityError: if the tar is damaged.
        OSError: from the file system, a full one included.
    """
    writer = Writer(file, progress)
    settled = ""  # prefix of names of which everything is written already; these names follow directly
    with _opened_all(places) as tops:
        for change in _changes(path, tops):
            if settled and change.info.name.startswith(settled):
                continue
            settled = f"{change.info.name}/" if _write_before(writer, change) else ""
    writer.end()


def _write_before(writer: Writer, change: Change) -> bool:
    """Write what is at a name now; return whether that covers everything below it."""
    parent_name, _, name = change.name.rpartition("/")
    try:
        with opened_below(change.top, parent_name) as parent:
            status = status_of(parent, name or ".")
            if status is None:
                writer.add_gone(change.prefix, change.name)
                return True
            is_directory = stat.S_ISDIR(status.st_mode)
            if is_directory and (change.is_opaque or not change.info.isdir()):
                with closing(os.open(name or ".", DIRECTORY, dir_fd=parent)) as fd:
                    writer.add_all(change.prefix, fd, change.name)
                return True
            writer.add(change.prefix, Entry(change.name, parent, name or ".", status))
            return not is_directory
    except (FileNotFoundError, NotADirectoryError):  # nothing can be there
        return True


def bring_reversibly(path: Path, places: Mapping[str, Path], undo: Path, progress: Progress) -> None:
    """Apply the changes in a tar so that `take_out` can revert them; after an interruption, call that first.

    Containers of a pod share volumes: the first one restored fills them, and later ones leave them alone.

    Args:
        path: of the tar.
        places: as for `bring`.
        undo: a directory, where the inverse is kept until it is no longer needed.
        progress: called with the bytes written.

    Raises:
        IntegrityError: if the tar is damaged.
        UnsupportedError: if a link is where a directory must be, or the inverse has more than `take_out` reads.
        OSError: from the file system, a full one included.
    """
    free = {prefix: place for prefix, place in places.items() if prefix == ROOTFS or not _was_brought(place)}
    unfinished = undo / f"{INVERSE_NAME}.partial"
    with unfinished.open("wb") as file:
        write_inverse(path, free, file, progress)
    try:
        check_members(unfinished)
    except IntegrityError as error:
        raise UnsupportedError(f"the changes in the rootfs or the volumes could not be reverted: {error}") from error
    sync_file(unfinished)
    unfinished.replace(undo / INVERSE_NAME)
    bring(path, free, progress)
    for prefix in free.keys() - {ROOTFS}:
        os.setxattr(free[prefix], BROUGHT, b"1")


def take_out(places: Mapping[str, Path], undo: Path, progress: Progress) -> None:
    """Revert what `bring_reversibly` has done so far. May run any time.

    Raises:
        OSError: from the file system, a full one included.
    """
    inverse = undo / INVERSE_NAME
    (undo / f"{INVERSE_NAME}.partial").unlink(missing_ok=True)
    if inverse.exists():
        bring(inverse, places, progress)
        inverse.unlink()


def _was_brought(place: Path) -> bool:
    with opened(place) as fd:
        return BROUGHT in attribute_names(fd)


def _changes(path: Path, tops: Mapping[str, int]) -> Iterator[Change]:
    for info, content in read_members(path):
        for prefix, top in tops.items():
            if info.name == prefix or info.name.startswith(f"{prefix}/"):
                _check(info)
                yield Change(info, prefix, top, _below(info.name, prefix), content)


def _check(info: tarfile.TarInfo) -> None:
    """Check that a member describes a possible file.

    Raises:
        IntegrityError: if it cannot.
    """
    _mtime_ns(info)
    numbers = ((info.uid, _MAX_U32), (info.gid, _MAX_U32), (info.mode, 0o7777), (info.devmajor, _MAX_MAJOR))
    is_sound = all(0 <= number <= limit for number, limit in (*numbers, (info.devminor, _MAX_MINOR)))
    names = [info.name, info.linkname, *(key for key in info.pax_headers if key.startswith(XATTR))]
    if not is_sound or any("\0" in name for name in names) or info.issparse():
        raise IntegrityError(f"{printable(info.name)!r} is as no file can be")


def _below(name: str, prefix: str) -> str:
    """Return a member's name relative to the directory where it goes.

    Raises:
        IntegrityError: if it leads out of there.
    """
    inner = name.removeprefix(prefix).removeprefix("/")
    if inner and any(part in {"", ".", ".."} for part in inner.split("/")):
        raise IntegrityError(f"a member has the name {name!r}")
    return inner


@contextlib.contextmanager
def _opened_all(places: Mapping[str, Path]) -> Iterator[dict[str, int]]:
    with contextlib.ExitStack() as stack:
        yield {prefix: stack.enter_context(opened(place)) for prefix, place in places.items()}


def _bring(change: Change, progress: Progress) -> None:
    parent_name, _, name = change.name.rpartition("/")
    try:
        with opened_below(change.top, parent_name) as parent:
            if change.info.isdir():
                _bring_directory(change, parent, name or ".")
                return
            _remove(parent, name)
            if not change.is_gone:
                _make(change, parent, name, progress)
    except OSError as error:
        if error.errno == errno.ENOENT and change.is_gone:
            return  # removed with its directory
        if error.errno in {errno.ELOOP, errno.ENOTDIR}:
            raise UnsupportedError(f"{change.info.name} cannot be brought: {error.strerror}") from error
        error.filename = change.info.name
        raise


def _bring_directory(change: Change, parent: int, name: str) -> None:
    status = status_of(parent, name)
    if status is None or not stat.S_ISDIR(status.st_mode):
        _remove(parent, name)
        os.mkdir(name, 0o700, dir_fd=parent)
    with closing(os.open(name, DIRECTORY, dir_fd=parent)) as fd:
        if change.is_opaque:
            for inner in os.listdir(fd):
                _remove(fd, inner)
        _dress(fd, change.info)


def _make(change: Change, parent: int, name: str, progress: Progress) -> None:
    info = change.info
    if info.isreg():
        with closing(os.open(name, _CREATE, 0o600, dir_fd=parent)) as fd:
            os.ftruncate(fd, info.size)
            copy(change.content, fd, at=(info.offset_data, 0), size_bytes=info.size, progress=progress)
            _dress(fd, info)
    elif info.islnk():
        target_parent, _, target = _below(info.linkname, change.prefix).rpartition("/")
        with opened_below(change.top, target_parent) as source:
            os.link(target, name, src_dir_fd=source, dst_dir_fd=parent, follow_symlinks=False)
    elif info.issym():
        os.symlink(info.linkname, name, dir_fd=parent)
        os.chown(name, info.uid, info.gid, dir_fd=parent, follow_symlinks=False)
        os.utime(name, ns=_times_ns(info), dir_fd=parent, follow_symlinks=False)
    else:
        kind = stat.S_IFCHR if info.ischr() else stat.S_IFBLK if info.isblk() else stat.S_IFIFO
        os.mknod(name, kind | 0o600, os.makedev(info.devmajor, info.devminor), dir_fd=parent)
        os.chown(name, info.uid, info.gid, dir_fd=parent, follow_symlinks=False)
        os.chmod(name, info.mode, dir_fd=parent)
        os.utime(name, ns=_times_ns(info), dir_fd=parent)


def _dress(fd: int, info: tarfile.TarInfo) -> None:
    """Give an open file or directory its owner, its mode, its attributes and its time."""
    os.fchown(fd, info.uid, info.gid)
    os.fchmod(fd, info.mode)  # after the owner, since chown clears set-user-ID
    wanted = {key.removeprefix(XATTR): value for key, value in info.pax_headers.items() if key.startswith(XATTR)}
    for name in attribute_names(fd):
        if name not in wanted and not name.startswith(OVERLAY) and name not in LABELS:
            os.removexattr(fd, name)
    for name, value in wanted.items():
        if not name.startswith(OVERLAY):
            os.setxattr(fd, name, value.encode("utf-8", "surrogateescape"))
    os.utime(fd, ns=_times_ns(info))


def _times_ns(info: tarfile.TarInfo) -> tuple[int, int]:
    """Return the times of access and change; both are the time of change."""
    mtime_ns = _mtime_ns(info)
    return mtime_ns, mtime_ns


def _mtime_ns(info: tarfile.TarInfo) -> int:
    found = _TIME.fullmatch(info.pax_headers.get("mtime", str(info.mtime)))
    if found is None:
        raise IntegrityError(f"{printable(info.name)!r} has a time that is none")
    return int(found[1]) * 10**9 + int(f"{found[2] or '':0<9.9}")


def _remove(parent: int, name: str) -> None:
    """Remove whatever is at a name, if anything is."""
    status = status_of(parent, name)
    if status is not None and stat.S_ISDIR(status.st_mode):
        shutil.rmtree(name, dir_fd=parent)
    elif status is not None:
        os.unlink(name, dir_fd=parent)
