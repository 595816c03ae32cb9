"""A member of a gang that is stopped alone: its others are checkpointed with it, and left running, if it wants that.

Members that are all stopped get their signals within a second or so, and each is checkpointed by its own stop.
"""

import contextlib
import logging
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ocihook.checkpoints.belongings import stopping_dir
from ocihook.config import Settings, apply_annotations
from ocihook.container.identity import gang_ref
from ocihook.errors import OcihookError, plain
from ocihook.model import GangRef
from ocihook.runtime import containers, dumping
from ocihook.runtime.containers import Kept
from ocihook.runtime.stop_record import read_config, read_stop

LEFT_NAME = "left-running"  # in the place of a dump: its container is not being stopped
STOPS_S = 2.0  # for all members that are stopped at once to get their signals

log = logging.getLogger(__name__)


@dataclass
class Others:
    """The other members of a container's gang that this node's runtime handler has."""

    settings: Settings
    members: list[Kept] = field(default_factory=list)
    running: dict[Path, "subprocess.Popen[bytes]"] = field(default_factory=dict)

    @classmethod
    def of(cls, kept: Kept, settings: Settings) -> "Others":
        """Find them for a container that is stopped; none if its policy does not want them, or it is in no gang."""
        with contextlib.suppress(OcihookError, OSError):  # the dump itself reports it
            notes = read_config(kept).get("annotations") or {}
            policy = apply_annotations(settings, notes, in_pod=kept.container.is_in_pod).policy
            mine = gang_ref(notes, kept.container)
            if mine is not None and policy.on_member_stop == "checkpoint":
                return cls(settings, list(_members(mine, kept)))
        return cls(settings)

    def dump(self) -> None:
        """Begin to dump those that are not being stopped themselves. One that cannot be dumped fails it for all."""
        for kept in self.members:
            container_id = kept.container.id
            is_ended = (containers.directory_of(container_id) / containers.ENDED_NAME).exists()
            if is_ended or read_stop(container_id) is not None:
                continue
            place = stopping_dir(Path(self.settings.store_dir), container_id)
            try:
                dumping.check_sizes(kept, self.settings)
                dumping.make_place(kept, self.settings, place)
                (place / LEFT_NAME).touch(mode=0o600)
                self.running[place] = dumping.begin(kept, place, leave_running=True)
            except (OcihookError, OSError) as error:
                log.error("container %s is not checkpointed with its gang: %s", kept.container, plain(error))

    def wait(self, timeout_s: float) -> None:
        """Wait until their dumps are over, and remove what they leave; each dump's session reports what came of it."""
        for place, runtime in self.running.items():
            try:
                runtime.wait(timeout_s)
            except subprocess.TimeoutExpired:
                runtime.kill()
                runtime.wait()  # waits: no, it was killed
            shutil.rmtree(place, ignore_errors=True)


def _members(mine: GangRef, kept: Kept) -> Iterator[Kept]:
    for other in containers.all_kept():
        if other.container.id != kept.container.id:
            with contextlib.suppress(OcihookError, OSError):  # of a container that is being made, or removed
                gang = gang_ref(read_config(other).get("annotations") or {}, other.container)
                if gang is not None and gang[:2] == mine[:2]:
                    yield other
