"""A container of a gang has ended, or is not restored: its node reports that, so that no other member waits for it.

Engines have the runtime delete a container as soon as it has ended, whether an agent runs or not. A process of its own
reports it then: `delete` waits for no coordinator. A report that is lost costs the other members gang_gather_s.
"""

import contextlib
import json
import logging
import os
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ocihook.config import load_settings
from ocihook.container.identity import gang_ref
from ocihook.errors import GangError, OcihookError, plain
from ocihook.linux.patience import Patience
from ocihook.runtime import containers
from ocihook.runtime.call import Call
from ocihook.runtime.cgroups import cgroups_of
from ocihook.runtime.containers import Kept
from ocihook.runtime.stop_record import read_config, read_stop

if TYPE_CHECKING:
    from ocihook.model import GangRef

_REPORT_S = 30.0  # for a coordinator that cannot be reached
_RETRY_S = 0.5
_CODE_S = 5.0  # for the engine to write the exit code down
_UNKNOWN = "its exit code is not known"
_EXITS = (Path("/run/libpod/exits"), Path("/run/crio/exits"))  # conmon's --exit-dir, as podman and CRI-O have it
# containerd's internal/cri/store/container/status.go; below the root that it has by default.
_STATUS = "/var/lib/containerd/io.containerd.grpc.v1.cri/containers/{}/status"
_FIRST_DESCRIPTORS = 1024

log = logging.getLogger(__name__)


class MemberEnd:
    """The end of a member of a gang, as its container is deleted."""

    def __init__(self, call: Call, kept: Kept, gang: "GangRef") -> None:
        """Find out why it has ended, before it is deleted."""
        self._kept, self._gang = kept, gang
        self._is_dumped = (containers.directory_of(kept.container.id) / containers.ENDED_NAME).exists()
        self._why = "" if self._is_dumped else _why(call)

    @classmethod
    def of(cls, call: Call, kept: Kept | None) -> "MemberEnd | None":
        """Return the end of the container that a call deletes; None if it is no member, or if that is not known."""
        try:
            notes = read_config(kept).get("annotations") or {} if kept is not None else {}
            gang = gang_ref(notes, kept.container) if kept is not None else None
            return None if kept is None or gang is None else cls(call, kept, gang)
        except (OcihookError, OSError) as error:
            log.warning("its gang does not hear that container %s has ended: %s", call.container_id, plain(error))
            return None

    def report(self) -> None:
        """Have a process of its own report it."""
        _detached(self._report)

    def _report(self) -> None:
        tell = partial(_tell, self._gang, self._kept.container.id, "ended")
        tell(self._why)
        if self._why == _UNKNOWN:
            codes = partial(_exit_codes, self._kept.container.id)
            Patience(timeout_s=_CODE_S).until(lambda: any(codes()))
            for code in islice(codes(), 1):
                tell(code)


def report_unrestored(kept: Kept, gang: "GangRef", why: str) -> None:
    """Have a process of its own report that a container which has chosen with its gang is not restored."""
    _detached(partial(_tell, gang, kept.container.id, "unrestored", why))


def _detached(act: Callable[[], object]) -> None:
    if os.fork() == 0:
        try:
            os.closerange(0, _FIRST_DESCRIPTORS)  # for whose end the engine may wait
            for _ in range(3):
                os.open("/dev/null", os.O_RDWR)
            os.setsid()
            act()
        finally:
            os._exit(0)


def _tell(gang: "GangRef", life: str, verb: str, why: str) -> None:
    from ocihook.gang.link import Link

    link, limit = Link.of(load_settings()), Patience(timeout_s=_REPORT_S)
    who: dict[str, Any] = {"namespace": gang.namespace, "gang": gang.name, "member": gang.member}
    while not limit.is_over:
        try:
            link.ask({"verb": verb, **who, "life": life, "why": why}, limit)
        except GangError:  # a coordinator of an earlier release
            return
        except OSError:
            limit.sleep(_RETRY_S)
        else:
            return


def _why(call: Call) -> str:
    stop = read_stop(call.container_id)
    if stop is not None and stop.is_over:
        return "it was stopped"
    with contextlib.suppress(OcihookError, OSError):  # the runtime may have forgotten it
        if any(_was_out_of_memory(directory) for directory in cgroups_of(call)):
            return "it ran out of memory"
    return next(_exit_codes(call.container_id), _UNKNOWN)


def _was_out_of_memory(cgroup: Path) -> bool:
    """Return whether the kernel has killed a process of a cgroup for want of memory: version 2, then 1."""
    for name in ("memory.events", "memory.oom_control"):
        with contextlib.suppress(OSError):
            rows = dict(row.split() for row in (cgroup / name).read_text().splitlines())
            return rows.get("oom_kill", "0") != "0"
    return False


def _exit_codes(container_id: str) -> Iterator[str]:
    """Yield what engines have written down of a container's end."""
    for directory in _EXITS:
        with contextlib.suppress(OSError):
            yield f"exit code {(directory / container_id).read_text().strip()}"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        status = json.loads(Path(_STATUS.format(container_id)).read_bytes())["Status"]
        if status["FinishedAt"]:
            yield f"exit code {int(status['ExitCode'])}"
