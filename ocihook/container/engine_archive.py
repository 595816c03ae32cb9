"""The checkpoint archives of podman, containerd and CRI-O: one tar, plain or compressed, read as hostile input.

All three keep CRIU's image set flat below `checkpoint/`, and beside it config.dump and spec.dump (JSON).
"""

import contextlib
import gzip
import hashlib
import io
import json
import math
import re
import sys
import tarfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, cast

from ocihook.container.descriptors import DESCRIPTORS, MAX_DESCRIPTORS_BYTES, check_descriptors
from ocihook.container.identity import container_ref
from ocihook.errors import ArchiveDamaged, ArchiveError, IdentificationError, IntegrityError
from ocihook.model import ContainerRef
from ocihook.tar import MAX_MEMBER_BYTES, READ_ERRORS, Tar, hole_bytes

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

COMPRESSIONS = ("none", "gzip", "zstd")
IMAGE_DIRECTORY = "checkpoint/"
_IMAGE_NAME = re.compile(r"checkpoint/([A-Za-z0-9_@][A-Za-z0-9_@.:-]{0,249})")
_PAGES_NAME = re.compile(r"pages-[0-9]{1,10}\.img")
_DOCUMENTS = ("config.dump", "spec.dump")
_MAX_DOCUMENT_BYTES = 4 << 20  # some dozens of KiB, really; read as JSON they take up to 25 times as much
# Zeros that a sparse file (tar -S) stands for and an archive does not have, but those of page images: they are compared
# with pagemaps (archive/repack.py).
_MAX_HOLE_BYTES = 1 << 30
_MAX_BEHIND_END_BYTES = 16 << 20  # zeros that fill the last record of a tar
# The one link that an engine makes: podman's --with-previous, to the images of an earlier pre-dump.
_ALLOWED_LINKS = {"checkpoint/parent": "../pre-checkpoint"}
_READ_ERRORS = (*READ_ERRORS, zstd.ZstdError, gzip.BadGzipFile, zlib.error)


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
        with _errors_told(self._where):
            data = self._file.read(self._left_bytes if size < 0 else min(size, self._left_bytes))
        if not data and self._left_bytes and size:
            raise _damaged(self._where, "unexpected end")
        self._left_bytes -= len(data)
        return data


@contextlib.contextmanager
def _errors_told(where: str) -> Iterator[None]:
    try:
        yield
    except _READ_ERRORS as error:
        raise _damaged(where, error) from error


def _damaged(where: str, why: object) -> ArchiveDamaged:
    return ArchiveDamaged(f"{where} is truncated or damaged: {why}", hint="use another copy of it")


class Member(NamedTuple):
    """One member of an archive that has passed all checks."""

    info: tarfile.TarInfo
    name: str  # without . and empty components
    image_name: str  # its file name, if it is a file of the image set, else ""
    offset: int | None  # of its bytes in the archive; None where they do not lie there as they are
    data: MemberData | None  # None for what is not a regular file

    def content(self, limit_bytes: int) -> bytes:
        """Return all of a small file.

        Raises:
            ArchiveError: if it is not a file, or larger than the limit.
        """
        if self.data is None or self.info.size > limit_bytes:
            raise ArchiveError(f"member {self.name!r} is not a file of at most {limit_bytes} bytes")
        return self.data.read()


class ArchiveFacts(NamedTuple):
    """What an archive says of its container."""

    container: ContainerRef
    image: str
    runtime: str
    created: str
    sizes: Mapping[str, int]  # of every file in the image set
    config: Mapping[str, str]  # of config.dump what is text: of many archives all is in memory at a time
    annotations: Mapping[str, str] = {}  # of the container
    image_id: str = ""  # that the container was made from, where the engine asks for this very one: podman
    checkpoint: str = ""  # id by which the runtime handler restores it, where the reader has looked for it


