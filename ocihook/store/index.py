"""The index of a domain: for the content of a page, where it may be found. Sorted runs of records, mapped.

It is only a hint: a page that it leads to is compared by content. So eight bytes of a page's id are enough,
nothing in it needs a checksum, a lost index costs space and no data, and it can be rebuilt from the packs
(`ocihook store repair`). One or two packs bring a run; small ones are merged, and a prune rewrites all without what
it removes.
"""

import contextlib
import fcntl
import mmap
import os
import secrets
import struct
from array import array
from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import count, repeat
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

from ocihook.errors import StoreError
from ocihook.linux.files import sync_directory

KEY_BYTES = 8
MAX_RUNS = 8  # each is searched; if there are more, they are merged
_RECORD = struct.Struct(f">{KEY_BYTES}sQI")
_KEY = struct.Struct(f">Q{_RECORD.size - KEY_BYTES}x")  # as a number
_KEYS = struct.Struct(f"{KEY_BYTES}s")
_PLACE = struct.Struct(">QI")
_ID = struct.Struct(">Q8x")  # of a page; its key as a number
_HEADER = struct.Struct("<8sIIQ")  # magic, version, key bits of the filter, records
_MAGIC, _VERSION = b"OCIHRUNS", 2
_FILTER_PER_RECORD = 16  # bits, up to twice as many: of what is new, one in 16 to 32 needs a look at the records
_BLOCK_BITS = 9  # of the filter for an entry in the table: 16 to 32 records
_BITS = tuple(1 << bit for bit in range(8))
_LEAST_BITS, _MOST_BITS = 11, 40  # at least one byte of the filter for each part of a merge
_PARTS = 256  # a merge holds one of so many in memory


class Place(NamedTuple):
    """A page of a pack."""

    pack: int
    page: int


