"""What a container had when it was stopped, beside its memory: saved for the store, and laid out for a restore.

No engine's archive is made then, so a checkpoint in the store has all of it in one tar, BELONGINGS_NAME:

    facts.json      what of its bundle must be the same where it is restored (runtime/gate.py)
    checkpoint/     CRIU's images, without page images
    rootfs/         what it has changed in its rootfs
    volumes/PLACE/  volumes that end with its pod, by where it has them, quoted as in a URL
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ocihook.belongings.bringing import bring, check_members, read_members
from ocihook.belongings.filesystems import ROOTFS, Rootfs, find_rootfs, places_of
from ocihook.belongings.saving import Writer
from ocihook.belongings.tree import Entry, opened, tree_bytes
from ocihook.config import Settings
from ocihook.errors import IntegrityError, UnsupportedError
from ocihook.linux.files import create_private, identity, replace_file, same_directory
from ocihook.packs.packed_manifest import OtherImage
from ocihook.packs.pages import Progress, no_progress
from ocihook.packs.runs import file_targets
from ocihook.store.assemble import assemble
from ocihook.store.domain import Domain
from ocihook.store.stored_manifest import BELONGINGS_NAME, StoredManifest
from ocihook.store.thin import Thin, write_thin

FACTS_NAME = "facts.json"
IMAGES = "checkpoint"  # as engines call it in their archives
IMAGES_DIR = "images"  # where they are laid out
_CALLED_NAME = "called"  # in the place of a dump: its container runs on; the attempt that its gang calls it to
_REWRITTEN_NAME = "rewritten.json"  # in the place of a restore: CRIU's images that the handler has changed
_ALONE_NAME = "alone"  # likewise: why its gang is not dumped with it
_MAX_FACTS_BYTES = 1 << 20


def stopping_dir(store: Path, container_id: str) -> Path:
    """Return where CRIU writes what it dumps of a container that is being stopped."""
    return store / "stopping" / container_id


def stopping_place(store: Path, container_id: str, images: Path) -> Path | None:
    """Return that place if CRIU's images are in it; None: whoever dumps the container does not stop it."""
    place = stopping_dir(store, container_id)
    return place if same_directory(place, identity(images / "..")) is not None else None


def restoring_dir(store: Path, container_id: str) -> Path:
    """Return where the runtime handler lays out the checkpoint of a container."""
    return store / "restoring" / container_id


def note_rewritten(place: Path, image: OtherImage) -> None:
    """Note in the place of a restore that an image, which was verified, is another one now."""
    replace_file(place / _REWRITTEN_NAME, json.dumps([image]).encode(), mode=0o600, durable=False)


def as_rewritten(
    store: Path, container_id: str, images: Path, listed: tuple[OtherImage, ...]
) -> tuple[OtherImage, ...]:
    """Return the images of a checkpoint as the runtime handler has laid them out.

    Args:
        store: the store's directory.
        container_id: of the container that is restored.
        images: where CRIU reads them.
        listed: as they were at the dump.

    Raises:
        IntegrityError: if the handler's note is damaged.
    """
    place = restoring_dir(store, container_id)
    if same_directory(place, identity(images / "..")) is None:
        return listed
    try:
        noted = [OtherImage(*image) for image in json.loads((place / _REWRITTEN_NAME).read_bytes())]
    except FileNotFoundError:
        return listed
    except (ValueError, TypeError) as error:
        raise IntegrityError(f"{place / _REWRITTEN_NAME} is damaged") from error
    by_name = {image.name: image for image in noted}
    return tuple(by_name.get(image.name, image) for image in listed)


def note_call(place: Path, attempt: str) -> None:
    """Note in the place of a dump which attempt of its gang calls the container, which runs on."""
    replace_file(place / _CALLED_NAME, attempt.encode(), mode=0o600, durable=False)


def read_call(place: Path) -> str:
    """Return the attempt that calls the container which is dumped there; "": none, it is being stopped."""
    try:
        return (place / _CALLED_NAME).read_text()
    except FileNotFoundError:
        return ""


def note_alone(place: Path, why: str) -> None:
    """Note in the place of a dump why the others of its gang are not dumped with the container, which is stopped."""
    replace_file(place / _ALONE_NAME, why.encode(), mode=0o600, durable=False)


def is_alone(place: Path) -> bool:
    """Return whether that is noted there."""
    return (place / _ALONE_NAME).exists()


