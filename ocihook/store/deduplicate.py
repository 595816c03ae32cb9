"""Adds pages to a domain: what is stored already is found, the rest goes into new packs.

Three ways to find a page, the cheapest first. In the checkpoint before, which is read along with this one, by the same
id at the same place: it is the same container's own memory, so 128 bits are enough. By the index, if that leads into
the checkpoint before: it is read along from there. By the index to any other page of the domain: then what lies there
is compared, byte by byte, and so is what follows. No id is ever trusted with another container's memory.
"""

import contextlib
import logging
import mmap
import os
import secrets
import struct
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import compress as selected
from operator import eq, not_
from pathlib import Path
from typing import NamedTuple

from ocihook.errors import IntegrityError
from ocihook.linux.memory import CopyBuffer
from ocihook.linux.patience import ENDLESS, Patience
from ocihook.linux.workers import run_forked
from ocihook.packs.pack import LZ4, PAGE_BYTES, RAW, Buffer, PackInfo, PackWriter, compress
from ocihook.packs.pages import Progress, Range, ReadablePages, Source, no_progress, ranges_of, read_pages
from ocihook.store.extents import ZERO, Extents, Layout
from ocihook.store.index import KEY_BYTES, Index, Place, add_to_index
from ocihook.store.pack_directory import PackDirectory, StoredPacks, pack_number
from ocihook.store.page_ids import ID_BYTES, PageIds

GROUP_PAGES = 16  # new pages compressed together: 64 KiB, see docs/formats.md
PACK_BYTES = 256 << 20  # of content before compression; a prune removes whole packs
# Peak of one worker, `make bench` ("memory of one worker that stores"): what it shares with its parent, keys and ids of
# a pack's pages, and 2 MiB that it reads and writes at a time.
WORKER_BYTES = 52 << 20

_BATCH_PAGES = 512
_BATCH_IDS = struct.Struct(f"{ID_BYTES}s" * _BATCH_PAGES)
_REACH_PAGES = 128  # looked up at once at most where many differ
_MANY = bytes(GROUP_PAGES)  # so many in a row that differ may have been moved here: one of them leads to the others
_ZERO_PAGE = bytes(PAGE_BYTES)
_RUN_PACKS = 2  # that bring one run to the index; more would take more memory
_NO_PACK = (1 << 64) - 1  # of zero pages
_RECENT_PAGES = 1 << 16  # of this worker, to find what a checkpoint has twice; 10 MiB
_NEAR_PAGES = 1 << 12  # how far something inserted or removed moves what follows it, mostly

log = logging.getLogger(__name__)


class Taken(NamedTuple):
    """Where a checkpoint's pages are now."""

    layout: Layout
    new_packs: tuple[PackInfo, ...]
    ids_digest: str  # of the ids of all pages, image after image


class Before:
    """The same image in the checkpoint before: the ids of its pages, and where they are."""

    def __init__(self, ids: mmap.mmap, first: int, extents: Extents, packs: Sequence[int]) -> None:
        """Keep the ids of all images of a checkpoint, and the number of the first page of this one in them."""
        self._ids = ids
        self._base = first * ID_BYTES
        self._end = self._base + extents.pages * ID_BYTES
        self._extents = extents
        self._packs = packs
        self._by_place: list[tuple[int, int, int]] | None = None

    def ids(self, page: int, pages: int) -> bytes:
        """Return the ids of pages from one on, one after the other; fewer at the end of the image."""
        start = self._base + page * ID_BYTES
        return self._ids[start : max(start, min(self._end, start + pages * ID_BYTES))]

    def find(self, page_id: bytes, place: Place, near: int) -> int:
        """Return a page with this id: what is stored at a place, or near another page; -1 if there is none."""
        page = self._page_at(place)
        if page >= 0 and self.ids(page, 1) == page_id:
            return page
        middle = self._base + near * ID_BYTES
        reach = _NEAR_PAGES * ID_BYTES
        return self._search(page_id, max(self._base, middle - reach), min(self._end, middle + reach))

    def _page_at(self, place: Place) -> int:
        if self._by_place is None:
            self._by_place = self._extents.by_place()
        wanted = self._packs.index(place.pack) if place.pack in self._packs else ZERO
        number = bisect_right(self._by_place, (wanted, place.page, self._extents.pages)) - 1
        pack, first, start = self._by_place[number] if number >= 0 else (ZERO, 0, 0)
        page = start + place.page - first
        return page if pack == wanted != ZERO and page < self._extents.pages else -1

    def _search(self, page_id: bytes, start: int, end: int) -> int:
        at = self._ids.find(page_id, start, end)
        while at >= 0 and (at - self._base) % ID_BYTES:
            at = self._ids.find(page_id, at + 1, end)
        return -1 if at < 0 else (at - self._base) // ID_BYTES

    def places(self, page: int, pages: int) -> "tuple[list[int], array[int], array[int]]":
        """Return packs, first pages and lengths of what makes up pages of it; the pack of zero pages is _NO_PACK."""
        packs, firsts, lengths = self._extents.slice(page, pages)
        return [self._packs[pack] if pack != ZERO else _NO_PACK for pack in packs], firsts, lengths


