"""Memory that was packed while its process ran: what of it is used once all stand still, and what is refused."""

import ctypes
import mmap
import os
import random
import stat
import subprocess
import threading
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path

import pytest

from ocihook.config import Policy
from ocihook.images.pre_copied import CopiedMemory, chunk_sizes
from ocihook.linux import page_moves, soft_dirty
from ocihook.linux.memory import Mapping, Span, subtract
from ocihook.linux.open_files import OpenFile
from ocihook.linux.procfs import Process, address_space
from ocihook.memory import pre_copy
from ocihook.packs.pack import PAGE_BYTES, ZERO, PackFile, PackReader
from ocihook.packs.packed_manifest import Segment
from ocihook.packs.packing import pack
from ocihook.packs.pages import Source
from tests.unit.test_ptrace import wait_until

START = 1 << 30
SEEDS = range(60)
PROT_NONE = 0
IO_URING_SETUP = 425  # io_uring_setup(2)
Memory = dict[int, bytes]  # content by number of the page


def spans_of(pages: Iterable[int]) -> list[Span]:
    """Return the runs of pages."""
    found: list[Span] = []
    for page in sorted(pages):
        start = START + page * PAGE_BYTES
        if found and found[-1].end == start:
            found[-1] = Span(found[-1].start, start + PAGE_BYTES)
        else:
            found.append(Span(start, start + PAGE_BYTES))
    return found


