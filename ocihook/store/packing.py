"""Turns page images into packs and back, in parallel: the way of every byte of memory that CRIU wrote."""

import contextlib
import errno
import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

import lz4.block

from ocihook.errors import IntegrityError, StoreError
from ocihook.linux.files import open_regular
from ocihook.linux.memory import CopyBuffer
from ocihook.linux.patience import ENDLESS, Patience
from ocihook.linux.workers import run_forked
from ocihook.store.manifest import PackedImage, Region, Segment
from ocihook.store.pack import (
    CHUNK_PAGES,
    LZ4,
    PAGE_BYTES,
    RAW,
    ZERO,
    Chunk,
    PackFile,
    PackInfo,
    PackReader,
    PackWriter,
)

CHUNK_BYTES = CHUNK_PAGES * PAGE_BYTES
SEGMENT_BYTES = 16 << 20  # what a worker takes at a time; small, so that all finish together
BATCH_BYTES = 512 << 10  # what a worker reads and writes at a time; stays in the L2 cache, also with a neighbour
FILE_BATCH_BYTES = 2 << 20  # what it writes to a file: a huge page, which the kernel need not clear then
# Peak of one worker over all kinds of data, `make bench` ("memory of one worker"): 30 MiB, of which 19 to 22 are what
# it shares with its parent. The rest is room for tables, 32 bytes for each chunk.
WORKER_BYTES = 32 << 20
AGENT_BYTES = 48 << 20  # the agent and one session without workers: 20 MiB, and the packs' tables when reading

_ZERO_PAGE = bytes(PAGE_BYTES)
_ZERO_CHUNK = bytes(CHUNK_BYTES)
_ZEROS = memoryview(_ZERO_CHUNK)

_Target = tuple[Callable[[], "WritablePages"], int]  # and an offset in it
Progress = Callable[[int], None]  # told how many more bytes of image are done


def no_progress(_image_bytes: int) -> None:
    """Ignore progress."""


class _SegmentPacked(NamedTuple):
    task: int
    segment: Segment


