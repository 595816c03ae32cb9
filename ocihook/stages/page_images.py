"""CRIU's page images become packs where they are, so that the engine's archive carries these; and page images again."""

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from ocihook.checkpoints.stage import STAGED_NAME, record_of
from ocihook.errors import OcihookError
from ocihook.images.compatibility import check_host, host_facts
from ocihook.images.image_set import (
    MovedRegions,
    dehydrate,
    discard_all,
    finish_packing,
    is_read_twice,
    pack_image_set,
    region_bytes,
    rehydrate_image_set,
    take_in,
    write_packed_parts,
)
from ocihook.linux.files import identity, same_directory
from ocihook.linux.mounts import is_in_memory
from ocihook.linux.patience import Patience
from ocihook.memory.regions import write_back
from ocihook.packs.packed_manifest import PackedManifest, read_manifest, write_manifest
from ocihook.session.effect import Effect
from ocihook.session.journal import Journal
from ocihook.session.participant import Dump, Participant, Restore, SizeFacts
from ocihook.stages.detached import KeptMemory, can_wait, keep_from_end
from ocihook.store.thin import read_thin

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Packing(Effect, kind="packing"):
    """Page images are on their way into packs. The manifest shows whether that was committed."""

    ends_with_stage: ClassVar[bool] = False  # a stage that starts over must know of it
    holds_container: ClassVar[bool] = False
    directory: Path
    identity: list[int]

    def undo(self, _journal: Journal, _patience: Patience) -> None:
        """Complete it, or undo it."""
        directory = same_directory(self.directory, self.identity)
        if directory:
            finish_packing(directory)


@dataclass(kw_only=True)
class Rehydrated(Effect, kind="rehydrated"):
    """Page images were written from packs, or from the store."""

    directory: Path
    identity: list[int]
    names: list[str]

    def undo(self, _journal: Journal, _patience: Patience) -> None:
        """Remove them."""
        directory = same_directory(self.directory, self.identity)
        if directory:
            dehydrate(directory, self.names)

    @classmethod
    def of(cls, restore: Restore, names: list[str]) -> "Rehydrated":
        """Return that of a restore."""
        return cls(directory=Path(restore.image_dir), identity=identity(restore.directory), names=names)


@dataclass
class PackedCheckpoint:
    """An image set with packs."""

    directory: Path
    manifest: PackedManifest

    @property
    def gpu(self) -> Mapping[str, Any]:
        """What the container had of GPUs."""
        return self.manifest.gpu

    @property
    def region_processes(self) -> Collection[str]:
        """The processes whose memory went past CRIU."""
        return {region.process for region in self.manifest.regions}

    @property
    def region_bytes(self) -> int:
        """Bytes of that memory at least."""
        return region_bytes(self.manifest)

    @property
    def image_names(self) -> Collection[str]:
        """The page images that are in packs."""
        return [image.name for image in self.manifest.packed_images]

    @property
    def write_parts(self) -> Callable[..., None]:
        """What writes parts of these into processes."""
        return partial(write_packed_parts, self.directory, self.manifest)

    @property
    def write_regions(self) -> Callable[..., int]:
        """What writes it into processes."""
        return partial(write_back, self.directory)


