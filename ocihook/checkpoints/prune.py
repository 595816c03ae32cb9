"""Retention: removes checkpoints of the store, and archives, that are not to be kept; and what nothing needs any more.

First each container keeps what it is to keep. If that exceeds a bound, the oldest go, whichever container's they are:
all but the newest of the store. What is pinned or in use always stays. A prune blocks others for short steps only.

The checkpoints of one dump of a gang stay or go together. A dump that lacks members does not count as one that is kept.
"""

import calendar
import contextlib
import logging
import stat
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from itertools import accumulate, compress, repeat
from pathlib import Path
from typing import NamedTuple

from ocihook.checkpoints.awaited import claimed_job
from ocihook.checkpoints.epochs import Epochs
from ocihook.checkpoints.gang_note import GANG_NAME, MAX_NOTE_BYTES, decode_note
from ocihook.checkpoints.listing import memory_state
from ocihook.checkpoints.pending import JOB_NAME, check_taken, claimed
from ocihook.checkpoints.stage import discard_staged, pins_of
from ocihook.config import Settings
from ocihook.container.engine_archive import Member, read_facts
from ocihook.errors import IntegrityError, OcihookError, StoreError
from ocihook.model import ContainerRef
from ocihook.store.domain import LOCK_TIMEOUT_S, Domain
from ocihook.store.garbage import AT_A_TIME, Needs, remove_rubbish
from ocihook.store.lineage import lineage
from ocihook.store.rewrite import Estimate, drop_unneeded
from ocihook.store.store import Store
from ocihook.store.stored_manifest import StoredManifest
from ocihook.store.thin import MAX_THIN_BYTES, THIN_NAME, Thin, decode_thin

_TAKEN_WITHIN_S = 3600.0  # from the first page image to the last
_WRITTEN_WITHIN_S = 600.0  # since an archive was last written to: the engine may still be writing it
_LOSS_KEPT_S = 7 * 86400.0  # for a restore to say why, whatever is pruned by policy
_WAIT_S = 60.0  # of a prune by policy, for checkpoints that are being stored

log = logging.getLogger(__name__)


class Keep(NamedTuple):
    """What a prune leaves: of each container what either of the first two keeps, within the limit of the third."""

    last: int = 0  # checkpoints
    within_s: float = 0.0  # since they were made
    max_bytes: int = 0  # of all; 0: any number

    @classmethod
    def of(cls, settings: Settings) -> "Keep":
        """Return what the node's configuration says of the store."""
        return cls(settings.keep_last, settings.keep_within_s, settings.max_store_bytes)

    @classmethod
    def of_archives(cls, settings: Settings) -> "Keep":
        """Return what the node's configuration says of archives."""
        return cls(settings.keep_last, settings.keep_within_s, settings.max_archive_bytes)

    @classmethod
    def of_remote(cls, settings: Settings) -> "Keep":
        """Return what the node's configuration says of the remote."""
        return cls(settings.remote_keep_last, settings.remote_keep_within_s)


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
    epoch: str = ""  # of a gang: its checkpoints are removed together
    is_whole: bool = True  # else a member of that epoch is missing


class _Work:
    """A domain that is being pruned."""

    def __init__(self, domain: Domain, timeout_s: float, loss_kept_s: float, *, dry_run: bool) -> None:
        self.domain, self.needs, self._dry_run = domain, Needs(domain), dry_run
        self._loss_kept_s = loss_kept_s
        self._step = partial(domain.alone, timeout_s)
        self.removed: list[str] = []
        self.freed_bytes = 0

    def manifests(self) -> list[StoredManifest]:
        """Return what is left, the oldest first."""
        return [manifest for manifest in self.needs.manifests() if manifest.id not in self.removed]

    def remove(self, checkpoint_ids: Sequence[str]) -> None:
        """Remove checkpoints, except those that are held; or only note which would be removed."""
        going = _unheld(checkpoint_ids, self.manifests(), self.domain.is_held)
        for at in range(0, len(going), AT_A_TIME):
            batch = going[at : at + AT_A_TIME]
            if not self._dry_run:
                with self._step():
                    batch = self.domain.remove(batch)
                self.needs.forget(batch)
            self.removed += batch

    def clear(self) -> None:
        """Remove what nothing needs any more."""
        if not self._dry_run:
            self.freed_bytes += remove_rubbish(self.domain, self.needs, self._step)
            self.freed_bytes += _discard_lost(self.domain, self._loss_kept_s)
            self.freed_bytes += drop_unneeded(self.domain, self.needs, self._step)


