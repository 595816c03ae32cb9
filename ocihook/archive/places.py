"""Where archives of engines lie on this node that a container can resume from by the runtime handler."""

import logging
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from ocihook.config import Settings

KUBELET_ARCHIVES = Path("/var/lib/kubelet/checkpoints")
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH

log = logging.getLogger(__name__)


def archive_directories(settings: Settings) -> list[Path]:
    """Return where archives are looked for: as configured, where the kubelet puts them, and `ocihook run`."""
    named = [Path(settings.archive_dir)] if settings.archive_dir else []
    return list(dict.fromkeys([*named, KUBELET_ARCHIVES, fetched_archives(settings)]))


def fetched_archives(settings: Settings) -> Path:
    """Return where `ocihook run` puts the archive of a container that it has checkpointed on another node."""
    return Path(settings.store_dir).parent / "archives"


def archive_files(settings: Settings, since_s: float = 0.0) -> list[Path]:
    """Return the files that may be archives and were written since a time.

    Whoever can write into a directory chooses what it holds, and as whose: so one that others than root can write to is
    left out.
    """
    files = (row for directory in archive_directories(settings) for row in _files(directory))
    return [path for changed_s, path in files if changed_s >= since_s]


def _files(directory: Path) -> Iterator[tuple[float, Path]]:
    try:
        status = directory.stat()
        if status.st_uid not in (0, os.geteuid()) or status.st_mode & _WRITABLE_BY_OTHERS:
            log.warning("nothing is restored from archives in %s: others than root can write there", directory)
            return
        names = sorted(os.listdir(directory))
    except (FileNotFoundError, NotADirectoryError):
        return
    for name in names:
        path = directory / name
        try:
            status = path.lstat()
        except FileNotFoundError:
            continue
        if ".tar" in name and stat.S_ISREG(status.st_mode):
            yield status.st_mtime, path
