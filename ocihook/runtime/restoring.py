"""A restore in place of `create`, by two processes that watch each other: whichever is killed, nothing stays half done.

The process that the engine called waits, and a worker restores. If the worker is killed the first one undoes what was
done; if the first one is killed, as by an engine that has given up, the worker does. If both are, the next call for
this container does, or `ocihook recover`. What is to be undone is on record before it is done.
"""

import contextlib
import fcntl
import json
import logging
import os
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from ocihook.belongings.bringing import bring_reversibly, take_out
from ocihook.belongings.filesystems import places_of
from ocihook.checkpoints.belongings import FACTS_NAME, IMAGES_DIR, lay_out, note_rewritten, restoring_dir
from ocihook.checkpoints.origin import Origin
from ocihook.config import Policy, Settings
from ocihook.container.descriptors import check_image_files
from ocihook.container.spec import Rights, SpecFacts, spec_facts
from ocihook.criu.conf import options
from ocihook.criu.files import content_at
from ocihook.errors import (
    CheckpointInUse,
    IntegrityError,
    OcihookError,
    ProgramChanged,
    RestoreError,
    UnsupportedError,
    plain,
    printable,
)
from ocihook.images.compatibility import check_host
from ocihook.linux.cgroup import is_in_another_namespace, kill, unshare_namespace
from ocihook.linux.files import make_directory, replace_file, try_lock
from ocihook.linux.mounts import unmount
from ocihook.linux.patience import Patience
from ocihook.linux.procfs import Process, command_line, descendants, parent_pid, pid_below
from ocihook.linux.workers import adopt_orphans, call_each, die_with_parent
from ocihook.model import ContainerRef, short_id
from ocihook.packs.frame import load_json
from ocihook.packs.packed_manifest import OtherImage, digest_file, read_manifest, write_manifest
from ocihook.packs.pages import no_progress
from ocihook.runtime import containers
from ocihook.runtime.attempts import check_attempts, count_attempt, release
from ocihook.runtime.call import Call
from ocihook.runtime.cgroups import (
    cgroup_to_be,
    cgroups_of,
    has_cgroup_namespace,
    hold,
    mend,
    namespace_root,
    remove_frozen,
)
from ocihook.runtime.choice import Chosen, fetch
from ocihook.runtime.claims import end_claim, make_claim, note_claim
from ocihook.runtime.gate import Kind, check_spec
from ocihook.runtime.unrestored import apply_unrestored
from ocihook.session.journal import open_journals, read_journal
from ocihook.session.record import from_json, to_json
from ocihook.session.undo import Recovery
from ocihook.store.domain import Domain
from ocihook.store.store import store_workers
from ocihook.store.stored_manifest import BELONGINGS_NAME, StoredManifest
from ocihook.store.thin import Thin, read_thin
from ocihook.store.verify import verify_checkpoint
from ocihook.wire import RESTORING_NAME

_ENDING_S = 30.0  # for CRIU and the agent that served it to end, once they were stopped
_LOOK_S = 0.5  # between looks at what CRIU may have left
_TAIL = 400  # characters of a runtime's log
_PIPE_BYTES = 4096
_DONE = b"\0"
_KINDS = {b"\1": CheckpointInUse, b"\2": ProgramChanged}  # by what a worker's report begins with; else RestoreError
_UNDO = "undo"
_ORIGINAL = "config.json"  # as the engine wrote it
_CRIU_LOG = "restore.log"
_CRIU_CONFIG = "org.criu.config"
_AGENT = "ocihook.agent.server"  # in the command line of one that the hook has started

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Restoring:
    """A restore that is under way, or was when all who were at it were killed."""

    workers: tuple[Process, ...]
    place: Path | None = None  # where the checkpoint is laid out, and what undoes that belongings were brought
    places: Mapping[str, Path] = field(default_factory=dict)  # where they are brought, by their names in the tar
    cgroup: Path | None = None  # of the container, that is made and frozen before its runtime moves it there
    root: Path | None = None  # cgroup that is made for the container's cgroup namespace
    claim: Path | None = None  # of the checkpoint at the remote, as is on record here

    def is_attended(self) -> bool:
        """Return whether another process is at it, which is not the other worker."""
        return any(worker.is_alive() for worker in self.workers if worker.pid not in (os.getpid(), os.getppid()))


