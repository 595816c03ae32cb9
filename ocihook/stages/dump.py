"""One dump, stage by stage: who is dumped and how, then what each participant does about it."""

import dataclasses
import logging
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

from ocihook.config import Settings, apply_annotations
from ocihook.container.conmon import conmon_name
from ocihook.container.identity import container_ref, gang_ref, grace_of
from ocihook.container.runtime_call import RuntimeCall, find_runtime_call, read_annotations
from ocihook.errors import OcihookError
from ocihook.gpu.dump import keep_still
from ocihook.linux.patience import Patience
from ocihook.linux.procfs import Process
from ocihook.memory.standstill import Paused
from ocihook.model import ContainerRef
from ocihook.packs.cipher import KeySource
from ocihook.packs.frame import load_json
from ocihook.packs.packing import AGENT_BYTES, workers_within
from ocihook.session.journal import Journal
from ocihook.session.participant import CallFacts, Dump
from ocihook.session.undo import undo_all, undo_holding
from ocihook.stages.awaited_memory import AwaitsMemory, read_snapshot, take_snapshot
from ocihook.stages.detached import KeptFromEnd, forget_earlier
from ocihook.stages.order import participants
from ocihook.wire import CONTAINER_RECORD_NAME, CONTAINERS_NAME, Request

log = logging.getLogger(__name__)


def pre_dump(
    journal: Journal, patience: Patience, request: Request, directory: Path, load_settings: Callable[[], Settings]
) -> str:
    """Find out which container is dumped and what is wanted, quiesce it, move out what CRIU cannot dump.

    Raises:
        OcihookError: to refuse the dump; the container runs on as if nothing had been done to it.
    """
    call = find_runtime_call(request.criu_pid)
    if call is None:  # somebody's own `criu dump`, which reads default.conf too
        return ""
    forget_earlier(request.criu_pid)
    identify(journal, request, call, load_settings())
    dump = _dump(journal, patience, request, directory)
    taking_part = participants()
    try:
        for participant in taking_part:
            participant.refuse(dump)
        for participant in taking_part:
            dump.needs_tasks |= participant.needs_tasks(dump)
        for participant in taking_part:
            participant.prepare(dump)
            patience.check()
        for participant in reversed(taking_part):
            participant.hold(dump)
            patience.check()
    except Exception as failure:
        journal.note_error(failure, "failed")  # which the gang hears of
        try:
            undo_all(journal, Patience(timeout_s=0))  # while what is held is held
        except OcihookError as error:
            log.warning("%s", error)  # tried again when CRIU is gone; the refusal itself is reported
        raise
    finally:
        dump.hold.release()
    return dump.remark


def post_dump(
    journal: Journal, patience: Patience, request: Request, directory: Path, _load_settings: Callable[[], Settings]
) -> str:
    """Pack the page images, or take them to the store.

    Raises:
        OcihookError: to fail the dump, if the policy wants that when packing fails; the images are as CRIU wrote them.
    """
    if journal.container is None:
        return ""
    dump = _dump(journal, patience, request, directory)
    messages = [participant.after_images(dump) for participant in reversed(participants())]
    patience.check()
    return " ".join(filter(None, messages))


def failed(journal: Journal) -> None:
    """Keep still what must not run when CRIU, which has failed, releases the container."""
    keep_still(journal)


def detached(
    journal: Journal, patience: Patience, request: Request, directory: Path, _load_settings: Callable[[], Settings]
) -> str:
    """Let the container run as it did; then do what could wait for that, and let CRIU end.

    Raises:
        OcihookError: to fail the dump, which the runtime sees by CRIU being killed; the container runs on.
    """
    kept = journal.find(KeptFromEnd)
    if kept is None:
        return ""
    request.init_pid = kept.init.pid
    dump = _dump(journal, patience, request, directory)
    take_snapshot(dump)
    if journal.find(Paused) is None:  # else its engine resumes it, once CRIU has ended
        _give_back(journal)
    messages = [participant.container_runs(dump) for participant in reversed(participants())]
    patience.check()
    kept.release(journal)
    return " ".join(filter(None, messages))


