"""Undoes what a session has done to a node, newest first; each effect knows how."""

import logging
from typing import NamedTuple

from ocihook.errors import OcihookError, plain
from ocihook.linux.patience import Patience
from ocihook.session.effect import Effect
from ocihook.session.journal import Journal

log = logging.getLogger(__name__)


class Recovery(NamedTuple):
    """The outcome of recovering one session."""

    session_id: str
    container: str
    outcome: str  # undone, running (CRIU is at work), served (by an agent), failed
    detail: str

    def __str__(self) -> str:
        return f"session {self.session_id} of container {self.container}: {self.outcome}: {self.detail}"


def undo_interrupted(journal: Journal, patience: Patience) -> None:
    """Undo what a stage had begun when its agent was killed, so that it can start over.

    What earlier stages did stays, and so does what is to last until the end: the dump continues.

    Raises:
        OcihookError: if an effect cannot be undone.
    """
    for effect in reversed(journal.effects):
        if effect.ends_with_stage and effect.stage == journal.stage:
            _undo(effect, journal, patience)


def undo_all(journal: Journal, patience: Patience) -> None:
    """Undo a session's effects, newest first, and forget each that is undone.

    Args:
        journal: of a session that has ended, or whose stage was refused.
        patience: how long to wait for what others must do first, as to release a container.

    Raises:
        OcihookError: if an effect cannot be undone; it and the older ones stay in the journal.
    """
    for effect in reversed(journal.effects):
        _undo(effect, journal, patience)


def undo_holding(journal: Journal, patience: Patience) -> None:
    """Undo what keeps a container from running as it did, once CRIU has detached from it. As `undo_all` otherwise."""
    for effect in reversed(journal.effects):
        if effect.holds_container:
            _undo(effect, journal, patience)


def _undo(effect: Effect, journal: Journal, patience: Patience) -> None:
    try:
        effect.undo(journal, patience)
    except OSError as error:
        raise OcihookError(
            f"{effect.kind} of session {journal.session_id} (container {journal.container}) "
            f"could not be undone: {plain(error)}",
            hint="remove the cause and run `ocihook recover`",
        ) from error
    log.info("undone: %s of session %s, container %s", effect.kind, journal.session_id, journal.container)
    journal.forget(effect)
