"""Keeps a domain in order: what no checkpoint needs is found and removed, and a lost index is made anew."""

import contextlib
from pathlib import Path
from typing import NamedTuple

from ocihook.linux.files import sync_directory
from ocihook.store.domain import Domain, lineage
from ocihook.store.index import add_to_index, merge_index
from ocihook.store.places import keys_of, pack_number


class Usage(NamedTuple):
    """What a domain takes."""

    checkpoints: int
    raw_bytes: int
    stored_bytes: int
    index_bytes: int
    rubbish_bytes: int


def rubbish(domain: Domain) -> tuple[list[Path], list[Path]]:
    """Return packs, and other files, that no complete checkpoint needs. Right with the lock alone.

    Raises:
        IntegrityError: if a checkpoint is damaged: what it needs is not known then.
    """
    manifests = domain.checkpoints()
    needed = {info.name for manifest in manifests for info in domain.layout(manifest).packs}
    packs = [path for path in domain.packs_dir.glob("*.pack") if path.name not in needed]
    ids = {manifest.id for manifest in manifests}
    newest = {lineage(manifest.container): manifest.id for manifest in manifests}.values()
    made_here = [manifest for manifest in manifests if not domain.is_pulled(manifest.id)]
    own = {manifest.id for manifest in made_here}
    oldest = min((manifest.sequence for manifest in made_here), default=1 << 60)
    others = [*domain.checkpoints_dir.glob("*.partial"), *domain.index_dir.glob("*.partial")]
    others += [path for path in domain.pushes_dir.iterdir() if path.name not in ids]
    for path in domain.checkpoints_dir.iterdir():
        checkpoint_id, _, kind = path.name.partition(".")
        if checkpoint_id not in {"layout": ids, "pulled": ids, "ids": newest}.get(kind, (checkpoint_id,)):
            others.append(path)
        elif kind == "removed":
            entry = domain.removed_entry(path)
            if checkpoint_id in own or (entry is not None and entry.sequence < oldest - 1 and made_here):
                others.append(path)
    return packs, others


def remove_rubbish(domain: Domain) -> int:
    """Remove what no complete checkpoint needs; return the bytes. Call it with the lock alone.

    Raises:
        IntegrityError: if a checkpoint is damaged; nothing is removed then.
    """
    domain.settle()  # what another prune removed that was killed must not come back
    packs, others = rubbish(domain)
    size = sum(path.stat().st_size for path in [*packs, *others])
    if packs:
        gone = {path.name for path in packs}
        kept = {pack_number(path.name) for path in domain.packs_dir.glob("*.pack") if path.name not in gone}
        merge_index(domain.index_dir, packs=kept)
    for path in [*packs, *others]:
        path.unlink(missing_ok=True)
    domain.settle()  # some of it may not be encrypted, in a domain that is from now on
    sync_directory(domain.packs_dir)
    return size


def repair(domain: Domain) -> list[str]:
    """Make the index anew from the packs; return what was done. Call it with the lock alone.

    Raises:
        IntegrityError: if a checkpoint is damaged.
    """
    needed = {info.name: info for manifest in domain.checkpoints() for info in domain.layout(manifest).packs}
    for path in list(domain.index_dir.iterdir()):
        path.unlink()
    pages = 0
    for name, info in sorted(needed.items()):
        with contextlib.closing(domain.packs.open(name, info)) as pack:
            add_to_index(domain.index_dir, {pack_number(name): b"".join(keys_of(pack, domain.page_ids))})
            pages += pack.pages
        merge_index(domain.index_dir)
    domain.rewrite_head()
    return [f"made the index anew: {pages} pages of {len(needed)} packs"]


def usage(domain: Domain) -> Usage:
    """Return what the domain takes.

    Raises:
        IntegrityError: if a checkpoint is damaged.
    """
    manifests = domain.checkpoints()
    packs, others = rubbish(domain)
    files = [path for part in (domain.packs_dir, domain.checkpoints_dir) for path in part.iterdir()]
    return Usage(
        len(manifests),
        sum(manifest.raw_bytes for manifest in manifests),
        sum(path.stat().st_size for path in files),
        sum(path.stat().st_size for path in domain.index_dir.iterdir()),
        sum(path.stat().st_size for path in [*packs, *others]),
    )
