"""Puts a node back in order after an agent was killed: undoes what the journals of dead sessions still hold."""

import os
from functools import partial
from pathlib import Path

import ocihook.stages.order  # noqa: F401 - whose participants know the effects
from ocihook import wire
from ocihook.config import Settings
from ocihook.errors import OcihookError, plain
from ocihook.linux.patience import Patience
from ocihook.session import history
from ocihook.session.journal import Journal, open_journals, remove_unwritten
from ocihook.session.lock import lock_agent
from ocihook.session.undo import Recovery, undo_all
from ocihook.stages.detached import is_due


def recover(
    runtime_dir: Path = Path(wire.RUNTIME_DIR), *, settings: Settings | None = None, release_timeout_s: float = 60.0
) -> list[Recovery]:
    """Undo the effects of every session whose CRIU and agent are gone.

    Sessions that an agent serves are left to it; it undoes them itself. A session whose CRIU still runs is left
    alone, too: its next stage starts an agent that finishes it; unless it has no other and waits at its end, where it
    is killed. With `settings` the others go into the history.
    """
    lock = lock_agent(runtime_dir)
    try:
        if lock is not None:
            remove_unwritten(runtime_dir)
        how = partial(_recover, settings=settings, is_served=lock is None, timeout_s=release_timeout_s)
        return [how(path) for path in open_journals(runtime_dir)]
    finally:
        if lock is not None:
            os.close(lock)


def _recover(path: Path, *, settings: Settings | None, is_served: bool, timeout_s: float) -> Recovery:
    container = "unknown"
    try:
        journal = Journal.load(path)
        container = str(journal.container or "unknown")
        if is_served:
            return Recovery(path.stem, container, "served", "an agent is at work on it")
        if journal.criu.is_alive() and not is_due(journal):
            return Recovery(path.stem, container, "running", f"CRIU (pid {journal.criu.pid}) is at work on it")
        kinds = [effect.kind for effect in journal.effects]
        undo_all(journal, Patience(timeout_s=timeout_s))
        keep = partial(history.keep, Path(settings.history_dir), limit=settings.history_kept) if settings else None
        journal.finish(keep)
    except (OcihookError, OSError) as error:
        return Recovery(path.stem, container, "failed", plain(error))
    return Recovery(path.stem, container, "undone", ", ".join(kinds) or "nothing was left")