class LaidOut(NamedTuple):
    """A checkpoint as a runtime restores it."""

    container: ContainerRef  # that was checkpointed
    host: Mapping[str, str]  # where
    other_images: tuple[OtherImage, ...]  # that the dump listed
    verify: Callable[[], object]  # reads every byte of its memory


def restore(
    call: Call, kept: containers.Kept, config: Mapping[str, Any], chosen: Chosen, settings: Settings, policy: Policy
) -> None:
    """Restore a container; it is held then. If that fails, all is as if nothing had been tried.

    Args:
        call: `create`.
        kept: the container.
        config: of its bundle.
        chosen: the checkpoint.
        settings: the node's.
        policy: of the container.

    Raises:
        CheckpointInUse: if another container has the checkpoint.
        ProgramChanged: if the container is to run another program.
        OcihookError: if it cannot be restored.
    """
    with _alone(kept, chosen.thin, settings):
        check_attempts(chosen.thin, settings)
        adopt_orphans(wanted=True)
        try:
            _watch(call, kept, config, chosen, settings, policy)
        finally:
            adopt_orphans(wanted=False)


def _watch(
    call: Call, kept: containers.Kept, config: Mapping[str, Any], chosen: Chosen, settings: Settings, policy: Policy
) -> None:
    """Have a worker restore. What a killed worker has left is undone here.

    Raises:
        OcihookError: if it could not.
    """
    caller = Process.find(os.getpid())
    assert caller is not None
    reader, writer = os.pipe()
    worker = os.fork()
    if worker == 0:
        os.close(reader)
        _work(writer, caller, lambda patience: _restore(call, kept, config, chosen, settings, policy, patience), kept)
    os.close(writer)
    with open(reader, "rb") as pipe:
        report = pipe.read()  # waits: for the worker, whose patience is with this process
    os.waitpid(worker, 0)
    if report == _DONE:
        return
    if not report:
        _end_descendants()
        settle(kept.container.id)
        raise RestoreError("the process that was restoring it was killed")
    kind = _KINDS.get(report[:1])
    raise (kind or RestoreError)(report[1 if kind else 0 :].decode(errors="replace"))


def _work(writer: int, caller: Process, act: Callable[[Patience], None], kept: containers.Kept) -> NoReturn:
    """Body of the worker; never returns."""
    report = _DONE
    try:
        adopt_orphans(wanted=True)
        me = Process.find(os.getpid())
        assert me is not None
        _note(kept, Restoring(workers=(caller, me)))
        act(Patience({"the engine's call": caller}))
    except Exception as error:
        mark = next((mark for mark, kind in _KINDS.items() if isinstance(error, kind)), b"")
        report = mark + (plain(error).encode() or b"?")
        if not isinstance(error, OcihookError | OSError):
            log.exception("restore of container %s", kept.container)
        try:
            _end_descendants()
            settle(kept.container.id)
            if not caller.is_alive():  # its engine has not heard of it, and deletes nothing
                containers.forget(kept.container.id)
        except (OcihookError, OSError) as undo_error:
            report += f". What was done could not be undone: {plain(undo_error)}".encode()
    finally:
        with contextlib.suppress(OSError):  # nobody is there to read it
            os.write(writer, report[:_PIPE_BYTES])
        os._exit(0)


