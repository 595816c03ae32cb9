"""An agent to which something happens where memory is read past CRIU.

faulty_agent.py FAULT

forgetful: the last run of memory is not read. refused: the kernel does not take the mark of what is written away.
damaged, missing: the inventory of the made-up dump is no inventory, or all of it is gone, when CRIU looks for it.
full: the disk is, in the middle of the reading.
"""

import errno
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


def _fill(*arguments: Any, **options: Any) -> None:  # noqa: ANN401 - likewise
    pack(*arguments, **options)
    raise OSError(errno.ENOSPC, "No space left on device")


FAULTS = {
    "forgetful": ("scan_private", lambda pid: scan_private(pid)[:-1]),
    "refused": ("_CLEAR_SOFT_DIRTY", "no number"),
    "damaged": ("make_parent", _damage),
    "missing": ("make_parent", _lose),
    "full": ("pack", _fill),
}

setattr(clean_pages, *FAULTS[sys.argv[1]])
patient_agent.main()
