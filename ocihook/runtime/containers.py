"""What the handler keeps of a container from one call to the next: below /run, so a boot forgets it.

The `sh` before us looks for the directory alone: a container that has none is not ours.
"""

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ocihook import wire
from ocihook.errors import OcihookError
from ocihook.linux.cgroup import Freezer
from ocihook.linux.files import replace_file
from ocihook.linux.procfs import Process
from ocihook.model import ContainerRef
from ocihook.session.record import from_json, to_json

RECORD_NAME = wire.CONTAINER_RECORD_NAME
HELD_NAME = "held"  # restored, and frozen until it is started: its first process, and what thaws it
LOG_NAME = "runtime.log"  # of calls of the runtime that are our own
ENDED_NAME = "ended"  # checkpointed and gone: the runtime has nothing of it any more


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A container of ours."""

    container: ContainerRef
    bundle: Path
    program: Path  # the runtime
    prefix: tuple[str, ...]  # what engines call it with, before the command
    domain: str  # of the store, that its checkpoints are in
    checkpoint: str = ""  # that it was restored from
    init: Process | None = None  # of what was restored
    cgroup: Path | None = None  # of what was restored
    stop_signals: tuple[str, ...] = ()  # that `create` found to become a checkpoint; (): none does

    @property
    def is_running(self) -> bool:
        """Return whether what was restored runs: its first process may end before the others, where it shares pids."""
        if self.init is None:
            return False
        return self.init.is_alive() or (self.cgroup is not None and bool(Freezer(self.cgroup, 2).all_members()))


def directory_of(container_id: str, runtime_dir: Path | None = None) -> Path:
    """Return where something is kept of a container."""
    return root(runtime_dir) / container_id


def root(runtime_dir: Path | None = None) -> Path:
    """Return the directory of all of these."""
    return (runtime_dir or Path(wire.RUNTIME_DIR)) / wire.CONTAINERS_NAME


def keep(kept: Kept, runtime_dir: Path | None = None) -> Path:
    """Make a container ours, or change its record; return its directory."""
    directory = directory_of(kept.container.id, runtime_dir)
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    replace_file(directory / RECORD_NAME, json.dumps(to_json(kept)).encode(), mode=0o600, durable=False)
    return directory


def read(container_id: str, runtime_dir: Path | None = None) -> Kept | None:
    """Return what is kept of a container; None if it is not ours.

    Raises:
        OcihookError: if the record is damaged.
    """
    path = directory_of(container_id, runtime_dir) / RECORD_NAME
    try:
        return from_json(Kept, json.loads(path.read_bytes()))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise OcihookError(f"{path} cannot be read: {error!r}", hint="remove the container") from error


def all_kept(runtime_dir: Path | None = None) -> Iterator[Kept]:
    """Yield the containers that are ours."""
    for path in sorted(root(runtime_dir).glob("*")):
        kept = read(path.name, runtime_dir)
        if kept is not None:
            yield kept


def forget(container_id: str, runtime_dir: Path | None = None) -> None:
    """Forget a container. May run any time."""
    shutil.rmtree(directory_of(container_id, runtime_dir), ignore_errors=True)