def workers_within(memory_bound_bytes: int, cores: int, worker_bytes: int = WORKER_BYTES) -> int:
    """Return how many workers, at most one a core and at least one, stay within a bound on memory."""
    return max(1, min(cores, (memory_bound_bytes - AGENT_BYTES) // worker_bytes))


class ReadablePages(Protocol):
    """Where pages are read from: a page image, a process's memory, or packs."""

    def read_into(self, view: memoryview, offset: int) -> int:
        """Fill `view`; return how many bytes there were."""

    def close(self) -> None:
        """Let go of it."""


class WritablePages(Protocol):
    """Where pages are written to: a page image, or a process's memory."""

    def write(self, buffers: Sequence[bytes | memoryview], offset: int) -> int:
        """Write buffers one after the other; return how many bytes went."""

    def close(self) -> None:
        """Let go of it."""


class ImageFile:
    """A page image that is there."""

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
        """Write buffers one after the other; return how many bytes went."""
        return os.pwritev(self._fd, buffers, offset)

    @property
    def size_bytes(self) -> int:
        """Its size."""
        return os.fstat(self._fd).st_size

    def close(self) -> None:
        """Close it."""
        os.close(self._fd)


class Nowhere:
    """Takes pages that are to be verified and no more."""

    def write(self, buffers: Sequence[bytes | memoryview], offset: int) -> int:  # noqa: ARG002 - of the protocol
        """Return how many bytes went."""
        return sum(map(len, buffers))

    def close(self) -> None:
        """Nothing is held."""


def make_image(path: Path, size_bytes: int) -> None:
    """Make a new image, all zero, to be written.

    Raises:
        OSError: also if there is anything at its place.
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


def pack_images(
    directory: Path,
    names: Sequence[str],
    *,
    prefix: str,
    workers: int,
    durable: bool,
    patience: Patience = ENDLESS,
    progress: Progress = no_progress,
) -> tuple[list[PackedImage], list[PackInfo]]:
    """Pack `names`, files of whole pages in `directory`, as `pack` does with sources.

    Raises:
        StoreError: also if an image is not made of whole pages, or becomes shorter or longer meanwhile.
        OSError: from the file system, a full one included; also if an image is not a regular file.
    """
    sizes = [_size(directory / name) for name in names]
    for name, size in zip(names, sizes, strict=True):
        if size % PAGE_BYTES:
            raise StoreError(f"{name} has {size} bytes, not a whole number of pages")
    sources = [Source(partial(ImageFile, directory / name), 0, size) for name, size in zip(names, sizes, strict=True)]
    rows, packs = pack(
        sources, directory, prefix=prefix, workers=workers, durable=durable, patience=patience, progress=progress
    )
    for name, size in zip(names, sizes, strict=True):
        if _size(directory / name) != size:
            raise StoreError(f"{name} was changed while it was packed")
    return [PackedImage(*image) for image in zip(names, sizes, rows, strict=True)], packs


def pack(
    sources: Sequence[Source],
    directory: Path,
    *,
    prefix: str,
    workers: int,
    durable: bool,
    patience: Patience = ENDLESS,
    progress: Progress = no_progress,
) -> tuple[list[tuple[Segment, ...]], list[PackInfo]]:
    """Pack sources into new packs `<prefix>N.pack` in `directory`; return where each of them is, and the packs.

    The sources, of whole pages each, are left as they are. On any error the new packs are left too, for the caller to
    remove.

    Raises:
        StoreError: if a source ends early.
        OSError: from the file system, a full one included; also if a source cannot be opened.
    """
    tasks = [
        (number, start, min(SEGMENT_BYTES, source.size_bytes - start))
        for number, source in enumerate(sources)
        for start in range(0, source.size_bytes, SEGMENT_BYTES)
    ]

    def worker(worker_number: int, task_numbers: Iterator[int]) -> Iterator[_SegmentPacked | PackInfo]:
        # The pack is made with the first segment, so that no worker leaves an empty one.
        with contextlib.ExitStack() as stack:
            writer = None
            buffer = CopyBuffer(BATCH_BYTES)
            for task in task_numbers:
                if writer is None:
                    writer = stack.enter_context(PackWriter(directory / f"{prefix}{worker_number}.pack"))
                number, start, size = tasks[task]
                first = writer.chunks
                with contextlib.closing(sources[number].open()) as pages:
                    _pack_range(pages, sources[number].start + start, size, writer, buffer)
                yield _SegmentPacked(task, Segment(writer.path.name, first, writer.chunks - first))
            if writer is not None:
                yield writer.close(durable=durable)

    segments: dict[int, Segment] = {}
    packs: list[PackInfo] = []
    for result in run_forked(worker, tasks=len(tasks), workers=workers, patience=patience):
        if isinstance(result, PackInfo):
            packs.append(result)
        else:
            segments[result.task] = result.segment
            progress(tasks[result.task][2])
    rows: list[list[Segment]] = [[] for _ in sources]
    for task, (number, _, _) in enumerate(tasks):
        rows[number].append(segments[task])
    return [tuple(row) for row in rows], sorted(packs)


def _size(path: Path) -> int:
    with contextlib.closing(ImageFile(path)) as image:
        return image.size_bytes


def _pack_range(source: ReadablePages, start: int, size: int, writer: PackWriter, buffer: CopyBuffer) -> None:
    zero_pages = 0
    was_raw = False
    starts_with, view = buffer.data.startswith, buffer.view
    for batch_start in range(start, start + size, BATCH_BYTES):
        length = min(BATCH_BYTES, start + size - batch_start)
        if source.read_into(view[:length], batch_start) != length:
            raise StoreError(f"an image ended before byte {batch_start + length} while it was packed")
        for chunk_start in range(0, length, CHUNK_BYTES):
            chunk_end = min(chunk_start + CHUNK_BYTES, length)
            pages = (chunk_end - chunk_start) // PAGE_BYTES
            first = buffer.start + chunk_start
            if pages == CHUNK_PAGES and starts_with(_ZERO_CHUNK, first):
                zero_pages += pages
                continue
            present = 0
            for page in range(pages):
                if not starts_with(_ZERO_PAGE, first + page * PAGE_BYTES):
                    present |= 1 << page
            if not present:
                zero_pages += pages
                continue
            if zero_pages:
                writer.append(ZERO, zero_pages, 0)
                zero_pages = 0
            content: bytes | memoryview = view[chunk_start:chunk_end]
            if present != (1 << pages) - 1:
                content = b"".join(content[a:b] for a, b in _byte_runs(present))
            compressed = None if was_raw and not _compress(_sample(content)) else _compress(content)
            was_raw = compressed is None
            if compressed is None:
                writer.append(RAW, pages, present, content)
            else:
                writer.append(LZ4, pages, present, compressed)
        writer.flush()
    if zero_pages:
        writer.append(ZERO, zero_pages, 0)


def _compress(content: bytes | memoryview) -> bytes | None:
    """Return it compressed; None where less than 1/16 is saved, which is not worth the time to decompress it."""
    compressed: bytes = lz4.block.compress(content, store_size=False)
    return compressed if len(compressed) < len(content) - len(content) // 16 else None


def _sample(content: bytes | memoryview) -> bytes:
    """Return every 16th page: where the chunk before did not compress, as weights do not, this chunk seldom does."""
    return b"".join(content[at : at + PAGE_BYTES] for at in range(0, len(content), 16 * PAGE_BYTES))


def _byte_runs(present: int) -> Iterator[tuple[int, int]]:
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


@dataclass(frozen=True, slots=True)
class _Task:
    image: PackedImage | Region
    segment: Segment
    start: int
    size_bytes: int


class Packs:
    """Packs of one checkpoint, opened and checked, with their images and regions mapped onto them."""

    def __init__(
        self, images: Sequence[PackedImage | Region], infos: Sequence[PackInfo], files: Mapping[str, PackFile]
    ) -> None:
        """Open every pack and check that images and regions are covered exactly.

        Raises:
            IntegrityError: if a pack is missing, damaged at its ends, or the sizes do not add up.
        """
        self._readers: dict[str, PackReader] = {}
        self.images = images
        try:
            for info in infos:
                if info.name not in files:
                    raise IntegrityError(f"pack {info.name} is missing")
                self._readers[info.name] = PackReader(files[info.name], info)
            self._tasks = [task for image in images for task in self._segments(image)]
        except BaseException:
            self.close()
            raise

    def _segments(self, image: PackedImage | Region) -> Iterator[_Task]:
        start = 0
        for segment in image.segments:
            reader = self._readers.get(segment.pack)
            if reader is None:
                raise IntegrityError(f"{image.name} refers to {segment.pack}, which the manifest does not list")
            size = reader.pages(segment.first_chunk, segment.chunks) * PAGE_BYTES
            if not 0 < size <= SEGMENT_BYTES:
                raise IntegrityError(f"{image.name} has a segment of {size} bytes, not of 1 to {SEGMENT_BYTES}")
            yield _Task(image, segment, start, size)
            start += size
        if start != image.size_bytes:
            raise IntegrityError(f"packs hold {start} bytes of {image.name}, which had {image.size_bytes}")

    def verify(self, *, workers: int, progress: Progress = no_progress) -> None:
        """Read everything and check every checksum.

        Raises:
            IntegrityError: naming the first damaged chunk.
        """
        self._run(self._tasks, {}, workers, ENDLESS, progress)

    def rehydrate(
        self,
        directory: Path,
        *,
        with_regions: bool = True,
        workers: int,
        patience: Patience = ENDLESS,
        progress: Progress = no_progress,
    ) -> None:
        """Write the images into `directory` anew, checking every checksum on the way. Zero pages stay holes.

        Args:
            directory: where they go.
            with_regions: check those, too, which `write_regions` does once more.
            workers: processes to use.
            patience: how long it is waited for.
            progress: told the bytes done.

        Raises:
            IntegrityError: naming the first damaged chunk.
            OSError: from the file system, a full one included.
        """
        targets: dict[PackedImage | Region, _Target] = {}
        for image in self.images:
            if not isinstance(image, PackedImage):
                continue
            path = directory / image.name
            targets[image] = (partial(ImageFile, path, writable=True), 0)
            make_image(path, image.size_bytes)
        tasks = [task for task in self._tasks if with_regions or task.image in targets]
        # The kernel lets one at a time write to a file, so that workers had better be at several of them.
        tasks.sort(key=lambda task: task.start / task.image.size_bytes)
        self._run(tasks, targets, workers, patience, progress)

    def write_regions(
        self,
        memory: Mapping[Region, Callable[[], WritablePages]],
        *,
        workers: int,
        patience: Patience = ENDLESS,
        progress: Progress = no_progress,
    ) -> None:
        """Write regions to their addresses in processes' memory; pages that were zero are left alone.

        Raises:
            IntegrityError: naming the first damaged chunk.
            OSError: if a process is gone, or has nothing mapped there.
        """
        tasks = [task for task in self._tasks if task.image in memory]
        targets: dict[PackedImage | Region, _Target] = {r: (opened, r.start) for r, opened in memory.items()}
        self._run(tasks, targets, workers, patience, progress)

    def _run(
        self,
        tasks: Sequence[_Task],
        targets: Mapping[PackedImage | Region, _Target],
        workers: int,
        patience: Patience,
        progress: Progress,
    ) -> None:
        """Verify tasks and write what has a target there."""

        def worker(_number: int, task_numbers: Iterator[int]) -> Iterator[int]:
            for number in task_numbers:
                task = tasks[number]
                reader = self._readers[task.segment.pack]
                target = targets.get(task.image)
                if target is None:
                    _unpack_segment(reader, task.segment, None)
                else:
                    batch_bytes = FILE_BATCH_BYTES if isinstance(task.image, PackedImage) else BATCH_BYTES
                    with contextlib.closing(target[0]()) as pages:
                        writer = PageWriter(pages, target[1] + task.start, batch_bytes)
                        _unpack_segment(reader, task.segment, writer)
                yield number

        for number in run_forked(worker, tasks=len(tasks), workers=workers, patience=patience):
            progress(tasks[number].size_bytes)

    def read_pages(self, image_name: str) -> Iterator[bytes]:
        """Yield the content of an image from its start, in pieces of one page or more, a chunk at most."""
        for task in self._tasks:
            if task.image.name != image_name:
                continue
            reader = self._readers[task.segment.pack]
            for chunk in reader.chunks(task.segment.first_chunk, task.segment.chunks):
                if chunk.kind == ZERO:
                    for done in range(0, chunk.pages, CHUNK_PAGES):
                        yield _ZERO_CHUNK[: (chunk.pages - done) * PAGE_BYTES]
                    continue
                yield bytes(_whole(reader, chunk))

    def tasks_of(self, image: PackedImage | Region) -> list[_Task]:
        """Return the segments of an image with what of it each holds."""
        return [task for task in self._tasks if task.image is image]

    def reader_of(self, task: _Task) -> PackReader:
        """Return the pack that a segment is in."""
        return self._readers[task.segment.pack]

    def close(self) -> None:
        """Close the packs."""
        for reader in self._readers.values():
            reader.close()


class PackedPages:
    """Pages of one image in packs, read like the image itself."""

    def __init__(self, packs: Packs, image: PackedImage | Region) -> None:
        self._packs = packs
        self._tasks = packs.tasks_of(image)
        self._starts = [task.start for task in self._tasks]

    def read_into(self, view: memoryview, offset: int) -> int:
        """Fill `view` from a page on; return how many bytes there were.

        Raises:
            IntegrityError: if they are damaged.
        """
        done = 0
        number = bisect_right(self._starts, offset) - 1
        while done < len(view) and number < len(self._tasks):
            done += self._read_segment(self._tasks[number], view[done:], offset + done)
            number += 1
        return done

    def _read_segment(self, task: _Task, view: memoryview, offset: int) -> int:
        reader, at, done = self._packs.reader_of(task), task.start, 0
        for chunk in reader.chunks(task.segment.first_chunk, task.segment.chunks):
            end = at + chunk.pages * PAGE_BYTES
            if end > offset + done:
                skipped = offset + done - at
                size = min(end - offset - done, len(view) - done)
                if chunk.kind == ZERO:
                    view[done : done + size] = bytes(size)
                else:
                    view[done : done + size] = _whole(reader, chunk)[skipped : skipped + size]
                done += size
                if done == len(view):
                    break
            at = end
        return done

    def close(self) -> None:
        """Nothing is held."""


def _whole(reader: PackReader, chunk: Chunk) -> bytes | memoryview:
    """Return all pages of a chunk that has content."""
    content = reader.decode(chunk, reader.read(chunk))
    if chunk.present == (1 << chunk.pages) - 1:
        return content
    window = bytearray(chunk.pages * PAGE_BYTES)
    taken = 0
    for start, end in _byte_runs(chunk.present):
        window[start:end] = content[taken : taken + end - start]
        taken += end - start
    return bytes(window)


class PageWriter:
    """Gathers pages and writes them in few large calls; zero chunks become holes.

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

    def put_chunk(self, chunk: Chunk, content: bytes | memoryview) -> None:
        """Add a chunk that has content. The buffer must stay unchanged until the next `flush`."""
        if chunk.present == (1 << chunk.pages) - 1:
            self.put(content)
            return
        at = taken = 0
        for start, end in _byte_runs(chunk.present):
            if start > at:
                self.put(_ZEROS[: start - at])
            self.put(content[taken : taken + end - start])
            taken += end - start
            at = end
        if at < chunk.pages * PAGE_BYTES:
            self.put(_ZEROS[: chunk.pages * PAGE_BYTES - at])

    def flush(self) -> None:
        """Write what is pending."""
        write_pages(self._pages, self._pending, self._position)
        self._position += self._batch_bytes - self._position % self._batch_bytes - self._room
        self._pending.clear()
        self._room = self._batch_bytes - self._position % self._batch_bytes


def write_pages(pages: WritablePages, buffers: Sequence[bytes | memoryview], position: int) -> None:
    """Write buffers, up to IOV_MAX of them, one after the other from a position on.

    Raises:
        OSError: also if the memory of a process ends early.
    """
    left = sum(map(len, buffers))
    while left:
        written = pages.write(buffers, position)
        if not written:  # memory that its process has unmapped, or left
            raise OSError(errno.EIO, "Memory ended early")
        position += written
        left -= written
        # What is left after a signal, or on a nearly full disk.
        buffers = [memoryview(b"".join(buffers))[written:]] if left else []


def _unpack_segment(reader: PackReader, segment: Segment, writer: PageWriter | None) -> None:
    """Verify one segment and, given a writer, write its pages."""
    for chunk in reader.chunks(segment.first_chunk, segment.chunks):
        if chunk.kind == ZERO:
            if writer is not None:
                writer.skip(chunk.pages)
            continue
        stored = reader.read_stored(chunk)
        if writer is not None:
            writer.put_chunk(chunk, reader.decode(chunk, stored))
    if writer is not None:
        writer.flush()
