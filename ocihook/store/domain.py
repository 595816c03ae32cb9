"""One domain of a store: checkpoints that share their pages, their chain, and the order in which files are written.

Packs first, then the index, then a checkpoint's page ids and layout, then its manifest, which is the commit: what no
manifest leads to is rubbish, and the next prune removes it. A process that adds holds the lock shared; one that removes
holds it alone, for short steps: so no page is found in a pack that is being removed. A reader of one checkpoint marks
it as used, and never waits. Crash table: docs/formats.md.
"""

import calendar
import contextlib
import dataclasses
import fcntl
import hashlib
import mmap
import os
import secrets
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from functools import cached_property, partial
from pathlib import Path

from ocihook.errors import IntegrityError, StoreError
from ocihook.linux.files import make_directory, replace_file, sync_directory, sync_file, try_lock
from ocihook.linux.patience import ENDLESS, Patience
from ocihook.linux.workers import at_normal_priority
from ocihook.packs.cipher import NO_KEYS, Keyring, KeySource, is_sealed, key_id_of, opened, seal
from ocihook.packs.domain_names import check_domain_name
from ocihook.packs.frame import read_record
from ocihook.packs.pack import PAGE_BYTES
from ocihook.store.deduplicate import Before, Earlier
from ocihook.store.extents import Layout, encode_layout
from ocihook.store.index import merge_index
from ocihook.store.marks import Marks
from ocihook.store.pack_directory import PackDirectory, pack_number
from ocihook.store.page_ids import ID_BYTES, PageIds
from ocihook.store.pushes import Push, Pushes
from ocihook.store.records import (
    MAX_LAYOUT_BYTES,
    Entry,
    Identity,
    Pulled,
    decode_entry,
    decode_identity,
    decode_pulled,
    encode_entry,
    encode_pulled,
    entry_of,
    unseal_layout,
    unseal_manifest,
    write_identity,
)
from ocihook.store.stored_manifest import CHECKPOINT_ID, StoredManifest, decode_stored, encode_stored

_TIME = "%Y-%m-%dT%H:%M:%SZ"  # RFC 3339, UTC
LOCK_TIMEOUT_S = 3600.0
_POLL_S = 0.1
_MAX_RECORD_BYTES = 64 << 20


