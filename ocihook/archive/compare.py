"""Compares two checkpoint archives: images by content, memory page by page, runs of zero pages as a whole."""

import contextlib
import filecmp
import heapq
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ocihook.archive.repack import ImageSet, place_to_read, scratch_directory
from ocihook.container.engine_archive import read_facts
from ocihook.criu.images import PAGE_BYTES, PAGES_NAME, check_page_sizes, read_pagemaps, read_runs
from ocihook.errors import UnsupportedError
from ocihook.images.image_set import open_packs, read_packed
from ocihook.packs.packed_manifest import MANIFEST_NAME, PACK_NAME, PackedRegion
from ocihook.packs.pages import Progress, no_progress
from ocihook.packs.runs import PageRuns, PlainImage
from ocihook.store.thin import read_thin

if TYPE_CHECKING:
    from ocihook.packs.unpacking import Packs

_ZERO_PAGE = bytes(PAGE_BYTES)


class MemoryDiff(NamedTuple):
    """How the memory of one pagemap differs, in pages, compared by virtual address."""

    name: str
    same: int
    changed: int
    only_in_first: int
    only_in_second: int


class ArchiveDiff(NamedTuple):
    """How two archives differ."""

    images: list[tuple[str, str]]  # name; same, changed, only in first, only in second
    memory: list[MemoryDiff]


class _Run(NamedTuple):
    """Pages of a process that follow one another: one with its content, or zero pages, however many."""

    start: int  # virtual address
    pages: int
    content: bytes | None = None

    def after(self, pages: int) -> "_Run | None":
        """Return what is left after the first pages."""
        left = self.pages - pages
        return self._replace(start=self.start + pages * PAGE_BYTES, pages=left) if left else None

    def holds(self, other: "_Run") -> bool:
        """Return whether both are the same where they overlap."""
        return self.content == other.content or (self.content or _ZERO_PAGE) == (other.content or _ZERO_PAGE)


def diff_archives(first: Path, second: Path, *, progress: Progress = no_progress) -> ArchiveDiff:
    """Compare two archives, packed or plain: their images by content, their memory page by page.

    Raises:
        OcihookError: if one is damaged.
    """
    with contextlib.ExitStack() as stack:
        a, b = (_taken_memory(stack, path, progress) for path in (first, second))
        return ArchiveDiff(list(_diff_images(a.directory, b.directory)), list(_diff_memory(a, b)))


def _taken_memory(stack: contextlib.ExitStack, path: Path, progress: Progress) -> "_Memory":
    directory = stack.enter_context(scratch_directory(place_to_read(path)))
    images = ImageSet(path, directory, in_place=True, pages=True)
    read_facts(path, images.take)
    images.complete()
    if read_thin(directory) is not None:
        raise UnsupportedError(f"the memory of {path} is in a store", hint="unpack it, then compare")
    memory = _Memory(images, progress)
    stack.callback(memory.close)
    return memory


