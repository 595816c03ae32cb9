"""Files that are read through a mapping: the same bytes as by a read, and never a signal."""

import mmap
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from ocihook.linux import mapped_file as module
from ocihook.linux.mapped_file import MappedFile
from ocihook.linux.workers import WorkerDied, run_forked

SIZE = 3 * module._WINDOW_BYTES + 5000
PAGE = 4096


@pytest.fixture(params=["mapped", "older kernel", "no mappings"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    def refuse(*_args: object, **_options: object) -> None:
        raise OSError(19, "No such device")

    if request.param == "older kernel":
        monkeypatch.setattr(module, "_MADV_POPULATE_READ", 9999)
    if request.param == "no mappings":
        monkeypatch.setattr(mmap, "mmap", refuse)
    return str(request.param)


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    (tmp_path / "file").write_bytes(random.Random(1).randbytes(SIZE))
    fd = os.open(tmp_path / "file", os.O_RDWR)
    yield fd
    os.close(fd)


def test_all_places_and_sizes(fd: int, kernel: str) -> None:
    rng = random.Random(2)
    file = MappedFile(fd, SIZE)
    ranges = [(0, SIZE), (SIZE - 1, 1), (0, 1), (SIZE - PAGE, PAGE)]
    ranges += [(at, min(rng.choice([1, 100, PAGE, 65536, SIZE]), SIZE - at)) for at in rng.sample(range(SIZE), 300)]
    for at, size in ranges:
        assert file.read(at, size) == os.pread(fd, size, at)


def test_what_was_read_outlives_its_file(tmp_path: Path, kernel: str) -> None:
    (tmp_path / "file").write_bytes(b"0123456789")
    fd = os.open(tmp_path / "file", os.O_RDONLY)
    part = MappedFile(fd, 10).read(2, 3)
    os.close(fd)
    (tmp_path / "file").unlink()
    assert bytes(part) == b"234"
    assert part.readonly or kernel != "mapped"


def test_only_the_part_that_is_asked_for_is_mapped(fd: int) -> None:
    """Where a file is larger than what belongs to it, as an archive is, nothing behind that is touched."""
    file = MappedFile(fd, PAGE + 10)
    assert file.read(PAGE, 10) == os.pread(fd, 10, PAGE)
    assert len(file._view) == PAGE + 10


@pytest.mark.parametrize("first", [True, False])
def test_a_file_that_becomes_shorter(fd: int, kernel: str, *, first: bool) -> None:
    """No signal: what is left is read, the rest is not there. It may happen before the first read, or after it."""
    content = os.pread(fd, SIZE, 0)
    file = MappedFile(fd, SIZE)
    if not first:
        assert file.read(0, 100) == content[:100]
    left = 2 * module._WINDOW_BYTES + 3 * PAGE
    os.ftruncate(fd, left)
    assert file.read(left - PAGE, PAGE) == content[left - PAGE : left]
    assert file.read(left - PAGE, 2 * PAGE) == content[left - PAGE : left]
    assert len(file.read(left + PAGE, PAGE)) == 0
    assert file.read(left - 2 * PAGE, PAGE) == content[left - 2 * PAGE : left - PAGE]


def test_a_mapped_file_that_becomes_shorter_under_a_reader(fd: int) -> None:
    """Then it is too late for an error: the worker is killed, and it is said what that means."""

    def worker(_number: int, tasks: Iterator[int]) -> Iterator[int]:
        for task in tasks:
            if task == 0:
                part = MappedFile(fd, SIZE).read(0, PAGE)
                os.ftruncate(fd, 0)
                yield part[0]

    with pytest.raises(WorkerDied, match=r"signal SIGBUS\. A file that it had mapped has become shorter"):
        list(run_forked(worker, tasks=2, workers=2))
