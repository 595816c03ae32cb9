"""Where pages come from and go to: page images and processes' memory, read and written in few large calls."""

import errno
import os
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from ocihook.errors import StoreError
from ocihook.linux.files import open_regular
from ocihook.packs.pack import CHUNK_PAGES, PAGE_BYTES

CHUNK_BYTES = CHUNK_PAGES * PAGE_BYTES
RANGE_BYTES = 16 << 20  # what a worker takes of an image at a time; small, so that all finish together
BATCH_BYTES = 512 << 10  # what a worker reads and writes at a time; fits into the L2 cache, also when it is shared
FILE_BATCH_BYTES = 2 << 20  # what it writes to a file: a huge page, which the kernel then need not clear
ZERO_CHUNK = bytes(CHUNK_BYTES)
ZEROS = memoryview(ZERO_CHUNK)
_HOLE_PAGES = 16  # zero pages in a row that are worth a hole: writing so many takes as long as the call
Progress = Callable[[int], None]  # called with how many more bytes of image are done


def no_progress(_image_bytes: int) -> None:
    """Ignore progress."""


class ReadablePages(Protocol):
    """Where pages are read from: a page image, a process's memory, or packs."""

    def read_into(self, view: memoryview, offset: int) -> int:
        """Fill `view`; return how many bytes there were."""

    def close(self) -> None:
        """Close it."""


class WritablePages(Protocol):
    """Where pages are written to: a page image, or a process's memory."""

    def write(self, buffers: Sequence[bytes | memoryview], offset: int) -> int:
        """Write buffers one after the other; return how many bytes were written."""

    def close(self) -> None:
        """Close it."""


class Part(NamedTuple):
    """Bytes of an image, and where they go to."""

    start: int
    size_bytes: int
    to: int


class Parts:
    """Parts of one image, in order, none of them empty. Twenty-four bytes each: there may be a million."""

    def __init__(self, parts: Iterable[tuple[int, int, int]] = ()) -> None:
        self._starts, self._sizes, self._to = array("Q"), array("Q"), array("Q")
        for start, size_bytes, to in parts:
            self._starts.append(start)
            self._sizes.append(size_bytes)
            self._to.append(to)
        self.size_bytes = sum(self._sizes)
        self.end = self._starts[-1] + self._sizes[-1] if self._starts else 0  # of the last one

    def __iter__(self) -> Iterator[Part]:
        return map(Part, self._starts, self._sizes, self._to)

    def within(self, start: int, end: int) -> Iterator[Part]:
        """Yield those parts, cut, that lie between two offsets."""
        for number in range(max(0, bisect_right(self._starts, start) - 1), len(self._starts)):
            at = self._starts[number]
            if at >= end:
                return
            low, high = max(at, start), min(at + self._sizes[number], end)
            if low < high:
                yield Part(low, high - low, self._to[number] + low - at)

    def touches(self, start: int, end: int) -> bool:
        """Return whether any part lies between two offsets."""
        return next(self.within(start, end), None) is not None


class ScatteredPages:
    """Takes the pages of an image, and writes parts of it elsewhere; the rest is dropped."""

    def __init__(self, pages: WritablePages, parts: Parts) -> None:
        self._pages = pages
        self._parts = parts

    def write(self, buffers: Sequence[bytes | memoryview], offset: int) -> int:
        """Write buffers, one after the other in the image; return how many bytes were taken."""
        size = sum(map(len, buffers))
        for part in self._parts.within(offset, offset + size):
            chosen = (
                buffers if part.size_bytes == size else list(cut_out(buffers, part.start - offset, part.size_bytes))
            )
            write_pages(self._pages, chosen, part.to)
        return size

    def close(self) -> None:
        """Close what is written to."""
        self._pages.close()


def cut_out(buffers: Iterable[bytes | memoryview], start: int, size_bytes: int) -> Iterator[memoryview]:
    """Yield `size_bytes` from `start` on of what buffers hold one after the other."""
    at, end = 0, start + size_bytes
    for buffer in buffers:
        low, high = max(start - at, 0), min(end - at, len(buffer))
        if low < high:
            yield memoryview(buffer)[low:high]
        at += len(buffer)


class Target(NamedTuple):
    """Where an image goes to: a new file, or memory that reads as zeros."""

    open: Callable[[], WritablePages]
    start: int  # offset of its first page
    parts: Parts | None = None  # of the image, if the rest need not even be read
    batch_bytes: int = FILE_BATCH_BYTES  # written at a time

    def wants(self, start: int, size_bytes: int) -> bool:
        """Return whether anything of so many bytes from an offset in the image on goes there."""
        return self.parts is None or self.parts.touches(start, start + size_bytes)


def scattered(opened: Callable[[], WritablePages], parts: Parts) -> Target:
    """Return a target that takes parts of an image."""
    return Target(lambda: ScatteredPages(opened(), parts), 0, parts)


