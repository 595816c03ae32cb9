"""Turns packs into page images and processes' memory again, in parallel, each chunk verified as it is read."""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from ocihook.errors import IntegrityError
from ocihook.linux.patience import ENDLESS, Patience
from ocihook.packs.pack import PAGE_BYTES, ZERO, Buffer, Chunk, PackFile, PackInfo, PackReader
from ocihook.packs.packed_manifest import PackedImage, PackedRegion, Segment
from ocihook.packs.pages import RANGE_BYTES, ZEROS, Parts, Progress, Target, byte_runs, cut_out, no_progress
from ocihook.packs.runs import ALL, Run, file_targets, write_images


class PackedPart:
    """An image or a region in packs; every segment of it is read by one worker."""

    is_overwritten = False

    def __init__(self, image: PackedImage | PackedRegion, readers: Mapping[str, PackReader]) -> None:
        """Map it onto packs.

        Raises:
            IntegrityError: if one is not listed, or they do not hold exactly what it had.
        """
        self.size_bytes = image.size_bytes
        self._rows: list[tuple[PackReader, Segment]] = []
        self._starts = array("Q")
        start = 0
        for segment in image.segments:
            reader = readers.get(segment.pack)
            if reader is None:
                raise IntegrityError(f"{image.name} refers to {segment.pack}, which the manifest does not list")
            size = reader.pages(segment.first_chunk, segment.chunks) * PAGE_BYTES
            if not 0 < size <= RANGE_BYTES:
                raise IntegrityError(f"{image.name} has a segment of {size} bytes, not of 1 to {RANGE_BYTES}")
            self._rows.append((reader, segment))
            self._starts.append(start)
            start += size
        if start != image.size_bytes:
            raise IntegrityError(f"packs hold {start} bytes of {image.name}, which had {image.size_bytes}")

    def ranges(self) -> Iterator[tuple[int, int]]:
        """Yield start and size of each segment."""
        return ((start, end - start) for start, end in pairwise((*self._starts, self.size_bytes)))

    def runs(self, start: int, size_bytes: int, parts: Parts | None = None) -> Iterator[Run]:
        """Yield what is in so many bytes from an offset on, verified; what is in no part is not read.

        Raises:
            IntegrityError: naming what is damaged.
        """
        end = start + size_bytes
        for reader, segment, segment_start in self._segments(start, size_bytes):
            after = segment_start  # the next chunk begins here
            for chunk in reader.chunks(segment.first_chunk, segment.chunks):
                at, after = after, after + chunk.pages * PAGE_BYTES
                low, high = max(at, start), min(after, end)
                if low >= high:
                    continue
                if chunk.kind == ZERO or not (parts is None or parts.touches(low, high)):
                    yield (high - low) // PAGE_BYTES, []
                    continue
                contents = _in_place(chunk, reader.decode(chunk, reader.read_stored(chunk)))
                if high - low != after - at:
                    contents = list(cut_out(contents, low - at, high - low))
                yield (high - low) // PAGE_BYTES, contents

    def verify(self, start: int, size_bytes: int) -> None:
        """Check every checksum of the segments that so many bytes from an offset on are in; nothing is decoded.

        Raises:
            IntegrityError: naming what is damaged.
        """
        for reader, segment, _ in self._segments(start, size_bytes):
            for chunk in reader.chunks(segment.first_chunk, segment.chunks):
                if chunk.kind != ZERO:
                    reader.read_stored(chunk)

    def _segments(self, start: int, size_bytes: int) -> Iterator[tuple[PackReader, Segment, int]]:
        """Yield the segments of bytes from an offset on, and where each begins."""
        end = min(start + size_bytes, self.size_bytes)
        first, after = max(0, bisect_right(self._starts, start) - 1), bisect_left(self._starts, end)
        for (reader, segment), at in zip(self._rows[first:after], self._starts[first:after], strict=True):
            yield reader, segment, at

    def close(self) -> None:
        """Close nothing: the packs are shared."""


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
            _check_apart(images)
            self.parts = {image.name: PackedPart(image, self._readers) for image in images}
        except BaseException:
            self.close()
            raise

    def verify(self, *, workers: int, progress: Progress = no_progress) -> None:
        """Read everything and check every checksum.

        Raises:
            IntegrityError: naming the first damaged chunk.
        """
        write_images(self.parts, dict.fromkeys(self.parts), workers=workers, progress=progress)

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
            with_regions: check those, too; `write` checks them again.
            only: for some images, by name, the parts to be written; `write` checks the rest.
            workers: processes to use.
            patience: how long the caller waits for it.
            progress: called with the bytes done.

        Raises:
            IntegrityError: naming the first damaged chunk.
            OSError: from the file system, a full one included.
        """
        sizes = {image.name: image.size_bytes for image in self.images if isinstance(image, PackedImage)}
        targets: dict[str, Target | None] = dict.fromkeys(self.parts) if with_regions else {}
        targets |= file_targets(directory, sizes, only)
        self.write(targets, workers=workers, patience=patience, progress=progress)

    def write(
        self,
        targets: Mapping[str, Target | None],
        *,
        workers: int,
        patience: Patience = ENDLESS,
        progress: Progress = no_progress,
    ) -> None:
        """Write images and regions, by their names, as `write_images` does.

        Raises:
            IntegrityError: naming the first damaged chunk.
            OSError: from a file system, a full one included; or if a process is gone, or has nothing mapped there.
        """
        write_images(self.parts, targets, workers=workers, patience=patience, progress=progress)

    def close(self) -> None:
        """Close the packs."""
        for reader in self._readers.values():
            reader.close()


def _check_apart(images: Sequence[PackedImage | PackedRegion]) -> None:
    """Check that no chunk is claimed twice: else a few of them could stand for any number of bytes.

    Raises:
        IntegrityError: naming a pack that has such chunks.
    """
    segments = sorted(segment for image in images for segment in image.segments)
    for one, next_one in pairwise(segments):
        if one.pack == next_one.pack and one.first_chunk + one.chunks > next_one.first_chunk:
            raise IntegrityError(
                f"the manifest has the memory in chunk {next_one.first_chunk} of pack {one.pack} twice",
                hint="use another copy of the checkpoint",
            )


def _in_place(chunk: Chunk, content: Buffer) -> list[Buffer]:
    """Return all pages of a chunk that has content, in pieces."""
    if chunk.present == (1 << chunk.pages) - 1:
        return [content]
    pieces: list[Buffer] = []
    at = taken = 0
    for start, end in byte_runs(chunk.present):
        if start > at:
            pieces.append(ZEROS[: start - at])
        pieces.append(content[taken : taken + end - start])
        taken += end - start
        at = end
    if at < chunk.pages * PAGE_BYTES:
        pieces.append(ZEROS[: chunk.pages * PAGE_BYTES - at])
    return pieces
