"""Pulls checkpoints from a remote, by hand and for a restore. Packs that are here already are not transferred."""

from collections.abc import Iterator
from pathlib import Path

from ocihook.checkpoints.listing import check_complete
from ocihook.checkpoints.pending import claimed, directory_of, is_here
from ocihook.checkpoints.stage import discard_staged, pins_of
from ocihook.checkpoints.transfer import Moved, in_parallel
from ocihook.config import Settings
from ocihook.errors import IntegrityError, RemoteError, StoreError
from ocihook.packs.cipher import Keyring
from ocihook.packs.pack import PackFile, PackInfo, PackReader
from ocihook.packs.pages import Progress, no_progress
from ocihook.remote.location import open_remote
from ocihook.remote.remote import Remote
from ocihook.store.adopt import adopt, adopt_pack
from ocihook.store.domain import Domain
from ocihook.store.records import largest_layout, unseal_layout, unseal_manifest
from ocihook.store.store import Store
from ocihook.store.stored_manifest import StoredManifest
from ocihook.store.thin import Thin


def pull(store: Store, name: str, checkpoint_id: str, location: str, *, progress: Progress = no_progress) -> Moved:
    """Fetch a checkpoint into the store, and verify all of it. What an interrupted attempt has brought is kept an hour.

    Args:
        store: where to put it; its patience limits the wait for workers and locks. Requests to a remote may be retried
            many times: a caller that cannot wait for that calls this in a process of its own.
        name: the domain, there and here.
        checkpoint_id: which.
        location: of the remote.
        progress: gets the bytes of packs that are done.

    Raises:
        RemoteError: if the remote cannot be reached, or has no such checkpoint.
        IntegrityError: if what was received is damaged; the store does not have it then.
        StoreError: if another process is pulling it.
        OSError: from the file system, a full one included.
    """
    remote, keyring = open_remote(location, name), Keyring(store.keys, name)
    data = remote.manifest(checkpoint_id)
    manifest = unseal_manifest(keyring, checkpoint_id, data) if data is not None else None
    layout_data = remote.layout(checkpoint_id, largest_layout(manifest)) if manifest is not None else None
    if data is None or manifest is None or layout_data is None:
        raise RemoteError(f"{location} has no checkpoint {checkpoint_id} in domain {name}")
    layout = unseal_layout(keyring, manifest, layout_data)
    size = sum(info.size_bytes for info in layout.packs)
    domain = store.open(name, create=True)
    pending = directory_of(domain, checkpoint_id)
    if checkpoint_id in domain.checkpoint_ids():
        domain.settle()  # the process that pulled it may have been killed before it did
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
            in_parallel(lacking, lambda info: _fetch(domain, remote, location, info, pending), store.patience, progress)
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
        # After a power loss, anything may be left of an interrupted attempt.
        yield -max(done, info.size_bytes)
        yield from _fetch(domain, remote, location, info, pending)


def find_stored(settings: Settings, thin: Thin) -> tuple[StoredManifest, str]:
    """Return the manifest of a checkpoint that is in the store, or would be pulled from the remote; and where it is.

    Raises:
        StoreError: if it is in neither, or not complete here.
        RemoteError: if the remote cannot be reached.
    """
    store = Store.of(settings)
    if is_here(store, thin):
        domain = store.open(thin.domain)
        check_complete(domain, thin.checkpoint_id)
        return domain.read(thin.checkpoint_id), "this node's store"
    if settings.remote:
        data = open_remote(settings.remote, thin.domain).manifest(thin.checkpoint_id)
        if data is not None:
            return unseal_manifest(Keyring(store.keys, thin.domain), thin.checkpoint_id, data), settings.remote
    raise StoreError(
        f"checkpoint {thin.checkpoint_id} of domain {thin.domain} is neither in this node's store nor at its remote",
        hint="configure the remote that it was pushed to",
    )
