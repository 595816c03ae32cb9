"""Checkpoint images: an archive as the one layer of an OCI image that CRI-O, containerd and podman restore from.

Each of them recognizes such an image by an annotation of the manifest. The names are from checkpointctl
(lib/annotations.go, which containerd uses), CRI-O (internal/annotations) and podman (libpod/define/annotations.go).
"""

import contextlib
import hashlib
import platform
import queue
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from ocihook.archive.repack import (
    Inspection,
    inspect_archive,
    memory_bytes,
    pack_archive,
    place_to_read,
    scratch_directory,
    unpack_archive,
    verify_archive,
)
from ocihook.container.engine_archive import compression_of, content_digest
from ocihook.errors import ConfigError, OutputExists
from ocihook.linux.files import sync_directory
from ocihook.packs.pages import Progress, no_progress
from ocihook.registry.client import Access, Reference, Repository
from ocihook.registry.layout import (
    Blob,
    Image,
    is_layout,
    make_image,
    read_layout,
    write_layout,
    write_layout_archive,
)
from ocihook.store.store import Store

_CRIO_NAME = "io.kubernetes.cri-o.annotations.checkpoint.name"
_PODMAN = "io.podman.annotations.checkpoint."
_CHECKPOINTCTL = "org.criu.checkpoint."
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}  # the kernel's names and Go's
_RFC_3339 = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|[+-]\d\d:\d\d)")
_CONNECTIONS = 4


class Built(NamedTuple):
    """An image that was written."""

    digest: str
    size_bytes: int  # of all its blobs
    annotations: Mapping[str, str]


class PushedBlob(NamedTuple):
    """A blob of an image that is in a registry now."""

    digest: str
    size_bytes: int
    is_sent: bool  # else the registry had it already


class Pushed(NamedTuple):
    """An image that was pushed."""

    reference: Reference
    digest: str
    blobs: list[PushedBlob]


class ThinRule(NamedTuple):
    """What to do with an archive whose memory is in a store."""

    is_kept: bool  # for nodes that have the same store; else the image gets the memory, too
    store: Store
    workers: int


def work_bytes(source: Path, *, is_verified: bool = True) -> int:
    """Return the total bytes of progress when an image is built from a source, or a source is pushed.

    The arguments are those of `build_image`.

    Raises:
        OcihookError: if it is damaged.
    """
    if is_layout(source):
        return sum(blob.size_bytes for blob in read_layout(source).blobs)
    passes = 2 if compression_of(source) == "none" else 3  # a compressed one is read twice: it has two digests
    return passes * source.stat().st_size + (memory_bytes(source) if is_verified else 0)


def build_image(
    source: Path,
    target: Path,
    *,
    in_one_file: bool,
    name: str,
    thin: ThinRule,
    is_verified: bool = True,
    progress: Progress = no_progress,
) -> Built:
    """Write an OCI image from a checkpoint archive.

    Args:
        source: the archive.
        target: a new directory for an image layout, or a new file for one in a tar.
        in_one_file: whether it is a tar.
        name: REPOSITORY:TAG, for imports; "" for none.
        thin: what to do with a thin archive.
        is_verified: whether the archive is first verified, to its last byte.
        progress: gets the bytes done, of `work_bytes`.

    Raises:
        OcihookError: if the archive is damaged, or the target exists; nothing is left of it then.
    """
    if name:
        Reference.parse(name)
    if target.exists():
        raise OutputExists(f"{target} exists", hint="name another output")
    parent = target.absolute().parent
    with scratch_directory(parent) as scratch, _image_of(source, parent, thin, is_verified, progress) as image:
        made = scratch / "image"
        if in_one_file:
            write_layout_archive(image, made, name, progress)
        else:
            made.mkdir(mode=0o700)  # memory is written there
            write_layout(image, made, name, progress)
        made.rename(target)
        sync_directory(parent)
        annotations = image.documents()["annotations"]
        return Built(image.manifest.digest, sum(blob.size_bytes for blob in image.blobs), annotations)


def push_image(
    source: Path,
    reference: Reference,
    access: Access,
    *,
    thin: ThinRule,
    is_verified: bool = True,
    progress: Progress = no_progress,
) -> Pushed:
    """Push an image layout, one in a tar, or the image of a checkpoint archive; blobs that exist are not sent again.

    An archive is verified first, if requested; of an image the registry compares the digests.

    Raises:
        OcihookError: if the source is damaged, or the registry fails; the tag then names what it named before.
    """
    if reference.digest:
        raise ConfigError(f"{reference} has a digest, which is not for the pusher to choose", hint="name a tag")
    reference = reference._replace(tag=reference.tag or "latest")
    repository = Repository(reference.registry, reference.repository, access)
    with contextlib.ExitStack() as stack:
        if is_layout(source):
            image = read_layout(source)
        else:
            image = stack.enter_context(_image_of(source, place_to_read(source), thin, is_verified, progress))
        blobs = _push_blobs(repository, image.blobs, progress)
        assert image.manifest.data is not None
        digest = repository.put_manifest(reference.tag, image.manifest.data)
    return Pushed(reference, digest, blobs)


