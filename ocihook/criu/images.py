"""Reads CRIU's image files: which memory a page image holds, which processes were dumped, how long it took.

An image begins with little-endian magics (one for an inventory, two for all others: criu/include/magic.h),
then holds messages, each after its size as u32 (criu/protobuf.c).
"""

import contextlib
import os
import re
import struct
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from ocihook.criu.proto import message_class
from ocihook.errors import ImageError

PAGE_BYTES = 4096
INVENTORY_NAME = "inventory.img"  # the last image of a dump
PAGES_NAME = re.compile(r"pages-[0-9]{1,10}\.img")

COMMON_MAGIC = 0x54564319
_SERVICE_MAGIC = 0x55105940
_PAGEMAP_MAGIC = 0x56084025
_PSTREE_MAGIC = 0x50273030
_STATS_MAGIC = 0x57093306
_PE_PARENT, _PE_PRESENT = 1 << 0, 1 << 2  # criu/include/pagemap.h
_MOST_PAGES = (1 << 32) - 1  # of a run, in the field of older releases
_MAX_PAGEMAP_BYTES = 64 << 20  # three million runs, of which none are kept
_MAX_PSTREE_BYTES = 4 << 20  # a hundred thousand processes; each takes some ten times as much when it is read
_MAX_MESSAGE_BYTES = 1 << 20  # far above any message of these images; a limit for damaged ones
_U32 = struct.Struct("<I")
_TWO_MAGICS = struct.Struct("<II")


class PageRun(NamedTuple):
    """Consecutive pages of one process's (or shared) memory, as one pagemap entry describes them."""

    vaddr: int
    pages: int
    is_present: bool  # else the pages are in a parent image, or lazy


class Pagemap(NamedTuple):
    """What one pagemap image says of the page image `pages_name`."""

    pages_name: str
    present_bytes: int  # that the page image has
    is_compressed: bool  # by CRIU itself (after 4.2): its page image is then opaque


class Process(NamedTuple):
    """A dumped process, by its pids as CRIU stored them."""

    pid: int
    ppid: int
    tids: tuple[int, ...]  # of its threads


class DumpStats(NamedTuple):
    """CRIU's own measure of a dump; times in microseconds as CRIU stores them."""

    freezing_us: int
    frozen_us: int
    memdump_us: int
    memwrite_us: int
    pages_written: int


class RestoreStats(NamedTuple):
    """CRIU's own measure of a restore; times in microseconds as CRIU stores them."""

    forking_us: int
    restore_us: int
    pages_restored: int


def frames(
    data: bytes, name: str, magic: tuple[int, int], *, limit_bytes: int = _MAX_MESSAGE_BYTES
) -> Iterator[tuple[int, bytes]]:
    """Yield each message of an image as it is encoded, and where it begins; none may be larger than the limit.

    Raises:
        ImageError: if the magics are not what they must be, or the image ends within a message.
    """
    if len(data) < _TWO_MAGICS.size or _TWO_MAGICS.unpack_from(data) != magic:
        raise ImageError(f"{name} does not begin as a CRIU image of its kind")
    position = _TWO_MAGICS.size
    while position < len(data):
        if position + _U32.size > len(data):
            raise ImageError(f"{name} is truncated at byte {position}")
        size = _U32.unpack_from(data, position)[0]
        position += _U32.size
        if size > limit_bytes or position + size > len(data):
            raise ImageError(f"{name} is truncated or damaged at byte {position}")
        yield position, data[position : position + size]
        position += size


def decode(kind: str, encoded: bytes, name: str, position: int) -> Message:
    """Return one message.

    Raises:
        ImageError: if it is not what it must be.
    """
    message = message_class(kind)()
    try:
        message.ParseFromString(encoded)
    except DecodeError as error:
        raise ImageError(f"{name} is damaged at byte {position}") from error
    if not message.IsInitialized():  # an empty message parses, whatever it requires
        raise ImageError(f"{name} is damaged at byte {position}: a field is missing")
    return message


