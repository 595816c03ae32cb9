"""An agent to which something happens where memory is read past CRIU.

faulty_agent.py FAULT [FILE]

forgetful: the last run of memory is not read. refused: the kernel does not take the mark of what is written away.
damaged, missing: the inventory of the made-up dump is no inventory, or all of it is gone, when CRIU looks for it.
cut-short, unknown: the same with what it has of the first process.
waiting: CRIU waits where it reads FILE of the made-up dump, until somebody writes what that is: it is in one beside.
full, filled: the disk is, in the middle of the reading; and then it is not, or stays so.
"""

import os
import shutil
import sys
from pathlib import Path
from typing import Any

from integration import patient_agent
from ocihook.criu.parent_images import PARENT_NAME, make_parent
from ocihook.linux.page_scan import scan_private
from ocihook.memory import clean_pages
from ocihook.packs.packing import pack


def _damage(directory: Path, pagemaps: Any) -> None:  # noqa: ANN401 - as the real one takes it
    make_parent(directory, pagemaps)
    (directory / PARENT_NAME / "inventory.img").write_bytes(b"no inventory")


def _lose(directory: Path, pagemaps: Any) -> None:  # noqa: ANN401 - likewise
    make_parent(directory, pagemaps)
    shutil.rmtree(directory / PARENT_NAME)


def _cut_short(directory: Path, pagemaps: Any) -> None:  # noqa: ANN401 - likewise
    make_parent(directory, pagemaps)
    path = directory / PARENT_NAME / FIRST
    path.write_bytes(path.read_bytes()[:-3])


def _forget(directory: Path, pagemaps: Any) -> None:  # noqa: ANN401 - likewise
    make_parent(directory, pagemaps)
    (directory / PARENT_NAME / FIRST).unlink()


def _have_it_wait(directory: Path, pagemaps: Any) -> None:  # noqa: ANN401 - likewise
    make_parent(directory, pagemaps)
    path = directory / PARENT_NAME / sys.argv[2]
    path.rename(path.with_suffix(".content"))
    os.mkfifo(path)


def _fill(sources: Any, directory: Path, **options: Any) -> Any:  # noqa: ANN401 - likewise
    filler = directory.resolve().joinpath("../../filler").resolve()
    space = os.statvfs(directory)
    with filler.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, space.f_bavail * space.f_frsize - LEFT_BYTES)
    try:
        return pack(sources, directory, **options)
    finally:
        if "filled" not in sys.argv:
            filler.unlink()


LEFT_BYTES = 16 << 20
FIRST = "pagemap-1.img"
FAULTS = {
    "forgetful": ("scan_private", lambda pid: scan_private(pid)[:-1]),
    "refused": ("_CLEAR_SOFT_DIRTY", "no number"),
    "damaged": ("make_parent", _damage),
    "missing": ("make_parent", _lose),
    "cut-short": ("make_parent", _cut_short),
    "unknown": ("make_parent", _forget),
    "waiting": ("make_parent", _have_it_wait),
    "full": ("pack", _fill),
    "filled": ("pack", _fill),
}

setattr(clean_pages, *FAULTS[sys.argv[1]])
patient_agent.main()
