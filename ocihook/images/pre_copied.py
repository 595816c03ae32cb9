"""Memory of a process that was packed while it ran, and what of it is still right once all stands still.

What was packed is used in whole chunks, where they are. A chunk is read again if any of its pages has changed, is gone,
or is no longer beside the others. So nothing that is in packs is packed once more while all stand still.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple, Protocol

from ocihook.linux.memory import Span, subtract
from ocihook.linux.procfs import Process
from ocihook.packs.pack import PAGE_BYTES, PackFile, PackInfo, PackReader
from ocihook.packs.packed_manifest import Segment

MOST_PIECES = 20_000  # a manifest has room for ten times as many segments (packs/packed_manifest.py)


class Piece(NamedTuple):
    """A part of a process's memory, in the order of addresses."""

    spans: tuple[Span, ...]
    segments: tuple[Segment, ...] = ()  # where it is; none: it is to be read


class PreCopied(Protocol):
    """What was packed of a container's memory while it ran."""

    @property
    def packs(self) -> Sequence[PackInfo]:
        """Where it is."""

    @property
    def first(self) -> int:
        """The number of the first pack that is not one of those."""

    def settle(self) -> None:
        """Find out what of it is still right: from now on all stand still.

        Raises:
            OSError: if that cannot be found out.
        """

    def pieces(self, process: Process, now: Sequence[Span]) -> Iterator[Piece]:
        """Yield what makes up the memory `now` of a process, of any one, in the order of addresses."""


class CopiedMemory:
    """Memory of one process in packs."""

    def __init__(self, runs: Sequence[Span], segments: Iterable[Segment], chunk_bytes: Iterable[Sequence[int]]) -> None:
        """Note what is where.

        Args:
            runs: what was packed, one after the other, in the order of addresses; none beside another.
            segments: the packs' rows of chunks that hold it.
            chunk_bytes: of each of these the sizes of its chunks.
        """
        self._runs = runs
        self._starts = [run.start for run in runs]
        self._offsets = [0, *accumulate(run.size_bytes for run in runs)]  # where each run begins, and the end
        self._segments = list(segments)
        self._firsts: list[int] = []  # number of each segment's first chunk, among all
        self._cuts = array("Q", [0])  # where chunks begin, and the end
        for sizes in chunk_bytes:
            self._firsts.append(len(self._cuts) - 1)
            for size in sizes:
                self._cuts.append(self._cuts[-1] + size)

    def pieces(self, now: Sequence[Span], dirty: Iterable[Span], *, most: int = MOST_PIECES) -> Iterator[Piece]:
        """Yield what makes up the memory of the process.

        Args:
            now: what it has, as `runs`.
            dirty: what of it is not as it was packed.
            most: parts in packs that are used; beyond that, short ones are read again.
        """
        kept = list(self._kept(subtract(now, dirty), subtract(now, self._runs)))
        least_bytes = PAGE_BYTES
        while len(kept) > most:
            least_bytes *= 2
            kept = [(first, end) for first, end in kept if self._cuts[end] - self._cuts[first] >= least_bytes]
        parts = [tuple(self._spans(self._cuts[first], self._cuts[end])) for first, end in kept]
        fresh = iter(subtract(now, (span for part in parts for span in part)))
        ahead = next(fresh, None)
        for (first, end), part in zip(kept, parts, strict=True):
            before = []
            while ahead is not None and ahead.start < part[0].start:
                before.append(ahead)
                ahead = next(fresh, None)
            if before:
                yield Piece(tuple(before))
            yield Piece(part, tuple(self._rows(first, end)))
        if ahead is not None:
            yield Piece((ahead, *fresh))

    def _kept(self, same: Sequence[Span], new: Iterable[Span]) -> Iterator[tuple[int, int]]:
        """Yield the rows of chunks, first and end, that are whole, and between whose pages nothing is new."""
        stale = [(self._offset(span.start), self._offset(span.end)) for span in subtract(self._runs, same)]
        # What is new lies between two runs: at one place among what was packed.
        holes = [(self._offset(span.start), self._offset(span.start)) for span in new]
        at = 0
        for low, high in sorted(stale + holes):
            first, end = bisect_right(self._cuts, low) - 1, bisect_left(self._cuts, high)
            if at < first:
                yield at, first
            at = max(at, end)
        if at < len(self._cuts) - 1:
            yield at, len(self._cuts) - 1

    def _offset(self, address: int) -> int:
        """Return how much was packed of what lies below an address."""
        number = bisect_right(self._starts, address) - 1
        if number < 0:
            return 0
        run = self._runs[number]
        return self._offsets[number] + min(address, run.end) - run.start

    def _spans(self, low: int, high: int) -> Iterator[Span]:
        """Yield the addresses of what was packed from one place up to another."""
        number = bisect_right(self._offsets, low) - 1
        while low < high:
            run, offset = self._runs[number], self._offsets[number]
            end = min(high, offset + run.size_bytes)
            yield Span(run.start + low - offset, run.start + end - offset)
            low, number = end, number + 1

    def _rows(self, first: int, end: int) -> Iterator[Segment]:
        """Yield the segments of chunks."""
        number = bisect_right(self._firsts, first) - 1
        while first < end:
            segment, its_first = self._segments[number], self._firsts[number]
            its_end = min(end, its_first + segment.chunks)
            yield Segment(segment.pack, segment.first_chunk + first - its_first, its_end - first)
            first, number = its_end, number + 1


def chunk_sizes(directory: Path, packs: Iterable[PackInfo], segments: Sequence[Segment]) -> list[list[int]]:
    """Return the bytes of each chunk of segments.

    Raises:
        IntegrityError: if a pack is damaged.
    """
    by_pack: dict[str, list[int]] = {}
    for info in packs:
        with closing(PackReader(PackFile(directory / info.name), info)) as reader:
            by_pack[info.name] = [chunk.pages * PAGE_BYTES for chunk in reader.chunks(0, info.chunks)]
    return [by_pack[s.pack][s.first_chunk : s.first_chunk + s.chunks] for s in segments]
