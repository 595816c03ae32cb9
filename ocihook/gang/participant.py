"""A gang's place in a dump and a restore: the outermost, so that all members reach the same moment, or none does."""

import logging
from dataclasses import dataclass, field
from ipaddress import ip_interface
from pathlib import Path

from ocihook import wire
from ocihook.checkpoints.belongings import note_alone, read_call, stopping_place
from ocihook.checkpoints.gang_note import GANG_NAME, GangNote, read_note, write_note
from ocihook.errors import MembersMissing
from ocihook.gang.completion import report_complete
from ocihook.gang.cut import End, connection_ends, ends_of_nobody
from ocihook.gang.link import Link
from ocihook.gang.membership import Attendance, Coming, Gather, find_attendance, join
from ocihook.gang.protocol import Phase
from ocihook.linux.procfs import descendants
from ocihook.model import GangRef
from ocihook.net.survey import Survey
from ocihook.session.effect import Facts
from ocihook.session.participant import Act, Dump, Participant, Restore, SizeFacts

_REPORT_S = 5.0  # that CRIU, and with it the engine, waits for a coordinator: the container runs already


log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class CutFacts(Facts):
    """What no image has of the container's connections."""

    ends_of_nobody: list[End] = field(default_factory=list)  # when its traffic was held: some time out meanwhile


_GRACE_S = 30.0  # that a pod has to end where that is not known: Kubernetes' default
_END_SLACK_S = 30.0  # for its engine to notice, and to delete it
_STOPS = "stops"  # key by which a member says that it does not run on


class Membership(Participant):
    """Meets the other containers of the job."""

    def __init__(self) -> None:
        self._attendance: Attendance | None = None
        self._note: GangNote | None = None

    def refuse(self, dump: Dump) -> None:
        """Wait until all members are here: nobody is touched before."""
        gang = dump.call().gang
        (dump.directory / GANG_NAME).unlink(missing_ok=True)  # of an earlier dump into the same directory
        if gang is None:
            return
        place = stopping_place(dump.store.root, dump.container.id, dump.directory)
        called = read_call(place) if place is not None else ""
        is_stopped = place is not None and not called
        attendance = _join(dump, gang, "dump", called, is_stopped=is_stopped)
        survey = Survey.of(descendants(dump.init_pid))
        links = survey.links if survey is not None and not survey.namespace.is_ours else []
        mine = {str(ip_interface(text).ip): "here" for link in links for text in link.addresses}
        peers = {str(connection.remote) for connection in survey.connections} if survey is not None else set[str]()
        calls = is_stopped and dump.policy.on_member_stop == "checkpoint"
        if not dump.call().leave_running:
            mine[_STOPS] = "yes"
        gather = _gather(dump) if is_stopped else None
        try:
            told = attendance.meet(Phase.ARRIVED, mine, {*peers, _STOPS}, calls=calls, gather=gather)
        except MembersMissing as error:
            if place is None or not is_stopped:
                raise
            if dump.policy.on_member_stop != "alone":
                note_alone(place, str(error))
                raise
            log.warning("container %s is checkpointed without its gang: %s", dump.container, error)
            attendance.end()
            return
        self._attendance = dump.gang = attendance
        dump.gang_stops = _STOPS in told
        dump.gang_addresses = told.keys() - {_STOPS}
        self._note = GangNote(
            gang=gang._replace(epoch=attendance.epoch, attempt=attendance.attempt),
            here=attendance.here,
        )
        dump.journal.identify(self._note.on(dump.container), dump.image_dir)

    def hold(self, dump: Dump) -> None:
        """Wait until no packet moves anywhere; note who was there, and what the kernel alone has of connections."""
        if self._note is not None:
            write_note(dump.directory, self._note)
            dump.journal.note(CutFacts(ends_of_nobody=_ends_of_nobody(dump)))
            dump.gang.meet(Phase.HELD)

    def after_images(self, dump: Dump) -> str:
        """Report what was dumped, and wait until all were: from here on it is a checkpoint of the gang."""
        self._find(dump)
        if self._attendance is None:
            return ""
        container = dump.container
        checkpoint = {
            "container": container.id,
            "name": container.name,
            "image_dir": dump.image_dir,
            "is_complete": not (dump.completes_later or _is_stored(dump)),
        }
        # Until CRIU froze it the container may have run, and closed one more.
        of_nobody = {*dump.journal.facts(CutFacts).ends_of_nobody, *_ends_of_nobody(dump)}
        ends = [*connection_ends(dump.directory), *sorted(of_nobody)]
        dump.gang.meet(Phase.DUMPED, {"ends": ends, "checkpoint": checkpoint})
        self._attendance.end()
        return f"container {container}: dumped with gang {self._attendance.ref}, epoch {self._attendance.epoch}"

    def container_runs(self, dump: Dump) -> str:
        """Report that what has waited until now is complete; what goes to the store is reported when it is there."""
        if dump.container.gang and not _is_stored(dump):
            report_complete(dump.container, Link(*dump.call().coordinator), dump.patience.within(_REPORT_S))
        return ""

    def check(self, restore: Restore) -> None:
        """Take part in the restore of the gang that the checkpoint was made with."""
        note = read_note(restore.directory)
        if note is None:
            return
        container = restore.journal.container
        namespace = container.pod_namespace if container else ""  # never another's
        gang = note.gang._replace(namespace=namespace)
        self._attend(restore, _join(restore, gang, "restore"))

    def before_processes(self, restore: Restore) -> str:
        """Wait until all members are here, also with a container that has no connections."""
        restore.gang.meet(Phase.ADDRESSES)
        return ""

    def needs_processes(self, restore: Restore) -> bool:
        """Return whether it takes part."""
        del restore
        return self._attendance is not None

    def recall(self, restore: Restore) -> None:
        """Find the attempt that it takes part in."""
        self._find(restore)

    def processes_wait(self, restore: Restore) -> str:
        """Wait until traffic passes everywhere."""
        if self._attendance is None:
            return ""
        restore.gang.meet(Phase.RELEASED)
        self._attendance.end()
        return f"container {restore.journal.container}: restored with gang {self._attendance.ref}"

    def _attend(self, act: Act, found: Attendance) -> None:
        act.gang = self._attendance = found

    def _find(self, act: Act) -> None:
        found = find_attendance(act.journal, act.patience)
        if found is not None:
            self._attend(act, found)


