"""Checks of deleted directories that are in use: CRIU makes each again by its name, and then removes it.

That fails while the name leads to a directory with files in it, and removes an empty one (criu/files-reg.c,
clean_one_remap).
"""

import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ocihook.preflight.check import Check
from ocihook.preflight.finding import Problem, fail, warn
from ocihook.preflight.observation import Observation, ProcessSeen

_LEAVE = "have the application leave or close it before the dump"


class _Directory(NamedTuple):
    pid: int
    path: str


def _deleted_directory(seen: Observation) -> Iterator[Problem]:
    found = {one.path: one for process in seen.processes for one in _directories(process)}
    deleted = {*found, *(file.name for file in seen.files if file.is_deleted and not file.links)}
    for directory in found.values():
        who, place = seen.who(directory.pid), Path(f"/proc/{directory.pid}/root{directory.path}")
        inside = next((path for path in sorted(deleted) if path.startswith(f"{directory.path}/")), "")
        if inside:
            yield fail(
                f"{who} uses the deleted directory {directory.path}, and {inside} of it, which is deleted, too", _LEAVE
            )
        elif place.is_dir() and any(place.iterdir()):
            detail = f"{who} uses the deleted directory {directory.path}, whose name is another directory's now"
            yield fail(f"{detail}: a restore fails", f"{_LEAVE}, or empty {directory.path}")
        elif place.is_dir():
            detail = f"{who} uses the deleted directory {directory.path}, whose name is another empty directory's now"
            yield warn(f"{detail}: a restore removes that", _LEAVE)


def _directories(process: ProcessSeen) -> Iterator[_Directory]:
    """Yield the deleted directories that a process has open, or is in."""
    for file in process.files:
        if file.is_deleted and stat.S_ISDIR(file.mode) and not file.links and file.name.startswith("/"):
            yield _Directory(process.pid, file.name)
    cwd = process.used.get("cwd")
    if cwd and cwd.is_deleted and not cwd.links:
        yield _Directory(process.pid, cwd.name)


CHECKS = (Check(name="deleted-directory", find=_deleted_directory),)
