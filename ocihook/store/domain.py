"""One domain of a store: checkpoints that share their pages, their chain, and the order in which all is written.

Packs first, then the index, then a checkpoint's page ids and layout, then its manifest, which is the commit: what no
manifest leads to is rubbish, and the next prune removes it. Whoever adds or reads holds the lock shared, whoever
removes holds it alone; so nobody finds a page in a pack that is being removed. Crash table: README.md.
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import mmap
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import BinaryIO, NamedTuple

from ocihook.errors import IntegrityError, OcihookError, StoreError
from ocihook.linux.files import replace_file, sync_directory
from ocihook.model import ContainerRef
from ocihook.store.assemble import read_image
from ocihook.store.cipher import NO_KEYS, Keyring, KeySource, is_sealed, key_id_of, opened, seal, unseal
from ocihook.store.deduplicate import Before
from ocihook.store.extents import ZERO, Layout, decode_layout, encode_layout
from ocihook.store.frame import as_name, as_number, decode_frame, encode_frame, load_json, read_record
from ocihook.store.identity import ID_BYTES, PageIds
from ocihook.store.index import KEY_BYTES, add_to_index, merge_index
from ocihook.store.pack import PAGE_BYTES, PackInfo
from ocihook.store.packing import Progress, no_progress
from ocihook.store.places import PackDirectory, StoredPack, pack_number
from ocihook.store.stored import CHECKPOINT_ID, Link, StoredManifest, decode_stored, digest, encode_stored

LOCK_TIMEOUT_S = 3600.0
_POLL_S = 0.1
_MAX_RECORD_BYTES = 64 << 20
_MAX_LAYOUT_BYTES = 4 << 30
_DIGEST = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"_node|[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")  # what is in no pod; or a namespace: RFC 1123 label


class Entry(NamedTuple):
    """A link of the chain: a checkpoint that is there, or was and has been removed by a prune."""

    link: Link
    sequence: int
    previous: Link | None


class Pulled(NamedTuple):
    """What is recorded of a checkpoint that came from elsewhere: it is in no chain here."""

    after: int  # sequence of the newest checkpoint made here by then, -1 without one: its place among them
    page_ids_digest: str  # of its page ids by the seed of this domain


class Usage(NamedTuple):
    """What a domain takes."""

    checkpoints: int
    raw_bytes: int
    stored_bytes: int
    index_bytes: int
    rubbish_bytes: int


class Domain:
    """A directory with packs, index and checkpoints."""

    def __init__(self, directory: Path, name: str, keyring: Keyring, record: bytes) -> None:
        self.directory, self.name, self.keyring = directory, name, keyring
        self._record = record
        self.is_encrypted = is_sealed(record)
        self.packs_dir = directory / "packs"
        self.packs = PackDirectory(self.packs_dir, keyring, self.is_encrypted, self._must_be_encrypted)
        self.checkpoints_dir = directory / "checkpoints"
        self.pending_dir = directory / "pending"
        self.index_dir = directory / "index"
        self.pushes_dir = directory / "pushes"

    @classmethod
    def open(cls, root: Path, name: str, keys: KeySource = NO_KEYS, *, create: bool = False) -> "Domain":
        """Open a domain of the store in `root`; keys are asked for when something is to be read or written.

        Args:
            root: the store.
            name: of the domain.
            keys: where its keys come from; if it comes from anywhere, a new domain is encrypted.
            create: make it if it is not there.

        Raises:
            StoreError: if there is none, or it cannot be made.
            KeyMissing: if it is to be made, and the key cannot be got.
        """
        if not _NAME.fullmatch(name):
            raise StoreError(f"{name!r} is no name for a domain", hint="use a Kubernetes namespace's name")
        directory = root / "domains" / name
        record = directory / "domain"
        keyring = Keyring(keys, name)
        if create and not record.exists():
            for part in ("packs", "index", "checkpoints", "pending", "pushes"):
                (directory / part).mkdir(mode=0o700, parents=True, exist_ok=True)
            ids_key = secrets.token_bytes(16) if keyring.is_configured else None
            _write_identity(record, keyring, _Identity(secrets.randbits(64), ids_key, is_converting=False))
            sync_directory(directory.parent)
        data = read_record(record, _MAX_RECORD_BYTES, "domain")
        if data is None:
            raise StoreError(f"{root} has no domain {name!r}")
        domain = cls(directory, name, keyring, data)
        if create and keyring.is_configured and not domain.is_encrypted:
            raise StoreError(
                f"domain {name} is not encrypted, and keys are configured", hint="`ocihook store rekey` encrypts it"
            )
        return domain

    @cached_property
    def _identity(self) -> "_Identity":
        record = unseal(self.keyring, "domain", self._record) if self.is_encrypted else self._record
        _, body = decode_frame("domain", (1,), record)
        try:
            value = load_json(body)
            ids_key = bytes.fromhex(value["ids_key"])
            return _Identity(int(value["seed"], 16), ids_key or None, is_converting=value["is_converting"] is True)
        except (ValueError, TypeError, KeyError) as error:
            raise IntegrityError(f"the domain's record is malformed: {error!r}") from error

    @cached_property
    def page_ids(self) -> PageIds:
        """What makes the ids of its pages.

        Raises:
            IntegrityError: if the domain's record is damaged.
            KeyMissing: if it is encrypted, and there is no key.
        """
        return PageIds(self._identity.seed, self._identity.ids_key)

    def _must_be_encrypted(self) -> bool:
        """Tell whether nothing that is not encrypted may be read; asked for when something is not."""
        return self.is_encrypted and not self._identity.is_converting

    @property
    def seed(self) -> int:
        """Of the ids of its pages."""
        return self.page_ids.seed

    def _sealed(self, name: str, data: bytes) -> bytes:
        return seal(self.keyring, name, data) if self.is_encrypted else data

    def _manifest_of(self, checkpoint_id: str, data: bytes) -> StoredManifest:
        return read_manifest(self.keyring, checkpoint_id, data, must_be_encrypted=self._must_be_encrypted)

    def _layout_of(self, manifest: StoredManifest, data: bytes) -> Layout:
        return read_layout(self.keyring, manifest, data, must_be_encrypted=self._must_be_encrypted)

    # --- locks

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        """Hold off whoever removes."""
        with self._locked("lock", fcntl.LOCK_SH, LOCK_TIMEOUT_S):
            yield

    @contextlib.contextmanager
    def alone(self, timeout_s: float = LOCK_TIMEOUT_S) -> Iterator[None]:
        """Hold off everybody.

        Raises:
            StoreError: if checkpoints are still being written or read after so long.
        """
        with self._locked("lock", fcntl.LOCK_EX, timeout_s):
            yield

    @contextlib.contextmanager
    def _locked(self, name: str, how: int, timeout_s: float) -> Iterator[None]:
        fd = os.open(self.directory / name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        deadline = time.monotonic() + timeout_s
        try:
            while True:
                try:
                    fcntl.flock(fd, how | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() >= deadline:
                        raise StoreError(f"domain {self.name} is in use by another process") from None
                    time.sleep(_POLL_S)
            yield
        finally:
            os.close(fd)

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
        return self._manifest_of(checkpoint_id, self.manifest_bytes(checkpoint_id))

    def manifest_bytes(self, checkpoint_id: str) -> bytes:
        """Return a checkpoint's manifest as it is written.

        Raises:
            StoreError: if there is no such checkpoint.
        """
        path = self.checkpoints_dir / f"{checkpoint_id}.manifest"
        data = read_record(path, _MAX_RECORD_BYTES, f"manifest of {checkpoint_id}")
        if data is None:
            raise StoreError(f"there is no checkpoint {checkpoint_id} in domain {self.name}")
        return data

    def checkpoints(self) -> list[StoredManifest]:
        """Return all complete checkpoints, the oldest first.

        Raises:
            IntegrityError: if one is damaged.
        """
        return sorted(map(self.read, self.checkpoint_ids()), key=self._order)

    def _order(self, manifest: StoredManifest) -> tuple[int, int, str, int]:
        pulled = self._pulled(manifest.id)
        return (pulled.after, 1, manifest.created, manifest.sequence) if pulled else (manifest.sequence, 0, "", 0)

    def _pulled(self, checkpoint_id: str) -> Pulled | None:
        data = read_record(self._pulled_path(checkpoint_id), _MAX_RECORD_BYTES, f"record of {checkpoint_id}")
        return _decode_pulled(data) if data else None

    def _page_ids_digest(self, manifest: StoredManifest) -> str:
        """Return what the digest of the page ids that are here must be."""
        pulled = self._pulled(manifest.id)
        return pulled.page_ids_digest if pulled else manifest.page_ids_digest

    def layout(self, manifest: StoredManifest) -> Layout:
        """Return where a checkpoint's pages are.

        Raises:
            IntegrityError: if that is missing or damaged.
        """
        return self._layout_of(manifest, self.layout_bytes(manifest.id))

    def layout_bytes(self, checkpoint_id: str) -> bytes:
        """Return a checkpoint's layout as it is written.

        Raises:
            IntegrityError: if it is missing.
        """
        data = read_record(self._layout_path(checkpoint_id), _MAX_LAYOUT_BYTES, f"layout of {checkpoint_id}")
        if data is None:
            raise IntegrityError(f"the layout of checkpoint {checkpoint_id} is missing")
        return data

    def before(self, manifest: StoredManifest) -> dict[str, Before]:
        """Return a checkpoint's images, to be compared with a later one's; none if its page ids are gone.

        Raises:
            IntegrityError: if it is damaged.
        """
        path = self._ids_path(manifest.id)
        size = manifest.raw_bytes // PAGE_BYTES * ID_BYTES
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return {}
        try:
            if size == 0 or os.fstat(fd).st_size != size:
                return {}
            ids = mmap.mmap(fd, size, prot=mmap.PROT_READ)
        finally:
            os.close(fd)
        self._verify_ids(manifest)
        layout = self.layout(manifest)
        for info in layout.packs:
            self.packs.open(info.name, info).close()
        packs = [pack_number(info.name) for info in layout.packs]
        images, first = {}, 0
        for name, extents in layout.images.items():
            images[name] = Before(ids, first, extents, packs)
            first += extents.pages
        return images

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
        """Make a checkpoint part of the domain; call it with the lock shared.

        Args:
            manifest: `sequence` and `previous` are set here.
            layout: of its images.
            ids: file with its page ids, at `new_ids_path`; moved away.
            replaced: the checkpoint whose page ids nobody needs from now on.

        Raises:
            OSError: from the file system, a full one included.
            StoreError: if the index cannot be written.
        """
        self._put_parts(manifest.id, self._sealed(f"layout {manifest.id}", encode_layout(layout)), ids)
        with self._locked("chain.lock", fcntl.LOCK_EX, LOCK_TIMEOUT_S):
            head = self._head()
            linked = dataclasses.replace(
                manifest, sequence=head.sequence + 1 if head else 0, previous=head.link if head else None
            )
            record = encode_stored(linked)
            data = self._sealed(f"manifest {manifest.id}", record)
            replace_file(self.checkpoints_dir / f"{manifest.id}.manifest", data, mode=0o600)
            self._write_head(_entry_of(linked, record))
        merge_index(self.index_dir)
        if replaced is not None:  # only the newest is compared with
            self._ids_path(replaced).unlink(missing_ok=True)

    def adopt(
        self, checkpoint_id: str, data: bytes, layout: bytes, ids: Path, progress: Progress = no_progress
    ) -> StoredManifest:
        """Make a checkpoint from elsewhere part of the domain; its packs are here. Call it with the lock shared.

        Args:
            checkpoint_id: which it is to be.
            data: its manifest, as it is elsewhere.
            layout: likewise.
            ids: file to be, at `new_ids_path`, for its page ids; moved away.
            progress: told the bytes read.

        Raises:
            IntegrityError: if the packs do not hold what the manifest says.
            OSError: from the file system, a full one included.
        """
        manifest = self._manifest_of(checkpoint_id, data)
        decoded = self._layout_of(manifest, layout)
        self._verify_layout(manifest, decoded, {}, read_data=False)
        with ids.open("wb") as file:
            self._verify_content(manifest, decoded, progress, file)
        self._put_parts(manifest.id, layout, ids)
        with self._locked("chain.lock", fcntl.LOCK_EX, LOCK_TIMEOUT_S):
            head = self._head()
            pulled = Pulled(head.sequence if head else -1, self.page_ids.digest_of_file(self._ids_path(manifest.id)))
            replace_file(self._pulled_path(manifest.id), _encode_pulled(pulled), mode=0o600)
            replace_file(self.checkpoints_dir / f"{manifest.id}.manifest", data, mode=0o600)
        merge_index(self.index_dir)
        return manifest

    # --- keys

    def begin_rekey(self) -> "Domain":
        """Encrypt the domain's record with the newest key; return the domain as it is then; with the lock alone.

        If it was not encrypted, the ids of its pages are others now: those that were are gone, with the index.

        Raises:
            KeyMissing: if there is no key.
        """
        identity = self._identity
        if identity.ids_key is None:
            for path in [*self.index_dir.iterdir(), *self.checkpoints_dir.glob("*.ids")]:
                path.unlink()
            identity = _Identity(identity.seed, secrets.token_bytes(16), is_converting=True)
        return self._with(identity)

    def end_rekey(self) -> "Domain":
        """Encrypt all records that are not with the newest key; then everything in the domain is encrypted.

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

    def _with(self, identity: "_Identity") -> "Domain":
        record = self.directory / "domain"
        _write_identity(record, self.keyring, identity)
        return Domain(self.directory, self.name, self.keyring, record.read_bytes())

    # --- layouts

    def replace_layout(self, manifest: StoredManifest, layout: Layout) -> None:
        """Say where a checkpoint's pages are now; new packs are on stable storage then. Call it with the lock alone."""
        sync_directory(self.packs_dir)
        data = self._sealed(f"layout {manifest.id}", encode_layout(layout))
        replace_file(self._layout_path(manifest.id), data, mode=0o600)

    def _put_parts(self, checkpoint_id: str, layout: bytes, ids: Path) -> None:
        """Put all that a manifest needs to its place, on stable storage."""
        sync_directory(self.packs_dir)
        sync_directory(self.index_dir)
        fd = os.open(ids, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
        ids.replace(self._ids_path(checkpoint_id))
        replace_file(self._layout_path(checkpoint_id), layout, mode=0o600)

    # --- what is to be pushed

    def note_push(self, checkpoint_id: str) -> None:
        """Remember that a checkpoint is to be pushed."""
        replace_file(self.pushes_dir / checkpoint_id, b"", mode=0o600)

    def due_pushes(self) -> list[str]:
        """Return the complete checkpoints that are to be pushed, the oldest first."""
        return sorted({path.name for path in self.pushes_dir.iterdir()} & set(self.checkpoint_ids()))

    def end_push(self, checkpoint_id: str) -> None:
        """Forget that a checkpoint is to be pushed."""
        (self.pushes_dir / checkpoint_id).unlink(missing_ok=True)

    # --- the chain

    def _head(self) -> Entry | None:
        """Return the newest link: the one recorded, or one that was committed and not recorded any more."""
        newest = _decode_entry(read_record(self.directory / "head", _MAX_RECORD_BYTES, "head"), "head")
        for entry in self._entries().values():
            if newest is None or entry.sequence > newest.sequence:
                newest = entry
        return newest

    def _write_head(self, entry: Entry) -> None:
        replace_file(self.directory / "head", _encode_entry(entry, "head"), mode=0o600)

    def _entries(self) -> dict[str, Entry]:
        """Return the chain's links by id: of checkpoints made here, and of those that a prune has removed."""
        entries = {}
        for path in sorted(self.checkpoints_dir.glob("*.removed")):
            entry = _decode_entry(read_record(path, _MAX_RECORD_BYTES, path.name), "removed")
            if entry is not None:
                entries[entry.link.id] = entry
        for checkpoint_id in self.checkpoint_ids():
            if not self._pulled_path(checkpoint_id).exists():
                entries[checkpoint_id] = self._entry(checkpoint_id)
        return entries

    def _entry(self, checkpoint_id: str) -> Entry:
        data = self._opened(f"manifest {checkpoint_id}", self.manifest_bytes(checkpoint_id))
        return _entry_of(decode_stored(data), data)

    def _opened(self, name: str, data: bytes) -> bytes:
        return opened(self.keyring, name, data, must_be_sealed=self._must_be_encrypted)

    def check_chain(self) -> list[str]:
        """Return what is wrong with the chain, a sentence each: checkpoints that were removed or exchanged."""
        wrong = []
        entries = self._entries()
        there_are = set(self.checkpoint_ids())
        head = _decode_entry(read_record(self.directory / "head", _MAX_RECORD_BYTES, "head"), "head")
        named = [(entry.previous, f"checkpoint {entry.link.id}") for entry in entries.values() if entry.previous]
        if head is not None:
            named.append((head.link, "the domain's head"))
        pulled = [self._entry(checkpoint_id) for checkpoint_id in there_are - entries.keys()]
        for entry in pulled:  # what came before it elsewhere need not be here; if it is, it must be that
            before = entry.previous
            if before and before.id in there_are and self._entry(before.id).link != before:
                wrong.append(f"checkpoint {before.id} was exchanged: checkpoint {entry.link.id} names another manifest")
        for link, by in named:
            there = entries.get(link.id)
            if there is None:
                # A prune drops the records of what it removed, but for the newest before what is left.
                if not any(e.previous == link and e.link.id not in there_are for e in entries.values()):
                    wrong.append(f"checkpoint {link.id}, which {by} names, was removed, but not by a prune")
            elif there.link != link:
                wrong.append(f"checkpoint {link.id} was exchanged: {by} names another manifest")
        return wrong

    # --- checking

    def verify(self, *, read_data: bool, progress: Progress = no_progress) -> list[str]:
        """Return what is wrong, a sentence each; with `read_data` every byte is read. Call it with the lock shared."""
        wrong: list[str] = []
        manifests = []
        for checkpoint_id in self.checkpoint_ids():
            with _collecting(wrong):
                manifests.append(self.read(checkpoint_id))
        with _collecting(wrong):
            wrong += self.check_chain()
        pages: dict[str, int] = {}
        for manifest in manifests:
            with _collecting(wrong):
                layout = self.layout(manifest)
                self._verify_layout(manifest, layout, pages, read_data=read_data)
                self._verify_ids(manifest)
                if read_data:
                    self._verify_content(manifest, layout, progress)
        return wrong

    def verify_checkpoint(self, manifest: StoredManifest, progress: Progress = no_progress) -> None:
        """Read every byte of one checkpoint. Call it with the lock shared.

        Raises:
            IntegrityError: naming what is missing or damaged.
        """
        layout = self.layout(manifest)
        self._verify_layout(manifest, layout, {}, read_data=False)
        self._verify_ids(manifest)
        self._verify_content(manifest, layout, progress)

    def _verify_layout(
        self, manifest: StoredManifest, layout: Layout, pages: dict[str, int], *, read_data: bool
    ) -> None:
        for info in layout.packs:
            if info.name not in pages:
                with contextlib.closing(self.packs.open(info.name, info)) as pack:
                    if read_data:
                        pack.verify()
                    pages[info.name] = pack.pages
        for name, extents in layout.images.items():
            for number, first, count in extents:
                if number != ZERO and first + count > pages[layout.packs[number].name]:
                    raise IntegrityError(f"checkpoint {manifest.id}: {name} lies outside of its packs")

    def _verify_ids(self, manifest: StoredManifest) -> None:
        path = self._ids_path(manifest.id)
        if path.exists() and self.page_ids.digest_of_file(path) != self._page_ids_digest(manifest):
            raise IntegrityError(f"the page ids of checkpoint {manifest.id} are damaged")

    def _verify_content(
        self, manifest: StoredManifest, layout: Layout, progress: Progress, ids: BinaryIO | None = None
    ) -> None:
        """Read all pages; write their ids by this domain's seed into a file, if one is given."""
        found = hashlib.blake2b(digest_size=32)
        theirs = PageIds(manifest.seed)
        for extents in layout.images.values():
            for content in read_image(extents, layout, self.packs):
                found.update(theirs.of(content))
                if ids is not None:
                    ids.write(self.page_ids.of(content))
                progress(len(content))
        if found.hexdigest() != manifest.page_ids_digest:
            raise IntegrityError(f"checkpoint {manifest.id} does not hold the pages that were checkpointed")

    # --- removing

    def remove(self, checkpoint_ids: Sequence[str]) -> None:
        """Remove checkpoints, leaving a record of each for the chain; call it with the lock alone.

        Raises:
            StoreError: if there is no such checkpoint.
        """
        entries = self._entries()
        for checkpoint_id in checkpoint_ids:
            entry = entries.get(checkpoint_id)
            if self._pulled_path(checkpoint_id).exists():
                self._remove_manifest(checkpoint_id)
                continue
            if entry is None:
                raise StoreError(f"there is no checkpoint {checkpoint_id} in domain {self.name}")
            record = self.checkpoints_dir / f"{checkpoint_id}.removed"
            replace_file(record, _encode_entry(entry, "removed"), mode=0o600)
            self._remove_manifest(checkpoint_id)

    def _remove_manifest(self, checkpoint_id: str) -> None:
        (self.checkpoints_dir / f"{checkpoint_id}.manifest").unlink(missing_ok=True)
        sync_directory(self.checkpoints_dir)

    def rubbish(self) -> tuple[list[Path], list[Path]]:
        """Return packs, and other files, that no complete checkpoint needs. Right with the lock alone.

        Raises:
            IntegrityError: if a checkpoint is damaged: what it needs is not known then.
        """
        manifests = self.checkpoints()
        needed = {info.name for manifest in manifests for info in self.layout(manifest).packs}
        packs = [path for path in self.packs_dir.glob("*.pack") if path.name not in needed]
        ids = {manifest.id for manifest in manifests}
        newest = {lineage(manifest.container): manifest.id for manifest in manifests}.values()
        made_here = [manifest for manifest in manifests if not self._pulled_path(manifest.id).exists()]
        own = {manifest.id for manifest in made_here}
        oldest = min((manifest.sequence for manifest in made_here), default=1 << 60)
        others = [*self.checkpoints_dir.glob("*.partial"), *self.index_dir.glob("*.partial")]
        others += [path for path in self.pushes_dir.iterdir() if path.name not in ids]
        for path in self.checkpoints_dir.iterdir():
            checkpoint_id, _, kind = path.name.partition(".")
            if checkpoint_id not in {"layout": ids, "pulled": ids, "ids": newest}.get(kind, (checkpoint_id,)):
                others.append(path)
            elif kind == "removed":
                entry = _decode_entry(read_record(path, _MAX_RECORD_BYTES, path.name), "removed")
                if checkpoint_id in own or (entry is not None and entry.sequence < oldest - 1 and made_here):
                    others.append(path)
        return packs, others

    def remove_rubbish(self) -> int:
        """Remove what no complete checkpoint needs; return the bytes. Call it with the lock alone.

        Raises:
            IntegrityError: if a checkpoint is damaged; nothing is removed then.
        """
        packs, others = self.rubbish()
        size = sum(path.stat().st_size for path in [*packs, *others])
        if packs:
            gone = {path.name for path in packs}
            kept = {pack_number(path.name) for path in self.packs_dir.glob("*.pack") if path.name not in gone}
            merge_index(self.index_dir, packs=kept)
        for path in [*packs, *others]:
            path.unlink(missing_ok=True)
        return size

    def repair(self) -> list[str]:
        """Make the index anew from the packs; return what was done. Call it with the lock alone.

        Raises:
            IntegrityError: if a checkpoint is damaged.
        """
        needed = {info.name: info for manifest in self.checkpoints() for info in self.layout(manifest).packs}
        for path in list(self.index_dir.iterdir()):
            path.unlink()
        pages = 0
        for name, info in sorted(needed.items()):
            with contextlib.closing(self.packs.open(name, info)) as pack:
                add_to_index(self.index_dir, pack_number(name), list(_keys_of(pack, self.page_ids)))
                pages += pack.pages
            merge_index(self.index_dir)
        head = self._head()
        if head is not None:
            self._write_head(head)
        return [f"made the index anew: {pages} pages of {len(needed)} packs"]

    def pack_bytes(self) -> int:
        """Return what all packs take."""
        return sum(path.stat().st_size for path in self.packs_dir.glob("*.pack"))

    def usage(self) -> Usage:
        """Return what the domain takes.

        Raises:
            IntegrityError: if a checkpoint is damaged.
        """
        manifests = self.checkpoints()
        packs, others = self.rubbish()
        files = [path for part in (self.packs_dir, self.checkpoints_dir) for path in part.iterdir()]
        return Usage(
            len(manifests),
            sum(manifest.raw_bytes for manifest in manifests),
            sum(path.stat().st_size for path in files),
            sum(path.stat().st_size for path in self.index_dir.iterdir()),
            sum(path.stat().st_size for path in [*packs, *others]),
        )


def read_manifest(
    keyring: Keyring, checkpoint_id: str, data: bytes, *, must_be_encrypted: Callable[[], bool] = lambda: False
) -> StoredManifest:
    """Read a manifest as it is written, here or at a remote.

    Args:
        keyring: of its domain.
        checkpoint_id: whose it must be.
        data: the manifest.
        must_be_encrypted: tells whether it must be, as all of its domain.

    Raises:
        IntegrityError: if it is damaged, or another one's, or not encrypted and should be.
        KeyMissing: if it is encrypted, and there is no key.
    """
    manifest = decode_stored(opened(keyring, f"manifest {checkpoint_id}", data, must_be_sealed=must_be_encrypted))
    if manifest.id != checkpoint_id or manifest.domain != keyring.domain:
        raise IntegrityError(
            f"where checkpoint {checkpoint_id} of domain {keyring.domain} should be is {manifest.id} of "
            f"{manifest.domain}"
        )
    return manifest


def read_layout(
    keyring: Keyring, manifest: StoredManifest, data: bytes, *, must_be_encrypted: Callable[[], bool] = lambda: False
) -> Layout:
    """Read a checkpoint's layout as it is written, here or at a remote; arguments and errors as of `read_manifest`."""
    record = opened(keyring, f"layout {manifest.id}", data, must_be_sealed=must_be_encrypted)
    return decode_layout(record, [(part.name, part.size_bytes // PAGE_BYTES) for part in manifest.parts])


class _Identity(NamedTuple):
    """What a domain's record holds."""

    seed: int
    ids_key: bytes | None
    is_converting: bool  # to an encrypted one: some of it is not yet


def _write_identity(record: Path, keyring: Keyring, identity: _Identity) -> None:
    ids_key = identity.ids_key.hex() if identity.ids_key else ""
    body = {"seed": f"{identity.seed:016x}", "ids_key": ids_key, "is_converting": identity.is_converting}
    data = encode_frame("domain", 1, json.dumps(body).encode())
    replace_file(record, seal(keyring, "domain", data) if identity.ids_key else data, mode=0o600)


def _entry_of(manifest: StoredManifest, record: bytes) -> Entry:
    """Return a checkpoint's link; its digest is of the record, however it is encrypted."""
    return Entry(Link(manifest.id, digest(record)), manifest.sequence, manifest.previous)


def index_pack(domain: Domain, path: Path, info: PackInfo) -> None:
    """Verify every byte of a pack that is to become one of the domain, and let its index know the pages.

    Raises:
        IntegrityError: if it is damaged, or another one.
    """
    with contextlib.closing(domain.packs._replace(path=path.parent).open(info.name, info)) as pack:
        add_to_index(domain.index_dir, pack_number(info.name), list(_keys_of(pack, domain.page_ids)))


def lineage(container: ContainerRef) -> str:
    """Return what checkpoints of the same container have in common, also when its pod was made anew."""
    return f"{container.pod_namespace}/{container.pod_name}/{container.name}" if container.pod_name else container.id


def new_checkpoint_id() -> str:
    """Return an id that no other checkpoint has."""
    return f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{secrets.token_hex(4)}"


@contextlib.contextmanager
def _collecting(wrong: list[str]) -> Iterator[None]:
    try:
        yield
    except (OcihookError, OSError) as error:
        wrong.append(str(error))


def _keys_of(pack: StoredPack, page_ids: PageIds) -> Iterator[bytes]:
    done = 0
    while done < pack.pages:
        content, taken = pack.read(done, pack.pages)
        ids = page_ids.of(content)
        yield from (ids[at : at + KEY_BYTES] for at in range(0, len(ids), ID_BYTES))
        done += taken


def _encode_pulled(pulled: Pulled) -> bytes:
    return encode_frame("pulled", 1, json.dumps(pulled._asdict()).encode())


def _decode_pulled(data: bytes) -> Pulled:
    _, body = decode_frame("pulled", (1,), data)
    try:
        value = load_json(body)
        return Pulled(as_number(value["after"] + 1) - 1, as_name(value["page_ids_digest"], _DIGEST))
    except (ValueError, TypeError, KeyError) as error:
        raise IntegrityError(f"the record of a pulled checkpoint is malformed: {error!r}") from error


def _encode_entry(entry: Entry, kind: str) -> bytes:
    body = {"link": list(entry.link), "sequence": entry.sequence, "previous": entry.previous and list(entry.previous)}
    return encode_frame(kind, 1, json.dumps(body).encode())


def _decode_entry(data: bytes | None, kind: str) -> Entry | None:
    if data is None:
        return None
    _, body = decode_frame(kind, (1,), data)
    try:
        value = load_json(body)
        previous = value["previous"]
        return Entry(_link(value["link"]), as_number(value["sequence"]), _link(previous) if previous else None)
    except (ValueError, TypeError, KeyError) as error:
        raise IntegrityError(f"the {kind} is malformed: {error!r}") from error


def _link(value: Sequence[object]) -> Link:
    checkpoint_id, found = value
    return Link(as_name(checkpoint_id, CHECKPOINT_ID), as_name(found, _DIGEST))
