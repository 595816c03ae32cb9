"""The content store's use cases: complete what was taken, restore from it, tell of it, check it, prune it."""

import contextlib
import errno
import fcntl
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from ocihook import __version__
from ocihook.config import Settings
from ocihook.criu.images import check_page_images
from ocihook.errors import GivenUp, IntegrityError, OcihookError, StoreError, StoreFull, plain
from ocihook.linux.patience import ENDLESS, Patience
from ocihook.linux.procfs import Process
from ocihook.model import ContainerRef
from ocihook.ops import history
from ocihook.ops.image_set import list_other_images, list_packable, open_packs
from ocihook.ops.staging import discard_staged, domain_name, pins_of
from ocihook.session.spans import Spans, opener
from ocihook.store import rewrite, upkeep
from ocihook.store import verify as check
from ocihook.store.assemble import StoredPages, Target, assemble
from ocihook.store.deduplicate import WORKER_BYTES, Taken, deduplicate
from ocihook.store.domain import Domain, new_checkpoint_id
from ocihook.store.extents import ZERO
from ocihook.store.lineage import lineage
from ocihook.store.manifest import (
    PACK_PREFIX,
    REGION_PACK_PREFIX,
    Manifest,
    PackedImage,
    Region,
    Segment,
    read_manifest,
    write_manifest,
)
from ocihook.store.pack import PAGE_BYTES, PackInfo
from ocihook.store.packing import (
    ImageFile,
    Nowhere,
    PackedPages,
    Progress,
    Source,
    make_image,
    no_progress,
    pack,
    workers_within,
)
from ocihook.store.pending import (
    Failure,
    Job,
    check_taken,
    directory_of,
    half_removed,
    lost_in_memory,
    pending_ids,
    read_failure,
    read_job,
    read_progress,
    write_failure,
    write_progress,
)
from ocihook.store.pushes import Push
from ocihook.store.store import Store
from ocihook.store.stored import StoredImage, StoredManifest, StoredRegion

_PROGRESS_S = 1.0
_POLL_S = 0.2
_WAS_IN_MEMORY = "it was in memory when the node went down, and not stored yet"
_PRUNE = "`ocihook store prune` removes what is left of it"

log = logging.getLogger(__name__)


class Listed(NamedTuple):
    """A checkpoint as it is shown."""

    domain: str
    id: str
    state: str  # complete, pending, lost
    container: str
    created: str
    raw_bytes: int
    added_bytes: int
    done_bytes: int
    code: str = ""  # why it is not complete, if that is not only a matter of time: code of the error, then in words
    reason: str = ""
    remedy: str = ""
    attempts: int = 0  # to store it, that failed
    is_pinned: bool = False
    is_used: bool = False  # by a restore or a push
    push: Push | None = None  # that is due


def complete(
    domain: Domain,
    checkpoint_id: str,
    *,
    workers: int,
    progress: Progress = no_progress,
    settings: Settings | None = None,
) -> bool:
    """Store what was taken for a checkpoint; False if another process is at it. May run again after any interruption.

    With `settings` the history gets a record of it.

    Raises:
        IntegrityError: if what was taken is not there any more.
        OcihookError: if the store cannot be used.
        OSError: from the file system, a full one included; what was taken stays, for another attempt.
    """
    pending = directory_of(domain, checkpoint_id)
    with claimed(pending) as is_ours:
        if not is_ours:
            return False
        job = read_job(domain, checkpoint_id)
        if job is not None and checkpoint_id not in domain.checkpoint_ids():
            with _recorded(settings, domain, job), domain.shared(in_turn=True):
                check_taken(job)
                if job.is_pushed:
                    domain.pushes.note(checkpoint_id)
                _store(domain, job, pending, read_manifest(pending), workers=workers, progress=progress)
        domain.settle()  # whoever completed it may have been killed before
        discard_staged(pending, pins_of(checkpoint_id))
    return True