def _restore(
    call: Call,
    kept: containers.Kept,
    config: Mapping[str, Any],
    chosen: Chosen,
    settings: Settings,
    policy: Policy,
    patience: Patience,
) -> None:
    place = place_of(settings, kept.container.id)
    stored = None if chosen.archive else fetch(chosen.thin, settings, patience)
    shutil.rmtree(place, ignore_errors=True)
    make_directory(place / _UNDO, within=Path(settings.store_dir))
    noted = _read(kept.container.id)
    assert noted is not None
    places = places_of(config, call.bundle)
    _note(
        kept,
        replace(
            noted, place=place, places=places, cgroup=cgroup_to_be(call, config), root=namespace_root(call, config)
        ),
    )
    laid_out = (
        _lay_out_stored(*stored, place, settings) if stored else _lay_out_archived(chosen, place, settings, patience)
    )
    then, now = _check(call, kept, config, chosen.thin, laid_out, place, policy)
    patience.check()
    if settings.remote and (stored or read_thin(place / IMAGES_DIR)):  # other nodes can have it, too
        _claim(kept, chosen.thin, settings, patience)
        patience.check()
    count_attempt(chosen.thin, settings)
    bring_reversibly(place / BELONGINGS_NAME, places, place / _UNDO, lambda _: patience.check())
    patience.check()
    _use_own_criu_settings(call, kept, config)
    init = _run(call, config, place, lsm_profile(then, now), patience)
    mend(init, cgroups_of(call))
    freezer = hold(call)
    if has_cgroup_namespace(config) and not is_in_another_namespace(init.pid):
        _warn(call, f"container {kept.container} is restored without a cgroup namespace: it sees the node's cgroups")
    for missing in apply_unrestored(init, then, now, config, patience):
        _warn(call, f"container {kept.container} is restored without {missing}")
    containers.keep(replace(kept, checkpoint=chosen.thin.checkpoint_id, init=init, cgroup=freezer.directory))
    directory = containers.directory_of(kept.container.id)
    mark = f"{init.pid} {init.start_ticks} {freezer.thawed} {freezer.switch}\n"  # hook/handler starts it by that
    replace_file(directory / containers.HELD_NAME, mark.encode(), mode=0o600, durable=False)
    patience.check()
    release(chosen.thin, settings)
    (directory / RESTORING_NAME).unlink()
    shutil.rmtree(place, ignore_errors=True)


def _claim(kept: containers.Kept, chosen: Thin, settings: Settings, patience: Patience) -> None:
    """Claim a checkpoint at the remote: on this node nobody else is at it."""
    noted = _read(kept.container.id)
    assert noted is not None
    path = note_claim(chosen, kept.container, settings)
    _note(kept, replace(noted, claim=path))
    make_claim(path, patience)


def _lay_out_stored(domain: Domain, manifest: StoredManifest, place: Path, settings: Settings) -> LaidOut:
    lay_out(domain, manifest, place, workers=store_workers(settings))
    return LaidOut(manifest.container, manifest.host, manifest.other_images, partial(_verify_stored, domain, manifest))


def _lay_out_archived(chosen: Chosen, place: Path, settings: Settings, patience: Patience) -> LaidOut:
    """Lay out what is in an engine's archive; of a thin one the memory comes into the store."""
    from ocihook.archive.restorable import lay_out_archive  # late: few are restored from archives

    def extract(path: Path) -> Origin:
        return lay_out_archive(path, chosen.thin.checkpoint_id, place, settings.max_rootfs_bytes)

    assert chosen.archive is not None
    (origin,) = call_each(extract, [chosen.archive], patience)
    if isinstance(origin, Exception):
        raise origin
    images = place / IMAGES_DIR
    thin = read_thin(images)
    if thin is not None:
        domain, stored = fetch(thin, settings, patience, with_belongings=False)
        verify = partial(_verify_stored, domain, stored)
        return LaidOut(origin.container, stored.host, stored.other_images, verify)
    from ocihook.images.image_set import verify_image_set  # late, as above

    packed = read_manifest(images)
    check = partial(verify_image_set, images, workers=store_workers(settings))
    return LaidOut(origin.container, packed.host if packed else {}, packed.other_images if packed else (), check)


def _verify_stored(domain: Domain, manifest: StoredManifest) -> None:
    with domain.shared():
        verify_checkpoint(domain, manifest)


