"""One dump, stage by stage: identify and quiesce before it, pack its images after it."""

import dataclasses
import logging
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ocihook.config import Policy, Settings, apply_annotations
from ocihook.engine.identity import container_ref
from ocihook.errors import OcihookError
from ocihook.linux.files import identity
from ocihook.linux.procfs import Process
from ocihook.model import ContainerRef
from ocihook.oci.runtime import RuntimeCall, find_runtime_call, read_annotations
from ocihook.ops.compatibility import host_facts
from ocihook.ops.gpu import find_gpu_processes
from ocihook.ops.gpu_dump import checkpoint_gpus, moved_regions
from ocihook.ops.image_set import MovedRegions, discard_all, finish_packing, pack_image_set
from ocihook.ops.journal import Journal
from ocihook.ops.quiesce import ask_to_quiesce
from ocihook.ops.staging import EFFECT, STAGED_NAME, begin, finish_staging, stage
from ocihook.ops.standstill import Hold, running_tasks
from ocihook.store.cipher import KeySource
from ocihook.store.manifest import Manifest, read_manifest
from ocihook.store.packing import AGENT_BYTES, Progress, workers_within
from ocihook.store.store import Store
from ocihook.store.thin import read_thin
from ocihook.wire import Request

log = logging.getLogger(__name__)


def pre_dump(journal: Journal, request: Request, directory: Path, load_settings: Callable[[], Settings]) -> str:
    """Find out which container is dumped and what is wanted, let its application come to rest, take its GPUs away.

    Raises:
        OcihookError: to refuse the dump; the container runs on as if nothing had been done to it.
    """
    call = find_runtime_call(request.criu_pid)
    if call is None:  # somebody's own `criu dump`, which reads default.conf too
        return ""
    settings = load_settings()
    policy = identify(journal, request, call, settings.policy)
    journal.note(
        workers=pack_workers(settings),
        criu_version=criu_version(request.criu_pid),
        store=[settings.store_dir, *KeySource.of(settings)],
    )
    has_gpu = bool(find_gpu_processes(request.init_pid))
    if not policy.quiesce_signal and not has_gpu:
        return ""
    with running_tasks(journal, request.init_pid, has_gpu=has_gpu) as hold:
        if policy.quiesce_signal:
            _quiesce(journal, request.init_pid, policy)
        if has_gpu:
            room = settings.bound_bytes - AGENT_BYTES if call.leave_running else 0
            _checkpoint_gpus(journal, request, directory, policy, hold, memory_room_bytes=room)
    return ""


def _checkpoint_gpus(
    journal: Journal, request: Request, directory: Path, policy: Policy, hold: Hold, *, memory_room_bytes: int
) -> None:
    image_dir = os.readlink(request.image_dir)
    progress = while_criu_lives(journal)
    if policy.mode != "store" or policy.gpu_memory != "packs" or journal.container is None:
        checkpoint_gpus(journal, request.init_pid, image_dir, directory, progress, hold)
        return
    place = begin(journal, journal.container, image_dir, directory, store=_store(journal))
    (directory / STAGED_NAME).touch(mode=0o600)
    checkpoint_gpus(journal, request.init_pid, str(place), place, progress, hold, memory_room_bytes=memory_room_bytes)


def _store(journal: Journal) -> Store:
    root, *keys = journal.facts["store"]
    return Store(Path(root), KeySource(*keys))


def identify(journal: Journal, request: Request, call: RuntimeCall, node_policy: Policy) -> Policy:
    """Record container, image directory and policy in the journal; return the policy."""
    annotations = read_annotations(request.criu_pid, call.bundle)
    container = container_ref(annotations, container_id=call.container_id, runtime=call.runtime, bundle=call.bundle)
    image_dir = os.readlink(request.image_dir)
    journal.identify(container, image_dir, verb=call.verb, leave_running=call.leave_running)
    policy = apply_annotations(node_policy, annotations)
    journal.note(policy=dataclasses.asdict(policy), criu_asked=sorted(call.options))
    if named := annotations.get("org.criu.config"):
        journal.note(criu_config=named)
    return policy


def _quiesce(journal: Journal, init_pid: int, policy: Policy) -> None:
    init = Process.find(init_pid)
    if init is None:
        raise OcihookError(f"CRIU named process {init_pid} as the container's init, which does not exist")
    with journal.phase("quiesce"):
        if policy.resume_signal and not any(effect["kind"] == "quiesced" for effect in journal.effects):
            journal.push("quiesced", init=list(init), signal=policy.resume_signal)
        ask_to_quiesce(
            init, signal_name=policy.quiesce_signal, ack=policy.quiesce_ack, timeout_s=policy.quiesce_timeout_s
        )


def post_dump(journal: Journal, request: Request, directory: Path, _load_settings: Callable[[], Settings]) -> str:
    """Pack the page images where they are, so that the engine's archive carries the packs; or take them to the store.

    Raises:
        OcihookError: to fail the dump, if the policy wants that when packing fails; the images are as CRIU wrote them.
    """
    container = journal.container
    mode = journal.facts.get("policy", {}).get("mode")
    if container is None:
        return ""
    if mode == "off":
        discard_all(directory)
        return ""
    if mode == "store":
        return _stage(journal, container, request, directory)
    return _pack_inline(journal, container, request, directory)


