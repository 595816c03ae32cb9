"""A domain in an object store: names, what makes a checkpoint complete, how a prune keeps what is being pushed.

    domains/<domain>/packs/<pack>.pack
    domains/<domain>/checkpoints/<id>.layout, <id>.manifest    the manifest, put last, is the commit
    domains/<domain>/pushing/<random>      names that a push relies on, sent or not: of packs, of its layout
    domains/<domain>/removing/<random>     names that a prune is about to remove
    domains/<domain>/claims/<id>.<random>  who restores a checkpoint, or runs from it (runtime/claims.py)
    domains/<domain>/claims/stop-<member>-<gang>.<random>   a stop that is under way (runtime/announced.py)
    domains/<domain>/pruned/<random>       empty: a node's prune by policy; of two at once the first by time, then name

A push announces its names, then checks whether a prune is removing any, and waits for it; a prune announces what it
will remove, then checks whether a push relies on any, and keeps those. The later of two sees the other's announcement:
so no push relies on what is removed. Times are the object store's own; no node's clock counts.
"""

import contextlib
import fnmatch
import json
import re
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

from ocihook.errors import RemoteError
from ocihook.packs.frame import load_json
from ocihook.packs.pack import PackInfo
from ocihook.packs.packed_manifest import MAX_MANIFEST_BYTES
from ocihook.remote.blobs import Blob, Blobs
from ocihook.remote.remote import MAX_CLAIM_BYTES, ClaimBlob

PUSH_LASTS_S = 7 * 86400.0  # after that, the process that announced it has died
PRUNE_LASTS_S = 3600.0
CLAIM_KEPT_S = 86400.0  # much longer than one counts that nobody renews
_PRUNE_ACTS_S = 1800.0  # a prune stops by itself long before others consider it dead
_POLL_S = 1.0
_MANIFEST = re.compile(r"([0-9]{8}T[0-9]{6}Z-[0-9a-f]{8})\.manifest")


