"""Checkpoints of a container that was created again in its own pod: no new pod resumes from them.

A stop looks the same whether its pod is deleted or its liveness probe kills a hung process; only the pod that creates
the container again tells which it was. Its checkpoints are marked in the store, where a user can still name them by
id, and removed at the remote, where other nodes would take the newest. The agent removes them: `left/` of the store's
directory records which.
"""

import contextlib
import logging
import time
from collections.abc import Iterator
from pathlib import Path

from ocihook.checkpoints.pending import pending_ids, read_job
from ocihook.config import Settings
from ocihook.errors import IntegrityError, OcihookError, plain
from ocihook.linux.files import make_directory, replace_file
from ocihook.linux.patience import Patience
from ocihook.linux.workers import call_each
from ocihook.model import ContainerRef
from ocihook.remote.location import open_remote
from ocihook.runtime.containers import Kept
from ocihook.store.domain import Domain
from ocihook.store.lineage import lineage
from ocihook.store.store import Store
from ocihook.store.thin import Thin

_REMOVE_S = 60.0  # that the remote may take
_AGAIN_S = 30.0  # after a remote that was away
_GIVEN_UP_S = 7 * 86400.0  # for a remote that stays away

log = logging.getLogger(__name__)


def is_restart(now: ContainerRef, then: ContainerRef) -> bool:
    """Return whether a container is that of a checkpoint, or in the same pod: it was restarted, and not made again."""
    return now.id == then.id or (bool(now.pod_uid) and now.pod_uid == then.pod_uid)


def leave_behind(kept: Kept, settings: Settings, chosen: Thin | None = None) -> list[str]:
    """Have no new pod resume from what a container was checkpointed to before it was created again; return the ids.

    Args:
        kept: the container, which starts from scratch.
        settings: the node's.
        chosen: the newest of its checkpoints, if it is known; it may be at the remote alone.

    Raises:
        OcihookError, OSError: if the store cannot be read or written.
    """
    store = Store.of(settings)
    if kept.domain not in store.names():
        if chosen is None:
            return []
        store.open(kept.domain, create=True)
    domain = store.open(kept.domain)
    ids = [] if chosen is None else [chosen.checkpoint_id]
    for checkpoint_id, container in _checkpoints(domain):
        if lineage(container) == lineage(kept.container) and is_restart(kept.container, container):
            ids.append(checkpoint_id)
    new = [checkpoint_id for checkpoint_id in dict.fromkeys(ids) if not domain.marks.is_left(checkpoint_id)]
    for checkpoint_id in new:
        if settings.remote:
            queue = _queue(settings)
            make_directory(queue, within=Path(settings.store_dir))
            replace_file(queue / f"{kept.domain}.{checkpoint_id}", b"", mode=0o600)
        domain.marks.leave(checkpoint_id)
    return new


def _checkpoints(domain: Domain) -> Iterator[tuple[str, ContainerRef]]:
    for checkpoint_id in pending_ids(domain):  # first: it may be completed at any moment
        with contextlib.suppress(IntegrityError):  # it was lost, which is reported elsewhere
            job = read_job(domain, checkpoint_id)
            if job is not None and job.belongings_bytes:
                yield job.id, job.container
    for manifest in domain.checkpoints():
        if manifest.belongings_bytes:
            yield manifest.id, manifest.container


def has_left(settings: Settings) -> bool:
    """Return whether something is to be removed at the remote, so that an agent must be there."""
    return any(True for _ in _queue(settings).glob("*"))


def has_due_left(settings: Settings) -> bool:
    """Return whether that is to be tried now; also if the clock was put back."""
    return any(_is_due(path) for path in _queue(settings).glob("*"))


def _is_due(path: Path) -> bool:
    with contextlib.suppress(OSError, ValueError):  # removed just now, or not tried yet
        return not 0 <= time.time() - float(path.read_bytes()) < _AGAIN_S
    return True


def tend_left(settings: Settings) -> None:
    """Remove at the remote what no new pod is to resume from."""
    for path in sorted(_queue(settings).glob("*")):
        if not _is_due(path):
            continue
        domain, _, checkpoint_id = path.name.rpartition(".")
        (outcome,) = call_each(
            lambda name: open_remote(settings.remote, name[0]).remove([name[1]]),
            [(domain, checkpoint_id)],
            Patience(timeout_s=_REMOVE_S),
        )
        if isinstance(outcome, Exception) and time.time() - _since_s(Store.of(settings), path) < _GIVEN_UP_S:
            log.error(
                "checkpoint %s, of a process that was restarted, stays at the remote: %s",
                *(checkpoint_id, plain(outcome)),
            )
            replace_file(path, str(int(time.time())).encode(), mode=0o600, durable=False)
        else:
            path.unlink(missing_ok=True)


def _since_s(store: Store, path: Path) -> float:
    """Return since when a checkpoint is left behind; 0 if it is no longer in the store."""
    domain, _, checkpoint_id = path.name.rpartition(".")
    with contextlib.suppress(OcihookError, OSError):
        return store.open(domain).marks.left_since_s(checkpoint_id)
    return 0.0


def _queue(settings: Settings) -> Path:
    return Path(settings.store_dir) / "left"