def _is_stored(dump: Dump) -> bool:
    return bool(dump.journal.facts(SizeFacts).checkpoint)


def _ends_of_nobody(dump: Dump) -> list[End]:
    survey = Survey.of(descendants(dump.init_pid))
    return [] if survey is None else list(ends_of_nobody(survey))


def _gather(dump: Dump) -> Gather:
    """Return how long a member that is stopped waits for the others, which are stopped, too, or called."""
    policy, grace_s = dump.policy, dump.call().grace_s
    if policy.on_member_stop != "checkpoint":
        return Gather(policy.gang_timeout_s, policy.gang_gather_s, "gang_timeout_s")
    if 0 < grace_s < policy.gang_timeout_s:
        return Gather(grace_s, 0.0, "its pod's grace period")
    return Gather(policy.gang_timeout_s, 0.0, "gang_timeout_s")


def _is_handled(container_id: str) -> bool:
    """Return whether the runtime handler restores a container: its gang has chosen from what."""
    return (Path(wire.RUNTIME_DIR) / wire.CONTAINERS_NAME / container_id / wire.RESTORING_NAME).exists()


def _join(act: Act, gang: GangRef, what: str, called: str = "", *, is_stopped: bool = False) -> Attendance:
    call = act.call()
    ends_within_s = (call.grace_s or _GRACE_S) + _END_SLACK_S if is_stopped else 0.0
    with act.journal.phase("gang joined"):
        link, timeout_s = Link(*call.coordinator), call.policy.gang_timeout_s
        container_id = act.journal.container.id if act.journal.container else ""
        coming = Coming(called, container_id, ends_within_s, has_chosen=what == "restore" and _is_handled(container_id))
        return join(act.journal, act.patience, gang, what, link=link, timeout_s=timeout_s, coming=coming)
