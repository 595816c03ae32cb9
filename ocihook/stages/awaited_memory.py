"""A checkpoint in the store whose memory is read from a snapshot, once its container runs again and CRIU has ended.

The snapshot is taken while everything stands still as CRIU has left it: so it is of the same instant as CRIU's images.
Until it is read the checkpoint awaits it (checkpoints/awaited.py). If it is lost, so is the checkpoint, and never the
container: also where the agent is killed, with which the snapshot ends.
"""

import errno
import logging
from contextlib import ExitStack
from dataclasses import dataclass
from typing import ClassVar

from ocihook.checkpoints.awaited import lose, reading, supply
from ocihook.checkpoints.pending import Job, read_job
from ocihook.checkpoints.stage import Place
from ocihook.errors import IntegrityError, OcihookError, SnapshotLost, StoreFull, plain
from ocihook.images.image_set import MovedRegions
from ocihook.images.merging import READ_PREFIX
from ocihook.linux.patience import ENDLESS, Patience
from ocihook.linux.procfs import Process, descendants
from ocihook.memory.clean_pages import MOST_WORKERS, PagesRead, readable_bytes
from ocihook.memory.left_out import find_left_out, join
from ocihook.memory.snapshot import Snapshot, Snapshotted, lacking, take
from ocihook.memory.standstill import held_instead
from ocihook.packs.packed_manifest import read_manifest
from ocihook.session.effect import Effect
from ocihook.session.journal import Journal, other_journals
from ocihook.session.participant import CallFacts, Dump, Participant, SizeFacts
from ocihook.stages.detached import keep_from_end

_KILLED = "ocihook was killed before the snapshot was read"
_FAILED = "the dump failed before the snapshot was read"
_WAIT_S = 10.0  # of a dump after which the container is gone, as by a stop that has 30 s by default

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class AwaitsMemory(Effect, kind="awaits-memory"):
    """A checkpoint awaits memory, or is about to."""

    ends_with_stage: ClassVar[bool] = False
    holds_container: ClassVar[bool] = False
    init: Process  # of the container
    place: Place
    reason: str = ""  # why it was lost

    def __post_init__(self) -> None:
        self._claim = ExitStack()  # for as long as this process lives
        self.snapshot: Snapshot | None = None  # likewise

    def claim(self) -> None:
        """Have nobody else take the checkpoint for lost.

        Raises:
            StoreError: if another process is at it.
        """
        self._claim.close()
        self._claim.enter_context(reading(self.place))

    def take_over(self, journal: Journal) -> None:
        """Claim it again."""
        del journal
        self.claim()

    def undo(self, journal: Journal, _patience: Patience) -> None:
        """Give it up, unless it has its memory."""
        store = journal.facts(CallFacts).open_store(ENDLESS)
        job = read_job(store.open(self.place.domain), self.place.pending.name)
        if job is not None and job.awaits_memory:
            self.claim()
            if not self.reason:
                self.reason = _KILLED if self.snapshot is None else _FAILED  # which only who took it knows
                journal.note_error(SnapshotLost(self.reason), "failed")
            lose(store, self.place, self.reason)
        self._claim.close()


class ChosenSnapshot(Participant):
    """Decides whether memory is read from a snapshot, before that of GPUs is among it."""

    def hold(self, dump: Dump) -> None:
        """Have memory read once the container runs again, if there is room for what it writes meanwhile."""
        call = dump.call()
        if not (dump.reads_memory and call.leave_running and call.policy.mode == "store"):
            return
        if call.policy.snapshot == "on" and not dump.gang_stops:
            reason = lacking(dump.init_pid, readable_bytes(dump.init_pid), call.snapshot_share, dump.gpu_bytes)
            if not reason:
                dump.takes_snapshot = keep_from_end(dump)
            else:
                log.info("container %s stands still while its memory is read: %s", dump.container, reason)