def snapshot(
    journal: Journal, _patience: Patience, request: Request, directory: Path, _load_settings: Callable[[], Settings]
) -> str:
    """Read the snapshot that was taken, while the container runs on: CRIU has ended.

    Raises:
        OcihookError: if it was lost, or the checkpoint cannot be made complete.
    """
    awaiting = journal.find(AwaitsMemory)
    if awaiting is None:
        return ""
    request.init_pid = awaiting.init.pid
    _give_back(journal)
    return read_snapshot(_dump(journal, Patience(), request, directory))


def _give_back(journal: Journal) -> None:
    """Let the container run as it did."""
    try:
        undo_holding(journal, Patience())
    except OcihookError as error:
        log.warning("%s", error)  # tried again when the session ends; the checkpoint is good all the same


def _dump(journal: Journal, patience: Patience, request: Request, directory: Path) -> Dump:
    return Dump(
        journal=journal,
        patience=patience,
        criu_pid=request.criu_pid,
        init_pid=request.init_pid,
        image_dir=journal.image_dir,
        directory=directory,
    )


def identify(journal: Journal, request: Request, call: RuntimeCall, settings: Settings) -> None:
    """Record container, image directory and policy in the journal.

    Raises:
        AdmissionError: if a dump is asked for what the container may not set; a restore goes ahead without it.
        ConfigError: likewise, if it is wrong.
    """
    annotations = read_annotations(request.criu_pid, call.bundle)
    name = conmon_name(request.init_pid or request.criu_pid, call.container_id)
    container = container_ref(
        annotations, container_id=call.container_id, runtime=call.runtime, bundle=call.bundle, name=name
    )
    container = dataclasses.replace(container, owner_uid=_owner_uid(journal, container))
    journal.identify(container, os.readlink(request.image_dir))
    policy, refused, unknown = apply_annotations(settings, annotations, in_pod=container.is_in_pod)
    facts = dataclasses.replace(call_facts(settings, request.criu_pid), policy=policy, verb=call.verb)
    journal.note(
        dataclasses.replace(
            facts,
            leave_running=call.leave_running,
            init=Process.find(request.init_pid),  # 0 in a restore: nobody's
            cgroup=call.cgroup,
            criu_asked=call.options,
            criu_config=annotations.get("org.criu.config", ""),
            gang=gang_ref(annotations, container),
            grace_s=grace_of(annotations),
            memory_room_bytes=max(0, settings.bound_bytes - AGENT_BYTES) if call.leave_running else 0,
        )
    )
    for reason in (*unknown, *refused):
        log.warning("container %s: %s", container, reason)
    if refused and call.verb == "checkpoint":
        raise refused[0]


def _owner_uid(journal: Journal, container: ContainerRef) -> str:
    """Return the uid of a container's owner, as the runtime handler has it on record; "": it is not known."""
    directory = journal.path.parents[1] / CONTAINERS_NAME / container.id.replace("/", "")
    try:
        kept = load_json((directory / CONTAINER_RECORD_NAME).read_bytes())
        return ContainerRef.from_json(kept["container"]).owner_uid
    except (OSError, ValueError, TypeError, KeyError):  # not a container of the handler, or the handler reports it
        return ""


def call_facts(settings: Settings, criu_pid: int) -> CallFacts:
    """Return what is known of a call whose container is not."""
    return CallFacts(
        policy=settings.policy,
        criu_version=criu_version(criu_pid),
        workers=pack_workers(settings),
        snapshot_share=settings.snapshot_share,
        store=(settings.store_dir, *KeySource.of(settings)),
        coordinator=(settings.coordinator, settings.tls_dir),
    )


def pack_workers(settings: Settings) -> int:
    """Return how many processes may pack or unpack at a time."""
    cores = settings.workers or len(os.sched_getaffinity(0))
    return workers_within(settings.bound_bytes, cores)


def criu_version(criu_pid: int) -> str:
    """Return the version of a running CRIU, "" if it does not say."""
    try:
        done = subprocess.run(
            [f"/proc/{criu_pid}/exe", "--version"], capture_output=True, text=True, timeout=5, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    first_line = done.stdout.partition("\n")[0]
    return first_line.removeprefix("Version:").strip()
