"""Completes in the store what dumps have staged: deduplicates it, in the background or when somebody waits for it."""

import contextlib
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from ocihook import __version__
from ocihook.checkpoints.awaited import claimed_job, find_job
from ocihook.checkpoints.listing import WAS_IN_MEMORY, Listed, failure_of, list_pending
from ocihook.checkpoints.pending import (
    Job,
    check_taken,
    claimed,
    directory_of,
    half_removed,
    lost_in_memory,
    pending_ids,
    read_failure,
    read_progress,
    write_failure,
    write_progress,
)
from ocihook.checkpoints.stage import discard_staged, pins_of
from ocihook.config import Settings
from ocihook.criu.images import check_page_images
from ocihook.errors import GivenUp, IntegrityError, OcihookError, SnapshotLost, StoreError, plain
from ocihook.images.image_set import list_other_images, list_packable, open_packs
from ocihook.linux.patience import Patience
from ocihook.model import ContainerRef
from ocihook.packs.packed_manifest import PackedManifest, read_manifest
from ocihook.packs.pages import ImageFile, Progress, Source, no_progress
from ocihook.packs.runs import RunPages
from ocihook.session import history
from ocihook.store.deduplicate import Taken, deduplicate
from ocihook.store.domain import Domain, new_checkpoint_id
from ocihook.store.lineage import domain_name, lineage
from ocihook.store.store import Store, store_workers
from ocihook.store.stored_manifest import BELONGINGS_NAME, StoredImage, StoredManifest, StoredRegion

log = logging.getLogger(__name__)

_PROGRESS_S = 1.0
_POLL_S = 0.2


def complete(
    domain: Domain,
    checkpoint_id: str,
    *,
    workers: int,
    progress: Progress = no_progress,
    settings: Settings | None = None,
) -> bool:
    """Store what was taken for a checkpoint; False if another process does so. May run again after any interruption.

    With `settings`, add a record of it to the history; of one whose snapshot was lost only once.

    Raises:
        IntegrityError: if what was taken is no longer there, or not all of the memory could be.
        OcihookError: if the store cannot be used.
        OSError: from the file system, a full one included; what was taken stays, for another attempt.
    """
    pending = directory_of(domain, checkpoint_id)
    with claimed(pending) as is_ours:
        if not is_ours:
            return False
        job = claimed_job(domain, checkpoint_id)
        if job is not None and checkpoint_id not in domain.checkpoint_ids():
            is_known = job.lost and read_failure(domain, checkpoint_id)
            with _recorded(None if is_known else settings, domain, job), domain.shared(in_turn=True):
                check_taken(job)
                if job.is_pushed:
                    domain.pushes.note(checkpoint_id)
                if job.container.gang:
                    domain.marks.note_unreported(checkpoint_id)
                _store(domain, job, pending, read_manifest(pending), workers=workers, progress=progress)
        domain.settle()  # the process that completed it may have been killed before it did
        discard_staged(pending, pins_of(checkpoint_id))
    _merge_index(domain)
    return True


def _merge_index(domain: Domain) -> None:
    """Merge the index, which nobody waits for: the checkpoint is complete without."""
    try:
        domain.merge_index()
    except (OcihookError, OSError) as error:  # it is only a hint; tried again with the next checkpoint
        log.warning("domain %s: its index is not merged: %s", domain.name, error)


def store_image_set(
    store: Store,
    directory: Path,
    container: ContainerRef,
    *,
    created: str,
    workers: int,
    progress: Progress = no_progress,
) -> StoredManifest:
    """Store the memory of an image set that lies in `directory`, and stays there.

    Raises:
        ImageError: if it is incomplete.
        StoreError: if it has no memory that could be stored.
        OSError: from the file system, a full one included.
    """
    check_page_images(directory)
    names = list_packable(directory)
    if not names:
        raise StoreError("there is no memory that could be stored", hint="CRIU itself may have compressed it")
    domain = store.open(domain_name(container), create=True)
    job = Job(
        id=new_checkpoint_id(),
        created=created,
        container=container,
        host={},
        images={name: directory / name for name in names},
        sizes={name: (directory / name).stat().st_size for name in names},
        other_images=tuple(list_other_images(directory, packed_names=set(names))),
        boot_id="",
    )
    pending = directory_of(domain, job.id)
    pending.mkdir(mode=0o700)
    with claimed(pending), domain.shared():
        _store(domain, job, pending, None, workers=workers, progress=progress)
    discard_staged(pending, pins_of(job.id))
    _merge_index(domain)
    return domain.read(job.id)


