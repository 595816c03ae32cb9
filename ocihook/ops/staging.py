"""Mode `store`: a dump's page images are taken out of the engine's way at once; the work on them comes later."""

import contextlib
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ocihook import __version__, wire
from ocihook.criu.images import check_page_images
from ocihook.linux.files import identity, same_directory, sync_directory, sync_file
from ocihook.linux.memory import available_bytes
from ocihook.linux.mounts import mount_memory, pin_file, unmount, unpin_directory
from ocihook.model import ContainerRef
from ocihook.ops.image_set import MovedRegions, discard_packs, list_other_images, list_packable
from ocihook.ops.journal import Journal
from ocihook.store.domain import new_checkpoint_id
from ocihook.store.manifest import Manifest, write_manifest
from ocihook.store.pending import Job, directory_of, this_boot, write_job
from ocihook.store.store import Store
from ocihook.store.thin import Thin, read_thin, write_thin

EFFECT = "staging"
_TABLES_BYTES = 64 << 20  # what a place in memory needs beside the content of packs, with a 64th of that
STAGED_NAME = "ocihook.staged"  # in an image directory: memory was moved that the directory does not have; for the hook
NODE_DOMAIN = "_node"  # of containers that are in no pod; no namespace can have this name

log = logging.getLogger(__name__)


def domain_name(container: ContainerRef) -> str:
    """Return the domain of a container: its pod's namespace, whose members trust one another."""
    return container.pod_namespace or NODE_DOMAIN


def pins_of(checkpoint_id: str, runtime_dir: Path = Path(wire.RUNTIME_DIR)) -> Path:
    """Return where page images of a pending checkpoint are kept alive that another file system has."""
    return runtime_dir / "staged" / checkpoint_id


def begin(journal: Journal, container: ContainerRef, image_dir: str, directory: Path, *, store: Store) -> Path:
    """Make a place in the store for what a dump will bring; return it. The journal has an effect that removes it.

    Args:
        journal: gets the effect.
        container: whose dump it is.
        image_dir: the image directory as the journal is to name it.
        directory: the same.
        store: where it goes.

    Raises:
        OcihookError: if the store cannot be used.
        OSError: from the file system.
    """
    domain = store.open(domain_name(container), create=True)
    checkpoint_id = new_checkpoint_id()
    pending = directory_of(domain, checkpoint_id)
    facts = {"pending": str(pending), "pins": str(pins_of(checkpoint_id)), "domain": domain.name}
    journal.push(EFFECT, directory=image_dir, identity=identity(directory), names=[], **facts)
    journal.note(staged_as=checkpoint_id)
    pending.mkdir(mode=0o700)
    return pending


def stage(
    journal: Journal,
    container: ContainerRef,
    directory: Path,
    *,
    store: Store,
    host: Mapping[str, str],
    durable: bool,
    moved: MovedRegions | None = None,
    is_pushed: bool = False,
) -> Job | None:
    """Take the page images out of `directory`, leaving a record of where they went; None if there are none.

    Args:
        journal: of the dump that has begun; its effect is ended.
        container: whose they are.
        directory: an image set that CRIU has finished.
        store: where it goes.
        host: recorded.
        durable: return only when the page images are on stable storage: of a container that is about to be killed.
        moved: memory that went into packs at the place made by `begin`; the checkpoint is complete only with it.
        is_pushed: to the remote, once it is complete.

    Raises:
        ImageError: if CRIU's images are incomplete.
        OSError: from the file system, a full one included.
    """
    effect = journal.effect(EFFECT)
    assert effect is not None
    check_page_images(directory)
    discard_packs(directory)
    names = list_packable(directory)
    pending = Path(effect["pending"])
    if not names and moved is None:
        finish_staging(effect)
        journal.pop(EFFECT)
        return None
    journal.amend(EFFECT, names=names)
    taken = {name: _take(directory / name, pending) for name in names}
    if moved is not None:
        write_manifest(pending, _only_regions(moved, container), durable=durable)
    if durable:
        for path in taken.values():
            sync_file(path)
        sync_directory(pending)
        sync_directory(pending.parent)
    is_linked = all(path.parent == pending for path in taken.values())
    job = Job(
        id=pending.name,
        created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        container=container,
        host=host,
        images=taken,
        sizes={name: os.stat(path).st_size for name, path in taken.items()},
        other_images=tuple(list_other_images(directory, packed_names=set(names))),
        region_bytes=sum(region.size_bytes for region in moved.regions) if moved else 0,
        is_pushed=is_pushed,
        boot_id="" if durable and is_linked else this_boot(),
    )
    write_job(store.open(effect["domain"]), job, durable=durable)
    write_thin(directory, Thin(effect["domain"], job.id), durable=durable)
    for name in (*names, STAGED_NAME):
        (directory / name).unlink(missing_ok=True)
    journal.pop(EFFECT)
    return job


def stage_in_memory(pending: Path, size_bytes: int, bound_bytes: int) -> bool:
    """Have what comes to a place made by `begin` stay in memory, if that fits; tell whether it does.

    One dump at a time takes memory, and only so much that as much again is left to the node. What is there is lost
    with the node's power, so it is for containers that run on.

    Args:
        pending: the place, empty.
        size_bytes: of what comes.
        bound_bytes: that may be taken.
    """
    others = (path for path in pending.parent.parent.parent.glob("*/pending/*") if path != pending)
    if size_bytes > bound_bytes or available_bytes() < 2 * size_bytes or any(os.path.ismount(path) for path in others):
        return False
    try:
        mount_memory(pending, size_bytes + _TABLES_BYTES + size_bytes // 64)
    except OSError as error:
        log.warning("%s", error)
        return False
    return True


def _only_regions(moved: MovedRegions, container: ContainerRef) -> Manifest:
    return Manifest(
        created="",
        writer=f"ocihook {__version__}",
        container=container,
        host={},
        packed_images=(),
        other_images=(),
        packs=moved.packs,
        regions=moved.regions,
        gpu=moved.gpu,
    )


def _take(source: Path, pending: Path) -> Path:
    (pending / source.name).unlink(missing_ok=True)  # of an attempt that was interrupted
    with contextlib.suppress(OSError):  # another file system, or one without hard links
        os.link(source, pending / source.name, follow_symlinks=False)
        return pending / source.name
    pins = pins_of(pending.name)
    pins.mkdir(mode=0o700, parents=True, exist_ok=True)
    pin_file(source, pins / source.name)
    return pins / source.name


def finish_staging(effect: Mapping[str, Any]) -> None:
    """Bring into order what was interrupted: complete it, or take it back. May run any time."""
    pending = Path(effect["pending"])
    directory = same_directory(Path(effect["directory"]), effect["identity"])
    thin = read_thin(directory) if directory else None
    is_committed = thin is not None and thin.checkpoint_id == pending.name
    for name in (*effect["names"], STAGED_NAME) if is_committed else (STAGED_NAME,):
        if directory:
            (directory / name).unlink(missing_ok=True)
    if not is_committed:
        discard_staged(pending, Path(effect["pins"]))


def discard_staged(pending: Path, pins: Path) -> None:
    """Remove what was taken for a checkpoint, its record first. May run any time."""
    (pending / "job").unlink(missing_ok=True)
    if pending.exists():
        sync_directory(pending)
    unpin_directory(pins)
    if pending.exists():
        unmount(pending)
        for path in pending.iterdir():
            path.unlink()
        pending.rmdir()