def compression_of(path: Path) -> str:
    """Return which of COMPRESSIONS a file has, by its first bytes.

    Raises:
        ArchiveError: if it is no file: a FIFO would keep its reader waiting.
    """
    if path.exists() and not path.is_file():
        raise ArchiveError(f"{path} is not a file")
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
    is_plain = compression_of(path) == "none"
    seen: set[str] = set()
    holes = 0
    with _errors_told(str(path)), _open(path) as tar:
        for info in tar:
            name = _check(info, path)
            if name in seen:
                raise ArchiveError(f"{path}: member {name!r} occurs twice")
            seen.add(name)
            match = _IMAGE_NAME.fullmatch(name)
            image_name = match[1] if match and info.isreg() else ""
            holes += 0 if _PAGES_NAME.fullmatch(image_name) else hole_bytes(info)
            if holes > _MAX_HOLE_BYTES:
                raise ArchiveError(f"{path}: sparse files stand for more than {_MAX_HOLE_BYTES} bytes of zeros")
            file = tar.extractfile(info) if info.isreg() else None
            data = MemberData(file, info.size, f"{path}: {name!r}") if file is not None else None
            if image_name == DESCRIPTORS and data is not None:
                data = _checked_descriptors(data, path)
            offset = info.offset_data if is_plain and not info.issparse() else None
            _fill_holes(info)
            yield Member(info, name, image_name, offset, data)


@contextlib.contextmanager
def _open(path: Path) -> Iterator[Tar]:
    """Open an archive: a plain one with seeks, so that listing it reads next to nothing; others as a stream."""
    compression = compression_of(path)
    with path.open("rb") if compression == "none" else _open_stream(path, "rb", compression) as file:
        try:
            tar = Tar(file, is_stream=compression != "none")
        except _READ_ERRORS as error:
            raise ArchiveError(f"{path} is not a tar archive, or damaged at its start: {error}") from error
        yield tar
        if compression != "none":
            _read_to_end(file, path)


def _read_to_end(stream: IO[bytes], path: Path) -> None:
    """Read what is behind the end of a tar: a compressed stream's own checksum is there."""
    left_bytes = _MAX_BEHIND_END_BYTES
    while data := stream.read(1 << 20):
        left_bytes -= len(data)
        if left_bytes < 0:
            raise ArchiveError(f"{path} goes on for more than {_MAX_BEHIND_END_BYTES} bytes behind its end")


def _check(info: tarfile.TarInfo, path: Path) -> str:
    """Return a member's name, spelled in one way only, once the member is known to be harmless."""
    parts = [part for part in info.name.split("/") if part not in ("", ".")]
    name = "/".join(parts)
    if info.name.startswith("/") or ".." in parts:
        raise ArchiveError(f"{path}: member {info.name!r} climbs out of the archive")
    if info.issym() or info.islnk():
        if _ALLOWED_LINKS.get(name) != info.linkname or not info.issym():
            raise ArchiveError(f"{path}: member {info.name!r} is a link to {info.linkname!r}")
    elif not (info.isreg() or info.isdir()):
        raise ArchiveError(f"{path}: member {info.name!r} is neither a file nor a directory")
    elif not 0 <= info.size < MAX_MEMBER_BYTES or not math.isfinite(info.mtime) or (info.isreg() and not name):
        raise ArchiveError(f"{path}: member {info.name!r} has an impossible size, time or name")
    if not all(key.isprintable() for key in info.pax_headers):
        raise ArchiveError(f"{path}: member {info.name!r} has an attribute without a proper name")
    return name


def _checked_descriptors(data: MemberData, path: Path) -> MemberData:
    """Return the content of `descriptors.json`, which the runtime reads before any script is called."""
    content = data.read(MAX_DESCRIPTORS_BYTES + 1)
    try:
        check_descriptors(content)
    except IntegrityError as error:
        raise ArchiveError(f"{path}: {error.args[0]}", hint=error.hint) from error
    return MemberData(io.BytesIO(content), len(content), f"{path}: {DESCRIPTORS}")


def _fill_holes(info: tarfile.TarInfo) -> None:
    """Make the header of a sparse file (tar -S; no engine writes one) that of the same file with its zeros."""
    if info.issparse():
        info.type, info.sparse = tarfile.REGTYPE, None
        headers = {key: value for key, value in info.pax_headers.items() if not key.startswith("GNU.sparse.")}
        info.pax_headers = {key: value for key, value in headers.items() if key not in ("path", "size")}


def _pass_by(_member: Member) -> None:
    pass


