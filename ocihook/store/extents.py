"""Where the pages of a stored image are: runs of pages that follow one another in a pack, and runs of zero pages."""

import json
import re
import struct
import sys
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ocihook.errors import IntegrityError
from ocihook.store.frame import as_name, as_number, as_text, decode_frame, encode_frame, load_json
from ocihook.store.pack import PackInfo

STORED_PACK = re.compile(r"[0-9a-f]{16}\.pack")
ZERO = 0xFFFFFFFF  # in place of a pack
VERSION = 1

_LENGTH = struct.Struct("<I")
_MAX_RUN = 0xFFFFFFFF


class Extent(NamedTuple):
    """`pages` pages that lie one after the other in pack number `pack` from its page `first` on; or are all zero."""

    pack: int
    first: int
    pages: int


class Extents:
    """The extents of one image, in order. Four bytes each for pack, first page and length, and eight for a start."""

    def __init__(self) -> None:
        self._packs = array("I")
        self._firsts = array("I")
        self._lengths = array("I")
        self._starts = array("Q")
        self.pages = 0

    def __len__(self) -> int:
        return len(self._packs)

    def __iter__(self) -> Iterator[Extent]:
        return map(Extent, self._packs, self._firsts, self._lengths)

    def append(self, pack: int, first: int, pages: int) -> None:
        """Add an extent; one that goes on where the last one ends is joined with it."""
        goes_on = len(self._packs) and self._packs[-1] == pack and self._lengths[-1] + pages <= _MAX_RUN
        if goes_on and (pack == ZERO or self._firsts[-1] + self._lengths[-1] == first):
            self._lengths[-1] += pages
            self.pages += pages
            return
        self._packs.append(pack)
        self._firsts.append(0 if pack == ZERO else first)
        self._lengths.append(pages)
        self._starts.append(self.pages)
        self.pages += pages

    def cut(self, start: int, pages: int) -> Iterator[Extent]:
        """Yield what makes up `pages` pages from page `start` on."""
        number = bisect_right(self._starts, start) - 1
        while pages:
            skipped = start - self._starts[number]
            taken = min(self._lengths[number] - skipped, pages)
            first = self._firsts[number]
            yield Extent(self._packs[number], first if self._packs[number] == ZERO else first + skipped, taken)
            start, pages, number = start + taken, pages - taken, number + 1

    def to_bytes(self) -> bytes:
        """Return three rows of little-endian 32-bit numbers: packs, first pages, lengths."""
        return b"".join(_little_endian(row).tobytes() for row in (self._packs, self._firsts, self._lengths))

    @classmethod
    def from_bytes(cls, data: bytes) -> "Extents":
        """Read what `to_bytes` made."""
        made, size = cls(), len(data) // 3
        for number, row in enumerate((made._packs, made._firsts, made._lengths)):
            row.frombytes(data[number * size : (number + 1) * size])
            row[:] = _little_endian(row)
        for length in made._lengths:
            made._starts.append(made.pages)
            made.pages += length
        return made


def _little_endian(row: "array[int]") -> "array[int]":
    if sys.byteorder == "big":
        row = row[:]
        row.byteswap()
    return row


class Layout(NamedTuple):
    """Where all of a checkpoint's memory is: its packs, and for each image its name and its extents in them."""

    packs: tuple[PackInfo, ...]
    images: dict[str, Extents]


def encode_layout(layout: Layout) -> bytes:
    """Return a frame: the length of a JSON head, the head, then each image's extents."""
    head = json.dumps(
        {
            "packs": [[p.name, p.size_bytes, p.chunks, f"{p.table_checksum:016x}"] for p in layout.packs],
            "images": [[name, len(extents)] for name, extents in layout.images.items()],
        }
    ).encode()
    rows = b"".join(extents.to_bytes() for extents in layout.images.values())
    return encode_frame("layout", VERSION, _LENGTH.pack(len(head)) + head + rows)


def decode_layout(data: bytes, sizes: Sequence[tuple[str, int]]) -> Layout:
    """Read a layout.

    Args:
        data: a record.
        sizes: names and pages of the images that it must have.

    Raises:
        IntegrityError: if it is damaged, or does not fit them.
    """
    _, body = decode_frame("layout", (VERSION,), data)
    try:
        (length,) = _LENGTH.unpack_from(body)
        head = load_json(body[_LENGTH.size : _LENGTH.size + length])
        packs = tuple(
            PackInfo(as_name(n, STORED_PACK), as_number(s), as_number(c), int(t, 16)) for n, s, c, t in head["packs"]
        )
        at = _LENGTH.size + length
        images: dict[str, Extents] = {}
        for name, count in head["images"]:
            row_bytes = 12 * as_number(count)
            if at + row_bytes > len(body):
                raise ValueError("it ends early")
            images[as_text(name)] = Extents.from_bytes(body[at : at + row_bytes])
            at += row_bytes
        if at != len(body):
            raise ValueError("it goes on behind its last image")
        if [(name, extents.pages) for name, extents in images.items()] != list(sizes):
            raise ValueError("it has other images than its checkpoint")
        if any(extent.pack != ZERO and extent.pack >= len(packs) for row in images.values() for extent in row):
            raise ValueError("it names a pack that it does not list")
    except (ValueError, TypeError, KeyError, struct.error, RecursionError) as error:
        raise IntegrityError(f"the layout is malformed: {error!r}") from error
    return Layout(packs, images)
