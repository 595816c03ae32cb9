"""Retention: which checkpoints of the store, and which archives, go; and whatever nothing needs any more."""

import calendar
import logging
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from ocihook.config import Settings
from ocihook.engine.archive import read_facts
from ocihook.errors import IntegrityError, OcihookError, StoreError
from ocihook.ops.staging import discard_staged, pins_of
from ocihook.ops.store import claimed
from ocihook.store.domain import LOCK_TIMEOUT_S, Domain, lineage
from ocihook.store.pending import check_taken, read_job
from ocihook.store.rewrite import drop_unneeded
from ocihook.store.store import Store
from ocihook.store.stored import StoredManifest
from ocihook.store.upkeep import remove_rubbish

_TAKEN_WITHIN_S = 3600.0  # from the first page image to the last
_WRITTEN_WITHIN_S = 600.0  # since an archive was last written to: the engine may still be at it

log = logging.getLogger(__name__)


class Keep(NamedTuple):
    """What a prune leaves: of each container what any of the first two keeps, and no more than the third allows."""

    last: int = 0  # checkpoints
    within_s: float = 0.0  # since they were made
    max_bytes: int = 0  # of a domain's packs; 0: any number

    @classmethod
    def of(cls, settings: Settings) -> "Keep":
        """Return what the node's configuration says."""
        return cls(settings.keep_last, settings.keep_within_s, settings.max_store_bytes)


class Pruned(NamedTuple):
    """What a prune did in a domain, or in a directory of archives."""

    where: str
    removed: tuple[str, ...]
    freed_bytes: int


class _Candidate(NamedTuple):
    """Something that may go."""

    order: float  # the higher, the newer
    made_s: float  # since the epoch
    container: str
    name: str


def prune(
    store: Store,
    keep: Keep,
    *,
    dry_run: bool = False,
    now_s: float | None = None,
    timeout_s: float = LOCK_TIMEOUT_S,
) -> list[Pruned]:
    """Remove checkpoints of a store that nothing keeps, and what no checkpoint needs.

    Args:
        store: of which.
        keep: what stays.
        dry_run: only say what would go.
        now_s: since the epoch; None: now.
        timeout_s: how long to wait for checkpoints that are being written, read, pushed or pulled.

    Raises:
        StoreError: if checkpoints are being written or read for too long.
        IntegrityError: if a checkpoint is damaged; nothing of its domain is removed then.
    """
    result = []
    for domain in store.domains():
        with domain.alone(timeout_s):
            removed = choose(domain.checkpoints(), keep, time.time() if now_s is None else now_s)
            freed = 0
            if not dry_run:
                domain.remove(removed)
                freed = remove_rubbish(domain) + _discard_lost(domain) + drop_unneeded(domain)
                if keep.max_bytes:
                    more = _shrink(domain, keep.max_bytes)
                    removed, freed = [*removed, *more[0]], freed + more[1]
            result.append(Pruned(domain.name, tuple(removed), freed))
    return result


def prune_archives(directory: Path, keep: Keep, *, dry_run: bool = False, now_s: float | None = None) -> Pruned:
    """Remove archives that nothing keeps from a directory; the kubelet never cleans its own.

    What is no archive, or was written to a moment ago, stays.
    """
    now_s = time.time() if now_s is None else now_s
    candidates, sizes = [], {}
    for path in sorted(directory.glob("*.tar*")) if directory.is_dir() else ():
        try:
            status = path.stat()
            if now_s - status.st_mtime > _WRITTEN_WITHIN_S:
                container = lineage(read_facts(path).container)
                candidates.append(_Candidate(status.st_mtime, status.st_mtime, container, path.name))
                sizes[path.name] = status.st_size
        except (OcihookError, OSError) as error:
            log.warning("%s stays: %s", path, error)
    removed = _choose(candidates, keep, now_s)
    for name in () if dry_run else removed:
        (directory / name).unlink(missing_ok=True)
    return Pruned(str(directory), tuple(removed), 0 if dry_run else sum(sizes[name] for name in removed))


def prune_by_policy(settings: Settings) -> None:
    """Do what the node's configuration wants, if it wants anything."""
    keep = Keep.of(settings)
    if not any(keep):
        return
    try:
        done = prune(Store.of(settings), keep, timeout_s=0)
    except IntegrityError:
        raise
    except StoreError as error:  # in use: what comes next prunes, too
        log.info("nothing is pruned: %s", error)
        return
    if settings.archive_dir:
        done.append(prune_archives(Path(settings.archive_dir), keep))
    for pruned in done:
        for name in pruned.removed:
            log.info("removed %s of %s, by the retention configured", name, pruned.where)


def choose(manifests: Iterable[StoredManifest], keep: Keep, now_s: float) -> list[str]:
    """Return which checkpoints go, of all in their order. Of each container the newest always stays."""
    candidates = [_Candidate(order, _made_s(m), lineage(m.container), m.id) for order, m in enumerate(manifests)]
    return _choose(candidates, keep, now_s)


def _choose(candidates: Iterable[_Candidate], keep: Keep, now_s: float) -> list[str]:
    if not keep.last and not keep.within_s:
        return []
    rows: dict[str, list[_Candidate]] = {}
    for candidate in sorted(candidates, reverse=True):
        rows.setdefault(candidate.container, []).append(candidate)
    return [
        candidate.name
        for row in rows.values()
        for candidate in row[max(1, keep.last) :]
        if now_s - candidate.made_s > keep.within_s
    ]


def _made_s(manifest: StoredManifest) -> float:
    try:
        return float(calendar.timegm(time.strptime(manifest.created, "%Y-%m-%dT%H:%M:%SZ")))
    except ValueError:
        return 0.0


def _shrink(domain: Domain, max_bytes: int) -> tuple[list[str], int]:
    """Remove the oldest checkpoints until the packs are within a bound; of each container the newest stays."""
    removed: list[str] = []
    freed = 0
    while domain.pack_bytes() > max_bytes:
        manifests = domain.checkpoints()
        newest = {lineage(manifest.container): manifest.id for manifest in manifests}.values()
        oldest = next((manifest.id for manifest in manifests if manifest.id not in newest), None)
        if oldest is None:
            break
        domain.remove([oldest])
        freed += remove_rubbish(domain) + drop_unneeded(domain)
        removed.append(oldest)
    return removed, freed


def _discard_lost(domain: Domain) -> int:
    """Remove what was taken for checkpoints that cannot be completed any more, or was never taken whole."""
    freed = 0
    for pending in list(domain.pending_dir.iterdir()):
        with claimed(pending) as is_ours:
            if is_ours and _is_lost(domain, pending):
                freed += sum(path.stat().st_size for path in pending.iterdir())
                discard_staged(pending, pins_of(pending.name))
    return freed


def _is_lost(domain: Domain, pending: Path) -> bool:
    try:
        job = read_job(domain, pending.name)
        if job is None:  # being taken, or the dump was interrupted long ago
            return time.time() - pending.stat().st_mtime > _TAKEN_WITHIN_S
        check_taken(job)
    except IntegrityError as error:
        log.warning("%s", error)
        return True
    return False
