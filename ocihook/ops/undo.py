"""The inverse of every effect that a session can have on a node. Each may run twice, and long after CRIU is gone."""

import logging
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ocihook.errors import OcihookError
from ocihook.linux.cgroup import Freezer, find_freezer
from ocihook.linux.procfs import Process, tracer_pid
from ocihook.ops import image_set
from ocihook.ops.journal import Journal
from ocihook.ops.quiesce import signal_number

FREEZE_TIMEOUT_S = 10.0
RELEASE_POLL_S = 0.02

log = logging.getLogger(__name__)


def undo_interrupted(journal: Journal) -> None:
    """Undo what a stage had begun when its agent was killed, so that it can begin anew.

    An application that was asked to quiesce is left so: it is asked once more, and told to go on at the end.

    Raises:
        OcihookError: if an effect cannot be undone.
    """
    for effect in reversed(journal.effects):
        if effect["kind"] != "quiesced":
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


def _resume_application(effect: Mapping[str, Any], _journal: Journal, timeout_s: float | None) -> None:
    """Tell a quiesced application to go on, as soon as it can hear it."""
    init = Process(*effect["init"])
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while not is_released(init):
        if deadline is not None and time.monotonic() > deadline:
            raise OcihookError(
                f"process {init.pid} is still stopped by its engine or tracer after {timeout_s:g} s",
                hint="let the container run (for instance `podman unpause`), then `ocihook recover`",
            )
        time.sleep(RELEASE_POLL_S)
    init.send(signal_number(effect["signal"]))


def is_released(init: Process) -> bool:
    """Tell whether a process runs freely, neither traced nor frozen; one that is gone is free, too."""
    if not init.is_alive():
        return True
    freezer = find_freezer(init.pid)
    return tracer_pid(init.pid) == 0 and not (freezer and freezer.is_frozen())


def _finish_packing(effect: Mapping[str, Any], _journal: Journal, _timeout_s: float | None) -> None:
    directory = same_directory(effect)
    if directory:
        image_set.finish_packing(directory)


def _dehydrate(effect: Mapping[str, Any], _journal: Journal, _timeout_s: float | None) -> None:
    directory = same_directory(effect)
    if directory:
        image_set.dehydrate(directory, effect["names"])


def same_directory(effect: Mapping[str, Any]) -> Path | None:
    """Return the directory that an effect was made in; None if it is gone, or another one is at its place."""
    directory = Path(effect["directory"])
    try:
        status = os.stat(directory)
    except OSError:
        return None
    return directory if [status.st_dev, status.st_ino] == effect["identity"] else None


_INVERSES: Mapping[str, Callable[[Mapping[str, Any], Journal, float | None], None]] = {
    "thawed": _refreeze,
    "quiesced": _resume_application,
    "packing": _finish_packing,
    "rehydrated": _dehydrate,
}
