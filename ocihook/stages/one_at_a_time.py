"""Lets one dump of a container run at a time: engines ask for a second one, and mix up what both have written.

containerd serves checkpoints of one container one after another, but writes the archive of each from the same
directory, which the first one that is done removes (2.1, internal/cri/server/container_checkpoint_linux.go).
"""

import contextlib
import os
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from ocihook.container.runtime_call import find_runtime_call, read_config
from ocihook.errors import IdentificationError, UnsupportedError
from ocihook.session.journal import Journal, other_journals
from ocihook.session.participant import Dump, Participant
from ocihook.stages.stopped import is_stopped

_CONTAINERD = re.compile(r"(/.+/io\.containerd\.grpc\.v1\.cri)/sandboxes/[0-9a-f]{64}/.+")  # files of a pod
_ARCHIVED = "ctrd-checkpoint"  # where containerd collects what it archives
_FRESH_S = 10.0  # since it was made; then what is left of a containerd that was killed is told by its open files


class OneAtATime(Participant):
    """Refuses the later one of two dumps; that of a container which is being stopped waits for the earlier one."""

    def refuse(self, dump: Dump) -> None:
        """Refuse the dump, or wait, while an earlier one of the same container is under way.

        Raises:
            UnsupportedError: if an engine asks for a second checkpoint.
            GivenUp: if the caller does not wait any longer.
        """
        if is_stopped(dump):
            dump.patience.until(lambda: not any(_earlier(dump)))
            return
        for journal in _earlier(dump):
            raise UnsupportedError(
                f"another checkpoint of this container is under way (session {journal.session_id})",
                hint="try again once it has ended: `ocihook ps`",
            )
        if _is_being_archived(dump):
            raise UnsupportedError(
                "its engine still writes the archive of another checkpoint of this container",
                hint="try again once that has ended",
            )


def _earlier(dump: Dump) -> Iterator[Journal]:
    """Yield the sessions of earlier dumps of the container whose CRIU has not ended."""
    mine = dump.journal.criu
    for journal in other_journals(dump.journal):
        theirs = journal.criu
        is_earlier = (theirs.start_ticks, theirs.pid) < (mine.start_ticks, mine.pid)
        if is_earlier and theirs.is_alive() and _dumps(theirs.pid) == dump.container.id:
            yield journal


def _dumps(criu_pid: int) -> str:
    """Return the container that a CRIU dumps, "" if it dumps none: its session may not have noted that yet."""
    try:
        call = find_runtime_call(criu_pid)
    except (IdentificationError, OSError):  # it has just ended
        return ""
    return call.container_id if call is not None and call.verb == "checkpoint" else ""


def _is_being_archived(dump: Dump) -> bool:
    """Return whether containerd writes the archive of an earlier checkpoint of the container."""
    seen = Path(f"/proc/{dump.criu_pid}/root")
    name = f"/containers/{dump.container.id}/{_ARCHIVED}"
    config = read_config(dump.criu_pid, dump.container.bundle)
    made = [made_s for root in _roots(config) if (made_s := _made_s(Path(f"{seen}{root}{name}"))) is not None]
    return any(time.time() - made_s < _FRESH_S for made_s in made) or (bool(made) and any(_opened_below(f"{name}/")))


def _roots(config: Mapping[str, object]) -> set[str]:
    """Return where containerd keeps containers, by what it has mounted into one."""
    mounts = config.get("mounts")
    rows = [row for row in mounts if isinstance(row, Mapping)] if isinstance(mounts, list) else []
    return {found[1] for row in rows if (found := _CONTAINERD.fullmatch(str(row.get("source"))))}


def _made_s(directory: Path) -> float | None:
    with contextlib.suppress(OSError):
        return directory.stat().st_mtime
    return None


def _opened_below(name: str) -> Iterator[str]:
    """Yield the files below a directory, by the end of its name, that containerd has open."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            if (process / "comm").read_text().strip() == "containerd":
                yield from (link for fd in (process / "fd").iterdir() if name in (link := os.readlink(fd)))
