"""Pagemaps that a restore has cut come back, whatever has happened since."""

import shutil
import struct
from pathlib import Path
from typing import Any

import pytest

from ocihook.criu.images import PAGE_BYTES, check_page_images, parse_runs
from ocihook.criu.proto import message_class
from ocihook.errors import ImageError
from ocihook.images import direct
from ocihook.images.direct import cut_pagemaps, is_cut, plan, put_back, read_cut, write_plain
from ocihook.linux.patience import ENDLESS
from ocihook.packs.pages import scattered
from tests.fakes.images import mixed_pages

COMMON = 0x54564319
START, PAGES = 0x10000000, 32
PLAIN: dict[str, int] = {"prot": 3, "flags": 0x22, "status": 1 | 1 << 9}


def message(kind: str, **fields: Any) -> bytes:
    data: bytes = message_class(kind)(**fields).SerializeToString()
    return struct.pack("<I", len(data)) + data


def image(magic: int, *messages: bytes) -> bytes:
    return struct.pack("<II", COMMON, magic) + b"".join(messages)


def make_process(directory: Path, *areas: tuple[int, int, dict[str, int]], flags: int = 4, pid: int = 1) -> bytes:
    """Write the images of a process with these areas (first page, pages, what they are), all of it dumped."""
    vmas = [
        message_class("vma_entry")(
            start=START + first * PAGE_BYTES, end=START + (first + count) * PAGE_BYTES, pgoff=0, shmid=0, fd=-1, **kind
        )
        for first, count, kind in areas
    ]
    numbers = ["start_code", "end_code", "start_data", "end_data", "start_stack", "start_brk", "brk"]
    numbers += ["arg_start", "arg_end", "env_start", "env_end"]
    mm = message("mm_entry", **{f"mm_{name}": 0 for name in numbers}, exe_file_id=1, vmas=vmas)
    (directory / f"mm-{pid}.img").write_bytes(image(0x57492820, mm))
    (directory / "pstree.img").write_bytes(
        image(0x50273030, message("pstree_entry", pid=pid, ppid=0, pgid=pid, sid=pid, threads=[pid]))
    )
    runs = [
        message("pagemap_entry", vaddr=START + first * PAGE_BYTES, compat_nr_pages=count, nr_pages=count, flags=flags)
        for first, count, _ in areas
    ]
    (directory / f"pagemap-{pid}.img").write_bytes(image(0x56084025, message("pagemap_head", pages_id=1), *runs))
    content = mixed_pages(sum(count for _, count, _ in areas))
    (directory / "pages-1.img").write_bytes(content)
    return content


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take memory of some pages for much."""
    monkeypatch.setattr(direct, "LEAST_RUN_BYTES", 8 * PAGE_BYTES)
    monkeypatch.setattr(direct, "LEAST_PROCESS_BYTES", 16 * PAGE_BYTES)
    monkeypatch.setattr(direct, "_BYTES_A_RUN", 0)


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


class Memory:
    """The memory of a process, from START on."""

    def __init__(self) -> None:
        self.data = bytearray(64 * PAGE_BYTES)

    def write(self, buffers: Any, address: int) -> int:
        content = b"".join(buffers)
        self.data[address - START : address - START + len(content)] = content
        return len(content)

    def close(self) -> None:
        """Nothing is held."""


def test_what_criu_finds_and_what_goes_past_it_are_all_memory(tmp_path: Path) -> None:
    content = make_process(tmp_path, (0, 4, PLAIN), (8, 20, PLAIN), (40, 10, PLAIN | {"prot": 1}))
    before = contents(tmp_path)
    cuts = plan(tmp_path, ())
    assert contents(tmp_path) == before
    cut_pagemaps(tmp_path, cuts, ENDLESS)
    check_page_images(tmp_path)
    assert is_cut(tmp_path)
    assert [(run.vaddr - START) // PAGE_BYTES for run in parse_runs((tmp_path / "pagemap-1.img").read_bytes())] == [
        0,
        40,
    ]
    assert (tmp_path / "pages-2.img").read_bytes() == content[: 4 * PAGE_BYTES] + content[24 * PAGE_BYTES :]
    (found,) = read_cut(tmp_path)
    memory = Memory()
    write_plain(tmp_path, {"pages-1.img": scattered(lambda: memory, found.parts)}, workers=1)
    assert memory.data[8 * PAGE_BYTES : 28 * PAGE_BYTES] == content[4 * PAGE_BYTES : 24 * PAGE_BYTES]
    assert not any(memory.data[: 8 * PAGE_BYTES])
    assert not any(memory.data[28 * PAGE_BYTES :])
    put_back(tmp_path)
    assert contents(tmp_path) == before
    put_back(tmp_path)
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    "other",
    [
        {"prot": 1},
        {"prot": 7},
        {"flags": 0x22 | 0x100},  # grows down
        {"flags": 0x22 | 0x2000},  # locked
        {"flags": 0x22 | 0x40000},  # huge pages
        {"flags": 0x21},
        {"status": 1 | 1 << 6},  # of a file
        {"status": 1 | 1 << 9 | 1 << 13},  # an AIO ring
        {"status": 1 | 1 << 9 | 1 << 15},  # a shadow stack
    ],
)
def test_what_is_no_plain_memory_is_left_to_criu(tmp_path: Path, other: dict[str, int]) -> None:
    make_process(tmp_path, (0, PAGES, PLAIN | other))
    assert plan(tmp_path, ["pages-1.img"]) == []


def test_pages_of_a_parent_are_left_to_criu(tmp_path: Path) -> None:
    make_process(tmp_path, (0, PAGES, PLAIN), flags=1)
    assert plan(tmp_path, ["pages-1.img"]) == []


def test_a_heap_and_memory_without_reserve_go_past_criu(tmp_path: Path) -> None:
    make_process(tmp_path, (0, 16, PLAIN | {"status": 1 | 1 << 5 | 1 << 9}), (20, 16, PLAIN | {"flags": 0x4022}))
    (cut,) = plan(tmp_path, ["pages-1.img"])
    assert cut.direct.parts.size_bytes == 32 * PAGE_BYTES


def test_a_new_dump_over_a_cut_pagemap_is_left(tmp_path: Path) -> None:
    make_process(tmp_path, (0, PAGES, PLAIN))
    cut_pagemaps(tmp_path, plan(tmp_path, ["pages-1.img"]), ENDLESS)
    make_process(tmp_path, (0, PAGES // 2, PLAIN))
    dumped = (tmp_path / "pagemap-1.img").read_bytes()
    put_back(tmp_path)
    assert not is_cut(tmp_path)
    assert (tmp_path / "pagemap-1.img").read_bytes() == dumped


@pytest.mark.parametrize("left", [b"", bytes(64), None])
def test_a_cut_pagemap_that_a_power_loss_has_spoilt_is_replaced(tmp_path: Path, left: bytes | None) -> None:
    make_process(tmp_path, (0, PAGES, PLAIN))
    before = contents(tmp_path)
    cut_pagemaps(tmp_path, plan(tmp_path, ["pages-1.img"]), ENDLESS)
    (tmp_path / "pagemap-1.img").unlink()
    if left is not None:
        (tmp_path / "pagemap-1.img").write_bytes(left)
    put_back(tmp_path)
    assert contents(tmp_path) == before


def test_an_engine_may_remove_the_directory_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = tmp_path / "images"
    images.mkdir()
    make_process(images, (0, PAGES, PLAIN))
    cut_pagemaps(images, plan(images, ["pages-1.img"]), ENDLESS)

    def remove_first(data: bytes) -> str:
        shutil.rmtree(images)
        return digest(data)

    digest = direct._digest
    monkeypatch.setattr(direct, "_digest", remove_first)
    put_back(images)
    assert not images.exists()
    put_back(images)


def test_a_page_image_that_ends_early_is_an_error(tmp_path: Path) -> None:
    make_process(tmp_path, (0, PAGES, PLAIN))
    (cut,) = plan(tmp_path, ["pages-1.img"])
    (tmp_path / "pages-1.img").write_bytes(bytes(PAGE_BYTES))
    with pytest.raises(ImageError, match="ends before"):
        write_plain(tmp_path, {"pages-1.img": scattered(Memory, cut.direct.parts)}, workers=1)


def test_a_damaged_address_space_is_an_error(tmp_path: Path) -> None:
    make_process(tmp_path, (0, PAGES, PLAIN))
    path = tmp_path / "mm-1.img"
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(ImageError, match=r"mm-1\.img"):
        plan(tmp_path, ())
