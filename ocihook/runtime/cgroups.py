"""Moves all processes of a restored container into the cgroup that its runtime gave it, and freezes them there.

runc 1.1 lets CRIU put them into the cgroup that they were dumped in, of a container that is gone: limits and metrics
would be of an empty one.
"""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ocihook.errors import FreezeError, OcihookError, plain
from ocihook.linux.cgroup import HELD, Freezer, find_freezer, held_below_root
from ocihook.linux.patience import ENDLESS
from ocihook.linux.procfs import Process, descendants
from ocihook.runtime.call import Call

_MOUNT = Path("/sys/fs/cgroup")
_MOST_ROUNDS = 20  # processes may fork meanwhile, unless they are frozen


def cgroups_of(call: Call) -> list[Path]:
    """Return the directories of the cgroups that the runtime says it has given a container.

    Raises:
        OcihookError: if it does not say.
    """
    try:
        if call.is_crun:
            path = str(json.loads((call.state_directory / "status").read_bytes())["cgroup-path"])
            return list(_below_mounts(path))
        paths = json.loads((call.state_directory / "state.json").read_bytes())["cgroup_paths"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise OcihookError(
            f"{call.runtime} does not report the cgroup of container {call.container_id}: {plain(error)}"
        ) from error
    return [Path(path) for path in dict.fromkeys(_values(paths)) if _is_cgroup(Path(path))]


def _values(paths: object) -> Iterator[str]:
    if isinstance(paths, Mapping):
        yield from (str(path) for path in paths.values() if path)


def _below_mounts(path: str) -> Iterator[Path]:
    """Yield where a path of crun's is: in the one hierarchy of v2, or in each of v1."""
    for top in (_MOUNT, *(entry for entry in _MOUNT.iterdir() if entry.is_dir())):
        directory = top / path.lstrip("/")
        if _is_cgroup(directory):
            yield directory


def _is_cgroup(directory: Path) -> bool:
    """Return whether a directory is a cgroup, of v1 or v2, and no plain one where a hierarchy is not mounted.

    There crun has written a plain cgroup.procs, in which no process ever is.
    """
    return any((directory / name).exists() for name in ("tasks", "cgroup.controllers"))


def mend(init: Process, cgroups: list[Path]) -> int:
    """Move every process of a container that is elsewhere into its cgroups; return how many times one was moved.

    A process in a cgroup below, which the container has made itself, stays there. One that has ended is in none: a
    zombie is a child as long as its parent likes, and never in cgroup.procs.

    Raises:
        OcihookError: if one cannot be moved.
    """
    moved = 0
    for _ in range(_MOST_ROUNDS):
        astray = [
            (pid, cgroup)
            for cgroup in cgroups
            for pid in sorted({*descendants(init.pid)} - Freezer(cgroup, 2).all_members())
            if Process.find(pid)
        ]
        if not astray:
            return moved
        for pid, cgroup in astray:
            try:
                with contextlib.suppress(ProcessLookupError):
                    (cgroup / "cgroup.procs").write_text(str(pid))
                    moved += 1
            except OSError as error:
                raise OcihookError(
                    f"process {pid} cannot be moved into its cgroup {cgroup}: {error.strerror}"
                ) from error
    raise OcihookError(f"processes of the container keep leaving its cgroups {', '.join(map(str, cgroups))}")


def hold(call: Call) -> Freezer:
    """Freeze a container that was just restored in its own cgroup, where CRIU is no more; return its freezer.

    A process that waits in the kernel, for a disk, stops as soon as it returns from there.

    Raises:
        FreezeError: if it cannot be frozen.
        OcihookError: if it has no cgroup that can be frozen.
    """
    freezer = freezer_of(call)
    freezer.freeze(None)
    for held in _held_below(call):
        with contextlib.suppress(OSError):  # it stays, empty, until the runtime removes its parent
            held.dissolve()
    caller, root = find_freezer(os.getpid()), held_below_root(os.getpid())  # in whose cgroup crun has CRIU at work
    for shared in [caller.directory / HELD] if caller else [root.directory] if root else []:
        with contextlib.suppress(OSError):  # there is none, or another restore uses it
            shared.rmdir()
    return freezer


def _held_below(call: Call) -> Iterator[Freezer]:
    """Yield where a container stood still while CRIU was at work; on a hybrid machine it may be in either hierarchy."""
    for cgroup in cgroups_of(call):
        for path, names, _ in [*os.walk(cgroup)]:
            if HELD in names:
                held = Path(path, HELD)
                yield Freezer(held, 1 if Freezer(held, 1).switch.exists() else 2)


def cgroup_to_be(call: Call, config: Mapping[str, Any]) -> Path | None:
    """Return the cgroup that crun is going to move a restored container to; None if that is not known, or never frozen.

    runc has CRIU itself in it: it must not be frozen then. systemd makes those of its scopes.
    """
    return _cgroup_of_v2(call, config) if call.is_crun else None


def _cgroup_of_v2(call: Call, config: Mapping[str, Any]) -> Path | None:
    path = str((config.get("linux") or {}).get("cgroupsPath") or "").lstrip("/")
    if not path or "--systemd-cgroup" in call.prefix or not (_MOUNT / "cgroup.procs").exists():
        return None
    return _MOUNT / path if ".." not in Path(path).parts else None


def has_cgroup_namespace(config: Mapping[str, Any]) -> bool:
    """Return whether a container is to have a cgroup namespace of its own."""
    kinds = (config.get("linux") or {}).get("namespaces") or ()
    return any(each.get("type") == "cgroup" and not each.get("path") for each in kinds)


def namespace_root(call: Call, config: Mapping[str, Any]) -> Path | None:
    """Return the cgroup that is to be the root of what a container sees; None if that is not known, or the node's.

    CRIU makes no such namespace where it leaves cgroups alone: what it restores is in its own.
    """
    return _cgroup_of_v2(call, config) if has_cgroup_namespace(config) else None


def remove_frozen(cgroup: Path) -> None:
    """Thaw a cgroup that was made for a container, and remove it if nobody is in it."""
    freezer = Freezer(cgroup, 2)
    with contextlib.suppress(FreezeError):  # it was never made
        freezer.thaw(ENDLESS)
    with contextlib.suppress(OSError):
        cgroup.rmdir()


def freezer_of(call: Call) -> Freezer:
    """Return the freezer of a container's own cgroup.

    Raises:
        OcihookError: if there is none.
    """
    for version in (1, 2):  # on a hybrid machine that of its runtime
        for directory in cgroups_of(call):
            if (freezer := Freezer(directory, version)).switch.exists():
                return freezer
    raise OcihookError(f"container {call.container_id} is in no cgroup that can be frozen", hint="see `ocihook doctor`")
