"""Images as runs of pages, however they are stored, and the one function that writes all of them to their targets."""

import contextlib
import os
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from ocihook.errors import ImageError
from ocihook.linux.files import open_regular
from ocihook.linux.memory import CopyBuffer
from ocihook.linux.patience import ENDLESS, Patience
from ocihook.linux.workers import run_forked
from ocihook.packs.pack import PAGE_BYTES, Buffer
from ocihook.packs.pages import (
    BATCH_BYTES,
    ImageFile,
    PageWriter,
    Part,
    Parts,
    Progress,
    Range,
    Target,
    make_image,
    no_progress,
    ranges_of,
    scattered,
)

ALL: Mapping[str, Parts] = MappingProxyType({})  # of every image

# A number of pages, and their content in pieces; with no pieces they are zero, or not wanted.
Run = tuple[int, list[Buffer]]


class PageRuns(Protocol):
    """An image or a region: a row of segments in packs, extents in packs of the store, or a file as CRIU wrote it."""

    size_bytes: int
    is_overwritten: bool  # the next run overwrites the content of this one

    def ranges(self) -> Iterator[tuple[int, int]]:
        """Yield start and size in bytes of what workers take of it at a time."""

    def runs(self, start: int, size_bytes: int, parts: Parts | None = None) -> Iterator[Run]:
        """Yield what is in so many bytes from an offset on, whole pages, verified; what is in no part is not read.

        Raises:
            OcihookError: naming what is missing or damaged.
        """

    def verify(self, start: int, size_bytes: int) -> None:
        """Read the same, and return nothing.

        Raises:
            IntegrityError: naming what is missing or damaged.
        """

    def close(self) -> None:
        """Close what was opened for it alone."""


def write_images(
    images: Mapping[str, PageRuns],
    targets: Mapping[str, Target | None],
    *,
    workers: int,
    patience: Patience = ENDLESS,
    progress: Progress = no_progress,
) -> None:
    """Write images, or what their targets want of them; long runs of zero pages are left alone.

    Args:
        images: by name.
        targets: where they go, by the same names; None: they are verified, and go nowhere. Others are left out.
        workers: processes to use.
        patience: how long the caller waits for it.
        progress: called with the bytes done.

    Raises:
        OcihookError: naming what is missing or damaged.
        OSError: from the targets: a file system that is full, or a process that is gone.
    """
    names = list(targets)
    ranges = [
        Range(number, start, size)
        for number, name in enumerate(names)
        for start, size in images[name].ranges()
        if (target := targets[name]) is None or target.wants(start, size)
    ]
    # The kernel lets one process at a time write to a file, so it is better to have workers at several files.
    ranges.sort(key=lambda one: one.start / images[names[one.number]].size_bytes)

    def worker(_number: int, task_numbers: Iterator[int]) -> Iterator[int]:
        for task in task_numbers:
            number, start, size = ranges[task]
            image, target = images[names[number]], targets[names[number]]
            if target is None:
                image.verify(start, size)
            else:
                _write(image, target, start, size)
            yield task

    for task in run_forked(worker, tasks=len(ranges), workers=workers, patience=patience):
        progress(ranges[task].size_bytes)


def _write(image: PageRuns, target: Target, start: int, size_bytes: int) -> None:
    with contextlib.closing(target.open()) as pages:
        writer = PageWriter(pages, target.start + start, target.batch_bytes)
        for count, contents in image.runs(start, size_bytes, target.parts):
            writer.add(count, contents)
            if image.is_overwritten:
                writer.flush()
        writer.flush()


def file_targets(directory: Path, sizes: Mapping[str, int], only: Mapping[str, Parts] = ALL) -> dict[str, Target]:
    """Make files in `directory` for images of such sizes, by their names; of those in `only` just for these parts.

    Raises:
        OSError: from the file system; also if one of the files exists already.
    """
    targets = {}
    for name, size_bytes in sizes.items():
        path, parts = directory / name, only.get(name)
        opened = partial(ImageFile, path, writable=True)
        make_image(path, size_bytes if parts is None else parts.size_bytes)
        targets[name] = Target(opened, 0) if parts is None else scattered(opened, parts)
    return targets


class RunPages:
    """The pages of an image, read as those of a file are."""

    def __init__(self, image: PageRuns) -> None:
        self._image = image

    def read_into(self, view: memoryview, offset: int) -> int:
        """Fill `view`, whole pages from a whole page on; return how many bytes there were.

        Raises:
            OcihookError: naming what is missing or damaged.
        """
        at = 0
        for pages, contents in self._image.runs(offset, len(view)):
            for content in contents or [bytes(pages * PAGE_BYTES)]:
                view[at : at + len(content)] = content
                at += len(content)
        return at

    def close(self) -> None:
        """Close the image."""
        self._image.close()


class PlainImage:
    """A page image as CRIU wrote it, alone or in an archive; opened while it is read."""

    is_overwritten = True

    def __init__(self, path: Path, offset: int, size_bytes: int) -> None:
        self._path, self._offset, self.size_bytes = path, offset, size_bytes

    def ranges(self) -> Iterator[tuple[int, int]]:
        """Yield start and size of what workers take of it at a time."""
        return ranges_of(self.size_bytes)

    def runs(self, start: int, size_bytes: int, parts: Parts | None = None) -> Iterator[Run]:
        """Yield what is in so many bytes from an offset on; what is in no part is not read.

        Raises:
            ImageError: if it ends early.
            OSError: from the file system; also if it is not a regular file.
        """
        at, end = start, start + size_bytes
        buffer = CopyBuffer(min(BATCH_BYTES, size_bytes))
        fd = open_regular(self._path)
        try:
            for low, size, _ in [Part(start, size_bytes, 0)] if parts is None else parts.within(start, end):
                if at < low:
                    yield (low - at) // PAGE_BYTES, []
                for at in range(low, low + size, BATCH_BYTES):
                    view = buffer.view[: min(BATCH_BYTES, low + size - at)]
                    if os.preadv(fd, [view], self._offset + at) != len(view):
                        raise ImageError(f"{self._path.name} ends before byte {at + len(view)}")
                    yield len(view) // PAGE_BYTES, [view]
                at = low + size
            if at < end:
                yield (end - at) // PAGE_BYTES, []
        finally:
            os.close(fd)

    def verify(self, start: int, size_bytes: int) -> None:
        """Read it: there is nothing to compare with."""
        for _ in self.runs(start, size_bytes):
            pass

    def close(self) -> None:
        """Nothing is held."""
