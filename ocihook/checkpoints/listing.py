"""Lists the checkpoints of the store and what space they take; finds one by its id, and pins it."""

import errno
from collections.abc import Iterator
from typing import NamedTuple

from ocihook.checkpoints.awaited import find_job
from ocihook.checkpoints.epochs import Epochs, find_epoch
from ocihook.checkpoints.pending import (
    Failure,
    check_taken,
    lost_in_memory,
    pending_ids,
    read_failure,
    read_progress,
)
from ocihook.errors import IntegrityError, OcihookError, StoreError, StoreFull, plain
from ocihook.store import garbage
from ocihook.store.domain import Domain
from ocihook.store.lineage import lineage, owner_name
from ocihook.store.pushes import Push
from ocihook.store.store import Store
from ocihook.store.thin import Thin

WAS_IN_MEMORY = "it was in memory when the node went down, and not stored yet"
_PRUNE = "`ocihook store prune` removes what is left of it"


class Listed(NamedTuple):
    """A checkpoint as it is shown."""

    domain: str
    id: str
    state: str  # complete, pending, reading (from a snapshot), lost
    container: str
    created: str
    raw_bytes: int
    added_bytes: int
    done_bytes: int
    code: str = ""  # why it is not complete, unless it only needs time: code of the error, then in words
    reason: str = ""
    remedy: str = ""
    attempts: int = 0  # to store it, that failed
    is_pinned: bool = False
    is_used: bool = False  # by a restore or a push
    push: Push | None = None  # that is due
    gang: str = ""  # GANG/EPOCH/ATTEMPT of the dump of a gang that it is part of
    member: str = ""  # whose newest checkpoint `latest` means
    owner: str = ""  # of its pod
    owner_uid: str = ""  # of the JobSet or Job that this is, where that is known
    gang_missing: int = 0  # members of that which are not complete here
    gang_elsewhere: int = 0  # of these, those that were dumped on other nodes: a node does not know what they have

    @property
    def is_on_its_way(self) -> bool:
        """Return whether it may become complete."""
        return self.state in ("pending", "reading")


def failure_of(domain: Domain, error: OcihookError | OSError) -> Failure:
    """Return why a checkpoint could not be completed, and what to do about it."""
    if isinstance(error, OcihookError):
        return Failure(error.code, str(error.args[0]), error.hint or "remove the cause, then `ocihook wait`")
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return Failure(StoreFull.code, plain(error), f"make room in {domain.directory}, then `ocihook wait`")
    return Failure("system", plain(error), "remove the cause, then `ocihook wait`")


def find(store: Store, checkpoint_id: str) -> Domain:
    """Return the domain of a checkpoint.

    Raises:
        StoreError: if there is no such checkpoint.
    """
    for domain in store.domains():
        if checkpoint_id in pending_ids(domain) or checkpoint_id in domain.checkpoint_ids():  # complete at any moment
            return domain
    raise StoreError(f"the store in {store.root} has no checkpoint {checkpoint_id}")


def memory_state(store: Store, thin: Thin) -> str:
    """Return what is known here of a checkpoint's memory: reading (from a snapshot), lost, or "" as for any other."""
    if thin.domain not in store.names():
        return ""
    domain = store.open(thin.domain)
    try:
        job = find_job(domain, thin.checkpoint_id)
        if job is not None:
            check_taken(job)
    except IntegrityError:
        is_complete = thin.checkpoint_id in domain.checkpoint_ids()  # what was taken is being removed
        return "" if is_complete else "lost"
    return "reading" if job is not None and job.awaits_memory else ""


def check_complete(domain: Domain, checkpoint_id: str) -> None:
    """Check that a checkpoint is complete, if it is there at all.

    Raises:
        IntegrityError: if it was lost.
        StoreError: if it needs time.
    """
    if checkpoint_id not in pending_ids(domain) or checkpoint_id in domain.checkpoint_ids():
        return
    job = find_job(domain, checkpoint_id)
    if job is None:  # it is complete by now
        return
    try:
        check_taken(job)
    except IntegrityError:
        if checkpoint_id in domain.checkpoint_ids():  # what was taken is being removed
            return
        raise
    doing = "read from a snapshot" if job.awaits_memory else "stored"
    raise StoreError(f"checkpoint {checkpoint_id} is still being {doing}", hint="`ocihook wait`")


