"""Keeps a container still while its GPU state is moved out, and lets it run when nobody else holds it.

A program may ask the driver about work that it once gave it without waiting for a lock, as NCCL's watchdog does all the
time (cuEventQuery). In a checkpointed process such a call ends it: what it looks at is not mapped then. So from before
the driver's checkpoint until after its restore all threads are held but the one that the driver itself needs; and
while CRIU is at work, which must hold them itself, the container is frozen.

CRI-O and containerd freeze a container before its dump and resume it afterwards, unless they have given up by then.
CRIU leaves a container as frozen as it found it. So after an engine gave up nobody resumes its container.
"""

import contextlib
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ocihook.errors import FreezeError
from ocihook.linux.cgroup import Freezer, find_freezer, wait_until_let_go
from ocihook.linux.hold import Hold
from ocihook.linux.patience import ENDLESS, Patience
from ocihook.linux.procfs import Process, descendants, pid_below
from ocihook.session.effect import Effect
from ocihook.session.journal import Journal
from ocihook.session.participant import Dump, Participant, Restore
from ocihook.wire import DETACHED_STAGE

_ENCLOSURE = "ocihook-frozen"


@dataclass(kw_only=True)
class Paused(Effect, kind="paused"):
    """The engine had frozen the container, and resumes it when its runtime has ended; unless it has given up."""

    directory: Path
    version: int
    is_thawed: bool = False  # by us, meanwhile

    @property
    def freezer(self) -> Freezer:
        """The container's."""
        return Freezer(self.directory, self.version)

    def undo(self, journal: Journal, _patience: Patience) -> None:
        """Freeze it again for an engine that is waiting; let it run if there is none. Else the engine has it by now."""
        if is_given_up(journal):
            _thaw_for_good(self.freezer, journal)
        elif self.is_thawed and journal.criu.is_alive() and self.directory.exists():
            self.freezer.freeze(ENDLESS)
            self.is_thawed = False
            if is_given_up(journal):  # meanwhile
                self.freezer.thaw(ENDLESS)


@dataclass(kw_only=True)
class Frozen(Effect, kind="frozen"):
    """We have frozen the container."""

    directory: Path
    version: int

    def undo(self, journal: Journal, _patience: Patience) -> None:
        """Let it run."""
        _thaw_for_good(Freezer(self.directory, self.version), journal)


@dataclass(kw_only=True)
class Enclosed(Effect, kind="enclosed"):
    """We have frozen a process in a cgroup made for that, which its engine does not know and so does not thaw."""

    directory: Path
    version: int

    @property
    def freezer(self) -> Freezer:
        """That of the process."""
        return Freezer(self.directory, self.version)

    def undo(self, _journal: Journal, _patience: Patience) -> None:
        """Let it run as far as its engine does, in the cgroup that it was in."""
        if self.directory.exists():
            self.freezer.thaw(None)
            self.freezer.dissolve()


def _thaw_for_good(freezer: Freezer, journal: Journal) -> None:
    """Thaw a container, once CRIU cannot freeze it again any more: it leaves one as frozen as it found it.

    Raises:
        FreezeError: as long as it can, or if the container does not run in time.
    """
    if journal.criu.is_alive() and journal.stage not in ("pre-dump", DETACHED_STAGE):
        raise FreezeError(f"CRIU (pid {journal.criu.pid}) still holds the container")
    freezer.thaw(ENDLESS)  # which has a limit of its own: that is up to the kernel alone


class Standstill(Participant):
    """Thaws what the engine has frozen, so that others can work on it; freezes it again before CRIU begins."""

    def prepare(self, dump: Dump) -> None:
        """Let the tasks run, if anybody needs them to.

        Whatever is to be frozen later is on record from here on: what others do is undone before it is thawed.
        """
        freezer, journal = dump.freezer, dump.journal
        if freezer is None:
            return
        if not freezer.is_frozen():
            if dump.has_gpu or dump.has_connections or dump.reads_memory:
                journal.add(Frozen(directory=freezer.directory, version=freezer.version))
            return
        journal.add(Paused(directory=freezer.directory, version=freezer.version, is_thawed=dump.needs_tasks))
        if dump.needs_tasks:
            with journal.phase("thaw"):
                freezer.thaw(dump.patience)

    def hold(self, dump: Dump) -> None:
        """Freeze a container that was frozen, has threads that must not run, or is to be read.

        The threads need no other hold then.
        """
        paused, freezer = dump.journal.find(Paused), dump.freezer
        must_stop = not dump.hold.is_empty or dump.reads_memory
        if freezer is not None and (must_stop or (paused and paused.is_thawed)):
            with dump.journal.phase("freeze"):
                freezer.freeze(dump.patience, meanwhile=dump.hold.release)
            if paused is not None:
                paused.is_thawed = False
                dump.journal.save()

    def running(self, restore: Restore) -> None:
        """Let everything run; what the policy keeps without its GPU is the engine's now, too."""
        _thaw(restore.journal, restore.patience)