class Earlier(NamedTuple):
    """The checkpoint before."""

    images: Mapping[str, Before]  # by name
    verify: Callable[[], object]  # raises IntegrityError if their ids must not be relied on; takes a while


def deduplicate(  # noqa: PLR0913 - what is taken, where to, and how
    sources: Mapping[str, Source],
    *,
    packs: PackDirectory,
    index_dir: Path,
    page_ids: PageIds,
    ids_fd: int,
    before: Earlier | None,
    workers: int,
    patience: Patience = ENDLESS,
    progress: Progress = no_progress,
) -> Taken:
    """Add the pages of images to a domain; nothing refers to its new packs yet.

    Args:
        sources: the images, of whole pages each, by name.
        packs: those of the domain; new ones are complete and on stable storage when this returns.
        index_dir: the domain's index, to which new packs are added when they are complete.
        page_ids: makes the domain's.
        ids_fd: a file for the ids of all pages, image after image.
        before: what to compare with. It is verified while the workers run.
        workers: processes to use.
        patience: how long the caller waits for it.
        progress: gets the bytes done.

    Raises:
        StoreError: if a source ends early, or the index cannot be read.
        IntegrityError: if a pack of the domain is damaged, or the page ids of the checkpoint before.
        OSError: from the file system, a full one included.
    """
    names = list(sources)
    starts = dict(zip(names, _running_sum(sources[name].size_bytes // PAGE_BYTES for name in names), strict=False))
    ranges = [Range(number, *part) for number, name in enumerate(names) for part in ranges_of(sources[name].size_bytes)]
    known = before.images if before is not None else {}
    spools = [os.memfd_create("ocihook-extents", os.MFD_CLOEXEC) for _ in range(max(1, min(workers, len(ranges))))]

    def worker(number: int, task_numbers: Iterator[int]) -> Iterator[tuple[int, int, int, int] | PackInfo]:
        with contextlib.ExitStack() as stack:
            index = stack.enter_context(contextlib.closing(Index(index_dir)))
            stored = stack.enter_context(contextlib.closing(StoredPacks(packs)))
            output = stack.enter_context(contextlib.closing(_NewPacks(packs, index_dir)))
            taker = _Taker(output, index, stored, page_ids)
            for task in task_numbers:
                job = ranges[task]
                name = names[job.number]
                with contextlib.closing(sources[name].open()) as pages:
                    data = taker.take(pages, sources[name].start, job, known.get(name), ids_fd, starts[name])
                offset = os.lseek(spools[number], 0, os.SEEK_CUR)
                os.write(spools[number], data)
                yield task, number, offset, len(data)
            yield from output.finish()

    rows: dict[int, tuple[int, int, int]] = {}
    new_packs: list[PackInfo] = []
    digest, digested = page_ids.new_digest(), 0  # of the ids of so many ranges
    try:
        # Closed at once if anything raises: then no worker continues.
        work = run_forked(worker, tasks=len(ranges), workers=workers, patience=patience)
        with contextlib.closing(work) as results:
            for result in results:
                if isinstance(result, PackInfo):
                    new_packs.append(result)
                    continue
                if not rows and before is not None:
                    before.verify()
                rows[result[0]] = result[1:]
                progress(ranges[result[0]].size_bytes)
                while digested in rows:
                    job = ranges[digested]
                    first = starts[names[job.number]] + job.first
                    digest.update(os.pread(ids_fd, job.pages * ID_BYTES, first * ID_BYTES))
                    digested += 1
        data = (os.pread(spools[spool], size, offset) for spool, offset, size in (rows[n] for n in range(len(ranges))))
        layout = _layout(names, ranges, data, {pack_number(p.name): p for p in new_packs}, packs)
    finally:
        for spool in spools:
            os.close(spool)
    return Taken(layout, tuple(sorted(new_packs)), digest.hexdigest())


def _running_sum(numbers: Iterator[int]) -> Iterator[int]:
    total = 0
    for number in numbers:
        yield total
        total += number


def _layout(
    names: Sequence[str],
    ranges: Sequence[Range],
    rows: Iterator[bytes],
    new_packs: Mapping[int, PackInfo],
    packs: PackDirectory,
) -> Layout:
    images = {name: Extents() for name in names}
    numbers: dict[int, int] = {}
    for job, data in zip(ranges, rows, strict=True):
        extents = images[names[job.number]]
        in_packs, firsts, lengths = _Rows.split(data)
        for pack in dict.fromkeys(in_packs):  # in their order
            numbers.setdefault(pack, ZERO if pack == _NO_PACK else len(numbers) - (_NO_PACK in numbers))
        extents.extend([numbers[pack] for pack in in_packs], firsts, lengths)
    numbers.pop(_NO_PACK, None)
    infos = [new_packs.get(pack) or packs.info(pack) for pack in numbers]
    return Layout(tuple(infos), images)


class _Rows:
    """Rows of pack, first page and pages; one that begins where the last one ends is joined with it."""

    def __init__(self) -> None:
        self._packs, self._firsts, self._lengths = array("Q"), array("I"), array("I")

    def add(self, pack: int, first: int, pages: int) -> None:
        """Add a row."""
        if (
            self._packs
            and self._packs[-1] == pack
            and (pack == _NO_PACK or self._firsts[-1] + self._lengths[-1] == first)
        ):
            self._lengths[-1] += pages
        else:
            self._packs.append(pack)
            self._firsts.append(first)
            self._lengths.append(pages)

    def extend(self, packs: Sequence[int], firsts: "array[int]", lengths: "array[int]") -> None:
        """Add rows of which none, except perhaps the first, begins where the one before it ends."""
        self.add(packs[0], firsts[0], lengths[0])
        self._packs.extend(packs[1:])
        self._firsts.extend(firsts[1:])
        self._lengths.extend(lengths[1:])

    def to_bytes(self) -> bytes:
        """Return what `split` reads, within the same program."""
        return self._packs.tobytes() + self._firsts.tobytes() + self._lengths.tobytes()

    @staticmethod
    def split(data: bytes) -> "tuple[array[int], array[int], array[int]]":
        """Return the columns."""
        count = len(data) // 16
        columns = array("Q"), array("I"), array("I")
        for column, start, end in zip(columns, (0, 8, 12), (8, 12, 16), strict=True):
            column.frombytes(data[start * count : end * count])
        return columns


def _run_length(ids: list[bytes], at: int) -> int:
    """Return how often the id at a place is repeated from there on."""
    taken, page_id = 1, ids[at]
    while at + taken < len(ids) and ids[at + taken] == page_id:
        taken += 1
    return taken


def compress_group(content: Buffer) -> tuple[int, Buffer]:
    """Return the kind and the encoded bytes of pages that are stored together."""
    compressed = compress(content)
    return (RAW, content) if compressed is None else (LZ4, compressed)


class _NewPacks:
    """What one worker adds to a domain: packs of groups of new pages, one after the other."""

    def __init__(self, directory: PackDirectory, index_dir: Path) -> None:
        self._directory, self._index_dir = directory, index_dir
        self._writer: PackWriter | None = None
        self._number = secrets.randbits(63)
        self._ids: list[bytes] = []
        self._unlisted: dict[int, bytes] = {}  # keys of packs that the index does not know yet
        self.recent: dict[bytes, int] = {}  # pages of the pack that is being written, by their ids
        self._finished: list[PackInfo] = []

    @property
    def number(self) -> int:
        """The number of the pack that is being written."""
        return self._number

    def place(self, ids: Sequence[bytes]) -> Place:
        """Assign consecutive places to new pages with these ids; `append` gets their content in the same order."""
        first = len(self._ids)
        self._ids += ids
        self.recent.update(zip(ids, range(first, len(self._ids)), strict=True))
        return Place(self._number, first)

    def append(self, content: Buffer) -> None:
        """Add the content of the next pages that have a place, as one group. It must not change until `flush`."""
        if self._writer is None:
            self._writer = self._directory.create(self._number)
        kind, stored = compress_group(content)
        pages = len(content) // PAGE_BYTES
        self._writer.append(kind, pages, (1 << pages) - 1, stored)

    def flush(self) -> None:
        """Write all that was added to the file."""
        if len(self.recent) >= _RECENT_PAGES:
            self.recent.clear()
        if self._writer is not None:
            self._writer.flush()
            if len(self._ids) * PAGE_BYTES >= PACK_BYTES:
                self._finish_pack()

    def finish(self) -> list[PackInfo]:
        """Complete what was begun and return all packs, which are on stable storage then."""
        self._finish_pack()
        self._list()
        return self._finished

    def close(self) -> None:
        """Close what was not finished; it is now rubbish."""
        if self._writer is not None:
            self._writer.__exit__()

    def _finish_pack(self) -> None:
        if self._writer is None:
            return
        self.recent.clear()  # first: the index takes as much memory again
        self._finished.append(self._writer.close(durable=True))
        self._writer = None
        self._unlisted[self._number] = b"".join([page_id[:KEY_BYTES] for page_id in self._ids])
        self._number, self._ids = secrets.randbits(63), []
        if len(self._unlisted) == _RUN_PACKS:
            self._list()

    def _list(self) -> None:
        if self._unlisted:
            add_to_index(self._index_dir, self._unlisted)
            self._unlisted.clear()


class _Taker:
    """Takes ranges of images."""

    def __init__(self, output: _NewPacks, index: Index, stored: StoredPacks, page_ids: PageIds) -> None:
        self._output, self._index, self._stored, self._page_ids = output, index, stored, page_ids
        self._zero_id = page_ids.of(_ZERO_PAGE)
        self._buffer = CopyBuffer(_BATCH_PAGES * PAGE_BYTES)
        self._view = self._buffer.view
        self._slices = [self._view[at : at + PAGE_BYTES] for at in range(0, len(self._view), PAGE_BYTES)]
        self._before: Before | None = None
        self._at = 0  # the page in the checkpoint before that the next one is expected to be
        self._reach = 1  # of a look-up where many differ; the more of them were new, the further
        self._rows = _Rows()
        self._new: list[int] = []  # pages of the batch that are to be written, in the order of their places

    def take(
        self, source: ReadablePages, offset: int, job: Range, before: Before | None, ids_fd: int, ids_start: int
    ) -> bytes:
        """Take one range.

        Args:
            source: of the image.
            offset: of the image's first page in `source`, in bytes.
            job: which pages.
            before: the same image in the checkpoint before.
            ids_fd: gets their ids.
            ids_start: number of the image's first page in it.

        Returns:
            Where its pages are: what `_Rows.split` reads.
        """
        self._before, self._at, self._rows = before, job.first, _Rows()
        all_ids = []
        for first in range(job.first, job.first + job.pages, _BATCH_PAGES):
            pages = min(_BATCH_PAGES, job.first + job.pages - first)
            read_pages(source, self._view[: pages * PAGE_BYTES], offset + first * PAGE_BYTES)
            ids, joined = self._page_ids.of_pages(self._slices[:pages])
            all_ids.append(joined)
            self._take_batch(ids, joined)
            self._write_new()
        joined, at = b"".join(all_ids), (ids_start + job.first) * ID_BYTES
        while joined:  # on a nearly full disk the first write may be short; the next one says why
            written = os.pwrite(ids_fd, joined, at)
            joined, at = joined[written:], at + written
        return self._rows.to_bytes()

    def _take_batch(self, ids: list[bytes], joined: bytes) -> None:
        at, end = 0, len(ids)
        looked_up = 0  # the page up to which `known` and `not_new` hold
        known: Mapping[bytes, Place] = {}
        not_new: set[bytes] = set()
        same, ahead = b"", -1  # which pages are as in the checkpoint before, and how many pages later there
        while at < end:
            if not same or self._at - at != ahead:
                same, ahead = self._compare_ids(ids, joined, at), self._at - at
                looked_up = at
            if same[at]:
                differs = end if (found := same.find(0, at)) < 0 else found
                taken = self._take_before(differs - at)
            elif ids[at] == self._zero_id:
                taken = _run_length(ids, at)
                self._rows.add(_NO_PACK, 0, taken)
            else:
                if at >= looked_up:
                    looked_up = self._look_up_to(same, at)
                    known, not_new = self._look_up([*selected(ids[at:looked_up], map(not_, same[at:looked_up]))])
                equals = looked_up if (found := same.find(1, at, looked_up)) < 0 else found
                taken = self._take_new(ids[at:equals], at, not_new) or self._take_recent(ids[at])
                if not taken and (place := known.get(ids[at])):
                    if self._lead_to_before(ids[at], place):
                        continue
                    taken = self._compare(place, at, end)
                if not taken:  # the first of several in this batch, or it only looked like one that is stored
                    taken = self._take_new(ids[at : at + 1], at, set())
            at += taken
            self._at += taken

    def _look_up_to(self, same: bytes, at: int) -> int:
        """Return how far to look up at once what differs: as far as all of it will most likely be needed."""
        many = -1 if self._before is None else same.find(_MANY, at)
        if many == at:
            return at + self._reach
        self._reach = 1
        return many if many > at else len(same)

    def _look_up(self, ids: list[bytes]) -> tuple[Mapping[bytes, Place], set[bytes]]:
        """Return where pages with these ids may be, and which of them must be looked at: all others are new."""
        unique = set(ids)
        unique.discard(self._zero_id)
        known = self._index.find_all(unique)
        self._reach = 1 if known else min(2 * self._reach, _REACH_PAGES)
        not_new = known.keys() | (self._output.recent.keys() & unique)
        if len(unique) < len(ids):
            not_new |= {page_id for page_id, count in Counter(ids).items() if count > 1} | {self._zero_id}
        return known, not_new

    def _compare_ids(self, ids: list[bytes], joined: bytes, at: int) -> bytes:
        """Return for each page 1 if it is, from page `at` on, what follows in the checkpoint before, else 0."""
        theirs = b"" if self._before is None else self._before.ids(self._at, len(ids) - at)
        if theirs == joined[at * ID_BYTES :]:
            return bytes(at) + b"\1" * (len(ids) - at)
        return bytes(at) + bytes(map(eq, ids[at:], _BATCH_IDS.unpack(theirs.ljust(_BATCH_IDS.size))))

    def _take_new(self, ids: list[bytes], at: int, not_new: set[bytes]) -> int:
        """Return how many of the pages from `at` on, with these ids, are new, and give them places."""
        if not not_new.isdisjoint(ids):
            ids = ids[: next(number for number, page_id in enumerate(ids) if page_id in not_new)]
        if ids:
            self._rows.add(*self._output.place(ids), len(ids))
            self._new += range(at, at + len(ids))
        return len(ids)

    def _write_new(self) -> None:
        for start in range(0, len(self._new), GROUP_PAGES):
            pages = self._new[start : start + GROUP_PAGES]
            first, end = pages[0], pages[-1] + 1
            if end - first == len(pages):
                self._output.append(self._view[first * PAGE_BYTES : end * PAGE_BYTES])
            else:
                self._output.append(b"".join([self._slices[page] for page in pages]))
        self._new.clear()
        self._output.flush()

    def _take_recent(self, page_id: bytes) -> int:
        """Take a page that was added not long ago: of the same checkpoint, so its id is enough."""
        page = self._output.recent.get(page_id)
        if page is None:
            return 0
        self._rows.add(self._output.number, page, 1)
        return 1

    def _lead_to_before(self, page_id: bytes, place: Place) -> bool:
        """Return whether the checkpoint before has a page elsewhere; if so, continue from there."""
        if self._before is None:
            return False
        found = self._before.find(page_id, place, self._at)
        if found >= 0:
            self._at = found
        return found >= 0

    def _take_before(self, pages: int) -> int:
        """Take pages that are as in the checkpoint before."""
        assert self._before is not None
        self._rows.extend(*self._before.places(self._at, pages))
        self._reach = 1
        return pages

    def _compare(self, place: Place, at: int, end: int) -> int:
        """Return how many pages from `at` on are, byte by byte, what is stored from a place on, and take them."""
        try:
            taken = self._same_as_stored(place, at, end)
        except IntegrityError as error:  # then it is stored again
            log.warning("%s", error)
            return 0
        if taken:
            self._rows.add(place.pack, place.page, taken)
        return taken

    def _same_as_stored(self, place: Place, at: int, end: int) -> int:
        pack = self._stored.get(place.pack)
        taken = 0
        while at + taken < end and place.page + taken < pack.pages:
            content, pages = pack.read(place.page + taken, end - at - taken)
            start = (at + taken) * PAGE_BYTES
            if self._buffer.has(content, start):
                taken += pages
                continue
            for offset in range(0, len(content), PAGE_BYTES):
                if not self._buffer.has(content[offset : offset + PAGE_BYTES], start + offset):
                    break
                taken += 1
            break
        return taken
