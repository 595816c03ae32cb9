"""A client of OCI registries: the blobs and manifests of one repository.

https://github.com/opencontainers/distribution-spec, version 1.1. Import it late: urllib3 takes longer than a hook may.
"""

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlencode, urljoin, urlsplit

from urllib3.exceptions import HTTPError

from ocihook.errors import ConfigError, RegistryError
from ocihook.linux.files import create_private
from ocihook.registry.layout import MANIFEST_TYPE
from ocihook.registry.transport import DOCKER_HUB, RETRIED, TRY_ANOTHER, Access, Answer, Transport

__all__ = ["Access", "Manifest", "Reference", "Repository", "digest_of"]

INDEX_TYPE = "application/vnd.oci.image.index.v1+json"
_DOCKER_TYPES = (
    "application/vnd.docker.distribution.manifest.v2+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
MAX_MANIFEST_BYTES = 4 << 20  # a registry may refuse larger ones

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}|sha512:[0-9a-f]{128}")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_COMPONENT = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_NAME = re.compile(rf"(?=.{{1,255}}$){_COMPONENT}(?:/{_COMPONENT})*")
_REGISTRY = re.compile(r"(?:[A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?")
_RANGE = re.compile(r"(?:bytes=)?0-([0-9]{1,18})")
_NEXT = re.compile(r'<([^>]+)>\s*;\s*rel="?next"?')

_PIECE_BYTES = 1 << 20
_WHOLE_BYTES = 8 << 20  # up to here a blob is sent in one request
_CHUNK_BYTES = 32 << 20  # parts of a larger one: below the limits of proxies that are set before registries
_MAX_CHUNK_BYTES = 1 << 30  # the most that a registry may ask for at least
_COMMIT_TIMEOUT_S = 600.0  # a registry on an object store assembles a large blob when it is complete
_MAX_PAGES = 1000
_MAX_TAGS = 1 << 18
_LOST = frozenset({404, 416})  # the registry has lost an upload, or is at another offset in it
_SEND_AGAIN = "remove it from the registry and push it again"

Progress = Callable[[int], object]
Read = Callable[[int, int], Iterable[bytes]]  # offset and size -> pieces
_DEFAULT_ACCESS = Access()


def _no_progress(_size_bytes: int) -> None:
    pass


def digest_of(data: bytes, algorithm: str = "sha256") -> str:
    """Return the name of some content."""
    return f"{algorithm}:{hashlib.new(algorithm, data).hexdigest()}"


class Reference(NamedTuple):
    """The name of content in a registry."""

    registry: str
    repository: str
    tag: str = ""
    digest: str = ""

    @classmethod
    def parse(cls, text: str) -> "Reference":
        """Return the parts of REGISTRY/REPOSITORY[:TAG][@DIGEST].

        Other tools default to Docker Hub. A checkpoint holds a job's memory: so the registry must be named.

        Raises:
            ConfigError: if it is not such a reference.
        """
        rest, at, digest = text.partition("@")
        registry, slash, rest = rest.partition("/")
        if not slash or not (registry == "localhost" or any(mark in registry for mark in ".:[")):
            raise ConfigError(f"{text!r} names no registry", hint="write REGISTRY[:PORT]/REPOSITORY:TAG")
        name, colon, tag = rest.partition(":")
        if registry == DOCKER_HUB and "/" not in name:
            name = f"library/{name}"
        if not (
            _REGISTRY.fullmatch(registry)
            and _NAME.fullmatch(name)
            and (not colon or _TAG.fullmatch(tag))
            and (not at or _DIGEST.fullmatch(digest))
        ):
            raise ConfigError(f"{text!r} names nothing in a registry", hint="write REGISTRY[:PORT]/REPOSITORY:TAG")
        return cls(registry, name, tag, digest)

    def __str__(self) -> str:
        tag, digest = self.tag and f":{self.tag}", self.digest and f"@{self.digest}"
        return f"{self.registry}/{self.repository}{tag}{digest}"


class Manifest(NamedTuple):
    """A manifest as it is stored: its digest is that of exactly these bytes."""

    media_type: str
    digest: str
    data: bytes


class _Upload(NamedTuple):
    """A registry's session for the upload of one blob."""

    url: str
    offset: int  # bytes that the registry has
    chunk_bytes: int


class _Interruption(Exception):
    """An upload was interrupted and may be resumed."""

    def __init__(self, cause: Exception | Answer) -> None:
        super().__init__(cause)
        self.cause = cause


