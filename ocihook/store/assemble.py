"""Writes the pages of a stored checkpoint to where they are wanted, in parallel, each chunk verified as it is read."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping

from ocihook.linux.patience import ENDLESS, Patience
from ocihook.linux.workers import run_forked
from ocihook.packs.pack import PAGE_BYTES, Buffer
from ocihook.packs.pages import Progress, Target, WritablePages, no_progress, write_pages
from ocihook.store.extents import ZERO, Extents, Layout
from ocihook.store.pack_directory import PackDirectory, StoredPacks, pack_number

_RANGE_PAGES = 4096  # what a worker takes at a time
_BATCH_PAGES = 512  # what it reads and writes at a time: a huge page, which the kernel need not clear then
_HOLE_PAGES = 16  # zero pages in a row that are worth a hole: as many as take as long to write as the call does
_ZEROS = memoryview(bytes(_HOLE_PAGES * PAGE_BYTES))

# The content of so many pages, in pieces; of none if they are zero.
Run = tuple[int, list[Buffer]]


def assemble(
    layout: Layout,
    directory: PackDirectory,
    targets: Mapping[str, Target],
    *,
    workers: int,
    patience: Patience = ENDLESS,
    progress: Progress = no_progress,
) -> None:
    """Write images, or what their targets want of them, there; long runs of zero pages are left alone.

    Raises:
        IntegrityError: naming what is missing or damaged, of other images' packs, too.
        OSError: from the targets.
    """
    ranges = [
        (name, first, min(first + _RANGE_PAGES, layout.images[name].pages))
        for name in targets
        for first in range(0, layout.images[name].pages, _RANGE_PAGES)
        if targets[name].wants(first * PAGE_BYTES, _RANGE_PAGES * PAGE_BYTES)
    ]
    # The kernel lets one at a time write to a file, so that workers had better be at several of them.
    ranges.sort(key=lambda part: part[1] / layout.images[part[0]].pages)

    with contextlib.closing(_Reader(layout, directory)) as reader:
        reader.open_packs()  # once, and not in each worker

        def worker(_number: int, task_numbers: Iterator[int]) -> Iterator[int]:
            for task in task_numbers:
                name, first, end = ranges[task]
                with contextlib.closing(targets[name].open()) as target:
                    for batch in range(first, end, _BATCH_PAGES):
                        if not targets[name].wants(batch * PAGE_BYTES, _BATCH_PAGES * PAGE_BYTES):
                            continue
                        runs = reader.read(layout.images[name], batch, min(_BATCH_PAGES, end - batch))
                        _write(runs, target, targets[name].start + batch * PAGE_BYTES)
                yield task

        for task in run_forked(worker, tasks=len(ranges), workers=workers, patience=patience):
            _, first, end = ranges[task]
            progress((end - first) * PAGE_BYTES)


def _write(runs: Iterable[Run], target: WritablePages, position: int) -> None:
    """Write a batch with one call, or with one for what is between holes."""
    pending: list[Buffer] = []
    end = position
    for pages, contents in runs:
        if contents:
            pending += contents
        elif pages < _HOLE_PAGES:
            pending.append(_ZEROS[: pages * PAGE_BYTES])
        else:
            write_pages(target, pending, position)
            pending = []
            position = end + pages * PAGE_BYTES
        end += pages * PAGE_BYTES
    write_pages(target, pending, position)


class _Reader:
    """Reads the images of a layout, a batch at a time."""

    def __init__(self, layout: Layout, directory: PackDirectory) -> None:
        """Packs are opened as they are needed."""
        self._numbers = [pack_number(info.name) for info in layout.packs]
        self._packs = StoredPacks(directory, layout.packs)

    def open_packs(self) -> None:
        """Open as many packs as stay open, before a fork: the processes share what is known of them.

        Raises:
            IntegrityError: naming what is missing or damaged.
        """
        self._packs.open(self._numbers)

    def read(self, extents: Extents, first: int, pages: int) -> Iterator[Run]:
        """Yield what is in pages from page `first` on.

        Raises:
            IntegrityError: naming what is missing or damaged.
        """
        for number, at, count in extents.cut(first, pages):
            if number == ZERO:
                yield count, []
            else:
                yield count, self._packs.get(self._numbers[number]).contents(at, count)

    def close(self) -> None:
        """Close the packs."""
        self._packs.close()


class StoredPages:
    """The pages of a stored image, read as those of a file are."""

    def __init__(self, extents: Extents, layout: Layout, directory: PackDirectory) -> None:
        """Take where they are; packs are opened as they are needed."""
        self._extents = extents
        self._reader = _Reader(layout, directory)

    def read_into(self, view: memoryview, offset: int) -> int:
        """Fill `view`, whole pages from a whole page on; return its length.

        Raises:
            IntegrityError: naming what is missing or damaged.
        """
        at = 0
        for pages, contents in _runs(self._reader, self._extents, offset // PAGE_BYTES, len(view) // PAGE_BYTES):
            for content in contents or [bytes(pages * PAGE_BYTES)]:
                view[at : at + len(content)] = content
                at += len(content)
        return at

    def close(self) -> None:
        """Close what was opened."""
        self._reader.close()


def read_image(extents: Extents, layout: Layout, directory: PackDirectory) -> Iterator[Run]:
    """Yield an image in runs of pages, a batch at most.

    Raises:
        IntegrityError: naming what is missing or damaged.
    """
    with contextlib.closing(_Reader(layout, directory)) as reader:
        yield from _runs(reader, extents, 0, extents.pages)


def _runs(reader: _Reader, extents: Extents, first: int, pages: int) -> Iterator[Run]:
    end = first + pages
    for batch in range(first, end, _BATCH_PAGES):
        yield from reader.read(extents, batch, min(_BATCH_PAGES, end - batch))
