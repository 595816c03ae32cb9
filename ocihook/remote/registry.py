"""A remote in a repository of an OCI registry: each checkpoint is an artifact, its packs are blobs.

    tag <domain>.pruned            when a node last pruned the domain by policy, by its own clock
    tag <domain>.<checkpoint id>   a manifest: config is the checkpoint's manifest, layers are its layout and its packs,
                                   each by its name (org.opencontainers.image.title)

    tag <domain>.<checkpoint id>.<random>   who restores it, or runs from it (runtime/claims.py), by a node's clock
    tag <domain>.stop-<member>-<gang>.<random>   a stop that is under way (runtime/announced.py)

The tag is the commit. Blobs that no manifest names are removed by the registry, at a time of its own.
"""

import contextlib
import fnmatch
import hashlib
import json
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ocihook.errors import RegistryError, RemoteError
from ocihook.packs.pack import PackInfo
from ocihook.packs.packed_manifest import MAX_MANIFEST_BYTES
from ocihook.registry.client import Repository, digest_of
from ocihook.registry.layout import MANIFEST_TYPE
from ocihook.remote.blobs import PIECE_BYTES
from ocihook.remote.remote import ClaimBlob

ARTIFACT_TYPE = "application/vnd.ocihook.checkpoint.v1"
_TYPES = {"manifest": f"{ARTIFACT_TYPE}.manifest", "layout": f"{ARTIFACT_TYPE}.layout", "pack": f"{ARTIFACT_TYPE}.pack"}
_EMPTY_TYPE = "application/vnd.oci.empty.v1+json"
_CLAIM, _CLAIMED = "io.ocihook.claim", "io.ocihook.claimed"  # its text; "" once withdrawn. Seconds since the epoch
_PRUNED = "io.ocihook.pruned"  # seconds since the epoch
_TITLE = "org.opencontainers.image.title"
_TAG = re.compile(r"(.+)\.([0-9]{8}T[0-9]{6}Z-[0-9a-f]{8})")
_CLAIM_TAG = re.compile(r"(.+)\.([0-9]{8}T[0-9]{6}Z-[0-9a-f]{8}|stop-[0-9a-f]{16}-[0-9a-f]{16})\.([A-Za-z0-9]+)")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


class _Blob(NamedTuple):
    name: str
    digest: str
    size_bytes: int


class _Artifact(NamedTuple):
    manifest: _Blob
    layout: _Blob
    packs: tuple[_Blob, ...]


