"""Keeps the engine waiting after CRIU has detached from a container that runs on: what need not hold it comes then."""

import logging
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from ocihook.checkpoints.stage import STAGED_NAME
from ocihook.criu import ending
from ocihook.errors import OcihookError
from ocihook.images.image_set import discard_regions
from ocihook.linux.files import identity, same_directory
from ocihook.linux.mounts import remove_directory
from ocihook.linux.patience import ENDLESS, Patience
from ocihook.linux.procfs import Process, descendants, thread_ids, tracer_pid
from ocihook.memory.standstill import Paused
from ocihook.session.criu_statistics import note_statistics
from ocihook.session.effect import Effect
from ocihook.session.journal import Journal
from ocihook.session.participant import Dump
from ocihook.wire import DETACHED_STAGE

_KILL_TIMEOUT_S = 10.0

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class KeptFromEnd(Effect, kind="kept-from-end"):
    """CRIU waits at its end, or will, until the checkpoint is complete, or a snapshot is taken for it."""

    ends_with_stage: ClassVar[bool] = False
    holds_container: ClassVar[bool] = False
    init: Process
    work_directory: Path
    work_identity: list[int]
    image_identity: list[int]

    def undo(self, journal: Journal, patience: Patience) -> None:
        """See that CRIU does not wait there.

        One that does already is killed, so that its runtime fails: the checkpoint is not complete, and there is no
        other way left to report that.

        Raises:
            OcihookError: if it has not detached from the container yet.
        """
        verdict = journal.verdict_of("post-dump")
        if journal.criu.is_alive() and verdict is not None and verdict[0] == 0:
            if not patience.until(lambda: self.has_detached(journal.criu)):
                raise OcihookError(f"CRIU (pid {journal.criu.pid}) still holds the container")
            journal.criu.send(signal.SIGKILL)
            if not Patience(timeout_s=_KILL_TIMEOUT_S).until(lambda: not journal.criu.is_alive()):
                raise OcihookError(f"CRIU (pid {journal.criu.pid}) does not end")
        work_directory = self._open_work_directory(journal.criu)
        if work_directory is not None:
            ending.forget(work_directory)
            os.close(work_directory)

    def has_detached(self, criu: Process) -> bool:
        """Return whether CRIU traces no process of the container any more.

        One that was killed does not count: CRIU may wait for it only when it ends itself.
        """
        threads = (tid for pid in descendants(self.init.pid) for tid in thread_ids(pid))
        return all(tracer_pid(tid) != criu.pid or Process.find(tid) is None for tid in threads)

    def open_images(self, journal: Journal) -> int:
        """Open the image directory, whose descriptor CRIU has closed by now.

        Raises:
            OSError: if it is not there any more.
        """
        where = Path(f"/proc/{journal.criu.pid}/root{journal.image_dir}")  # in whatever mount namespace CRIU is
        directory = os.open(where, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        if identity(Path(f"/proc/self/fd/{directory}")) != self.image_identity:
            os.close(directory)
            raise FileNotFoundError(f"{journal.image_dir} is not the image directory any more")
        return directory

    def release(self, journal: Journal) -> None:
        """Let CRIU end: the checkpoint is complete.

        Raises:
            OSError: from the file system.
        """
        work_directory = self._open_work_directory(journal.criu)
        if work_directory is not None:
            patience = Patience({"CRIU": journal.criu})
            try:
                written = ending.release(work_directory, patience)
                if written:  # the engine may remove them before anybody reads them
                    note_statistics(journal, written)
            finally:
                patience.close()
                os.close(work_directory)
        journal.forget(self)

    def _open_work_directory(self, criu: Process) -> int | None:
        path = Path(f"/proc/{criu.pid}/cwd") if criu.is_alive() else self.work_directory
        found = same_directory(path, self.work_identity)
        return os.open(found, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC) if found else None


@dataclass(kw_only=True)
class KeptMemory(Effect, kind="kept-memory"):
    """The record of GPU memory that is in packs, and the packs if they fit into memory, until all is complete."""

    holds_container: ClassVar[bool] = False
    directory: Path
    images: Path
    identity: list[int]

    def undo(self, _journal: Journal, _patience: Patience) -> None:
        """Remove them; and packs among the images, if these did not become a checkpoint."""
        images = same_directory(self.images, self.identity)
        if images:
            (images / STAGED_NAME).unlink(missing_ok=True)
            discard_regions(images)
        remove_directory(self.directory)


def forget_earlier(criu_pid: int) -> None:
    """See that CRIU does not wait at its end for an earlier session, whose agent and CRIU were both killed.

    Raises:
        OSError: if CRIU is gone.
    """
    work_directory = os.open(f"/proc/{criu_pid}/cwd", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        ending.forget(work_directory)
    finally:
        os.close(work_directory)


def can_wait(dump: Dump) -> bool:
    """Return whether anything is gained by waiting: of a container that its engine has frozen, nothing is."""
    return dump.call().leave_running and dump.journal.find(Paused) is None


def keep_from_end(dump: Dump) -> bool:
    """Have CRIU wait at its end; False if it cannot be made to."""
    journal, init = dump.journal, Process.find(dump.init_pid)
    if init is None:
        return False
    work_directory = Path(f"/proc/{dump.criu_pid}/cwd")
    effect = journal.find(KeptFromEnd) or journal.add(
        KeptFromEnd(
            init=init,
            work_directory=work_directory.readlink(),
            work_identity=identity(work_directory),
            image_identity=identity(dump.directory),
        )
    )
    fd = os.open(work_directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        ending.keep(fd)
    except OSError as error:
        log.warning("container %s stands still while its memory is packed: %s", dump.container, error)
        journal.forget(effect)
        return False
    finally:
        os.close(fd)
    return True


def keep_no_longer(journal: Journal) -> None:
    """Let CRIU end without waiting, before it has come so far."""
    effect = journal.find(KeptFromEnd)
    if effect is not None:
        effect.undo(journal, ENDLESS)
        journal.forget(effect)


def is_kept_from_end(journal: Journal) -> bool:
    """Return whether CRIU waits at its end for what is to come then, or will."""
    verdict = journal.verdict_of("post-dump")
    is_done = journal.verdict_of(DETACHED_STAGE) is not None
    return journal.find(KeptFromEnd) is not None and verdict is not None and verdict[0] == 0 and not is_done


def is_due(journal: Journal) -> bool:
    """Return whether CRIU has detached from the container, and what is to come then can."""
    effect = journal.find(KeptFromEnd)
    return effect is not None and is_kept_from_end(journal) and effect.has_detached(journal.criu)
