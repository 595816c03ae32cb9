"""Push and pull: checkpoints of the store to and from a remote. Packs that the other side has do not travel."""

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from ocihook.config import Settings
from ocihook.errors import ConfigError, IntegrityError, OcihookError, RemoteError, StoreError, plain
from ocihook.linux.patience import Patience
from ocihook.linux.workers import run_forked
from ocihook.ops.prune import Keep, Pruned, choose
from ocihook.ops.staging import discard_staged, pins_of
from ocihook.ops.store import Listed, claimed
from ocihook.remote.location import open_remote, remote_domains
from ocihook.remote.remote import Remote
from ocihook.store.cipher import NO_KEYS, Keyring, KeySource
from ocihook.store.domain import Domain
from ocihook.store.pack import PackFile, PackInfo, PackReader
from ocihook.store.packing import Progress, no_progress
from ocihook.store.pending import directory_of, pending_ids
from ocihook.store.pulled import adopt, adopt_pack
from ocihook.store.pushes import Push
from ocihook.store.records import unseal_layout, unseal_manifest
from ocihook.store.store import Store
from ocihook.store.stored import StoredManifest
from ocihook.store.thin import Thin

TRANSFERS = 4  # packs that travel at a time
REMOTE_PRUNED_EVERY_S = 6 * 3600.0  # by whichever node comes first
_RETRIED_WITHIN_S = 86400.0  # since a push was due

log = logging.getLogger(__name__)


class Moved(NamedTuple):
    """What a push or a pull did."""

    checkpoint_id: str
    raw_bytes: int
    pack_bytes: int  # of all packs of the checkpoint
    moved_bytes: int  # of those that travelled; 0 also if the checkpoint was there


def push(domain: Domain, checkpoint_id: str, location: str, *, progress: Progress = no_progress) -> Moved:
    """Send a complete checkpoint to a remote. What was sent by an attempt that was interrupted is not sent again.

    Args:
        domain: where it is.
        checkpoint_id: which.
        location: of the remote.
        progress: told the bytes of packs that need no more work.

    Raises:
        RemoteError: if the remote cannot be reached, or does not keep what it is sent.
        IntegrityError: if the checkpoint is damaged here; the remote does not have it then.
    """
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
            remote.settle()  # whoever sent it may have been killed before
            progress(size)
            return Moved(checkpoint_id, manifest.raw_bytes, size, 0)
        with remote.pushing(checkpoint_id, layout.packs) as known:
            lacking = [info for info in layout.packs if info.name not in known]
            moved = sum(info.size_bytes for info in lacking)
            progress(size - moved)
            _in_parallel(lacking, lambda info: _send(domain, remote, info), domain.patience, progress)
            files = {info: domain.packs_dir / info.name for info in layout.packs}
            remote.commit(checkpoint_id, data, domain.layout_bytes(checkpoint_id), files)
    return Moved(checkpoint_id, manifest.raw_bytes, size, moved)


def _send(domain: Domain, remote: Remote, info: PackInfo) -> Iterator[int]:
    path = domain.packs_dir / info.name
    with contextlib.closing(PackReader(PackFile(path), info, domain.keyring)) as reader:
        for chunk in reader.chunks(0, info.chunks):
            reader.read_stored(chunk)  # verifies it: no damage travels
    yield from remote.send_pack(info, path)


def pull(store: Store, name: str, checkpoint_id: str, location: str, *, progress: Progress = no_progress) -> Moved:
    """Fetch a checkpoint into the store, and verify all of it. What an interrupted attempt has brought is kept an hour.

    Args:
        store: where it comes to; its patience is that with workers and locks. A remote may be asked many times before
            it answers: who cannot wait for that calls this in a process of its own.
        name: the domain, there and here.
        checkpoint_id: which.
        location: of the remote.
        progress: told the bytes of packs that need no more work.

    Raises:
        RemoteError: if the remote cannot be reached, or has no such checkpoint.
        IntegrityError: if what came is damaged; the store does not have it then.
        StoreError: if another process is pulling it.
        OSError: from the file system, a full one included.
    """
    remote, keyring = open_remote(location, name), Keyring(store.keys, name)
    data = remote.manifest(checkpoint_id)
    layout_data = remote.layout(checkpoint_id)
    if data is None or layout_data is None:
        raise RemoteError(f"{location} has no checkpoint {checkpoint_id} in domain {name}")
    manifest = unseal_manifest(keyring, checkpoint_id, data)
    layout = unseal_layout(keyring, manifest, layout_data)
    size = sum(info.size_bytes for info in layout.packs)
    domain = store.open(name, create=True)
    pending = directory_of(domain, checkpoint_id)
    if checkpoint_id in domain.checkpoint_ids():
        domain.settle()  # whoever pulled it may have been killed before
        progress(size)
        return Moved(checkpoint_id, manifest.raw_bytes, size, 0)
    pending.mkdir(mode=0o700, exist_ok=True)
    with claimed(pending) as is_ours:
        if not is_ours:
            raise StoreError(f"checkpoint {checkpoint_id} is being stored by another process", hint="`ocihook wait`")
        with domain.shared():
            lacking = [info for info in layout.packs if not _has(domain, info)]
            moved = sum(info.size_bytes for info in lacking)
            progress(size - moved)
            _in_parallel(
                lacking, lambda info: _fetch(domain, remote, location, info, pending), store.patience, progress
            )
            adopt(domain, checkpoint_id, data, layout_data)
        discard_staged(pending, pins_of(checkpoint_id))
    return Moved(checkpoint_id, manifest.raw_bytes, size, moved)


