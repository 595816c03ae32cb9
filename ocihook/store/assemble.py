"""The images of a stored checkpoint, read from the packs of its domain, each chunk verified as it is read."""

import contextlib
from collections.abc import Iterator, Mapping

from ocihook.linux.patience import ENDLESS, Patience
from ocihook.packs.pack import PAGE_BYTES
from ocihook.packs.pages import Parts, Progress, Target, no_progress, ranges_of
from ocihook.packs.runs import Run, write_images
from ocihook.store.extents import ZERO, Extents, Layout
from ocihook.store.pack_directory import PackDirectory, StoredPacks, pack_number

_BATCH_PAGES = 512  # read at a time; a batch of which no target wants anything is not read


class StoredPart:
    """An image or a region in packs of the store."""

    is_overwritten = False

    def __init__(self, extents: Extents, layout: Layout, packs: StoredPacks) -> None:
        """Packs are opened as they are needed."""
        self.size_bytes = extents.pages * PAGE_BYTES
        self._extents, self._packs = extents, packs
        self._numbers = [pack_number(info.name) for info in layout.packs]

    def ranges(self) -> Iterator[tuple[int, int]]:
        """Yield start and size of what workers take of it at a time."""
        return ranges_of(self.size_bytes)

    def runs(self, start: int, size_bytes: int, parts: Parts | None = None) -> Iterator[Run]:
        """Yield the content of so many bytes from an offset on; batches that have nothing of `parts` are not read.

        Raises:
            IntegrityError: naming what is missing or damaged.
        """
        first, end = start // PAGE_BYTES, (start + size_bytes) // PAGE_BYTES
        for batch in range(first, end, _BATCH_PAGES):
            count = min(_BATCH_PAGES, end - batch)
            if not (parts is None or parts.touches(batch * PAGE_BYTES, (batch + count) * PAGE_BYTES)):
                yield count, []
                continue
            for number, at, pages in self._extents.cut(batch, count):
                yield pages, [] if number == ZERO else self._packs.get(self._numbers[number]).contents(at, pages)

    def verify(self, start: int, size_bytes: int) -> None:
        """Read it, which verifies it.

        Raises:
            IntegrityError: naming what is missing or damaged.
        """
        for _ in self.runs(start, size_bytes):
            pass

    def close(self) -> None:
        """Close the packs."""
        self._packs.close()


def open_part(layout: Layout, name: str, directory: PackDirectory) -> StoredPart:
    """Return an image or a region by its name, with packs opened for it alone."""
    return StoredPart(layout.images[name], layout, StoredPacks(directory, layout.packs))


def assemble(
    layout: Layout,
    directory: PackDirectory,
    targets: Mapping[str, Target | None],
    *,
    workers: int,
    patience: Patience = ENDLESS,
    progress: Progress = no_progress,
) -> None:
    """Write images of a layout, as `write_images` does.

    Raises:
        IntegrityError: naming what is missing or damaged, of other images' packs, too.
        OSError: from the targets.
    """
    with contextlib.closing(StoredPacks(directory, layout.packs)) as packs:
        packs.open([pack_number(info.name) for info in layout.packs])  # once, and not in each worker
        parts = {name: StoredPart(layout.images[name], layout, packs) for name in targets}
        write_images(parts, targets, workers=workers, patience=patience, progress=progress)
