"""Processes that CRIU has made and that cannot run yet: they do not outlive a CRIU that is killed."""

import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ocihook.linux import cgroup
from ocihook.linux.patience import Patience
from ocihook.linux.procfs import Process, descendants
from ocihook.session.effect import Effect
from ocihook.session.journal import Journal
from ocihook.session.participant import Restore

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class HalfRestored(Effect, kind="half-restored"):
    """CRIU has made processes. They stay if CRIU is killed, and so do those that init makes by itself.

    They would wait for CRIU for ever or, once CRIU has released them, run without their memory or a GPU. No engine
    knows of them.
    """

    processes: list[Process]

    def undo(self, journal: Journal, _patience: Patience) -> None:
        """Kill what CRIU has left of a restore. CRIU ends its processes itself while it lives."""
        if journal.criu.is_alive():
            return
        pids = [process.pid for process in self.processes if process.is_alive()]
        left = [process for root in pids for pid in descendants(root) if (process := Process.find(pid))]
        kill(left)
        if left:
            log.error(
                "container %s: CRIU did not come to the end of its restore, the %d processes that it left were killed; "
                "the checkpoint is as it was: restore it again",
                journal.container,
                len(left),
            )


def note_half_restored(restore: Restore) -> None:
    """Record what CRIU has made so far, before it makes more: the container's init, and helpers of its own."""
    if restore.journal.find(HalfRestored) is not None:
        return
    criu = restore.journal.criu
    pids = [restore.init_pid, *(pid for pid in descendants(criu.pid) if _is_criu(pid, criu.pid))]
    processes = [process for pid in pids if (process := Process.find(pid)) and process != criu]
    restore.journal.add(HalfRestored(processes=processes))


def forget_half_restored(restore: Restore) -> None:
    """Let restored processes live: they have all that they need. If CRIU was killed meanwhile, nobody owns them.

    Raises:
        GivenUp: if it was.
    """
    half_restored = restore.journal.find(HalfRestored)
    if half_restored is not None:
        restore.progress(0)
        restore.journal.forget(half_restored)


def kill(processes: Sequence[Process]) -> None:
    """Kill processes that cannot be given back what they had."""
    for process in processes:
        cgroup.kill(process)


def _is_criu(pid: int, criu_pid: int) -> bool:
    """Return whether a process has CRIU's executable, as no action script has."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/exe").samefile(f"/proc/{criu_pid}/exe")
    return False