class _Memory:
    """The memory of an image set, packed or not."""

    def __init__(self, images: ImageSet, progress: Progress) -> None:
        self.directory = images.directory
        self.pagemaps = read_pagemaps(self.directory)
        self._places = images.places
        self._progress = progress
        manifest = read_packed(self.directory, elsewhere=images.packs)
        check_page_sizes(
            self.pagemaps,
            manifest.image_sizes if manifest else {name: place.size_bytes for name, place in images.places.items()},
        )
        self._regions = manifest.regions if manifest else ()
        self._packs: Packs | None = open_packs(self.directory, manifest, elsewhere=images.packs) if manifest else None

    def runs(self, pagemap_name: str) -> Iterator[_Run]:
        """Yield the pages of a process in order, whether CRIU dumped them or not."""
        regions = (region for region in self._regions if pagemap_name == f"pagemap-{region.process}.img")
        return heapq.merge(self._dumped(pagemap_name), *map(self._region, regions), key=attrgetter("start"))

    def _region(self, region: PackedRegion) -> Iterator[_Run]:
        assert self._packs is not None
        address = region.start
        for pages, content in _joined(self._packs.parts[region.name]):
            yield from _runs(address, pages, content)
            address += pages * PAGE_BYTES
            self._progress(pages * PAGE_BYTES)

    def _dumped(self, pagemap_name: str) -> Iterator[_Run]:
        pagemap = self.pagemaps[pagemap_name]
        if pagemap.is_compressed:
            raise UnsupportedError(f"{pagemap.pages_name} is compressed by CRIU itself and cannot be compared")
        images = self._content(pagemap.pages_name)
        pages, content = 0, None  # what is left of a piece of the image
        for run in read_runs(self.directory / pagemap_name):
            address, left = run.vaddr, run.pages if run.is_present else 0
            while left:
                if not pages:
                    pages, content = next(images)
                    self._progress(pages * PAGE_BYTES)
                taken = min(left, pages)
                yield from _runs(address, taken, content)
                content = None if content is None else content[taken * PAGE_BYTES :]
                pages, left, address = pages - taken, left - taken, address + taken * PAGE_BYTES

    def _content(self, name: str) -> Iterator[tuple[int, bytes | None]]:
        """Yield a page image in pieces of some pages with their content, or of zero pages."""
        if self._packs is not None and name not in self._places:
            return _joined(self._packs.parts[name])
        return _joined(PlainImage(*self._places[name]))

    def close(self) -> None:
        """Close the packs."""
        if self._packs is not None:
            self._packs.close()


def _joined(image: PageRuns) -> Iterator[tuple[int, bytes | None]]:
    """Yield an image in pieces of some pages with their content, or of zero pages."""
    for pages, contents in image.runs(0, image.size_bytes):
        yield pages, b"".join(contents) if contents else None


def _diff_images(a: Path, b: Path) -> Iterator[tuple[str, str]]:
    def is_compared(name: str) -> bool:
        return name != MANIFEST_NAME and not PACK_NAME.fullmatch(name) and not PAGES_NAME.fullmatch(name)

    for name in sorted({path.name for directory in (a, b) for path in directory.iterdir()}):
        if not is_compared(name):
            continue
        if not (b / name).exists():
            yield name, "only in first"
        elif not (a / name).exists():
            yield name, "only in second"
        else:
            yield name, "same" if filecmp.cmp(a / name, b / name, shallow=False) else "changed"


def _diff_memory(first: _Memory, second: _Memory) -> Iterator[MemoryDiff]:
    for name in sorted(first.pagemaps.keys() | second.pagemaps.keys()):
        a = first.runs(name) if name in first.pagemaps else iter(())
        b = second.runs(name) if name in second.pagemaps else iter(())
        yield MemoryDiff(name, *_merge(a, b))


def _runs(start: int, pages: int, content: bytes | None) -> Iterator[_Run]:
    if content is None:
        yield _Run(start, pages)
        return
    for offset in range(0, pages * PAGE_BYTES, PAGE_BYTES):
        yield _Run(start + offset, 1, content[offset : offset + PAGE_BYTES])


def _merge(a: Iterator[_Run], b: Iterator[_Run]) -> tuple[int, int, int, int]:
    """Count pages (same, changed, only in a, only in b); both come in ascending order of address."""
    same = changed = only_a = only_b = 0
    left, right = next(a, None), next(b, None)
    while left is not None or right is not None:
        if right is None or (left is not None and left.start < right.start):
            assert left is not None
            alone = left.pages if right is None else _pages_before(left, right)
            only_a += alone
            left = left.after(alone) or next(a, None)
        elif left is None or right.start < left.start:
            alone = right.pages if left is None else _pages_before(right, left)
            only_b += alone
            right = right.after(alone) or next(b, None)
        else:
            both = min(left.pages, right.pages)
            is_same = left.holds(right)
            same, changed = same + both * is_same, changed + both * (not is_same)
            left, right = left.after(both) or next(a, None), right.after(both) or next(b, None)
    return same, changed, only_a, only_b


def _pages_before(run: _Run, other: _Run) -> int:
    """Return how many pages of a run lie before another one begins."""
    return min(run.pages, (other.start - run.start) // PAGE_BYTES)
