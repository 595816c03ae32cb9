"""One pack file: an append-only row of chunks with a table at its end (byte tables: docs/formats.md)."""

import os
import struct
import sys
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple, Self

import lz4.block
from xxhash import xxh3_64_intdigest

from ocihook.errors import IntegrityError, StoreError
from ocihook.linux.files import open_regular, sync_directory
from ocihook.linux.mapped_file import MappedFile
from ocihook.packs.cipher import KEY_ID_BYTES, SALT_BYTES, TAG_BYTES, Keyring, PackCipher

PAGE_BYTES = 4096
CHUNK_PAGES = 64  # one bit each in Chunk.present

ZERO, RAW, LZ4 = 0, 1, 2

_MAGIC = b"OCIHPACK"
_TAIL_MAGIC = b"OCIHTAIL"
VERSION, ENCRYPTED_VERSION = 1, 2
_HEADER = struct.Struct("<8sHHI")  # magic, version, 0, 0
_RECORD = struct.Struct("<QQQIHBx")  # Chunk in its own order, and a zero byte
_TRAILER = struct.Struct("<8sQQII")  # magic, table offset, table xxh3-64, chunks, 0
_HEADER_BYTES = _HEADER.pack(_MAGIC, VERSION, 0, 0)
_ENCRYPTED_HEADER_BYTES = _HEADER.pack(_MAGIC, ENCRYPTED_VERSION, 0, 0)  # then the key's id and a salt
_ASSOCIATED = struct.Struct("<QHB")  # present, pages, kind: the part of a record that its chunk's tag covers
_GATHER_MAX = 1000  # below IOV_MAX (1024 on Linux)
_FULL = {pages: (1 << pages) - 1 for pages in range(1, CHUNK_PAGES + 1)}  # `present` where all pages have content
_KINDS = bytes((RAW, LZ4)).ljust(256)  # by whether a chunk is smaller than its content

Buffer = bytes | memoryview


class Chunk(NamedTuple):
    """Where up to CHUNK_PAGES consecutive pages of an image (up to 65535, if all zero) are kept.

    `present` has bit i set when page i has content; the content of those pages, in order, is what is stored.
    `checksum` is XXH3-64 of the stored bytes. A zero chunk stores nothing: its bitmap, size and checksum are 0.
    """

    offset: int
    present: int
    checksum: int
    stored_bytes: int
    pages: int
    kind: int


def compress(content: bytes | memoryview) -> bytes | None:
    """Return content compressed; None where less than 1/16 is saved, which is not worth the time to decompress it."""
    compressed: bytes = lz4.block.compress(content, store_size=False)
    return compressed if len(compressed) < len(content) - len(content) // 16 else None


class PackInfo(NamedTuple):
    """What a manifest records of a pack: enough to notice a missing, truncated or foreign one."""

    name: str
    size_bytes: int
    chunks: int
    table_checksum: int


class PackWriter:
    """Appends chunks to a new pack; incomplete until `close`, which writes the table and may sync.

    Leaving its `with` block any earlier leaves a file without a table, which no reader takes for a pack.
    """

    def __init__(self, path: Path, cipher: PackCipher | None = None) -> None:
        self.path = path
        self._cipher = cipher
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self._fd = os.open(path, flags, 0o600)
        header = _ENCRYPTED_HEADER_BYTES + cipher.key_id + cipher.salt if cipher else _HEADER_BYTES
        self._offset = len(header)
        self._table = bytearray()
        self._pending: list[Buffer] = [header]
        self.chunks = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def append(self, kind: int, pages: int, present: int, stored: Buffer | None = None) -> None:
        """Add one chunk. The buffer must stay unchanged until the next `flush`."""
        if stored is None:
            self._table += _RECORD.pack(self._offset, 0, 0, 0, pages, ZERO)
        else:
            if self._cipher is not None:
                stored = self._cipher.encrypt(self._offset, stored, _ASSOCIATED.pack(present, pages, kind))
            size = len(stored)
            self._table += _RECORD.pack(self._offset, present, xxh3_64_intdigest(stored), size, pages, kind)
            self._offset += size
            self._pending.append(stored)
        self.chunks += 1

    def flush(self) -> None:
        """Write everything appended so far to the file."""
        write_all(self._fd, self._pending)
        self._pending.clear()

    def close(self, *, durable: bool) -> PackInfo:
        """Write table and trailer; with `durable`, return only when all of it, and its name, is on stable storage."""
        checksum = xxh3_64_intdigest(self._table)
        trailer = _TRAILER.pack(_TAIL_MAGIC, self._offset, checksum, self.chunks, 0)
        self._pending += (bytes(self._table), trailer)
        self.flush()
        if durable:
            os.fsync(self._fd)
            sync_directory(self.path.parent)
        self.__exit__()
        size = self._offset + len(self._table) + len(trailer)
        return PackInfo(self.path.name, size, self.chunks, checksum)