def find_gang(store: Store, name: str) -> tuple[Domain, list[str]]:
    """Return the domain of a dump of a gang, GANG/EPOCH, and what of it is complete in a store.

    Raises:
        StoreError: if nothing is, or two dumps are called so.
    """
    known = ((domain.name, m.id, m.container) for domain in store.domains() for m in domain.checkpoints())
    found, ids = find_epoch(name, f"the store in {store.root}", known)
    return store.open(found), ids


def unfinished_epochs(store: Store) -> list[str]:
    """Return which dumps of gangs lack members that were on this node, a sentence each: they are not restored."""
    said = []
    for domain in store.domains():
        containers = [m.container for m in domain.checkpoints() if m.container.gang and not domain.is_pulled(m.id)]
        epochs = Epochs(containers)
        torn = {c.gang: epochs.missing(c) for c in containers if not epochs.has_all_of_node(c)}
        said += [
            f"domain {domain.name}: {gang} lacks {missing} of its members, and is not restored"
            for gang, missing in torn.items()
        ]
    return said


def pin(store: Store, checkpoint_id: str, *, is_pinned: bool) -> None:
    """Protect a checkpoint from every prune, or end that.

    Raises:
        StoreError: if there is no such checkpoint, or it is not complete.
    """
    domain = find(store, checkpoint_id)
    check_complete(domain, checkpoint_id)
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
        pending = list(pending_of(domain))  # read first: what is completed meanwhile is then among the others
        manifests = domain.checkpoints()
        epochs = Epochs(m.container for m in manifests)
        complete = [
            Listed(
                *(domain.name, m.id, "complete", str(m.container), m.created, m.raw_bytes, m.added_bytes, m.raw_bytes),
                is_pinned=domain.marks.is_pinned(m.id),
                is_used=domain.marks.is_used(m.id),
                push=domain.pushes.read(m.id),
                gang=m.container.gang,
                gang_missing=epochs.missing(m.container),
                member=lineage(m.container),
                owner=owner_name(m.container),
                owner_uid=m.container.owner_uid,
                gang_elsewhere=epochs.missing(m.container) - epochs.missing_of_node(m.container),
            )
            for m in manifests
        ]
        complete_ids = {row.id for row in complete}
        rows += [*complete, *(row for row in pending if row.id not in complete_ids)]
    return rows


def list_pending(store: Store) -> list[Listed]:
    """Return the checkpoints that are still being read or stored, and those that were lost on their way."""
    return [row for domain in store.domains() for row in pending_of(domain)]


def pending_of(domain: Domain) -> Iterator[Listed]:
    """Yield the checkpoints of a domain that are not complete, the oldest first; no key is needed for that."""
    complete_ids = set(domain.checkpoint_ids())
    for checkpoint_id in lost_in_memory(domain):
        yield Listed(domain.name, checkpoint_id, "lost", "", "", 0, 0, 0, IntegrityError.code, WAS_IN_MEMORY, _PRUNE)
    for checkpoint_id in pending_ids(domain):
        if checkpoint_id in complete_ids:
            continue
        job = None
        try:
            job = find_job(domain, checkpoint_id)
            if job is None:
                continue
            check_taken(job)
        except IntegrityError as error:
            if checkpoint_id in domain.checkpoint_ids():  # complete by now: what was taken is being removed
                continue
            state = "lost"
            failure = failure_of(domain, error)._replace(remedy=error.hint or _PRUNE)
        else:
            state = "reading" if job.awaits_memory else "pending"
            failure = read_failure(domain, checkpoint_id) or Failure("", "", "")
        container, created, size = (str(job.container), job.created, job.raw_bytes) if job else ("", "", 0)
        done = read_progress(domain, checkpoint_id)
        row = Listed(domain.name, checkpoint_id, state, container, created, size, 0, done, *failure[:4])
        yield (
            row
            if job is None
            else row._replace(
                gang=job.container.gang,
                member=lineage(job.container),
                owner=owner_name(job.container),
                owner_uid=job.container.owner_uid,
            )
        )


def usage(store: Store) -> dict[str, garbage.Usage]:
    """Return what space each domain takes.

    Raises:
        IntegrityError: if a checkpoint is damaged.
    """
    return {domain.name: garbage.usage(domain) for domain in store.domains()}
