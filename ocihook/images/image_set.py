"""Packs and unpacks an image set: what a dump, a restore and `ocihook archive` all do.

The manifest decides. While there is none, the page images are the checkpoint and packs are rubbish; once there is
one, the packs are the checkpoint and leftover page images are rubbish. So an interruption at any point is put
right by `finish_packing`, without knowing where it was.
"""

import errno
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from ocihook import __version__
from ocihook.criu.images import check_named, check_page_images, check_page_sizes, page_images, read_pagemaps
from ocihook.criu.mappings import check_mapped
from ocihook.errors import IntegrityError, OcihookError, StoreFull
from ocihook.linux.files import create_private, sync_directory, sync_file
from ocihook.linux.memory import available_bytes
from ocihook.linux.patience import ENDLESS, Patience
from ocihook.linux.workers import call_each
from ocihook.model import ContainerRef
from ocihook.packs.pack import PackFile, PackInfo
from ocihook.packs.packed_manifest import (
    DESCRIPTORS_NAME,
    MANIFEST_NAME,
    PACK_NAME,
    PACK_PREFIX,
    REGION_PACK_PREFIX,
    OtherImage,
    PackedImage,
    PackedManifest,
    PackedRegion,
    digest_file,
    read_manifest,
    write_manifest,
)
from ocihook.packs.packing import pack_images
from ocihook.packs.pages import Parts, Progress, Target, no_progress
from ocihook.packs.runs import ALL
from ocihook.packs.unpacking import Packs
from ocihook.store.stored_manifest import StoredRegion
from ocihook.store.thin import THIN_NAME

_SPACE_MARGIN_BYTES = 16 << 20
_COPY_BYTES = 8 << 20  # at a time
_NOWHERE_ELSE: Mapping[str, PackFile] = MappingProxyType({})


class MovedRegions(NamedTuple):
    """Memory that went from processes into packs before CRIU began, and what the container had of GPUs."""

    regions: tuple[PackedRegion, ...]
    packs: tuple[PackInfo, ...]
    gpu: Mapping[str, Any]
    images: tuple[PackedImage, ...] = ()  # page images of which CRIU has written a part, at most; wholly in the packs


def pack_image_set(  # noqa: PLR0913 - what is packed, what is said of it, and how
    directory: Path,
    *,
    container: ContainerRef,
    host: Mapping[str, str],
    workers: int,
    durable: bool,
    moved: MovedRegions | None = None,
    with_images: bool = True,
    patience: Patience = ENDLESS,
    progress: Progress = no_progress,
) -> PackedManifest | None:
    """Replace the page images in `directory` by packs and a manifest; None if there is nothing to pack.

    Page images go only when everything else is complete. If this fails, they are as they were.

    Args:
        directory: an image set that CRIU has finished. Packs and manifest in it are of an earlier dump into the
            same directory, and are discarded once the images have been found complete.
        container: recorded in the manifest.
        host: recorded in the manifest.
        workers: processes to use.
        durable: return only when the packs, and the images that are not packed, are on stable storage.
        moved: memory that is in packs already; the image set is complete only with it.
        with_images: else page images stay as they are, and the manifest is about the moved memory alone.
        patience: how long the caller waits for it.
        progress: called with the bytes of image done.

    Raises:
        ImageError: if CRIU's images are incomplete.
        StoreFull: if there is no space for the packs.
        OcihookError: on anything else that makes packing impossible.
    """
    images = moved.images if moved else ()
    # First: without page images, the packs are the only copy of the memory.
    check_page_images(directory, {image.name: image.size_bytes for image in images})
    discard_packs(directory)
    names = list_packable(directory, images)
    if not with_images or not any(_size(directory / name) for name in names):
        names = []
    if not names and moved is None:
        return None
    try:
        packed, packs = pack_images(
            directory,
            names,
            prefix=PACK_PREFIX,
            workers=workers,
            durable=durable,
            patience=patience,
            progress=progress,
        )
        manifest = PackedManifest(
            created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            writer=f"ocihook {__version__}",
            container=container,
            host=host,
            packed_images=tuple(packed) + images,
            other_images=tuple(list_other_images(directory, packed_names={*names, *(image.name for image in images)})),
            packs=tuple(packs) + (moved.packs if moved else ()),
            regions=moved.regions if moved else (),
            gpu=moved.gpu if moved else {},
        )
        if durable:
            for image in manifest.other_images:
                sync_file(directory / image.name)
            sync_directory(directory)
        write_manifest(directory, manifest, durable=durable)
    except BaseException as error:
        finish_packing(directory)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StoreFull(
                "no space left to pack the checkpoint's memory; its images are left as CRIU wrote them",
                hint=f"packing needs up to {sum(_size(directory / name) for name in names)} bytes beside the images",
            ) from error
        raise
    finish_packing(directory)
    if durable:
        sync_directory(directory)
    return manifest