class ImageFile:
    """A page image that exists."""

    def __init__(self, path: Path, *, writable: bool = False) -> None:
        """Open it.

        Raises:
            OSError: if it cannot be opened; to read it, also if it is not a regular file.
        """
        self._fd = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC) if writable else open_regular(path)

    def read_into(self, view: memoryview, offset: int) -> int:
        """Fill `view`; return how many bytes there were."""
        return os.preadv(self._fd, [view], offset)

    def write(self, buffers: Sequence[bytes | memoryview], offset: int) -> int:
        """Write buffers one after the other; return how many bytes were written."""
        return os.pwritev(self._fd, buffers, offset)

    @property
    def size_bytes(self) -> int:
        """Its size."""
        return os.fstat(self._fd).st_size

    def close(self) -> None:
        """Close it."""
        os.close(self._fd)


def make_image(path: Path, size_bytes: int) -> None:
    """Make a new image, all zero, to be written.

    Raises:
        OSError: also if its path exists already.
    """
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(fd, size_bytes)
    finally:
        os.close(fd)


@dataclass(frozen=True, slots=True)
class Source:
    """Pages to be packed."""

    open: Callable[[], ReadablePages]
    start: int  # offset in them
    size_bytes: int


class Range(NamedTuple):
    """What a worker takes at a time."""

    number: int  # of the image
    start: int  # byte of it
    size_bytes: int

    @property
    def first(self) -> int:
        """The first of its pages."""
        return self.start // PAGE_BYTES

    @property
    def pages(self) -> int:
        """The number of its pages."""
        return self.size_bytes // PAGE_BYTES


def ranges_of(size_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield start and size of what workers take of so many bytes at a time."""
    for start in range(0, size_bytes, RANGE_BYTES):
        yield start, min(RANGE_BYTES, size_bytes - start)


def byte_runs(present: int) -> Iterator[tuple[int, int]]:
    """Yield (start, end) in bytes of each run of set bits, one bit a page."""
    page = 0
    while present:
        skip = (present & -present).bit_length() - 1
        page += skip
        present >>= skip
        run = (~present & (present + 1)).bit_length() - 1
        yield page * PAGE_BYTES, (page + run) * PAGE_BYTES
        page += run
        present >>= run


class PageWriter:
    """Gathers pages and writes them in few large calls; long runs of zeros become holes.

    The calls end at multiples of their size: with FILE_BATCH_BYTES each huge page of a file is written whole.
    """

    def __init__(self, pages: WritablePages, position: int, batch_bytes: int) -> None:
        self._pages = pages
        self._position = position
        self._batch_bytes = batch_bytes
        self._pending: list[bytes | memoryview] = []
        self._room = batch_bytes - position % batch_bytes  # bytes up to the end of this call

    def skip(self, pages: int) -> None:
        """Leave the next `pages` as they are in a new file: zero."""
        self.flush()
        self._position += pages * PAGE_BYTES
        self._room = self._batch_bytes - self._position % self._batch_bytes

    def add(self, pages: int, contents: list[bytes | memoryview]) -> None:
        """Add a run: pages in pieces, or zero pages, of which many are a hole and few are not worth another call."""
        if not contents and pages >= _HOLE_PAGES:
            self.skip(pages)
            return
        contents = contents or [ZEROS[: pages * PAGE_BYTES]]
        if pages * PAGE_BYTES < self._room:
            self._pending += contents
            self._room -= pages * PAGE_BYTES
            return
        for content in contents:
            self.put(content)

    def put(self, content: bytes | memoryview) -> None:
        """Add whole pages. The buffer must stay unchanged until the next `flush`."""
        size = len(content)
        if size < self._room:  # of whole pages, so that no call has more than 512 buffers; the kernel takes 1024
            self._pending.append(content)
            self._room -= size
            return
        room = self._room
        self._pending.append(content[:room])
        self._room = 0
        self.flush()
        if size > room:
            self.put(content[room:])

    def flush(self) -> None:
        """Write what is pending."""
        write_pages(self._pages, self._pending, self._position)
        self._position += self._batch_bytes - self._position % self._batch_bytes - self._room
        self._pending.clear()
        self._room = self._batch_bytes - self._position % self._batch_bytes


def read_pages(pages: ReadablePages, view: memoryview, position: int) -> None:
    """Fill `view` with what is there from a position on.

    Raises:
        StoreError: if it ends early.
    """
    if pages.read_into(view, position) != len(view):
        raise StoreError(f"an image ended before page {(position + len(view)) // PAGE_BYTES} while it was read")


def write_pages(pages: WritablePages, buffers: Sequence[bytes | memoryview], position: int) -> None:
    """Write buffers, up to IOV_MAX of them, one after the other from a position on.

    Raises:
        OSError: also if the memory of a process ends early.
    """
    left = sum(map(len, buffers))
    while left:
        written = pages.write(buffers, position)
        if not written:  # the process has unmapped the memory, or ended
            raise OSError(errno.EIO, "Memory ended early")
        position += written
        left -= written
        # What is left after a signal, or on a nearly full disk.
        buffers = [memoryview(b"".join(buffers))[written:]] if left else []
