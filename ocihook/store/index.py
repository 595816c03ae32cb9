"""The index of a domain: for the content of a page, where it may be found. Sorted runs of records, mapped.

It is a hint and no more: whoever finds a page by it compares the content. So eight bytes of a page's id are enough,
nothing in it needs a checksum, a lost index costs space and no data, and it can be made anew from the packs
(`Domain.repair`). Every pack brings a run; small ones are merged, and a prune writes all anew without what it removes.
"""

import contextlib
import fcntl
import mmap
import os
import secrets
import struct
from array import array
from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import chain, repeat
from operator import add, sub
from pathlib import Path
from typing import NamedTuple

from ocihook.errors import StoreError

KEY_BYTES = 8
MAX_RUNS = 8  # each is searched; more are merged
_RECORD_BYTES = 20  # key, pack, page
_KEY = struct.Struct(f">Q{_RECORD_BYTES - KEY_BYTES}x")  # as a number
_PLACE = struct.Struct(">QI")
_HEADER = struct.Struct("<8sIIQ")  # magic, version, bits of the table, records
_MAGIC, _VERSION = b"OCIHRUNS", 1
_BUCKETS_PER_RECORD = 2  # up to twice as many: then three quarters of what is new need no look at the records
_PARTS = 256  # a merge holds one of so many in memory


class Place(NamedTuple):
    """A page of a pack."""

    pack: int
    page: int


class Run:
    """A file of records in the order of their keys, and a table of where those begin that begin with the same bits."""

    def __init__(self, path: Path) -> None:
        """Map it.

        Raises:
            StoreError: if it is not what such a file must be.
            FileNotFoundError: if it is gone, merged with others.
        """
        self.path = path
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            size = os.fstat(fd).st_size
            if size < _HEADER.size:
                raise StoreError(f"{path} is too small", hint=_REMEDY)
            self._map = mmap.mmap(fd, size, prot=mmap.PROT_READ)
        finally:
            os.close(fd)
        magic, version, bits, self._count = _HEADER.unpack_from(self._map)
        table_bytes = ((1 << min(bits, 32)) + 1) * 4
        if magic != _MAGIC or version != _VERSION or size != _HEADER.size + table_bytes + self._count * _RECORD_BYTES:
            raise StoreError(f"{path} is damaged", hint=_REMEDY)
        self._shift = 64 - bits
        self._table = memoryview(self._map)[_HEADER.size : _HEADER.size + table_bytes].cast("I")
        self._ends = self._table[1:]
        self._records = _HEADER.size + table_bytes

    def __len__(self) -> int:
        return int(self._count)

    def find_all(self, keys: Iterable[bytes], numbers: Iterable[int], found: dict[bytes, Place]) -> None:
        """Add the places of keys, and of these keys as numbers, that have none yet."""
        table, ends, shift = self._table, self._ends, self._shift
        records, find = self._records, self._map.find
        for key, number in zip(keys, numbers, strict=True):
            bucket = number >> shift
            start, end = table[bucket], ends[bucket]
            if start == end:  # so is most of what is new
                continue
            last = records + end * _RECORD_BYTES
            at = find(key, records + start * _RECORD_BYTES, last)
            while at >= 0 and (at - records) % _RECORD_BYTES:
                at = find(key, at + 1, last)
            if at >= 0 and key not in found:
                found[key] = Place(*_PLACE.unpack_from(self._map, at + KEY_BYTES))

    def part(self, first: int, end: int) -> list[bytes]:
        """Return the records whose keys begin with a byte from `first` to before `end`."""
        low, high = (self._bound(byte) for byte in (first, end))
        data = self._map[self._records + low * _RECORD_BYTES : self._records + high * _RECORD_BYTES]
        return [data[at : at + _RECORD_BYTES] for at in range(0, len(data), _RECORD_BYTES)]

    def _bound(self, byte: int) -> int:
        """Return the number of the first record whose key begins with this byte or a later one."""
        low, high = 0, self._count
        while low < high:
            middle = (low + high) // 2
            if self._map[self._records + middle * _RECORD_BYTES] < byte:
                low = middle + 1
            else:
                high = middle
        return low

    def close(self) -> None:
        """Unmap it."""
        self._ends.release()
        self._table.release()
        self._map.close()


_REMEDY = "`ocihook store repair` makes the index anew"


