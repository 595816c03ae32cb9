"""Files of a checkpoint that a runtime or CRIU opens before any script: refused where they could harm either.

A restore begins with the runtime, which reads `descriptors.json` (runc libcontainer/criu_linux.go, crun
src/libcrun/criu.c): a FIFO keeps it waiting, a link or a device leads elsewhere, and an entry beyond the third would
hand the container a descriptor of the runtime's own. CRIU then opens its images in the same way.
"""

import json
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from ocihook.errors import IntegrityError, printable

DESCRIPTORS = "descriptors.json"
MAX_DESCRIPTORS_BYTES = 64 << 10  # some hundred, really
_MOST = 3  # standard input, output and error
_MOST_DUMPS = 32
_IS_OPENED = re.compile(r"descriptors\.json|.*\.(img|pack)|ocihook\..*")


def check_descriptors(data: bytes) -> None:
    """Check the content of `descriptors.json`.

    Raises:
        IntegrityError: if no runtime has written it.
    """
    try:
        names = json.loads(data) if len(data) <= MAX_DESCRIPTORS_BYTES else None
    except (ValueError, RecursionError) as error:
        raise IntegrityError(f"{DESCRIPTORS} is not JSON: {error}") from error
    if not isinstance(names, list) or len(names) > _MOST or not all(isinstance(name, str) for name in names):
        raise IntegrityError(
            f"{DESCRIPTORS} is not an array of at most {_MOST} names", hint="use another copy of the checkpoint"
        )


def check_image_files(directory: Path) -> None:
    """Check that a runtime and CRIU can open every file of an image set, and of the earlier dumps that it needs.

    Raises:
        IntegrityError: naming what is not a file, or malformed.
        OSError: if the directory cannot be read.
    """
    for number, place in enumerate(_chain(directory)):
        if number > _MOST_DUMPS:
            raise IntegrityError(f"{directory} needs more than {_MOST_DUMPS} earlier dumps")
        for name in os.listdir(place):
            if _IS_OPENED.fullmatch(name) and not _is_file(place / name):
                raise IntegrityError(
                    f"{printable(name)} in {place} is not a file: a restore would wait for it, or read elsewhere",
                    hint="use another copy of the checkpoint",
                )
    path = directory / DESCRIPTORS
    if path.exists():
        with path.open("rb") as file:
            check_descriptors(file.read(MAX_DESCRIPTORS_BYTES + 1))


def _is_file(path: Path) -> bool:
    """Return whether a path is a file, or a link to one beside it."""
    if stat.S_ISREG(path.lstat().st_mode):
        return True
    return path.is_file() and path.resolve().parent == path.parent.resolve()


def _chain(directory: Path) -> Iterator[Path]:
    """Yield a directory of images, and those of earlier dumps by their links (criu/page-xfer.c, open_parent).

    A link may lead elsewhere: podman's first dump has one to `/`.
    """
    if directory.is_dir():
        yield directory
    while _has_images(directory := directory / "parent"):
        yield directory


def _has_images(directory: Path) -> bool:
    return directory.is_dir() and any(map(_IS_OPENED.fullmatch, os.listdir(directory)))
