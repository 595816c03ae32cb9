"""Turns pages into packs, in parallel."""

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from ocihook.errors import StoreError
from ocihook.linux.memory import CopyBuffer
from ocihook.linux.patience import ENDLESS, Patience
from ocihook.linux.workers import run_forked
from ocihook.packs.pack import CHUNK_PAGES, LZ4, PAGE_BYTES, RAW, ZERO, PackInfo, PackWriter, compress
from ocihook.packs.packed_manifest import PackedImage, Segment
from ocihook.packs.pages import (
    BATCH_BYTES,
    CHUNK_BYTES,
    ZERO_CHUNK,
    ImageFile,
    Progress,
    Range,
    ReadablePages,
    Source,
    byte_runs,
    no_progress,
    ranges_of,
    read_pages,
)

# Peak of one worker over all kinds of data, `make bench` ("memory of one worker"): 30 MiB, of which 19 to 22 are what
# it shares with its parent. The rest is room for tables, 32 bytes for each chunk.
WORKER_BYTES = 32 << 20
AGENT_BYTES = 48 << 20  # the agent and one session without workers: 20 MiB, and the packs' tables when reading
_ZERO_PAGE = bytes(PAGE_BYTES)
_TASK_BYTES, _MOST_RANGES = 4 << 20, 64  # small ranges are taken together up to this; the result is sent at once


class _TaskPacked(NamedTuple):
    task: int
    pack: str
    first_chunk: int
    chunks: tuple[int, ...]  # of each of its ranges


def workers_within(memory_bound_bytes: int, cores: int, worker_bytes: int = WORKER_BYTES) -> int:
    """Return how many workers, at most one a core and at least one, stay within a bound on memory."""
    return max(1, min(cores, (memory_bound_bytes - AGENT_BYTES) // worker_bytes))


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
    first: int = 0,
    workers: int,
    durable: bool,
    patience: Patience = ENDLESS,
    progress: Progress = no_progress,
) -> tuple[list[tuple[Segment, ...]], list[PackInfo]]:
    """Pack sources into new packs `<prefix>N.pack` in `directory`; return where each of them is, and the packs.

    N begins with `first`, and there are up to `workers` of them.

    The sources, of whole pages each, are left as they are. On any error the new packs are left too, for the caller to
    remove.

    Raises:
        StoreError: if a source ends early.
        OSError: from the file system, a full one included; also if a source cannot be opened.
    """
    tasks = list(_tasks(sources))

    def worker(worker_number: int, task_numbers: Iterator[int]) -> Iterator[_TaskPacked | PackInfo]:
        # The pack is made with the first segment, so that no worker leaves an empty one.
        with contextlib.ExitStack() as stack:
            writer = None
            buffer = CopyBuffer(BATCH_BYTES)
            for task in task_numbers:
                if writer is None:
                    writer = stack.enter_context(PackWriter(directory / f"{prefix}{first + worker_number}.pack"))
                counts = [writer.chunks]
                for number, start, size in tasks[task]:
                    with contextlib.closing(sources[number].open()) as pages:
                        _pack_range(pages, sources[number].start + start, size, writer, buffer)
                    counts.append(writer.chunks)
                chunks = tuple(after - before for before, after in pairwise(counts))
                yield _TaskPacked(task, writer.path.name, counts[0], chunks)
            if writer is not None:
                yield writer.close(durable=durable)

    done: dict[int, _TaskPacked] = {}
    packs: list[PackInfo] = []
    for result in run_forked(worker, tasks=len(tasks), workers=workers, patience=patience):
        if isinstance(result, PackInfo):
            packs.append(result)
        else:
            done[result.task] = result
            progress(sum(part.size_bytes for part in tasks[result.task]))
    rows: list[list[Segment]] = [[] for _ in sources]
    for number, task in enumerate(tasks):
        packed, first_chunk = done[number], done[number].first_chunk
        for part, chunks in zip(task, packed.chunks, strict=True):
            rows[part.number].append(Segment(packed.pack, first_chunk, chunks))
            first_chunk += chunks
    return [tuple(row) for row in rows], sorted(packs)


def _tasks(sources: Sequence[Source]) -> Iterator[list[Range]]:
    """Yield what a worker takes at a time: a range, or some small ones, each of which is a segment of its own."""
    task: list[Range] = []
    for number, source in enumerate(sources):
        for part in ranges_of(source.size_bytes):
            task.append(Range(number, *part))
            if sum(each.size_bytes for each in task) >= _TASK_BYTES or len(task) == _MOST_RANGES:
                yield task
                task = []
    if task:
        yield task


def _size(path: Path) -> int:
    with contextlib.closing(ImageFile(path)) as image:
        return image.size_bytes


def _pack_range(source: ReadablePages, start: int, size: int, writer: PackWriter, buffer: CopyBuffer) -> None:
    zero_pages = 0
    was_raw = False
    starts_with, view = buffer.data.startswith, buffer.view
    for batch_start in range(start, start + size, BATCH_BYTES):
        length = min(BATCH_BYTES, start + size - batch_start)
        read_pages(source, view[:length], batch_start)
        for chunk_start in range(0, length, CHUNK_BYTES):
            chunk_end = min(chunk_start + CHUNK_BYTES, length)
            pages = (chunk_end - chunk_start) // PAGE_BYTES
            first = buffer.start + chunk_start
            if pages == CHUNK_PAGES and starts_with(ZERO_CHUNK, first):
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
                content = b"".join(content[a:b] for a, b in byte_runs(present))
            compressed = None if was_raw and not compress(_sample(content)) else compress(content)
            was_raw = compressed is None
            if compressed is None:
                writer.append(RAW, pages, present, content)
            else:
                writer.append(LZ4, pages, present, compressed)
        writer.flush()
    if zero_pages:
        writer.append(ZERO, zero_pages, 0)


def _sample(content: bytes | memoryview) -> bytes:
    """Return every 16th page: if the chunk before did not compress (weights do not), this one seldom does."""
    return b"".join(content[at : at + PAGE_BYTES] for at in range(0, len(content), 16 * PAGE_BYTES))
