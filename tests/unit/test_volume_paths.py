"""Files in ConfigMaps and the like that no restore would find in a new pod are refused before a dump."""

import os
import stat
from pathlib import Path
from typing import Any

import pytest

from ocihook.container import atomic_volumes
from ocihook.container.running import RunningContainer
from ocihook.linux.open_files import OpenFile
from ocihook.preflight.checks import run
from ocihook.preflight.finding import Finding, Status
from ocihook.preflight.observation import Observation, ProcessSeen
from ocihook.preflight.volumes import CHECKS

DIRECTORY = "..2026_11_26_10_00_00.123"
HANDLED = {"ocihook.io/checkpoint-on-stop": "true"}


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    """Return a ConfigMap, at the same place for the node and the container."""
    volume = tmp_path / "pods/uid/volumes/kubernetes.io~configmap/app"
    (volume / DIRECTORY).mkdir(parents=True)
    (volume / DIRECTORY / "config").write_text("a=1")
    (volume / "..data").symlink_to(DIRECTORY)
    return volume


def findings(
    volume: Path,
    path: str,
    how: str = "open",
    notes: dict[str, str] = HANDLED,
    place: Path | None = None,
    **changes: Any,
) -> list[Finding]:
    """Return what the checks find in a process that uses a path."""
    pid = os.getpid()  # whose root is the node's
    file = OpenFile(pid, 3, path, is_deleted=False, mode=stat.S_IFREG, device=1, inode=2, links=1, stored_bytes=0)
    file = file._replace(**changes)
    maps = f"7f00-7f10 r--p 00000000 08:01 5 {path}\n" if how == "mapped" else ""
    process = ProcessSeen(
        pid=pid,
        files=(file,) if how == "open" else (),
        used={"cwd": file} if how == "cwd" else {},
        maps=maps,
    )
    mounts = {"mounts": [{"destination": str(place or volume), "source": str(volume), "type": "bind"}]}
    container = RunningContainer("0717d827f3ce", "runc", pid, "", notes, mounts)
    return run(Observation(init_pid=pid, processes=(process,), container=container), CHECKS)


@pytest.mark.parametrize("how", ["open", "cwd", "mapped"])
def test_what_the_link_leads_to_is_good_for_the_handler_alone(volume: Path, how: str) -> None:
    path = f"{volume}/{DIRECTORY}{'' if how == 'cwd' else '/config'}"
    assert findings(volume, path, how) == []
    (found,) = findings(volume, path, how, notes={})
    assert found.status is Status.WARN
    assert path in found.detail
    assert "ocihook.io/restore-from" in found.remedy


@pytest.mark.parametrize("link", [None, "/etc", "..gone", "..data", "../app"])
def test_a_directory_to_which_no_link_leads_is_refused(volume: Path, link: str | None) -> None:
    (volume / "..data").unlink()
    if link is not None:
        (volume / "..data").symlink_to(link)
    (found,) = findings(volume, f"{volume}/{DIRECTORY}/config")
    assert found.status is Status.FAIL
    assert "to which no `..data` leads" in found.detail


def test_a_file_that_an_update_has_removed_is_for_other_checks(volume: Path) -> None:
    assert findings(volume, f"{volume}/..2026_11_26_09_00_00.1/config", is_deleted=True) == []


def test_a_place_behind_a_link(volume: Path, tmp_path: Path) -> None:
    """As /var/run, which is /run in many images."""
    (tmp_path / "link").symlink_to(volume.parent)
    (volume / "..data").unlink()
    configured = tmp_path / "link/app"
    found = findings(volume, f"{volume}/{DIRECTORY}/config", place=configured)
    assert [one.status for one in found] == [Status.FAIL]


def test_what_is_too_large_to_compare_is_refused(volume: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(atomic_volumes, "_MOST_BYTES", 1)
    (found,) = findings(volume, f"{volume}/{DIRECTORY}/config")
    assert found.status is Status.FAIL
    assert "larger than" in found.detail


def test_other_volumes_and_other_names_are_none_of_it(volume: Path, tmp_path: Path) -> None:
    (volume / "..data").unlink()
    other = tmp_path / "srv"
    volume.rename(other)
    assert findings(other, f"{other}/{DIRECTORY}/config") == []  # of the node: it is there for the next pod, too
    volume.mkdir()
    assert findings(volume, f"{volume}/..own/config") == []
    assert findings(volume, f"{volume}/config") == []
