"""Gives a restored container what its bundle says and no runtime's restore applies: sysctls, and its OOM score.

The network namespace of a podman container is new, and runtimes set its sysctls in `create` alone.
"""

import ctypes
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ocihook.container.spec import oom_score_adj, sysctls_to_set
from ocihook.errors import OcihookError, RestoreError
from ocihook.linux.patience import Patience
from ocihook.linux.procfs import Process, descendants
from ocihook.linux.workers import call_each

_NAMESPACES = ("net", "ipc", "uts")
_libc = ctypes.CDLL(None, use_errno=True)


def apply_unrestored(init: Process, then: int | None, config: Mapping[str, Any], patience: Patience) -> list[str]:
    """Apply the bundle to a container that does not run yet.

    Args:
        init: its first process.
        then: the OOM score that the bundle of the checkpoint gave; None: none, or it was not recorded.
        config: the bundle's config.json.
        patience: with the engine's call.

    Returns:
        What could not be applied and takes nothing from other containers.

    Raises:
        OcihookError: if a sysctl cannot be set.
        GivenUp: if the engine's call has ended.
    """
    if sysctls := sysctls_to_set(config):
        (outcome,) = call_each(lambda values: _set_sysctls(init.pid, values), [sysctls], patience)
        if isinstance(outcome, Exception):
            raise outcome if isinstance(outcome, OcihookError) else RestoreError(f"no sysctl can be set: {outcome}")
    wanted = oom_score_adj(config)
    if wanted is None or then is None or wanted == then:
        return []
    failed = [pid for pid in descendants(init.pid) if not _set_oom_score(pid, then, wanted)]
    return [f"oom_score_adj {wanted} of {len(failed)} processes"] if failed else []


def _set_sysctls(pid: int, sysctls: Mapping[str, str]) -> None:
    """Set sysctls in the namespaces of a process. Moves the process that calls it there.

    Raises:
        RestoreError: naming the one that cannot be set.
    """
    for name in _NAMESPACES:
        with open(f"/proc/{pid}/ns/{name}") as namespace:
            if _libc.setns(namespace.fileno(), 0) != 0:
                raise RestoreError(f"its {name} namespace cannot be entered: {os.strerror(ctypes.get_errno())}")
    for name, value in sysctls.items():
        path = Path("/proc/sys", name.replace(".", "/"))
        try:
            if path.read_text().split() != value.split():
                path.write_text(value)
        except OSError as error:
            raise RestoreError(f"its sysctl {name} cannot be set to {value!r}: {error.strerror}") from error


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
