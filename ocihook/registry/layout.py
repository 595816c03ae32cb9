"""OCI images as files: a layout directory, or the same in one tar ("oci-archive").

https://github.com/opencontainers/image-spec, version 1.1: image-layout.md, manifest.md, config.md.
"""

import hashlib
import io
import json
import os
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ocihook.errors import ArchiveDamaged, ArchiveError
from ocihook.linux.files import create_private, sync_directory
from ocihook.tar import READ_ERRORS, Tar

MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
CONFIG_TYPE = "application/vnd.oci.image.config.v1+json"
LAYER_TYPES: Mapping[str, str] = {
    "none": "application/vnd.oci.image.layer.v1.tar",
    "gzip": "application/vnd.oci.image.layer.v1.tar+gzip",
    "zstd": "application/vnd.oci.image.layer.v1.tar+zstd",
}
_MARKER = "oci-layout"
_INDEX = "index.json"
_REF_NAME = "org.opencontainers.image.ref.name"
_CONTAINERD_NAME = "io.containerd.image.name"  # `ctr images import` names the image by it
_MAX_DOCUMENT_BYTES = 4 << 20
_COPY_BYTES = 1 << 20

# What reading malformed documents, and tars, raises.
_READ_ERRORS = (*READ_ERRORS, AttributeError, TypeError, RecursionError)

Progress = Callable[[int], object]


class Blob(NamedTuple):
    """Content of an image: bytes in memory, or a part of a file."""

    digest: str
    size_bytes: int
    data: bytes | None = None
    path: Path | None = None
    offset: int = 0

    @classmethod
    def of(cls, data: bytes) -> "Blob":
        """Return small content as a blob."""
        return cls(f"sha256:{hashlib.sha256(data).hexdigest()}", len(data), data)

    def pieces(self) -> Iterator[bytes]:
        """Yield the content.

        Raises:
            ArchiveError: if the file has become shorter.
        """
        if self.data is not None:
            yield self.data
            return
        assert self.path is not None
        with self.path.open("rb") as file:
            file.seek(self.offset)
            left_bytes = self.size_bytes
            while left_bytes:
                piece = file.read(min(_COPY_BYTES, left_bytes))
                if not piece:
                    raise ArchiveDamaged(
                        f"{self.path} ends {left_bytes} bytes too early", hint="use another copy of it"
                    )
                left_bytes -= len(piece)
                yield piece


class Image(NamedTuple):
    """One image: its manifest, and the blobs that the manifest names."""

    manifest: Blob
    blobs: list[Blob]

    def documents(self) -> dict[str, Any]:
        """Return the manifest."""
        assert self.manifest.data is not None
        value: dict[str, Any] = json.loads(self.manifest.data)
        return value


def make_image(
    layer: Blob, compression: str, diff_id: str, *, annotations: Mapping[str, str], architecture: str, created: str
) -> Image:
    """Return an image of one layer; the same input makes the same image.

    Args:
        layer: a tar.
        compression: of the layer: none, gzip or zstd.
        diff_id: the digest of the layer without compression.
        annotations: of the manifest.
        architecture: as Go names it.
        created: time in the form of RFC 3339, or "".
    """
    config = Blob.of(
        _json(
            {
                **({"created": created} if created else {}),
                "architecture": architecture,
                "os": "linux",
                "config": {},
                "rootfs": {"type": "layers", "diff_ids": [diff_id]},
                "history": [{**({"created": created} if created else {}), "created_by": "ocihook image build"}],
            }
        )
    )
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "config": _descriptor(config, CONFIG_TYPE),
        "layers": [_descriptor(layer, LAYER_TYPES[compression])],
        "annotations": dict(annotations),
    }
    return Image(Blob.of(_json(manifest)), [config, layer])


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _descriptor(blob: Blob, media_type: str) -> dict[str, Any]:
    return {"mediaType": media_type, "digest": blob.digest, "size": blob.size_bytes}


def _files(image: Image, name: str) -> Iterator[tuple[str, Blob]]:
    """Yield the files of a layout; what makes it one comes last."""
    for blob in (*image.blobs, image.manifest):
        yield f"blobs/{blob.digest.replace(':', '/')}", blob
    annotations = {_REF_NAME: name.rpartition("/")[2].partition(":")[2] or "latest", _CONTAINERD_NAME: name}
    entry = _descriptor(image.manifest, MANIFEST_TYPE) | ({"annotations": annotations} if name else {})
    yield _INDEX, Blob.of(_json({"schemaVersion": 2, "manifests": [entry]}))
    yield _MARKER, Blob.of(_json({"imageLayoutVersion": "1.0.0"}))