def prune(
    store: Store,
    keep: Keep,
    *,
    dry_run: bool = False,
    now_s: float | None = None,
    timeout_s: float = LOCK_TIMEOUT_S,
    loss_kept_s: float = 0.0,
) -> list[Pruned]:
    """Remove checkpoints of a store that nothing keeps, and what no checkpoint needs.

    Args:
        store: to prune.
        keep: what stays.
        dry_run: only report what would be removed.
        now_s: since the epoch; None: now.
        timeout_s: how long to wait, each time, for checkpoints that are being stored or pulled.
        loss_kept_s: how long the record stays of why a snapshot was lost.

    Raises:
        StoreError: if checkpoints are being stored for too long, or another process prunes.
        IntegrityError: if a checkpoint is damaged; nothing of its domain is removed then.
    """
    now_s = time.time() if now_s is None else now_s
    damaged: IntegrityError | None = None
    with contextlib.ExitStack() as stack:
        works = []
        for domain in store.domains():
            stack.enter_context(domain.upkeep(timeout_s))
            work = _Work(domain, timeout_s, loss_kept_s, dry_run=dry_run)
            try:
                work.needs.packs()
                work.remove(choose(work.manifests(), keep, now_s, left=domain.marks.left()))
                work.clear()
                works.append(work)
            except IntegrityError as error:
                log.error("domain %s: nothing is pruned: %s", domain.name, error)
                damaged = damaged or error
        if keep.max_bytes:
            _shrink(store, works, keep.max_bytes, dry_run=dry_run)
    if damaged is not None:
        raise damaged
    return [Pruned(work.domain.name, tuple(work.removed), work.freed_bytes) for work in works]


def _shrink(store: Store, works: Sequence[_Work], max_bytes: int, *, dry_run: bool) -> None:
    """Remove the oldest checkpoints until the store is within a bound, or none is left that may go."""
    others = stored_bytes(store) - sum(work.domain.stored_bytes() for work in works)  # of damaged domains: they stay
    while dry_run or stored_bytes(store) > max_bytes:
        paying = _paying(works, max_bytes - others)
        if not paying and not dry_run:
            over = stored_bytes(store) - max_bytes
            log.warning("the store takes %d bytes more than it may: what is left is pinned, in use or the newest", over)
            return
        for work in works:
            work.remove([checkpoint.manifest.id for checkpoint in paying if checkpoint.work is work])
            work.clear()
        if dry_run:
            return


def _unheld(checkpoint_ids: Iterable[str], all_: Iterable[StoredManifest], is_held: Callable[[str], bool]) -> list[str]:
    """Return those of some checkpoints that are not held, and of which no other of the same epoch is."""
    wanted, manifests = {*checkpoint_ids}, list(all_)
    epochs = {manifest.container.gang for manifest in manifests if manifest.id in wanted}
    held = {m.container.gang for m in manifests if m.container.gang in epochs and is_held(m.id)} - {""}
    return [m.id for m in manifests if m.id in wanted and m.container.gang not in held and not is_held(m.id)]


class _Aged(NamedTuple):
    made_s: float  # since the epoch; in each domain later ones are no older, whatever clocks did
    place: int
    work: _Work
    manifest: StoredManifest


def _paying(works: Sequence[_Work], max_bytes: int) -> list[_Aged]:
    """Return which checkpoints to remove so that the rest is within the bound; at least one, if one may go."""
    rows = [checkpoint for work in works for checkpoint in _by_age(work)]
    rows.sort(key=lambda checkpoint: checkpoint[:2], reverse=True)
    estimates = {id(work): Estimate(work.domain) for work in works}
    staying = [row for number, row in enumerate(rows) if number == 0 or row.work.domain.is_held(row.manifest.id)]
    staying += _of_same_epochs(staying, rows)
    is_staying = [row in staying for row in rows]
    for row in compress(rows, is_staying):
        estimates[id(row.work)].add(row.manifest)
    may_go = [row for row, stays in zip(rows, is_staying, strict=True) if not stays]
    for number, row in enumerate(may_go):
        estimates[id(row.work)].add(row.manifest)
        if sum(estimate.size_bytes for estimate in estimates.values()) > max_bytes:
            going = may_go[number:]
            break
    else:
        going = may_go[-1:]
    return [*_of_same_epochs(going, may_go), *going]


def _of_same_epochs(some: Sequence[_Aged], rows: Sequence[_Aged]) -> list[_Aged]:
    """Return what is of the same epochs as some checkpoints: these are useless without it."""
    epochs = {(id(row.work), row.manifest.container.gang) for row in some if row.manifest.container.gang}
    return [row for row in rows if (id(row.work), row.manifest.container.gang) in epochs and row not in some]


def _by_age(work: _Work) -> list[_Aged]:
    manifests = work.manifests()
    made = accumulate(map(_made_s, manifests), max)
    return [_Aged(*row) for row in zip(made, range(len(manifests)), repeat(work), manifests, strict=False)]