def read_facts(path: Path, visit: Callable[[Member], object] = _pass_by) -> ArchiveFacts:
    """Return what an archive says of its container; `visit` gets every other member on the way.

    Raises:
        ArchiveError: if it is damaged, hostile, or not a checkpoint archive.
    """
    names: set[str] = set()
    sizes: dict[str, int] = {}
    documents: dict[str, Mapping[str, Any]] = {}
    for member in read_members(path):
        names.add(member.name)
        if member.image_name:
            sizes[member.image_name] = member.info.size
        if member.name in _DOCUMENTS and member.data is not None:
            documents[member.name] = _document(member, path)
        else:
            visit(member)
    if not sizes or "config.dump" not in documents:
        raise ArchiveError(f"{path} is not a checkpoint archive: it has no config.dump or no checkpoint/")
    config = documents["config.dump"]
    said = documents.get("spec.dump", {}).get("annotations")
    annotations = {str(key): str(value) for key, value in said.items()} if isinstance(said, Mapping) else {}
    try:
        container = container_ref(
            annotations,
            container_id=str(config.get("id", "")),
            runtime="",
            bundle="",
        )
    except IdentificationError as error:
        raise ArchiveError(f"{path}: {error.args[0]}") from error
    engine = container.engine or _engine_by_members(names)
    return ArchiveFacts(
        container=ContainerRef(
            id=container.id,
            engine=engine,
            name=container.name or str(config.get("name", "")),
            pod_name=container.pod_name,
            pod_namespace=container.pod_namespace,
            owner=container.owner,
        ),
        image=str(config.get("rootfsImageName") or config.get("rootfsImageRef") or ""),
        runtime=str(config.get("runtime") or config.get("ociRuntime") or ""),
        created=str(config.get("checkpointedTime") or config.get("createdTime") or ""),
        sizes=sizes,
        config={key: value for key, value in config.items() if isinstance(value, str)},
        annotations=annotations,
        image_id=str(config.get("rootfsImageID") or "") if engine == "podman" else "",
    )


def read_document(path: Path, name: str) -> Mapping[str, Any]:
    """Return config.dump or spec.dump of an archive: how an engine had configured the container, in its own words.

    Raises:
        ArchiveError: if the archive is damaged, hostile, or does not have it.
    """
    for member in read_members(path):
        if member.name == name and member.data is not None:
            return _document(member, path)
    raise ArchiveError(f"{path} is not a checkpoint archive: it has no {name}")


def _engine_by_members(names: set[str]) -> str:
    if "status.dump" in names:
        return "containerd"
    return "cri-o" if "bind.mounts" in names or "io.kubernetes.cri-o.LogPath" in names else "podman"


def _document(member: Member, path: Path) -> Mapping[str, Any]:
    try:
        value = json.loads(member.content(_MAX_DOCUMENT_BYTES))
    except (ValueError, RecursionError) as error:
        raise ArchiveError(f"{path}: {member.name} is not JSON: {error}") from error
    if not isinstance(value, Mapping):
        raise ArchiveError(f"{path}: {member.name} is not a JSON object")
    return value


def content_digest(path: Path, progress: Callable[[int], object]) -> str:
    """Return the SHA-256 of an archive without its compression; progress is called with the bytes of the file read.

    Raises:
        ArchiveError: if its compression is damaged.
    """
    hasher = hashlib.sha256()
    with path.open("rb") as file, _errors_told(str(path)):
        compression = compression_of(path)
        stream = file if compression == "none" else _decompressed(file, compression)
        reported = 0
        while piece := stream.read(1 << 20):
            hasher.update(piece)
            progress(file.tell() - reported)
            reported = file.tell()
    return f"sha256:{hasher.hexdigest()}"


def decompress(path: Path, target: Path, max_bytes: int) -> Path:
    """Write a compressed file anew without its compression; return the new one.

    Raises:
        ArchiveError: if it is damaged, or takes more bytes than it may.
        OSError: from the file system, a full one included.
    """
    with path.open("rb") as file, target.open("xb") as plain, _errors_told(str(path)):
        stream = _decompressed(file, compression_of(path))
        while piece := stream.read(1 << 20):
            if plain.tell() + len(piece) > max_bytes:
                raise ArchiveError(f"{path.name} takes more than {max_bytes} bytes without its compression")
            plain.write(piece)
    return target


def _decompressed(file: IO[bytes], compression: str) -> IO[bytes]:
    return cast("IO[bytes]", gzip.open(file) if compression == "gzip" else zstd.open(file))


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