def pages_of(spans: Iterable[Span]) -> list[int]:
    return [(at - START) // PAGE_BYTES for span in spans for at in range(span.start, span.end, PAGE_BYTES)]


class PackedModel:
    """Pages in chunks of any size, in segments of any, of which some are in other packs."""

    def __init__(self, memory: Memory, chance: random.Random) -> None:
        self.runs = spans_of(memory)
        self.chunks: dict[tuple[str, int], list[bytes]] = {}
        self.segments: list[Segment] = []
        self.sizes: list[list[int]] = []
        counts = {"a": chance.randrange(5), "b": 0}
        rest = [memory[page] for page in sorted(memory)]
        while rest:
            name, segment = chance.choice("ab"), chance.randint(1, 5)
            sizes = []
            for number in range(counts[name], counts[name] + segment):
                size = min(len(rest), chance.randint(1, 6))
                if not size:
                    break
                self.chunks[name, number], rest = rest[:size], rest[size:]
                sizes.append(size * PAGE_BYTES)
            self.segments.append(Segment(name, counts[name], len(sizes)))
            self.sizes.append(sizes)
            counts[name] += segment + chance.randrange(3)

    def read(self, segments: Iterable[Segment]) -> list[bytes]:
        return [
            page
            for name, first, count in segments
            for number in range(first, first + count)
            for page in self.chunks[name, number]
        ]


def change(memory: Memory, chance: random.Random) -> tuple[Memory, set[int]]:
    """Have a process write, unmap, map anew and move, as chance wants it; return what it has, and what is dirty."""
    now, dirty = dict(memory), set[int]()
    for _ in range(chance.choice([0, 1, 3, 20])):
        first, count = chance.randrange(-5, 210), chance.choice([1, 1, 2, 30])
        pages = range(first, first + count)
        what = chance.choice(["write", "unmap", "map", "move", "touch"])
        if what == "move":
            target = chance.randrange(-5, 210)
            moved = {target + page - first: now[page] for page in pages if page in now}
            for page in [*pages, *range(target, target + count)]:
                now.pop(page, None)
            now |= moved
            dirty |= moved.keys()
        for page in pages:
            if what == "unmap":
                now.pop(page, None)
            elif what == "map" or (what in ("write", "touch") and page in now):
                now[page] = now[page] if what == "touch" else chance.randbytes(4)
                dirty.add(page)
    return now, dirty & now.keys()


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_joined_is_what_the_process_has(seed: int) -> None:
    chance = random.Random(seed)
    density = chance.choice([0.02, 0.5, 0.97, 1.0])
    memory = {page: chance.randbytes(4) for page in range(200) if chance.random() < density}
    model = PackedModel(memory, chance)
    copied = CopiedMemory(model.runs, model.segments, model.sizes)
    now, dirty = change(memory, chance)
    most = chance.choice([1, 3, 10_000])
    pieces = list(copied.pieces(spans_of(now), spans_of(dirty), most=most))
    assert pages_of(span for piece in pieces for span in piece.spans) == sorted(now)
    found = []
    for piece in pieces:
        kept = model.read(piece.segments)
        if piece.segments:
            assert not dirty & set(pages_of(piece.spans))
            assert len(kept) == len(pages_of(piece.spans))
        found += kept or [now[page] for page in pages_of(piece.spans)]
    assert found == [now[page] for page in sorted(now)]
    assert sum(bool(piece.segments) for piece in pieces) <= most
    assert all(before.segments or after.segments for before, after in pairwise(pieces)), "what is read is together"
    # A chunk is used unless any page of it is dirty or gone, or a new one is between its pages.
    if most > len(memory):
        at = 0
        used = {
            (name, n) for piece in pieces for name, first, count in piece.segments for n in range(first, first + count)
        }
        for segment in model.segments:
            for number in range(segment.first_chunk, segment.first_chunk + segment.chunks):
                pages = sorted(memory)[at : at + len(model.chunks[segment.pack, number])]
                at += len(pages)
                is_right = all(page in now and page not in dirty for page in pages)
                is_whole = not set(range(pages[0], pages[-1])) & (now.keys() - memory.keys())
                assert ((segment.pack, number) in used) == (is_right and is_whole)


def test_nothing_was_copied() -> None:
    copied = CopiedMemory([], [], [])
    assert list(copied.pieces([], [])) == []
    ((spans, segments),) = copied.pieces(spans_of([3, 7]), [])
    assert (list(spans), segments) == (spans_of([3, 7]), ())


@pytest.mark.parametrize("seed", range(20))
def test_spans_are_subtracted(seed: int) -> None:
    chance = random.Random(seed)
    one, other = ({page for page in range(60) if chance.random() < chance.random()} for _ in range(2))
    assert pages_of(subtract(spans_of(one), spans_of(other))) == sorted(one - other)


class Bytes:
    """Memory to be packed."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def read_into(self, view: memoryview, offset: int) -> int:
        part = self._data[offset : offset + len(view)]
        view[: len(part)] = part
        return len(part)

    def close(self) -> None:
        pass


@pytest.mark.parametrize("workers", [1, 2])
def test_many_small_sources_are_segments_of_their_own(tmp_path: Path, workers: int) -> None:
    sizes = [1, 2, 300, 1, 5000, 64, 1, 1] * 30
    datas = [bytes([n % 7]) * size * PAGE_BYTES for n, size in enumerate(sizes)]
    made = [Source(lambda data=data: Bytes(data), 0, len(data)) for data in datas]  # type: ignore[misc]
    rows, packs = pack(made, tmp_path, prefix="ocihook-", workers=workers, durable=False)
    readers = {info.name: PackReader(PackFile(tmp_path / info.name), info) for info in packs}
    for number, (row, size) in enumerate(zip(rows, sizes, strict=True)):
        chunks = [chunk for s in row for chunk in readers[s.pack].chunks(s.first_chunk, s.chunks)]
        assert sum(chunk.pages for chunk in chunks) == size
        assert {chunk.kind == ZERO for chunk in chunks} == {number % 7 == 0}
        assert [sum(each) for each in chunk_sizes(tmp_path, packs, row)] == [
            sum(chunk.pages for chunk in readers[s.pack].chunks(s.first_chunk, s.chunks)) * PAGE_BYTES for s in row
        ]
    for reader in readers.values():
        reader.close()


@pytest.mark.parametrize(
    ("release", "keeps"),
    [
        ("6.12.117+deb13-cloud-amd64", False),
        ("6.18.36", False),
        ("6.18.37-1-lts", True),
        ("6.19.0-rc1", True),
        ("7.2.12+deb14-amd64", True),
        ("5.14.0-611.el9.x86_64", False),
        ("unknown", False),
    ],
)
def test_kernels_that_keep_the_marks(monkeypatch: pytest.MonkeyPatch, release: str, *, keeps: bool) -> None:
    monkeypatch.setattr(os, "uname", lambda: os.uname_result(("Linux", "node", release, "", "x86_64")))
    assert soft_dirty.outlive_merging() == keeps


def opened(name: str, mode: int = stat.S_IFREG, device: tuple[int, int] = (0, 0)) -> OpenFile:
    return OpenFile(os.getpid(), 3, name, False, mode, os.makedev(*device), 1, 1, 0)


CHARACTER = stat.S_IFCHR | 0o600


@pytest.mark.parametrize(
    ("file", "mapped", "reason"),
    [
        (opened("/dev/null", CHARACTER, (1, 3)), "", ""),
        (opened("/dev/pts/0", CHARACTER, (136, 0)), "/dev/shm/data", ""),
        (opened("/dev/infiniband/uverbs0", CHARACTER, (231, 192)), "", "the device /dev/infiniband/uverbs0 open"),
        (opened("/dev/nvidia0", CHARACTER, (195, 0)), "", "the device /dev/nvidia0 open"),
        (opened("/dev/mem", CHARACTER, (1, 1)), "", "the device /dev/mem open"),
        (opened("anon_inode:[io_uring]", 0o600), "", "uses io_uring"),
        (opened("/data"), "anon_inode:[io_uring]", "uses asynchronous I/O (anon_inode:[io_uring])"),
        (opened("/data"), "/[aio] (deleted)", "uses asynchronous I/O (/[aio]"),
        (opened("/data"), "/dev/infiniband/uverbs0", "the device /dev/infiniband/uverbs0 mapped"),
    ],
)
def test_what_may_write_unseen(monkeypatch: pytest.MonkeyPatch, file: OpenFile, mapped: str, reason: str) -> None:
    monkeypatch.setattr(pre_copy, "open_files", lambda _pid: iter([file]))
    monkeypatch.setattr(pre_copy, "read_mappings", lambda _pid: [Mapping(Span(0, PAGE_BYTES), "rw-s", 1, mapped)])
    found = pre_copy._unseen_writer([os.getpid()])
    assert (reason in found) if reason else not found


def test_a_process_with_io_uring() -> None:
    """Only found: CRIU refuses it, too."""
    libc = ctypes.CDLL(None, use_errno=True)
    fd = libc.syscall(IO_URING_SETUP, 4, ctypes.create_string_buffer(120))
    if fd < 0:
        pytest.skip("this kernel has no io_uring for us")
    assert "io_uring" in pre_copy._unseen_writer([os.getpid()])
    os.close(fd)


def test_a_file_that_is_open_for_direct_input(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (tmp_path / "file").open("rb") as file:
        assert not pre_copy._is_direct(os.getpid(), file.fileno())
    try:
        fd = os.open(tmp_path / "file", os.O_RDONLY | os.O_DIRECT)
    except OSError:
        pytest.skip("this file system has no direct I/O")
    assert pre_copy._is_direct(os.getpid(), fd)
    os.close(fd)
    assert not pre_copy._is_direct(os.getpid(), fd)


def test_why_a_container_is_not_pre_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = {"marks": False, "outlive_merging": False, "counts": False}
    monkeypatch.setattr(soft_dirty, "measure", lambda: facts["marks"])
    monkeypatch.setattr(soft_dirty, "outlive_merging", lambda: facts["outlive_merging"])
    monkeypatch.setattr(page_moves, "works", lambda: facts["counts"])
    monkeypatch.setattr(pre_copy, "_unseen_writer", lambda _pids: "it has a device")
    policy = Policy(pre_copy=True)
    assert pre_copy.why_not(Policy(mode="store"), []) == 'mode is "store"'
    assert "does not mark" in pre_copy.why_not(policy, [])
    facts["marks"] = True
    assert "loses soft-dirty bits when mappings are merged; 6.18.37 and 6.19 do not" in pre_copy.why_not(policy, [])
    facts["outlive_merging"] = True
    assert "does not count" in pre_copy.why_not(policy, [])
    facts["counts"] = True
    assert pre_copy.why_not(policy, []) == "it has a device"


def test_memory_that_goes_while_it_is_read() -> None:
    size = 5 * PAGE_BYTES
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory[:] = b"x" * size
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    for page in (0, 2, 3):
        assert libc.mprotect(ctypes.c_void_p(address + page * PAGE_BYTES), PAGE_BYTES, PROT_NONE) == 0
    buffer = bytearray(b"y" * (size - 100))
    assert pre_copy._MovingMemory(own()).read_into(memoryview(buffer), address + 50) == len(buffer)
    there = b"".join((b"x" if page in (1, 4) else b"\0") * PAGE_BYTES for page in range(5))
    assert bytes(buffer) == there[50:-50]
    gone = subprocess.Popen(["true"])
    gone.wait(60)
    pre_copy._MovingMemory(Process(gone.pid, 0)).read_into(memoryview(buffer), address)
    assert bytes(buffer) == bytes(len(buffer))
    libc.mprotect(ctypes.c_void_p(address), size, mmap.PROT_READ | mmap.PROT_WRITE)


def test_runs_that_the_kernel_shows_twice() -> None:
    shown = [Span(1, 4), Span(3, 6), Span(6, 7), Span(9, 10), Span(9, 12), Span(11, 12), Span(20, 21)]
    assert list(pre_copy._apart(shown)) == [Span(1, 7), Span(9, 12), Span(20, 21)]
    assert list(pre_copy._apart([])) == []


def test_another_program_has_other_addresses() -> None:
    with subprocess.Popen(["sh", "-c", "read line; exec cat"], stdin=subprocess.PIPE) as process:
        wait_until(lambda: b"read line" in Path(f"/proc/{process.pid}/cmdline").read_bytes())
        before = address_space(process.pid)
        assert before == address_space(process.pid) != ()
        assert process.stdin is not None
        process.stdin.write(b"\n")
        process.stdin.flush()
        wait_until(lambda: Path(f"/proc/{process.pid}/cmdline").read_bytes() == b"cat\0")
        assert address_space(process.pid) != before
        process.stdin.close()
    assert address_space(process.pid) == ()


def own() -> Process:
    process = Process.find(os.getpid())
    assert process is not None
    return process


def moving(calls: int) -> Callable[[], None]:
    """Return what moves memory so often."""

    def move() -> None:
        for _ in range(calls):
            with mmap.mmap(-1, PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
                memory.resize(1 << 22)

    return move


@pytest.mark.skipif(not page_moves.works(), reason="this kernel does not count calls")
def test_calls_that_move_memory_are_counted_in_all_threads() -> None:
    go, earlier = threading.Event(), moving(2)
    thread = threading.Thread(target=lambda: (go.wait(), earlier()))
    thread.start()
    counter = page_moves.MoveCounter(own())
    assert counter.count == 0
    go.set()
    thread.join()
    assert counter.count == 2
    later = threading.Thread(target=moving(3))
    later.start()
    later.join()
    assert counter.count == 5
    counter.close()


def test_where_calls_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_moves, "_TRACEPOINT_IDS", (Path("/nowhere/id"),))
    assert not page_moves.works()
    with pytest.raises(OSError, match=r"trace events are not there|not counted on"):
        page_moves.MoveCounter(own())
