"""The checkpoint archives of podman, containerd and CRI-O: one tar, plain or compressed, read as hostile input.

All three keep CRIU's image set flat below `checkpoint/`, and beside it config.dump and spec.dump (JSON).
"""

import contextlib
import gzip
import json
import re
import sys
import tarfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, cast

from ocihook.engine.identity import container_ref
from ocihook.errors import ArchiveError
from ocihook.model import ContainerRef

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

COMPRESSIONS = ("none", "gzip", "zstd")
IMAGE_DIRECTORY = "checkpoint/"
_IMAGE_NAME = re.compile(r"checkpoint/([A-Za-z0-9_@.:-]{1,250})")
_DOCUMENTS = ("config.dump", "spec.dump")
_MAX_DOCUMENT_BYTES = 16 << 20
# The one link that an engine makes: podman's --with-previous, to the images of an earlier pre-dump.
_ALLOWED_LINKS = {"checkpoint/parent": "../pre-checkpoint"}
_READ_ERRORS = (tarfile.TarError, zstd.ZstdError, gzip.BadGzipFile, zlib.error, EOFError)


class MemberData:
    """The bytes of a member, to be read before the next member is asked for."""

    def __init__(self, file: IO[bytes], size_bytes: int, where: str) -> None:
        self._file = file
        self._left_bytes = size_bytes
        self._where = where

    def read(self, size: int = -1) -> bytes:
        """Return up to `size` bytes, b"" at the end.

        Raises:
            ArchiveError: if the archive is damaged here, or ends within the member.
        """
        try:
            data = self._file.read(self._left_bytes if size < 0 else min(size, self._left_bytes))
        except _READ_ERRORS as error:
            raise _damaged(self._where, error) from error
        if not data and self._left_bytes and size:
            raise _damaged(self._where, "unexpected end")
        self._left_bytes -= len(data)
        return data


def _damaged(where: str, why: object) -> ArchiveError:
    return ArchiveError(f"{where} is truncated or damaged: {why}", hint="use another copy of it")


class Member(NamedTuple):
    """One member of an archive that has passed all checks."""

    info: tarfile.TarInfo
    image_name: str  # its file name, if it is a file of the image set, else ""
    data: MemberData | None  # None for what is not a regular file


class ArchiveFacts(NamedTuple):
    """What an archive tells of its container."""

    container: ContainerRef
    image: str
    runtime: str
    created: str
    sizes: Mapping[str, int]  # of every file in the image set


def compression_of(path: Path) -> str:
    """Return which of COMPRESSIONS a file has, by its first bytes."""
    with path.open("rb") as file:
        start = file.read(4)
    if start[:2] == b"\x1f\x8b":
        return "gzip"
    return "zstd" if start == b"\x28\xb5\x2f\xfd" else "none"


def read_members(path: Path) -> Iterator[Member]:
    """Yield the members of an archive, in order.

    Raises:
        ArchiveError: at the first member that is malformed or hostile, or where the archive ends early.
    """
    seen: set[str] = set()
    last: tarfile.TarInfo | None = None
    try:
        with _open(path) as tar:
            for info in tar:
                name = _check(info, path)
                if name in seen:
                    raise ArchiveError(f"{path}: member {name!r} occurs twice")
                seen.add(name)
                last = info
                match = _IMAGE_NAME.fullmatch(name)
                file = tar.extractfile(info) if info.isreg() else None
                data = MemberData(file, info.size, f"{path}: {name}") if file is not None else None
                yield Member(info, match[1] if match and data else "", data)
        _check_end(last, path)
    except _READ_ERRORS as error:
        raise _damaged(str(path), error) from error


@contextlib.contextmanager
def _open(path: Path) -> Iterator[tarfile.TarFile]:
    """Open an archive: a plain one with seeks, so that listing it reads next to nothing; others as a stream."""
    compression = compression_of(path)
    if compression == "none":
        with tarfile.open(path, "r:") as tar:
            yield tar
    else:
        with _open_stream(path, "rb", compression) as stream, tarfile.open(fileobj=stream, mode="r|") as tar:
            yield tar
            while stream.read(1 << 20):  # a compressed stream's own checksum is at its end
                pass