def is_given_up(journal: Journal) -> bool:
    """Return whether the engine has given up: its runtime has ended before CRIU, or before a verdict."""
    has_ended = journal.runtime is not None and not journal.runtime.is_alive()
    if has_ended and (journal.criu.is_alive() or journal.is_interrupted):
        journal.give_up()
    return journal.is_given_up


def freeze_restored(restore: Restore, names: Container[str]) -> None:
    """Freeze processes that CRIU has restored and is about to release; as `freeze_apart`.

    Args:
        restore: gets what undoes it.
        names: of the processes, as seen in the container.
    """
    found = [pid for pid in descendants(restore.init_pid) if pid_below(restore.init_pid, pid) in names]
    freeze_apart(restore.journal, found)


def freeze_apart(journal: Journal, pids: Iterable[int], *, undone_last: bool = False) -> None:
    """Freeze processes that must not run yet, whoever thaws their container, each in a cgroup made for that.

    Their own cgroup will not do: an engine that was restarted, or has given up, thaws it; and in a restore runtimes
    have CRIU itself in it. CRIU may trace them: then they stand still from when it lets go of them.

    Args:
        journal: gets what undoes it.
        pids: of the processes.
        undone_last: whether other effects, undone first, let them run.

    Raises:
        FreezeError: if they cannot be frozen.
        OSError: if no cgroup can be made for them.
    """
    for pid in pids:
        freezer = find_freezer(pid)
        if freezer is None or freezer.directory.name == _ENCLOSURE:
            continue
        inner = Freezer(freezer.directory / _ENCLOSURE, freezer.version)
        if not inner.directory.exists():
            journal.add(Enclosed(directory=inner.directory, version=inner.version), undone_last=undone_last)
        inner.enclose(pid)
        inner.freeze(None)


def _thaw(journal: Journal, patience: Patience) -> None:
    """Thaw what nobody else will: what was frozen here, and what an engine has frozen that gave up. May run twice."""
    for effect in reversed(journal.effects):
        if isinstance(effect, Frozen | Enclosed) or (isinstance(effect, Paused) and is_given_up(journal)):
            effect.undo(journal, patience)
            journal.forget(effect)


def _enclosures(journal: Journal) -> list[Freezer]:
    enclosed = (effect.freezer for effect in journal.effects if isinstance(effect, Enclosed))
    return [freezer for freezer in enclosed if freezer.directory.exists()]


@contextlib.contextmanager
def held_instead(dump: Dump) -> Iterator[Hold]:
    """Hold all threads of a container once CRIU has released them, instead of its freezer, which has them again later.

    So they can be made to do something while nothing in the container runs. They may still be on their way to their
    stop.

    Raises:
        FreezeError: if it was not frozen before, or cannot be thawed or frozen again.
        TraceError: if they cannot be held.
    """
    journal = dump.journal
    frozen = journal.find(Paused) or journal.find(Frozen)
    if frozen is None:
        raise FreezeError(f"container {dump.container} was not frozen")
    freezer, hold = Freezer(frozen.directory, frozen.version), Hold()
    found = filter(None, map(Process.find, descendants(dump.init_pid)))
    try:
        hold.add(dict.fromkeys(found, 0), None)
        _note_thawed(frozen, journal, is_thawed=True)
        freezer.thaw(dump.patience)
        for inner in _enclosures(journal):
            inner.thaw(None)
        yield hold
    finally:
        try:
            for inner in _enclosures(journal):
                inner.freeze(None)
            freezer.freeze(ENDLESS, meanwhile=hold.release)
            _note_thawed(frozen, journal, is_thawed=False)
        finally:
            hold.release()


def _note_thawed(frozen: Paused | Frozen, journal: Journal, *, is_thawed: bool) -> None:
    if isinstance(frozen, Paused):
        frozen.is_thawed = is_thawed
        journal.save()


@contextlib.contextmanager
def standing_still(
    journal: Journal,
    threads: Mapping[Process, int],
    patience: Patience,
    before_thaw: Callable[[], None] = lambda: None,
) -> Iterator[None]:
    """Hold the threads of processes once CRIU has released them; what nobody else will thaw is thawed.

    Args:
        journal: of the session.
        threads: of processes that are alive: the one that goes on.
        patience: how long to wait for CRIU.
        before_thaw: is called while all is held; if it raises, what is frozen stays frozen.

    Raises:
        FreezeError: if CRIU does not release them in time, or what was frozen here cannot be thawed.
        TraceError: if they cannot be held.
    """
    for process in threads:
        wait_until_let_go(process, patience)
    hold = Hold()
    try:
        alive = {process: able for process, able in threads.items() if process.is_alive()}
        hold.add(alive, None)
        before_thaw()
        _thaw(journal, patience)
        yield
    finally:
        hold.release()
