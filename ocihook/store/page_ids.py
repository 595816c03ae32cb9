"""What a page is found by: an id of 16 bytes, by the seed of its domain; in an encrypted one, enciphered."""

import functools
import hashlib
import io
import mmap
from collections.abc import Sequence
from itertools import repeat
from pathlib import Path

from xxhash import xxh3_128_digest

from ocihook.packs.cipher import permute
from ocihook.packs.pack import PAGE_BYTES

ID_BYTES = 16
_PIECE_BYTES = 1 << 20


class IdsDigest:
    """The BLAKE2b-256 of page ids, one after the other, as a manifest has it: of the ids before they are enciphered."""

    def __init__(self, key: bytes | None) -> None:
        self._key = key
        self._found = hashlib.blake2b(digest_size=32)

    def update(self, ids: bytes) -> None:
        """Add whole ids."""
        self._found.update(ids if self._key is None else permute(self._key, ids, back=True))

    def hexdigest(self) -> str:
        """Return it for all that were added so far."""
        return self._found.hexdigest()


class PageIds:
    """Makes ids: XXH3-128 with a seed, then AES with a key if there is one."""

    def __init__(self, seed: int, key: bytes | None = None) -> None:
        self.seed, self._key = seed, key

    def of_pages(self, pages: Sequence[bytes | memoryview]) -> tuple[list[bytes], bytes]:
        """Return the ids of pages, each, and one after the other."""
        ids = list(map(xxh3_128_digest, pages, repeat(self.seed)))  # a hash takes no longer than another call would
        joined = b"".join(ids)
        if self._key is not None:
            joined = permute(self._key, joined)
            ids = [joined[at : at + ID_BYTES] for at in range(0, len(joined), ID_BYTES)]
        return ids, joined

    def of(self, content: bytes | memoryview) -> bytes:
        """Return the ids of the pages of some content, one after the other."""
        return self.of_pages([content[at : at + PAGE_BYTES] for at in range(0, len(content), PAGE_BYTES)])[1]

    def of_run(self, pages: int, contents: Sequence[bytes | memoryview]) -> bytes:
        """Return the ids of pages that come in pieces; without any piece they are zero pages, and none is allocated."""
        return b"".join(map(self.of, contents)) if contents else self._zero * pages

    @functools.cached_property
    def _zero(self) -> bytes:
        return self.of(bytes(PAGE_BYTES))

    def new_digest(self) -> IdsDigest:
        """Return the digest of no ids yet."""
        return IdsDigest(self._key)

    def digest_of(self, ids: io.RawIOBase | mmap.mmap) -> str:
        """Return the digest of all ids in a file."""
        digest = self.new_digest()
        ids.seek(0)
        while data := ids.read(_PIECE_BYTES):
            digest.update(data[: len(data) // ID_BYTES * ID_BYTES])
        return digest.hexdigest()

    def digest_of_file(self, path: Path) -> str:
        """Return the digest of the ids in a file."""
        with path.open("rb", buffering=0) as file:
            return self.digest_of(file)
