"""Writes the pages of a stored checkpoint to where they are wanted, in parallel, each chunk verified as it is read."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from ocihook.linux.workers import run_forked
from ocihook.store.extents import ZERO, Extents, Layout
from ocihook.store.pack import PAGE_BYTES
from ocihook.store.packing import BATCH_BYTES, PageWriter, Progress, WritablePages, no_progress
from ocihook.store.places import PackDirectory, StoredPacks, pack_number

_RANGE_PAGES = 4096  # what a worker takes at a time
_HOLE_PAGES = 16  # zero pages in a row that are worth a hole: as many as take as long to write as the call does
_ZEROS = memoryview(bytes(_HOLE_PAGES * PAGE_BYTES))


class Target(NamedTuple):
    """Where an image goes to: a new file, or memory that reads as zeros."""

    open: Callable[[], WritablePages]
    start: int  # offset of its first page


def assemble(
    layout: Layout,
    directory: PackDirectory,
    targets: Mapping[str, Target],
    *,
    workers: int,
    progress: Progress = no_progress,
) -> None:
    """Write images to their targets; long runs of zero pages are left alone.

    Raises:
        IntegrityError: naming what is missing or damaged.
        OSError: from the targets.
    """
    ranges = [
        (name, first, min(_RANGE_PAGES, layout.images[name].pages - first))
        for name in targets
        for first in range(0, layout.images[name].pages, _RANGE_PAGES)
    ]

    pack_numbers = [pack_number(info.name) for info in layout.packs]

    def worker(_number: int, task_numbers: Iterator[int]) -> Iterator[int]:
        with contextlib.closing(StoredPacks(directory, layout.packs)) as packs:
            for task in task_numbers:
                name, first, pages = ranges[task]
                with contextlib.closing(targets[name].open()) as target:
                    writer = PageWriter(target, targets[name].start + first * PAGE_BYTES)
                    for number, at, count in layout.images[name].cut(first, pages):
                        if number != ZERO:
                            for content in packs.get(pack_numbers[number]).contents(at, count):
                                writer.put(content)
                        elif count < _HOLE_PAGES:
                            writer.put(_ZEROS[: count * PAGE_BYTES])
                        else:
                            writer.skip(count)
                    writer.flush()
                yield task

    for task in run_forked(worker, tasks=len(ranges), workers=workers):
        progress(ranges[task][2] * PAGE_BYTES)


class StoredPages:
    """The pages of a stored image, read as those of a file are."""

    def __init__(self, extents: Extents, layout: Layout, directory: PackDirectory) -> None:
        """Take where they are; packs are opened as they are needed."""
        self._extents = extents
        self._numbers = [pack_number(info.name) for info in layout.packs]
        self._packs = StoredPacks(directory, layout.packs)

    def read_into(self, view: memoryview, offset: int) -> int:
        """Fill `view`, whole pages from a whole page on; return its length.

        Raises:
            IntegrityError: naming what is missing or damaged.
        """
        at = 0
        for number, first, pages in self._extents.cut(offset // PAGE_BYTES, len(view) // PAGE_BYTES):
            end = at + pages * PAGE_BYTES
            if number == ZERO:
                view[at:end] = bytes(end - at)
            else:
                for content in self._packs.get(self._numbers[number]).contents(first, pages):
                    view[at : at + len(content)] = content
                    at += len(content)
            at = end
        return at

    def close(self) -> None:
        """Close what was opened."""
        self._packs.close()


def read_image(extents: Extents, layout: Layout, directory: PackDirectory) -> Iterator[bytes | memoryview]:
    """Yield the content of an image in pieces of whole pages, a batch at most.

    Raises:
        IntegrityError: naming what is missing or damaged.
    """
    with contextlib.closing(StoredPacks(directory, layout.packs)) as packs:
        for number, first, pages in extents:
            if number == ZERO:
                for done in range(0, pages * PAGE_BYTES, BATCH_BYTES):
                    yield bytes(min(BATCH_BYTES, pages * PAGE_BYTES - done))
            else:
                yield from packs.get(pack_number(layout.packs[number].name)).contents(first, pages)
