"""Atomic replacement of files, also when it fails half-way, and opening what others may have put there."""

import errno
import os
from pathlib import Path

import pytest

from ocihook.errors import from_system
from ocihook.linux.files import open_regular, replace_file
from tests.open_files import nothing_left_open


@pytest.mark.parametrize("durable", [True, False])
def test_the_new_content_has_the_mode_asked_for(tmp_path: Path, *, durable: bool) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"old")
    umask = os.umask(0o777)
    try:
        replace_file(path, b"new", mode=0o640, durable=durable)
    finally:
        os.umask(umask)
    assert path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o777 == 0o640
    assert os.listdir(tmp_path) == ["f"]


def test_a_leftover_of_an_interrupted_call_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "target").write_bytes(b"untouched")
    (tmp_path / "f.partial").symlink_to("target")
    replace_file(tmp_path / "f", b"new", mode=0o600)
    assert (tmp_path / "f").read_bytes() == b"new"
    assert (tmp_path / "target").read_bytes() == b"untouched"
    assert sorted(os.listdir(tmp_path)) == ["f", "target"]


def test_a_failed_replacement_leaves_the_old_state(tmp_path: Path) -> None:
    (tmp_path / "f").mkdir()
    with pytest.raises(OSError, match="directory"):
        replace_file(tmp_path / "f", b"new", mode=0o600)
    assert os.listdir(tmp_path) == ["f"]


def test_a_link_is_replaced_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "target").write_bytes(b"untouched")
    (tmp_path / "f").symlink_to("target")
    replace_file(tmp_path / "f", b"new", mode=0o600)
    assert not (tmp_path / "f").is_symlink()
    assert (tmp_path / "target").read_bytes() == b"untouched"


def test_a_regular_file_opens_for_reading(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"content")
    with open(open_regular(tmp_path / "f"), "rb") as file:
        assert file.read() == b"content"


@pytest.mark.parametrize("kind", ["missing", "link", "directory", "fifo", "device"])
def test_anything_else_does_not_open_and_leaks_nothing(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "f"
    if kind == "link":
        (tmp_path / "target").touch()
        path.symlink_to("target")
    elif kind == "directory":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        path = Path("/dev/null")
    with nothing_left_open(), pytest.raises(OSError, match=r"No such file|Too many levels|Not a regular file"):
        open_regular(path)


def test_a_full_disk_is_told_with_the_file_and_without_a_number(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A write that finds no space names no file by itself."""

    def full(_fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space") as caught:
        replace_file(tmp_path / "x", b"new", mode=0o600)
    told = from_system(caught.value)
    assert (told.exit_code, str(told)) == (9, f"{tmp_path}/x: No space left on device. Free space there")