class Domain:
    """A directory with packs, index and checkpoints."""

    def __init__(self, directory: Path, name: str, keyring: Keyring, record: bytes, patience: Patience) -> None:
        self.directory, self.name, self.keyring = directory, name, keyring
        self._record = record
        self.is_encrypted = is_sealed(record)
        self.packs_dir = directory / "packs"
        self.packs = PackDirectory(self.packs_dir, keyring, self.is_encrypted, self._must_be_encrypted)
        self.checkpoints_dir = directory / "checkpoints"
        self.pending_dir = directory / "pending"
        self.index_dir = directory / "index"
        self.pushes_dir = directory / "pushes"
        self.pushes = Pushes(self.pushes_dir)
        self.marks = Marks(self.checkpoints_dir, patience)
        self.patience = patience  # limits all waiting for locks

    @classmethod
    def open(
        cls, root: Path, name: str, keys: KeySource = NO_KEYS, patience: Patience = ENDLESS, *, create: bool = False
    ) -> "Domain":
        """Open a domain of the store in `root`; keys are asked for when something is to be read or written.

        Args:
            root: the store.
            name: of the domain.
            keys: where its keys come from; with any source, a new domain is encrypted.
            patience: how long to wait for other processes.
            create: make it if it is not there.

        Raises:
            StoreError: if there is none, or it cannot be made.
            KeyMissing: if it is to be made, and there is no key.
        """
        directory = root / "domains" / check_domain_name(name)
        record = directory / "domain"
        keyring = Keyring(keys, name)
        if create:
            if not record.exists():
                _make(directory, keyring, patience, within=root.parent)
            sync_directory(directory)  # the process that wrote the record may have been killed before it did
        data = read_record(record, _MAX_RECORD_BYTES, "domain")
        if data is None:
            raise StoreError(f"{root} has no domain {name!r}")
        domain = cls(directory, name, keyring, data, patience)
        if create and keyring.is_configured and not domain.is_encrypted:
            raise StoreError(
                f"domain {name} is not encrypted, and keys are configured", hint="`ocihook store rekey` encrypts it"
            )
        return domain

    @cached_property
    def _identity(self) -> Identity:
        return decode_identity(self.keyring, self._record)

    @cached_property
    def page_ids(self) -> PageIds:
        """What makes the ids of its pages.

        Raises:
            IntegrityError: if the domain's record is damaged.
            KeyMissing: if it is encrypted, and there is no key.
        """
        return PageIds(self._identity.seed, self._identity.ids_key)

    def _must_be_encrypted(self) -> bool:
        """Return whether only encrypted data may be read; called when some is not encrypted."""
        return self.is_encrypted and not self._identity.is_converting

    @property
    def seed(self) -> int:
        """The seed of the ids of its pages."""
        return self.page_ids.seed

    def _sealed(self, name: str, data: bytes) -> bytes:
        return seal(self.keyring, name, data) if self.is_encrypted else data

    def manifest_of(self, checkpoint_id: str, data: bytes) -> StoredManifest:
        """Read a manifest of the domain as it is written."""
        return unseal_manifest(self.keyring, checkpoint_id, data, must_be_encrypted=self._must_be_encrypted)

    def layout_of(self, manifest: StoredManifest, data: bytes) -> Layout:
        """Read a layout of the domain as it is written."""
        return unseal_layout(self.keyring, manifest, data, must_be_encrypted=self._must_be_encrypted)

    # --- locks

    def _locked(self, name: str, how: int, timeout_s: float = LOCK_TIMEOUT_S) -> AbstractContextManager[None]:
        return _locked(self.directory / name, how, self.patience.within(timeout_s))

    @contextlib.contextmanager
    def shared(self, *, in_turn: bool = False) -> Iterator[None]:
        """Keep out processes that remove; `in_turn`, for what is not urgent: after those that wait for `alone`."""
        if in_turn:
            with self._locked("turn.lock", fcntl.LOCK_SH):
                pass
        with self._locked("lock", fcntl.LOCK_SH):
            yield

    @contextlib.contextmanager
    def alone(self, timeout_s: float = LOCK_TIMEOUT_S) -> Iterator[None]:
        """Keep out processes that add; at normal priority, so that they wait as briefly as possible.

        Raises:
            StoreError: if checkpoints are still being written or read after so long.
        """
        with (
            self._locked("turn.lock", fcntl.LOCK_EX, timeout_s),
            self._locked("lock", fcntl.LOCK_EX, timeout_s),
            at_normal_priority(),
        ):
            yield

    @contextlib.contextmanager
    def upkeep(self, timeout_s: float = LOCK_TIMEOUT_S) -> Iterator[None]:
        """Be the only process that removes or moves data, in steps that hold the lock alone and steps between them.

        Raises:
            StoreError: if another process still does so after so long.
        """
        with self._locked("upkeep.lock", fcntl.LOCK_EX, timeout_s):
            yield

    @contextlib.contextmanager
    def using(self, checkpoint_id: str) -> Iterator[None]:
        """Keep a checkpoint, its layout and its packs as they are.

        Raises:
            StoreError: if there is no such checkpoint.
        """
        fd = self.marks.begin_use(checkpoint_id)
        try:
            if not self._manifest_path(checkpoint_id).exists():
                raise self._no_checkpoint(checkpoint_id)
            yield
        finally:
            os.close(fd)

    def is_held(self, checkpoint_id: str) -> bool:
        """Return whether a checkpoint is pinned or in use: then nothing removes it."""
        return self.marks.is_pinned(checkpoint_id) or self.marks.is_used(checkpoint_id)

    # --- reading

    def checkpoint_ids(self) -> list[str]:
        """Return the ids of all complete checkpoints."""
        names = (path.name.removesuffix(".manifest") for path in self.checkpoints_dir.glob("*.manifest"))
        return sorted(name for name in names if CHECKPOINT_ID.fullmatch(name))

    def read(self, checkpoint_id: str) -> StoredManifest:
        """Return a checkpoint's manifest.

        Raises:
            StoreError: if there is no such checkpoint.
            IntegrityError: if it is damaged.
        """
        return self.manifest_of(checkpoint_id, self.manifest_bytes(checkpoint_id))

    def manifest_bytes(self, checkpoint_id: str) -> bytes:
        """Return a checkpoint's manifest as it is written.

        Raises:
            StoreError: if there is no such checkpoint.
        """
        data = read_record(self._manifest_path(checkpoint_id), _MAX_RECORD_BYTES, f"manifest of {checkpoint_id}")
        if data is None:
            raise self._no_checkpoint(checkpoint_id)
        return data

    def _no_checkpoint(self, checkpoint_id: str) -> StoreError:
        return StoreError(f"there is no checkpoint {checkpoint_id} in domain {self.name}")

    def checkpoints(self) -> list[StoredManifest]:
        """Return all complete checkpoints, the oldest first.

        Raises:
            IntegrityError: if one is damaged.
        """
        return self.in_order(self.read_all(self.checkpoint_ids()))

    def read_all(self, checkpoint_ids: Iterable[str]) -> Iterator[StoredManifest]:
        """Yield the manifests of those that are there; some may be removed meanwhile.

        Raises:
            IntegrityError: if one is damaged.
        """
        for checkpoint_id in checkpoint_ids:
            try:
                yield self.read(checkpoint_id)
            except StoreError:
                if self._manifest_path(checkpoint_id).exists():
                    raise

    def in_order(self, manifests: Iterable[StoredManifest]) -> list[StoredManifest]:
        """Return manifests of the domain, the oldest first."""
        return sorted(manifests, key=self._order)

    def _order(self, manifest: StoredManifest) -> tuple[int, int, str, int]:
        pulled = self._pulled(manifest.id)
        return (pulled.after, 1, manifest.created, manifest.sequence) if pulled else (manifest.sequence, 0, "", 0)

    def _pulled(self, checkpoint_id: str) -> Pulled | None:
        data = read_record(self._pulled_path(checkpoint_id), _MAX_RECORD_BYTES, f"record of {checkpoint_id}")
        return decode_pulled(data) if data else None

    def _page_ids_digest(self, manifest: StoredManifest) -> str:
        """Return what the digest of the page ids that are here must be."""
        pulled = self._pulled(manifest.id)
        return pulled.page_ids_digest if pulled else manifest.page_ids_digest

    def layout(self, manifest: StoredManifest) -> Layout:
        """Return where a checkpoint's pages are.

        Raises:
            IntegrityError: if that is missing or damaged.
        """
        return self.layout_of(manifest, self.layout_bytes(manifest.id))

    def layout_bytes(self, checkpoint_id: str) -> bytes:
        """Return a checkpoint's layout as it is written.

        Raises:
            IntegrityError: if it is missing.
        """
        data = read_record(self._layout_path(checkpoint_id), MAX_LAYOUT_BYTES, f"layout of {checkpoint_id}")
        if data is None:
            raise IntegrityError(f"the layout of checkpoint {checkpoint_id} is missing")
        return data

    def before(self, manifest: StoredManifest) -> Earlier | None:
        """Return what a later checkpoint is compared with; None if the page ids are gone.

        Raises:
            IntegrityError: if its layout or a pack is damaged.
        """
        path = self._ids_path(manifest.id)
        size = manifest.raw_bytes // PAGE_BYTES * ID_BYTES
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            if size == 0 or os.fstat(fd).st_size != size:
                return None
            ids = mmap.mmap(fd, size, prot=mmap.PROT_READ)
        finally:
            os.close(fd)
        layout = self.layout(manifest)
        for info in layout.packs:
            self.packs.open(info.name, info).close()
        packs = [pack_number(info.name) for info in layout.packs]
        images, first = {}, 0
        for name, extents in layout.images.items():
            images[name] = Before(ids, first, extents, packs)
            first += extents.pages
        return Earlier(images, lambda: self._check_ids(manifest, self.page_ids.digest_of(ids)))

    def verify_ids(self, manifest: StoredManifest) -> None:
        """Check a checkpoint's page ids, if they are there.

        Raises:
            IntegrityError: if they are damaged.
        """
        path = self._ids_path(manifest.id)
        if path.exists():
            self._check_ids(manifest, self.page_ids.digest_of_file(path))

    def _check_ids(self, manifest: StoredManifest, digest: str) -> None:
        if digest != self._page_ids_digest(manifest):
            raise IntegrityError(f"the page ids of checkpoint {manifest.id} are damaged")

    def is_pulled(self, checkpoint_id: str) -> bool:
        """Return whether a checkpoint came from elsewhere: then it is in no chain here."""
        return self._pulled_path(checkpoint_id).exists()

    def _manifest_path(self, checkpoint_id: str) -> Path:
        return self.checkpoints_dir / f"{checkpoint_id}.manifest"

    def _layout_path(self, checkpoint_id: str) -> Path:
        return self.checkpoints_dir / f"{checkpoint_id}.layout"

    def _ids_path(self, checkpoint_id: str) -> Path:
        return self.checkpoints_dir / f"{checkpoint_id}.ids"

    def _pulled_path(self, checkpoint_id: str) -> Path:
        return self.checkpoints_dir / f"{checkpoint_id}.pulled"

    # --- adding

    def new_ids_path(self, checkpoint_id: str) -> Path:
        """Return where the page ids of a checkpoint are written before it is committed."""
        return self.checkpoints_dir / f"{checkpoint_id}.ids.partial"

    def commit(
        self,
        manifest: StoredManifest,
        layout: Layout,
        ids: Path,
        *,
        replaced: str | None = None,
    ) -> None:
        """Make a checkpoint part of the domain; call it with the lock shared, and `merge_index` later.

        Args:
            manifest: `sequence` and `previous` are set here.
            layout: of its images.
            ids: file with its page ids, at `new_ids_path`; moved away.
            replaced: the checkpoint whose page ids are no longer needed.

        Raises:
            OSError: from the file system, a full one included.
        """
        self._put_parts(manifest.id, self._sealed(f"layout {manifest.id}", encode_layout(layout)), ids)
        with self._locked("chain.lock", fcntl.LOCK_EX):
            head = self._head()
            linked = dataclasses.replace(
                manifest, sequence=head.sequence + 1 if head else 0, previous=head.link if head else None
            )
            record = encode_stored(linked)
            data = self._sealed(f"manifest {manifest.id}", record)
            replace_file(self.checkpoints_dir / f"{manifest.id}.manifest", data, mode=0o600)
            self._write_head(entry_of(linked, record))
        if replaced is not None:  # later checkpoints are compared with the newest only
            self._ids_path(replaced).unlink(missing_ok=True)

    def merge_index(self) -> None:
        """Merge what new packs have brought to the index, if that is much: the work of one process, for seconds.

        Raises:
            OSError: from the file system, a full one included.
            StoreError: if the index is damaged.
        """
        with self.shared():
            merge_index(self.index_dir)

    def settle(self) -> None:
        """Return when no power loss can undo that checkpoints were completed or removed, by any process."""
        sync_directory(self.checkpoints_dir)

    def put_pulled(self, checkpoint_id: str, data: bytes, layout: bytes, ids: Path) -> None:
        """Make a checkpoint that came from elsewhere part of the domain; call it with the lock shared.

        Args:
            checkpoint_id: which.
            data: its manifest, as it is elsewhere.
            layout: likewise.
            ids: file with its page ids as they are here, at `new_ids_path`; moved away.

        Raises:
            OSError: from the file system, a full one included.
        """
        self._put_parts(checkpoint_id, layout, ids)
        with self._locked("chain.lock", fcntl.LOCK_EX):
            head = self._head()
            digest = self.page_ids.digest_of_file(self._ids_path(checkpoint_id))
            pulled = encode_pulled(Pulled(head.sequence if head else -1, digest))
            replace_file(self._pulled_path(checkpoint_id), pulled, mode=0o600)
            replace_file(self.checkpoints_dir / f"{checkpoint_id}.manifest", data, mode=0o600)
        merge_index(self.index_dir)

    # --- keys

    def begin_rekey(self) -> "Domain":
        """Encrypt the domain's record with the newest key; return the domain as it is then; with the lock alone.

        If it was not encrypted, its pages get new ids: the old ones are gone, with the index.

        Raises:
            KeyMissing: if there is no key.
        """
        identity = self._identity
        if identity.ids_key is None:
            for path in [*self.index_dir.iterdir(), *self.checkpoints_dir.glob("*.ids")]:
                path.unlink()
            sync_directory(self.index_dir)
            sync_directory(self.checkpoints_dir)
            identity = Identity(identity.seed, secrets.token_bytes(16), is_converting=True)
        return self._with(identity)

    def end_rekey(self) -> "Domain":
        """Encrypt all records that the newest key does not encrypt yet; then everything in the domain is encrypted.

        Raises:
            KeyMissing: if there is no key.
            IntegrityError: if one is damaged.
        """
        for checkpoint_id in self.checkpoint_ids():
            for kind in ("layout", "manifest"):
                path = self.checkpoints_dir / f"{checkpoint_id}.{kind}"
                data = self.layout_bytes(checkpoint_id) if kind == "layout" else self.manifest_bytes(checkpoint_id)
                if key_id_of(data) != self.keyring.newest.id:
                    name = f"{kind} {checkpoint_id}"
                    replace_file(path, self._sealed(name, self._opened(name, data)), mode=0o600)
        return self._with(self._identity._replace(is_converting=False))

    def _with(self, identity: Identity) -> "Domain":
        record = self.directory / "domain"
        write_identity(record, self.keyring, identity)
        return Domain(self.directory, self.name, self.keyring, record.read_bytes(), self.patience)

    # --- layouts

    def replace_layout(self, manifest: StoredManifest, layout: Layout) -> bool:
        """Record durably where a checkpoint's pages are now; False if it is in use, and stays as it is.

        New packs must be on stable storage by name; call it in `upkeep`.
        """
        data = self._sealed(f"layout {manifest.id}", encode_layout(layout))
        prepared = self.checkpoints_dir / f"{manifest.id}.moved.partial"
        replace_file(prepared, data, mode=0o600)
        with self.marks.unless_used(manifest.id) as is_free:
            if is_free:
                prepared.replace(self._layout_path(manifest.id))
        if not is_free:
            prepared.unlink()
        sync_directory(self.checkpoints_dir)
        return is_free

    def _put_parts(self, checkpoint_id: str, layout: bytes, ids: Path) -> None:
        """Move all that a manifest needs into place, on stable storage."""
        sync_directory(self.packs_dir)  # some may be of a pull that was killed before it had
        sync_file(ids)
        ids.replace(self._ids_path(checkpoint_id))
        replace_file(self._layout_path(checkpoint_id), layout, mode=0o600)

    # --- what is asked for

    def due_pushes(self) -> list[Push]:
        """Return the complete checkpoints that are to be pushed, the oldest first."""
        complete = set(self.checkpoint_ids()) - self.marks.left()
        return [push for push in self.pushes.all() if push.checkpoint_id in complete]

    def note_chosen(self, member: str, created: str) -> None:
        """Record when the newest checkpoint of a member was made, by a clock that may be another node's.

        Args:
            member: its lineage; it is created on this node, and resumes from that one if it can.
            created: RFC 3339, UTC.
        """
        path = self._chosen(member)
        make_directory(path.parent, within=self.directory)
        replace_file(path, created.encode(), mode=0o600, durable=False)

    def created_now(self, member: str) -> str:
        """Return when a checkpoint that is made now counts as made: after the one that its member found here."""
        now = time.strftime(_TIME, time.gmtime())
        try:
            earlier_s = calendar.timegm(time.strptime(self._chosen(member).read_text(), _TIME))
            return max(now, time.strftime(_TIME, time.gmtime(earlier_s + 1)))
        except (OSError, ValueError):  # it has found none
            return now

    def _chosen(self, member: str) -> Path:
        return self.directory / "chosen" / hashlib.blake2b(member.encode(), digest_size=16).hexdigest()

    def pin(self, checkpoint_id: str) -> None:
        """Protect a checkpoint from every prune.

        Raises:
            StoreError: if there is no such checkpoint.
        """
        with self.using(checkpoint_id):
            self.marks.pin(checkpoint_id)

    # --- the chain

    def recorded_head(self) -> Entry | None:
        """Return the newest link as it was recorded; one may have been committed since."""
        return decode_entry(read_record(self.directory / "head", _MAX_RECORD_BYTES, "head"), "head")

    def removed_entry(self, path: Path) -> Entry | None:
        """Return a link of a checkpoint that a prune has removed, None if the record is gone."""
        return decode_entry(read_record(path, _MAX_RECORD_BYTES, path.name), "removed")

    def rewrite_head(self) -> None:
        """Record the newest link."""
        head = self._head()
        if head is not None:
            self._write_head(head)

    def _head(self) -> Entry | None:
        """Return the newest link: the one recorded, or a later one that was committed but not recorded."""
        newest = self.recorded_head()
        for entry in self.entries().values():
            if newest is None or entry.sequence > newest.sequence:
                newest = entry
        return newest

    def _write_head(self, entry: Entry) -> None:
        replace_file(self.directory / "head", encode_entry(entry, "head"), mode=0o600)

    def entries(self) -> dict[str, Entry]:
        """Return the chain's links by id: of checkpoints made here, and of those that a prune has removed."""
        entries = {}
        for path in sorted(self.checkpoints_dir.glob("*.removed")):
            entry = self.removed_entry(path)
            if entry is not None:
                entries[entry.link.id] = entry
        for checkpoint_id in self.checkpoint_ids():
            if not self.is_pulled(checkpoint_id):
                entries[checkpoint_id] = self.entry(checkpoint_id)
        return entries

    def entry(self, checkpoint_id: str) -> Entry:
        """Return the link of a checkpoint that is there."""
        data = self._opened(f"manifest {checkpoint_id}", self.manifest_bytes(checkpoint_id))
        return entry_of(decode_stored(data), data)

    def _opened(self, name: str, data: bytes) -> bytes:
        return opened(self.keyring, name, data, must_be_sealed=self._must_be_encrypted)

    # --- removing

    def remove(self, checkpoint_ids: Iterable[str]) -> list[str]:
        """Remove checkpoints, leaving a record of each for the chain; call it with the lock alone.

        Those that are held stay; the others are returned.

        Raises:
            StoreError: if there is no such checkpoint.
        """
        removed = []
        for checkpoint_id in checkpoint_ids:
            if self.is_held(checkpoint_id):
                continue
            if not self.is_pulled(checkpoint_id):
                record = self.checkpoints_dir / f"{checkpoint_id}.removed"
                replace_file(record, encode_entry(self.entry(checkpoint_id), "removed"), mode=0o600)
            with self.marks.unless_used(checkpoint_id) as is_free:
                if is_free and not self.marks.is_pinned(checkpoint_id):
                    self._manifest_path(checkpoint_id).unlink(missing_ok=True)
                    self.marks.forget(checkpoint_id)
                    removed.append(checkpoint_id)
        sync_directory(self.checkpoints_dir)
        return removed

    def pack_bytes(self) -> int:
        """Return the bytes that all packs take."""
        return sum(path.stat().st_size for path in self.packs_dir.glob("*.pack"))

    def own_bytes(self, checkpoint_id: str) -> int:
        """Return the bytes that a checkpoint takes beside its packs."""
        paths = (self.checkpoints_dir / f"{checkpoint_id}.{kind}" for kind in ("manifest", "layout", "ids", "pulled"))
        return sum(path.stat().st_size for path in paths if path.exists())

    def stored_bytes(self) -> int:
        """Return the bytes that all complete checkpoints take, with the index and what nothing needs any more."""
        total = 0
        for directory in (self.packs_dir, self.checkpoints_dir, self.index_dir):
            for path in directory.iterdir():
                with contextlib.suppress(FileNotFoundError):  # merged, or replaced
                    total += path.stat().st_size
        return total


def _make(directory: Path, keyring: Keyring, patience: Patience, *, within: Path) -> None:
    """Make a domain, all of it on stable storage; of several processes that do so at once, the first makes it."""
    make_directory(directory, within=within)
    with _locked(directory / "chain.lock", fcntl.LOCK_EX, patience.within(LOCK_TIMEOUT_S)):
        if not (directory / "domain").exists():
            for part in ("packs", "index", "checkpoints", "pending", "pushes"):
                (directory / part).mkdir(mode=0o700, exist_ok=True)
            sync_directory(directory)
            ids_key = secrets.token_bytes(16) if keyring.is_configured else None
            identity = Identity(secrets.randbits(64), ids_key, is_converting=False)
            write_identity(directory / "domain", keyring, identity)


@contextlib.contextmanager
def _locked(path: Path, how: int, patience: Patience) -> Iterator[None]:
    """Hold a lock of the domain whose directory it is in."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        if not patience.until(partial(try_lock, fd, how), poll_s=_POLL_S):
            raise StoreError(f"domain {path.parent.name} is in use by another process")
        yield
    finally:
        os.close(fd)


def new_checkpoint_id() -> str:
    """Return an id that no other checkpoint has."""
    return f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{secrets.token_hex(4)}"
