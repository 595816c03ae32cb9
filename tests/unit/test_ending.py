"""CRIU is kept from its end by a FIFO in place of its statistics, and ends when it is let."""

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ocihook.criu import ending
from ocihook.linux.patience import Patience
from ocihook.linux.procfs import Process
from tests.unit.test_ptrace import wait_until

STATISTICS = b"statistics" * 6


@pytest.fixture
def work_directory(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path, os.O_RDONLY)
    yield fd
    os.close(fd)


def end_as_criu(directory: Path) -> subprocess.Popen[bytes]:
    """Write statistics as CRIU does: an open(2) that truncates, and one write(2)."""
    return subprocess.Popen(["sh", "-c", f"printf %s {STATISTICS.decode()} >stats-dump"], cwd=directory)


def release(work_directory: int, criu: subprocess.Popen[bytes]) -> bytes:
    found = Process.find(criu.pid)
    patience = Patience({"CRIU": found or Process(criu.pid, 0)})
    written = ending.release(work_directory, patience)
    patience.close()
    assert criu.wait(60) == 0
    return written


@pytest.mark.parametrize("attempt", range(20))
def test_it_waits_until_it_is_let(tmp_path: Path, work_directory: int, attempt: int) -> None:
    (tmp_path / "stats-dump").write_bytes(b"of an earlier dump")
    ending.keep(work_directory)
    assert ending.is_kept(work_directory)
    criu = end_as_criu(tmp_path)
    if attempt % 2:  # it is released before it comes there, or after
        wait_until(lambda: Path(f"/proc/{criu.pid}/stat").read_text().split()[2] == "S")
    written = release(work_directory, criu)
    assert written == STATISTICS or not (written or attempt % 2)
    assert (tmp_path / "stats-dump").read_bytes() == STATISTICS
    assert os.listdir(tmp_path) == ["stats-dump"]


class Killed(BaseException):
    pass


@pytest.mark.parametrize("before", ["open", "rename", "_copy", "unlink"])
def test_who_releases_it_may_be_killed(
    tmp_path: Path, work_directory: int, monkeypatch: pytest.MonkeyPatch, before: str
) -> None:
    """Before any of the calls that change something: another one finds CRIU where it waits, and it ends."""
    ending.keep(work_directory)
    criu = end_as_criu(tmp_path)
    wait_until(lambda: Path(f"/proc/{criu.pid}/stat").read_text().split()[2] == "S")

    def die(*_: object, **__: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(ending if before == "_copy" else os, before, die)
        with pytest.raises(Killed):
            ending.release(work_directory, Patience())
    assert ending.is_kept(work_directory)
    found = Process.find(criu.pid)
    patience = Patience({"CRIU": found or Process(criu.pid, 0)})
    ending.release(work_directory, patience)
    patience.close()
    # Killed while it reads, it takes the reader from a CRIU that writes, which ends by that.
    assert criu.wait(60) in ({0, 2, -signal.SIGPIPE} if before == "_copy" else {0})
    assert not ending.is_kept(work_directory)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount a small file system")
@pytest.mark.parametrize("full", ["of files", "of bytes"])
def test_a_full_disk_keeps_nobody_waiting(tmp_path: Path, full: str) -> None:
    size = "nr_inodes=3" if full == "of files" else "size=4k"  # the directory and the FIFO with two names
    subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", tmp_path], check=True, timeout=60)
    directory = os.open(tmp_path, os.O_RDONLY)
    try:
        ending.keep(directory)
        criu = end_as_criu(tmp_path)
        wait_until(lambda: Path(f"/proc/{criu.pid}/stat").read_text().split()[2] == "S")
        if full == "of bytes":
            (tmp_path / "filler").write_bytes(bytes(4096))
        release(directory, criu)
        assert not ending.is_kept(directory)
        assert not any(path.is_fifo() for path in tmp_path.iterdir())
    finally:
        os.close(directory)
        subprocess.run(["umount", "--lazy", tmp_path], check=True, timeout=60)


def test_one_that_is_not_kept_is_left_alone(tmp_path: Path, work_directory: int) -> None:
    criu = end_as_criu(tmp_path)
    assert criu.wait(60) == 0
    release(work_directory, criu)
    ending.forget(work_directory)
    assert (tmp_path / "stats-dump").read_bytes() == STATISTICS


def test_one_that_fails_before_leaves_nothing(tmp_path: Path, work_directory: int) -> None:
    ending.keep(work_directory)
    ending.keep(work_directory)  # of an agent that was killed
    criu = subprocess.Popen(["true"])
    assert criu.wait(60) == 0
    ending.forget(work_directory)
    assert os.listdir(tmp_path) == []
    ending.keep(work_directory)
    release(work_directory, criu)
    assert not ending.is_kept(work_directory)
