"""A checkpoint that is on its way into a domain: its page images are taken, and nothing has been stored yet.

Its directory has hard links to the page images, or, where another file system has them, they are pinned below /run;
so they outlive the engine's directory and any process. `job`, written last, says that all are there. `failed` says why
it could not be stored, if that was tried. Where a tmpfs is mounted on the directory, `in-memory` lies below it, on the
disk: it becomes visible when the node has gone down, and the tmpfs with it.
"""

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ocihook.errors import IntegrityError, SnapshotLost, plain
from ocihook.linux.files import replace_file
from ocihook.model import ContainerRef
from ocihook.packs.frame import as_name, as_number, as_text, decode_frame, encode_frame, load_json, read_record
from ocihook.packs.packed_manifest import OtherImage
from ocihook.store.domain import Domain
from ocihook.store.store import Store
from ocihook.store.stored_manifest import BELONGINGS_NAME, CHECKPOINT_ID
from ocihook.store.thin import Thin

_MAX_BYTES = 64 << 20
_MAX_FAILURE_BYTES = 1 << 20
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
IN_MEMORY = "in-memory"
JOB_NAME = "job"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is to become a checkpoint."""

    id: str
    created: str
    container: ContainerRef
    host: Mapping[str, str]
    images: Mapping[str, Path]  # where each page image is, and BELONGINGS_NAME
    sizes: Mapping[str, int]
    other_images: tuple[OtherImage, ...]
    region_bytes: int = 0  # of memory that went past CRIU, and is in packs beside it
    is_pushed: bool = False  # to the remote, once it is complete
    awaits_memory: bool = False  # which is still being read from a snapshot (awaited.py)
    lost: str = ""  # why that memory was lost; then only this record is left
    boot_id: str  # of the boot on which images that were not synced are whole; "": they were

    @property
    def raw_bytes(self) -> int:
        """Bytes of all page images and regions."""
        return sum(self.sizes.values()) + self.region_bytes

    @property
    def belongings_bytes(self) -> int:
        """Bytes of what the container had beside its processes; 0: they were not saved."""
        return self.sizes.get(BELONGINGS_NAME, 0)


class Failure(NamedTuple):
    """Why a pending checkpoint could not be stored."""

    code: str  # of the error
    reason: str
    remedy: str
    attempts: int = 0  # so far; 0 of what was not tried
    last: str = ""  # RFC 3339, UTC


def directory_of(domain: Domain, checkpoint_id: str) -> Path:
    """Return the directory of a pending checkpoint."""
    return domain.pending_dir / checkpoint_id


def pending_ids(domain: Domain) -> list[str]:
    """Return the checkpoints that have been taken and are not complete, the oldest first."""
    if not domain.pending_dir.exists():
        return []
    return sorted(
        p.name for p in domain.pending_dir.iterdir() if CHECKPOINT_ID.fullmatch(p.name) and (p / JOB_NAME).exists()
    )


def keep_in_use(store: Store, thin: Thin, *, is_pulled: bool) -> None:
    """Mark a checkpoint as used for as long as this process lives, whether it is here already or is to be pulled."""
    is_new = thin.domain not in store.names()
    if is_pulled or not is_new:
        store.open(thin.domain, create=is_new).marks.begin_use(thin.checkpoint_id)


def is_here(store: Store, thin: Thin) -> bool:
    """Return whether a store has a checkpoint, complete or pending."""
    if thin.domain not in store.names():
        return False
    domain = store.open(thin.domain)
    # It may be completed at any moment: look at pending ones first.
    return thin.checkpoint_id in pending_ids(domain) or thin.checkpoint_id in domain.checkpoint_ids()


def half_removed(domain: Domain) -> list[str]:
    """Return the checkpoints that are complete, and of which not all that was taken has been removed yet."""
    if not domain.pending_dir.exists():
        return []
    return sorted({path.name for path in domain.pending_dir.iterdir()} & set(domain.checkpoint_ids()))


def lost_in_memory(domain: Domain) -> list[str]:
    """Return the checkpoints that were being taken, or had been, into memory that is gone, the oldest first."""
    if not domain.pending_dir.exists():
        return []
    return sorted(
        p.name for p in domain.pending_dir.iterdir() if CHECKPOINT_ID.fullmatch(p.name) and (p / IN_MEMORY).exists()
    )


@contextlib.contextmanager
def claimed(pending: Path) -> Iterator[bool]:
    """Claim a pending checkpoint for this process alone. True also if it is gone: it has been completed."""
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


def write_job(domain: Domain, job: Job, *, durable: bool) -> None:
    """Record that all page images have been taken.

    Without `durable` nothing is synced: on ext4 that would wait for all of the page images, while the container is
    stopped.
    """
    body = {
        "id": job.id,
        "created": job.created,
        "container": job.container.to_json(),
        "host": dict(job.host),
        "images": [[name, str(path), job.sizes[name]] for name, path in job.images.items()],
        "other_images": [list(image) for image in job.other_images],
        "region_bytes": job.region_bytes,
        "is_pushed": job.is_pushed,
        "boot_id": job.boot_id,
        "awaits_memory": job.awaits_memory,
        "lost": job.lost,
    }
    version = 2 if job.awaits_memory or job.lost else 1  # an earlier release must not take it for whole
    record = encode_frame("job", version, json.dumps(body).encode())
    replace_file(directory_of(domain, job.id) / JOB_NAME, record, mode=0o600, durable=durable)


def read_job(domain: Domain, checkpoint_id: str) -> Job | None:
    """Return what is to become a checkpoint; None if there is no such thing.

    Raises:
        IntegrityError: if the record is damaged.
    """
    data = read_record(directory_of(domain, checkpoint_id) / JOB_NAME, _MAX_BYTES, f"job of {checkpoint_id}")
    if data is None:
        return None
    try:
        _, body = decode_frame("job", (1, 2), data)
        return _from_json(load_json(body))
    except (IntegrityError, ValueError, TypeError, KeyError) as error:
        reason = str(error) if isinstance(error, IntegrityError) else f"it is malformed: {error!r}"
        raise IntegrityError(
            f"checkpoint {checkpoint_id} was lost: of what is known of it, {reason}",
            hint="`ocihook store prune` removes what is left of it",
        ) from error


def _from_json(value: Any) -> Job:  # noqa: ANN401 - anything that JSON can say
    return Job(
        id=as_name(value["id"], CHECKPOINT_ID),
        created=as_text(value["created"]),
        container=ContainerRef.from_json(value["container"]),
        host=dict(value["host"]),
        images={as_text(name): Path(as_text(path)) for name, path, _ in value["images"]},
        sizes={as_text(name): as_number(size) for name, _, size in value["images"]},
        other_images=tuple(OtherImage(*image) for image in value["other_images"]),
        region_bytes=as_number(value["region_bytes"]),
        is_pushed=value["is_pushed"] is True,
        boot_id=as_text(value["boot_id"]),
        awaits_memory=value.get("awaits_memory") is True,
        lost=as_text(value.get("lost", "")),
    )


def this_boot() -> str:
    """Return what identifies this boot."""
    return _BOOT_ID.read_text().strip()


def check_not_lost(job: Job) -> None:
    """Check that no memory was lost which was still being read from a snapshot.

    Raises:
        SnapshotLost: if some was.
    """
    if job.lost:
        raise SnapshotLost(
            f"checkpoint {job.id} of container {job.container} is incomplete: the snapshot of its memory was lost: "
            f"{job.lost}",
            hint="restore an earlier one, or checkpoint again; `ocihook store prune` removes what is left of this one",
        )


def check_taken(job: Job) -> None:
    """Check that what was taken is still there, and whole.

    Raises:
        SnapshotLost: if memory was still being read when its snapshot was lost.
        IntegrityError: if not: a node that lost power has lost what was not on its disk.
    """
    check_not_lost(job)
    if job.boot_id and job.boot_id != this_boot():
        raise IntegrityError(
            f"checkpoint {job.id} of container {job.container} was lost: the node went down before it was stored",
            hint="`ocihook store prune` removes what is left of it",
        )
    for name, path in job.images.items():
        try:
            size = os.stat(path, follow_symlinks=False).st_size
        except OSError as error:
            why = plain(error)
            raise IntegrityError(f"checkpoint {job.id} of container {job.container} was lost: {why}") from error
        if size != job.sizes[name]:
            raise IntegrityError(
                f"checkpoint {job.id} of container {job.container} was lost: {name} has {size} bytes of "
                f"{job.sizes[name]}"
            )


def write_failure(domain: Domain, checkpoint_id: str, failure: Failure) -> None:
    """Record why it could not be stored; the record is removed with the directory once it is stored.

    Raises:
        OSError: if the record cannot be written either.
    """
    record = encode_frame("failed", 1, json.dumps(failure._asdict()).encode())
    replace_file(directory_of(domain, checkpoint_id) / "failed", record, mode=0o600, durable=False)


def read_failure(domain: Domain, checkpoint_id: str) -> Failure | None:
    """Return why it could not be stored the last time; None if it has not failed, or that is not known."""
    with contextlib.suppress(IntegrityError, ValueError, TypeError, KeyError):  # shown to people, and decides nothing
        path = directory_of(domain, checkpoint_id) / "failed"
        data = read_record(path, _MAX_FAILURE_BYTES, f"failure of {checkpoint_id}")
        if data is not None:
            value = load_json(decode_frame("failed", (1,), data)[1])
            code, reason, remedy, last = (as_text(value[key]) for key in ("code", "reason", "remedy", "last"))
            return Failure(code, reason, remedy, as_number(value["attempts"]), last)
    return None


def write_progress(domain: Domain, checkpoint_id: str, done_bytes: int) -> None:
    """Record its progress, for other processes to read."""
    replace_file(directory_of(domain, checkpoint_id) / "progress", str(done_bytes).encode(), mode=0o600, durable=False)


def read_progress(domain: Domain, checkpoint_id: str) -> int:
    """Return how many bytes have been stored."""
    with contextlib.suppress(OSError, ValueError):  # as above
        return int((directory_of(domain, checkpoint_id) / "progress").read_text())
    return 0
