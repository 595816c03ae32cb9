"""CRIU's images, made here from CRIU's own message definitions: what is read from them, and what is refused."""

import struct
from pathlib import Path
from typing import Any

import pytest

from ocihook.criu.images import (
    PAGE_BYTES,
    DumpStats,
    Pagemap,
    PageRun,
    Process,
    check_page_images,
    join_pagemap,
    page_images,
    parse_dump_stats,
    parse_pagemap,
    parse_processes,
    parse_runs,
    read_pagemaps,
)
from ocihook.criu.proto import message_class
from ocihook.errors import ImageError
from tests.memory_bound import run_within

PAGEMAP = struct.pack("<II", 0x54564319, 0x56084025)
PSTREE = struct.pack("<II", 0x54564319, 0x50273030)
STATS = struct.pack("<II", 0x55105940, 0x57093306)
PRESENT = 4  # PE_PRESENT


def framed(data: bytes) -> bytes:
    return struct.pack("<I", len(data)) + data


def message(kind: str, **fields: Any) -> bytes:
    return framed(message_class(kind)(**fields).SerializeToString())


def pagemap(*entries: dict[str, Any], pages_id: int = 1) -> bytes:
    return (
        PAGEMAP
        + message("pagemap_head", pages_id=pages_id)
        + b"".join(message("pagemap_entry", **entry) for entry in entries)
    )


def test_a_pagemap_of_each_age() -> None:
    data = pagemap(
        {"vaddr": 0x1000, "compat_nr_pages": 2},  # before flags
        {"vaddr": 0x2000, "compat_nr_pages": 3, "in_parent": True},
        {"vaddr": 0x3000, "compat_nr_pages": 4, "flags": PRESENT},
        {"vaddr": 0x4000, "compat_nr_pages": 5, "flags": 1},  # in the parent
        {"vaddr": 0x5000, "compat_nr_pages": 0, "nr_pages": 1 << 33, "flags": PRESENT | 2},  # 4.2; lazy too
        pages_id=7,
    )
    assert list(parse_runs(data)) == [
        PageRun(0x1000, 2, is_present=True),
        PageRun(0x2000, 3, is_present=False),
        PageRun(0x3000, 4, is_present=True),
        PageRun(0x4000, 5, is_present=False),
        PageRun(0x5000, 1 << 33, is_present=True),
    ]
    assert parse_pagemap(data) == Pagemap("pages-7.img", (2 + 4 + (1 << 33)) * PAGE_BYTES, is_compressed=False)


def test_adjacent_runs_are_joined_if_they_are_of_one_kind() -> None:
    mib = [{"vaddr": at << 20, "compat_nr_pages": 256, "flags": PRESENT} for at in range(1, 5)]
    other = {"vaddr": 5 << 20, "compat_nr_pages": 1, "flags": 1}  # in the parent
    apart = {"vaddr": (5 << 20) + 2 * PAGE_BYTES, "compat_nr_pages": 1, "flags": PRESENT}
    long = {"vaddr": (5 << 20) + 3 * PAGE_BYTES, "compat_nr_pages": (1 << 32) - 1, "flags": PRESENT}
    newer = {"vaddr": 1 << 46, "compat_nr_pages": 0, "nr_pages": 2, "flags": PRESENT}
    last = {**newer, "vaddr": (1 << 46) + 2 * PAGE_BYTES}
    data = pagemap(*mib, other, apart, long, newer, last, pages_id=3)
    joined = join_pagemap(data)
    assert list(parse_runs(joined)) == [
        PageRun(1 << 20, 1024, is_present=True),
        PageRun(5 << 20, 1, is_present=False),
        PageRun((5 << 20) + 2 * PAGE_BYTES, 1, is_present=True),
        PageRun((5 << 20) + 3 * PAGE_BYTES, (1 << 32) - 1, is_present=True),
        PageRun(1 << 46, 4, is_present=True),
    ]
    assert parse_pagemap(joined) == parse_pagemap(data)
    assert join_pagemap(joined) == joined
    assert join_pagemap(pagemap()) == pagemap()
    opaque = data + framed(message_class("pagemap_entry")(**mib[0]).SerializeToString() + b"\x40\x05")
    assert join_pagemap(opaque) == opaque


