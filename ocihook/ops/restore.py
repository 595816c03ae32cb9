"""One restore, stage by stage: verify and rehydrate before it, let the application go on after it."""

import contextlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ocihook.config import Policy, Settings
from ocihook.criu.images import check_page_images
from ocihook.errors import ConfigError, IdentificationError, OcihookError, StoreError
from ocihook.linux.cgroup import memory_headroom_bytes
from ocihook.linux.files import identity
from ocihook.linux.memory import available_bytes
from ocihook.linux.procfs import Process
from ocihook.oci.runtime import find_runtime_call
from ocihook.ops.admission import check_domain
from ocihook.ops.compatibility import check_criu, check_machine, missing_features
from ocihook.ops.dump import criu_version, identify, pack_workers, while_criu_lives
from ocihook.ops.gpu_memory import write_back
from ocihook.ops.gpu_restore import HALF_RESTORED, check_node, fill_memory, note_half_restored, resume_gpus
from ocihook.ops.image_set import check_other_images, dehydrate, region_bytes, rehydrate_image_set
from ocihook.ops.journal import Journal
from ocihook.ops.preflight import heed, restore_refusals
from ocihook.ops.quiesce import signal_number
from ocihook.ops.standstill import FROZEN, freeze_restored, thaw
from ocihook.ops.store import (
    rehydrate_stored,
    store_workers,
    stored_region_bytes,
    wait_complete,
    write_stored_regions,
)
from ocihook.ops.transfer import is_here, pull
from ocihook.store.manifest import Region, read_manifest
from ocihook.store.store import Store
from ocihook.store.stored import StoredRegion
from ocihook.store.thin import Thin, read_thin
from ocihook.wire import Request

log = logging.getLogger(__name__)


def pre_restore(journal: Journal, request: Request, directory: Path, load_settings: Callable[[], Settings]) -> str:
    """Verify a packed image set and write its page images for CRIU to read.

    Every check that can fail is made here, before any process exists.

    Raises:
        OcihookError: to refuse the restore; the image set is as it was.
    """
    try:
        settings = load_settings()
    except ConfigError as error:
        log.warning("%s; restoring with default settings", error)
        settings = Settings()
    with contextlib.suppress(IdentificationError, ConfigError):  # it is told to people, a restore does not need it
        call = find_runtime_call(request.criu_pid)
        if call is not None:
            identify(journal, request, call, settings)
    thin = read_thin(directory)
    if thin is not None:
        return _from_store(journal, request, directory, thin, settings)
    manifest = read_manifest(directory)
    if manifest is not None:
        _check_host(manifest.host, request.criu_pid)
        check_node(journal, manifest.gpu, request.criu_pid)
        check_memory(journal, region_bytes(manifest), request.criu_pid)
        journal.push(
            "rehydrated",
            directory=os.readlink(request.image_dir),
            identity=identity(directory),
            names=[image.name for image in manifest.packed_images],
        )
    with journal.phase("unpack") as phase:
        phase["bytes"] = manifest.raw_bytes if manifest else 0
        rehydrate_image_set(
            directory,
            with_regions=manifest is None or _is_read_twice(manifest.regions),
            workers=pack_workers(settings),
            progress=while_criu_lives(journal),
        )
    if manifest is None:
        return ""
    journal.note(raw_bytes=manifest.raw_bytes, stored_bytes=manifest.stored_bytes, workers=pack_workers(settings))
    return f"container {manifest.container}: verified and unpacked {manifest.raw_bytes} bytes of memory"


def _from_store(journal: Journal, request: Request, directory: Path, thin: Thin, settings: Settings) -> str:
    """Write the page images of a checkpoint that is in the store, once it is complete."""
    check_domain(thin.domain, journal.container, settings)
    alive = while_criu_lives(journal)
    workers = pack_workers(settings)
    store = Store.of(settings)
    if not is_here(store, thin):
        if not settings.remote:
            raise StoreError(
                f"checkpoint {thin.checkpoint_id} of domain {thin.domain} is not in this node's store",
                hint="configure the remote that it was pushed to, or fetch it by `ocihook store pull`",
            )
        with journal.phase("pull") as phase:
            phase["bytes"] = pull(store, thin.domain, thin.checkpoint_id, settings.remote, progress=alive).moved_bytes
    domain = store.open(thin.domain)
    with journal.phase("wait for the store"):
        manifest = wait_complete(
            domain, thin.checkpoint_id, workers=store_workers(settings), check=lambda: alive(0), settings=settings
        )
    _check_host(manifest.host, request.criu_pid)
    check_node(journal, manifest.gpu, request.criu_pid)
    check_memory(journal, stored_region_bytes(domain, manifest), request.criu_pid)
    check_other_images(directory, manifest.other_images)
    names = [image.name for image in manifest.images]
    journal.push("rehydrated", directory=os.readlink(request.image_dir), identity=identity(directory), names=names)
    dehydrate(directory, names)  # of an earlier attempt
    with journal.phase("assemble") as phase:
        phase["bytes"] = manifest.image_bytes
        with_regions = _is_read_twice(manifest.regions)
        rehydrate_stored(domain, manifest, directory, with_regions=with_regions, workers=workers, progress=alive)
    check_page_images(directory)
    journal.note(raw_bytes=manifest.raw_bytes, checkpoint=manifest.id, workers=workers)
    return f"container {manifest.container}: {manifest.raw_bytes} bytes of memory from checkpoint {manifest.id}"