def write_all(fd: int, buffers: Sequence[Buffer]) -> None:
    """Write every buffer at the file's position, whatever the kernel takes at a time."""
    for start in range(0, len(buffers), _GATHER_MAX):
        batch = list(buffers[start : start + _GATHER_MAX])
        size = sum(len(buffer) for buffer in batch)
        written = os.writev(fd, batch)
        while written < size:
            rest = memoryview(b"".join(batch))[written:]
            batch, size = [rest], len(rest)
            written = os.writev(fd, batch)


@dataclass(frozen=True, slots=True)
class PackFile:
    """Bytes of one pack: a file of its own, or a window of an archive it lies in."""

    path: Path
    offset: int = 0
    size_bytes: int | None = None  # None: to the end of the file

    def open(self) -> int:
        """Open for reading; refuse what is not a regular file.

        Raises:
            IntegrityError: if it is missing, a link or not a file.
        """
        try:
            return open_regular(self.path)
        except OSError as error:
            raise IntegrityError(f"pack {self.path.name} cannot be opened: {error.strerror}") from error


def read_info(path: Path) -> PackInfo:
    """Return what a pack's own trailer says of it, for one that no manifest describes.

    Raises:
        IntegrityError: if it is missing, or has no trailer.
    """
    fd = PackFile(path).open()
    try:
        size = os.fstat(fd).st_size
        trailer = os.pread(fd, _TRAILER.size, max(0, size - _TRAILER.size))
    finally:
        os.close(fd)
    if len(trailer) != _TRAILER.size:
        raise IntegrityError(f"pack {path.name} is too small")
    magic, _, checksum, chunks, _ = _TRAILER.unpack(trailer)
    if magic != _TAIL_MAGIC:
        raise IntegrityError(f"pack {path.name} is incomplete")
    return PackInfo(path.name, size, chunks, checksum)