class Repository:
    """One repository of a registry. Threads may share it; a process that is forked gets connections of its own.

    Every method raises RegistryError: what happened, and what to do. `status` is 404 for what the registry does not
    have. What may succeed later (broken connections, 429, 5xx) is retried before that, `access.attempts` times.
    """

    def __init__(self, registry: str, name: str, access: Access = _DEFAULT_ACCESS) -> None:
        """Name a repository. Nothing is sent yet.

        Args:
            registry: host, with the port if it has one of its own.
            name: of the repository.
            access: how the registry is reached.

        Raises:
            ConfigError: if a name or the file of certificates is wrong.
        """
        if not _REGISTRY.fullmatch(registry) or not _NAME.fullmatch(name):
            raise ConfigError(f"{registry}/{name} names no repository of a registry")
        self._http = Transport(registry, name, access)

    def __str__(self) -> str:
        return str(self._http)

    def exists(self, digest: str) -> bool:
        """Return whether the repository has a blob."""
        answer = self._http.send("HEAD", self._blob_url(digest))
        if answer.status not in (200, 404):
            self._http.fail(answer, f"blob {digest}")
        return answer.status == 200

    def read_blob(self, digest: str, size_bytes: int) -> Iterator[bytes]:
        """Yield a blob in pieces. It is verified only after the last one: rely on nothing before.

        After a broken connection, reading resumes where it was.

        Args:
            digest: of the blob.
            size_bytes: its size, as its descriptor has it.
        """
        self._blob_url(digest)
        hasher = hashlib.new(digest.partition(":")[0])
        for piece in self._pieces(digest, 0, size_bytes, is_whole=True):
            hasher.update(piece)
            yield piece
        if hasher.hexdigest() != digest.partition(":")[2]:
            raise RegistryError(f"{self}: what was sent as blob {digest} is something else", hint=_SEND_AGAIN)

    def read_range(self, digest: str, offset: int, size_bytes: int) -> bytes:
        """Return a part of a blob. No digest covers it: the caller verifies."""
        return b"".join(self._pieces(digest, offset, offset + size_bytes, is_whole=False))

    def _pieces(self, digest: str, offset: int, end: int, *, is_whole: bool) -> Iterator[bytes]:
        failures = 0
        while offset < end:
            before = offset
            try:
                for piece in self._read_once(digest, offset, end, is_whole=is_whole):
                    offset += len(piece)
                    yield piece
            except HTTPError as error:
                failures = 1 if offset > before else failures + 1
                if failures >= self._http.access.attempts:
                    raise self._http.unreachable(error) from error
                self._http.pause(failures)
            else:
                if offset == before:
                    raise RegistryError(f"{self}: blob {digest} ends at {offset}, not at {end}", hint=_SEND_AGAIN)

    def _read_once(self, digest: str, offset: int, end: int, *, is_whole: bool) -> Iterator[bytes]:
        headers = {} if is_whole and not offset else {"Range": f"bytes={offset}-{end - 1}"}
        url = self._blob_url(digest)
        response = self._http.open_retrying("GET", url, headers)
        with contextlib.closing(response):
            if response.status == 416:
                return  # the blob ends before
            if response.status not in (200, 206):
                self._http.fail(self._http.read(response, url), f"blob {digest}")
            skip = offset if response.status == 200 else 0  # no support for ranges: all of it is sent again
            for data in response.stream(_PIECE_BYTES, decode_content=False):
                piece = data[skip:]
                skip -= len(data) - len(piece)
                if len(piece) > end - offset:
                    if is_whole:
                        raise RegistryError(f"{self}: blob {digest} does not end at {end}", hint=_SEND_AGAIN)
                    piece = piece[: end - offset]
                if piece:
                    offset += len(piece)
                    yield piece
                if offset == end and not is_whole:
                    return

    def download(self, digest: str, size_bytes: int, path: Path, *, progress: Progress = _no_progress) -> None:
        """Write a blob to a new file, which is there afterwards only if all of it is right.

        Raises:
            FileExistsError: if it was there before.
        """
        with create_private(path) as file:
            try:
                for piece in self.read_blob(digest, size_bytes):
                    file.write(piece)
                    progress(len(piece))
            except BaseException:
                path.unlink()
                raise

    def upload_bytes(self, data: bytes, *, progress: Progress = _no_progress) -> bool:
        """Add a small blob, its name being `digest_of(data)`, unless it is there; return whether it was sent."""

        def read(offset: int, size_bytes: int) -> list[bytes]:
            return [data[offset : offset + size_bytes]]

        return self._upload(digest_of(data), len(data), read, progress)

    def upload_file(
        self,
        path: Path,
        digest: str,
        *,
        start: int = 0,
        size_bytes: int | None = None,
        progress: Progress = _no_progress,
    ) -> bool:
        """Add a file, or a part of it, as a blob, unless it is there; return whether it was sent.

        An interrupted upload is resumed where it was.

        Args:
            path: of the file.
            digest: of the blob.
            start: of the blob in the file.
            size_bytes: of the blob; None: up to the end of the file.
            progress: gets the bytes that the registry has received; all of them also if it had the blob.
        """
        with path.open("rb") as file:

            def read(offset: int, left_bytes: int) -> Iterator[bytes]:
                while left_bytes:
                    piece = os.pread(file.fileno(), min(left_bytes, _PIECE_BYTES), start + offset)
                    if not piece:
                        raise RegistryError(f"{path} became shorter while it was sent to {self}", hint="push it again")
                    yield piece
                    offset, left_bytes = offset + len(piece), left_bytes - len(piece)

            size = os.fstat(file.fileno()).st_size - start if size_bytes is None else size_bytes
            return self._upload(digest, size, read, progress)

    def _upload(self, digest: str, size_bytes: int, read: Read, progress: Progress) -> bool:
        reported = failures = 0
        upload: _Upload | None = None
        is_there = self.exists(digest)
        is_sent = not is_there
        while not is_there:
            try:
                upload = upload or self._begin_upload()
                while size_bytes > _WHOLE_BYTES and upload.offset < size_bytes:
                    upload = self._send_chunk(upload, size_bytes, read)
                    if upload.offset > reported:
                        progress(upload.offset - reported)
                        reported, failures = upload.offset, 0
                self._commit(upload, digest, size_bytes, read)
                is_there = True
            except _Interruption as interruption:
                failures += 1
                if failures >= self._http.access.attempts:
                    self._give_up(interruption.cause, digest)
                self._http.pause(
                    failures, interruption.cause.headers if isinstance(interruption.cause, Answer) else None
                )
                is_there = self.exists(digest)  # then only the answer was lost
                upload = self._resume(upload) if upload and not is_there else None
        progress(size_bytes - reported)
        return is_sent

    def _give_up(self, cause: Exception | Answer, digest: str) -> None:
        if isinstance(cause, Answer):
            self._http.fail(cause, f"upload of blob {digest}")
        raise self._http.unreachable(cause) from cause

    def _begin_upload(self) -> _Upload:
        answer = self._http.send("POST", f"{self._http.base}blobs/uploads/", {"Content-Length": "0"})
        if answer.status != 202 or "Location" not in answer.headers:
            self._http.fail(answer, "begin of an upload")
        least = answer.headers.get("OCI-Chunk-Min-Length", "")
        chunk_bytes = int(least) if least.isdecimal() and len(least) < 12 else 0
        return _Upload(answer.location, 0, max(min(chunk_bytes, _MAX_CHUNK_BYTES), _CHUNK_BYTES))

    def _send_chunk(self, upload: _Upload, size_bytes: int, read: Read) -> _Upload:
        end = min(upload.offset + upload.chunk_bytes, size_bytes)
        answer = self._send_part("PATCH", upload.url, upload.offset, end, read)
        if answer.status not in (202, 204):
            self._http.fail(answer, "part of a blob")
        match = _RANGE.fullmatch(answer.headers.get("Range", ""))
        offset = int(match[1]) + 1 if match else end
        if not upload.offset < offset <= end:
            raise RegistryError(f"{self}: the registry has {offset} bytes of a blob, but {end} were sent")
        return upload._replace(url=answer.location, offset=offset)

    def _commit(self, upload: _Upload, digest: str, size_bytes: int, read: Read) -> None:
        joint = "&" if urlsplit(upload.url).query else "?"
        url = f"{upload.url}{joint}{urlencode({'digest': digest})}"
        answer = self._send_part("PUT", url, upload.offset, size_bytes, read)
        if answer.status == 400 and "DIGEST_INVALID" in dict(answer.errors()):
            raise RegistryError(
                f"{self}: what the registry got is not blob {digest}",
                status=400,
                hint="the file was changed meanwhile, or the data on the way: push it again",
            )
        if answer.status not in (201, 202, 204):
            self._http.fail(answer, f"blob {digest}")

    def _send_part(self, method: str, url: str, offset: int, end: int, read: Read) -> Answer:
        headers = {"Content-Type": "application/octet-stream", "Content-Length": str(end - offset)}
        if method == "PATCH":
            headers["Content-Range"] = f"{offset}-{end - 1}"
        timeout_s = max(_COMMIT_TIMEOUT_S, self._http.access.timeout_s) if method == "PUT" else 0
        try:
            response = self._http.open(
                method, url, headers, body=lambda: read(offset, end - offset), timeout_s=timeout_s
            )
            answer = self._http.read(response, url)
        except HTTPError as error:
            raise _Interruption(error) from error
        if answer.status in RETRIED | _LOST:
            raise _Interruption(answer)
        return answer

    def _resume(self, upload: _Upload) -> _Upload | None:
        """Return an upload at the offset that the registry has reached, None if it must start over."""
        answer = self._http.send("GET", upload.url)
        match = _RANGE.fullmatch(answer.headers.get("Range", ""))
        if answer.status not in (200, 202, 204) or not match or match[1] == "0":  # 0-0 is one byte, or none
            return None
        return upload._replace(url=answer.location, offset=int(match[1]) + 1)

    def get_manifest(self, reference: str) -> Manifest:
        """Return the manifest that a tag or digest names."""
        accept = {"Accept": ", ".join((MANIFEST_TYPE, INDEX_TYPE, *_DOCKER_TYPES))}
        answer = self._http.send("GET", self._manifest_url(reference), accept, limit_bytes=MAX_MANIFEST_BYTES)
        if answer.status != 200:
            self._http.fail(answer, f"manifest {reference}")
        named = answer.headers.get("Docker-Content-Digest", "")
        wanted = reference if _DIGEST.fullmatch(reference) else named if _DIGEST.fullmatch(named) else ""
        digest = digest_of(answer.data, wanted.partition(":")[0] or "sha256")
        if wanted not in ("", digest):
            raise RegistryError(f"{self}: what was sent as manifest {reference} is something else", hint=_SEND_AGAIN)
        return Manifest(answer.headers.get("Content-Type", "").partition(";")[0].strip(), digest, answer.data)

    def put_manifest(self, reference: str, data: bytes, media_type: str = MANIFEST_TYPE) -> str:
        """Store a manifest under a tag, or under its digest; return its digest."""
        headers = {"Content-Type": media_type, "Content-Length": str(len(data))}
        answer = self._http.send("PUT", self._manifest_url(reference), headers, body=lambda: [data])
        if answer.status not in (200, 201, 202):
            self._http.fail(answer, f"manifest {reference}")
        return digest_of(data)

    def delete_manifest(self, digest: str) -> None:
        """Delete a manifest with its tags, where that is allowed. The registry frees its blobs in its own time."""
        answer = self._http.send("DELETE", self._manifest_url(digest))
        if answer.status not in (200, 202, 204):
            self._http.fail(answer, f"manifest {digest}")

    def tags(self) -> list[str]:
        """Return all tags, in no order; none for a repository that does not exist."""
        found: list[str] = []
        url = f"{self._http.base}tags/list?n=1000"
        seen: set[str] = set()
        while url not in seen and len(seen) < _MAX_PAGES and len(found) < _MAX_TAGS:
            answer = self._http.send("GET", url, limit_bytes=MAX_MANIFEST_BYTES)
            if answer.status == 404 and not seen:
                return []
            if answer.status != 200:
                self._http.fail(answer, "list of tags")
            found += self._tags_in(answer)
            following = _NEXT.search(answer.headers.get("Link", ""))
            if not following:
                return found
            seen.add(url)
            url = urljoin(answer.url, following[1])
        raise RegistryError(f"{self}: the list of tags has no end", hint=TRY_ANOTHER)

    def _tags_in(self, answer: Answer) -> Iterator[str]:
        """Return the tags of a page; a list that cannot be read must not count as empty."""
        try:
            tags = json.loads(answer.data)["tags"] or []
        except (ValueError, RecursionError, LookupError, TypeError):
            tags = None
        if not isinstance(tags, list) or not all(isinstance(tag, str) for tag in tags):
            raise RegistryError(f"{self}: what the registry sent is no list of tags", hint=TRY_ANOTHER)
        return filter(_TAG.fullmatch, tags)

    def _blob_url(self, digest: str) -> str:
        if not _DIGEST.fullmatch(digest):
            raise RegistryError(f"{digest!r} is no digest")
        return f"{self._http.base}blobs/{digest}"

    def _manifest_url(self, reference: str) -> str:
        if not (_DIGEST.fullmatch(reference) or _TAG.fullmatch(reference)):
            raise RegistryError(f"{reference!r} is neither a tag nor a digest")
        return f"{self._http.base}manifests/{reference}"