class Index:
    """All runs of a directory as they were when it was opened."""

    def __init__(self, directory: Path) -> None:
        """Map them.

        Raises:
            StoreError: if one is damaged.
        """
        self._runs: list[Run] = []
        while True:
            try:
                for path in _paths(directory):
                    self._runs.append(Run(path))
            except FileNotFoundError:  # merged with others meanwhile
                self.close()
            except BaseException:
                self.close()
                raise
            else:
                return

    def __len__(self) -> int:
        return sum(map(len, self._runs))

    def find_all(self, page_ids: Iterable[bytes]) -> dict[bytes, Place]:
        """Return where pages with these ids may be; the others are not in the domain."""
        ids = {page_id[:KEY_BYTES]: page_id for page_id in page_ids}
        numbers = struct.unpack(f">{len(ids)}Q", b"".join(ids))
        found: dict[bytes, Place] = {}
        for run in self._runs:
            run.find_all(ids, numbers, found)
        return {ids[key]: place for key, place in found.items()}

    def close(self) -> None:
        """Unmap all."""
        for run in self._runs:
            run.close()
        self._runs.clear()


def add_to_index(directory: Path, pack: int, keys: Sequence[bytes]) -> None:
    """Add the pages of a pack, in their order.

    Raises:
        OSError: from the file system, a full one included.
    """
    rows = sorted(map(add, keys, map(_PLACE.pack, repeat(pack), range(len(keys)))))
    _write(directory, len(rows), iter([rows]))


def merge_index(directory: Path, *, packs: Container[int] | None = None) -> None:
    """Merge runs if there are many, small ones first; with `packs`, merge all and keep only what is in these.

    Raises:
        StoreError: if one is damaged.
        OSError: from the file system, a full one included.
    """
    with _merging(directory) as is_ours:
        paths = sorted(_paths(directory), key=lambda path: path.stat().st_size)
        if packs is None and (not is_ours or len(paths) <= MAX_RUNS):
            return
        if packs is None:  # all but those that are larger than the smaller ones together
            count = next((n for n in range(len(paths), 2, -1) if _is_worth_it(paths[:n])), 2)
            paths = paths[:count]
        runs = [Run(path) for path in paths]
        try:
            _write(directory, sum(map(len, runs)), _merged(runs, packs))
        finally:
            for run in runs:
                run.close()
        for path in paths:
            path.unlink()


def _is_worth_it(paths: Sequence[Path]) -> bool:
    sizes = [path.stat().st_size for path in paths]
    return sizes[-1] <= sum(sizes[:-1])


@contextlib.contextmanager
def _merging(directory: Path) -> Iterator[bool]:
    """Be the only one that merges; whoever comes second need not."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(fd)


def _paths(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.run"))


def _merged(runs: Sequence[Run], packs: Container[int] | None) -> Iterator[list[bytes]]:
    for part in range(_PARTS):
        rows: list[bytes] = []
        for run in runs:
            rows += run.part(part, part + 1)
        rows.sort()
        if packs is not None:
            rows = [row for row in rows if int.from_bytes(row[KEY_BYTES:16], "big") in packs]
        yield list({row[:KEY_BYTES]: row for row in reversed(rows)}.values())[::-1]


def _write(directory: Path, most: int, parts: Iterator[list[bytes]]) -> None:
    """Write a run of at most so many records, which come in order."""
    bits = max(1, (most * _BUCKETS_PER_RECORD).bit_length())
    table_at, records_at = _HEADER.size, _HEADER.size + ((1 << bits) + 1) * 4
    count, last = 0, -1  # of the records so far, and the bucket of the last one of them
    partial = directory / f"{secrets.token_hex(8)}.partial"
    try:
        with partial.open("xb") as file:
            for rows in parts:
                joined, added = b"".join(rows), len(rows)
                rows.clear()  # they take three times as much memory
                file.seek(records_at + count * _RECORD_BYTES)
                file.write(joined)
                buckets = [number >> 64 - bits for (number,) in _KEY.iter_unpack(joined)]
                table = _starts(count, last, buckets)
                file.seek(table_at + (last + 1) * 4)
                file.write(table)
                count += added
                last = buckets[-1] if buckets else last
            file.seek(table_at + (last + 1) * 4)
            file.write(_starts(count, last, [1 << bits]))
            file.seek(0)
            file.write(_HEADER.pack(_MAGIC, _VERSION, bits, count))
            file.flush()
            os.fsync(file.fileno())
        partial.rename(partial.with_suffix(".run"))
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _starts(count: int, last: int, buckets: Sequence[int]) -> "array[int]":
    """Return what the table says of all buckets behind the `last` up to the last one of those of further records."""
    gaps = map(sub, buckets, chain([last], buckets))
    return array("I", chain.from_iterable(map(repeat, range(count, count + len(buckets)), gaps)))
