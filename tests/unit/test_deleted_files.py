"""Deleted files that CRIU will refuse are found before a dump, of real processes; those that it takes are not."""

import fcntl
import mmap
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from ocihook.criu.deleted_files import refused_files
from ocihook.criu.files import CriuOptions
from ocihook.linux.open_files import OpenFile, mapped_files, open_files

MIB = 1 << 20
FILE = OpenFile(7, 3, "/data/log", is_deleted=True, mode=stat.S_IFREG, device=1, inode=2, links=0, stored_bytes=2 * MIB)
LARGE = CriuOptions(ghost_limit_bytes=4 * MIB)


def file_refusals(options: CriuOptions) -> list[str]:
    """Return why CRIU would refuse files of this process, with the remedies."""
    files = (*open_files(os.getpid()), *mapped_files(os.getpid(), Path("/proc/self/maps").read_text()))
    return [f"{refused.what}: {refused.remedy}" for refused in refused_files(files, options)]


@pytest.fixture
def opened() -> Iterator[list[int]]:
    fds: list[int] = []
    yield fds
    for fd in fds:
        os.close(fd)


def make(path: Path, size: int) -> int:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    os.write(fd, os.urandom(size))
    return fd


def test_a_large_file_without_a_name(tmp_path: Path, opened: list[int]) -> None:
    opened.append(make(tmp_path / "small", MIB // 2))
    opened.append(make(tmp_path / "kept", 3 * MIB))
    opened.append(make(tmp_path / "large", 3 * MIB))
    assert file_refusals(CriuOptions()) == []
    (tmp_path / "small").unlink()
    (tmp_path / "large").unlink()
    opened.append(os.dup(opened[-1]))
    (reason,) = file_refusals(CriuOptions(file="/etc/criu/runc.conf"))
    assert re.fullmatch(
        rf"uses {tmp_path}/large, which is deleted and has 3 MiB; CRIU's limit is 1 MiB: "
        "echo ghost-limit 16M >> /etc/criu/runc.conf",
        reason,
    )
    assert file_refusals(LARGE) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root sees what is mapped")
def test_one_that_is_only_mapped(tmp_path: Path) -> None:
    fd = make(tmp_path / "mapped", 3 * MIB)
    with mmap.mmap(fd, 3 * MIB):
        os.close(fd)
        (tmp_path / "mapped").unlink()
        assert "mapped, which is deleted" in file_refusals(CriuOptions())[0]
        assert file_refusals(LARGE) == []


def test_many_are_told_in_one_line_by_the_largest() -> None:
    def reasons(*files: OpenFile) -> list[str]:
        return [f"{refused.pid} {refused.remedy}" for refused in refused_files(files, CriuOptions())]

    files = [FILE, FILE._replace(inode=3, stored_bytes=33 * MIB, pid=8), FILE._replace(inode=4), FILE]
    assert reasons(*files)[-1].startswith("8 echo ghost-limit 64M")
    assert len(reasons(*files)) == 3


def test_a_name_that_is_lost_and_one_that_looks_so(tmp_path: Path, opened: list[int]) -> None:
    opened.append(make(tmp_path / "first", 1))
    os.link(tmp_path / "first", tmp_path / "second")
    opened.append(make(tmp_path / "log (deleted)", 1))
    assert file_refusals(CriuOptions()) == []
    (tmp_path / "first").unlink()
    (reason,) = file_refusals(CriuOptions(file="/x"))
    assert reason.endswith(f"uses a file by a name that it no longer has: {tmp_path}/first: echo link-remap >> /x")
    assert file_refusals(CriuOptions(names=frozenset({"link-remap"}))) == []


@pytest.mark.parametrize("name", ["/memfd:nvidia", "/dev/zero", "/SYSV00000000", "socket:[5]", "/[aio]"])
def test_what_has_no_place_is_none_of_them(name: str) -> None:
    assert list(refused_files([FILE._replace(name=name)], CriuOptions())) == []
    assert list(refused_files([FILE._replace(name=name, links=1)], CriuOptions())) == []


def test_a_look_at_a_file_breaks_no_lease(tmp_path: Path) -> None:
    """Whoever opens it has the kernel send its holder a signal, which ends most."""
    path = tmp_path / "leased"
    path.touch()
    with path.open("r+") as held:
        fcntl.fcntl(held, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        (found,) = (file for file in open_files(os.getpid()) if file.fd == held.fileno())
        assert not found.is_locked_to_writers()
        assert fcntl.fcntl(held, fcntl.F_GETLEASE) == fcntl.F_WRLCK