class Run:
    """A file of records in the order of their keys, with a filter that rejects most keys that are not in it."""

    def __init__(self, path: Path) -> None:
        """Map it.

        Raises:
            StoreError: if it is not what such a file must be.
            FileNotFoundError: if it is gone: merged with others.
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
        table, self._records = _offsets(min(bits, _MOST_BITS))
        if (magic, version, size) != (_MAGIC, _VERSION, self._records + self._count * _RECORD.size):
            raise StoreError(f"{path} is damaged", hint=_REMEDY)
        self._bits = bits
        self._filter = memoryview(self._map)[_HEADER.size : table]
        self._table = memoryview(self._map)[table : self._records].cast("I")

    def __len__(self) -> int:
        return int(self._count)

    def find_all(self, page_ids: Collection[bytes], numbers: Sequence[int], found: dict[bytes, Place]) -> None:
        """Add the places of pages with these ids, and keys as numbers, that have none yet."""
        in_filter, byte_shift, bit_shift = self._filter, 67 - self._bits, 64 - self._bits
        for page_id, number in zip(page_ids, numbers, strict=True):
            if (byte := in_filter[number >> byte_shift]) and byte >> (number >> bit_shift & 7) & 1:
                place = self._find(page_id[:KEY_BYTES], number)
                if place is not None:
                    found.setdefault(page_id, place)

    def _find(self, key: bytes, number: int) -> Place | None:
        block = number >> 64 - self._bits + _BLOCK_BITS
        first, size, find = self._records, _RECORD.size, self._map.find
        end = first + self._table[block + 1] * size
        at = find(key, first + self._table[block] * size, end)
        while at >= 0 and (at - first) % size:
            at = find(key, at + 1, end)
        return None if at < 0 else Place(*_PLACE.unpack_from(self._map, at + KEY_BYTES))

    def part(self, first: int, end: int) -> list[bytes]:
        """Return the records whose keys begin with a byte from `first` to before `end`."""
        low, high = (self._bound(byte) for byte in (first, end))
        data = self._map[self._records + low * _RECORD.size : self._records + high * _RECORD.size]
        return [data[at : at + _RECORD.size] for at in range(0, len(data), _RECORD.size)]

    def _bound(self, byte: int) -> int:
        """Return the number of the first record whose key begins with this byte or a later one."""
        low, high = 0, self._count
        while low < high:
            middle = (low + high) // 2
            if self._map[self._records + middle * _RECORD.size] < byte:
                low = middle + 1
            else:
                high = middle
        return low

    def close(self) -> None:
        """Unmap it."""
        self._filter.release()
        self._table.release()
        self._map.close()


_REMEDY = "`ocihook store repair` rebuilds the index"


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

    def find_all(self, page_ids: Collection[bytes]) -> dict[bytes, Place]:
        """Return where pages with these ids may be; the others are not in the domain."""
        numbers = [number for (number,) in _ID.iter_unpack(b"".join(page_ids))]
        found: dict[bytes, Place] = {}
        for run in self._runs:
            run.find_all(page_ids, numbers, found)
        return found

    def close(self) -> None:
        """Unmap all."""
        for run in self._runs:
            run.close()
        self._runs.clear()


def add_to_index(directory: Path, packs: Mapping[int, bytes]) -> None:
    """Add the pages of packs: the keys of each, one after the other.

    Raises:
        OSError: from the file system, a full one included.
    """
    rows: list[bytes] = []
    for pack, keys in packs.items():
        rows += map(_RECORD.pack, map(itemgetter(0), _KEYS.iter_unpack(keys)), repeat(pack), count())
    rows.sort()
    _write(directory, len(rows), iter([rows]))


def merge_index(directory: Path, *, without: Collection[int] = ()) -> None:
    """Merge runs if there are many, small ones first; `without` packs, merge all and leave out what is in these.

    Raises:
        StoreError: if one is damaged.
        OSError: from the file system, a full one included.
    """
    with _merging(directory, is_waiting=bool(without)) as is_ours:
        paths = sorted(_paths(directory), key=lambda path: path.stat().st_size)
        if not without and (not is_ours or len(paths) <= MAX_RUNS):
            return
        if not without:  # all but those that are larger than the smaller ones together
            count = next((n for n in range(len(paths), 2, -1) if _is_worth_it(paths[:n])), 2)
            paths = paths[:count]
        runs = [Run(path) for path in paths]
        try:
            _write(directory, sum(map(len, runs)), _merged(runs, without))
        finally:
            for run in runs:
                run.close()
        for path in paths:
            path.unlink()
        if without:  # others are about to be removed
            sync_directory(directory)


def _is_worth_it(paths: Sequence[Path]) -> bool:
    sizes = [path.stat().st_size for path in paths]
    return sizes[-1] <= sum(sizes[:-1])


@contextlib.contextmanager
def _merging(directory: Path, *, is_waiting: bool) -> Iterator[bool]:
    """Be the only process that merges; a second one skips it, or waits."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            # waits: only what removes packs does, and that is never a session
            fcntl.flock(fd, fcntl.LOCK_EX if is_waiting else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(fd)


def _paths(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.run"))


def _merged(runs: Sequence[Run], without: Collection[int]) -> Iterator[list[bytes]]:
    for part in range(_PARTS):
        rows: list[bytes] = []
        for run in runs:
            rows += run.part(part, part + 1)
        rows.sort()
        if without:
            rows = [row for row in rows if int.from_bytes(row[KEY_BYTES:16], "big") not in without]
        yield list({row[:KEY_BYTES]: row for row in reversed(rows)}.values())[::-1]


def _write(directory: Path, most: int, parts: Iterator[list[bytes]]) -> None:
    """Write a run of at most so many records, which come in order; it is on stable storage then."""
    bits = max(_LEAST_BITS, (most * _FILTER_PER_RECORD).bit_length())
    table_at, records_at = _offsets(bits)
    written = listed = 0  # records, and entries of the table
    partial = directory / f"{secrets.token_hex(8)}.partial"
    try:
        with partial.open("xb") as file:
            for rows in filter(None, parts):
                joined = b"".join(rows)
                rows.clear()  # they take three times as much memory
                file.seek(records_at + written * _RECORD.size)
                file.write(joined)
                passing = [number >> 64 - bits for (number,) in _KEY.iter_unpack(joined)]
                file.seek(_HEADER.size + (passing[0] >> 3))
                file.write(_filter(passing))
                end = (passing[-1] >> _BLOCK_BITS) + 1
                file.seek(table_at + listed * 4)
                file.write(_starts(written, passing, listed, end))
                written, listed = written + len(passing), end
            file.seek(table_at + listed * 4)
            file.write(_starts(written, [], listed, (1 << bits >> _BLOCK_BITS) + 1))
            file.seek(0)
            file.write(_HEADER.pack(_MAGIC, _VERSION, bits, written))
            file.flush()
            os.fsync(file.fileno())
        partial.rename(partial.with_suffix(".run"))
        sync_directory(directory)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _offsets(bits: int) -> tuple[int, int]:
    """Return where the table and the records of a run begin."""
    table = _HEADER.size + (1 << bits >> 3)
    return table, table + ((1 << bits >> _BLOCK_BITS) + 1) * 4


def _filter(passing: Sequence[int]) -> bytearray:
    """Return the bytes of a filter from the first to the last one of these bits in it, which come in order."""
    first = passing[0] & ~7
    made = bytearray((passing[-1] - first >> 3) + 1)
    for number in passing:
        made[number - first >> 3] |= _BITS[number & 7]
    return made


def _starts(written: int, passing: Sequence[int], first: int, end: int) -> "array[int]":
    """Return what the table says of blocks from `first` to before `end`, if so many records came before these."""
    return array("I", [written + bisect_left(passing, block << _BLOCK_BITS) for block in range(first, end)])