def _push_blobs(repository: Repository, blobs: list[Blob], progress: Progress) -> list[PushedBlob]:
    """Push blobs, several at once; the threads end with the process, so that an interrupted one does not wait."""
    waiting: queue.SimpleQueue[Blob] = queue.SimpleQueue()
    done: queue.SimpleQueue[PushedBlob | BaseException] = queue.SimpleQueue()

    def push() -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                blob = waiting.get_nowait()
                try:
                    done.put(PushedBlob(blob.digest, blob.size_bytes, _push_blob(repository, blob, progress)))
                except BaseException as error:  # noqa: BLE001 - raised where it is waited for
                    done.put(error)
                    return

    for blob in sorted(blobs, key=lambda blob: -blob.size_bytes):
        waiting.put(blob)
    for _ in range(min(_CONNECTIONS, len(blobs))):
        threading.Thread(target=push, daemon=True).start()
    pushed = []
    for _ in blobs:
        result = done.get()
        if isinstance(result, BaseException):
            with contextlib.suppress(queue.Empty):
                while True:
                    waiting.get_nowait()
            raise result
        pushed.append(result)
    return pushed


def _push_blob(repository: Repository, blob: Blob, progress: Progress) -> bool:
    if blob.data is not None:
        return repository.upload_bytes(blob.data, progress=progress)
    assert blob.path is not None
    return repository.upload_file(
        blob.path, blob.digest, start=blob.offset, size_bytes=blob.size_bytes, progress=progress
    )


@contextlib.contextmanager
def _image_of(
    source: Path,
    place: Path,
    thin: ThinRule,
    is_verified: bool,  # noqa: FBT001 - the only one
    progress: Progress,
) -> Iterator[Image]:
    """Yield the image of an archive. Its layer is the archive itself; of a thin one, what is made of it in `place`."""
    inspection = inspect_archive(source)
    with contextlib.ExitStack() as stack:
        archive = source
        if inspection.thin and not thin.is_kept:
            archive = stack.enter_context(scratch_directory(place)) / "complete"
            stored = thin.store.open(inspection.thin.domain).read(inspection.thin.checkpoint_id)
            complete = pack_archive if stored.gpu else unpack_archive  # plain if it can be
            # Every page is verified on the way.
            complete(source, archive, compression="none", force=False, workers=thin.workers, store=thin.store)
        elif is_verified:
            shown = no_progress if inspection.thin else progress
            verify_archive(source, workers=thin.workers, store=thin.store, progress=shown)
        yield _make_image(inspection, archive, progress)


def _make_image(inspection: Inspection, archive: Path, progress: Progress) -> Image:
    compression = compression_of(archive)
    diff_id = content_digest(archive, progress)
    digest = diff_id if compression == "none" else _file_digest(archive, progress)
    layer = Blob(digest, archive.stat().st_size, path=archive)
    host = inspection.manifest.host if inspection.manifest else {}
    machine = host.get("machine") or platform.machine()
    created = inspection.facts.created
    return make_image(
        layer,
        compression,
        diff_id,
        annotations=annotations_of(inspection),
        architecture=_ARCHITECTURES.get(machine, machine),
        created=created if _RFC_3339.fullmatch(created) else "",
    )


def _file_digest(path: Path, progress: Callable[[int], object]) -> str:
    hasher = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            hasher.update(piece)
            progress(len(piece))
    return f"sha256:{hasher.hexdigest()}"


def annotations_of(inspection: Inspection) -> dict[str, str]:
    """Return the annotations by which engines and checkpointctl recognize the image of a checkpoint."""
    facts = inspection.facts
    container = facts.container
    name = container.name or container.id
    found = {
        f"{_CHECKPOINTCTL}engine.name": container.engine,
        f"{_CHECKPOINTCTL}container.name": name,
        f"{_CHECKPOINTCTL}pod.name": container.pod_name,
        f"{_CHECKPOINTCTL}pod.namespace": container.pod_namespace,
        f"{_CHECKPOINTCTL}rootfsImageUserRequested": str(facts.config.get("rootfsImage") or ""),
        f"{_CHECKPOINTCTL}rootfsImageName": str(facts.config.get("rootfsImageName") or ""),
        f"{_CHECKPOINTCTL}rootfsImageID": str(facts.config.get("rootfsImageRef") or ""),
        f"{_CHECKPOINTCTL}runtime.name": facts.runtime,
        _CRIO_NAME: name,
        "org.opencontainers.image.created": facts.created if _RFC_3339.fullmatch(facts.created) else "",
    }
    if container.engine == "podman":  # podman takes any image with a runtime's name for one of its own checkpoints
        found |= {f"{_PODMAN}name": name, f"{_PODMAN}runtime.name": facts.runtime}
    return {key: value for key, value in found.items() if value}