def take_in(moved: MovedRegions, source: Path, directory: Path, patience: Patience) -> None:
    """Copy the packs of moved memory from elsewhere into an image set, in place of those of an earlier dump.

    Raises:
        StoreFull: if there is no space for them; none is left.
        OSError: on anything else; likewise.
        GivenUp: if its caller has given up.
    """
    here = {segment.pack for image in moved.images for segment in image.segments}  # read past CRIU (clean_pages.py)
    discard_packs(directory)
    for name in set(_pack_names(directory)) - here:
        (directory / name).unlink(missing_ok=True)

    def copy(name: str) -> None:
        with (source / name).open("rb") as packed, create_private(directory / name) as copied:
            while os.sendfile(copied.fileno(), packed.fileno(), None, _COPY_BYTES):
                pass

    try:
        for outcome in call_each(copy, [pack.name for pack in moved.packs if pack.name not in here], patience):
            if isinstance(outcome, Exception):
                raise outcome
    except BaseException as error:
        discard_regions(directory)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            size = sum(pack.size_bytes for pack in moved.packs)
            raise StoreFull(f"no space left for the checkpoint's GPU memory, which takes {size} bytes") from error
        raise


def list_packable(directory: Path, without: Iterable[PackedImage] = ()) -> list[str]:
    """Return the page images of an image set that a pagemap names, without those that CRIU itself has compressed.

    Args:
        directory: the image set.
        without: page images that are in packs already.

    Raises:
        ImageError: if a pagemap is damaged.
    """
    plain = {pagemap.pages_name for pagemap in read_pagemaps(directory).values() if not pagemap.is_compressed}
    plain -= {image.name for image in without}
    return [name for name in page_images(directory) if name in plain]


def discard_packs(directory: Path) -> None:
    """Remove manifest and packs of page images, the manifest first: without it the packs mean nothing.

    The record of a thin checkpoint is removed, too.
    """
    records = [directory / name for name in (THIN_NAME, MANIFEST_NAME) if os.path.lexists(directory / name)]
    for path in records:
        path.unlink(missing_ok=True)
    if records:  # else a power loss may bring them back without what they refer to
        sync_directory(directory)
    for name in (f"{MANIFEST_NAME}.partial", *_image_packs(directory)):
        (directory / name).unlink(missing_ok=True)


def discard_regions(directory: Path) -> None:
    """Remove packs of moved memory that belong to no manifest: of a dump that failed."""
    if read_manifest(directory) is None:
        for name in _pack_names(directory):
            (directory / name).unlink(missing_ok=True)


def discard_all(directory: Path) -> None:
    """Remove whatever an earlier dump into the same directory has left of ours."""
    discard_packs(directory)
    discard_regions(directory)


def finish_packing(directory: Path) -> None:
    """Repair an image set whose packing was interrupted: complete that, or undo it. May run any time."""
    (directory / f"{MANIFEST_NAME}.partial").unlink(missing_ok=True)
    manifest = read_manifest(directory)
    rubbish = _image_packs(directory) if manifest is None else [image.name for image in manifest.packed_images]
    for name in rubbish:
        (directory / name).unlink(missing_ok=True)


