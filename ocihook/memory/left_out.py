"""Memory that CRIU has left out of its page images, and that is read from a snapshot once the container runs again.

Of each process CRIU's pagemap says which pages it has written and which are in a parent: that one was made up, and
nobody has read any memory yet. So these pagemaps are kept when those of the image set are made whole; what they leave
out is all that is read, and the page images are made of both.
"""

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

from ocihook.criu.images import PAGE_BYTES, parse_pagemap, parse_runs, read_bounded
from ocihook.errors import ImageError
from ocihook.images.image_set import MovedRegions
from ocihook.images.merging import MERGED_PREFIX, MOST_MERGERS, is_incomplete, merge
from ocihook.linux.memory import Span
from ocihook.linux.procfs import Process
from ocihook.memory.snapshot import Area, Copied
from ocihook.packs.packed_manifest import PackedImage, Segment
from ocihook.packs.packing import pack
from ocihook.packs.pages import ImageFile, Source

_KEPT_NAME = "left-out"  # directory, in that with the record, with the pagemaps as CRIU wrote them


class Row(NamedTuple):
    """Pages that follow each other in a page image; all of them were written by CRIU, or left out."""

    is_written: bool
    offset: int  # in the image as CRIU has written it
    spans: tuple[Span, ...]

    @property
    def size_bytes(self) -> int:
        """Its size."""
        return sum(span.size_bytes for span in self.spans)


class LeftOut(NamedTuple):
    """A page image of which CRIU has written a part at most."""

    name: str
    process: Process
    rows: tuple[Row, ...]

    @property
    def size_bytes(self) -> int:
        """Its size once it is whole."""
        return sum(row.size_bytes for row in self.rows)

    def areas(self) -> list[Area]:
        """Return the memory that is missing."""
        return [Area(self.process, row.spans) for row in self.rows if not row.is_written]


def note_left_out(directory: Path, record: Path, processes: Mapping[str, Process]) -> list[LeftOut]:
    """Keep what CRIU has left out, before anything of the image set is changed. May run again.

    Args:
        directory: the image set.
        record: directory with pagemaps of what is to be read, by CRIU's numbers of the processes.
        processes: the same.

    Raises:
        ImageError: if CRIU has left out what is not to be read, or an image is damaged.
        OSError: from the file system.
    """
    kept = record / _KEPT_NAME
    if not kept.exists():  # else the agent was killed since
        partial_copy = kept.with_suffix(".partial")
        shutil.rmtree(partial_copy, ignore_errors=True)
        partial_copy.mkdir(mode=0o700)
        for path in sorted(directory.glob("pagemap-*.img")):
            pagemap = read_bounded(path)
            if is_incomplete(pagemap):
                number = path.name.removeprefix("pagemap-").removesuffix(".img")
                if number not in processes:
                    raise ImageError(f"CRIU has left out memory that {path.name} names, which nobody was to read")
                _check(pagemap, (record / number).read_bytes())
                (partial_copy / number).write_bytes(pagemap)
        partial_copy.rename(kept)
    return find_left_out(record, processes)


def _check(pagemap: bytes, known: bytes) -> None:
    spans = ((run.vaddr, run.vaddr + run.pages * PAGE_BYTES) for run in parse_runs(known))
    for _ in merge(parse_runs(pagemap), spans):
        pass


def find_left_out(record: Path, processes: Mapping[str, Process]) -> list[LeftOut]:
    """Return what was left out, as `note_left_out` has kept it.

    Raises:
        OSError: if that is gone.
    """
    found = []
    for number in sorted(os.listdir(record / _KEPT_NAME)):
        pagemap = (record / _KEPT_NAME / number).read_bytes()
        found.append(LeftOut(parse_pagemap(pagemap).pages_name, processes[number], tuple(_rows(pagemap))))
    return found


def _rows(pagemap: bytes) -> Iterator[Row]:
    written = 0
    for is_written, runs in groupby(parse_runs(pagemap), attrgetter("is_present")):
        spans = tuple(Span(run.vaddr, run.vaddr + run.pages * PAGE_BYTES) for run in runs)
        yield Row(is_written, written, spans)
        written += sum(span.size_bytes for span in spans) if is_written else 0


def join(
    left_out: Sequence[LeftOut], copied: Copied, written: Mapping[str, Path], place: Path, workers: int
) -> MovedRegions:
    """Make page images of what CRIU has written and what was read; both are in packs then.

    Args:
        left_out: what was read.
        copied: the same.
        written: by their names, the page images that CRIU wrote.
        place: with the packs of what was read; gets those of the rest.
        workers: processes to use.

    Raises:
        StoreError: if one that CRIU wrote is not whole.
        OSError: from the file system, a full one included.
    """
    sources = [
        Source(partial(ImageFile, written[image.name]), row.offset, row.size_bytes)
        for image in left_out
        for row in image.rows
        if row.is_written
    ]
    packed, packs = pack(sources, place, prefix=MERGED_PREFIX, workers=min(workers, MOST_MERGERS), durable=False)
    found: dict[bool, Iterator[tuple[Segment, ...]]] = {True: iter(packed), False: iter(copied.rows)}
    images = [
        PackedImage(
            image.name,
            image.size_bytes,
            tuple(segment for row in image.rows for segment in next(found[row.is_written])),
        )
        for image in left_out
    ]
    return MovedRegions((), (*copied.packs, *packs), {}, tuple(images))
