"""Turns packs into page images and processes' memory again, in parallel, each chunk verified as it is read."""

import contextlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType

from ocihook.errors import IntegrityError
from ocihook.linux.patience import ENDLESS, Patience
from ocihook.linux.workers import run_forked
from ocihook.packs.pack import PAGE_BYTES, ZERO, Chunk, PackFile, PackInfo, PackReader
from ocihook.packs.packed_manifest import PackedImage, PackedRegion, Segment
from ocihook.packs.packing import SEGMENT_BYTES
from ocihook.packs.pages import (
    BATCH_BYTES,
    FILE_BATCH_BYTES,
    ImageFile,
    PageWriter,
    Parts,
    Progress,
    Target,
    WritablePages,
    byte_runs,
    make_image,
    no_progress,
    scattered,
)

ALL: Mapping[str, Parts] = MappingProxyType({})  # of every image


@dataclass(frozen=True, slots=True)
class _Task:
    image: PackedImage | PackedRegion
    segment: Segment
    start: int
    size_bytes: int


class Packs:
    """Packs of one checkpoint, opened and checked, with their images and regions mapped onto them."""

    def __init__(
        self, images: Sequence[PackedImage | PackedRegion], infos: Sequence[PackInfo], files: Mapping[str, PackFile]
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

    def _segments(self, image: PackedImage | PackedRegion) -> Iterator[_Task]:
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
        only: Mapping[str, Parts] = ALL,
        workers: int,
        patience: Patience = ENDLESS,
        progress: Progress = no_progress,
    ) -> None:
        """Write the images into `directory`, checking every checksum on the way. Zero pages stay holes.

        Args:
            directory: where they go.
            with_regions: check those, too, which `write_regions` does once more.
            only: of some images, by their names, what is to be written and where to; `write_parts` checks the rest.
            workers: processes to use.
            patience: how long it is waited for.
            progress: called with the bytes done.

        Raises:
            IntegrityError: naming the first damaged chunk.
            OSError: from the file system, a full one included.
        """
        targets: dict[PackedImage | PackedRegion, Target] = {}
        for image in self.images:
            if not isinstance(image, PackedImage):
                continue
            path, parts = directory / image.name, only.get(image.name)
            opened = partial(ImageFile, path, writable=True)
            targets[image] = Target(opened, 0) if parts is None else scattered(opened, parts)
            make_image(path, image.size_bytes if parts is None else parts.size_bytes)
        tasks = [task for task in self._tasks if with_regions or task.image in targets]
        # The kernel lets one at a time write to a file, so that workers had better be at several of them.
        tasks.sort(key=lambda task: task.start / task.image.size_bytes)
        self._run(tasks, targets, workers, patience, progress)

    def write_regions(
        self,
        memory: Mapping[PackedRegion, Callable[[], WritablePages]],
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
        targets: dict[PackedImage | PackedRegion, Target] = {r: Target(opened, r.start) for r, opened in memory.items()}
        tasks = [task for task in self._tasks if task.image in targets]
        self._run(tasks, targets, workers, patience, progress)

    def write_parts(
        self,
        targets: Mapping[str, Target],
        *,
        workers: int,
        patience: Patience = ENDLESS,
        progress: Progress = no_progress,
    ) -> None:
        """Write parts of page images, by their names, to processes' memory that reads as zeros.

        Raises:
            IntegrityError: naming the first damaged chunk.
            OSError: if a process is gone, or has nothing mapped there.
        """
        wanted: dict[PackedImage | PackedRegion, Target] = {
            image: targets[image.name] for image in self.images if image.name in targets
        }
        tasks = [task for task in self._tasks if task.image in wanted]
        self._run(tasks, wanted, workers, patience, progress)

    def _run(
        self,
        tasks: Sequence[_Task],
        targets: Mapping[PackedImage | PackedRegion, Target],
        workers: int,
        patience: Patience,
        progress: Progress,
    ) -> None:
        """Verify tasks and write what has a target there; what that does not want is not even read."""
        tasks = [task for task in tasks if task.image not in targets or _is_wanted(task, targets[task.image])]

        def worker(_number: int, task_numbers: Iterator[int]) -> Iterator[int]:
            for number in task_numbers:
                task = tasks[number]
                reader = self._readers[task.segment.pack]
                target = targets.get(task.image)
                if target is None:
                    _unpack_segment(reader, task.segment, None)
                else:
                    batch_bytes = FILE_BATCH_BYTES if isinstance(task.image, PackedImage) else BATCH_BYTES
                    with contextlib.closing(target.open()) as pages:
                        writer = PageWriter(pages, target.start + task.start, batch_bytes)
                        _unpack_segment(reader, task.segment, writer, target, task.start)
                yield number

        for number in run_forked(worker, tasks=len(tasks), workers=workers, patience=patience):
            progress(tasks[number].size_bytes)

    def read_runs(self, image_name: str) -> Iterator[tuple[int, bytes | None]]:
        """Yield an image from its start: how many pages, and their content; None if they are zero, however many."""
        for task in self._tasks:
            if task.image.name != image_name:
                continue
            reader = self._readers[task.segment.pack]
            for chunk in reader.chunks(task.segment.first_chunk, task.segment.chunks):
                yield chunk.pages, None if chunk.kind == ZERO else bytes(_whole(reader, chunk))

    def tasks_of(self, image: PackedImage | PackedRegion) -> list[_Task]:
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

    def __init__(self, packs: Packs, image: PackedImage | PackedRegion) -> None:
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
    for start, end in byte_runs(chunk.present):
        window[start:end] = content[taken : taken + end - start]
        taken += end - start
    return bytes(window)


def _is_wanted(task: _Task, target: Target) -> bool:
    return target.wants(task.start, task.size_bytes)


def _unpack_segment(
    reader: PackReader,
    segment: Segment,
    writer: PageWriter | None,
    target: Target | None = None,
    at: int = 0,
) -> None:
    """Verify one segment and, given a writer, write its pages.

    Args:
        reader: of the pack.
        segment: where in it.
        writer: to write with.
        target: what that writes to; chunks that it does not want are left out.
        at: offset of the segment in its image.
    """
    for chunk in reader.chunks(segment.first_chunk, segment.chunks):
        size = chunk.pages * PAGE_BYTES
        is_wanted = target is None or target.wants(at, size)
        at += size
        if chunk.kind == ZERO or not is_wanted:
            if writer is not None:
                writer.skip(chunk.pages)
            continue
        stored = reader.read_stored(chunk)
        if writer is not None:
            writer.put_chunk(chunk, reader.decode(chunk, stored))
    if writer is not None:
        writer.flush()