def test_of_a_pagemap_nothing_is_kept_but_sums(tmp_path: Path) -> None:
    """It may have millions of runs, and a container as many processes as it likes."""
    runs = 400_000
    entry = message("pagemap_entry", vaddr=0x1000, compat_nr_pages=1000, flags=PRESENT)
    (tmp_path / "pagemap-1.img").write_bytes(pagemap() + entry * runs)
    program = "print(sum(p.present_bytes for p in read_pagemaps(Path(sys.argv[1])).values()))"
    before = "from pathlib import Path; from ocihook.criu.images import read_pagemaps"
    assert int(run_within(40 << 20, program, tmp_path, before=before)) == runs * 1000 * PAGE_BYTES


def test_a_pagemap_without_memory() -> None:
    assert parse_pagemap(pagemap()) == Pagemap("pages-1.img", 0, is_compressed=False)


def test_a_field_of_later_criu_means_that_its_pages_are_opaque() -> None:
    entry = message_class("pagemap_entry")(vaddr=0, compat_nr_pages=1, flags=PRESENT).SerializeToString()
    unknown = b"\x40\x05"  # field 8, a varint
    assert parse_pagemap(pagemap() + framed(entry + unknown)).is_compressed


def test_processes() -> None:
    data = (
        PSTREE
        + message("pstree_entry", pid=1, ppid=0, pgid=1, sid=1, threads=[1, 5, 6])
        + message("pstree_entry", pid=7, ppid=1, pgid=1, sid=1, threads=[7])
    )
    assert parse_processes(data) == [Process(1, 0, (1, 5, 6)), Process(7, 1, (7,))]


def test_statistics_of_a_dump() -> None:
    dump = {
        "freezing_time": 1, "frozen_time": 2, "memdump_time": 3, "memwrite_time": 4,
        "pages_scanned": 5, "pages_skipped_parent": 6, "pages_written": 7, "pages_lazy": 8,
    }  # fmt: skip
    assert parse_dump_stats(STATS + message("stats_entry", dump=dump)) == DumpStats(1, 2, 3, 4, 7)


def test_statistics_of_a_restore_are_not_those_of_a_dump() -> None:
    restore = {"pages_compared": 1, "pages_skipped_cow": 2, "forking_time": 3, "restore_time": 4}
    for data in (STATS, STATS + message("stats_entry", restore=restore)):
        with pytest.raises(ImageError, match="no statistics of a dump"):
            parse_dump_stats(data)


@pytest.mark.parametrize("parse", [parse_pagemap, parse_processes, parse_dump_stats])
@pytest.mark.parametrize("data", [b"", b"\0" * 7, b"\0" * 8, PAGEMAP[:7], PAGEMAP[::-1]])
def test_what_does_not_begin_as_its_kind(parse: Any, data: bytes) -> None:
    with pytest.raises(ImageError, match="does not begin"):
        parse(data)


def test_one_kind_is_not_taken_for_another() -> None:
    with pytest.raises(ImageError, match="does not begin"):
        parse_pagemap(PSTREE + pagemap()[8:])


def test_a_pagemap_cut_anywhere_but_between_messages_is_refused() -> None:
    data = pagemap({"vaddr": 0x1000, "compat_nr_pages": 2}, {"vaddr": 0x3000, "compat_nr_pages": 300})
    whole = {len(pagemap()), len(pagemap({"vaddr": 0x1000, "compat_nr_pages": 2}))}
    for size in range(len(data)):
        if size in whole:
            assert parse_pagemap(data[:size]).present_bytes < 300 * PAGE_BYTES
            assert len(list(parse_runs(data[:size]))) < 2
        else:
            with pytest.raises(ImageError):
                parse_pagemap(data[:size])


