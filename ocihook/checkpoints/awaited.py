"""A checkpoint that awaits memory: it is read from a snapshot, while the container runs on.

Its job is there already, and says so. Whoever reads the snapshot claims the checkpoint for that long; then supplies the
memory, and the checkpoint is one like any other, or loses it, and the job with the reason is all that is left. One that
is not claimed has lost its reader: who finds it first says so in the job.
"""

import contextlib
import dataclasses
import logging
from collections.abc import Iterator

from ocihook.checkpoints.pending import (
    IN_MEMORY,
    JOB_NAME,
    Job,
    check_not_lost,
    claimed,
    directory_of,
    read_job,
    this_boot,
    write_job,
)
from ocihook.checkpoints.stage import Place, pins_of, record_of
from ocihook.errors import IntegrityError, StoreError
from ocihook.images.image_set import MovedRegions
from ocihook.linux.mounts import unmount, unpin_directory
from ocihook.linux.patience import Patience
from ocihook.model import ContainerRef
from ocihook.packs.packed_manifest import write_manifest
from ocihook.store.domain import Domain
from ocihook.store.store import Store

_CLAIM_TIMEOUT_S = 10.0  # a prune looks at each place for a moment
_READER_DIED = "what read it was killed"
_NODE_WENT_DOWN = "the node went down before it was read"

log = logging.getLogger(__name__)


@contextlib.contextmanager
def reading(place: Place) -> Iterator[None]:
    """Claim a place, from before its job is written until its memory has been supplied, or lost.

    The place is made, and what is to be mounted there is: the claim is on the directory that is seen then.

    Raises:
        StoreError: if another process has it.
    """
    with contextlib.ExitStack() as stack:
        if not Patience(timeout_s=_CLAIM_TIMEOUT_S).until(lambda: stack.enter_context(claimed(place.pending))):
            raise StoreError(f"{place.pending} is in use by another process")
        yield


def supply(store: Store, place: Place, moved: MovedRegions, container: ContainerRef, *, durable: bool) -> Job:
    """Make a checkpoint that awaits memory one like any other. May run again after any interruption.

    Args:
        store: where it goes.
        place: claimed; it has the packs.
        moved: all memory in packs, also what was moved before CRIU began. Page images among it replace those taken.
        container: whose it is.
        durable: return only when the records are on stable storage.

    Raises:
        SnapshotLost: if the memory was lost before.
        IntegrityError: if the checkpoint was removed before, or its record is damaged.
        OSError: from the file system, a full one included.
    """
    domain = store.open(place.domain)
    job = read_job(domain, place.pending.name)
    if job is None:
        raise IntegrityError(f"checkpoint {place.pending.name} of container {container} was removed meanwhile")
    check_not_lost(job)
    if job.awaits_memory:
        record = record_of(moved, container)
        write_manifest(place.pending, record, durable=durable)
        images = {name: path for name, path in job.images.items() if name not in {one.name for one in moved.images}}
        job = dataclasses.replace(
            job,
            images=images,
            sizes={name: job.sizes[name] for name in images},
            region_bytes=record.raw_bytes,
            awaits_memory=False,
        )
        write_job(domain, job, durable=durable)
    return job


def lose(store: Store, place: Place, reason: str) -> None:
    """Give up a checkpoint that awaits memory: what was taken is removed, its job stays until the store is pruned.

    May run again after any interruption. A checkpoint whose memory was supplied is left alone, and so is none.

    Args:
        store: where it was to go.
        place: claimed.
        reason: why the snapshot was lost.

    Raises:
        OSError: from the file system; it is lost all the same once nobody claims it.
    """
    domain = store.open(place.domain)
    job = read_job(domain, place.pending.name)
    if job is not None and job.awaits_memory:
        _lose(domain, job, reason)


def find_job(domain: Domain, checkpoint_id: str) -> Job | None:
    """Return what is to become a checkpoint, None if there is no such thing; a dead reader's is lost from here on.

    Raises:
        IntegrityError: if the record is damaged.
    """
    job = read_job(domain, checkpoint_id)
    if job is None or not job.awaits_memory:
        return job
    with claimed(directory_of(domain, checkpoint_id)) as is_ours:
        return claimed_job(domain, checkpoint_id) if is_ours else job


def claimed_job(domain: Domain, checkpoint_id: str) -> Job | None:
    """Return the same of a checkpoint that this process has claimed, so that nobody else reads memory for it.

    Raises:
        IntegrityError: if the record is damaged.
    """
    job = read_job(domain, checkpoint_id)
    if job is None or not job.awaits_memory:
        return job
    reason = _NODE_WENT_DOWN if job.boot_id not in ("", this_boot()) else _READER_DIED
    try:
        return _lose(domain, job, reason)
    except OSError as error:
        log.warning("checkpoint %s is lost, and cannot be marked so: %s", checkpoint_id, error)
        return dataclasses.replace(job, awaits_memory=False, lost=reason)


def _lose(domain: Domain, job: Job, reason: str) -> Job:
    """Remove what was taken, which makes room for the record; until that is written, a lost reader means the same."""
    unpin_directory(pins_of(job.id))
    pending = directory_of(domain, job.id)
    unmount(pending)  # memory, which the next dump may need
    for path in pending.iterdir():
        if path.name not in (JOB_NAME, IN_MEMORY):
            path.unlink()
    job = dataclasses.replace(job, awaits_memory=False, lost=reason)
    write_job(domain, job, durable=False)
    (pending / IN_MEMORY).unlink(missing_ok=True)
    return job
