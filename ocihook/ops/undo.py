"""The inverse of every effect that a session can have on a node. Each may run twice, and long after CRIU is gone."""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ocihook.errors import OcihookError
from ocihook.linux.cgroup import Freezer, wait_until_released
from ocihook.linux.files import same_directory
from ocihook.linux.procfs import Process
from ocihook.ops import gpu_dump, gpu_restore, image_set, staging
from ocihook.ops.journal import Journal
from ocihook.ops.quiesce import signal_number
from ocihook.ops.standstill import FREEZE_TIMEOUT_S, FROZEN, THAWED, thaw

log = logging.getLogger(__name__)


def undo_interrupted(journal: Journal) -> None:
    """Undo what a stage had begun when its agent was killed, so that it can begin anew.

    An application that was asked to quiesce is left so: it is asked once more, and told to go on at the end. What
    earlier stages did stays, too: the dump goes on.

    Raises:
        OcihookError: if an effect cannot be undone.
    """
    for effect in reversed(journal.effects):
        if effect["kind"] != "quiesced" and effect["stage"] == journal.stage:
            _undo(effect, journal, None)


def undo_all(journal: Journal, *, release_timeout_s: float | None = None) -> None:
    """Undo a session's effects, newest first, and forget each that is undone.

    Args:
        journal: of a session that has ended, or whose stage was refused.
        release_timeout_s: how long to wait for a container to run again before it is told so; None: as long as
            it exists.

    Raises:
        OcihookError: if an effect cannot be undone; it and the older ones stay in the journal.
    """
    for effect in reversed(journal.effects):
        _undo(effect, journal, release_timeout_s)


def _undo(effect: Mapping[str, Any], journal: Journal, release_timeout_s: float | None) -> None:
    try:
        _INVERSES[effect["kind"]](effect, journal, release_timeout_s)
    except OSError as error:
        raise OcihookError(
            f"{effect['kind']} of session {journal.session_id} (container {journal.container}) "
            f"could not be undone: {error}",
            hint="remove the cause and run `ocihook recover`",
        ) from error
    log.info("undone: %s of session %s, container %s", effect["kind"], journal.session_id, journal.container)
    journal.pop(effect["kind"])


def _refreeze(effect: Mapping[str, Any], journal: Journal, _timeout_s: float | None) -> None:
    """Freeze again what was thawed, as long as CRIU and so the engine's own pause are still there.

    Once CRIU is gone the engine resumes, or has resumed, the container: a freeze now would be for ever.
    """
    if journal.criu.is_alive() and Path(effect["directory"]).exists():
        Freezer(Path(effect["directory"]), effect["version"]).freeze(FREEZE_TIMEOUT_S)


def _thaw(_effect: Mapping[str, Any], journal: Journal, _timeout_s: float | None) -> None:
    thaw(journal)


def _resume_application(effect: Mapping[str, Any], _journal: Journal, timeout_s: float | None) -> None:
    """Tell a quiesced application to go on, as soon as it can hear it."""
    init = Process(*effect["init"])
    wait_until_released(init, timeout_s)
    init.send(signal_number(effect["signal"]))


def _finish_packing(effect: Mapping[str, Any], _journal: Journal, _timeout_s: float | None) -> None:
    directory = same_directory(Path(effect["directory"]), effect["identity"])
    if directory:
        image_set.finish_packing(directory)


def _finish_staging(effect: Mapping[str, Any], _journal: Journal, _timeout_s: float | None) -> None:
    staging.finish_staging(effect)


def _dehydrate(effect: Mapping[str, Any], _journal: Journal, _timeout_s: float | None) -> None:
    directory = same_directory(Path(effect["directory"]), effect["identity"])
    if directory:
        image_set.dehydrate(directory, effect["names"])


_INVERSES: Mapping[str, Callable[[Mapping[str, Any], Journal, float | None], None]] = {
    THAWED: _refreeze,
    FROZEN: _thaw,
    "quiesced": _resume_application,
    "packing": _finish_packing,
    "staging": _finish_staging,
    "rehydrated": _dehydrate,
    "gpu-checkpointed": gpu_dump.resume,
    "half-restored": gpu_restore.end_half_restored,
    "gpu-restored": gpu_restore.resume,
}