def write_layout(image: Image, directory: Path, name: str, progress: Progress) -> None:
    """Write an image into a directory that is new or empty.

    Args:
        image: what to write.
        directory: exists.
        name: of the image, REPOSITORY:TAG, for imports; "" for none.
        progress: gets the bytes written.
    """
    for path, blob in _files(image, name):
        file_path = directory / path
        file_path.parent.mkdir(parents=True, exist_ok=True)
        with create_private(file_path) as file:
            for piece in blob.pieces():
                file.write(piece)
                progress(len(piece))
            file.flush()
            os.fsync(file.fileno())
        sync_directory(file_path.parent)


def write_layout_archive(image: Image, path: Path, name: str, progress: Progress) -> None:
    """Write an image into a new file; the arguments are those of `write_layout`."""
    with create_private(path) as file:
        with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
            for file_name, blob in _files(image, name):
                info = tarfile.TarInfo(file_name)
                info.size = blob.size_bytes
                info.mode = 0o600
                tar.addfile(info, _Reader(blob.pieces(), progress))
        file.flush()
        os.fsync(file.fileno())


class _Reader(io.RawIOBase):
    """Pieces of content that can be read as a file."""

    def __init__(self, pieces: Iterable[bytes], progress: Progress) -> None:
        self._pieces = iter(pieces)
        self._progress = progress
        self._rest = b""

    def read(self, size: int = -1) -> bytes:
        while not self._rest and (piece := next(self._pieces, b"")):
            self._rest = piece
        data, self._rest = (self._rest, b"") if size < 0 else (self._rest[:size], self._rest[size:])
        self._progress(len(data))
        return data


def is_layout(path: Path) -> bool:
    """Return whether a path is to be read as an OCI image: every directory is, and a tar that says so."""
    if path.is_dir():
        return True
    try:
        with path.open("rb") as file:
            return any(info.name.removeprefix("./") == _MARKER for info in Tar(file, is_stream=False))
    except _READ_ERRORS:
        return False


def read_layout(path: Path) -> Image:
    """Return the one image of a layout: a directory or a tar. Its blobs are where they were; the manifest is verified.

    Raises:
        ArchiveError: if it is malformed, or has more than one image.
    """
    try:
        find = _in_directory(path) if path.is_dir() else _in_archive(path)
        index = json.loads(_content(find(_INDEX)))
        entries = index["manifests"]
        if len(entries) != 1 or entries[0]["mediaType"] != MANIFEST_TYPE:
            raise ArchiveError(f"{path} has not just one image", hint="copy the one that is meant, with skopeo")
        manifest = _verified(find, entries[0])
        value = json.loads(_content(manifest))
        descriptors = {entry["digest"]: entry for entry in (value["config"], *value["layers"])}
        blobs = [_found(find, entry) for entry in descriptors.values()]
    except _READ_ERRORS as error:
        raise ArchiveError(f"{path} is no OCI image layout, or damaged: {error!r}") from error
    return Image(manifest, blobs)


_Find = Callable[[str], Blob]


def _in_directory(directory: Path) -> _Find:
    def find(name: str) -> Blob:
        path = directory / name
        if not path.is_file():
            raise ArchiveDamaged(f"{directory} has no {name}", hint="use another copy of it")
        return Blob("", path.stat().st_size, path=path)

    return find


def _in_archive(path: Path) -> _Find:
    with path.open("rb") as file:
        places = {
            info.name.removeprefix("./"): (info.size, info.offset_data)
            for info in Tar(file, is_stream=False)
            if info.isreg() and not info.issparse()
        }

    def find(name: str) -> Blob:
        if name not in places:
            raise ArchiveDamaged(f"{path} has no {name}", hint="use another copy of it")
        size_bytes, offset = places[name]
        return Blob("", size_bytes, path=path, offset=offset)

    return find


def _found(find: _Find, descriptor: Mapping[str, Any]) -> Blob:
    algorithm, _, value = str(descriptor["digest"]).partition(":")
    if not (algorithm.isalnum() and value.isalnum()):
        raise ValueError(f"{descriptor['digest']!r} is no digest")
    blob = find(f"blobs/{algorithm}/{value}")
    if blob.size_bytes != descriptor["size"]:
        raise ValueError(f"{descriptor['digest']} has {blob.size_bytes} bytes, not {descriptor['size']}")
    return blob._replace(digest=f"{algorithm}:{value}")


def _content(blob: Blob) -> bytes:
    if blob.size_bytes > _MAX_DOCUMENT_BYTES:
        raise ValueError(f"a document of {blob.size_bytes} bytes")
    return b"".join(blob.pieces())


def _verified(find: _Find, descriptor: Mapping[str, Any]) -> Blob:
    data = _content(_found(find, descriptor))
    blob = Blob.of(data)
    if blob.digest != descriptor["digest"]:
        raise ValueError(f"{descriptor['digest']} is something else")
    return blob
