"""The audit's place in a dump and a restore.

post-dump: tasks are stopped, and nothing of CRIU's is in them. pre-resume: their credentials and filters are in place,
and none has run. Whatever goes wrong with the audit itself is logged: no dump and no restore fails for it.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ocihook.audit.comparing import Difference, compare, in_words
from ocihook.audit.inheriting import make_inherit
from ocihook.audit.mapped import Allowance, parse_spans
from ocihook.audit.reading import Reader
from ocihook.audit.rows import Target
from ocihook.audit.state import STATE_NAME, ContainerState, read_state, write_state
from ocihook.criu.mappings import mark_wiped
from ocihook.criu.version import parse_version
from ocihook.criu.waits import continue_waits
from ocihook.errors import GivenUp, OcihookError, StateLost, plain
from ocihook.linux.cgroup import allowed_cpus, unified_cgroup
from ocihook.linux.procfs import descendants
from ocihook.session.effect import Facts
from ocihook.session.participant import Dump, Participant, Restore

_FAULTS = (OcihookError, OSError, ValueError, LookupError, TypeError, OverflowError)

_WRITES_WIPED = (4, 2)
_FOR_WIPED_S, _MOST_WIPED_BYTES = 0.2, 8 << 30  # to look for it, while the container may run
_SHOWN = 5  # processes that a message names

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class WipedFacts(Facts):
    """Facts that CRIU before 4.2 does not write."""

    wiped: Mapping[str, str] | None = None  # addresses of memory with MADV_WIPEONFORK, by pids in the container


class Audit(Participant):
    """Records the state of all tasks; after a restore compares it, puts back what can be, and reports the rest."""

    def prepare(self, dump: Dump) -> None:
        """Remove the note of an earlier dump into the same directory; note the memory that CRIU will forget to wipe."""
        (dump.directory / STATE_NAME).unlink(missing_ok=True)
        if dump.policy.mode != "off" and parse_version(dump.call().criu_version) < _WRITES_WIPED:
            allowance = Allowance(_FOR_WIPED_S, _MOST_WIPED_BYTES)
            try:
                wiped = Reader(dump.init_pid, "").wiped(descendants(dump.init_pid), allowance)
                dump.journal.note(WipedFacts(wiped=wiped))
            except _FAULTS as error:
                log.warning("container %s: its memory is not looked at: %s", dump.container, plain(error))

    def after_images(self, dump: Dump) -> str:
        """Record, once: where the stage starts over the manifest may have the note's checksum already."""
        if dump.policy.mode == "off" or (dump.directory / STATE_NAME).exists():
            return ""
        dump.patience.check()
        _mark_wiped(dump)
        _continue_waits(dump)
        try:
            with dump.journal.phase("record tasks") as phase:
                state = _read_container(dump)
                phase["bytes"] = write_state(dump.directory, state)
        except _FAULTS as error:
            log.warning("container %s: the state of its tasks is not recorded: %s", dump.container, plain(error))
            return ""
        return _about_left_out(dump, state)

    def before_processes(self, restore: Restore) -> str:
        """Give CRIU what the tasks inherit from it; without a note, what is right for all."""
        if restore.journal.container is None or restore.policy.mode == "off":  # None: a `criu restore` of a person
            return ""
        try:
            recorded = read_state(restore.directory) or ContainerState()
            make_inherit(restore.journal.criu.pid, recorded, restore.patience)
        except GivenUp:
            raise
        except _FAULTS as error:  # what is lost for it, the comparison reports
            log.info("container %s: CRIU cannot be prepared: %s", restore.journal.container, plain(error))
        return ""

    def about_to_run(self, restore: Restore) -> None:
        """Compare, and put back."""
        try:
            recorded = read_state(restore.directory)
            if recorded is not None:
                with restore.journal.phase("compare tasks"):
                    _report(restore, audit(recorded, restore.init_pid, restore.call().cgroup))
        except _FAULTS as error:
            container = restore.journal.container
            log.warning("container %s: the state of its tasks is not compared: %s", container, plain(error))


