"""Which memory is read past CRIU, and the earlier dump that is made up of it."""

import ctypes
import mmap
import os
import random
import subprocess
import time
from itertools import pairwise
from pathlib import Path

import pytest

from ocihook.criu.images import make_pagemap, page_images, parse_runs, read_runs
from ocihook.criu.parent_images import LINK_NAME, has_parent, make_parent, remove_parent
from ocihook.linux.memory import Span, read_detailed_mappings, subtract
from ocihook.linux.page_scan import _GUARD, _unwanted, anonymous_bytes, private_spans, scan_private
from ocihook.linux.patience import ENDLESS
from ocihook.memory.clean_pages import ReadPages
from ocihook.session.journal import Journal
from ocihook.session.participant import Dump

PAGE = mmap.PAGESIZE
_PROT_NONE, _MAP_FIXED = 0, 0x10  # mmap(2)
_MADV_GUARD_INSTALL = 102  # madvise(2)
_libc = ctypes.CDLL(None)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]


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


def within(spans: list[Span], start: int, pages: int) -> list[Span]:
    """Return those in a region: what Python maps beside it meanwhile does not matter."""
    return [span for span in spans if start <= span.start < start + pages * PAGE]


@pytest.mark.parametrize("seed", range(12))
def test_random_mappings_against_smaps(seed: int, tmp_path: Path) -> None:
    """Each mapping has as much as the kernel counts as anonymous there; what cannot be read, or is shared, is none."""
    chance = random.Random(seed)
    pages = 3072  # room for huge pages, too
    region = mmap.mmap(-1, pages * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = ctypes.addressof(ctypes.c_char.from_buffer(region))
    (tmp_path / "file").write_bytes(bytes(range(256)) * (pages * PAGE // 256))
    file = os.open(tmp_path / "file", os.O_RDWR)
    edges = [0, *sorted(chance.sample(range(1, pages), chance.randrange(1, 30))), pages]
    protections = []
    for first, end in pairwise(edges):
        place, size = ctypes.c_void_p(start + first * PAGE), ctypes.c_size_t((end - first) * PAGE)
        kind = chance.choice(["plain", "plain", "small", "huge", "file", "shared"])
        if kind in ("file", "shared"):
            share = mmap.MAP_SHARED if kind == "shared" else mmap.MAP_PRIVATE
            made = _libc.mmap(place, size, mmap.PROT_READ | mmap.PROT_WRITE, share | _MAP_FIXED, file, first * PAGE)
            assert made == place.value
        elif kind != "plain":
            assert not _libc.madvise(place, size, mmap.MADV_HUGEPAGE if kind == "huge" else mmap.MADV_NOHUGEPAGE)
        density = chance.choice([0.0, 0.02, 0.5, 1.0])
        for page in range(first, end):
            if chance.random() < density:
                region[page * PAGE] = chance.randrange(256)  # zeros, too
            elif chance.random() < 0.1:
                region[page * PAGE + 1]  # a zero page, or one of the file
        if chance.random() < 0.3:
            low = chance.randrange(first, end)
            assert not _libc.madvise(
                ctypes.c_void_p(start + low * PAGE), ctypes.c_size_t((end - low + 1) // 2 * PAGE), mmap.MADV_DONTNEED
            )
        protections.append((place, size, chance.choice([_PROT_NONE, mmap.PROT_READ, None, None])))
    for place, size, protection in protections:
        if protection is not None:
            assert not _libc.mprotect(place, size, protection)
    for edge in (0, pages - 1):  # so that none of these is one with what lies beside them
        assert not _libc.mprotect(ctypes.c_void_p(start + edge * PAGE), ctypes.c_size_t(PAGE), _PROT_NONE)
    os.close(file)

    found = scan_private(os.getpid())
    assert not subtract(within(found, start, pages), private_spans(os.getpid()))
    inside = [
        row
        for row in read_detailed_mappings(os.getpid())
        if start < row.mapping.span.start < start + (pages - 1) * PAGE
    ]
    assert inside
    for mapping, anonymous_size, _ in inside:
        is_read = mapping.mode[0] == "r" and mapping.mode[3] == "p"
        common = [min(run.end, mapping.span.end) - max(run.start, mapping.span.start) for run in found]
        assert sum(size for size in common if size > 0) == (anonymous_size if is_read else 0), mapping


def test_private_mappings_below_dev_are_memory_and_guard_pages_are_not(tmp_path: Path) -> None:
    size = 4 * PAGE
    path = Path("/dev/shm") / f"ocihook-test-{os.getpid()}"
    path.write_bytes(bytes(size))
    parts = []
    try:
        for name in (path, Path("/dev/zero")):
            with name.open("r+b") as file:
                parts.append(mmap.mmap(file.fileno(), size, flags=mmap.MAP_PRIVATE))
    finally:
        path.unlink()
    parts.append(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    for part in parts:
        part[:] = b"x" * size
    starts = [ctypes.addressof(ctypes.c_char.from_buffer(part)) for part in parts]
    has_guards = not _libc.madvise(ctypes.c_void_p(starts[2] + PAGE), ctypes.c_size_t(PAGE), _MADV_GUARD_INSTALL)
    found = scan_private(os.getpid())
    for start in starts[:2]:
        assert any(run.start <= start and start + size <= run.end for run in found)
    wanted = [Span(starts[2], starts[2] + PAGE), Span(starts[2] + 2 * PAGE, starts[2] + size)]
    whole = [Span(starts[2], starts[2] + size)]
    assert not subtract(wanted, found)
    if has_guards and _unwanted() & _GUARD:  # both came with different versions of the kernel
        assert subtract(whole, found) == [Span(starts[2] + PAGE, starts[2] + 2 * PAGE)]


def test_a_process_that_is_gone() -> None:
    child = subprocess.Popen(["true"])
    child.wait(60)
    assert anonymous_bytes(child.pid) == 0
    with pytest.raises(OSError, match="No such"):
        scan_private(child.pid)


def test_a_pagemap_is_what_was_given() -> None:
    runs = [(n << 13, (n << 13) + PAGE) for n in range(1, 2000)]
    assert [(r.vaddr, r.vaddr + PAGE) for r in parse_runs(make_pagemap(runs, 1))] == runs