def _check(
    call: Call,
    kept: containers.Kept,
    config: Mapping[str, Any],
    chosen: Thin,
    laid_out: LaidOut,
    place: Path,
    policy: Policy,
) -> tuple[Rights, Rights]:
    """Refuse what cannot be restored here, before anything of the container is changed; return both bundles' rights.

    A runtime that was given a terminal has used its socket up when its restore fails, and the container cannot start
    from scratch: then every byte is read twice, first here.
    """
    if laid_out.container.runtime != call.runtime:
        raise UnsupportedError(
            f"checkpoint {chosen.checkpoint_id} was made by {laid_out.container.runtime}, "
            f"this container is {call.runtime}'s"
        )
    check_image_files(place / IMAGES_DIR)
    then, now = _read_facts(place / FACTS_NAME), spec_facts(config, call.bundle)
    found = check_spec(then, now, restore_on_change=policy.restore_on_change)
    for kind, name in ((Kind.WIDER, "rights"), (Kind.PROGRAM, "program")):
        if ineffective := [difference.what for difference in found if difference.kind is kind]:
            _warn(call, f"container {kept.container} goes on with the {name} it had: {'; '.join(ineffective)}")
    if laid_out.host:
        check_host(laid_out.host, "")
    if now.has_terminal:
        laid_out.verify()
    _move_files(then, now, config, laid_out, place)
    assert then.rights is not None
    assert now.rights is not None
    return then.rights, now.rights


def _move_files(then: SpecFacts, now: SpecFacts, config: Mapping[str, Any], laid_out: LaidOut, place: Path) -> None:
    """Rewrite the paths in ConfigMaps and the like, and the digest by which the agent verifies their image."""
    if not then.volumes:
        return
    from ocihook.criu.socket_images import FILES_NAME
    from ocihook.images.image_set import check_other_images  # late: few containers have such volumes
    from ocihook.runtime.moved_files import move_volumes

    images = place / IMAGES_DIR
    check_other_images(images, [image for image in laid_out.other_images if image.name == FILES_NAME])
    if not move_volumes(images, then.volumes, now.volumes, config):
        return
    again = OtherImage(FILES_NAME, (images / FILES_NAME).stat().st_size, digest_file(images / FILES_NAME))
    note_rewritten(place, again)
    packed = read_manifest(images)
    if packed is not None:
        listed = tuple(again if image.name == FILES_NAME else image for image in packed.other_images)
        write_manifest(images, replace(packed, other_images=listed), durable=False)


def _warn(call: Call, text: str) -> None:
    log.warning(text)
    call.say(printable(text), "warning")


def _read_facts(path: Path) -> SpecFacts:
    try:
        return from_json(SpecFacts, load_json(path.read_bytes()))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise IntegrityError(f"what the checkpoint says of its container is damaged: {error}") from error


def _run(call: Call, config: Mapping[str, Any], place: Path, profile: str, patience: Patience) -> Process:
    """Call the runtime's `restore`, whose 0, 1 and 2 become the container's; return the container's first process."""
    work = place / "work"
    work.mkdir(mode=0o700)
    log_path = work / "runtime.log"
    command = [
        str(call.program),
        *call.prefix_with_log(log_path),
        *restore_words(call, config, place / IMAGES_DIR, work, profile),
    ]
    parent, criu = os.getpid(), call.global_option("--criu") or shutil.which("criu") or ""
    root = namespace_root(call, config)

    def prepare() -> None:
        die_with_parent(parent)
        with contextlib.suppress(OSError):  # it is seen afterwards that the container has none
            if root is not None:
                unshare_namespace(root)

    runtime = subprocess.Popen(command, preexec_fn=prepare)  # noqa: PLW1509 - one thread
    pidfd = os.pidfd_open(runtime.pid)
    try:
        while not patience.within(_LOOK_S).ready(pidfd):
            _end_left_of_criu(runtime.pid, criu)
    finally:
        os.close(pidfd)
    if runtime.wait() != 0:  # waits: no, it has ended
        raise RestoreError(_why(work, log_path).replace(str(work), str(_keep_log(work))))
    init = Process.find(_init_pid(call))
    if init is None:
        raise RestoreError("it has ended at once")
    return init