def _mark_wiped(dump: Dump) -> None:
    for key, spans in (dump.journal.facts(WipedFacts).wiped or {}).items():
        try:
            mark_wiped(dump.directory, int(key), parse_spans(spans))
        except _FAULTS as error:
            log.warning("container %s: MADV_WIPEONFORK of process %s is lost: %s", dump.container, key, plain(error))


def _continue_waits(dump: Dump) -> None:
    try:
        continue_waits(dump.directory)
    except _FAULTS as error:
        log.warning("container %s: threads that wait are restored with EINTR: %s", dump.container, plain(error))


def _read_container(dump: Dump) -> ContainerState:
    """Read all processes of the container's cgroup; those of its tree, where others are in it, too."""
    members = dump.freezer.all_members() if dump.freezer else set()
    has_own_cgroup = dump.init_pid in members and dump.criu_pid not in members
    pids = members if has_own_cgroup else descendants(dump.init_pid)
    return _reader(dump.init_pid, dump.call().cgroup).read(pids)


def _reader(init_pid: int, cgroup: str) -> Reader:
    return Reader(init_pid, allowed_cpus(init_pid), cgroup=unified_cgroup(init_pid, cgroup))


def _about_left_out(dump: Dump, state: ContainerState) -> str:
    """Report what of the container is not in the checkpoint, or not in its record."""
    messages = []
    if state.left_out:
        messages.append(f"not in the checkpoint: {_some(state.left_out)}, started by exec and not by the container")
    if state.unread_files:
        what = f"{state.unread_files} of its descriptors (options of sockets, flags, locks)"
        messages.append(f"not recorded, so neither compared nor put back by a restore: {what}")
    if state.unread_memory:
        log.info("container %s: memory not looked at: of %s", dump.container, _some(state.unread_memory))
    for message in messages:
        log.warning("container %s: %s", dump.container, message)
    return "; ".join(f"warning: container {dump.container}: {message}" for message in messages)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (" and more" if len(names) > _SHOWN else "")


def audit(recorded: ContainerState, init_pid: int, cgroup: str = "") -> list[Difference]:
    """Put back what a restored container has lost; return what remains different.

    Args:
        recorded: the state at the dump.
        init_pid: the container's first process.
        cgroup: name of the cgroup that its runtime gave it; "" if unknown.
    """
    pids = descendants(init_pid)
    reader = _reader(init_pid, cgroup)
    found = compare(recorded, reader.read(pids))
    if not _put_back(found, reader, pids):
        return found
    return compare(recorded, _reader(init_pid, cgroup).read(pids))


def _put_back(found: Sequence[Difference], reader: Reader, pids: Sequence[int]) -> bool:
    """Put back what can be; return whether anything may have changed."""
    wanted = [difference for difference in found if difference.row.put_back]
    tasks = reader.tasks(pids) if wanted else {}
    for one in wanted:
        try:
            target = _target(one, tasks, reader)
            if target is not None and one.row.put_back:
                one.row.put_back(target, one.before, one.after)
        except _FAULTS as error:  # the comparison that follows reports it
            log.info("%s of %s cannot be put back: %s", one.row.what, one.task, plain(error))
    return bool(wanted)


def _target(one: Difference, tasks: Mapping[str, tuple[int, dict[str, int]]], reader: Reader) -> Target | None:
    """Return what has a piece of state here; None if there is nothing."""
    if not one.process:
        return Target(reader.init_pid, cgroup=reader.inner_cgroup(one.name), path=one.name.partition(" ")[2])
    pid, threads = tasks.get(one.process, (0, {}))
    tid = threads.get(one.thread, 0) if one.thread else pid
    return Target(pid, tid, int(one.file or -1)) if tid else None


def _report(restore: Restore, left: Sequence[Difference]) -> None:
    container = restore.journal.container
    for line in in_words(one for one in left if not one.row.matters):
        log.info("container %s: not restored, which no program notices: %s", container, line)
    lines = in_words(one for one in left if one.row.matters)
    if not lines:
        return
    for line in lines:
        log.warning("container %s: not restored: %s", container, line)
    restore.journal.note_error(StateLost(f"not restored: {'; '.join(lines)}"), "degraded")
    restore.remark = f"container {container}: not restored: {'; '.join(lines)}"