class ObjectRemote:
    """A domain in a directory or an object store."""

    def __init__(self, blobs: Blobs, domain: str) -> None:
        """Use the storage of the blobs, and the name of the domain."""
        self._blobs = blobs
        self._domain = domain
        self._prefix = f"domains/{domain}/"

    def checkpoint_ids(self) -> list[str]:
        """Return the ids of all complete checkpoints."""
        prefix = self._prefix + "checkpoints/"
        found = (_MANIFEST.fullmatch(blob.name.removeprefix(prefix)) for blob in self._blobs.below(prefix))
        return sorted(match[1] for match in found if match)

    def manifest(self, checkpoint_id: str) -> bytes | None:
        """Return a checkpoint's manifest; None if there is none."""
        return self._blobs.read(self._of(checkpoint_id, "manifest"), MAX_MANIFEST_BYTES)

    def layout(self, checkpoint_id: str, limit_bytes: int) -> bytes | None:
        """Return its layout; one that is larger is an error."""
        return self._blobs.read(self._of(checkpoint_id, "layout"), limit_bytes)

    def _of(self, checkpoint_id: str, kind: str) -> str:
        return f"{self._prefix}checkpoints/{checkpoint_id}.{kind}"

    @contextlib.contextmanager
    def pushing(self, checkpoint_id: str, packs: Collection[PackInfo]) -> Iterator[set[str]]:
        """Protect packs from a prune while a checkpoint is pushed; yield the names of those that are there."""
        names = {f"{checkpoint_id}.layout", *(info.name for info in packs)}
        mine = f"{self._prefix}pushing/{secrets.token_hex(8)}"
        self._blobs.write(mine, json.dumps(sorted(names)).encode())
        try:
            while self._announced("removing", PRUNE_LASTS_S) & names:
                time.sleep(_POLL_S)  # waits: a push, which no session makes
            sizes = {info.name: info.size_bytes for info in packs}
            yield {name for name, blob in self._packs().items() if sizes.get(name) == blob.size_bytes}
        finally:
            self._blobs.remove(mine)

    def send_pack(self, info: PackInfo, path: Path) -> Iterator[int]:
        """Store a pack; yield the bytes done, bit by bit."""
        return self._blobs.send(f"{self._prefix}packs/{info.name}", path)

    def fetch_pack(self, checkpoint_id: str, info: PackInfo, path: Path) -> Iterator[int]:
        """Append to `path` what it lacks of a pack; yield the bytes done, bit by bit."""
        del checkpoint_id
        return self._blobs.fetch(f"{self._prefix}packs/{info.name}", path)

    def commit(self, checkpoint_id: str, manifest: bytes, layout: bytes, packs: Mapping[PackInfo, Path]) -> None:
        """Complete a checkpoint whose packs have been sent.

        Raises:
            RemoteError: if one is missing, or has another size.
        """
        self._blobs.settle(f"{self._prefix}packs/")  # some may be of a push that was killed
        there = self._packs()
        for info in packs:
            if info.name not in there or there[info.name].size_bytes != info.size_bytes:
                raise RemoteError(
                    f"checkpoint {checkpoint_id} is not complete at the remote: it has lost pack {info.name}, "
                    "which it had taken",
                    hint="push again",
                )
        self._blobs.write(self._of(checkpoint_id, "layout"), layout)
        self._blobs.write(self._of(checkpoint_id, "manifest"), manifest)

    @contextlib.contextmanager
    def pruning(self, every_s: float) -> Iterator[bool]:
        """Yield whether this node is to prune: none has begun to for so long. A block that raises does not count."""
        prefix = f"{self._prefix}pruned/"
        mine = f"{prefix}{time.time_ns():016x}-{secrets.token_hex(8)}"  # of one second, as S3 counts, the first wins
        self._blobs.write(mine, b"")
        try:
            begun = {blob.name: blob.modified_s for blob in self._blobs.below(prefix)}
            recent = [name for name in begun if name == mine or begun[mine] - begun[name] < every_s]
            is_ours = min(recent, key=lambda name: (begun[name], name)) == mine
            yield is_ours
        except BaseException:
            self._blobs.remove(mine)
            raise
        for name in begun.keys() - set(recent) if is_ours else {mine}:
            self._blobs.remove(name)

    def settle(self) -> None:
        """Return when no power loss can undo that checkpoints were completed or removed, by any process."""
        self._blobs.settle(f"{self._prefix}checkpoints/")

    def remove(self, checkpoint_ids: Collection[str]) -> None:
        """Remove checkpoints; packs that only they needed stay until `remove_rubbish`."""
        for checkpoint_id in checkpoint_ids:
            self._blobs.remove(self._of(checkpoint_id, "manifest"))
        self.settle()
        for checkpoint_id in checkpoint_ids:
            self._blobs.remove(self._of(checkpoint_id, "layout"))

    def remove_rubbish(self, needed: Callable[[], Collection[str]]) -> int:
        """Remove packs that are not among those needed, and that no running push needs; return the bytes."""
        self.settle()  # what a prune that was killed had removed must not come back
        rubbish = self._rubbish(needed())
        mine = f"{self._prefix}removing/{secrets.token_hex(8)}"
        began_s = time.monotonic()
        self._blobs.write(mine, json.dumps(sorted(rubbish)).encode())
        freed = 0
        try:
            pushed = self._announced("pushing", PUSH_LASTS_S)
            still = self._rubbish(needed())  # in this order: a push commits before it withdraws its announcement
            for name, blob in rubbish.items():
                if name in still and name not in pushed and time.monotonic() - began_s < _PRUNE_ACTS_S:
                    self._blobs.remove(blob.name)
                    freed += blob.size_bytes
            for blob in list(self._blobs.below(f"{self._prefix}claims/")):
                if self._now_s() - blob.modified_s > CLAIM_KEPT_S:
                    self._blobs.remove(blob.name)
            for part in ("packs/", "checkpoints/", "pushing/", "removing/", "claims/", "pruned/"):
                freed += self._blobs.sweep(self._prefix + part, self._now_s() - PRUNE_LASTS_S)
        finally:
            self._blobs.remove(mine)
        return freed

    def claims(self, of: str) -> list[ClaimBlob]:
        """Return the claims of a checkpoint or stop; `*` stands for any text."""
        found = []
        for blob in list(self._blobs.below(f"{self._prefix}claims/")):
            name, _, token = blob.name.rpartition("/")[2].partition(".")
            data = self._blobs.read(blob.name, MAX_CLAIM_BYTES) if fnmatch.fnmatchcase(name, of) else None
            if data is not None:  # else of another one, or removed meanwhile
                found.append(ClaimBlob(token, data, blob.modified_s, name))
        return found

    def write_claim(self, of: str, token: str, data: bytes) -> None:
        """Write a claim, or write it again."""
        self._blobs.write(f"{self._prefix}claims/{of}.{token}", data)

    def remove_claim(self, of: str, token: str) -> None:
        """Remove a claim, if it is there."""
        self._blobs.remove(f"{self._prefix}claims/{of}.{token}")

    def _rubbish(self, needed: Collection[str]) -> dict[str, Blob]:
        """Return packs that are not needed, and layouts without a manifest, by the names that they are announced by."""
        prefix = self._prefix + "checkpoints/"
        layouts = {blob.name.removeprefix(prefix): blob for blob in self._blobs.below(prefix)}
        complete = {f"{checkpoint_id}.layout" for checkpoint_id in self.checkpoint_ids()}
        packs = {name: blob for name, blob in self._packs().items() if name not in needed}
        lonely = {n: blob for n, blob in layouts.items() if n.endswith(".layout") and n not in complete}
        return packs | lonely

    def _packs(self) -> dict[str, Blob]:
        prefix = self._prefix + "packs/"
        return {blob.name.removeprefix(prefix): blob for blob in self._blobs.below(prefix)}

    def _announced(self, kind: str, lasts_s: float) -> set[str]:
        """Return the names that pushes, or prunes, have announced; an announcement that is too old is removed."""
        now_s = self._now_s()
        names: set[str] = set()
        for blob in list(self._blobs.below(f"{self._prefix}{kind}/")):
            if now_s - blob.modified_s > lasts_s:
                self._blobs.remove(blob.name)
                continue
            data = self._blobs.read(blob.name, MAX_MANIFEST_BYTES)
            if data is not None:
                try:
                    names.update(map(str, load_json(data)))
                except (ValueError, TypeError) as error:
                    raise RemoteError(f"{blob.name} at the remote is malformed: {error}") from error
        return names

    def _now_s(self) -> float:
        """Return the newest time that the object store knows: that of what was announced last."""
        both = (*self._blobs.below(f"{self._prefix}pushing/"), *self._blobs.below(f"{self._prefix}removing/"))
        return max((blob.modified_s for blob in both), default=0.0)