class PageImages(Participant):
    """Packs page images within their directory, and unpacks them."""

    def prepare(self, dump: Dump) -> None:
        """Make a place for GPU memory that need not go to a disk at once, and for its record."""
        if dump.policy.mode == "inline" and dump.has_gpu and can_wait(dump):
            place, images = dump.journal.path.with_suffix(".memory"), Path(dump.image_dir)
            dump.journal.add(KeptMemory(directory=place, images=images, identity=identity(dump.directory)))
            place.mkdir(mode=0o700)
            if not is_in_memory(dump.directory):
                dump.memory = place
                (dump.directory / STAGED_NAME).touch(mode=0o600)

    def after_images(self, dump: Dump) -> str:
        """Pack, or have that wait until the container runs on."""
        if dump.policy.mode == "off":
            discard_all(dump.directory)
        if dump.policy.mode != "inline":
            return ""
        kept = dump.journal.find(KeptMemory)
        if dump.moved is not None and kept is not None:
            write_manifest(kept.directory, record_of(dump.moved, dump.container), durable=False)
        is_known = dump.moved is None or kept is not None
        if is_known and can_wait(dump) and keep_from_end(dump):
            dump.completes_later = True
            return ""
        return self._replace(dump)

    def container_runs(self, dump: Dump) -> str:
        """Pack what has waited."""
        if dump.policy.mode != "inline":
            return ""
        kept = dump.journal.find(KeptMemory)
        record = read_manifest(kept.directory) if kept else None
        if record is not None:
            dump.moved = MovedRegions(record.regions, record.packs, record.gpu, record.packed_images)
        return self._replace(dump)

    def _replace(self, dump: Dump) -> str:
        """Pack; or leave the images as CRIU wrote them, if that fails and the policy allows it."""
        moved = dump.moved
        begun = dump.journal.find(Packing)
        if begun is not None or dump.journal.knows(SizeFacts):  # and was interrupted
            finish_packing(dump.directory)
            manifest = read_manifest(dump.directory)
            if manifest is not None:
                return _packed(dump, manifest, begun)
        elif not (moved and moved.packs):
            discard_all(dump.directory)
        kept = dump.journal.find(KeptMemory)
        if begun is None and moved and kept and _is_kept(dump):
            with dump.journal.phase("take in") as phase:
                phase["bytes"] = sum(pack.size_bytes for pack in moved.packs)
                take_in(moved, kept.directory, dump.directory, dump.patience)
        (dump.directory / STAGED_NAME).unlink(missing_ok=True)
        packing = begun or Packing(directory=Path(dump.image_dir), identity=identity(dump.directory))
        if begun is None:
            dump.journal.add(packing)
        try:
            with dump.journal.phase("pack") as phase:
                manifest = _pack(dump)
                phase["bytes"] = manifest.image_bytes if manifest else 0
        except (OcihookError, OSError) as error:
            finish_packing(dump.directory)
            dump.patience.check()
            if dump.policy.on_pack_error == "fail":
                raise
            if moved is not None:
                _pack(dump, with_images=False)
            dump.journal.forget(packing)
            return dump.degrade(error, "The checkpoint is complete but not packed")
        if manifest is None:
            dump.journal.forget(packing)
            return ""
        return _packed(dump, manifest, packing)

    def check(self, restore: Restore) -> None:
        """Find packs; those that cannot be restored here are refused."""
        if read_thin(restore.directory) is None:
            manifest = read_manifest(restore.directory)
            if manifest is not None:
                check_host(manifest.host, restore.call().criu_version)
                restore.checkpoint = PackedCheckpoint(restore.directory, manifest)

    def recall(self, restore: Restore) -> None:
        """Find the packs again."""
        manifest = read_manifest(restore.directory)
        if manifest is not None:
            restore.checkpoint = PackedCheckpoint(restore.directory, manifest)

    def before_processes(self, restore: Restore) -> str:
        """Verify all, and write page images for CRIU to read."""
        if read_thin(restore.directory) is not None:
            return ""
        checkpoint = restore.checkpoint
        manifest = checkpoint.manifest if isinstance(checkpoint, PackedCheckpoint) else None
        if manifest is not None:
            restore.journal.add(Rehydrated.of(restore, [image.name for image in manifest.packed_images]))
        with restore.journal.phase("unpack") as phase:
            phase["bytes"] = manifest.raw_bytes if manifest else 0
            rehydrate_image_set(
                restore.directory,
                with_regions=manifest is None or is_read_twice(manifest.regions),
                only=restore.kept,
                workers=restore.call().workers,
                patience=restore.patience,
                progress=restore.progress,
            )
        if manifest is None:
            return ""
        restore.journal.note(SizeFacts(raw_bytes=manifest.raw_bytes, stored_bytes=manifest.stored_bytes))
        return f"container {manifest.container}: verified and unpacked {manifest.raw_bytes} bytes of memory"


def _is_kept(dump: Dump) -> bool:
    """Return whether the packs of moved memory are in memory."""
    kept = dump.journal.find(KeptMemory)
    return bool(kept and dump.moved and dump.moved.packs and (kept.directory / dump.moved.packs[0].name).exists())


def _pack(dump: Dump, *, with_images: bool = True) -> PackedManifest | None:
    call = dump.call()
    return pack_image_set(
        dump.directory,
        container=dump.container,
        host=host_facts(call.criu_version),
        workers=call.workers,
        # A container left running is itself the other copy; one that is about to be killed is not.
        durable=not call.leave_running,
        moved=dump.moved,
        with_images=with_images,
        patience=dump.patience,
        progress=dump.progress,
    )


def _packed(dump: Dump, manifest: PackedManifest, packing: Packing | None) -> str:
    dump.journal.note(SizeFacts(raw_bytes=manifest.raw_bytes, stored_bytes=manifest.stored_bytes))
    if packing is not None:
        dump.journal.forget(packing)
    return f"container {dump.container}: packed {manifest.raw_bytes} bytes of memory into {manifest.stored_bytes}"