def _store(
    domain: Domain, job: Job, pending: Path, moved: PackedManifest | None, *, workers: int, progress: Progress
) -> None:
    reported = time.monotonic()
    done = 0

    def report(size: int) -> None:
        nonlocal reported, done
        done += size
        progress(size)
        if time.monotonic() - reported >= _PROGRESS_S:
            reported = time.monotonic()
            write_progress(domain, job.id, done)

    regions = _regions(moved)
    sources = {name: Source(partial(ImageFile, path), 0, job.sizes[name]) for name, path in job.images.items()}
    belongings = sources.pop(BELONGINGS_NAME, None)
    packs = None
    sizes = {name: size for name, size in job.sizes.items() if name != BELONGINGS_NAME}
    if moved is not None:
        packs = open_packs(pending, moved)  # shared with the workers, which read at offsets of their own
        for image in moved.packed_images:
            sources[image.name] = Source(partial(RunPages, packs.parts[image.name]), 0, image.size_bytes)
            sizes[image.name] = image.size_bytes
        for region, packed in zip(regions, moved.regions, strict=True):
            sources[region.name] = Source(partial(RunPages, packs.parts[packed.name]), 0, region.size_bytes)
    if belongings is not None:
        sources[BELONGINGS_NAME] = belongings
    newest = _newest(domain, job)
    ids = domain.new_ids_path(job.id)
    ids_fd = os.open(ids, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    take = partial(
        deduplicate,
        sources,
        packs=domain.packs,
        index_dir=domain.index_dir,
        page_ids=domain.page_ids,
        ids_fd=ids_fd,
        workers=workers,
        patience=domain.patience,
        progress=report,
    )
    try:
        taken = _take_after(domain, newest, take)
        if taken is None:
            done = 0
            taken = take(before=None)
    finally:
        os.close(ids_fd)
        if packs is not None:
            packs.close()
    manifest = StoredManifest(
        id=job.id,
        sequence=0,
        previous=None,
        created=job.created,
        writer=f"ocihook {__version__}",
        domain=domain.name,
        seed=domain.seed,
        container=job.container,
        host=job.host,
        images=tuple(StoredImage(name, size) for name, size in sizes.items()),
        regions=regions,
        gpu=moved.gpu if moved else {},
        other_images=job.other_images,
        page_ids_digest=taken.ids_digest,
        added_bytes=sum(info.size_bytes for info in taken.new_packs),
        belongings_bytes=job.belongings_bytes,
    )
    domain.commit(manifest, taken.layout, ids, replaced=newest.id if newest else None)
    log.info(
        "container %s: checkpoint %s is complete: %d bytes of memory, %d added to domain %s",
        job.container,
        job.id,
        manifest.raw_bytes,
        manifest.added_bytes,
        domain.name,
    )


def _regions(moved: PackedManifest | None) -> tuple[StoredRegion, ...]:
    counts: Counter[str] = Counter()
    regions = []
    for region in moved.regions if moved else ():
        regions.append(StoredRegion(region.process, region.start, region.size_bytes, counts[region.process]))
        counts[region.process] += 1
    return tuple(regions)


def _newest(domain: Domain, job: Job) -> StoredManifest | None:
    """Return the same container's newest checkpoint."""
    try:
        same = [m for m in domain.checkpoints() if lineage(m.container) == lineage(job.container)]
    except IntegrityError as error:
        log.warning("domain %s: %s", domain.name, error)
        return None
    return same[-1] if same else None


def _take_after(domain: Domain, newest: StoredManifest | None, take: Callable[..., Taken]) -> Taken | None:
    """Store a checkpoint with the help of the one before; None if that is damaged. Without it, this takes longer.

    What a failed first attempt leaves is rubbish, or is found by the second.
    """
    try:
        return take(before=domain.before(newest)) if newest else None
    except IntegrityError as error:
        log.warning("domain %s: %s", domain.name, error)
        return None


def has_pending(store: Store) -> bool:
    """Return whether a checkpoint is waiting to be completed, or to be reported lost."""
    return any(pending_ids(domain) or half_removed(domain) or lost_in_memory(domain) for domain in store.domains())


def unreported(store: Store) -> list[tuple[Domain, str]]:
    """Return the complete checkpoints that a gang's coordinator does not know of yet."""
    found = []
    for domain in store.domains():
        for checkpoint_id in sorted(domain.marks.unreported()):
            is_pending = checkpoint_id in pending_ids(domain)  # first: it may be completed at any moment
            if checkpoint_id in domain.checkpoint_ids():
                found.append((domain, checkpoint_id))
            elif not is_pending:  # it was given up
                domain.marks.note_reported(checkpoint_id)
    return found


def complete_all(settings: Settings) -> None:
    """Complete every pending checkpoint, also those that are added meanwhile. What fails is logged, and tried once."""
    store, workers = Store.of(settings), store_workers(settings)
    finish_removals(store, workers)
    for domain in store.domains():
        for checkpoint_id in lost_in_memory(domain):
            log.error("checkpoint %s in domain %s is lost: %s", checkpoint_id, domain.name, WAS_IN_MEMORY)
    tried: set[str] = set()
    while waiting := [
        (domain, checkpoint_id)
        for domain in store.domains()
        for checkpoint_id in pending_ids(domain)
        if checkpoint_id not in tried
    ]:
        domain, checkpoint_id = waiting[0]
        tried.add(checkpoint_id)
        try:
            complete(domain, checkpoint_id, workers=workers, settings=settings)
        except (OcihookError, OSError) as error:
            if isinstance(error, SnapshotLost) and read_failure(domain, checkpoint_id):
                continue  # which has been reported
            log.error("checkpoint %s in domain %s is not complete: %s", checkpoint_id, domain.name, error)
            _note_failure(domain, checkpoint_id, error)


def _note_failure(domain: Domain, checkpoint_id: str, error: OcihookError | OSError) -> None:
    """Keep with a pending checkpoint why it could not be stored."""
    before = read_failure(domain, checkpoint_id)
    attempts = 1 + (before.attempts if before else 0)
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    failure = failure_of(domain, error)._replace(attempts=attempts, last=now)
    try:
        write_failure(domain, checkpoint_id, failure)
    except OSError as write_error:
        log.warning("checkpoint %s: why it is not complete cannot be kept: %s", checkpoint_id, write_error)


@contextlib.contextmanager
def _recorded(settings: Settings | None, domain: Domain, job: Job) -> Iterator[None]:
    """Keep a record in the history of how a checkpoint was completed, or that it was not."""
    if settings is None:
        yield
        return
    facts: dict[str, object] = {"checkpoint": job.id, "domain": domain.name}
    record: dict[str, Any] = {"act": "store", "began": time.time(), "stages": {}, "facts": facts}
    record["container"] = job.container.to_json()
    started = time.monotonic()
    try:
        yield
        manifest = domain.read(job.id)
        facts |= {"raw_bytes": manifest.raw_bytes, "stored_bytes": manifest.added_bytes}
    except (OcihookError, OSError) as error:
        record |= {"outcome": "failed", "error": plain(error), "error_code": getattr(error, "code", "system")}
        raise
    finally:
        phase = {"name": "store", "began": record["began"], "seconds": time.monotonic() - started}
        record["phases"] = [phase | {"bytes": facts.get("raw_bytes", 0)}]
        record["ended"] = time.time()
        with contextlib.suppress(OSError):  # a full disk, which is reported already
            directory = Path(settings.history_dir)
            history.keep(directory, f"store-{job.id}", record, limit=settings.history_kept)


def wait_complete(
    domain: Domain,
    checkpoint_id: str,
    *,
    workers: int,
    progress: Progress = no_progress,
    settings: Settings | None = None,
) -> StoredManifest:
    """Wait until a checkpoint is complete; complete it here if no other process does.

    Args:
        domain: where it is; its patience limits the wait.
        checkpoint_id: which.
        workers: processes to use.
        progress: called with the bytes done, if it is completed here.
        settings: name the history, which gets a record if it is completed here.

    Raises:
        StoreError: if there is no such checkpoint, or it takes too long.
        OcihookError: if it cannot be completed.
        GivenUp: if its caller has given up.
    """
    patience = domain.patience
    while checkpoint_id not in domain.checkpoint_ids():
        patience.check()
        if checkpoint_id not in pending_ids(domain):
            break  # complete by now, or never there: read() finds out
        try:
            is_done = complete(domain, checkpoint_id, workers=workers, progress=progress, settings=settings)
        except GivenUp:  # not a fault of the checkpoint
            raise
        except (OcihookError, OSError) as error:
            if not patience.is_over:  # else a lock may have taken too long
                _note_failure(domain, checkpoint_id, error)
            raise
        if not is_done:
            if patience.is_over:
                job = find_job(domain, checkpoint_id)
                is_read = job is not None and job.awaits_memory
                done = f"{read_progress(domain, checkpoint_id)} bytes have been stored"
                how_far = "its memory is still being read from a snapshot" if is_read else done
                raise StoreError(f"checkpoint {checkpoint_id} is not complete yet, {how_far}")
            patience.sleep(_POLL_S)
    domain.settle()  # the process that completed it may have been killed before it did
    return domain.read(checkpoint_id)


def complete_pending(settings: Settings, *, timeout_s: float) -> list[Listed]:
    """Complete what is pending, within so many seconds; return what is not complete then, with the reasons.

    Raises:
        StoreError: if the store cannot be looked into.
    """
    store, workers = Store.of(settings, Patience(timeout_s=timeout_s)), store_workers(settings)
    for row in list_pending(store):
        with contextlib.suppress(OcihookError, OSError):  # it is kept with the checkpoint
            wait_complete(store.open(row.domain), row.id, workers=workers, settings=settings)
    finish_removals(store, workers)
    return list_pending(store)


def finish_removals(store: Store, workers: int) -> None:
    """Remove what was taken for complete checkpoints: who completed one may still be doing so, or was killed."""
    for domain in store.domains():
        for checkpoint_id in half_removed(domain):
            try:
                domain.patience.until(partial(complete, domain, checkpoint_id, workers=workers))
            except (OcihookError, OSError) as error:
                log.error("what was taken for checkpoint %s in domain %s stays: %s", checkpoint_id, domain.name, error)
