"""A container is dumped by a call of its runtime, into a place below the store: nobody makes an archive of it."""

import json
import os
import shutil
import subprocess
from pathlib import Path

from ocihook.checkpoints.belongings import FACTS_NAME, IMAGES_DIR, Belongings
from ocihook.config import Settings
from ocihook.container.spec import spec_facts
from ocihook.linux import soft_dirty
from ocihook.linux.files import make_directory, replace_file
from ocihook.runtime.call import Call
from ocihook.runtime.containers import Kept
from ocihook.runtime.stop_record import read_config
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
    """Call the runtime, which outlives an agent that is killed.

    CRIU is to track memory in this dump alone, if the kernel can: runtimes say so where an earlier dump is named. There
    is none in /, and ocihook makes one up where it reads the memory itself (memory/clean_pages.py).
    """
    images = place / IMAGES_DIR
    call = Call.parse(kept.program, [*kept.prefix, "checkpoint"])
    words = ["--image-path", str(images), "--work-path", str(place), "--tcp-established", "--file-locks"]
    words += ["--parent-path", os.path.relpath("/", images.resolve())] if soft_dirty.works() else []
    words += ["--leave-running"] if leave_running else []
    log = place / LOG_NAME
    command = [str(call.program), *call.prefix_with_log(log), "checkpoint", *words, kept.container.id]
    with log.open("ab") as output:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env={"PATH": PATH})