def _has(domain: Domain, info: PackInfo) -> bool:
    path = domain.packs_dir / info.name
    if not path.exists():
        return False
    PackReader(PackFile(path), info, domain.keyring).close()  # else another pack has its name
    return True


def _fetch(domain: Domain, remote: Remote, location: str, info: PackInfo, pending: Path) -> Iterator[int]:
    path = pending / info.name
    done = path.stat().st_size if path.exists() else 0
    yield done
    if done < info.size_bytes:
        yield from remote.fetch_pack(pending.name, info, path)
    try:
        adopt_pack(domain, path, info)
    except IntegrityError as error:
        path.unlink()
        if not done:
            raise IntegrityError(f"{location} has sent something wrong: {error}", hint="pull again") from error
        # A power loss leaves of an interrupted attempt what it likes.
        yield -max(done, info.size_bytes)
        yield from _fetch(domain, remote, location, info, pending)


def _in_parallel(
    infos: Sequence[PackInfo],
    move: Callable[[PackInfo], Iterator[int]],
    patience: Patience,
    progress: Callable[[int], None],
) -> None:
    def worker(_number: int, tasks: Iterator[int]) -> Iterator[int]:
        for task in tasks:
            yield from move(infos[task])

    for size in run_forked(worker, tasks=len(infos), workers=TRANSFERS, patience=patience):
        progress(size)


def has_due_pushes(store: Store, now_s: float | None = None) -> bool:
    """Tell whether a checkpoint is to be pushed by policy now."""
    now_s = time.time() if now_s is None else now_s
    return any(waiting.is_due(now_s) for _, waiting in due(store))


