"""Keeps a domain in order: what no checkpoint needs is found and removed, and a lost index is rebuilt.

Removing holds the lock alone twice, briefly: first, while nothing is being added, to find what nothing needs; then,
when the index no longer leads there, to remove it, unless a process has found it by the old index. All that takes long
happens in between.
"""

import contextlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from ocihook.linux.files import sync_directory
from ocihook.store.domain import Domain
from ocihook.store.index import add_to_index, merge_index
from ocihook.store.lineage import lineage
from ocihook.store.pack_directory import keys_of, pack_number
from ocihook.store.stored_manifest import StoredManifest

_OF_ONE = ("layout", "pulled", "pin", "use")  # files that a checkpoint may have
AT_A_TIME = 16  # packs, or checkpoints, that are removed in one step
Step = Callable[[], contextlib.AbstractContextManager[object]]  # holds the lock alone while it is entered


class Usage(NamedTuple):
    """What a domain takes."""

    checkpoints: int
    raw_bytes: int
    stored_bytes: int
    index_bytes: int
    rubbish_bytes: int


class Needs:
    """The checkpoints of a domain, and the packs that they need. Reads each once, so that looking again is quick."""

    def __init__(self, domain: Domain) -> None:
        """Nothing is read yet."""
        self._domain = domain
        self._manifests: dict[str, StoredManifest] = {}
        self._packs: dict[str, tuple[str, ...]] = {}

    def manifests(self) -> list[StoredManifest]:
        """Return the manifests of all checkpoints that are there now, the oldest first.

        Raises:
            IntegrityError: if one is damaged.
        """
        there = self._domain.checkpoint_ids()
        self.forget(self._manifests.keys() - set(there))
        for manifest in self._domain.read_all(name for name in there if name not in self._manifests):
            self._manifests[manifest.id] = manifest
        return self._domain.in_order(self._manifests.values())

    def packs(self) -> set[str]:
        """Return the packs that they need.

        Raises:
            IntegrityError: if a checkpoint is damaged: what it needs is not known then.
        """
        needed: set[str] = set()
        for manifest in self.manifests():
            if manifest.id not in self._packs:
                self._packs[manifest.id] = tuple(info.name for info in self._domain.layout(manifest).packs)
            needed.update(self._packs[manifest.id])
        return needed

    def forget(self, checkpoint_ids: Iterable[str]) -> None:
        """Read checkpoints again that were removed, or whose layouts were replaced."""
        for checkpoint_id in list(checkpoint_ids):
            self._manifests.pop(checkpoint_id, None)
            self._packs.pop(checkpoint_id, None)


def rubbish(domain: Domain, needs: Needs | None = None) -> tuple[list[Path], list[Path]]:
    """Return packs, and other files, that no complete checkpoint needs. Right with the lock alone.

    Raises:
        IntegrityError: if a checkpoint is damaged: what it needs is not known then.
    """
    needs = needs or Needs(domain)
    needed = needs.packs()
    manifests = needs.manifests()
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
        if checkpoint_id not in {**dict.fromkeys(_OF_ONE, ids), "ids": newest}.get(kind, (checkpoint_id,)):
            others.append(path)
        elif kind == "removed":
            entry = domain.removed_entry(path)
            if checkpoint_id in own or (entry is not None and entry.sequence < oldest - 1 and made_here):
                others.append(path)
    return packs, others


def remove_rubbish(domain: Domain, needs: Needs | None = None, step: Step = contextlib.nullcontext) -> int:
    """Remove what no complete checkpoint needs; return the bytes. Call it in `upkeep`.

    Args:
        domain: to clear.
        needs: what is known of its needs.
        step: gives the lock alone for a step; by default it is held already.

    Raises:
        IntegrityError: if a checkpoint is damaged; nothing is removed then.
        StoreError: if checkpoints are being added for too long.
    """
    needs = needs or Needs(domain)
    needs.packs()  # so that little is left to read while others wait
    freed = 0
    domain.settle()  # what a prune that was killed had removed must not come back
    with step():
        packs, others = rubbish(domain, needs)
        for path in others:
            freed += _remove(domain, path)
    domain.settle()  # some may be unencrypted, in a domain that is encrypted from now on
    merge_index(domain.index_dir, without={pack_number(path.name) for path in packs})
    for at in range(0, len(packs), AT_A_TIME):
        with step():
            needed = needs.packs()
            for path in packs[at : at + AT_A_TIME]:
                if path.name not in needed:
                    freed += path.stat().st_size
                    path.unlink()
    sync_directory(domain.packs_dir)
    return freed


def _remove(domain: Domain, path: Path) -> int:
    """Remove a file that is not a pack, unless it is a mark that a process holds while it waits for the checkpoint."""
    size = path.stat().st_size
    if path.suffix == ".use":
        with domain.marks.unless_used(path.stem) as is_free:
            if is_free:
                path.unlink()
    else:
        path.unlink(missing_ok=True)
    return size


def repair(domain: Domain) -> list[str]:
    """Rebuild the index from the packs; return what was done. Call it with the lock alone.

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
    return [f"rebuilt the index: {pages} pages of {len(needed)} packs"]


def usage(domain: Domain) -> Usage:
    """Return what space the domain takes.

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
