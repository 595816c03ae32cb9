"""A container that the runtime handler restores in place of `create` stands still until its engine starts it."""

import json
import logging
from pathlib import Path

from ocihook import wire
from ocihook.errors import FreezeError
from ocihook.linux.cgroup import HELD, Freezer, find_freezer, held_below_root
from ocihook.linux.procfs import descendants
from ocihook.session.participant import Participant, Restore

log = logging.getLogger(__name__)


class UntilStarted(Participant):
    """Freezes what the runtime handler restores, in its own cgroup; in one below where others are in it, too.

    crun has CRIU restore in the cgroup of its own caller, and then moves the first process: to one that is frozen. With
    cgroups v1 or those of systemd it restores in the container's own, where a process of its own must not stand still.

    No effect in the journal says so: the handler has a record of the restore, answers for the container, and freezes
    its own cgroup in any case when CRIU is gone.
    """

    def about_to_run(self, restore: Restore) -> None:
        """Freeze the container before it runs at all, unless its GPUs need it to run."""
        if restore.checkpoint is None or not restore.checkpoint.gpu:
            _hold(restore)

    def running(self, restore: Restore) -> None:
        """Freeze it when it has its GPUs."""
        _hold(restore)


def _hold(restore: Restore) -> None:
    container = restore.journal.container
    if container is None or "/" in container.id:
        return
    directory = restore.journal.path.parents[1] / wire.CONTAINERS_NAME / container.id
    try:
        noted = json.loads((directory / wire.RESTORING_NAME).read_bytes())
    except FileNotFoundError:
        return
    try:
        if noted.get("cgroup"):  # on record there: whoever reverts the restore thaws it
            own = Freezer(Path(noted["cgroup"]), 2)
            own.directory.mkdir(parents=True, exist_ok=True)
            own.freeze(None)
        own_pids = {*descendants(restore.init_pid)}
        for pid in sorted(own_pids):
            freezer = find_freezer(pid)
            if freezer is None and (freezer := held_below_root(pid)):
                freezer.enclose(pid)
                freezer.freeze(None)
            elif freezer is not None and freezer.directory.name != HELD:
                if freezer.all_members() - own_pids:
                    freezer = Freezer(freezer.directory / HELD, freezer.version)
                    freezer.enclose(pid)
                freezer.freeze(None)
    except (FreezeError, OSError) as error:  # it is frozen a moment later, after it has begun to run
        log.warning("container %s runs before it is started: %s", container, error)
