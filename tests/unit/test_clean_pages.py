"""Which memory is read past CRIU, and the earlier dump that is made up of it."""

import ctypes
import mmap
import os
import subprocess
import time
from itertools import pairwise
from pathlib import Path

import pytest

from ocihook.criu.images import make_pagemap, page_images, parse_runs, read_runs
from ocihook.criu.parent_images import LINK_NAME, has_parent, make_parent, remove_parent
from ocihook.linux.page_scan import anonymous_bytes, scan_private
from ocihook.linux.patience import ENDLESS
from ocihook.memory.clean_pages import ReadPages
from ocihook.session.journal import Journal
from ocihook.session.participant import Dump

PAGE = mmap.PAGESIZE


def test_a_parent_says_what_there_is_and_when(tmp_path: Path) -> None:
    runs = [(1 << 40, (1 << 40) + 3 * PAGE), (1 << 41, (1 << 41) + (1 << 33))]
    make_parent(tmp_path, {7: make_pagemap(runs, 1), 12: make_pagemap([], 1)})
    parent = tmp_path / LINK_NAME
    assert [(r.vaddr, r.vaddr + r.pages * PAGE, r.is_present) for r in read_runs(parent / "pagemap-7.img")] == [
        (*run, True) for run in runs
    ]
    assert list(read_runs(parent / "pagemap-12.img")) == []
    assert page_images(parent) == ["pages-1.img"]
    assert (parent / "pages-1.img").stat().st_size == 0
    inventory = (parent / "inventory.img").read_bytes()
    assert inventory[:4] == bytes.fromhex("16313158")  # INVENTORY_MAGIC
    assert int.from_bytes(inventory[4:8], "little") == len(inventory) - 8
    assert inventory[8:11] == bytes([0x08, 2, 0x40])  # img_version 2, dump_uptime
    made_us = sum((byte & 0x7F) << 7 * place for place, byte in enumerate(inventory[11:]))
    now_us = time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1000
    assert 0 <= now_us - made_us < 600e6


def test_only_what_was_made_here_is_removed(tmp_path: Path) -> None:
    remove_parent(tmp_path)
    for nowhere in ("/", os.path.relpath("/", tmp_path.resolve())):
        (tmp_path / LINK_NAME).symlink_to(nowhere)
        assert not has_parent(tmp_path)
        remove_parent(tmp_path)
    make_parent(tmp_path, {1: make_pagemap([], 1)})
    assert not has_parent(tmp_path)
    (tmp_path / LINK_NAME).unlink()  # as when it is interrupted
    (tmp_path / LINK_NAME).symlink_to("../of-the-engine")
    remove_parent(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [LINK_NAME]
    assert has_parent(tmp_path)


def test_a_dump_that_reads_no_memory_finds_no_parent_that_was_made_here(tmp_path: Path) -> None:
    """The node's power has gone in an earlier dump into the directory: CRIU would leave out what is in no image."""
    make_parent(tmp_path, {1: make_pagemap([(1 << 40, 1 << 41)], 1)})
    dump = Dump(Journal(tmp_path / "journal", {"effects": []}), ENDLESS, 0, 0, str(tmp_path), tmp_path)
    assert not dump.reads_memory
    ReadPages().hold(dump)
    assert list(tmp_path.iterdir()) == []


def test_what_is_there_of_private_memory_is_found(tmp_path: Path) -> None:
    """All pages that are this process's own, in the places where a child has made them."""
    size = 64 * PAGE
    own = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    shared = mmap.mmap(-1, size)
    (tmp_path / "file").write_bytes(bytes(size))
    with (tmp_path / "file").open("r+b") as file:
        copied = mmap.mmap(file.fileno(), size, flags=mmap.MAP_PRIVATE)
    for page in (0, 1, 2, 40, 63):
        own[page * PAGE] = shared[page * PAGE] = 1
    own.madvise(mmap.MADV_DONTNEED, PAGE, PAGE)
    assert own[20 * PAGE] == 0, "a zero page"
    assert copied[5 * PAGE] == 0, "a page of the file"
    copied[9 * PAGE] = 1
    address = {part: ctypes.addressof(ctypes.c_char.from_buffer(part)) for part in (own, shared, copied)}
    found = scan_private(os.getpid())
    assert found == sorted(found)
    assert all(one.end < after.start for one, after in pairwise(found))

    def pages_of(part: mmap.mmap) -> list[int]:
        start = address[part]
        return [n for n in range(64) if any(run.start <= start + n * PAGE < run.end for run in found)]

    assert pages_of(own) == [0, 2, 40, 63]
    assert pages_of(copied) == [9]
    assert pages_of(shared) == []
    assert 0 < anonymous_bytes(os.getpid()) <= sum(run.size_bytes for run in found) + (64 << 20)
    vdso = next(line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith("[vdso]"))
    start, end = (int(number, 16) for number in vdso.split()[0].split("-"))
    assert any(run.start <= start and end <= run.end for run in found)


def test_a_process_that_is_gone() -> None:
    child = subprocess.Popen(["true"])
    child.wait(60)
    assert anonymous_bytes(child.pid) == 0
    with pytest.raises(OSError, match="No such"):
        scan_private(child.pid)


def test_a_pagemap_is_what_was_given() -> None:
    runs = [(n << 13, (n << 13) + PAGE) for n in range(1, 2000)]
    assert [(r.vaddr, r.vaddr + PAGE) for r in parse_runs(make_pagemap(runs, 1))] == runs
