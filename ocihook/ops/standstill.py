"""Keeps the threads of a container still while its GPU state is taken from it.

A program may ask the driver about work that it once gave it without waiting for a lock, as NCCL's watchdog does all the
time (cuEventQuery). In a checkpointed process such a call ends it: what it looks at is not mapped then. So from before
the driver's checkpoint until after its restore all threads are held but the one that the driver itself needs; and
while CRIU is at work, which must hold them itself, the container is frozen.
"""

import contextlib
from collections.abc import Container, Iterator, Mapping
from pathlib import Path

from ocihook.linux.cgroup import Freezer, find_freezer, wait_until_let_go
from ocihook.linux.procfs import Process, descendants, pid_below
from ocihook.linux.ptrace import held
from ocihook.ops.journal import Journal

THAWED = "thawed"  # effect: the engine had frozen it
FROZEN = "frozen"  # effect: it had not
FREEZE_TIMEOUT_S = 10.0
_ENCLOSURE = "ocihook-frozen"


class Hold:
    """Threads that stand still until they are let go, or this process ends."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self.is_empty = True

    def add(self, threads: Mapping[Process, int], *, waits: bool = True) -> None:
        """Hold all threads of processes but one each; without `waits` those that are frozen do not stand still yet.

        Raises:
            TraceError: if one cannot be held.
        """
        for process, able in threads.items():
            self._stack.enter_context(held(process.pid, without=able, waits=waits))
            self.is_empty = False

    def close(self) -> None:
        """Let all go on."""
        self._stack.close()


@contextlib.contextmanager
def running_tasks(journal: Journal, init_pid: int, *, has_gpu: bool) -> Iterator[Hold]:
    """Let the tasks of a container run that its engine has frozen, and freeze them again.

    If any are held in the end they are frozen in any case. What the journal knows of that undoes it.

    Raises:
        FreezeError: if they cannot be thawed or frozen.
    """
    freezer = find_freezer(init_pid)
    was_frozen = freezer is not None and freezer.is_frozen()
    kind = THAWED if was_frozen else FROZEN if has_gpu else ""
    hold = Hold()
    if freezer is None or not kind:
        try:
            yield hold
        finally:
            hold.close()
        return
    journal.push(kind, directory=str(freezer.directory), version=freezer.version)
    stays_frozen = was_frozen
    try:
        if was_frozen:
            with journal.phase("thaw"):
                freezer.thaw(FREEZE_TIMEOUT_S)
        yield hold
        stays_frozen = was_frozen or not hold.is_empty
    finally:
        if stays_frozen:
            with journal.phase("freeze"):
                freezer.freeze(FREEZE_TIMEOUT_S, meanwhile=hold.close)
        hold.close()
        if was_frozen or not stays_frozen:
            journal.pop(kind)


def freeze_restored(journal: Journal, init_pid: int, names: Container[str]) -> None:
    """Freeze processes that CRIU has restored and is about to let go of, each in a cgroup made for that.

    Their own cgroup will not do: runtimes have CRIU itself in it at this time.

    Args:
        journal: gets what undoes it.
        init_pid: of the container.
        names: of the processes, as seen in the container.

    Raises:
        FreezeError: if they cannot be frozen.
        OSError: if no cgroup can be made for them.
    """
    for pid in descendants(init_pid):
        if pid_below(init_pid, pid) in names and (freezer := find_freezer(pid)):
            inner = Freezer(freezer.directory / _ENCLOSURE, freezer.version)
            if not inner.directory.exists():
                journal.push(FROZEN, directory=str(inner.directory), version=inner.version, is_enclosure=True)
            inner.enclose(pid)
            inner.freeze(0)


def thaw(journal: Journal) -> None:
    """Thaw what was frozen here and not by the engine, if it still exists. May run twice.

    Raises:
        FreezeError: if it cannot be thawed.
        OSError: if a cgroup that was made here cannot be removed.
    """
    for effect in journal.effects:
        if effect["kind"] == FROZEN and Path(effect["directory"]).exists():
            freezer = Freezer(Path(effect["directory"]), effect["version"])
            freezer.thaw(FREEZE_TIMEOUT_S)
            if effect.get("is_enclosure"):
                freezer.dissolve()


@contextlib.contextmanager
def standing_still(journal: Journal, threads: Mapping[Process, int], timeout_s: float | None) -> Iterator[None]:
    """Hold the threads of processes from when CRIU has let go of them; what was frozen here is thawed.

    Args:
        journal: of the session.
        threads: of processes that are alive: the one that goes on.
        timeout_s: how long to wait for CRIU; None: as long as it takes.

    Raises:
        FreezeError: if CRIU does not let go in time, or what was frozen here cannot be thawed.
        TraceError: if they cannot be held.
    """
    for process in threads:
        wait_until_let_go(process, timeout_s)
    hold = Hold()
    try:
        hold.add({process: able for process, able in threads.items() if process.is_alive()}, waits=False)
        thaw(journal)
        yield
    finally:
        hold.close()
