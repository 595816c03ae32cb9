"""Stages what a dump writes, so that nobody waits while it is stored: page images in the store, GPU memory in RAM."""

import contextlib
import logging
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ocihook import __version__, wire
from ocihook.checkpoints.pending import IN_MEMORY, JOB_NAME, Job, directory_of, this_boot, write_job
from ocihook.errors import StoreFull, UnsupportedError
from ocihook.images.image_set import MovedRegions, list_other_images
from ocihook.linux.files import replace_file, sync_directory, sync_file
from ocihook.linux.memory import available_bytes
from ocihook.linux.mounts import has_memory_mounted, mount_memory, pin_file, remove_directory, unpin_directory
from ocihook.model import ContainerRef
from ocihook.packs.cipher import seal
from ocihook.packs.packed_manifest import MAX_MEMORY_BYTES, PackedManifest, write_manifest
from ocihook.store.domain import new_checkpoint_id
from ocihook.store.lineage import domain_name, lineage
from ocihook.store.store import Store
from ocihook.store.stored_manifest import BELONGINGS_NAME
from ocihook.store.thin import Thin, read_thin, write_thin

_TABLES_BYTES = 64 << 20  # what a place in memory needs beside the content of packs, with a 64th of that
_MARGIN_BYTES = 64 << 20
STAGED_NAME = "ocihook.staged"  # in an image directory: memory was moved that the directory does not have; for the hook

log = logging.getLogger(__name__)


def pins_of(checkpoint_id: str, runtime_dir: Path = Path(wire.RUNTIME_DIR)) -> Path:
    """Return where page images of a pending checkpoint are pinned if they are on another file system."""
    return runtime_dir / "staged" / checkpoint_id


def check_can_store(store: Store, container: ContainerRef, size_bytes: int) -> None:
    """Check before a dump that its memory can go into the store: its directory, its keys, and room.

    Args:
        store: where it is to go.
        container: whose it is.
        size_bytes: of its memory. Of a container that has a checkpoint there, as much room as that took will do.

    Raises:
        OcihookError: if the store cannot take it.
        OSError: from the file system.
    """
    if size_bytes > MAX_MEMORY_BYTES:
        raise UnsupportedError(
            f"the container has {size_bytes} bytes of memory, and a checkpoint {MAX_MEMORY_BYTES} at most"
        )
    domain = store.open(domain_name(container), create=True)
    _ = domain.page_ids  # which the domain's key is needed for
    if domain.is_encrypted:
        seal(domain.keyring, "probe", b"")  # with the newest key
    space = os.statvfs(domain.packs_dir)
    free = space.f_bavail * space.f_frsize
    before = [m for m in domain.checkpoints() if lineage(m.container) == lineage(container)]
    need = min(size_bytes, before[-1].added_bytes) if before else size_bytes
    if free < need + _MARGIN_BYTES:
        raise StoreFull(
            f"the store in {store.root} has {free} bytes free, and the container {need} bytes of memory",
            hint="free space there, or remove checkpoints by `ocihook store prune`",
        )
    with tempfile.TemporaryFile(dir=domain.pending_dir):
        pass  # it can be written to


class Place(NamedTuple):
    """Where a dump's memory goes on its way into a store."""

    pending: Path  # of the checkpoint, in its domain
    pins: Path  # of what another file system has
    domain: str


def choose_place(container: ContainerRef, store: Store) -> Place:
    """Return a place in the store for what a dump will write; it is not made yet.

    Raises:
        OcihookError: if the store cannot be used.
        OSError: from the file system.
    """
    domain = store.open(domain_name(container), create=True)
    checkpoint_id = new_checkpoint_id()
    return Place(directory_of(domain, checkpoint_id), pins_of(checkpoint_id), domain.name)