class PackReader:
    """A pack whose header, table and trailer have been checked against what the manifest says of it."""

    def __init__(self, file: PackFile, info: PackInfo, keyring: Keyring | None = None) -> None:
        """Open and check; keys are requested only when an encrypted pack is read.

        Raises:
            IntegrityError: if the pack is missing, truncated, foreign, or its table is damaged.
        """
        self.info = info
        self._keyring = keyring
        self._cipher: PackCipher | None = None
        self._base = file.offset
        self.fd = file.open()
        self._mapped = MappedFile(self.fd, file.offset + info.size_bytes)
        try:
            self._table = self._read_table(file, info)
        except BaseException:
            os.close(self.fd)
            raise

    def _read_table(self, file: PackFile, info: PackInfo) -> bytes:
        name = info.name
        here = os.fstat(self.fd).st_size - file.offset
        size = here if file.size_bytes is None else min(file.size_bytes, here)
        if size != info.size_bytes:
            raise IntegrityError(f"pack {name} has {size} bytes, its manifest says {info.size_bytes}")
        table_offset = size - _TRAILER.size - info.chunks * _RECORD.size
        if table_offset < _HEADER.size:
            raise IntegrityError(f"pack {name} is too small for its {info.chunks} chunks")
        header = os.pread(self.fd, _HEADER.size + KEY_ID_BYTES + SALT_BYTES, self._base)
        self.is_encrypted = header.startswith(_ENCRYPTED_HEADER_BYTES)
        self.key_id = header[_HEADER.size : _HEADER.size + KEY_ID_BYTES] if self.is_encrypted else b""
        self._header = header if self.is_encrypted else _HEADER_BYTES
        if self.is_encrypted and self._keyring is None:
            raise IntegrityError(f"pack {name} is encrypted, which only those of a store may be")
        if not header.startswith(self._header):
            raise IntegrityError(f"pack {name} does not begin with the header of a version that this ocihook knows")
        table = read_at(self.fd, info.chunks * _RECORD.size, self._base + table_offset)
        trailer = os.pread(self.fd, _TRAILER.size, self._base + size - _TRAILER.size)
        expected = _TRAILER.pack(_TAIL_MAGIC, table_offset, info.table_checksum, info.chunks, 0)
        if trailer != expected or xxh3_64_intdigest(table) != info.table_checksum:
            raise IntegrityError(f"pack {name}: its table or trailer is damaged")
        return table

    def _records(self, first: int, count: int) -> Iterator[tuple[int, int, int, int, int, int]]:
        if first < 0 or count < 0 or first + count > self.info.chunks:
            raise IntegrityError(f"pack {self.info.name} has no chunks {first}..{first + count}")
        return _RECORD.iter_unpack(memoryview(self._table)[first * _RECORD.size : (first + count) * _RECORD.size])

    def pages(self, first: int, count: int) -> int:
        """Return how many pages `count` chunks from `first` on say that they hold.

        Raises:
            IntegrityError: if there are no such chunks.
        """
        return sum(record[4] for record in self._records(first, count))

    def chunks(self, first: int, count: int) -> Iterator[Chunk]:
        """Yield `count` chunks from `first` on, each checked for sense and to lie right after the one before.

        Raises:
            IntegrityError: if there are no such chunks, or a record is impossible.
        """
        end_of_chunks = self.info.size_bytes - _TRAILER.size - len(self._table)
        expected_offset = None
        for record in self._records(first, count):
            chunk = Chunk(*record)
            if not self._is_sane(chunk, end_of_chunks) or chunk.offset != (expected_offset or chunk.offset):
                raise IntegrityError(f"pack {self.info.name} has an impossible record: {chunk}")
            expected_offset = chunk.offset + chunk.stored_bytes
            yield chunk

    def full_chunks(self) -> Sequence[int]:
        """Check, as thoroughly as `chunks`, that in all chunks every page has content.

        Returns:
            The number of the first page of each chunk; then how many pages there are.

        Raises:
            IntegrityError: if there are others.
        """
        # By columns, which takes a tenth of the time of going record by record.
        offsets, present = self._column("Q", 0), self._column("Q", 8)
        sizes, pages, kinds = self._column("I", 24), self._column("H", 28), self._table[30 :: _RECORD.size]
        tag_bytes = TAG_BYTES if self.is_encrypted else 0
        saved = [number * PAGE_BYTES + tag_bytes - size for number, size in zip(pages, sizes, strict=True)]
        ends = [*accumulate(sizes, initial=offsets[0] if offsets else 0)]
        is_sane = self.info.chunks == 0 or (
            set(pages) <= _FULL.keys()
            and present == array("Q", map(_FULL.__getitem__, pages))
            and min(sizes) > tag_bytes
            and min(saved) >= 0
            and bytes(map(bool, saved)).translate(_KINDS) == kinds
            and offsets[0] >= len(self._header)
            and ends.pop() <= self.info.size_bytes - _TRAILER.size - len(self._table)
            and offsets.tolist() == ends
        )
        if not is_sane:
            for _ in self.chunks(0, self.info.chunks):  # raises what is wrong
                pass
            raise IntegrityError(f"pack {self.info.name} has a chunk of zero pages, which a store never writes")
        return array("I", accumulate(pages, initial=0))

    def _column(self, typecode: str, at: int) -> "array[int]":
        """Return the field of all records that begins `at` bytes behind their starts."""
        numbers = array(typecode, self._table)
        if sys.byteorder == "big":
            numbers.byteswap()
        return numbers[at // numbers.itemsize :: _RECORD.size // numbers.itemsize]

    def content(self, number: int) -> Buffer:
        """Return the content of a chunk that `full_chunks` has been through, verified.

        Raises:
            IntegrityError: if it is not what was written.
            KeyMissing: if it is encrypted, and there is no key.
        """
        offset, present, checksum, size, pages, kind = _RECORD.unpack_from(self._table, number * _RECORD.size)
        stored: Buffer = self._mapped.read(self._base + offset, size)
        if xxh3_64_intdigest(stored) != checksum:
            self.verify(Chunk(offset, present, checksum, size, pages, kind), stored)
        if self.is_encrypted:
            stored = self._decrypt(Chunk(offset, present, checksum, size, pages, kind), stored)
        return stored if kind == RAW else self._decompress(stored, pages * PAGE_BYTES, offset)

    def decode(self, chunk: Chunk, stored: Buffer) -> Buffer:
        """Return the content of a chunk's present pages from its verified bytes.

        Raises:
            IntegrityError: if they do not decode to that.
        """
        if chunk.kind == RAW:
            return stored
        return self._decompress(stored, chunk.present.bit_count() * PAGE_BYTES, chunk.offset)

    def _decompress(self, stored: Buffer, size: int, offset: int) -> bytes:
        try:
            content: bytes = lz4.block.decompress(stored, uncompressed_size=size)
        except lz4.block.LZ4BlockError as error:
            raise IntegrityError(f"pack {self.info.name}: the chunk at byte {offset} does not decode") from error
        if len(content) != size:
            raise IntegrityError(f"pack {self.info.name}: the chunk at byte {offset} decodes to a wrong size")
        return content

    def read(self, chunk: Chunk) -> Buffer:
        """Return the bytes of one chunk as they are decoded, checksum verified, decrypted.

        Raises:
            IntegrityError: if they are not what was written.
            KeyMissing: if they are encrypted, and there is no key.
        """
        stored = self.read_stored(chunk)
        return self._decrypt(chunk, stored) if self.is_encrypted else stored

    def _decrypt(self, chunk: Chunk, stored: Buffer) -> bytes:
        if self._cipher is None:
            assert self._keyring is not None
            salt_at = _HEADER.size + KEY_ID_BYTES
            self._cipher = PackCipher(self._keyring.get(self.key_id), self._header[salt_at:])
        content = self._cipher.decrypt(chunk.offset, stored, _ASSOCIATED.pack(chunk.present, chunk.pages, chunk.kind))
        if content is None:
            raise IntegrityError(
                f"pack {self.info.name}: the chunk at byte {chunk.offset} was not encrypted with the domain's key"
            )
        return content

    def read_stored(self, chunk: Chunk) -> memoryview:
        """Return the stored bytes of one chunk, checksum verified."""
        stored = self._mapped.read(self._base + chunk.offset, chunk.stored_bytes)
        self.verify(chunk, stored)
        return stored

    def _is_sane(self, chunk: Chunk, end_of_chunks: int) -> bool:
        if not len(self._header) <= chunk.offset <= end_of_chunks - chunk.stored_bytes:
            return False
        if chunk.kind == ZERO:
            return chunk.pages > 0 and chunk.present == chunk.stored_bytes == chunk.checksum == 0
        content_bytes = chunk.present.bit_count() * PAGE_BYTES
        encoded_bytes = chunk.stored_bytes - (TAG_BYTES if self.is_encrypted else 0)
        return (
            0 < chunk.pages <= CHUNK_PAGES
            and 0 < chunk.present < 1 << chunk.pages
            and (
                (chunk.kind == RAW and encoded_bytes == content_bytes)
                or (chunk.kind == LZ4 and 0 < encoded_bytes < content_bytes)
            )
        )

    def verify(self, chunk: Chunk, stored: Buffer) -> None:
        """Check stored bytes.

        Raises:
            IntegrityError: if they are not what was written.
        """
        if len(stored) < chunk.stored_bytes:
            raise IntegrityError(f"pack {self.info.name} ends early")
        if xxh3_64_intdigest(stored) != chunk.checksum:
            raise IntegrityError(
                f"pack {self.info.name}: the chunk at byte {chunk.offset} is damaged",
                hint="use another copy of this checkpoint",
            )

    def close(self) -> None:
        """Close the file."""
        os.close(self.fd)


def read_at(fd: int, size: int, offset: int) -> bytes:
    """Read exactly `size` bytes.

    Raises:
        StoreError: if the file ends before.
    """
    data = os.pread(fd, size, offset)
    while len(data) < size:  # the kernel caps one read at 2 GiB
        more = os.pread(fd, size - len(data), offset + len(data))
        if not more:
            raise StoreError(f"file ends at byte {offset + len(data)}, {size - len(data)} bytes early")
        data += more
    return data