def _init_pid(call: Call) -> int:
    """Return the pid that the runtime gives to the engine; 0 if it knows none."""
    if path := call.options.get("--pid-file"):
        return int(Path(path).read_text())
    answer = call.run("state", call.container_id)
    return int(json.loads(answer.stdout)["pid"]) if answer.returncode == 0 else 0


def lsm_profile(then: Rights, now: Rights) -> str:
    """Return what CRIU is to confine all processes by that a security module confined, as TYPE:NAME; "": as they were.

    A process may have changed its AppArmor profile by itself, so it keeps that where the bundle's is the same.
    """
    if now.selinux:
        return f"selinux:{now.selinux}"
    is_changed = now.apparmor and then.apparmor and now.apparmor != then.apparmor
    return f"apparmor:{now.apparmor}" if is_changed else ""


def restore_words(call: Call, config: Mapping[str, Any], images: Path, work: Path, profile: str) -> list[str]:
    """Return what a runtime is called with to restore in place of `create`."""
    places = {"--image-path": images, "--work-path": work, "--bundle": call.bundle}
    given = {name: call.options[name] for name in ("--pid-file", "--console-socket") if name in call.options}
    words = ["restore", "--detach", "--tcp-established", "--file-locks"]  # as it was dumped (stopping.py)
    words += [str(word) for option in (places | given).items() for word in option]
    if not call.is_crun:
        words.append("--no-subreaper")  # the engine's shim is one
    if profile:
        words += ["--lsm-profile", profile]
    if label := (config.get("linux") or {}).get("mountLabel"):
        words += ["--lsm-mount-context", str(label)]
    return [*words, call.container_id]


def _why(work: Path, log_path: Path) -> str:
    """Return why CRIU has failed, or else what the runtime says."""
    from ocihook.criu.explain import explain  # takes long to load

    with contextlib.suppress(OSError):
        explanation = explain((work / _CRIU_LOG).read_text(errors="replace"))
        if explanation is not None:
            return explanation.what
    with contextlib.suppress(OSError):
        said = log_path.read_text(errors="replace").strip()
        if said:
            return printable(said[-_TAIL:])
    return "the runtime's restore failed, and it does not say why"


def _keep_log(work: Path) -> Path:
    """Keep CRIU's log of a restore that has failed, the last one of this node's; return the directory where it is."""
    with contextlib.suppress(OSError):  # CRIU has not begun, or the disk is full: the reason is reported all the same
        (work / _CRIU_LOG).replace(work.parents[1] / _CRIU_LOG)
    return work.parents[1]


def _use_own_criu_settings(call: Call, kept: containers.Kept, config: Mapping[str, Any]) -> None:
    """Have runc's CRIU leave cgroups alone, by a file of the container's own: the node's is others', too.

    Else it would make those of the container that was dumped, whatever the node's file says: the last word counts. crun
    has its own way, and fails with ours.
    """
    if call.is_crun:
        return
    directory = containers.directory_of(kept.container.id)
    notes = dict(config.get("annotations") or {})
    named = notes.get(_CRIU_CONFIG, "/etc/criu/runc.conf")
    content = content_at(Path(named))
    if any(option.name == "manage-cgroups" and option.value == "ignore" for option in options(content)):
        return
    file, bundled = directory / "criu.conf", call.bundle / "config.json"
    replace_file(file, content.rstrip(b"\n") + b"\nmanage-cgroups=ignore\n", mode=0o600, durable=False)
    replace_file(directory / _ORIGINAL, bundled.read_bytes(), mode=0o600, durable=False)
    own = {**config, "annotations": {**notes, _CRIU_CONFIG: str(file)}}
    replace_file(bundled, json.dumps(own).encode(), mode=bundled.stat().st_mode & 0o777, durable=False)


