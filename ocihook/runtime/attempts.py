"""A checkpoint that could not be resumed: how often that failed on this node, and what keeps it from retention.

Its container starts from scratch then, by policy, and what that one has done becomes the newest checkpoint. So the
other one is pinned until a container resumes from it, or a user takes the pin off.
"""

import contextlib
import logging
import re
import time
from pathlib import Path
from typing import Any

from ocihook.config import Settings
from ocihook.errors import OcihookError, ProgramChanged, RestoreError, plain
from ocihook.linux.files import replace_file
from ocihook.model import ContainerRef
from ocihook.session import history
from ocihook.store.store import Store
from ocihook.store.thin import Thin

MOST_ATTEMPTS = 2  # of one checkpoint on one node that may fail
_WHY = b"it could not be resumed\n"  # of a pin that is ours

log = logging.getLogger(__name__)


def attempts_path(settings: Settings, thin: Thin) -> Path:
    """Return the file that counts the restores of a checkpoint that have failed on this node."""
    return Path(settings.store_dir) / "restoring" / f"{thin.checkpoint_id}.attempts"


def check_attempts(thin: Thin, settings: Settings) -> None:
    """Refuse a checkpoint that failed too often on this node.

    Raises:
        RestoreError: if it did, or if that is not known.
    """
    made = _attempts(attempts_path(settings, thin))
    if made >= MOST_ATTEMPTS:
        raise RestoreError(
            f"checkpoint {thin.checkpoint_id} could not be restored {made} times and is not tried again",
            hint=f"remove the cause, then {attempts_path(settings, thin)}",
        )


def count_attempt(thin: Thin, settings: Settings) -> None:
    """Count an attempt, and pin the checkpoint, before it is made: the process that makes it may be killed."""
    path = attempts_path(settings, thin)
    replace_file(path, str(_attempts(path) + 1).encode(), mode=0o600)
    _pin(thin, settings)


def _attempts(path: Path) -> int:
    """Return how many are on record.

    Raises:
        RestoreError: if the record is damaged: whether the checkpoint may be tried is not known.
        OSError: if it cannot be read.
    """
    try:
        made = path.read_bytes()
    except FileNotFoundError:
        return 0
    if not re.fullmatch(rb"[0-9]{1,9}", made):
        raise RestoreError(f"{path}, which counts failed restores of a checkpoint, is damaged", hint=f"remove {path}")
    return int(made)


def keep(thin: Thin, settings: Settings, container: ContainerRef, why: str, began_s: float) -> str:
    """Pin a checkpoint that a container could not resume from, and put that on record; return what to tell its user.

    Args:
        thin: the checkpoint.
        settings: the node's.
        container: that could not resume.
        why: the reason.
        began_s: since the epoch: when it was tried.
    """
    record(thin, settings, container, RestoreError(why), began_s)
    try:
        is_pinned = _pin(thin, settings)
    except (OcihookError, OSError) as error:  # the container starts all the same; its user has to know
        log.error("checkpoint %s cannot be pinned: %s", thin.checkpoint_id, plain(error))
        is_pinned = False
    state = "is pinned" if is_pinned else "is not in this node's store, and retention may remove it where it is"
    return f"Checkpoint {thin.checkpoint_id} {state}: see the runbook, `A container that was not resumed`"


def release(thin: Thin, settings: Settings) -> None:
    """Take off the pin of a checkpoint that a container runs from now, and forget attempts that failed."""
    attempts_path(settings, thin).unlink(missing_ok=True)
    try:
        store = Store.of(settings)
        if thin.domain in store.names():
            store.open(thin.domain).marks.unpin(thin.checkpoint_id, only=_WHY)
    except (OcihookError, OSError) as error:  # the container runs: a pin that stays costs room alone
        log.warning("the pin of checkpoint %s stays: %s", thin.checkpoint_id, plain(error))


def _pin(thin: Thin, settings: Settings) -> bool:
    """Pin a checkpoint that is here, complete or not yet; return whether it is."""
    from ocihook.checkpoints.pending import is_here  # late: a container that resumes needs none of it

    store = Store.of(settings)
    if not is_here(store, thin):
        return False
    domain = store.open(thin.domain)
    if not domain.marks.is_pinned(thin.checkpoint_id):
        domain.marks.pin(thin.checkpoint_id, _WHY)
    return True


def record(thin: Thin, settings: Settings, container: ContainerRef, error: OcihookError, began_s: float) -> None:
    """Put on record why a container did not resume from a checkpoint.

    Args:
        thin: the checkpoint.
        settings: the node's.
        container: that starts from scratch, or not at all.
        error: the reason.
        began_s: since the epoch: when it was tried.
    """
    entry: dict[str, Any] = {"act": "resume", "began": began_s, "ended": time.time(), "stages": {}, "phases": []}
    outcome = "refused" if isinstance(error, ProgramChanged) else "failed"
    entry |= {"outcome": outcome, "error": str(error), "error_code": error.code, "container": container.to_json()}
    entry["facts"] = {"checkpoint": thin.checkpoint_id, "domain": thin.domain}
    directory = Path(settings.history_dir)
    with contextlib.suppress(OSError):  # a full disk: the log and the runtime's caller have the reason, too
        history.keep(directory, f"resume-{thin.checkpoint_id}", entry, limit=settings.history_kept)
