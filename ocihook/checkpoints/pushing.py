"""Pushes checkpoints to a remote, by hand or by policy, until they are there; only packs that it does not have."""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator

from ocihook.checkpoints.listing import check_complete
from ocihook.checkpoints.remote_listing import prune_remote_by_policy
from ocihook.checkpoints.transfer import Moved, in_parallel
from ocihook.config import Settings
from ocihook.errors import ConfigError, OcihookError, RemoteError, StoreError, plain
from ocihook.packs.pack import PackFile, PackInfo, PackReader
from ocihook.packs.pages import Progress, no_progress
from ocihook.remote.location import open_remote
from ocihook.remote.remote import Remote
from ocihook.store.domain import Domain
from ocihook.store.pushes import Push, note_rate
from ocihook.store.records import unseal_manifest
from ocihook.store.store import Store

log = logging.getLogger(__name__)

_RETRIED_WITHIN_S = 86400.0  # since a push was due


def push(domain: Domain, checkpoint_id: str, location: str, *, progress: Progress = no_progress) -> Moved:
    """Send a complete checkpoint to a remote. What was sent by an attempt that was interrupted is not sent again.

    Args:
        domain: where it is.
        checkpoint_id: which.
        location: of the remote.
        progress: gets the bytes of packs that are done.

    Raises:
        RemoteError: if the remote cannot be reached, or does not store what it is sent.
        StoreError: if it is not complete, or is left behind.
        IntegrityError: if the checkpoint is damaged here, or was lost; the remote does not have it then.
    """
    check_complete(domain, checkpoint_id)
    if domain.marks.is_left(checkpoint_id):
        raise StoreError(
            f"checkpoint {checkpoint_id} is not pushed: its container was created again in its own pod, and new pods "
            "would resume from it",
            hint="resume from it on this node, by its id",
        )
    with domain.using(checkpoint_id):
        manifest = domain.read(checkpoint_id)
        layout = domain.layout(manifest)
        remote = open_remote(location, domain.name)
        size = sum(info.size_bytes for info in layout.packs)
        data = domain.manifest_bytes(checkpoint_id)
        there = remote.manifest(checkpoint_id)
        if there is not None and unseal_manifest(domain.keyring, checkpoint_id, there) != manifest:
            raise RemoteError(
                f"{location} has another checkpoint {checkpoint_id} in domain {domain.name}",
                hint="one of them was exchanged: `ocihook store verify --read-data` shows whether it is this one",
            )
        if there is not None:
            remote.settle()  # the process that sent it may have been killed before it did
            progress(size)
            return Moved(checkpoint_id, manifest.raw_bytes, size, 0)
        with remote.pushing(checkpoint_id, layout.packs) as known:
            lacking = [info for info in layout.packs if info.name not in known]
            moved = sum(info.size_bytes for info in lacking)
            progress(size - moved)
            in_parallel(lacking, lambda info: _send(domain, remote, info), domain.patience, progress)
            files = {info: domain.packs_dir / info.name for info in layout.packs}
            remote.commit(checkpoint_id, data, domain.layout_bytes(checkpoint_id), files)
        if domain.marks.is_left(checkpoint_id):  # since it was begun; who leaves it marks it first, then removes it
            remote.remove([checkpoint_id])
    return Moved(checkpoint_id, manifest.raw_bytes, size, moved)


def _send(domain: Domain, remote: Remote, info: PackInfo) -> Iterator[int]:
    path = domain.packs_dir / info.name
    with contextlib.closing(PackReader(PackFile(path), info, domain.keyring)) as reader:
        for chunk in reader.chunks(0, info.chunks):
            reader.read_stored(chunk)  # verifies it: nothing damaged is sent
    yield from remote.send_pack(info, path)


def has_due_pushes(store: Store, now_s: float | None = None) -> bool:
    """Return whether a checkpoint is to be pushed by policy now."""
    now_s = time.time() if now_s is None else now_s
    return any(waiting.is_due(now_s) for _, waiting in due(store))


def next_push_s(store: Store, now_s: float | None = None) -> float | None:
    """Return in how many seconds a push is to be tried again; None if none is due, or all have failed for a day.

    An agent keeps running for it no longer than that: the daily prune pushes, too.
    """
    now_s = time.time() if now_s is None else now_s
    recent = [waiting for _, waiting in due(store) if now_s - waiting.since_s < _RETRIED_WITHIN_S]
    return min((0.0 if each.is_due(now_s) else each.next_s - now_s for each in recent), default=None)


def push_due(settings: Settings, now: Callable[[], float] = time.time, *, at_once: bool = False) -> list[str]:
    """Push what is to be pushed by policy, then prune the remote by policy; return what went wrong, a sentence each.

    What fails is tried again after a while, after a longer one each time.

    Args:
        settings: of the node.
        now: the time since the epoch.
        at_once: also try what is not due yet.
    """
    store = Store.of(settings)
    wrong = []
    for domain in store.domains():
        for waiting in domain.due_pushes():
            if not at_once and not waiting.is_due(now()):
                continue
            try:
                if not settings.remote:
                    raise ConfigError("no remote is configured", hint="set [agent] remote")
                began_s = time.monotonic()
                moved = push(domain, waiting.checkpoint_id, settings.remote)
                note_rate(store.root, moved.moved_bytes, time.monotonic() - began_s)
                domain.pushes.end(waiting.checkpoint_id)
                log.info("checkpoint %s is at the remote, %d bytes were sent", moved.checkpoint_id, moved.moved_bytes)
            except (OcihookError, OSError) as error:
                later = domain.pushes.failed(waiting, plain(error), now())
                wrong.append(
                    f"checkpoint {waiting.checkpoint_id} in domain {domain.name} was not pushed: {plain(error)}"
                )
                log.error("%s; attempt %d, the next in %.0f s", wrong[-1], later.attempts, later.next_s - now())
    if settings.remote and not wrong:
        try:
            prune_remote_by_policy(settings)
        except (OcihookError, OSError) as error:
            wrong.append(f"the remote was not pruned: {plain(error)}")
            log.error("%s", wrong[-1])
    return wrong


def due(store: Store) -> list[tuple[str, Push]]:
    """Return domain and state of what is to be pushed by policy, at some time."""
    return [(domain.name, waiting) for domain in store.domains() for waiting in domain.due_pushes()]


def pack_bytes(domain: Domain, checkpoint_id: str) -> int:
    """Return the bytes of all packs of a checkpoint."""
    return sum(info.size_bytes for info in domain.layout(domain.read(checkpoint_id)).packs)