def messages(
    data: bytes, name: str, magic: tuple[int, int], kinds: tuple[str, str], *, limit_bytes: int = _MAX_MESSAGE_BYTES
) -> Iterator[Message]:
    """Yield the first message as kinds[0], all others as kinds[1]; none may be larger than the limit.

    Raises:
        ImageError: if the magics or any message are not what they must be.
    """
    kind = kinds[0]
    for position, encoded in frames(data, name, magic, limit_bytes=limit_bytes):
        yield decode(kind, encoded, name, position)
        kind = kinds[1]


def parse_pagemap(data: bytes, name: str = "pagemap") -> Pagemap:
    """Read a pagemap image.

    Raises:
        ImageError: if it is damaged, or larger than any that CRIU writes.
    """
    if len(data) > _MAX_PAGEMAP_BYTES:
        raise ImageError(f"{name} is larger than {_MAX_PAGEMAP_BYTES} bytes")
    head, entries = _open_pagemap(data, name)
    pages = 0
    is_compressed = False
    for entry in entries:
        run = _run(entry)
        pages += run.pages if run.is_present else 0
        is_compressed = is_compressed or len(UnknownFieldSet(entry)) > 0
    return Pagemap(f"pages-{head.pages_id}.img", pages * PAGE_BYTES, is_compressed)  # type: ignore[attr-defined]


def pages_name_in(data: bytes, name: str = "pagemap") -> str:
    """Return the name of the page image that a pagemap image is of; its entries are not read.

    Raises:
        ImageError: if its head is damaged.
    """
    return f"pages-{_open_pagemap(data, name)[0].pages_id}.img"  # type: ignore[attr-defined]


def _open_pagemap(data: bytes, name: str) -> tuple[Message, Iterator[Message]]:
    """Return the head of a pagemap image and its entries."""
    found = messages(data, name, (COMMON_MAGIC, _PAGEMAP_MAGIC), ("pagemap_head", "pagemap_entry"))
    head = next(found, None)
    if head is None:
        raise ImageError(f"{name} is empty")
    return head, found


def _run(entry: Message) -> PageRun:
    # 4.2 and later write nr_pages, older ones only compat_nr_pages.
    pages = entry.nr_pages if entry.HasField("nr_pages") else entry.compat_nr_pages  # type: ignore[attr-defined]
    has_flags = entry.HasField("flags")
    is_present = bool(entry.flags & _PE_PRESENT) if has_flags else not entry.in_parent  # type: ignore[attr-defined]
    return PageRun(entry.vaddr, pages, is_present)  # type: ignore[attr-defined]


def parse_runs(data: bytes, name: str = "pagemap") -> Iterator[PageRun]:
    """Yield the runs of a pagemap image, in the order of their pages in the page image. There may be millions.

    Raises:
        ImageError: if it is damaged, after what comes before.
    """
    return map(_run, _open_pagemap(data, name)[1])


def join_pagemap(data: bytes, name: str = "pagemap") -> bytes:
    """Return a pagemap image in which adjacent runs are one, as CRIU writes a run for each MiB: to be read repeatedly.

    One with fields that are not known is returned as it is.

    Raises:
        ImageError: if it is damaged.
    """
    head, entries = _open_pagemap(data, name)
    made = bytearray(_TWO_MAGICS.pack(COMMON_MAGIC, _PAGEMAP_MAGIC) + _framed(head))
    last, first, pages, kind = None, 0, 0, None  # an entry; where it and what continues it begin, and their pages
    for entry in entries:
        if len(UnknownFieldSet(entry)):
            return data
        run, its_kind = _run(entry), _kind(entry)
        if last is not None:
            continues = run.vaddr == first + pages * PAGE_BYTES and its_kind == kind
            if continues and pages + run.pages <= _MOST_PAGES:
                pages += run.pages
                continue
            _set_run(last, first, pages)
            made += _framed(last)
        last, first, pages, kind = entry, run.vaddr, run.pages, its_kind
    if last is not None:
        _set_run(last, first, pages)
        made += _framed(last)
    return bytes(made)


def _kind(entry: Message) -> tuple[bool, int, bool, bool]:
    is_new = entry.HasField("nr_pages")
    return is_new, entry.flags, entry.in_parent, entry.HasField("flags")  # type: ignore[attr-defined]