def _check(info: tarfile.TarInfo, path: Path) -> str:
    """Return a member's name without a leading ./, once the member is known to be harmless."""
    name = info.name.removeprefix("./").rstrip("/")
    if info.name.startswith("/") or ".." in info.name.split("/"):
        raise ArchiveError(f"{path}: member {info.name!r} climbs out of the archive")
    if info.issym() or info.islnk():
        if _ALLOWED_LINKS.get(name) != info.linkname or not info.issym():
            raise ArchiveError(f"{path}: member {info.name!r} is a link to {info.linkname!r}")
    elif not (info.isreg() or info.isdir()):
        raise ArchiveError(f"{path}: member {info.name!r} is neither a file nor a directory")
    return name


def _check_end(last: tarfile.TarInfo | None, path: Path) -> None:
    """Notice a plain tar that was cut between two members: its end-of-archive block is missing (tar(5))."""
    if last is None:
        raise ArchiveError(f"{path} is empty")
    if compression_of(path) == "none":
        end = last.offset_data + (-(-last.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE if last.isreg() else 0)
        with path.open("rb") as file:
            file.seek(end)
            if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
                raise ArchiveError(f"{path} is truncated after {last.name!r}", hint="use another copy of it")


def read_facts(path: Path) -> ArchiveFacts:
    """Return what an archive tells of its container.

    Raises:
        ArchiveError: if it is damaged, hostile, or no checkpoint archive.
    """
    names: set[str] = set()
    sizes: dict[str, int] = {}
    documents: dict[str, Mapping[str, Any]] = {}
    for member in read_members(path):
        name = member.info.name.removeprefix("./")
        names.add(name)
        if member.image_name:
            sizes[member.image_name] = member.info.size
        if name in _DOCUMENTS and member.data is not None:
            documents[name] = _document(member, path)
    if not sizes or "config.dump" not in documents:
        raise ArchiveError(f"{path} is no checkpoint archive: it has no config.dump or no checkpoint/")
    config = documents["config.dump"]
    annotations = documents.get("spec.dump", {}).get("annotations") or {}
    container = container_ref(
        {str(key): str(value) for key, value in annotations.items()} if isinstance(annotations, Mapping) else {},
        container_id=str(config.get("id", "")),
        runtime="",
        bundle="",
    )
    engine = container.engine or _engine_by_members(names)
    return ArchiveFacts(
        container=ContainerRef(
            id=container.id,
            engine=engine,
            name=container.name or str(config.get("name", "")),
            pod_name=container.pod_name,
            pod_namespace=container.pod_namespace,
        ),
        image=str(config.get("rootfsImageName") or config.get("rootfsImageRef") or ""),
        runtime=str(config.get("runtime") or config.get("ociRuntime") or ""),
        created=str(config.get("checkpointedTime") or config.get("createdTime") or ""),
        sizes=sizes,
    )


def _engine_by_members(names: set[str]) -> str:
    if "status.dump" in names:
        return "containerd"
    return "cri-o" if "bind.mounts" in names or "io.kubernetes.cri-o.LogPath" in names else "podman"


def _document(member: Member, path: Path) -> Mapping[str, Any]:
    if member.data is None or member.info.size > _MAX_DOCUMENT_BYTES:
        raise ArchiveError(f"{path}: {member.info.name} is larger than {_MAX_DOCUMENT_BYTES} bytes")
    try:
        value = json.loads(member.data.read())
    except (ValueError, RecursionError) as error:
        raise ArchiveError(f"{path}: {member.info.name} is not JSON: {error}") from error
    if not isinstance(value, Mapping):
        raise ArchiveError(f"{path}: {member.info.name} is not a JSON object")
    return value


@contextlib.contextmanager
def write_archive(path: Path, compression: str) -> Iterator[tarfile.TarFile]:
    """Write a new archive to `path`; it is complete once the context ends without an error."""
    if compression == "none":
        with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
            yield tar
    else:
        stream = _open_stream(path, "wb", compression)
        with stream, tarfile.open(fileobj=stream, mode="w|", format=tarfile.PAX_FORMAT) as tar:
            yield tar


def _open_stream(path: Path, mode: Literal["rb", "wb"], compression: str) -> IO[bytes]:
    opened = gzip.open(path, mode, 1) if compression == "gzip" else zstd.open(path, mode)  # noqa: SIM115 - by callers
    return cast("IO[bytes]", opened)