@contextlib.contextmanager
def claimed(pending: Path) -> Iterator[bool]:
    """Be the only one at a pending checkpoint. True also if it is gone: whoever had it has completed it."""
    try:
        fd = os.open(pending, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        yield True
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        yield False
        return
    try:
        yield True
    finally:
        os.close(fd)


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
    return domain.read(job.id)


def _store(
    domain: Domain, job: Job, pending: Path, moved: Manifest | None, *, workers: int, progress: Progress
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
    packs = None
    if moved is not None:
        packs = open_packs(pending, moved)  # shared with the workers, who read it at their own places
        for region, packed in zip(regions, moved.regions, strict=True):
            sources[region.name] = Source(partial(PackedPages, packs, packed), 0, region.size_bytes)
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
        images=tuple(StoredImage(name, size) for name, size in job.sizes.items()),
        regions=regions,
        gpu=moved.gpu if moved else {},
        other_images=job.other_images,
        page_ids_digest=taken.ids_digest,
        added_bytes=sum(info.size_bytes for info in taken.new_packs),
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


def _regions(moved: Manifest | None) -> tuple[StoredRegion, ...]:
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
    """Take a checkpoint by what is known of the one before; None if that is damaged. Without it, it takes longer.

    What a first attempt leaves then is rubbish, or found by the second.
    """
    try:
        return take(before=domain.before(newest)) if newest else None
    except IntegrityError as error:
        log.warning("domain %s: %s", domain.name, error)
        return None


def has_pending(store: Store) -> bool:
    """Tell whether a checkpoint is waiting to be completed, or to be told lost."""
    return any(pending_ids(domain) or half_removed(domain) or lost_in_memory(domain) for domain in store.domains())


def store_workers(settings: Settings) -> int:
    """Return how many processes may store at a time."""
    cores = settings.workers or len(os.sched_getaffinity(0))
    return workers_within(settings.bound_bytes, cores, WORKER_BYTES)


def complete_all(settings: Settings) -> None:
    """Complete every pending checkpoint, also those that come meanwhile. What fails is logged, and tried once."""
    store, workers = Store.of(settings), store_workers(settings)
    finish_removals(store, workers)
    for domain in store.domains():
        for checkpoint_id in lost_in_memory(domain):
            log.error("checkpoint %s in domain %s is lost: %s", checkpoint_id, domain.name, _WAS_IN_MEMORY)
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
            log.error("checkpoint %s in domain %s is not complete: %s", checkpoint_id, domain.name, error)
            _note_failure(domain, checkpoint_id, error)


def _note_failure(domain: Domain, checkpoint_id: str, error: OcihookError | OSError) -> None:
    """Keep with a pending checkpoint why it could not be stored."""
    before = read_failure(domain, checkpoint_id)
    attempts = 1 + (before.attempts if before else 0)
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    failure = _failure(domain, error)._replace(attempts=attempts, last=now)
    try:
        write_failure(domain, checkpoint_id, failure)
    except OSError as write_error:
        log.warning("checkpoint %s: why it is not complete cannot be kept: %s", checkpoint_id, write_error)


def _failure(domain: Domain, error: OcihookError | OSError) -> Failure:
    if isinstance(error, OcihookError):
        return Failure(error.code, str(error.args[0]), error.hint or "remove the cause, then `ocihook wait`")
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return Failure(StoreFull.code, plain(error), f"make room in {domain.directory}, then `ocihook wait`")
    return Failure("system", plain(error), "remove the cause, then `ocihook wait`")


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
        with contextlib.suppress(OSError):  # a full disk, which is told of already
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
    """Wait until a checkpoint is complete, and complete it if nobody else is at it.

    Args:
        domain: where it is; its patience says how long.
        checkpoint_id: which.
        workers: processes to use.
        progress: told the bytes done, if it is completed here.
        settings: tell where the history is that gets a record if it is completed here.

    Raises:
        StoreError: if there is no such checkpoint, or it takes too long.
        OcihookError: if it cannot be completed.
        GivenUp: if nobody waits for it any more.
    """
    patience = domain.patience
    while checkpoint_id not in domain.checkpoint_ids():
        patience.check()
        if checkpoint_id not in pending_ids(domain):
            break  # complete by now, or never was there: read() tells
        try:
            is_done = complete(domain, checkpoint_id, workers=workers, progress=progress, settings=settings)
        except GivenUp:  # is no fault of the checkpoint
            raise
        except (OcihookError, OSError) as error:
            if not patience.is_over:  # else a lock may have taken too long
                _note_failure(domain, checkpoint_id, error)
            raise
        if not is_done:
            if patience.is_over:
                done = read_progress(domain, checkpoint_id)
                raise StoreError(f"checkpoint {checkpoint_id} is not complete yet, {done} bytes have been stored")
            patience.sleep(_POLL_S)
    domain.settle()  # whoever completed it may have been killed before
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
    """Have what was taken for complete checkpoints removed: whoever completed one may still be at it, or was killed."""
    for domain in store.domains():
        for checkpoint_id in half_removed(domain):
            try:
                domain.patience.until(partial(complete, domain, checkpoint_id, workers=workers))
            except (OcihookError, OSError) as error:
                log.error("what was taken for checkpoint %s in domain %s stays: %s", checkpoint_id, domain.name, error)


def rehydrate_stored(
    domain: Domain,
    manifest: StoredManifest,
    directory: Path,
    *,
    with_regions: bool = True,
    workers: int,
    progress: Progress = no_progress,
) -> None:
    """Write a stored checkpoint's page images into `directory`, every page verified on the way.

    With `with_regions`, what goes into processes later is verified, too, as it is there once more.

    Raises:
        IntegrityError: naming what is missing or damaged.
        OSError: from the file system, a full one included.
    """
    with domain.using(manifest.id):
        layout = domain.layout(manifest)
        targets = {}
        for image in manifest.images:
            path = directory / image.name
            make_image(path, image.size_bytes)
            targets[image.name] = Target(partial(ImageFile, path, writable=True), 0)
        if with_regions:
            targets |= {region.name: Target(Nowhere, 0) for region in manifest.regions}
        assemble(layout, domain.packs, targets, workers=workers, patience=domain.patience, progress=progress)


def stored_region_bytes(domain: Domain, manifest: StoredManifest) -> int:
    """Return how many bytes of memory went past CRIU, without zero pages.

    Raises:
        IntegrityError: if the layout is damaged.
    """
    if not manifest.regions:
        return 0
    images = domain.layout(manifest).images
    extents = chain.from_iterable(images[region.name] for region in manifest.regions)
    return sum(extent.pages for extent in extents if extent.pack != ZERO) * PAGE_BYTES


def write_stored_regions(
    domain: Domain,
    manifest: StoredManifest,
    processes: Mapping[str, Process],
    *,
    workers: int,
    patience: Patience = ENDLESS,
    progress: Progress = no_progress,
    spans: Spans | None = None,
) -> int:
    """Write a stored checkpoint's regions into processes, by the names that it has for them; return the bytes.

    Raises:
        IntegrityError: naming what is missing or damaged.
        OSError: if a process has not mapped a region, or is gone.
    """
    targets = {
        region.name: Target(opener(spans, processes[region.process]), region.start) for region in manifest.regions
    }
    with domain.using(manifest.id):
        assemble(domain.layout(manifest), domain.packs, targets, workers=workers, patience=patience, progress=progress)
    return sum(region.size_bytes for region in manifest.regions)


def pack_stored(
    domain: Domain, manifest: StoredManifest, directory: Path, *, workers: int, progress: Progress = no_progress
) -> Manifest:
    """Write a stored checkpoint's memory into packs and a manifest in `directory`, as a dump inline would have.

    Raises:
        IntegrityError: naming what is missing or damaged.
        OSError: from the file system, a full one included.
    """
    with domain.using(manifest.id):
        layout = domain.layout(manifest)
        sources = {
            part: Source(partial(StoredPages, layout.images[part.name], layout, domain.packs), 0, part.size_bytes)
            for part in manifest.parts
        }

        def packed(
            parts: Sequence[StoredImage | StoredRegion], prefix: str
        ) -> tuple[list[tuple[Segment, ...]], list[PackInfo]]:
            chosen = [sources[part] for part in parts]
            return pack(chosen, directory, prefix=prefix, workers=workers, durable=False, progress=progress)

        image_rows, image_packs = packed(manifest.images, PACK_PREFIX)
        region_rows, region_packs = packed(manifest.regions, REGION_PACK_PREFIX)
    made = Manifest(
        created=manifest.created,
        writer=f"ocihook {__version__}",
        container=manifest.container,
        host=manifest.host,
        packed_images=tuple(
            PackedImage(image.name, image.size_bytes, row)
            for image, row in zip(manifest.images, image_rows, strict=True)
        ),
        other_images=manifest.other_images,
        packs=(*image_packs, *region_packs),
        regions=tuple(
            Region(region.process, region.start, region.size_bytes, row)
            for region, row in zip(manifest.regions, region_rows, strict=True)
        ),
        gpu=manifest.gpu,
    )
    write_manifest(directory, made, durable=False)
    return made


# --- what people ask


def find(store: Store, checkpoint_id: str) -> Domain:
    """Return the domain of a checkpoint.

    Raises:
        StoreError: if there is no such checkpoint.
    """
    for domain in store.domains():
        if checkpoint_id in domain.checkpoint_ids() or checkpoint_id in pending_ids(domain):
            return domain
    raise StoreError(f"the store in {store.root} has no checkpoint {checkpoint_id}")


def pin(store: Store, checkpoint_id: str, *, is_pinned: bool) -> None:
    """Have a checkpoint stay whatever is pruned, or no longer.

    Raises:
        StoreError: if there is no such checkpoint, or it is not complete yet.
    """
    domain = find(store, checkpoint_id)
    if checkpoint_id not in domain.checkpoint_ids():
        raise StoreError(f"checkpoint {checkpoint_id} is still being stored", hint="`ocihook wait`")
    if is_pinned:
        domain.pin(checkpoint_id)
    else:
        domain.marks.unpin(checkpoint_id)


def list_checkpoints(store: Store) -> list[Listed]:
    """Return all checkpoints of all domains, the oldest of each first; then what is pending.

    Raises:
        IntegrityError: if one is damaged.
        KeyMissing: if one is encrypted, and there is no key.
    """
    rows = []
    for domain in store.domains():
        rows += [
            Listed(
                *(domain.name, m.id, "complete", str(m.container), m.created, m.raw_bytes, m.added_bytes, m.raw_bytes),
                is_pinned=domain.marks.is_pinned(m.id),
                is_used=domain.marks.is_used(m.id),
                push=domain.pushes.read(m.id),
            )
            for m in domain.checkpoints()
        ]
        rows += pending_of(domain)
    return rows


def list_pending(store: Store) -> list[Listed]:
    """Return the checkpoints that are still being stored, and those that were lost on their way."""
    return [row for domain in store.domains() for row in pending_of(domain)]


def pending_of(domain: Domain) -> Iterator[Listed]:
    """Yield the checkpoints of a domain that are not complete, the oldest first; no key is needed for that."""
    complete_ids = set(domain.checkpoint_ids())
    for checkpoint_id in lost_in_memory(domain):
        yield Listed(domain.name, checkpoint_id, "lost", "", "", 0, 0, 0, IntegrityError.code, _WAS_IN_MEMORY, _PRUNE)
    for checkpoint_id in pending_ids(domain):
        if checkpoint_id in complete_ids:
            continue
        job = None
        try:
            job = read_job(domain, checkpoint_id)
            if job is None:
                continue
            check_taken(job)
        except IntegrityError as error:
            state = "lost"
            failure = _failure(domain, error)._replace(remedy=_PRUNE)
        else:
            state, failure = "pending", read_failure(domain, checkpoint_id) or Failure("", "", "")
        container, created, size = (str(job.container), job.created, job.raw_bytes) if job else ("", "", 0)
        done = read_progress(domain, checkpoint_id)
        yield Listed(domain.name, checkpoint_id, state, container, created, size, 0, done, *failure[:4])


def usage(store: Store) -> dict[str, upkeep.Usage]:
    """Return what each domain takes.

    Raises:
        IntegrityError: if a checkpoint is damaged.
    """
    return {domain.name: upkeep.usage(domain) for domain in store.domains()}


def verify(store: Store, *, read_data: bool, progress: Progress = no_progress) -> list[str]:
    """Return what is wrong with a store, a sentence each."""
    wrong = []
    for domain in store.domains():
        with domain.shared():
            wrong += [
                f"domain {domain.name}: {line}" for line in check.verify(domain, read_data=read_data, progress=progress)
            ]
    return wrong


def rekey(store: Store) -> dict[str, int]:
    """Encrypt every domain with its newest key; return by domain how many packs were written anew.

    Raises:
        KeyMissing: if there is no key.
        IntegrityError: if something is damaged.
        OSError: from the file system, a full one included; what is done is done.
    """
    done = {}
    for domain in store.domains():
        with domain.upkeep(), domain.alone():
            done[domain.name] = rewrite.rekey(domain)
    return done


def repair(store: Store) -> list[str]:
    """Make the index of every domain anew; return what was done.

    Raises:
        IntegrityError: if a checkpoint is damaged.
    """
    done = []
    for domain in store.domains():
        with domain.upkeep(), domain.alone():
            done += [f"domain {domain.name}: {line}" for line in upkeep.repair(domain)]
    return done