def cut_pagemap(data: bytes, gone: Iterable[tuple[int, int]], pages_id: int, name: str = "pagemap") -> bytes:
    """Return a pagemap image without some of its addresses, which names page image `pages_id`.

    Args:
        data: as CRIU wrote it.
        gone: start and end of what is left out, in the order of addresses.
        pages_id: number of the page image that has what is left, without gaps.
        name: in errors.

    Raises:
        ImageError: if it is damaged.
    """
    head, entries = _open_pagemap(data, name)
    head.pages_id = pages_id  # type: ignore[attr-defined]
    made = bytearray(_TWO_MAGICS.pack(COMMON_MAGIC, _PAGEMAP_MAGIC) + _framed(head))
    rest = deque(gone)
    for entry in entries:
        vaddr, pages, _ = _run(entry)
        for start, end in _left(vaddr, vaddr + pages * PAGE_BYTES, rest):
            _set_run(entry, start, (end - start) // PAGE_BYTES)
            made += _framed(entry)
    return bytes(made)


def make_pagemap(runs: Iterable[tuple[int, int]], pages_id: int) -> bytes:
    """Return a pagemap image of memory that page image `pages_id` has, given start and end of each run."""
    made = bytearray(_TWO_MAGICS.pack(COMMON_MAGIC, _PAGEMAP_MAGIC))
    made += _framed(message_class("pagemap_head")(pages_id=pages_id))
    for start, end in runs:
        entry = message_class("pagemap_entry")(nr_pages=0, flags=_PE_PRESENT)
        _set_run(entry, start, (end - start) // PAGE_BYTES)
        made += _framed(entry)
    return bytes(made)


def complete_pagemap(data: bytes, name: str = "pagemap") -> bytes:
    """Return a pagemap image whose page image has all pages, those too that were in a parent's.

    Raises:
        ImageError: if it is damaged.
    """
    head, entries = _open_pagemap(data, name)
    made = bytearray(_TWO_MAGICS.pack(COMMON_MAGIC, _PAGEMAP_MAGIC) + _framed(head))
    for entry in entries:
        if entry.HasField("flags"):
            entry.flags = entry.flags & ~_PE_PARENT | _PE_PRESENT  # type: ignore[attr-defined]
        entry.ClearField("in_parent")
        made += _framed(entry)
    return bytes(made)


def _left(start: int, end: int, gone: deque[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield what is left of a run; entries of `gone` that end before it does are dropped."""
    while gone and gone[0][0] < end:
        low, high = gone[0]
        if start < low:
            yield start, low
        start = max(start, min(high, end))
        if high > end:
            break
        gone.popleft()
    if start < end:
        yield start, end


def _framed(message: Message) -> bytes:
    data = message.SerializeToString()
    return _U32.pack(len(data)) + data


def _set_run(entry: Message, vaddr: int, pages: int) -> None:
    entry.vaddr = vaddr  # type: ignore[attr-defined]
    if entry.HasField("nr_pages"):
        entry.nr_pages = pages  # type: ignore[attr-defined]
        pages &= 0xFFFFFFFF
    entry.compat_nr_pages = pages  # type: ignore[attr-defined]


def parse_processes(data: bytes) -> list[Process]:
    """Read pstree.img.

    Raises:
        ImageError: if it is damaged, or larger than any that CRIU writes.
    """
    if len(data) > _MAX_PSTREE_BYTES:
        raise ImageError(f"pstree.img is larger than {_MAX_PSTREE_BYTES} bytes")
    found = messages(data, "pstree.img", (COMMON_MAGIC, _PSTREE_MAGIC), ("pstree_entry", "pstree_entry"))
    return [Process(m.pid, m.ppid, tuple(m.threads)) for m in found]  # type: ignore[attr-defined]


def parse_dump_stats(data: bytes) -> DumpStats:
    """Read stats-dump.

    Raises:
        ImageError: if it is damaged.
    """
    message = next(messages(data, "stats-dump", (_SERVICE_MAGIC, _STATS_MAGIC), ("stats_entry", "stats_entry")), None)
    if message is None or not message.HasField("dump"):
        raise ImageError("stats-dump has no statistics of a dump")
    dump = message.dump  # type: ignore[attr-defined]
    return DumpStats(dump.freezing_time, dump.frozen_time, dump.memdump_time, dump.memwrite_time, dump.pages_written)


def parse_restore_stats(data: bytes) -> RestoreStats:
    """Read stats-restore.

    Raises:
        ImageError: if it is damaged.
    """
    kinds = ("stats_entry", "stats_entry")
    message = next(messages(data, "stats-restore", (_SERVICE_MAGIC, _STATS_MAGIC), kinds), None)
    if message is None or not message.HasField("restore"):
        raise ImageError("stats-restore has no statistics of a restore")
    restore = message.restore  # type: ignore[attr-defined]
    return RestoreStats(restore.forking_time, restore.restore_time, restore.pages_restored)


def read_pagemaps(directory: Path) -> dict[str, Pagemap]:
    """Read every pagemap image of an image set, by file name.

    Raises:
        ImageError: if one is damaged.
    """
    return {path.name: read_pagemap(path) for path in sorted(directory.glob("pagemap-*.img")) if path.is_file()}


def read_pagemap(path: Path) -> Pagemap:
    """Read one pagemap image.

    Raises:
        ImageError: if it is damaged.
    """
    return parse_pagemap(read_bounded(path), path.name)


def read_runs(path: Path) -> Iterator[PageRun]:
    """Yield the runs of a pagemap image as `parse_runs` does."""
    return parse_runs(read_bounded(path), path.name)


def read_bounded(path: Path, limit_bytes: int = _MAX_PAGEMAP_BYTES) -> bytes:
    """Return an image; of one that is too large a byte more than the limit, which its reader refuses."""
    with path.open("rb") as file:
        # Not more than its size: a read allocates as much memory as it is asked for.
        return file.read(min(os.fstat(file.fileno()).st_size, limit_bytes) + 1)


def page_images(directory: Path) -> list[str]:
    """Return the names of the page images in `directory`."""
    return sorted(entry.name for entry in os.scandir(directory) if PAGES_NAME.fullmatch(entry.name))


def check_page_images(directory: Path, elsewhere: Mapping[str, int] = MappingProxyType({})) -> None:
    """Check that each page image is there and as large as its pagemap says: CRIU itself takes a missing one as empty.

    Args:
        directory: the image set.
        elsewhere: sizes in bytes of page images, by name, that are in packs, whatever is left of them in the directory.

    Raises:
        ImageError: naming the first that is not.
    """
    pagemaps = read_pagemaps(directory)
    sizes = {}
    for pagemap in pagemaps.values():
        with contextlib.suppress(FileNotFoundError):
            sizes[pagemap.pages_name] = os.stat(directory / pagemap.pages_name, follow_symlinks=True).st_size
    check_page_sizes(pagemaps, sizes | dict(elsewhere))


def check_page_sizes(pagemaps: Mapping[str, Pagemap], sizes: Mapping[str, int]) -> None:
    """Check the sizes in bytes of page images, wherever they are kept, against their pagemaps (by file name).

    Raises:
        ImageError: naming the first that is missing, too short or too long.
    """
    for name, pagemap in pagemaps.items():
        if pagemap.is_compressed:
            continue
        size = sizes.get(pagemap.pages_name, 0)
        if size != pagemap.present_bytes:
            raise ImageError(
                f"{pagemap.pages_name} has {size} bytes, {name} says {pagemap.present_bytes}",
                hint="the checkpoint is incomplete; use another copy of it",
            )


def check_named(pagemaps: Mapping[str, Pagemap], names: Iterable[str]) -> None:
    """Check that pagemaps (by file name) name each of these page images; else anything could be claimed of them.

    Raises:
        ImageError: naming the first that they do not.
    """
    known = {pagemap.pages_name for pagemap in pagemaps.values()}
    for name in names:
        if name not in known:
            raise ImageError(f"no pagemap is there that names {name}", hint="use another copy of the checkpoint")