def settle(container_id: str, *, wait_s: float = _ENDING_S) -> None:
    """Undo what is left of a restore whose workers are gone; the container can then start over. May run any time.

    Args:
        container_id: whose restore.
        wait_s: for a process that may still be undoing it.

    Raises:
        OcihookError: if a process is still at it, or something cannot be undone: it is tried again.
    """
    Patience(timeout_s=wait_s).until(lambda: not ((noted := _read(container_id)) and noted.is_attended()))
    found, kept = _read(container_id), containers.read(container_id)
    if found is None or kept is None:
        return
    if found.is_attended():
        raise RestoreError(f"container {kept.container} is being restored", hint="wait, or end that process")
    _end_sessions(container_id)
    _delete(kept)
    directory = containers.directory_of(container_id)
    (directory / containers.HELD_NAME).unlink(missing_ok=True)
    containers.keep(replace(kept, checkpoint="", init=None, cgroup=None))
    original = directory / _ORIGINAL
    if original.exists():
        bundled = kept.bundle / "config.json"
        if bundled.exists():
            replace_file(bundled, original.read_bytes(), mode=bundled.stat().st_mode & 0o777, durable=False)
        original.unlink()
    if found.cgroup is not None:
        remove_frozen(found.cgroup)
    if found.root is not None:
        with contextlib.suppress(OSError):  # it was never made, or a runtime has removed it
            found.root.rmdir()
    if found.place is not None:
        places = {name: path for name, path in found.places.items() if path.exists()}
        take_out(places, found.place / _UNDO, no_progress)
        shutil.rmtree(found.place, ignore_errors=True)
    (directory / RESTORING_NAME).unlink(missing_ok=True)
    if found.claim is not None:
        end_claim(found.claim)


def is_unsettled(container_id: str) -> bool:
    """Return whether something is left of a restore, which was not undone."""
    return (containers.directory_of(container_id) / RESTORING_NAME).exists()


def discard(container_id: str) -> None:
    """Forget a container; end it if it was restored, runs, and its engine creates it again. May run any time.

    Raises:
        RestoreError: if it does not end.
    """
    kept = containers.read(container_id)
    if kept is not None and kept.is_running:
        _delete(kept)
    containers.forget(container_id)


def _delete(kept: containers.Kept) -> None:
    """End a container and have its runtime delete it, which may be busy until its last process is gone."""
    directory = containers.directory_of(kept.container.id)
    call = Call.parse(kept.program, [*kept.prefix, "delete", kept.container.id])
    call = call.logging_to(directory / containers.LOG_NAME)

    def is_gone() -> bool:
        if pid := _init_pid(call):
            _kill(descendants(pid))
        unmount(call.state_directory / "criu-root")  # which a killed runc leaves mounted
        call.run("delete", "--force", call.container_id)  # which fails if the runtime does not know it
        return not call.state_directory.exists()

    if not Patience(timeout_s=_ENDING_S).until(is_gone):
        said = printable(call.run("delete", "--force", call.container_id).stderr.strip()[-_TAIL:])
        raise RestoreError(f"{call.runtime} does not delete container {call.container_id}: {said}")


def recover_restores() -> list[Recovery]:
    """Undo every restore whose workers were killed, and forget its container; those that run stay."""
    return [_recover(path.parent.name) for path in sorted(containers.root().glob(f"*/{RESTORING_NAME}"))]


def _recover(container_id: str) -> Recovery:
    name = container_id
    try:
        noted, kept = _read(container_id), containers.read(container_id)
        name = str(kept.container if kept else name)
        if noted and noted.is_attended():
            return Recovery(short_id(container_id), name, "running", "it is being restored")
        settle(container_id, wait_s=0)
        containers.forget(container_id)
    except (OcihookError, OSError) as error:
        return Recovery(short_id(container_id), name, "failed", plain(error))
    return Recovery(short_id(container_id), name, "undone", "a restore by the runtime handler")


def _end_sessions(container_id: str) -> None:
    """End the CRIU of a restore, with what it has made, and wait for the agent to undo its part."""
    for _, criu in _sessions_of(container_id):
        if criu.is_alive():
            _kill(descendants(criu.pid))
    if not Patience(timeout_s=_ENDING_S).until(lambda: not _sessions_of(container_id)):
        raise RestoreError(f"the restore of container {container_id} is still being undone", hint="`ocihook ps`")