class Belongings(NamedTuple):
    """What is to be saved, and where it is."""

    rootfs: Rootfs
    volumes: Mapping[str, Path]  # by what their names begin with

    @classmethod
    def of(cls, spec: Mapping[str, Any], bundle: Path, criu_pid: int) -> "Belongings":
        """Find what a container has.

        Args:
            spec: config.json of its bundle.
            bundle: the bundle.
            criu_pid: a process that sees its mounts.

        Raises:
            UnsupportedError: if what it has changed cannot be determined.
            OSError: if something of it is not there.
        """
        seen = Path(f"/proc/{criu_pid}/root")
        rootfs = find_rootfs(_seen(seen, places_of(spec, bundle)[ROOTFS]), Path(f"/proc/{criu_pid}/mountinfo"))
        upper = rootfs.upper and _seen(seen, rootfs.upper)
        places = places_of(spec, bundle)
        volumes = {prefix: _seen(seen, path) for prefix, path in places.items() if prefix != ROOTFS}
        return cls(Rootfs(rootfs.merged, upper), volumes)

    def sizes(self) -> tuple[int, int]:
        """Return the bytes to be saved: of the rootfs, and of volumes.

        Raises:
            UnsupportedError: if a tree is too deep.
            OSError: if something cannot be read.
        """
        rootfs_bytes = tree_bytes(self.rootfs.upper) if self.rootfs.upper else 0
        return rootfs_bytes, sum(map(tree_bytes, self.volumes.values()))

    def check_sizes(self, settings: Settings) -> None:
        """Refuse what would take too long, or too much of the store.

        Raises:
            UnsupportedError: if there is more than the node's configuration allows; or as `sizes`.
            OSError: as `sizes`.
        """
        bounds = (settings.max_rootfs_bytes, settings.max_volumes_bytes)
        for name, size, bound in zip(("rootfs", "volumes"), self.sizes(), bounds, strict=True):
            if size > bound:
                raise UnsupportedError(
                    f"{size} bytes in its {name} are to be saved, and no more than {bound} may be",
                    hint=f"raise max_{name}_bytes in [agent], or keep them in a volume that does not end with the pod",
                )

    def save(self, target: Path, images: Path, names: list[str], facts: bytes, progress: Progress) -> int:
        """Write all of it, and CRIU's images of these names, into a new file; return its bytes.

        Raises:
            OcihookError: if something of it cannot be saved.
            OSError: from the file system, a full one included.
        """
        target.unlink(missing_ok=True)  # of an attempt that was interrupted
        with create_private(target) as file:
            writer = Writer(file, progress)
            writer.add_bytes(FACTS_NAME, facts)
            with opened(images) as directory:
                for name in names:
                    writer.add(IMAGES, Entry(name, directory, name, os.stat(name, dir_fd=directory)))
            if self.rootfs.upper:
                writer.add_tree(ROOTFS, self.rootfs.upper, self.rootfs.merged)
            for prefix, path in self.volumes.items():
                writer.add_tree(prefix, path)
            writer.end()
            os.fsync(file.fileno())
        try:
            check_members(target)
        except (
            IntegrityError
        ) as error:  # more files or attributes than a restore reads: the container is not ended for it
            raise UnsupportedError(
                f"what it has changed could not be restored: {error}", hint="keep it in a volume that outlives the pod"
            ) from error
        return target.stat().st_size


def _seen(root: Path, path: Path) -> Path:
    return root / str(path).lstrip("/")


def lay_out(
    domain: Domain, manifest: StoredManifest, directory: Path, *, workers: int, progress: Progress = no_progress
) -> None:
    """Write into an empty directory what a runtime restores from, without page images: these come when CRIU is called.

    Args:
        domain: where the checkpoint is.
        manifest: of the checkpoint, which has belongings.
        directory: gets IMAGES_DIR, BELONGINGS_NAME and FACTS_NAME.
        workers: processes to use.
        progress: called with the bytes that are done.

    Raises:
        IntegrityError: naming what is missing or damaged.
        OSError: from the file system, a full one included.
    """
    tar = directory / BELONGINGS_NAME
    with domain.using(manifest.id):
        targets = file_targets(directory, {BELONGINGS_NAME: manifest.belongings_bytes})
        layout = domain.layout(manifest)
        assemble(layout, domain.packs, targets, workers=workers, patience=domain.patience, progress=progress)
    images = directory / IMAGES_DIR
    images.mkdir(mode=0o700)
    bring(tar, {IMAGES: images}, progress)
    (directory / FACTS_NAME).write_bytes(_read_facts(tar))
    write_thin(images, Thin(domain.name, manifest.id), durable=False)


def _read_facts(tar: Path) -> bytes:
    for info, content in read_members(tar):
        if info.name == FACTS_NAME and info.size <= _MAX_FACTS_BYTES:
            return os.pread(content, info.size, info.offset_data)
    raise IntegrityError(f"{tar} is damaged: it has no {FACTS_NAME}")