def next_push_s(store: Store, now_s: float | None = None) -> float | None:
    """Return in how many seconds a push is to be tried again; None if none is, or all have failed for a day.

    An agent stays for it no longer than that: the daily prune pushes, too.
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
        at_once: try also what is to be tried later only.
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
                moved = push(domain, waiting.checkpoint_id, settings.remote)
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


def keep_in_use(store: Store, thin: Thin, *, is_pulled: bool) -> None:
    """Use a checkpoint for as long as this process lives, whether it is here already or is to be pulled."""
    is_new = thin.domain not in store.names()
    if is_pulled or not is_new:
        store.open(thin.domain, create=is_new).marks.begin_use(thin.checkpoint_id)


def is_here(store: Store, thin: Thin) -> bool:
    """Tell whether a store has a checkpoint, complete or on its way."""
    if thin.domain not in store.names():
        return False
    domain = store.open(thin.domain)
    return thin.checkpoint_id in domain.checkpoint_ids() or thin.checkpoint_id in pending_ids(domain)


def find_stored(settings: Settings, thin: Thin) -> tuple[StoredManifest, str]:
    """Return the manifest of a checkpoint that is in the store, or would be pulled from the remote; and where it is.

    Raises:
        StoreError: if it is in neither.
        RemoteError: if the remote cannot be reached.
    """
    store = Store.of(settings)
    if is_here(store, thin):
        if thin.checkpoint_id in pending_ids(store.open(thin.domain)):
            raise StoreError(f"checkpoint {thin.checkpoint_id} is still being stored", hint="`ocihook wait`")
        return store.open(thin.domain).read(thin.checkpoint_id), "this node's store"
    if settings.remote:
        data = open_remote(settings.remote, thin.domain).manifest(thin.checkpoint_id)
        if data is not None:
            return unseal_manifest(Keyring(store.keys, thin.domain), thin.checkpoint_id, data), settings.remote
    raise StoreError(
        f"checkpoint {thin.checkpoint_id} of domain {thin.domain} is neither in this node's store nor at its remote",
        hint="configure the remote that it was pushed to",
    )


# --- what people ask


@dataclass
class RemoteCheckpoints:
    """The complete checkpoints of a domain of a remote. Reads each manifest once."""

    location: str
    keyring: Keyring  # of the domain
    _known: dict[str, StoredManifest] = field(default_factory=dict)
    _packs: dict[str, list[str]] = field(default_factory=dict)

    @cached_property
    def _remote(self) -> Remote:
        return open_remote(self.location, self.keyring.domain)

    def all(self) -> list[StoredManifest]:
        """Return their manifests in the order in which they were made: of one node's by their sequence, else by clocks.

        Raises:
            RemoteError: if the remote cannot be reached.
            IntegrityError: if one is damaged.
        """
        found = {}
        for checkpoint_id in self._remote.checkpoint_ids():
            if checkpoint_id not in self._known:
                data = self._remote.manifest(checkpoint_id)
                if data is None:  # removed meanwhile
                    continue
                self._known[checkpoint_id] = unseal_manifest(self.keyring, checkpoint_id, data)
            found[checkpoint_id] = self._known[checkpoint_id]
        return in_order(found.values())

    def packs(self) -> set[str]:
        """Return the packs that they need.

        Raises:
            IntegrityError: if the layout of one is missing or damaged.
        """
        names: set[str] = set()
        for manifest in self.all():
            if manifest.id not in self._packs:
                data = self._remote.layout(manifest.id)
                if data is None:
                    raise IntegrityError(f"{self.location} has lost the layout of checkpoint {manifest.id}")
                self._packs[manifest.id] = [info.name for info in unseal_layout(self.keyring, manifest, data).packs]
            names.update(self._packs[manifest.id])
        return names


def in_order(manifests: Iterable[StoredManifest]) -> list[StoredManifest]:
    """Return checkpoints of several nodes in the order in which they were made.

    A node's clock may go backwards; then what it made later counts as made when the clock was last ahead.
    """
    made: dict[str, str] = {}
    latest: dict[int, str] = {}
    rows = sorted(manifests, key=lambda manifest: manifest.sequence)
    for manifest in rows:
        made[manifest.id] = latest[manifest.seed] = max(latest.get(manifest.seed, ""), manifest.created)
    return sorted(rows, key=lambda manifest: (made[manifest.id], manifest.sequence))


def prune_remote(
    location: str, keep: Keep, keys: KeySource = NO_KEYS, *, now_s: float | None = None, dry_run: bool = False
) -> list[Pruned]:
    """Remove checkpoints of a remote that nothing keeps, and packs that no checkpoint needs.

    Raises:
        RemoteError: if the remote cannot be reached.
        IntegrityError: if a checkpoint is damaged there; nothing of its domain is removed then.
    """
    return [
        _prune_domain(location, domain, keep, keys, now_s=now_s, dry_run=dry_run) for domain in remote_domains(location)
    ]


def _prune_domain(
    location: str, domain: str, keep: Keep, keys: KeySource, *, now_s: float | None = None, dry_run: bool = False
) -> Pruned:
    remote = open_remote(location, domain)
    checkpoints = RemoteCheckpoints(location, Keyring(keys, domain))
    checkpoints.packs()
    removed = choose(checkpoints.all(), keep, time.time() if now_s is None else now_s)
    freed = 0
    if not dry_run:
        remote.remove(removed)
        freed = remote.remove_rubbish(checkpoints.packs)
    return Pruned(f"{location}, domain {domain}", tuple(removed), freed)


def prune_remote_by_policy(settings: Settings) -> list[Pruned]:
    """Prune the remote as the node's configuration wants, if no node has done so within the last hours.

    Raises:
        RemoteError: if the remote cannot be reached.
        IntegrityError: if a checkpoint is damaged there.
    """
    keep = Keep.of_remote(settings)
    if not any(keep):
        return []
    done = []
    for name in remote_domains(settings.remote):
        with open_remote(settings.remote, name).pruning(REMOTE_PRUNED_EVERY_S) as is_ours:
            if is_ours:
                done.append(_prune_domain(settings.remote, name, keep, KeySource.of(settings)))
    for pruned in done:
        for checkpoint_id in pruned.removed:
            log.info("removed %s of %s, by the retention configured", checkpoint_id, pruned.where)
    return done


def list_remote(location: str, keys: KeySource = NO_KEYS) -> list[Listed]:
    """Return all complete checkpoints of a remote.

    Raises:
        RemoteError: if the remote cannot be reached.
        IntegrityError: if one is damaged.
    """
    return [
        Listed(name, m.id, "complete", str(m.container), m.created, m.raw_bytes, m.added_bytes, m.raw_bytes)
        for name in remote_domains(location)
        for m in RemoteCheckpoints(location, Keyring(keys, name)).all()
    ]


def find_remote(location: str, checkpoint_id: str) -> str:
    """Return the domain of a checkpoint of a remote.

    Raises:
        RemoteError: if it has no such checkpoint.
    """
    for name in remote_domains(location):
        if open_remote(location, name).manifest(checkpoint_id) is not None:
            return name
    raise RemoteError(f"{location} has no checkpoint {checkpoint_id}")


def due(store: Store) -> list[tuple[str, Push]]:
    """Return domain and state of what is to be pushed by policy, at some time."""
    return [(domain.name, waiting) for domain in store.domains() for waiting in domain.due_pushes()]


def pack_bytes(domain: Domain, checkpoint_id: str) -> int:
    """Return the bytes of all packs of a checkpoint."""
    return sum(info.size_bytes for info in domain.layout(domain.read(checkpoint_id)).packs)


def remote_bytes(location: str, keyring: Keyring, checkpoint_id: str) -> int:
    """Return the same of one that is at a remote; 0 if there is none."""
    remote = open_remote(location, keyring.domain)
    data, layout = remote.manifest(checkpoint_id), remote.layout(checkpoint_id)
    if data is None or layout is None:
        return 0
    manifest = unseal_manifest(keyring, checkpoint_id, data)
    return sum(info.size_bytes for info in unseal_layout(keyring, manifest, layout).packs)
