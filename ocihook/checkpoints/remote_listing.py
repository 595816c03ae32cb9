"""Lists the checkpoints of a remote, and prunes it as the store is pruned."""

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

from ocihook.checkpoints.epochs import Epochs, find_epoch
from ocihook.checkpoints.listing import Listed
from ocihook.checkpoints.prune import Keep, Pruned, choose
from ocihook.config import Settings
from ocihook.errors import IntegrityError, RemoteError
from ocihook.packs.cipher import NO_KEYS, Keyring, KeySource
from ocihook.remote.location import open_remote, remote_domains
from ocihook.remote.remote import Remote
from ocihook.store.lineage import lineage, owner_name
from ocihook.store.records import largest_layout, unseal_layout, unseal_manifest
from ocihook.store.stored_manifest import StoredManifest

log = logging.getLogger(__name__)

REMOTE_PRUNED_EVERY_S = 6 * 3600.0  # by whichever node comes first


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
        """Return their manifests in the order in which they were made: those of one node by sequence, others by clocks.

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
                data = self._remote.layout(manifest.id, largest_layout(manifest))
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
    removed = choose(checkpoints.all(), keep, time.time() if now_s is None else now_s, of_all_nodes=True)
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
    rows = []
    for name in remote_domains(location):
        manifests = RemoteCheckpoints(location, Keyring(keys, name)).all()
        epochs = Epochs(m.container for m in manifests)
        rows += [
            Listed(
                *(name, m.id, "complete", str(m.container), m.created, m.raw_bytes, m.added_bytes, m.raw_bytes),
                gang=m.container.gang,
                gang_missing=epochs.missing(m.container),
                member=lineage(m.container),
                owner=owner_name(m.container),
                owner_uid=m.container.owner_uid,
            )
            for m in manifests
        ]
    return rows


def find_remote(location: str, checkpoint_id: str) -> str:
    """Return the domain of a checkpoint of a remote.

    Raises:
        RemoteError: if it has no such checkpoint.
    """
    for name in remote_domains(location):
        if open_remote(location, name).manifest(checkpoint_id) is not None:
            return name
    raise RemoteError(f"{location} has no checkpoint {checkpoint_id}")


def find_remote_gang(location: str, keys: KeySource, name: str, domain: str | None = None) -> tuple[str, list[str]]:
    """Return domain and checkpoints of a dump of a gang, GANG/EPOCH, all of whose members are at a remote.

    Args:
        location: of the remote.
        keys: of its domains.
        name: of the dump.
        domain: where it is; None: it is looked for.

    Raises:
        StoreError: if nothing of it is there, or two dumps are called so.
        RemoteError: if the remote cannot be reached, or members are missing there.
        IntegrityError: if one is damaged.
    """
    manifests = {
        each: RemoteCheckpoints(location, Keyring(keys, each)).all()
        for each in remote_domains(location)
        if domain in (None, each)
    }
    known = [(each, m.id, m.container) for each, found in manifests.items() for m in found]
    found, ids = find_epoch(name, location, known)
    epochs = Epochs(m.container for m in manifests[found])
    (missing,) = {epochs.missing(m.container) for m in manifests[found] if m.id in ids}
    if missing:
        raise RemoteError(
            f"{location} lacks {missing} of the members of {name}", hint="each node pushes those that it has dumped"
        )
    return found, ids


def remote_bytes(location: str, keyring: Keyring, checkpoint_id: str) -> int:
    """Return the bytes of all packs of a checkpoint at a remote; 0 if it is not there."""
    remote = open_remote(location, keyring.domain)
    data = remote.manifest(checkpoint_id)
    if data is None:
        return 0
    manifest = unseal_manifest(keyring, checkpoint_id, data)
    layout = remote.layout(checkpoint_id, largest_layout(manifest))
    if layout is None:
        return 0
    return sum(info.size_bytes for info in unseal_layout(keyring, manifest, layout).packs)