class RegistryRemote:
    """A domain in a repository."""

    def __init__(self, repository: Repository, domain: str) -> None:
        """Use a repository, and the name of the domain."""
        self._repository, self._domain = repository, domain
        self._artifacts: dict[str, _Artifact] = {}
        self._there: dict[str, _Blob] = {}  # packs of what is being pushed that need not be sent

    def checkpoint_ids(self) -> list[str]:
        """Return the ids of all complete checkpoints."""
        found = (_TAG.fullmatch(tag) for tag in self._repository.tags())
        return sorted(match[2] for match in found if match and match[1] == self._domain)

    def manifest(self, checkpoint_id: str) -> bytes | None:
        """Return a checkpoint's manifest; None if there is none."""
        artifact = self._artifact(checkpoint_id)
        return self._read(artifact.manifest, MAX_MANIFEST_BYTES) if artifact else None

    def layout(self, checkpoint_id: str, limit_bytes: int) -> bytes | None:
        """Return its layout; one that is larger is an error."""
        artifact = self._artifact(checkpoint_id)
        return self._read(artifact.layout, limit_bytes) if artifact else None

    def _read(self, blob: _Blob, limit_bytes: int) -> bytes:
        if blob.size_bytes > limit_bytes:
            raise RemoteError(f"{blob.name} in {self._repository} is larger than {limit_bytes} bytes")
        return b"".join(self._repository.read_blob(blob.digest, blob.size_bytes))

    @contextlib.contextmanager
    def pushing(self, checkpoint_id: str, packs: Collection[PackInfo]) -> Iterator[set[str]]:
        """Yield the names of packs that are there. A registry keeps what a manifest names, and what was just sent."""
        del checkpoint_id
        artifacts = filter(None, map(self._artifact, self.checkpoint_ids()))
        known = {blob.name: blob for artifact in artifacts for blob in artifact.packs}
        there = (known[info.name] for info in packs if info.name in known)
        sizes = {info.name: info.size_bytes for info in packs}
        self._there = {
            blob.name: blob
            for blob in there
            if blob.size_bytes == sizes[blob.name] and self._repository.exists(blob.digest)
        }
        yield set(self._there)

    def send_pack(self, info: PackInfo, path: Path) -> Iterator[int]:
        """Store a pack; yield its bytes when it is there."""
        self._repository.upload_file(path, _digest_of_file(path))
        yield info.size_bytes

    def fetch_pack(self, checkpoint_id: str, info: PackInfo, path: Path) -> Iterator[int]:
        """Append to `path` what it lacks of a checkpoint's pack; yield the bytes done, bit by bit."""
        artifact = self._artifact(checkpoint_id)
        blob = next((blob for blob in artifact.packs if blob.name == info.name), None) if artifact else None
        if blob is None:
            raise RemoteError(f"{self._repository} has no pack {info.name}")
        with path.open("ab") as target:
            while (at := target.tell()) < blob.size_bytes:
                data = self._repository.read_range(blob.digest, at, min(PIECE_BYTES, blob.size_bytes - at))
                target.write(data)
                yield len(data)

    def commit(self, checkpoint_id: str, manifest: bytes, layout: bytes, packs: Mapping[PackInfo, Path]) -> None:
        """Complete a checkpoint whose packs have been sent. The registry refuses it if one is missing."""
        rows = [_descriptor("layout", _Blob("layout", digest_of(layout), len(layout)))]
        for info, path in packs.items():
            blob = self._there.get(info.name) or _Blob(info.name, _digest_of_file(path), info.size_bytes)
            rows.append(_descriptor("pack", blob))
        self._repository.upload_bytes(manifest)
        self._repository.upload_bytes(layout)
        body = {
            "schemaVersion": 2,
            "mediaType": MANIFEST_TYPE,
            "artifactType": ARTIFACT_TYPE,
            "config": _descriptor("manifest", _Blob("manifest", digest_of(manifest), len(manifest))),
            "layers": rows,
        }
        self._repository.put_manifest(f"{self._domain}.{checkpoint_id}", json.dumps(body).encode())

    @contextlib.contextmanager
    def pruning(self, every_s: float) -> Iterator[bool]:
        """Yield whether this node is to prune; two at the same time both do so, and remove the same."""
        tag = f"{self._domain}.pruned"
        is_ours = True
        with contextlib.suppress(ValueError, TypeError, KeyError), _unless_missing():
            found = json.loads(self._repository.get_manifest(tag).data)
            is_ours = not 0 <= time.time() - float(found["annotations"][_PRUNED]) < every_s
        yield is_ours
        if is_ours:
            self._put_note(tag, "pruned", {_PRUNED: str(int(time.time()))})

    def _put_note(self, tag: str, kind: str, annotations: Mapping[str, str]) -> None:
        """Store an artifact that is nothing but its annotations; its empty config was stored with the first."""
        body = {
            "schemaVersion": 2,
            "mediaType": MANIFEST_TYPE,
            "artifactType": f"{ARTIFACT_TYPE}.{kind}",
            "config": {"mediaType": _EMPTY_TYPE, "digest": digest_of(b"{}"), "size": 2},
            "layers": [],
            "annotations": dict(annotations),
        }
        data = json.dumps(body).encode()
        try:
            self._repository.put_manifest(tag, data)
        except RegistryError:  # it does not have the config yet
            self._repository.upload_bytes(b"{}")
            self._repository.put_manifest(tag, data)

    def settle(self) -> None:
        """Return at once: what a registry has accepted is durable."""

    def remove(self, checkpoint_ids: Collection[str]) -> None:
        """Remove checkpoints; the registry removes their packs."""
        for checkpoint_id in checkpoint_ids:
            with _unless_missing():
                self._repository.delete_manifest(self._repository.get_manifest(self._tag(checkpoint_id)).digest)

    def remove_rubbish(self, needed: Callable[[], Collection[str]]) -> int:
        """Return 0: the registry removes it."""
        del needed
        return 0

    def claims(self, of: str) -> list[ClaimBlob]:
        """Return the claims of a checkpoint or stop; `*` stands for any text."""
        found = []
        for tag, match in ((tag, _CLAIM_TAG.fullmatch(tag)) for tag in self._repository.tags()):
            if match and match[1] == self._domain and fnmatch.fnmatchcase(match[2], of):
                with _unless_missing():  # withdrawn meanwhile
                    found.append(self._claim(tag, match[2], match[3]))
        return [claim for claim in found if claim.data]

    def _claim(self, tag: str, of: str, token: str) -> ClaimBlob:
        try:
            notes = json.loads(self._repository.get_manifest(tag).data)["annotations"]
            return ClaimBlob(token, notes[_CLAIM].encode(), float(notes[_CLAIMED]), of)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise RemoteError(f"{tag} in {self._repository} is no claim of a checkpoint") from error

    def write_claim(self, of: str, token: str, data: bytes) -> None:
        """Write a claim, or write it again."""
        notes = {_CLAIM: data.decode(), _CLAIMED: f"{time.time():.3f}"}
        self._put_note(f"{self._tag(of)}.{token}", "claim", notes)

    def remove_claim(self, of: str, token: str) -> None:
        """Remove a claim; where the registry removes nothing, replace it by one that says so."""
        tag = f"{self._tag(of)}.{token}"
        with _unless_missing():
            digest = self._repository.get_manifest(tag).digest
            try:
                self._repository.delete_manifest(digest)
            except RegistryError as error:
                if error.status == 404:
                    raise
                self._put_note(tag, "claim", {_CLAIM: "", _CLAIMED: f"{time.time():.3f}"})

    def _tag(self, of: str) -> str:
        return f"{self._domain}.{of}"

    def _artifact(self, checkpoint_id: str) -> _Artifact | None:
        if checkpoint_id not in self._artifacts:
            try:
                data = self._repository.get_manifest(self._tag(checkpoint_id)).data
            except RegistryError as error:
                if error.status == 404:
                    return None
                raise
            try:
                self._artifacts[checkpoint_id] = _decode(json.loads(data))
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
                raise RemoteError(f"{self._tag(checkpoint_id)} in {self._repository} is no checkpoint") from error
        return self._artifacts[checkpoint_id]


