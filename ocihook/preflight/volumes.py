"""Checks of files in ConfigMaps, Secrets and the like, whose directory has another name in the next pod.

The runtime handler moves such files to where a new container has them (runtime/moved_files.py); engines do not.
"""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ocihook.container.atomic_volumes import AtomicVolume, data_directory, read_atomic_volumes
from ocihook.linux.open_files import resolve_inside
from ocihook.preflight.check import Check
from ocihook.preflight.finding import Problem, fail, warn
from ocihook.preflight.observation import Observation

_DATED = re.compile(r"(?P<place>/.*)/(?P<directory>\.\.[0-9]{4}_[0-9]{2}_[0-9]{2}_[^/]*)(?:/(?P<name>.*))?")
_SOURCE = re.compile(r".*/volumes/kubernetes\.io~(configmap|secret|projected|downward-api|csi)/.*")  # ends with its pod
_HANDLED = ("ocihook.io/checkpoint-on-stop", "ocihook.io/restore-from")
_CLOSE = "have the application close it, or read a copy elsewhere"


def _dated_path(seen: Observation) -> Iterator[Problem]:
    """Files that cannot be moved to the volume of another pod, or that the handler alone moves."""
    config = seen.container.config if seen.container else {}
    places = dict(_places(seen.init_pid, config))
    volumes: dict[str, AtomicVolume] | None = None
    for pid, path in sorted(set(_used(seen))):
        found = _DATED.fullmatch(path)
        if found is None or found["place"] not in places:
            continue
        if volumes is None:
            volumes = read_atomic_volumes(config)
        who, place = seen.who(pid), found["place"]
        if data_directory(Path(f"/proc/{pid}/root{place}")) != found["directory"]:
            yield fail(f"{who} uses {path}, to which no `..data` leads: a new pod does not have that directory", _CLOSE)
        elif _is_unknown(volumes.get(places[place]), found["name"] or ""):
            yield fail(
                f"{who} uses {path}, which is larger than what a checkpoint can compare with a new pod's", _CLOSE
            )
        elif seen.container and not any(note in seen.container.annotations for note in _HANDLED):
            detail = f"{who} uses {path}, and a new pod has that directory under another name"
            yield warn(detail, "restore it by the runtime handler (ocihook.io/restore-from): it looks for the new name")


def _places(init_pid: int, config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the places of volumes of a pod, as the kernel has them and as they are configured."""
    for mount in config.get("mounts") or ():
        if _SOURCE.fullmatch(str(mount.get("source"))):
            place = os.path.normpath(str(mount.get("destination")))
            yield resolve_inside(init_pid, place), place


def _is_unknown(volume: AtomicVolume | None, name: str) -> bool:
    return volume is not None and not volume.is_whole and name not in volume.files


def _used(seen: Observation) -> Iterator[tuple[int, str]]:
    """Yield the existing files that a process has open or mapped, or is in, with its pid."""
    for process in seen.processes:
        files = (*process.files, *process.used.values())
        yield from ((process.pid, file.name) for file in files if not file.is_deleted and "/.." in file.name)
    for pid, mappings in seen.mappings.items():
        names = (mapping.name for mapping in mappings if "/.." in mapping.name)
        yield from ((pid, name) for name in names if not name.endswith(" (deleted)") and name.startswith("/"))


CHECKS = (Check(name="volume-path", find=_dated_path),)
