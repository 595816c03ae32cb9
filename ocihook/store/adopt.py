"""Adds a checkpoint from elsewhere to a domain, once every byte of it has been verified."""

import contextlib
import os
from pathlib import Path

from ocihook.errors import StoreFull
from ocihook.linux.files import sync_directory, sync_file
from ocihook.packs.pack import PAGE_BYTES, PackInfo
from ocihook.packs.pages import Progress, no_progress
from ocihook.store.domain import Domain
from ocihook.store.index import add_to_index
from ocihook.store.pack_directory import keys_of, pack_number
from ocihook.store.page_ids import ID_BYTES
from ocihook.store.stored_manifest import StoredManifest
from ocihook.store.verify import verify_content, verify_layout


def adopt(
    domain: Domain, checkpoint_id: str, data: bytes, layout: bytes, progress: Progress = no_progress
) -> StoredManifest:
    """Make a checkpoint from elsewhere part of the domain; its packs are here. Call it with the lock shared.

    Args:
        domain: that it becomes part of.
        checkpoint_id: which it is to be.
        data: its manifest, as it is elsewhere.
        layout: likewise.
        progress: gets the bytes read.

    Raises:
        IntegrityError: if the packs do not hold what the manifest says.
        StoreFull: if the ids of the pages that it claims do not fit; it may claim any number of zero pages.
        OSError: from the file system.
    """
    manifest = domain.manifest_of(checkpoint_id, data)
    decoded = domain.layout_of(manifest, layout)
    verify_layout(domain, manifest, decoded, {}, read_data=False)
    _check_space(domain, manifest)
    ids = domain.new_ids_path(checkpoint_id)
    with ids.open("wb") as file:
        verify_content(domain, manifest, decoded, progress, file)
    domain.put_pulled(checkpoint_id, data, layout, ids)
    return manifest


def _check_space(domain: Domain, manifest: StoredManifest) -> None:
    needed = manifest.raw_bytes // PAGE_BYTES * ID_BYTES
    file_system = os.statvfs(domain.packs_dir)
    free = file_system.f_bavail * file_system.f_frsize
    if free < needed:
        raise StoreFull(
            f"checkpoint {manifest.id} claims {manifest.raw_bytes} bytes of memory; the ids of its pages take {needed} "
            f"bytes, and the store has {free} free",
            hint="free space there, or remove checkpoints by `ocihook store prune`",
        )


def adopt_pack(domain: Domain, path: Path, info: PackInfo) -> None:
    """Make a pack from elsewhere one of the domain once every byte of it has been verified and is on stable storage.

    Raises:
        IntegrityError: if it is damaged, or another one.
        OSError: from the file system, a full one included.
    """
    with contextlib.closing(domain.packs._replace(path=path.parent).open(info.name, info)) as pack:
        keys = b"".join(keys_of(pack, domain.page_ids))
    sync_file(path)
    path.replace(domain.packs_dir / info.name)
    sync_directory(domain.packs_dir)
    add_to_index(domain.index_dir, {pack_number(info.name): keys})