def registry_domains(repository: Repository) -> list[str]:
    """Return the domains that have checkpoints, claims or announced stops in a repository."""
    found = (_TAG.fullmatch(tag) or _CLAIM_TAG.fullmatch(tag) for tag in repository.tags())
    return sorted({match[1] for match in found if match})


@contextlib.contextmanager
def _unless_missing() -> Iterator[None]:
    try:
        yield
    except RegistryError as error:
        if error.status != 404:
            raise


def _digest_of_file(path: Path) -> str:
    with path.open("rb") as file:
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"


def _descriptor(kind: str, blob: _Blob) -> dict[str, Any]:
    annotations = {_TITLE: blob.name}
    return {"mediaType": _TYPES[kind], "digest": blob.digest, "size": blob.size_bytes, "annotations": annotations}


def _decode(value: Any) -> _Artifact:  # noqa: ANN401 - anything that JSON can say
    if value["artifactType"] != ARTIFACT_TYPE:
        raise ValueError("another kind of artifact")
    layout, *packs = map(_blob, value["layers"])
    return _Artifact(_blob(value["config"]), layout, tuple(packs))


def _blob(value: Any) -> _Blob:  # noqa: ANN401 - likewise
    name, digest, size = value["annotations"][_TITLE], value["digest"], value["size"]
    if not isinstance(name, str) or not isinstance(size, int) or size < 0 or not _DIGEST.fullmatch(digest):
        raise ValueError("a malformed descriptor")
    return _Blob(name, digest, size)