def check_memory(journal: Journal, need_bytes: int, criu_pid: int) -> None:
    """Refuse a restore that there is too little memory for, as far as that is known: else the kernel kills something.

    Under runc CRIU is in the container's cgroup by now; under crun only the node's memory is known.

    Raises:
        PreflightError: to refuse it; nothing was started.
    """
    policy = journal.facts.get("policy", {})  # none, if nobody knows the container
    reasons = restore_refusals(need_bytes, available_bytes(), memory_headroom_bytes(criu_pid))
    heed(reasons if need_bytes else [], policy.get("gpu_preflight", Policy().gpu_preflight))


def _is_read_twice(regions: Sequence[Region | StoredRegion]) -> bool:
    """Tell whether GPU memory is verified before there are processes to write it into, and not only on its way there.

    It is where the packs stay in memory until then, beside the processes: all of it is read from the disk once.
    """
    return available_bytes() >= 2 * sum(region.size_bytes for region in regions)


def _check_host(host: Mapping[str, str], criu_pid: int) -> None:
    check_machine(host)
    check_criu(host, criu_version(criu_pid))
    missing = missing_features(host)
    if missing:
        log.warning("the checkpoint was made on processors that have %s, and these have not", ", ".join(missing))


def setup_namespaces(journal: Journal, request: Request, _directory: Path, _load: Callable[[], Settings]) -> str:
    """Note the first process that CRIU has made, which all others will descend from: should CRIU be killed, they go."""
    if "gpu_map" in journal.facts:
        note_half_restored(journal, request.init_pid)
    return ""


def post_restore(journal: Journal, request: Request, directory: Path, load_settings: Callable[[], Settings]) -> str:
    """Write GPU memory that went past CRIU into the new processes, which wait in CRIU's restorer.

    Here and not in pre-resume, where CRIU takes no veto: memory is mapped already, and nothing runs.

    Raises:
        OcihookError: to let the restore fail; CRIU kills the processes.
    """
    progress = while_criu_lives(journal)
    workers = int(journal.facts.get("workers", 1))
    thin = read_thin(directory)
    names: set[str] = set()
    if thin is not None:
        domain = Store.of(load_settings()).open(thin.domain)
        stored = domain.read(thin.checkpoint_id)
        names = {region.process for region in stored.regions}
        write = partial(write_stored_regions, domain, stored)
    else:
        manifest = read_manifest(directory)
        names = {region.process for region in manifest.regions} if manifest else set()
        write = partial(write_back, directory)
    write = partial(write, workers=workers, progress=progress)
    size = fill_memory(journal, request.init_pid, names, write) if names else 0
    return f"container {journal.container}: {size} bytes of GPU memory written" if size else ""


def pre_resume(journal: Journal, request: Request, _directory: Path, _load: Callable[[], Settings]) -> str:
    """Freeze a container that would run without its GPU until `post_resume`, if it can be; most programs bear that."""
    threads = journal.facts.get("gpu", {}).get("threads")
    if threads:
        try:
            freeze_restored(journal, request.init_pid, threads)
        except (OcihookError, OSError) as error:
            log.warning("container %s runs before it has its GPUs: %s", journal.container, error)
    return ""


def post_resume(journal: Journal, request: Request, _directory: Path, _load_settings: Callable[[], Settings]) -> str:
    """Give the processes of a restored container their GPUs back; tell its application to go on, if it is to be told.

    Raises:
        OcihookError: if there is no GPU state for it; CRIU ignores that, what has been done about it is said.
    """
    try:
        resume_gpus(journal, request.init_pid)
    finally:  # also one that the policy keeps without its GPU is the engine's now; if CRIU was killed, it is nobody's
        thaw(journal)
        while journal.effect(FROZEN):
            journal.pop(FROZEN)
        if journal.effect(HALF_RESTORED):
            while_criu_lives(journal)(0)
            journal.pop(HALF_RESTORED)
    policy: dict[str, Any] = journal.facts.get("policy", {})
    init = Process.find(request.init_pid)
    if init and policy.get("resume_signal"):
        init.send(signal_number(policy["resume_signal"]))
    return ""
