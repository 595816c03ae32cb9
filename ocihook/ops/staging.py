"""Mode `store`: a dump's page images are taken out of the engine's way at once; the work on them comes later."""

import contextlib
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ocihook import wire
from ocihook.criu.images import check_page_images, page_images, read_pagemaps
from ocihook.linux.files import identity, same_directory, sync_directory
from ocihook.linux.mounts import pin_file, unpin_directory
from ocihook.model import ContainerRef
from ocihook.ops.image_set import discard_packs, list_other_images
from ocihook.ops.journal import Journal
from ocihook.store.domain import Domain, new_checkpoint_id
from ocihook.store.pending import Job, directory_of, this_boot, write_job
from ocihook.store.thin import Thin, read_thin, write_thin

EFFECT = "staging"
NODE_DOMAIN = "_node"  # of containers that are in no pod; no namespace can have this name

log = logging.getLogger(__name__)


def domain_name(container: ContainerRef) -> str:
    """Return the domain of a container: its pod's namespace, whose members trust one another."""
    return container.pod_namespace or NODE_DOMAIN


def pins_of(checkpoint_id: str, runtime_dir: Path = Path(wire.RUNTIME_DIR)) -> Path:
    """Return where page images of a pending checkpoint are kept alive that another file system has."""
    return runtime_dir / "staged" / checkpoint_id


def stage(
    journal: Journal,
    container: ContainerRef,
    image_dir: str,
    directory: Path,
    *,
    store_dir: Path,
    host: Mapping[str, str],
    durable: bool,
) -> Job | None:
    """Take the page images out of `directory`, leaving a record of where they went; None if there are none.

    Args:
        journal: gets an effect while this is half done.
        container: whose they are.
        image_dir: the directory as the journal is to name it.
        directory: an image set that CRIU has finished.
        store_dir: the store.
        host: recorded.
        durable: return only when the page images are on stable storage: of a container that is about to be killed.

    Raises:
        ImageError: if CRIU's images are incomplete.
        OcihookError: if the store cannot be used.
        OSError: from the file system, a full one included.
    """
    check_page_images(directory)
    discard_packs(directory)
    opaque = {pagemap.pages_name for pagemap in read_pagemaps(directory).values() if pagemap.is_compressed}
    names = [name for name in page_images(directory) if name not in opaque]
    if not names:
        return None
    domain = Domain.open(store_dir, domain_name(container), create=True)
    checkpoint_id = new_checkpoint_id()
    thin = Thin(domain.name, checkpoint_id)
    journal.push(
        EFFECT,
        directory=image_dir,
        identity=identity(directory),
        names=names,
        pending=str(directory_of(domain, checkpoint_id)),
        pins=str(pins_of(checkpoint_id)),
    )
    directory_of(domain, checkpoint_id).mkdir(mode=0o700)
    taken = {name: _take(directory / name, directory_of(domain, checkpoint_id), checkpoint_id) for name in names}
    if durable:
        for path in taken.values():
            _sync(path)
        sync_directory(directory_of(domain, checkpoint_id))
    is_linked = all(path.parent == directory_of(domain, checkpoint_id) for path in taken.values())
    job = Job(
        id=checkpoint_id,
        created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        container=container,
        host=host,
        images=taken,
        sizes={name: os.stat(path).st_size for name, path in taken.items()},
        other_images=tuple(list_other_images(directory, packed_names=set(names))),
        boot_id="" if durable and is_linked else this_boot(),
    )
    write_job(domain, job)
    write_thin(directory, thin)
    for name in names:
        (directory / name).unlink()
    journal.pop(EFFECT)
    return job


def _take(source: Path, pending: Path, checkpoint_id: str) -> Path:
    with contextlib.suppress(OSError):  # another file system, or one without hard links
        os.link(source, pending / source.name, follow_symlinks=False)
        return pending / source.name
    pins = pins_of(checkpoint_id)
    pins.mkdir(mode=0o700, parents=True, exist_ok=True)
    pin_file(source, pins / source.name)
    return pins / source.name


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def finish_staging(effect: Mapping[str, Any]) -> None:
    """Bring into order what was interrupted: complete it, or take it back. May run any time."""
    directory = same_directory(Path(effect["directory"]), effect["identity"])
    if directory and read_thin(directory) is not None:
        for name in effect["names"]:
            (directory / name).unlink(missing_ok=True)
        return
    discard_staged(Path(effect["pending"]), Path(effect["pins"]))


def discard_staged(pending: Path, pins: Path) -> None:
    """Remove what was taken for a checkpoint, its record first. May run any time."""
    (pending / "job").unlink(missing_ok=True)
    unpin_directory(pins)
    if pending.exists():
        for path in pending.iterdir():
            path.unlink()
        pending.rmdir()
