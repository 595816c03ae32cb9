"""One restore, stage by stage: what is restored and how, then what each participant does about it."""

import contextlib
import logging
import os
from collections.abc import Callable
from pathlib import Path

from ocihook.config import Settings
from ocihook.container.descriptors import check_image_files
from ocihook.container.runtime_call import find_runtime_call
from ocihook.errors import ConfigError, IdentificationError
from ocihook.images.direct import put_back
from ocihook.linux.patience import Patience
from ocihook.session.journal import Journal
from ocihook.session.participant import Restore
from ocihook.stages.dump import call_facts, identify
from ocihook.stages.order import participants
from ocihook.wire import Request

log = logging.getLogger(__name__)

Load = Callable[[], Settings]


def pre_restore(journal: Journal, patience: Patience, request: Request, directory: Path, load: Load) -> str:
    """Verify a packed image set and write its page images for CRIU to read.

    Every check that can fail is made here, before any process exists.

    Raises:
        OcihookError: to refuse the restore; the image set is as it was.
    """
    settings = _settings(load)
    journal.note(call_facts(settings, request.criu_pid))
    with contextlib.suppress(IdentificationError, ConfigError):  # for messages only: a restore does not need it
        call = find_runtime_call(request.criu_pid)
        if call is not None:
            identify(journal, request, call, settings)
    check_image_files(directory)  # CRIU has opened a few of them by now, and opens the others next
    put_back(directory)  # of a restore that ended with the node's power
    restore = _restore(journal, patience, request, directory, settings)
    taking_part = participants()
    for participant in taking_part:
        participant.check(restore)
        patience.check()
    messages = [participant.before_processes(restore) for participant in taking_part]
    if not any(participant.needs_processes(restore) for participant in taking_part):
        journal.pass_over("setup-namespaces", "post-restore")
    return "; ".join(filter(None, messages))


def setup_namespaces(journal: Journal, patience: Patience, request: Request, directory: Path, load: Load) -> str:
    """Take note of the first process that CRIU has made."""
    restore = _restore(journal, patience, request, directory, _settings(load))
    for participant in reversed(participants()):
        participant.processes_made(restore)
    return ""


def post_restore(journal: Journal, patience: Patience, request: Request, directory: Path, load: Load) -> str:
    """Fill what went past CRIU into the new processes, which wait in CRIU's restorer.

    Raises:
        OcihookError: to let the restore fail; CRIU kills the processes.
    """
    restore = _restore(journal, patience, request, directory, _settings(load))
    taking_part = participants()
    for participant in taking_part:
        participant.recall(restore)
    messages = [participant.processes_wait(restore) for participant in reversed(taking_part)]
    return "; ".join(filter(None, messages))


def pre_resume(journal: Journal, patience: Patience, request: Request, directory: Path, load: Load) -> str:
    """See that nothing runs before it can."""
    restore = _restore(journal, patience, request, directory, _settings(load))
    for participant in reversed(participants()):
        participant.about_to_run(restore)
    return restore.remark


def post_resume(journal: Journal, patience: Patience, request: Request, directory: Path, load: Load) -> str:
    """Give the container what it waits for, and let its application go on.

    Raises:
        OcihookError: if something cannot be given; CRIU ignores that, so the error says what was done about it.
    """
    restore = _restore(journal, patience, request, directory, _settings(load))
    failure: Exception | None = None
    for participant in reversed(participants()):  # all of them: nothing that waits is left waiting
        try:
            participant.running(restore)
        except Exception as error:  # noqa: BLE001 - raised below
            failure = failure or error
    if failure is not None:
        raise failure
    return ""


def _settings(load: Load) -> Settings:
    try:
        return load()
    except ConfigError as error:
        log.warning("%s; restoring with default settings", error)
        return Settings()


def _restore(journal: Journal, patience: Patience, request: Request, directory: Path, settings: Settings) -> Restore:
    return Restore(
        journal=journal,
        patience=patience,
        criu_pid=request.criu_pid,
        init_pid=request.init_pid,
        image_dir=os.readlink(request.image_dir) if request.stage != "post-resume" else "",
        directory=directory,
        settings=settings,
    )