@pytest.mark.parametrize(
    "tail",
    [
        b"\x01",
        struct.pack("<I", 5),
        struct.pack("<I", 2**32 - 1) + bytes(100),
        struct.pack("<I", (1 << 20) + 1) + bytes((1 << 20) + 1),  # larger than any message is
        framed(b""),  # its required fields are missing
        framed(b"\xff"),
        framed(b"\x08"),
    ],
)
def test_damaged_messages(tail: bytes) -> None:
    with pytest.raises(ImageError, match=r"pagemap-1\.img"):
        parse_pagemap(pagemap() + tail, "pagemap-1.img")


def image_set(directory: Path) -> None:
    entry = {"vaddr": 0x1000, "compat_nr_pages": 2, "flags": PRESENT}
    (directory / "pagemap-10.img").write_bytes(pagemap(entry, pages_id=1))
    (directory / "pagemap-shmem-5.img").write_bytes(pagemap(entry, entry, pages_id=2))
    (directory / "pages-1.img").write_bytes(bytes(2 * PAGE_BYTES))
    (directory / "pages-2.img").write_bytes(bytes(4 * PAGE_BYTES))
    (directory / "core-10.img").touch()


def test_an_image_set_that_is_complete(tmp_path: Path) -> None:
    image_set(tmp_path)
    check_page_images(tmp_path)
    assert page_images(tmp_path) == ["pages-1.img", "pages-2.img"]
    assert {name: p.pages_name for name, p in read_pagemaps(tmp_path).items()} == {
        "pagemap-10.img": "pages-1.img",
        "pagemap-shmem-5.img": "pages-2.img",
    }


def test_only_page_images_are_named(tmp_path: Path) -> None:
    for name in (
        "pages-1.img",
        "pages-1.img.partial",
        "pages-x.img",
        "pages-.img",
        "xpages-1.img",
        "pages-12345678901.img",
    ):
        (tmp_path / name).touch()
    assert page_images(tmp_path) == ["pages-1.img"]


@pytest.mark.parametrize("size", [None, 0, PAGE_BYTES, 2 * PAGE_BYTES - 1, 3 * PAGE_BYTES])
def test_a_page_image_of_a_wrong_size_is_named(tmp_path: Path, size: int | None) -> None:
    image_set(tmp_path)
    (tmp_path / "pages-1.img").unlink()
    if size is not None:
        (tmp_path / "pages-1.img").write_bytes(bytes(size))
    with pytest.raises(ImageError, match=rf"pages-1\.img has {size or 0} bytes, pagemap-10\.img says 8192"):
        check_page_images(tmp_path)


def test_no_page_image_is_needed_where_no_page_is_present(tmp_path: Path) -> None:
    (tmp_path / "pagemap-1.img").write_bytes(pagemap({"vaddr": 0, "compat_nr_pages": 9, "flags": 1}))
    check_page_images(tmp_path)


def test_the_size_of_an_opaque_page_image_is_not_known(tmp_path: Path) -> None:
    image_set(tmp_path)
    entry = message_class("pagemap_entry")(vaddr=0, compat_nr_pages=1, flags=PRESENT).SerializeToString()
    (tmp_path / "pagemap-10.img").write_bytes(pagemap() + framed(entry + b"\x40\x05"))
    (tmp_path / "pages-1.img").write_bytes(bytes(100))
    check_page_images(tmp_path)


def test_a_damaged_pagemap_is_named(tmp_path: Path) -> None:
    image_set(tmp_path)
    (tmp_path / "pagemap-10.img").write_bytes(b"")
    with pytest.raises(ImageError, match=r"pagemap-10\.img"):
        check_page_images(tmp_path)


def test_a_pagemap_larger_than_any_of_criu_is_refused_before_it_is_read(tmp_path: Path) -> None:
    with (tmp_path / "pagemap-1.img").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ImageError, match=r"pagemap-1.img is larger than 67108864 bytes"):
        read_pagemaps(tmp_path)