class EarlierSnapshot(Participant):
    """Waits until the snapshot of an earlier dump has been read: its forks are no processes of the container's own.

    That is read at normal priority meanwhile; and given up for a dump after which the container is gone, if it takes
    long: who stops a container does not wait for ever.
    """

    def needs_tasks(self, dump: Dump) -> bool:
        """Return whether there is one: processes wait for their forks."""
        return bool(_being_read(dump))

    def prepare(self, dump: Dump) -> None:
        """Wait for it."""
        snapshots = _being_read(dump)
        if not snapshots:
            return
        with dump.journal.phase("wait for snapshot"):
            for snapshot in snapshots:
                snapshot.hurry()
            patience = dump.patience if dump.call().leave_running else dump.patience.within(_WAIT_S)
            if not patience.until(lambda: not _being_read(dump)):
                log.warning("container %s: the snapshot of an earlier dump is given up for this one", dump.container)
                for snapshot in _being_read(dump):
                    snapshot.give_up()
                dump.patience.until(lambda: not _being_read(dump))


def _being_read(dump: Dump) -> list[Snapshotted]:
    found = [effect for journal in other_journals(dump.journal) if (effect := journal.find(Snapshotted))]
    inside = set(descendants(dump.init_pid)) if found else set()
    return [effect for effect in found if any(process.pid in inside for process in effect.processes)]


def await_memory(dump: Dump, place: Place) -> None:
    """Have a checkpoint that is about to be staged await memory."""
    init = Process.find(dump.init_pid)
    if init is None:
        raise OcihookError(f"process {dump.init_pid}, the container's first, has ended")
    effect = dump.journal.find(AwaitsMemory) or dump.journal.add(AwaitsMemory(init=init, place=place))
    effect.claim()


def take_snapshot(dump: Dump) -> None:
    """Take the snapshot that a checkpoint awaits, if it does: CRIU has released the container, which is still frozen.

    Raises:
        SnapshotLost: if the agent was killed after it had begun to: the container may have run since.
        OcihookError, OSError: if it cannot be taken.
    """
    journal = dump.journal
    effect = journal.find(AwaitsMemory)
    if effect is None:
        return
    try:
        if journal.find(Snapshotted) is not None:
            raise SnapshotLost(_KILLED)
        read = journal.find(PagesRead)
        left_out = find_left_out(read.record, read.snapshot) if read else []
        effect.snapshot = take(
            [area for image in left_out for area in image.areas()],
            effect.place.pending,
            journal=journal,
            still=held_instead(dump),
            prefix=READ_PREFIX,
            workers=min(dump.call().workers, MOST_WORKERS),
            durable=False,
            patience=dump.patience,
            progress=dump.progress,
        )
    except Exception as error:
        effect.reason = _reason(error)
        raise


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return plain(error)
    if isinstance(error, OcihookError):
        return str(error.args[0])  # what to do now is another matter
    return f"{type(error).__name__}: {error} (a defect in ocihook)"


def read_snapshot(dump: Dump) -> str:
    """Read the snapshot, and make the checkpoint one like any other; return what to report.

    Raises:
        SnapshotLost: if it was lost.
        OcihookError, OSError: if the checkpoint cannot be made complete, as on a full disk.
    """
    journal = dump.journal
    effect, read = journal.find(AwaitsMemory), journal.find(PagesRead)
    assert effect is not None
    place = effect.place
    try:
        job = read_job(dump.store.open(place.domain), place.pending.name)
        if job is None:
            raise IntegrityError(f"checkpoint {place.pending.name} was removed before its snapshot was read")
        if not job.awaits_memory and not job.lost:  # the agent was killed after that
            return _supplied(dump, effect, job)
        if effect.snapshot is None or read is None:
            raise SnapshotLost(_KILLED)
        copied = effect.snapshot.read()
        with journal.phase("merge") as phase:
            left_out = find_left_out(read.record, read.snapshot)
            joined = join(left_out, copied, job.images, place.pending, dump.call().workers)
            phase["bytes"] = sum(image.size_bytes for image in joined.images)
            before = read_manifest(place.pending)  # what was moved before CRIU began
            if before is not None:
                joined = MovedRegions(before.regions, before.packs + joined.packs, before.gpu, joined.images)
            job = supply(dump.store, place, joined, dump.container, durable=False)
    except Exception as error:
        effect.reason = _reason(error)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StoreFull(f"no space left for the memory of its snapshot in {place.pending.parent}") from error
        raise
    return _supplied(dump, effect, job)


def _supplied(dump: Dump, effect: AwaitsMemory, job: Job) -> str:
    dump.journal.note(SizeFacts(raw_bytes=job.raw_bytes, checkpoint=job.id))
    effect.undo(dump.journal, ENDLESS)
    dump.journal.forget(effect)
    return f"container {dump.container}: all of its memory is read, {job.raw_bytes} bytes"
