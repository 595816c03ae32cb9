"""A container is dumped by a call of its runtime, into a place below the store: nobody makes an archive of it."""

import contextlib
import json
import os
import shutil
import subprocess
from pathlib import Path

from ocihook.belongings.filesystems import volumes_of
from ocihook.checkpoints.belongings import FACTS_NAME, IMAGES_DIR, Belongings
from ocihook.config import Settings
from ocihook.container.spec import spec_facts
from ocihook.errors import UnsupportedError
from ocihook.linux.files import make_directory, replace_file
from ocihook.linux.procfs import Process, command_line
from ocihook.runtime.call import Call
from ocihook.runtime.containers import ENDED_NAME, Kept, all_kept, directory_of
from ocihook.runtime.stop_record import read_config
from ocihook.runtime.tracking import parent_options
from ocihook.session.record import to_json

LOG_NAME = "runtime.log"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"  # runc finds CRIU by it


def check_sizes(kept: Kept, settings: Settings) -> None:
    """Refuse a container that has changed more than the node's configuration allows.

    Raises:
        OcihookError: if it has, or if that cannot be determined.
        OSError: if something of it cannot be read.
    """
    Belongings.of(read_config(kept), kept.bundle, os.getpid()).check_sizes(settings)


def sharers(kept: Kept) -> dict[str, list[str]]:
    """Return which other containers run that have a volume in common with this one which is to be saved.

    Each saves it when it stands still itself: there is no moment at which all of them do.

    Returns:
        Their names, by where this container has the volume; without volumes that are empty.

    Raises:
        OcihookError: if the container's config.json cannot be read.
        OSError: if a volume cannot be read.
    """
    found: dict[str, list[str]] = {}
    own = {place: path for place, path in volumes_of(read_config(kept)).items() if any(path.iterdir())}
    for other in all_kept():
        theirs: set[Path] = set()
        with contextlib.suppress(UnsupportedError):  # it is removed just now
            theirs.update(volumes_of(read_config(other)).values())
        is_other = (
            other.container.id != kept.container.id and not (directory_of(other.container.id) / ENDED_NAME).exists()
        )
        for place in (place for place, path in own.items() if is_other and path in theirs):
            found.setdefault(place, []).append(other.container.name or other.container.id)
    return found


def make_place(kept: Kept, settings: Settings, place: Path) -> None:
    """Make an empty place for the dump of a container, with what a restore compares.

    Raises:
        OcihookError: if the container's config.json cannot be read.
        OSError: from the file system, a full one included.
    """
    shutil.rmtree(place, ignore_errors=True)  # of an attempt whose agent was killed
    make_directory(place / IMAGES_DIR, within=Path(settings.store_dir).parent)
    facts = json.dumps(to_json(spec_facts(read_config(kept), kept.bundle))).encode()
    replace_file(place / FACTS_NAME, facts, mode=0o600, durable=False)


def begin(kept: Kept, place: Path, *, leave_running: bool = False) -> "subprocess.Popen[bytes]":
    """Call the runtime, which outlives an agent that is killed; CRIU tracks memory if it can (tracking.py)."""
    images = place / IMAGES_DIR
    call = Call.parse(kept.program, [*kept.prefix, "checkpoint"])
    words = ["--image-path", str(images), "--work-path", str(place), "--tcp-established", "--file-locks"]
    words += parent_options(images)
    words += ["--leave-running"] if leave_running else []
    log = place / LOG_NAME
    command = [str(call.program), *call.prefix_with_log(log), "checkpoint", *words, kept.container.id]
    with log.open("ab") as output:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env={"PATH": PATH})


def runtime_at(place: Path) -> Process | None:
    """Return the runtime that dumps into a place, by its command line; None if none does."""
    images = str(place / IMAGES_DIR)
    pids = (int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit())
    found = (Process.find(pid) for pid in pids if images in command_line(pid))
    return next(filter(None, found), None)
