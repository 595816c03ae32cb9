"""Where the pages of a stored image are: runs of pages that follow one another in a pack, and runs of zero pages."""

import json
import re
import struct
import sys
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from ocihook.errors import IntegrityError
from ocihook.packs.frame import as_name, as_number, as_text, decode_frame, encode_frame, load_json
from ocihook.packs.pack import PackInfo

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
        """Add an extent; one that begins where the last one ends is joined with it."""
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

    def extend(self, packs: Sequence[int], firsts: Sequence[int], lengths: Sequence[int]) -> None:
        """Add extents of which none, except perhaps the first, begins where the one before it ends."""
        if not lengths:
            return
        self.append(packs[0], firsts[0], lengths[0])
        self._packs.extend(packs[1:])
        self._firsts.extend(firsts[1:])
        self._lengths.extend(lengths[1:])
        self._starts.extend(accumulate(lengths[1:], initial=self.pages))
        self.pages = self._starts.pop()

    def by_place(self) -> list[tuple[int, int, int]]:
        """Return pack, first page and number of the first page in the image of each extent, in this order."""
        return sorted(zip(self._packs, self._firsts, self._starts, strict=True))

    def slice(self, start: int, pages: int) -> "tuple[array[int], array[int], array[int]]":
        """Return packs, first pages and lengths of what makes up `pages` pages from page `start` on."""
        end = start + pages
        low = bisect_right(self._starts, start) - 1 if pages else 0
        high = bisect_left(self._starts, end) if pages else 0
        packs, firsts, lengths = self._packs[low:high], self._firsts[low:high], self._lengths[low:high]
        if pages:
            skipped = start - self._starts[low]
            firsts[0] += 0 if packs[0] == ZERO else skipped
            lengths[0] -= skipped
            lengths[-1] -= self._starts[high - 1] + self._lengths[high - 1] - end
        return packs, firsts, lengths

    def cut(self, start: int, pages: int) -> Iterator[tuple[int, int, int]]:
        """Yield the same, pack, first page and length of one extent after the other."""
        return zip(*self.slice(start, pages), strict=True)

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
        made._starts.extend(accumulate(made._lengths, initial=0))
        made.pages = made._starts.pop()
        return made

    @property
    def packs(self) -> set[int]:
        """The packs that there are pages of."""
        return set(self._packs) - {ZERO}


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
        if any(pack >= len(packs) for extents in images.values() for pack in extents.packs):
            raise ValueError("it names a pack that it does not list")
    except (ValueError, TypeError, KeyError, struct.error, RecursionError) as error:
        raise IntegrityError(f"the layout is malformed: {error!r}") from error
    return Layout(packs, images)