def stage(  # noqa: PLR0913 - what is taken from where, and how
    place: Place,
    names: Sequence[str],
    container: ContainerRef,
    directory: Path,
    *,
    store: Store,
    host: Mapping[str, str],
    durable: bool,
    moved: MovedRegions | None = None,
    with_belongings: bool = False,
    is_pushed: bool = False,
    awaits_memory: bool = False,
) -> Job:
    """Take page images out of `directory`, leaving a record of where they went.

    Args:
        place: made for them.
        names: of the page images.
        container: whose they are.
        directory: an image set that CRIU has finished.
        store: where it goes.
        host: recorded.
        durable: return only when the page images are on stable storage: for a container that is about to be killed.
        moved: memory that went into packs at the place; the checkpoint is complete only with it.
        with_belongings: they are at the place, too.
        is_pushed: to the remote, once it is complete.
        awaits_memory: some is still to be read from a snapshot; the place is claimed for that (awaited.py).

    Raises:
        OSError: from the file system, a full one included.
    """
    pending = place.pending
    in_packs = [image.name for image in moved.images] if moved else []
    taken = {name: _take(directory / name, pending) for name in names}
    if with_belongings:
        taken[BELONGINGS_NAME] = pending / BELONGINGS_NAME
    if moved is not None:
        write_manifest(pending, record_of(moved, container), durable=durable)
    if durable:
        for path in taken.values():
            sync_file(path)
        sync_directory(pending)
        sync_directory(pending.parent)
    is_linked = all(path.parent == pending for path in taken.values())
    job = Job(
        id=pending.name,
        created=store.open(place.domain).created_now(lineage(container)),
        container=container,
        host=host,
        images=taken,
        sizes={name: os.stat(path).st_size for name, path in taken.items()},
        other_images=tuple(list_other_images(directory, packed_names={*names, *in_packs})),
        region_bytes=record_of(moved, container).raw_bytes if moved else 0,
        is_pushed=is_pushed,
        boot_id="" if durable and is_linked else this_boot(),
        awaits_memory=awaits_memory,
    )
    write_job(store.open(place.domain), job, durable=durable)
    write_thin(directory, Thin(place.domain, job.id), durable=durable)
    for name in (*names, *in_packs, STAGED_NAME):
        (directory / name).unlink(missing_ok=True)
    return job


def stage_in_memory(place: Path, size_bytes: int, bound_bytes: int) -> bool:
    """Keep what will be written to a place in memory, if that fits; return whether it does.

    One dump at a time takes memory, and only so much that as much again is left to the node. What is there is lost
    with the node's power, so it is for containers that continue to run.

    Args:
        place: an empty directory.
        size_bytes: of what will be written.
        bound_bytes: that may be taken.
    """
    if size_bytes > bound_bytes or available_bytes() < 2 * size_bytes or has_memory_mounted():
        return False
    mark = place / IN_MEMORY
    try:
        replace_file(mark, b"", mode=0o600, durable=False)  # nobody waits for a disk here
        mount_memory(place, size_bytes + _TABLES_BYTES + size_bytes // 64)
    except OSError as error:
        log.warning("%s", error)
        mark.unlink(missing_ok=True)
        return False
    return True


def record_of(moved: MovedRegions, container: ContainerRef) -> PackedManifest:
    """Return the manifest of moved memory alone, as it is kept until the rest of the checkpoint is known."""
    return PackedManifest(
        created="",
        writer=f"ocihook {__version__}",
        container=container,
        host={},
        packed_images=moved.images,
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


def finish_staging(place: Place, names: Sequence[str], directory: Path | None) -> None:
    """Finish staging that was interrupted: complete it, or undo it. May run any time.

    Args:
        place: that was made, or was to be.
        names: of the page images that were taken out of the directory, or were to be.
        directory: of the image set; None if it is gone.
    """
    thin = read_thin(directory) if directory else None
    is_committed = thin is not None and thin.checkpoint_id == place.pending.name
    for name in (*names, STAGED_NAME) if is_committed else (STAGED_NAME,):
        if directory:
            (directory / name).unlink(missing_ok=True)
    if not is_committed:
        discard_staged(place.pending, place.pins)


def discard_staged(pending: Path, pins: Path) -> None:
    """Remove what was taken for a checkpoint, its record first. May run any time."""
    (pending / JOB_NAME).unlink(missing_ok=True)
    if pending.exists():
        sync_directory(pending)
    unpin_directory(pins)
    remove_directory(pending)
