"""Joins what CRIU has written of a process's memory with what was read of it before: both become one page image.

Pages that CRIU found clean are in the packs of whoever has read them; of those that became dirty since, CRIU's own
count. The page image is then as CRIU alone would have written it: rows of chunks in packs, most of which stay where
they are. Only what CRIU's pages are among is packed once more.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from ocihook.criu.images import PAGE_BYTES, PageRun, complete_pagemap, parse_pagemap, parse_runs, read_bounded
from ocihook.errors import ImageError
from ocihook.images.image_set import open_packs
from ocihook.linux.files import replace_file
from ocihook.linux.patience import ENDLESS, Patience
from ocihook.packs.pack import PackInfo
from ocihook.packs.packed_manifest import REGION_PACK_PREFIX, PackedImage, PackedManifest, Segment
from ocihook.packs.packing import pack
from ocihook.packs.pages import ImageFile, Part, Parts, Progress, Source, no_progress, read_pages
from ocihook.packs.runs import RunPages
from ocihook.packs.unpacking import PackedPart

# Packs of memory that was moved before CRIU began have numbers without these zeros in front (regions.py).
READ_PREFIX = f"{REGION_PACK_PREFIX}0"
MERGED_PREFIX = f"{REGION_PACK_PREFIX}00"
MOST_MERGERS = 99  # workers: packs have numbers of four digits at most


class Piece(NamedTuple):
    """Bytes of a page image, and where they are."""

    is_read: bool  # by us; else written by CRIU
    offset: int  # in the image that was read, or that CRIU wrote
    size_bytes: int


class Merged(NamedTuple):
    """Page images that were joined, and the packs that they are in."""

    images: tuple[PackedImage, ...]
    packs: tuple[PackInfo, ...]


class _Join(NamedTuple):
    """A page image that is to be joined."""

    name: str
    pieces: list[Piece]
    read: PackedImage
    part: PackedPart


def merge(runs: Iterable[PageRun], read: Iterable[tuple[int, int]]) -> Iterator[Piece]:
    """Yield what makes up a page image.

    Args:
        runs: as CRIU's pagemap has them; those that are not present are in a parent.
        read: start and end of what was read, without gaps in its image; in the order of addresses, as the runs.

    Raises:
        ImageError: if CRIU has left out what was not read.
    """
    last = Piece(is_read=False, offset=0, size_bytes=0)
    for piece in _pieces(runs, iter(read)):
        if last.is_read == piece.is_read and last.offset + last.size_bytes == piece.offset:
            last = last._replace(size_bytes=last.size_bytes + piece.size_bytes)
            continue
        if last.size_bytes:
            yield last
        last = piece
    if last.size_bytes:
        yield last


def _pieces(runs: Iterable[PageRun], read: Iterator[tuple[int, int]]) -> Iterator[Piece]:
    written = offset = 0  # of CRIU's image; of the one that was read, where `start` is
    start, end = next(read, (0, 0))
    for address, pages, is_present in runs:
        size = pages * PAGE_BYTES
        if is_present:
            yield Piece(is_read=False, offset=written, size_bytes=size)
            written += size
            continue
        at, until = address, address + size
        while at < until:
            while end <= at and end:
                offset += end - start
                start, end = next(read, (0, 0))
            if not start <= at < end:
                raise ImageError(f"CRIU has left out the memory at {at:#x}, which nobody has read before")
            high = min(until, end)
            yield Piece(is_read=True, offset=offset + at - start, size_bytes=high - at)
            at = high


def is_incomplete(pagemap: bytes) -> bool:
    """Return whether a pagemap names pages of a parent.

    Raises:
        ImageError: if it is damaged.
    """
    return any(not run.is_present for run in parse_runs(pagemap))


def merge_images(
    directory: Path,
    place: Path,
    read: PackedManifest,
    pagemaps: Mapping[int, bytes],
    *,
    workers: int,
    durable: bool,
    patience: Patience = ENDLESS,
    progress: Progress = no_progress,
) -> Merged:
    """Join the page images of an image set with what was read; pagemaps and page images stay as they are.

    Args:
        directory: the image set.
        place: with the packs of what was read; gets those of what is packed once more.
        read: what was read, each process's memory under the name that `pages_name` gives it.
        pagemaps: of the same, by CRIU's numbers of the processes.
        workers: processes to use.
        durable: return only when new packs are on stable storage.
        patience: how long the caller waits for it.
        progress: called with the bytes done.

    Raises:
        ImageError: if CRIU has left out what was not read, or an image is damaged.
        IntegrityError: if a pack of what was read is damaged.
        OSError: from the file system, a full one included.
    """
    discard_merged(place)
    by_name = {image.name: image for image in read.packed_images}
    packs = open_packs(place, read)
    try:
        joins = []
        for path in sorted(directory.glob("pagemap-*.img")):
            pagemap = read_bounded(path)
            if not is_incomplete(pagemap):
                continue
            pid = path.name.removeprefix("pagemap-").removesuffix(".img")
            known = pagemaps.get(int(pid)) if pid.isdigit() else None
            if known is None:
                raise ImageError(f"CRIU has left out memory that {path.name} names, which nobody has read before")
            spans = ((run.vaddr, run.vaddr + run.pages * PAGE_BYTES) for run in parse_runs(known))
            image, pages_name = by_name[pages_name_of(int(pid))], parse_pagemap(pagemap).pages_name
            pieces = list(merge(parse_runs(pagemap), spans))
            joins.append(_Join(pages_name, pieces, image, packs.parts[image.name]))
        rows = [list(_rows(join)) for join in joins]
        sources = [
            Source(partial(_MergedPages, directory, join), row.start, row.size_bytes)
            for join, its_rows in zip(joins, rows, strict=True)
            for row in its_rows
            if isinstance(row, Part)
        ]
        segments, new_packs = pack(
            sources,
            place,
            prefix=MERGED_PREFIX,
            workers=min(workers, MOST_MERGERS),
            durable=durable,
            patience=patience,
            progress=progress,
        )
    finally:
        packs.close()
    repacked = iter(segments)
    images = tuple(
        PackedImage(join.name, sum(piece.size_bytes for piece in join.pieces), tuple(_segments(its_rows, repacked)))
        for join, its_rows in zip(joins, rows, strict=True)
    )
    used = {segment.pack for image in images for segment in image.segments}
    return Merged(images, tuple(info for info in (*read.packs, *new_packs) if info.name in used))


def pages_name_of(pid: int) -> str:
    """Return under which name the memory of a process is kept until CRIU has named its page image."""
    return f"pages-{pid}.img"


def complete_pagemaps(directory: Path) -> None:
    """Have pagemaps name no parent: their page images have all pages now. May run again.

    Raises:
        ImageError: if one is damaged.
        OSError: from the file system.
    """
    for path in sorted(directory.glob("pagemap-*.img")):
        pagemap = read_bounded(path)
        if is_incomplete(pagemap):
            mode = path.stat().st_mode & 0o777
            replace_file(path, complete_pagemap(pagemap, path.name), mode=mode, durable=False)


def discard_merged(place: Path) -> None:
    """Remove what an interrupted `merge_images` has left. May run any time."""
    for path in place.glob(f"{MERGED_PREFIX}[0-9]*.pack"):
        path.unlink(missing_ok=True)


def _rows(join: _Join) -> Iterator[Segment | Part]:
    """Yield the segments that stay, and the parts between them, of the joined image, that are packed once more."""
    kept = list(_kept(join))
    at = 0
    for start, size, segment in kept:
        if at < start:
            yield Part(at, start - at, 0)
        yield segment
        at = start + size
    end = sum(piece.size_bytes for piece in join.pieces)
    if at < end:
        yield Part(at, end - at, 0)


def _kept(join: _Join) -> Iterator[tuple[int, int, Segment]]:
    """Yield the segments that CRIU has left out as a whole: where they are in the joined image, and their sizes."""
    rows = iter(zip(join.part.ranges(), join.read.segments, strict=True))
    row = next(rows, None)
    at = 0
    for piece in join.pieces:
        if piece.is_read:
            end = piece.offset + piece.size_bytes
            while row is not None and row[0][0] < piece.offset:
                row = next(rows, None)
            while row is not None and sum(row[0]) <= end:
                (start, size), segment = row
                yield at + start - piece.offset, size, segment
                row = next(rows, None)
        at += piece.size_bytes


def _segments(rows: Sequence[Segment | Part], repacked: Iterator[tuple[Segment, ...]]) -> Iterator[Segment]:
    for row in rows:
        if isinstance(row, Segment):
            yield row
        else:
            yield from next(repacked)


class _MergedPages:
    """Reads a joined image."""

    def __init__(self, directory: Path, join: _Join) -> None:
        ends = [0]
        for piece in join.pieces:
            ends.append(ends[-1] + piece.size_bytes)
        where = [
            (piece.is_read, (at, piece.size_bytes, piece.offset)) for piece, at in zip(join.pieces, ends, strict=False)
        ]
        self._read = Parts(part for is_read, part in where if is_read)
        self._written = Parts(part for is_read, part in where if not is_read)
        self._pages = RunPages(join.part)  # shared: closing it closes nothing
        self._image = ImageFile(directory / join.name) if self._written.size_bytes else None

    def read_into(self, view: memoryview, offset: int) -> int:
        """Fill `view`; return how many bytes there were."""
        end = offset + len(view)
        for start, size, at in self._read.within(offset, end):
            read_pages(self._pages, view[start - offset : start - offset + size], at)
        for start, size, at in self._written.within(offset, end):
            assert self._image is not None
            read_pages(self._image, view[start - offset : start - offset + size], at)
        return len(view)

    def close(self) -> None:
        """Close CRIU's image."""
        if self._image is not None:
            self._image.close()