def _stage(journal: Journal, container: ContainerRef, request: Request, directory: Path) -> str:
    thin = read_thin(directory)
    if thin is not None and thin.checkpoint_id == journal.facts.get("staged_as"):  # the agent was killed after that
        effect = journal.effect(EFFECT)
        if effect is not None:
            finish_staging(effect)
            journal.pop(EFFECT)
        return f"container {container}: its memory is on its way into the store as {thin.checkpoint_id}"
    moved = moved_regions(journal)
    try:
        with journal.phase("stage") as phase:
            if journal.effect(EFFECT) is None:
                begin(journal, container, os.readlink(request.image_dir), directory, store=_store(journal))
            job = stage(
                journal,
                container,
                directory,
                store=_store(journal),
                host=host_facts(str(journal.facts.get("criu_version", ""))),
                durable=not journal.facts.get("leave_running"),
                moved=moved,
                is_pushed=journal.facts["policy"].get("push") == "always",
            )
            raw_bytes = job.raw_bytes if job else 0
            phase["bytes"] = raw_bytes
    except (OcihookError, OSError) as error:
        if moved is not None and moved.regions:  # the archive would have only half of the memory
            raise
        return _not_staged(journal, container, error)
    if job is None:
        return ""
    journal.note(raw_bytes=raw_bytes, checkpoint=job.id)
    return f"container {container}: {raw_bytes} bytes of memory are on their way into the store as {job.id}"


def _not_staged(journal: Journal, container: ContainerRef, error: OcihookError | OSError) -> str:
    """Leave the images as CRIU wrote them, or fail the dump, as the policy wants it."""
    effect = journal.effect(EFFECT)
    if effect is not None:
        finish_staging(effect)
        journal.pop(EFFECT)
    if journal.facts["policy"].get("on_pack_error") == "fail":
        raise error
    journal.note_error(error, "degraded")
    log.warning("container %s: not stored: %s", container, error)
    return f"warning: container {container}: {str(error).rstrip('.')}. The checkpoint is in the engine's archive alone"


def _pack_inline(journal: Journal, container: ContainerRef, request: Request, directory: Path) -> str:
    policy: dict[str, Any] = journal.facts["policy"]
    if journal.facts.get("packing_began"):  # and was interrupted; whether it came to its commit, the manifest tells
        manifest = read_manifest(directory)
        if manifest is not None:
            return _packed(journal, manifest)
    moved = moved_regions(journal)
    if not journal.facts.get("packing_began") and not (moved and moved.regions):
        discard_all(directory)
    journal.note(packing_began=True)
    journal.push("packing", directory=os.readlink(request.image_dir), identity=identity(directory))
    try:
        with journal.phase("pack") as phase:
            manifest = _pack(journal, container, directory, moved)
            phase["bytes"] = manifest.image_bytes if manifest else 0
    except (OcihookError, OSError) as error:
        finish_packing(directory)
        is_wanted = policy.get("on_pack_error") != "fail" and journal.criu.is_alive()
        if moved is not None and is_wanted:
            _pack(journal, container, directory, moved, with_images=False)
        journal.pop("packing")
        if not is_wanted:
            raise
        journal.note_error(error, "degraded")
        log.warning("container %s: not packed: %s", container, error)
        return f"warning: container {container}: {str(error).rstrip('.')}. The checkpoint is complete but not packed"
    journal.pop("packing")
    return _packed(journal, manifest) if manifest else ""


def _pack(
    journal: Journal, container: ContainerRef, directory: Path, moved: MovedRegions | None, *, with_images: bool = True
) -> Manifest | None:
    return pack_image_set(
        directory,
        container=container,
        host=host_facts(str(journal.facts.get("criu_version", ""))),
        workers=int(journal.facts.get("workers", 1)),
        # A container left running is itself the other copy; one that is about to be killed is not.
        durable=not journal.facts.get("leave_running"),
        moved=moved,
        with_images=with_images,
        progress=while_criu_lives(journal),
    )


def _packed(journal: Journal, manifest: Manifest) -> str:
    journal.note(raw_bytes=manifest.raw_bytes, stored_bytes=manifest.stored_bytes)
    return f"container {journal.container}: packed {manifest.raw_bytes} bytes of memory into {manifest.stored_bytes}"


def while_criu_lives(journal: Journal) -> Progress:
    """Return what stops long work as soon as CRIU is gone, for instance with a runtime whose engine lost patience."""

    def check(_image_bytes: int) -> None:
        if not journal.criu.is_alive():
            raise OcihookError(f"CRIU (pid {journal.criu.pid}) was killed meanwhile")

    return check


def pack_workers(settings: Settings) -> int:
    """Return how many processes may pack or unpack at a time."""
    cores = settings.workers or len(os.sched_getaffinity(0))
    return workers_within(settings.bound_bytes, cores)


def criu_version(criu_pid: int) -> str:
    """Return the version of a running CRIU, "" if it does not tell."""
    try:
        done = subprocess.run(
            [f"/proc/{criu_pid}/exe", "--version"], capture_output=True, text=True, timeout=5, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    first_line = done.stdout.partition("\n")[0]
    return first_line.removeprefix("Version:").strip()