def stored_bytes(store: Store) -> int:
    """Return the bytes that all domains of a store take, without pending checkpoints."""
    return sum(domain.stored_bytes() for domain in store.domains())


def archive_bytes(directory: Path) -> int:
    """Return the bytes that the archives in a directory take."""
    return sum(size for _, size, _ in _archives(directory))


def _archives(directory: Path) -> list[tuple[float, int, Path]]:
    """Return time of the last change, size and path of every file with an archive's name, the newest first."""
    rows = []
    for path in directory.glob("*.tar*") if directory.is_dir() else ():
        with contextlib.suppress(FileNotFoundError):
            status = path.stat()
            if stat.S_ISREG(status.st_mode):
                rows.append((status.st_mtime, status.st_size, path))
    return sorted(rows, reverse=True)


def prune_archives(
    directory: Path, keep: Keep, store: Store, *, dry_run: bool = False, now_s: float | None = None
) -> Pruned:
    """Remove archives that nothing keeps from a directory; the kubelet never cleans its own.

    What is not an archive, or was written to a moment ago, stays; and so do the archives of the same epoch of a gang.
    One of which the store has lost the memory, or still reads it, counts as an epoch that lacks members.
    """
    now_s = time.time() if now_s is None else now_s
    rows = _archives(directory)
    total = sum(size for _, size, _ in rows)
    if not keep.last and not keep.within_s and not 0 < keep.max_bytes < total:
        return Pruned(str(directory), (), 0)
    sizes = {path.name: size for _, size, path in rows}
    candidates, staying = [], {rows[0][2].name} if rows else set[str]()
    archived = {path.name: (changed_s, found) for changed_s, _, path in rows if (found := _read_archive(path))}
    with_memory = {
        name for name, (_, found) in archived.items() if not found.thin or not memory_state(store, found.thin)
    }
    epochs = Epochs(found.container for name, (_, found) in archived.items() if name in with_memory)
    for name, (changed_s, (container, _)) in archived.items():
        is_whole = name in with_memory and epochs.has_all_of_node(container)
        candidates.append(_Candidate(changed_s, changed_s, lineage(container), name, _epoch_key(container), is_whole))
        if now_s - changed_s <= _WRITTEN_WITHIN_S:
            staying.add(name)
    whole = [candidate.name for candidate in candidates if candidate.is_whole]
    staying |= {*whole[:1]}
    staying = _with_epochs(staying, candidates)
    written = [candidate for candidate in candidates if now_s - candidate.made_s > _WRITTEN_WITHIN_S]
    kept = {*archived}.difference(_choose(written, keep, now_s)) | staying  # what is being written counts for nothing
    kept = _with_epochs(kept, candidates)
    removed = [candidate.name for candidate in candidates if candidate.name not in kept]
    total -= sum(sizes[name] for name in removed)
    for candidate in reversed(candidates):
        if 0 < keep.max_bytes < total and candidate.name not in {*staying, *removed}:
            together = [name for name in _with_epochs({candidate.name}, candidates) if name not in removed]
            removed += sorted(together)
            total -= sum(sizes[name] for name in together)
    if 0 < keep.max_bytes < total:
        log.warning("%s takes %d bytes, %d more than max_archive_bytes", directory, total, total - keep.max_bytes)
    for name in () if dry_run else removed:
        (directory / name).unlink(missing_ok=True)
    return Pruned(str(directory), tuple(removed), 0 if dry_run else sum(sizes[name] for name in removed))


class _Archive(NamedTuple):
    container: ContainerRef  # with its gang
    thin: Thin | None  # its memory is in a store


def _read_archive(path: Path) -> _Archive | None:
    """Return what an archive is of; None if it is no archive, or damaged."""
    notes, thin = [], None

    def visit(member: Member) -> None:
        nonlocal thin
        if member.image_name == GANG_NAME:
            notes.append(decode_note(member.content(MAX_NOTE_BYTES)))
        elif member.image_name == THIN_NAME:
            thin = decode_thin(member.content(MAX_THIN_BYTES))

    try:
        container = read_facts(path, visit).container
        return _Archive(notes[0].on(container) if notes else container, thin)
    except (OcihookError, OSError) as error:
        log.warning("%s stays: %s", path, error)
        return None


def _epoch_key(container: ContainerRef) -> str:
    return f"{container.pod_namespace}/{container.gang}" if container.gang else ""


def _with_epochs(names: Collection[str], candidates: Iterable[_Candidate]) -> set[str]:
    """Return names with those of the same epochs."""
    rows = list(candidates)
    epochs = {candidate.epoch for candidate in rows if candidate.name in names} - {""}
    return {*names, *(candidate.name for candidate in rows if candidate.epoch in epochs)}


