"""Reads CRIU's images of address spaces: what each dumped process had mapped, and which of it is plain memory."""

import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

from ocihook.criu.images import COMMON_MAGIC, messages, parse_processes, read_bounded
from ocihook.errors import ImageError
from ocihook.linux.files import replace_file

MM_NAME = re.compile(r"mm-([0-9]{1,10})\.img")
_MM_MAGIC = 0x57492820  # criu/include/magic.h
_MAGICS = (COMMON_MAGIC, _MM_MAGIC)
# criu/include/image.h: AREA_REGULAR, AREA_HEAP, ANON_PRIVATE. An area with any other status is not plain memory.
_REGULAR, _HEAP, _ANON_PRIVATE = 1 << 0, 1 << 5, 1 << 9
_READ_WRITE = 0x1 | 0x2  # PROT_READ, PROT_WRITE
# mmap(2): MAP_PRIVATE, MAP_ANONYMOUS; neither locked, nor growing down, nor of huge pages.
_PRIVATE_ANONYMOUS, _NO_RESERVE = 0x02 | 0x20, 0x4000  # the last one makes no difference
_WIPE_ON_FORK = 18  # madvise(2)
_MAX_MM_BYTES = 32 << 20  # 65530 areas, as the kernel allows by default, take 4 MiB


class Area(NamedTuple):
    """Addresses that were mapped as one."""

    start: int
    end: int
    is_plain: bool  # private, anonymous, readable and writable, and nothing else


class AddressSpace(NamedTuple):
    """What a process had mapped, in the order of addresses."""

    executable: int  # CRIU's number of the file
    areas: tuple[Area, ...]


def parse_address_space(data: bytes, name: str = "mm") -> AddressSpace:
    """Read an mm image.

    Raises:
        ImageError: if it is damaged, or larger than any that CRIU writes.
    """
    if len(data) > _MAX_MM_BYTES:
        raise ImageError(f"{name} is larger than {_MAX_MM_BYTES} bytes")
    kinds = ("mm_entry", "mm_entry")
    mm = next(messages(data, name, (COMMON_MAGIC, _MM_MAGIC), kinds, limit_bytes=_MAX_MM_BYTES), None)
    if mm is None:
        raise ImageError(f"{name} is empty")
    areas = tuple(Area(v.start, v.end, _is_plain(v.prot, v.flags, v.status)) for v in mm.vmas)  # type: ignore[attr-defined]
    return AddressSpace(mm.exe_file_id, areas)  # type: ignore[attr-defined]


def _is_plain(prot: int, flags: int, status: int) -> bool:
    kinds = status & ~_HEAP
    return prot == _READ_WRITE and flags & ~_NO_RESERVE == _PRIVATE_ANONYMOUS and kinds == _REGULAR | _ANON_PRIVATE


def read_address_spaces(directory: Path) -> Mapping[int, AddressSpace]:
    """Read the address spaces of all processes of an image set, by CRIU's pids.

    Raises:
        ImageError: if one is damaged.
        OSError: from the file system.
    """
    found = {}
    for path in directory.glob("mm-*.img"):
        if number := MM_NAME.fullmatch(path.name):
            found[int(number[1])] = parse_address_space(read_bounded(path, _MAX_MM_BYTES), path.name)
    return found


def mark_wiped(directory: Path, pid: int, spans: Iterable[tuple[int, int]]) -> None:
    """Have CRIU set MADV_WIPEONFORK, as an image of CRIU 4.2 says it; earlier ones restore that, and do not write it.

    Args:
        directory: the image set.
        pid: CRIU's, of the process.
        spans: addresses of the memory.

    Raises:
        ImageError: if the image is damaged.
        OSError: from the file system.
    """
    path, wiped = directory / f"mm-{pid}.img", list(spans)
    data = read_bounded(path, _MAX_MM_BYTES)
    (mm,) = messages(data, path.name, _MAGICS, ("mm_entry", "mm_entry"), limit_bytes=_MAX_MM_BYTES)
    for area in mm.vmas:  # type: ignore[attr-defined]
        if any(start <= area.start and area.end <= end for start, end in wiped):
            area.madv |= 1 << _WIPE_ON_FORK
    body = mm.SerializeToString()
    head = b"".join(number.to_bytes(4, "little") for number in (*_MAGICS, len(body)))
    replace_file(path, head + body, mode=path.stat().st_mode & 0o777, durable=False)


def check_mapped(directory: Path, regions: Iterable[tuple[int, int, int]]) -> None:
    """Check that memory which went past CRIU lies in areas that CRIU has listed of its process, and will map again.

    Args:
        directory: the image set.
        regions: CRIU's pid of the process, address and bytes of each. Of a process that CRIU lists no memory of, which
            it does not restore either, nothing is known.

    Raises:
        ImageError: naming memory that its process had not mapped, or if an image is damaged.
        OSError: from the file system.
    """
    for pid, group in groupby(sorted(regions), key=lambda region: region[0]):
        path = directory / f"mm-{pid}.img"
        if not path.exists():
            continue
        mapped: list[tuple[int, int]] = []  # adjacent areas joined, since they may have been one
        for low, high, _ in sorted(parse_address_space(read_bounded(path, _MAX_MM_BYTES), path.name).areas):
            if mapped and low <= mapped[-1][1]:
                mapped[-1] = mapped[-1][0], max(high, mapped[-1][1])
            else:
                mapped.append((low, high))
        for _, start, size_bytes in group:
            number = bisect_right(mapped, start, key=itemgetter(0)) - 1
            if number < 0 or start + size_bytes > mapped[number][1]:
                raise ImageError(
                    f"the manifest has {size_bytes} bytes of memory of process {pid} at {start:#x}, which {path.name} "
                    "does not list as mapped",
                    hint="use another copy of the checkpoint",
                )


def read_parents(directory: Path) -> Mapping[int, int]:
    """Return the parent of each process of an image set, by CRIU's pids.

    Raises:
        ImageError: if the image is damaged.
        OSError: from the file system.
    """
    return {process.pid: process.ppid for process in parse_processes((directory / "pstree.img").read_bytes())}