def _sessions_of(container_id: str) -> list[tuple[Path, Process]]:
    """Return the journals of a container's open sessions, with their CRIU."""
    found = []
    for path in open_journals():
        with contextlib.suppress(OcihookError, FileNotFoundError):  # ended; of a damaged one doctor reports the path
            journal = read_journal(path)
            if (journal["container"] or {}).get("id") == container_id:
                found.append((path, Process(*journal["criu"])))
    return found


def _end_descendants() -> None:
    """Kill what descends from this process, and has been left to it; an agent that the hook has started is not ours."""
    ended = Patience(timeout_s=_ENDING_S)

    def is_done() -> bool:
        left = _without_agents(os.getpid())
        _kill(left)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        return not left

    if not ended.until(is_done):
        raise RestoreError("processes of the restore do not end", hint="see the kernel's log")


def _end_left_of_criu(runtime: int, program: str) -> None:
    """Kill what a killed CRIU has left: its other processes keep the connection open which the runtime reads.

    CRIU itself is a child of the runtime, and so is the container's first process, in a PID namespace of its own.
    """
    left = [pid for pid in descendants(os.getpid())[1:] if _is_of_criu(pid, program)]
    if not any(parent_pid(pid) == runtime and "/" not in pid_below(os.getpid(), pid) for pid in left):
        _kill(left)


def _is_of_criu(pid: int, program: str) -> bool:
    """Return whether a process runs CRIU's program, as none that was restored does, whatever it is called."""
    with contextlib.suppress(OSError):  # it has ended
        return Path(f"/proc/{pid}/exe").samefile(program)
    return False


def _without_agents(pid: int) -> list[int]:
    agents = [child for child in descendants(pid)[1:] if any(_AGENT in word for word in command_line(child))]
    theirs = {below for agent in agents for below in descendants(agent)}
    return [child for child in descendants(pid)[1:] if child not in theirs and Process.find(child)]


def _kill(pids: Iterable[int]) -> None:
    for process in filter(None, map(Process.find, pids)):
        kill(process)


@contextlib.contextmanager
def _alone(kept: containers.Kept, chosen: Thin, settings: Settings) -> Iterator[None]:
    """Be the only container of this node that is restored, or runs, from a checkpoint. Forked processes share that."""
    root = Path(settings.store_dir) / "restoring"
    make_directory(root, within=Path(settings.store_dir))
    lock = os.open(root / f"{chosen.checkpoint_id}.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        if not try_lock(lock, fcntl.LOCK_EX):
            raise CheckpointInUse(f"checkpoint {chosen.checkpoint_id} is being restored as another container")
        if (other := running_from(chosen, kept)) is not None:
            raise CheckpointInUse(
                f"checkpoint {chosen.checkpoint_id} runs already, as container {other.container}",
                hint="stop that one first: two must not resume from the same state",
            )
        yield
    finally:
        os.close(lock)


def running_from(chosen: Thin, kept: containers.Kept) -> containers.Kept | None:
    """Return another container of this node that runs from a checkpoint; None if none does."""
    others = (other for other in containers.all_kept() if other.container.id != kept.container.id)
    return next((other for other in others if other.checkpoint == chosen.checkpoint_id and other.is_running), None)


def place_of(settings: Settings, container_id: str) -> Path:
    """Return where a checkpoint is laid out for a container."""
    return restoring_dir(Path(settings.store_dir), container_id)


def _note(kept: containers.Kept, restoring: Restoring) -> None:
    path = containers.directory_of(kept.container.id) / RESTORING_NAME
    replace_file(path, json.dumps(to_json(restoring)).encode(), mode=0o600, durable=False)


def _read(container_id: str) -> Restoring | None:
    path = containers.directory_of(container_id) / RESTORING_NAME
    try:
        return from_json(Restoring, json.loads(path.read_bytes()))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise RestoreError(f"{path} cannot be read: {error!r}", hint="remove the container") from error
