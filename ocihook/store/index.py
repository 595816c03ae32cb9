"""The index of a domain: for the content of a page, where it may be found. LMDB, mapped, not read into memory.

It is a hint and no more: whoever finds a page by it compares the content. So eight bytes of a page's id are enough,
a damaged or lost index costs space and no data, and it can be made anew from the packs (`Domain.repair`).
"""

import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import lmdb

from ocihook.errors import StoreError

KEY_BYTES = 8
_PLACE = struct.Struct(">QI")  # a pack, as the number that is its name, and a page in it
_MAP_BYTES = 1 << 40  # of address space; a page takes 50 to 70 bytes of file


class Place(NamedTuple):
    """A page of a pack."""

    pack: int
    page: int


class Index:
    """Opened by every process for itself, after it was forked."""

    def __init__(self, path: Path, *, writable: bool = False) -> None:
        """Open it, and make it if it is not there.

        Raises:
            StoreError: if it cannot be used.
        """
        try:
            self._environment = lmdb.open(
                str(path), subdir=False, map_size=_MAP_BYTES, readonly=not writable, max_readers=1024, mode=0o600
            )
        except lmdb.Error as error:
            raise StoreError(f"{path}: {error}", hint="`ocihook store repair` makes the index anew") from error
        self._path = path

    def close(self) -> None:
        """Close it."""
        self._environment.close()

    @contextmanager
    def reading(self) -> Iterator["Lookup"]:
        """Give a view of it that does not change."""
        with self._errors(), self._environment.begin() as transaction, transaction.cursor() as cursor:
            yield Lookup(cursor)

    def add(self, pack: int, keys: Iterable[bytes]) -> None:
        """Add the pages of a pack, in their order; of those that are known already, the known place is kept."""
        rows = sorted((key, _PLACE.pack(pack, page)) for page, key in enumerate(keys))
        with self._errors(), self._environment.begin(write=True) as transaction, transaction.cursor() as cursor:
            cursor.putmulti(rows, overwrite=False)

    def remove(self, pack: int, keys: Iterable[bytes]) -> None:
        """Remove the pages of a pack as far as they are found there."""
        with self._errors(), self._environment.begin(write=True) as transaction:
            for page, key in enumerate(keys):
                if transaction.get(key) == _PLACE.pack(pack, page):
                    transaction.delete(key)

    def __len__(self) -> int:
        with self._errors():
            return int(self._environment.stat()["entries"])

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except lmdb.Error as error:
            raise StoreError(f"{self._path}: {error}", hint="`ocihook store repair` makes the index anew") from error


class Lookup:
    """The index as it was when it was begun to be read."""

    def __init__(self, cursor: Any) -> None:  # noqa: ANN401 - lmdb has no types
        self._find_all = cursor.getmulti

    def find_all(self, page_ids: Iterable[bytes]) -> dict[bytes, Place]:
        """Return by key where pages with these ids may be; the others are not in the domain."""
        found = self._find_all([page_id[:KEY_BYTES] for page_id in page_ids])
        return {bytes(key): Place(*_PLACE.unpack(value)) for key, value in found}
