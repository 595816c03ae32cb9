"""Writes trees as tar members, whole or as overlayfs keeps changes.

A name that is gone is a character device 0:0, a directory whose earlier content is gone has the attribute
trusted.overlay.opaque, as in overlayfs (kernel, filesystems/overlayfs.rst); all is pax, as `tar --xattrs` writes it.
The content of a file begins at a page of the tar, and its holes are holes there: so the store finds what has not
changed since the checkpoint before.
"""

import contextlib
import os
import stat
import tarfile
from pathlib import Path
from typing import IO

from ocihook.belongings.tree import OVERLAY, Entry, Progress, attribute_names, copy, opened, opened_below, walk
from ocihook.packs.pack import PAGE_BYTES

XATTR = "SCHILY.xattr."  # GNU tar's and libarchive's key of an extended attribute
OPAQUE = XATTR + "trusted.overlay.opaque"
LABELS = ("security.selinux", "security.ima", "security.evm")  # that belong to the place of a file, not to the file
BROUGHT = "trusted.ocihook.brought"  # attribute of a volume that a pod's first container has filled
_END_BYTES = 2 * tarfile.BLOCKSIZE  # of zeros
_KINDS = {
    stat.S_IFREG: tarfile.REGTYPE,
    stat.S_IFDIR: tarfile.DIRTYPE,
    stat.S_IFLNK: tarfile.SYMTYPE,
    stat.S_IFCHR: tarfile.CHRTYPE,
    stat.S_IFBLK: tarfile.BLKTYPE,
    stat.S_IFIFO: tarfile.FIFOTYPE,
}


class Writer:
    """Writes trees into a tar, which must be a seekable file."""

    def __init__(self, file: IO[bytes], progress: Progress) -> None:
        self._file = file
        self._progress = progress
        self._links: dict[tuple[int, int], str] = {}  # of files with several names: the one that was written

    def add_bytes(self, name: str, data: bytes) -> None:
        """Write a file."""
        info = tarfile.TarInfo(name)
        info.size, info.mode = len(data), 0o600
        self._put_header(info)
        self._file.write(data)
        self._pad(tarfile.BLOCKSIZE)

    def add_tree(self, prefix: str, directory: Path, merged: Path | None = None) -> None:
        """Write a tree.

        Args:
            prefix: before all names.
            directory: that it is in.
            merged: where the merged tree is mounted, if `directory` is the upper one of overlayfs.

        Raises:
            UnsupportedError: if it is too deep.
            OSError: if it cannot be read, or the tar cannot be written.
        """
        moved = ""
        with opened(directory) as top:
            for entry in walk(top):
                if moved and f"{entry.name}/".startswith(moved):
                    continue
                if merged and entry.is_directory and _overlay_says(entry, "redirect"):
                    moved = f"{entry.name}/"  # what is in it lies elsewhere, in a lower layer
                    with opened(merged / entry.name) as seen:
                        self.add_all(prefix, seen, entry.name)
                    continue
                self.add(prefix, entry, merged)

    def add_all(self, prefix: str, directory: int, name: str) -> None:
        """Write a directory with this name and all its content, which replaces any earlier content."""
        for entry in walk(directory, name):
            self.add(prefix, entry, is_opaque=entry.name == name)

    def add_gone(self, prefix: str, name: str) -> None:
        """Write that this name is removed."""
        info = tarfile.TarInfo(f"{prefix}/{name}")
        info.type = tarfile.CHRTYPE
        self._put_header(info)

    def add(self, prefix: str, entry: Entry, merged: Path | None = None, *, is_opaque: bool = False) -> None:
        """Write what is at a name; sockets are left out, as CRIU recreates them."""
        status = entry.status
        kind = _KINDS.get(stat.S_IFMT(status.st_mode))
        if kind is None:
            return
        info = tarfile.TarInfo(f"{prefix}/{entry.name}".rstrip("/"))
        info.type, info.mode, info.uid, info.gid = kind, stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid
        headers = {"mtime": "{}.{:09}".format(*divmod(status.st_mtime_ns, 10**9))}
        info.pax_headers = headers
        if kind == tarfile.REGTYPE:
            self._add_regular(info, entry, merged)
            return
        if kind == tarfile.SYMTYPE:
            info.linkname = os.readlink(entry.own_name, dir_fd=entry.parent)
        elif kind in {tarfile.CHRTYPE, tarfile.BLKTYPE}:
            info.devmajor, info.devminor = os.major(status.st_rdev), os.minor(status.st_rdev)
        elif kind == tarfile.DIRTYPE:
            headers |= _attributes(entry)
            if is_opaque or (merged and _overlay_says(entry, "opaque")):
                headers[OPAQUE] = "y"
        self._put_header(info)

    def _add_regular(self, info: tarfile.TarInfo, entry: Entry, merged: Path | None) -> None:
        key = entry.status.st_dev, entry.status.st_ino
        if key in self._links:
            info.type, info.linkname = tarfile.LNKTYPE, self._links[key]
            self._put_header(info)
            return
        if entry.status.st_nlink > 1:
            self._links[key] = info.name
        info.pax_headers = {**info.pax_headers, **_attributes(entry)}
        is_elsewhere = merged is not None and _overlay_says(entry, "metacopy")  # the content is in a lower layer
        with _opened_at(merged, entry.name) if merged and is_elsewhere else entry.open() as source:
            info.size = os.fstat(source).st_size
            self._put_header(info)
            self._file.flush()
            start = self._file.tell()
            copy(source, self._file.fileno(), at=(0, start), size_bytes=info.size, progress=self._progress)
            self._file.seek(start + info.size)
        self._pad(tarfile.BLOCKSIZE)

    def _put_header(self, info: tarfile.TarInfo) -> None:
        header = _encoded(info)
        if info.size >= PAGE_BYTES:
            length = PAGE_BYTES + 1
            while (self._file.tell() + len(header)) % PAGE_BYTES:
                length -= 1
                header = _encoded(info, " " * length)
        self._file.write(header)

    def end(self) -> None:
        """Write the end, up to the end of a page."""
        self._file.seek(self._file.tell() + _END_BYTES)
        self._pad(PAGE_BYTES)

    def _pad(self, unit_bytes: int) -> None:
        at = self._file.tell()
        self._file.seek(at + -at % unit_bytes)
        self._file.truncate()


def _encoded(info: tarfile.TarInfo, comment: str = "") -> bytes:
    """Return a member's headers; a comment makes them longer."""
    kept = info.pax_headers
    if comment:
        info.pax_headers = {**kept, "comment": comment}
    try:
        return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
    finally:
        info.pax_headers = kept


def _opened_at(top: Path, name: str) -> contextlib.AbstractContextManager[int]:
    """Open a regular file below a directory."""
    with opened(top) as fd, opened_below(fd, name.rpartition("/")[0]) as parent:
        return Entry(name, parent, name.rpartition("/")[2], os.stat(parent)).open()


def _attributes(entry: Entry) -> dict[str, str]:
    """Return the extended attributes of a file or directory that are its own."""
    with entry.open() as fd:
        names = [n for n in attribute_names(fd) if not n.startswith(OVERLAY) and n not in (*LABELS, BROUGHT)]
        return {XATTR + name: os.getxattr(fd, name).decode("utf-8", "surrogateescape") for name in names}


def _overlay_says(entry: Entry, what: str) -> bool:
    """Return whether a file or directory in the upper tree has this attribute of overlayfs."""
    with entry.open() as fd:
        names = attribute_names(fd)
    return any(prefix + what in names for prefix in OVERLAY)