def prunes_archives(settings: Settings) -> bool:
    """Return whether the node's configuration limits how many archives there are."""
    return bool(settings.archive_dir) and any(Keep.of_archives(settings))


def prune_by_policy(settings: Settings) -> None:
    """Prune as the node's configuration says, if it says anything."""
    done = []
    keep = Keep.of(settings)
    if any(keep):
        try:
            done += prune(Store.of(settings), keep, timeout_s=_WAIT_S, loss_kept_s=_LOSS_KEPT_S)
        except IntegrityError as error:
            log.error("%s", error)
        except StoreError as error:  # in use: left to the next prune
            log.info("nothing is pruned: %s", error)
    if settings.archive_dir:
        done.append(prune_archives(Path(settings.archive_dir), Keep.of_archives(settings), Store.of(settings)))
    for pruned in done:
        for name in pruned.removed:
            log.info("removed %s of %s, by the retention configured", name, pruned.where)


def choose(
    manifests: Sequence[StoredManifest],
    keep: Keep,
    now_s: float,
    *,
    of_all_nodes: bool = False,
    left: Collection[str] = (),
) -> list[str]:
    """Return which of all checkpoints, given in order, to remove. Of each container the newest always stays.

    The checkpoints of one epoch of a gang are removed together, or stay. An epoch that lacks members counts only beside
    others that do, and only as long as there is no newer one that is complete; so does one that is left behind.

    Args:
        manifests: of a domain.
        keep: what stays.
        now_s: since the epoch.
        of_all_nodes: whether they are those of all nodes, as at a remote, and not of one.
        left: ids of those that are left behind: no new pod resumes from them.
    """
    epochs = Epochs(manifest.container for manifest in manifests)
    is_whole = epochs.is_whole if of_all_nodes else epochs.has_all_of_node
    candidates = [
        _Candidate(
            order, _made_s(m), lineage(m.container), m.id, m.container.gang, is_whole(m.container) and m.id not in left
        )
        for order, m in enumerate(manifests)
    ]
    going = set(_choose(candidates, keep, now_s))
    kept = _with_epochs({candidate.name for candidate in candidates if candidate.name not in going}, candidates)
    return [candidate.name for candidate in candidates if candidate.name not in kept]


def _choose(candidates: Iterable[_Candidate], keep: Keep, now_s: float) -> list[str]:
    if not keep.last and not keep.within_s:
        return []
    rows: dict[str, list[_Candidate]] = {}
    for candidate in sorted(candidates, reverse=True):
        rows.setdefault(candidate.container, []).append(candidate)
    return [
        candidate.name
        for row in rows.values()
        for candidate in _beyond(row, max(1, keep.last))
        if not keep.within_s or now_s - candidate.made_s > keep.within_s  # whatever clocks did
    ]


def _beyond(row: Sequence[_Candidate], last: int) -> list[_Candidate]:
    """Return what is not among the last of a container's, given from the newest on.

    What lacks members may be complete one day, but not once a newer one is.
    """
    whole = [candidate for candidate in row if candidate.is_whole]
    unfinished = [candidate for candidate in row if not candidate.is_whole]
    newer = [candidate for candidate in unfinished if not whole or candidate.order > whole[0].order]
    kept = {*whole[:last], *newer[:last]}
    return [candidate for candidate in row if candidate not in kept]


def _made_s(manifest: StoredManifest) -> float:
    try:
        return float(calendar.timegm(time.strptime(manifest.created, "%Y-%m-%dT%H:%M:%SZ")))
    except ValueError:
        return 0.0


def _discard_lost(domain: Domain, loss_kept_s: float) -> int:
    """Remove what was taken for checkpoints that can no longer be completed, or was only taken in part."""
    freed = 0
    for pending in list(domain.pending_dir.iterdir()):
        with claimed(pending) as is_ours:
            if is_ours and _is_lost(domain, pending, loss_kept_s):
                freed += sum(path.stat().st_size for path in pending.iterdir())
                discard_staged(pending, pins_of(pending.name))
    return freed


def _is_lost(domain: Domain, pending: Path, loss_kept_s: float) -> bool:
    try:
        job = claimed_job(domain, pending.name)
        if job is None:  # being taken, or the dump was interrupted long ago
            return time.time() - pending.stat().st_mtime > _TAKEN_WITHIN_S
        if job.lost and time.time() - (pending / JOB_NAME).stat().st_mtime < loss_kept_s:
            return False
        check_taken(job)
    except IntegrityError as error:
        log.warning("%s", error)
        return True
    return False
