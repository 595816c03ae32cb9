"""The packs of a domain, opened as they are needed, and read by page."""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from ocihook.errors import IntegrityError
from ocihook.packs.cipher import Keyring, PackCipher
from ocihook.packs.pack import PAGE_BYTES, Buffer, PackFile, PackInfo, PackReader, PackWriter, read_info
from ocihook.store.index import KEY_BYTES
from ocihook.store.page_ids import ID_BYTES, PageIds

_OPEN_PACKS = 64


def pack_name(number: int) -> str:
    """Return the file name of a pack."""
    return f"{number:016x}.pack"


def pack_number(name: str) -> int:
    """Return the number of a pack by its file's name."""
    return int(name.partition(".")[0], 16)


class StoredPack:
    """A pack with random access to its pages. Keeps the chunk that it read last."""

    def __init__(self, path: Path, keyring: Keyring, info: PackInfo | None = None) -> None:
        """Open it; without `info`, rely on what the pack says of itself. Keys are requested when they are needed.

        Raises:
            IntegrityError: if it is missing, its table is damaged, or it is not what `info` says.
        """
        self._reader = PackReader(PackFile(path), info or read_info(path), keyring)
        self.is_encrypted, self.key_id = self._reader.is_encrypted, self._reader.key_id
        self._last: tuple[int, memoryview] = (-1, memoryview(b""))

    @cached_property
    def _starts(self) -> Sequence[int]:
        """First pages of the chunks; not the chunks themselves, since there are thousands of packs."""
        return self._reader.full_chunks()

    @property
    def pages(self) -> int:
        """The number of pages.

        Raises:
            IntegrityError: if the pack has chunks that a store never writes.
        """
        return self._starts[-1]

    def read(self, first: int, pages: int) -> tuple[memoryview, int]:
        """Return content from page `first` on: at least one page, at most `pages`, and how many it is.

        Raises:
            IntegrityError: if there is no such page, or it is damaged.
        """
        if not 0 <= first < self.pages:
            raise self._no_page(first)
        number = bisect_right(self._starts, first) - 1
        start = self._starts[number]
        content = self._chunk(number)[(first - start) * PAGE_BYTES : (first + pages - start) * PAGE_BYTES]
        return content, len(content) // PAGE_BYTES

    def contents(self, first: int, pages: int) -> list[Buffer]:
        """Return the content of pages in a row, from page `first` on, in pieces.

        Raises:
            IntegrityError: if there are no such pages, or they are damaged.
        """
        starts, end = self._starts, first + pages
        if not 0 <= first < end <= starts[-1]:
            raise self._no_page(first)
        contents: list[Buffer] = []
        number = bisect_right(starts, first) - 1
        while first < end:
            start, stop = starts[number], min(starts[number + 1], end)
            contents.append(self._chunk(number)[(first - start) * PAGE_BYTES : (stop - start) * PAGE_BYTES])
            first = stop
            number += 1
        return contents

    def _chunk(self, number: int) -> memoryview:
        if self._last[0] != number:
            self._last = number, memoryview(self._reader.content(number))
        return self._last[1]

    def _no_page(self, first: int) -> IntegrityError:
        return IntegrityError(f"pack {self._reader.info.name} has no page {max(first, self.pages)}")

    def verify(self) -> None:
        """Read everything and check every checksum.

        Raises:
            IntegrityError: naming the first damaged chunk.
        """
        for number in range(len(self._starts) - 1):
            self._reader.content(number)

    def close(self) -> None:
        """Close it."""
        self._reader.close()


class PackDirectory(NamedTuple):
    """Where the packs of a domain are, and how they are read and written."""

    path: Path
    keyring: Keyring
    is_encrypted: bool
    must_be_encrypted: Callable[[], bool]  # whether nothing else may be read; called when a pack is not encrypted

    def open(self, name: str, info: PackInfo | None = None) -> StoredPack:
        """Open a pack; without `info`, rely on what the pack says of itself.

        Raises:
            IntegrityError: if it is missing, damaged, or not encrypted where all are.
        """
        pack = StoredPack(self.path / name, self.keyring, info)
        if not pack.is_encrypted and self.must_be_encrypted():
            pack.close()
            raise IntegrityError(f"pack {name} is not encrypted, as all of its domain are")
        return pack

    def create(self, number: int) -> PackWriter:
        """Begin a new pack.

        Raises:
            KeyMissing: if it is to be encrypted, and there is no key.
            OSError: from the file system.
        """
        return PackWriter(self.path / pack_name(number), PackCipher.new(self.keyring) if self.is_encrypted else None)

    def info(self, number: int) -> PackInfo:
        """Return what a pack says of itself.

        Raises:
            IntegrityError: if it is missing, or incomplete.
        """
        return read_info(self.path / pack_name(number))


class StoredPacks:
    """The packs in a directory; the last ones used stay open."""

    def __init__(self, directory: PackDirectory, infos: Iterable[PackInfo] = ()) -> None:
        """Keep the directory, and what is known of some packs."""
        self._directory = directory
        self._infos = {pack_number(info.name): info for info in infos}
        self._open: dict[int, StoredPack] = {}

    def get(self, number: int) -> StoredPack:
        """Return a pack.

        Raises:
            IntegrityError: if it is missing or damaged.
        """
        pack = self._open.get(number)
        is_full = len(self._open) >= _OPEN_PACKS
        if pack is not None and not is_full:
            return pack
        if pack is None:
            pack = self._directory.open(pack_name(number), self._infos.get(number))
            if is_full:
                self._open.pop(next(iter(self._open))).close()
        self._open.pop(number, None)
        self._open[number] = pack  # the last one is the newest used
        return pack

    def open(self, numbers: Sequence[int]) -> None:
        """Open the first of some packs, as many as stay open, and look through their tables.

        Raises:
            IntegrityError: if one is missing or damaged.
        """
        for number in numbers[:_OPEN_PACKS]:
            _ = self.get(number).pages

    def close(self) -> None:
        """Close all."""
        for pack in self._open.values():
            pack.close()
        self._open.clear()


def keys_of(pack: StoredPack, page_ids: PageIds) -> Iterator[bytes]:
    """Yield the key of each page of a pack, as the index has it, and verify the pack on the way.

    Raises:
        IntegrityError: if it is damaged.
    """
    done = 0
    while done < pack.pages:
        content, taken = pack.read(done, pack.pages)
        ids = page_ids.of(content)
        yield from (ids[at : at + KEY_BYTES] for at in range(0, len(ids), ID_BYTES))
        done += taken