def _pack_names(directory: Path) -> list[str]:
    return sorted(entry.name for entry in os.scandir(directory) if PACK_NAME.fullmatch(entry.name))


def _image_packs(directory: Path) -> list[str]:
    return [name for name in _pack_names(directory) if not name.startswith(REGION_PACK_PREFIX)]


def list_other_images(directory: Path, packed_names: set[str]) -> Iterable[OtherImage]:
    """Yield what CRIU, and the runtime, wrote beside page images, with its digests."""
    for path in (*sorted(directory.glob("*.img")), *directory.glob(DESCRIPTORS_NAME)):
        if path.name not in packed_names and path.is_file() and not path.is_symlink():
            yield OtherImage(path.name, _size(path), digest_file(path))


def _size(path: Path) -> int:
    return os.stat(path, follow_symlinks=False).st_size


def verify_image_set(
    directory: Path,
    *,
    workers: int,
    progress: Progress = no_progress,
    elsewhere: Mapping[str, PackFile] = _NOWHERE_ELSE,
) -> PackedManifest | None:
    """Check every byte of a packed image set; None if it is not packed.

    Args:
        directory: the image set.
        workers: processes to use.
        progress: called with the bytes of image done.
        elsewhere: packs that are not in `directory`, by name.

    Raises:
        IntegrityError: naming what is missing or damaged.
        ImageError: if the packs hold less or more than CRIU's pagemaps say.
    """
    manifest = read_packed(directory, elsewhere=elsewhere)
    if manifest is not None:
        _check_claims(directory, manifest)
        packs = open_packs(directory, manifest, elsewhere=elsewhere)
        try:
            packs.verify(workers=workers, progress=progress)
        finally:
            packs.close()
    return manifest


def rehydrate_image_set(
    directory: Path,
    *,
    with_regions: bool = True,
    only: Mapping[str, Parts] = ALL,
    workers: int,
    patience: Patience = ENDLESS,
    progress: Progress = no_progress,
    elsewhere: Mapping[str, PackFile] = _NOWHERE_ELSE,
) -> list[str]:
    """Verify a packed image set and write its page images into it; return their names ([]: not packed).

    If this fails, no page image is left.

    Args:
        directory: the image set.
        with_regions: verify memory that goes elsewhere, too; else only the tables of its packs, and whoever writes it
            into a process verifies it on the way.
        only: of some page images, by their names, what is to be written, and verified, and where to.
        workers: processes to use.
        patience: how long the caller waits for it.
        progress: called with the bytes done.
        elsewhere: packs that are not in `directory`, by name.

    Raises:
        IntegrityError: naming what is missing or damaged.
        ImageError: if the packs hold less or more than CRIU's pagemaps say.
        StoreFull: if the page images do not fit; nothing has been written then.
    """
    manifest = read_packed(directory, elsewhere=elsewhere)
    if manifest is None:
        return []
    names = [image.name for image in manifest.packed_images]
    need_bytes = sum(only[i.name].size_bytes if i.name in only else i.size_bytes for i in manifest.packed_images)
    _check_claims(directory, manifest)
    packs = open_packs(directory, manifest, elsewhere=elsewhere)
    try:
        dehydrate(directory, names)  # of an earlier attempt
        _check_space(directory, need_bytes)
        packs.rehydrate(
            directory, with_regions=with_regions, only=only, workers=workers, patience=patience, progress=progress
        )
        if not only:
            check_page_images(directory)
    except BaseException as error:
        dehydrate(directory, names)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _no_space(need_bytes, 0) from error
        raise
    finally:
        packs.close()
    return names


def write_packed_parts(
    directory: Path,
    manifest: PackedManifest,
    targets: Mapping[str, Target],
    *,
    workers: int,
    patience: Patience = ENDLESS,
    progress: Progress = no_progress,
) -> None:
    """Write parts of packed page images, by their names, into processes.

    Raises:
        IntegrityError: if a pack is missing or damaged.
        OSError: if a process has not mapped them, or is gone.
    """
    packs = open_packs(directory, manifest)
    try:
        packs.write(targets, workers=workers, patience=patience, progress=progress)
    finally:
        packs.close()


