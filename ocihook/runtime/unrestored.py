"""Gives a restored container what its bundle says and neither its runtime's restore nor CRIU applies.

Runtimes set sysctls in `create` alone, and the network namespace of a podman container is new. CRIU before 4.2 mounts
the root without its flags. A file that is masked is the node's own /dev/null then, with the options of the node's /dev:
root in the container could change its mode.
"""

import ctypes
import os
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ocihook.container.spec import Rights, sysctls_to_set
from ocihook.errors import OcihookError, RestoreError
from ocihook.linux.mounts import remount
from ocihook.linux.patience import Patience
from ocihook.linux.procfs import Process, descendants
from ocihook.linux.workers import call_each

_NAMESPACES = ("net", "ipc", "uts")
_ESCAPE = re.compile(r"\\([0-7]{3})")  # of mountinfo (proc(5))
_RESTRICTIONS = frozenset(("ro", "nosuid", "nodev", "noexec"))
_libc = ctypes.CDLL(None, use_errno=True)


def apply_unrestored(
    init: Process, then: Rights, now: Rights, config: Mapping[str, Any], patience: Patience
) -> list[str]:
    """Apply the bundle to a container that does not run yet.

    Args:
        init: its first process.
        then: the bundle of the checkpoint.
        now: the bundle.
        config: the bundle's config.json.
        patience: with the engine's call.

    Returns:
        What could not be applied and takes nothing from other containers.

    Raises:
        OcihookError: if a sysctl, or the options of a mount, cannot be set.
        GivenUp: if the engine's call has ended.
    """
    mounts = lacking(Path(f"/proc/{init.pid}/mountinfo").read_text(), now)
    if sysctls := sysctls_to_set(config):
        _call(partial(_set_sysctls, sysctls), init, patience)
    if mounts:
        _call(partial(_remount, mounts), init, patience)
    if then.oom_score_adj is None or now.oom_score_adj in (None, then.oom_score_adj):
        return []
    scores = then.oom_score_adj, now.oom_score_adj
    failed = [pid for pid in descendants(init.pid) if not _set_oom_score(pid, *scores)]
    return [f"oom_score_adj {now.oom_score_adj} of {len(failed)} processes"] if failed else []


def _call(work: Callable[[int], None], init: Process, patience: Patience) -> None:
    """Do something in namespaces of a container, which a process of its own enters."""
    (outcome,) = call_each(work, [init.pid], patience)
    if isinstance(outcome, OcihookError):
        raise outcome
    if isinstance(outcome, Exception):
        raise RestoreError(f"its bundle cannot be applied: {outcome}") from outcome


def _enter(pid: int, names: Iterable[str]) -> None:
    for name in names:
        with open(f"/proc/{pid}/ns/{name}") as namespace:
            if _libc.setns(namespace.fileno(), 0) != 0:
                raise RestoreError(f"its {name} namespace cannot be entered: {os.strerror(ctypes.get_errno())}")


def _set_sysctls(sysctls: Mapping[str, str], pid: int) -> None:
    """Set sysctls in the namespaces of a process. Moves the process that calls it there.

    Raises:
        RestoreError: naming the one that cannot be set.
    """
    _enter(pid, _NAMESPACES)
    for name, value in sysctls.items():
        path = Path("/proc/sys", name.replace(".", "/"))
        try:
            if path.read_text().split() != value.split():
                path.write_text(value)
        except OSError as error:
            raise RestoreError(f"its sysctl {name} cannot be set to {value!r}: {error.strerror}") from error


def lacking(mountinfo: str, rights: Rights) -> dict[str, tuple[str, ...]]:
    """Return the mounts that lack a restriction which the bundle names: the options they are to have, by their places.

    Args:
        mountinfo: of a process in the container.
        rights: of the bundle.
    """
    wanted = {place: {*mount.restrictions} & _RESTRICTIONS for place, mount in rights.mounts.items()}
    for place in rights.masked_paths:  # the node's own /dev/null since the restore
        wanted[place] = {"ro", "nosuid"}
    for place in (*rights.read_only_paths, *(["/"] if rights.has_read_only_root else [])):
        wanted[place] = wanted.get(place, set()) | {"ro"}
    found = {}
    for line in mountinfo.splitlines():  # proc(5): id parent device root place options ... - type source super-options
        fields = line.split()
        place = _ESCAPE.sub(lambda match: chr(int(match[1], 8)), fields[4])
        options, of_all = fields[5].split(","), fields[-1].split(",")
        missing = wanted.get(place, set()) - {*options} - ({"ro"} & {*of_all})
        found[place] = tuple(sorted({*options, *missing} - {"rw"})) if missing else ()
    return {place: options for place, options in found.items() if options}  # the last mount at a place counts


def _remount(mounts: Mapping[str, tuple[str, ...]], pid: int) -> None:
    """Give mounts their options. Moves the process that calls it into the container's mount namespace.

    Raises:
        RestoreError: naming the one that cannot be changed.
    """
    _enter(pid, ["mnt"])
    for place, options in mounts.items():
        try:
            remount(Path(place), options)
        except OSError as error:
            raise RestoreError(f"its mount {place} cannot be made {','.join(options)}: {error.strerror}") from error


def _set_oom_score(pid: int, then: int, wanted: int) -> bool:
    """Set the score of a process that has the earlier one: one that has another has set that itself."""
    path = Path(f"/proc/{pid}/oom_score_adj")
    try:
        if int(path.read_text()) == then:
            path.write_text(str(wanted))
    except PermissionError:
        return False
    except (ProcessLookupError, FileNotFoundError):
        pass
    return True
