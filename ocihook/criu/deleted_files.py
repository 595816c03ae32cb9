"""Finds deleted files in use that CRIU will refuse, and says what to do about them.

CRIU writes a file without any name into its images, up to a size; for one that has another name it makes a link, if
allowed (criu/files-reg.c, check_path_remap). It refuses only after the container has been stopped for a while.
"""

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from ocihook.criu.files import CriuOptions
from ocihook.errors import printable
from ocihook.linux.open_files import OpenFile

_MIB = 1 << 20
_IS_OF_KERNEL = re.compile(r"/proc/[0-9]|/dev/pts/")  # of a process that has ended: CRIU makes one that ends


class RefusedFile(NamedTuple):
    """One file that CRIU will refuse."""

    check: str  # the name that criu/explain.py gives the failure
    pid: int
    what: str  # what the process does with it
    remedy: str


def refused_files(files: Iterable[OpenFile], options: CriuOptions) -> Iterator[RefusedFile]:
    """Yield those of these files that CRIU will refuse, each once, smaller ones first."""
    limit = options.ghost_limit_bytes
    deleted = (file for file in files if file.is_deleted and has_place(file) and not _IS_OF_KERNEL.match(file.name))
    each_once = {(file.device, file.inode): file for file in deleted}
    for file in sorted(each_once.values(), key=lambda file: file.stored_bytes):
        if file.links == 0 and file.is_regular and file.stored_bytes > limit:
            size = -(-file.stored_bytes // _MIB)
            name = printable(file.name)
            what = f"uses {name}, which is deleted and has {size} MiB; CRIU's limit is {limit // _MIB} MiB"
            yield RefusedFile("ghost-file", file.pid, what, _raise_limit(file, options))
        elif file.links > 0 and not options.has("link-remap") and not _is_called_so(file):
            kind = "a POSIX semaphore" if Path(file.name).name.startswith("sem.") else "a file"
            what = f"uses {kind} by a name that it no longer has: {printable(file.name)}"
            # On an overlay no link can be made for a file of the image that was replaced.
            also = f" && {_raise_limit(file, options)}" if file.stored_bytes > limit else ""
            yield RefusedFile("link-remap", file.pid, what, options.add("link-remap") + also)


def _raise_limit(file: OpenFile, options: CriuOptions) -> str:
    return options.add(f"ghost-limit {_rounded(-(-file.stored_bytes // _MIB))}M")


def replaced_files(files: Iterable[OpenFile], options: CriuOptions) -> Iterator[RefusedFile]:
    """Yield large files that CRIU may refuse although it may make links: an overlay has replaced them."""
    for file in linked_files(files):
        if file.is_regular and file.stored_bytes > options.ghost_limit_bytes:
            what = f"uses {printable(file.name)}, which was replaced: on an overlay CRIU can make no link to it"
            yield RefusedFile("ghost-file", file.pid, what, _raise_limit(file, options))


def linked_files(files: Iterable[OpenFile]) -> Iterator[OpenFile]:
    """Yield the files for which CRIU makes a link: they are in use by a name that they no longer have."""
    for file in files:
        if file.is_deleted and file.links > 0 and has_place(file) and not _is_called_so(file):
            yield file


def has_place(file: OpenFile) -> bool:
    """Return whether a deleted file was in a file system: anonymous shared memory was not, and CRIU can dump it."""
    return file.name.startswith("/") and not file.name.startswith(
        ("/memfd:", "/secretmem", "/dev/zero", "/SYSV", "/[aio]", "/anon_")
    )


def _is_called_so(file: OpenFile) -> bool:
    """Return whether " (deleted)" is part of the name of a file that is there."""
    try:
        status = os.stat(f"/proc/{file.pid}/root{file.name} (deleted)", follow_symlinks=False)
    except OSError:
        return False
    return (status.st_dev, status.st_ino) == (file.device, file.inode)


def _rounded(size_mib: int) -> int:
    return 1 << max(4, (size_mib - 1).bit_length())