def _check_claims(directory: Path, manifest: PackedManifest) -> None:
    """Compare the sizes that a manifest claims with CRIU's pagemaps, before anything of such a size is read or made."""
    pagemaps = read_pagemaps(directory)
    check_page_sizes(pagemaps, manifest.image_sizes)
    check_named(pagemaps, (image.name for image in manifest.packed_images))
    check_regions(directory, manifest.regions)


def check_regions(directory: Path, regions: Iterable[PackedRegion | StoredRegion]) -> None:
    """Check that memory which went past CRIU is in what its image set says that processes had mapped.

    Raises:
        ImageError: naming memory that is not.
    """
    check_mapped(directory, ((int(r.process.partition("/")[0]), r.start, r.size_bytes) for r in regions))


def region_bytes(manifest: PackedManifest) -> int:
    """Return how many bytes of memory went past CRIU, at least: as they are stored, without zero pages."""
    names = {segment.pack for region in manifest.regions for segment in region.segments}
    return sum(pack.size_bytes for pack in manifest.packs if pack.name in names)


def is_read_twice(regions: Iterable[PackedRegion | StoredRegion]) -> bool:
    """Return whether moved memory is verified before there are processes, and not only while it is written into them.

    It is if the packs fit into memory beside the processes until then: so the disk is read only once.
    """
    return available_bytes() >= 2 * sum(region.size_bytes for region in regions)


def dehydrate(directory: Path, names: Iterable[str]) -> None:
    """Remove page images that were written from packs. May run any time."""
    for name in names:
        (directory / name).unlink(missing_ok=True)


def open_packs(
    directory: Path, manifest: PackedManifest, *, elsewhere: Mapping[str, PackFile] = _NOWHERE_ELSE
) -> Packs:
    """Open the packs that a manifest names, in `directory` or `elsewhere`.

    Raises:
        IntegrityError: if one is missing, or not what the manifest says.
    """
    files = {pack.name: elsewhere.get(pack.name, PackFile(directory / pack.name)) for pack in manifest.packs}
    return Packs((*manifest.packed_images, *manifest.regions), manifest.packs, files)


def read_packed(directory: Path, *, elsewhere: Mapping[str, PackFile] = _NOWHERE_ELSE) -> PackedManifest | None:
    """Return the manifest, once every image that was not packed is what it was; None if nothing is packed.

    Raises:
        IntegrityError: if the manifest or an image is missing or damaged.
    """
    manifest = read_manifest(directory)
    if manifest is None:
        packs = sorted({*_pack_names(directory), *elsewhere})
        if packs:
            raise IntegrityError(
                f"there are packs ({', '.join(packs)}) without a manifest",
                hint="the checkpoint is incomplete; use another copy of it",
            )
        return None
    check_other_images(directory, manifest.other_images)
    return manifest


def check_other_images(directory: Path, images: Iterable[OtherImage]) -> None:
    """Check that images which were not packed are what they were.

    Raises:
        IntegrityError: naming the first that is missing or different.
    """
    for image in images:
        path = directory / image.name
        try:
            is_same = not path.is_symlink() and _size(path) == image.size_bytes and digest_file(path) == image.digest
        except FileNotFoundError as error:
            raise IntegrityError(f"image {image.name} is missing") from error
        if not is_same:
            raise IntegrityError(f"image {image.name} is not what was checkpointed")


def _check_space(directory: Path, need_bytes: int) -> None:
    file_system = os.statvfs(directory)
    free_bytes = file_system.f_bavail * file_system.f_frsize
    if free_bytes < need_bytes + _SPACE_MARGIN_BYTES:
        raise _no_space(need_bytes, free_bytes)


def _no_space(need_bytes: int, free_bytes: int) -> OcihookError:
    return StoreFull(
        f"unpacking the checkpoint needs {need_bytes} bytes, {free_bytes} are free",
        hint="free space where the engine unpacks checkpoints, then restore again",
    )
